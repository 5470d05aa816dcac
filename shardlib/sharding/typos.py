"""Warns of typos in logical names: a name without a rule that is one slip away from a known name.

A name without a rule leaves its dim unsharded, usually on purpose, so only near misses cause a warning:
* two letters exchanged, one missing or too many, or the plural of a name;
* in a word of two or three letters, a letter typed twice (`fff`), and of three letters two exchanged ones (`sqe`).

Other pairs are different names: `patch` and `batch`, `state` and `stage`, names that differ in a number or in a short
word between underscores (`seq_q`, `seq_k`), the singular of a name (`head` and `heads`), and names of one tensor.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache

from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.spec import Spec

Use = tuple[str, Spec]  # a call ("shard(x) at train.py:12") and its spec

_LONG = 8  # letters; in longer words two slips are as likely as another word
_SHORT = 4  # letters; in shorter words another letter makes another word
_SHORTEST = 2  # letters; a shorter word has no typos


def warn_of_typo(call: str, spec: Spec, mesh: Mesh) -> None:
    """Warns of names in one spec that are typos of names with a rule."""
    if mesh.rules:
        for slip in _slips(spec, frozenset(mesh.rules), frozenset(mesh.rules)):
            _warn(call, spec, *slip)


def warn_of_typos(uses: Iterable[Use], mesh: Mesh) -> None:
    """Warns of names that occur once in the specs of a program and are typos of a name with a rule, or a frequent one.

    A name with axes of its own (`ff@tensor`) is no typo.
    """
    uses = list(uses)
    counts = Counter(name for _, spec in uses for name in set(spec.names) if name)
    established = {name for name, n in counts.items() if n > 1} | set(mesh.rules)
    with_axes = {f.name for _, spec in uses for f in spec.factors if f.axes and f.name}
    for call, spec in uses:
        for slip in _slips(spec, frozenset(established), frozenset(established | with_axes)):
            _warn(call, spec, *slip)


def _warn(call: str, spec: Spec, name: str, near: str) -> None:
    warnings.warn(
        f"{call} with spec {str(spec)!r}: {name!r} has no rule and stays whole; did you mean {near!r}?\n"
        f"A rule says so on purpose: rules={{{name!r}: None}}",
        stacklevel=4,
    )


@lru_cache(maxsize=4096)
def _slips(spec: Spec, established: frozenset[str], intended: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Returns the typos in a spec, each with the name that is meant; names of the same spec are not."""
    own = set(spec.names)
    names = dict.fromkeys(f.name for f in spec.factors if f.name and f.axes is None and f.name not in established)
    pairs = ((name, next((x for x in sorted(intended - own) if is_near(name, x)), None)) for name in names)
    return tuple((name, near) for name, near in pairs if near is not None)


def is_near(name: str, intended: str) -> bool:
    """Returns whether `name` looks like the `intended` one, mistyped."""
    if name == intended:
        return False
    name, intended = name.lower(), intended.lower()
    if name.replace("_", "") == intended.replace("_", ""):
        return True
    left, right = (re.findall(r"\d+|[^\W\d_]+", x) for x in (name, intended))
    if len(left) != len(right):
        return False
    differing = [(x, y) for x, y in zip(left, right, strict=True) if x != y]
    return len(differing) == 1 and _mistyped(*differing[0])


def _mistyped(word: str, intended: str) -> bool:
    lengths = sorted((len(word), len(intended)))
    if word.isdigit() or intended.isdigit() or lengths[0] < _SHORTEST:
        return False
    if word[0] != intended[0] and word[:2] != intended[1::-1]:
        return False  # hands seldom slip at the start
    if lengths[0] < _SHORT - 1 or lengths[1] < _SHORT:
        return _has_bounced(word, intended) or (lengths[0] == _SHORT - 1 and _are_exchanged(word, intended))
    if word in _plurals(intended):
        return True
    return intended not in _plurals(word) and _slips_between(word, intended) <= (2 if lengths[0] >= _LONG else 1)


def _has_bounced(word: str, intended: str) -> bool:
    """Returns whether a word is the intended one with a letter typed twice."""
    return any(word == intended[: i + 1] + intended[i:] for i in range(len(intended)))


def _are_exchanged(word: str, intended: str) -> bool:
    """Returns whether a word is the intended one with two letters exchanged."""
    return sorted(word) == sorted(intended) and _slips_between(word, intended) == 1


def _plurals(word: str) -> tuple[str, ...]:
    return (f"{word}es", f"{word[:-1]}ies", *([] if word.endswith("s") else [f"{word}s"]))


def _slips_between(a: str, b: str) -> float:
    """Counts letters that move, are missing or too many; a replaced letter makes another word."""
    changes = [change for change in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if change[0] != "equal"]
    if any(kind == "replace" for kind, *_ in changes):
        return math.inf
    return max(sum(i2 - i1 for _, i1, i2, _, _ in changes), sum(j2 - j1 for *_, j1, j2 in changes))
