"""Slips in logical names: a name without a rule that is one slip of the keyboard away from a name that is known.

A name without a rule leaves its dim whole, which is what most such names are for. So only near misses are told, and as
warnings: two letters exchanged, one missing or too many, one for its neighbor on the keyboard or another vowel, the
plural of a name. Words that differ otherwise are different words (`patch` and `batch`, `state` and `stage`), and so are
names that differ in a number or in a short word between underscores (`seq_q`, `seq_k`), the singular of a name (`head`
beside `heads`), and two names of one tensor. Of a word of two or three letters only a letter typed twice (`fff`), and
of three letters two exchanged ones (`sqe`), are near misses.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations, pairwise

from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.spec import Spec

Use = tuple[str, Spec]  # who says it ("shard(x) at train.py:12"), and what

_LONG = 8  # letters of a word from which on two slips are as likely as another word
_SHORT = 4  # letters of a word below which one letter makes another word
_SHORTEST = 2  # letters of a word below which every other word is another name
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_CONFUSED = {frozenset(pair) for row in _ROWS for pair in pairwise(row)} | {
    frozenset(pair) for pair in combinations("aeiou", 2)
}


def warn_of_slip(who: str, spec: Spec, mesh: Mesh) -> None:
    """Warn of names in a spec that the rules of its mesh nearly have; one annotation on its own.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     warn_of_slip("shard(x)", Spec.of("btach embed"), Mesh.abstract(data=2, rules={"batch": "data"}))
        >>> print(told[0].message)
        shard(x) with spec 'btach embed': 'btach' has no rule and stays whole; did you mean 'batch'?
        A rule says so on purpose: rules={'btach': None}
    """
    if mesh.rules:
        for slip in _slips(spec, frozenset(mesh.rules), frozenset(mesh.rules)):
            _warn(who, spec, *slip)


def warn_of_slips(uses: Iterable[Use], mesh: Mesh) -> None:
    """Warn of names in the specs of one program that are said once and are near to one with a rule, or said oftener.

    A name that says its axes itself (`ff@tensor`) is known by that.
    """
    uses = list(uses)
    said = Counter(name for _, spec in uses for name in set(spec.names) if name)
    known = {name for name, n in said.items() if n > 1} | set(mesh.rules)
    with_axes = {f.name for _, spec in uses for f in spec.factors if f.axes and f.name}
    for who, spec in uses:
        for slip in _slips(spec, frozenset(known), frozenset(known | with_axes)):
            _warn(who, spec, *slip)


def _warn(who: str, spec: Spec, name: str, near: str) -> None:
    warnings.warn(
        f"{who} with spec {str(spec)!r}: {name!r} has no rule and stays whole; did you mean {near!r}?\n"
        f"A rule says so on purpose: rules={{{name!r}: None}}",
        stacklevel=4,
    )


@lru_cache(maxsize=4096)
def _slips(spec: Spec, known: frozenset[str], neighbors: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Names of a spec that are not known, each with its neighbor."""
    here = set(spec.names)
    names = dict.fromkeys(f.name for f in spec.factors if f.name and f.axes is None and f.name not in known)
    pairs = ((name, _nearest(name, sorted(neighbors - here))) for name in names)
    return tuple((name, near) for name, near in pairs if near is not None)


def _nearest(name: str, among: Iterable[str]) -> str | None:
    return next((other for other in among if is_near(name, other)), None)


def is_near(name: str, intended: str) -> bool:
    """Returns whether `name` looks like the `intended` one, mistyped.

    Example:
        >>> [is_near("batch", x) for x in ("btach", "bacth", "batc", "baatch", "batcj", "Batch")]
        [True, True, True, True, True, True]
        >>> [is_near(*pair) for pair in (("patch", "batch"), ("state", "stage"), ("model", "modes"))]
        [False, False, False]
        >>> is_near("kv_heads", "kvheads"), is_near("sequence", "seqeunec"), is_near("fff", "ff")
        (True, True, True)
        >>> is_near("batches", "batch"), is_near("head", "heads"), is_near("seq2", "seq")
        (True, False, False)
        >>> [is_near(*pair) for pair in (("seq_q", "seq_k"), ("dim1", "dim2"), ("ff", "fc"), ("embed", "hidden"))]
        [False, False, False, False]
    """
    if name == intended:
        return False
    name, intended = name.lower(), intended.lower()
    if name.replace("_", "") == intended.replace("_", ""):
        return True
    left, right = list(_words(name)), list(_words(intended))
    if len(left) != len(right):
        return False
    differing = [(x, y) for x, y in zip(left, right, strict=True) if x != y]
    return len(differing) == 1 and _mistyped(*differing[0])


def _words(name: str) -> Iterator[str]:
    """The words and numbers of a name."""
    return (m[0] for m in re.finditer(r"\d+|[^\W\d_]+", name))


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


def _wrong(x: str, y: str) -> int:
    return 0 if x == y else 1 if frozenset((x, y)) in _CONFUSED else 3


def _slips_between(a: str, b: str) -> int:
    """The fewest slips that make `b` of `a` (optimal string alignment); a letter that no slip explains counts three."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            best = min(row[j - 1] + 1, rows[-1][j] + 1, rows[-1][j - 1] + _wrong(x, y))
            if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
