"""Says why a function is compiled again: how two calls differ, and what would help."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardlib.core.errors import public
from shardlib.frontend.guards.code_refs import Reach
from shardlib.frontend.guards.flatten_call import FlatCall, Static, is_number, is_tensor, names_of
from shardlib.frontend.guards.place_names import name_of, settled
from shardlib.frontend.guards.torch_modes import NAMES
from shardlib.frontend.guards.value_kinds import Held
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import short_dtype

if TYPE_CHECKING:
    from shardlib.frontend.side_effects.snapshot import Snapshot


OFTEN = 8  # programs for one reason, from which on it is said


@public
class RetraceWarning(UserWarning):
    """A function, or an op outside `jit`, is compiled again and again."""


@dataclass(frozen=True)
class Holdings:
    """The values that a snapshot describes, place by place; `roots` and `tensors` name the places."""

    described: Sequence[tuple[tuple[Any, ...], Any, Held | None]]
    roots: Sequence[str]
    tensors: Sequence[tuple[Any, ...]]

    @cached_property
    def by_name(self) -> Mapping[tuple[Any, ...], Sequence[Held]]:
        """Maps names to values; a key that is a tensor has the name of that tensor, which holds in all calls."""
        values: dict[tuple[Any, ...], list[Held]] = {}
        for at, value, words in self.described:
            values.setdefault(settled(at, self.roots, self.tensors), []).append(words or (repr(value), None))
        return values


class Change(NamedTuple):
    """The rest of a sentence about its subject, and a remedy."""

    text: str
    remedy: str


@dataclass(frozen=True)
class Seen:
    """Describes one call to a reader.

    `held` are the values that it reached, by name, `left` these values after its trace, and `inputs` the names of the
    numbers whose values its trace did not read.
    """

    mesh: Any
    ambient: tuple[Any, ...]
    tree: Any
    leaves: Mapping[str, str]
    held: Holdings
    left: Holdings
    roots: Sequence[str]
    facts: tuple[Any, ...]
    inputs: Collection[tuple[Any, ...]]


def seen(
    fn: Callable[..., Any],
    call: FlatCall,
    key: Any,
    looked: Collection[int],
    before: Snapshot,
    after: Snapshot,
) -> Seen:
    """Describes a call; numbers count where the function looked at them."""
    mesh, modes, facts = key
    roots = call.state.roots
    leaves = call.leaves
    names = names_of(fn, call, range(len(leaves)))
    words = {
        name: _show(x) for i, (name, x) in enumerate(zip(names, leaves, strict=True)) if not is_number(x) or i in looked
    }
    first = len(leaves) - len(before.numbers)
    inputs = {
        settled(at, roots, before.places) for i, (_, at) in enumerate(before.numbers.values(), first) if i not in looked
    }
    held, left = (Holdings(x.described, roots, x.places) for x in (before, after))
    return Seen(mesh, modes, call.tree, words, held, left, roots, facts, inputs)


def difference(old: Seen, new: Seen) -> dict[str, Change]:
    """Returns the changes between two calls: the rest of a sentence, by its subject."""
    if old.mesh != new.mesh:
        return {"the mesh": Change(f" was {old.mesh}, is {new.mesh}", "give each mesh a jitted function of its own")}
    modes = [(n, a, b) for n, a, b in zip(NAMES, old.ambient, new.ambient, strict=True) if a != b]
    if modes:
        remedy = "give each mode a jitted function of its own"
        return {name: Change(f": {_word(a)} -> {_word(b)}", remedy) for name, a, b in modes}
    if old.tree != new.tree:
        change = Change(_structure(old.roots, new.roots), "pass the same structure in every call")
        return {"the arguments have another structure": change}
    changes = {
        name: Change(f": {old.leaves[name]} -> {now}", _PLAIN if now.startswith(_NUMPY) else _LEAF)
        for name, now in new.leaves.items()
        if old.leaves.get(name, now) != now
    }
    for name in (*new.leaves, *old.leaves):
        if name.endswith(".grad") and (name in old.leaves) != (name in new.leaves):
            changes[name] = Change(f": {'a tensor -> None' if name in old.leaves else 'None -> a tensor'}", _GRADIENT)
    a, b = next(((a, b) for a, b in zip(old.facts, new.facts, strict=False) if a != b), (None, None))
    if isinstance(a, Reach) and isinstance(b, Reach) and (replaced := b.replaced(a)):
        return changes | dict.fromkeys(replaced, Change(" is another function now", _ANOTHER))
    other = "what the function closes over, or its arguments hold"
    held = dict(_holdings(old, new))
    described = {name.partition(", read in ")[0] for name in held if name not in changes}
    changes = {name: change for name, change in changes.items() if name not in described}
    sentences = changes | held | changes or {other: Change(" is another", _NUMBER)}  # in this order
    return dict(sorted(sentences.items(), key=lambda item: _follows(*item)))


def _follows(name: str, change: Change) -> bool:
    """Returns whether a change mostly follows from another one: a gradient, a new place."""
    return name.endswith(".grad") or change.text in (_NEW, _GONE)


def listed(sentences: Sequence[str]) -> str:
    """Joins the first few sentences, and says how many more there are."""
    more = f" and {len(sentences) - _FEW} more" if len(sentences) > _FEW else ""
    return "; ".join(sentences[:_FEW]) + more


def _structure(old: Sequence[str], new: Sequence[str]) -> str:
    """Lists the leaves of the arguments that are new or gone."""
    more, less = ([name for name in a if name not in b] for a, b in ((new, old), (old, new)))
    text = ", ".join([f"with {listed(more)}"] * bool(more) + [f"without {listed(less)}"] * bool(less))
    return f": now {text}" if text else ""


def _holdings(old: Seen, new: Seen) -> Iterator[tuple[str, Change]]:
    """Yields the changes in variables and objects; not those inside an object that was replaced, is new or gone."""
    was_there, is_there = old.left.by_name, new.held.by_name
    whole = {at for at in {**is_there, **was_there} if at and bool(was_there.get(at)) != bool(is_there.get(at))}
    for at in dict.fromkeys((*is_there, *was_there)):
        a, b = list(was_there.get(at, ())), list(is_there.get(at, ()))
        is_inside = any(at[:n] in whole for n in range(1, len(at)))
        if a == b or (at in old.inputs and at in new.inputs) or is_inside:
            continue
        name = name_of(at, new.roots) if at else "a hook"
        where = read_at(new.facts, at)
        if not a or not b:
            yield name + where, Change(_NEW if b else _GONE, _ANOTHER)
            continue
        differing = (pair for pair in zip((*a, *a), (*b, *b), strict=False) if pair[0] != pair[1])
        (was, _), (now, _) = next(differing, (a[-1], b[-1]))  # or there are more of the same
        if was == now:
            whole.add(at)
            yield name + where, Change(f" is another one now ({now})", _ANOTHER)
        else:
            remedy = _SETTING if "param_groups" in at else _RECORD if now.startswith("a list of ") else _NUMBER
            yield name + where, Change(f": {was} -> {now}", remedy)


def read_at(facts: Sequence[Any], at: tuple[Any, ...]) -> str:
    """Returns the line on which the function reads a variable, as text; `facts` are those of a call's key."""
    if not at or isinstance(at[0], int):
        return ""
    root, _, attribute = at[0].partition(".")  # of a class
    attribute = attribute or (at[2] if at[1:2] == (".",) else "")
    lines = (x.line(root, attribute) for x in facts if isinstance(x, Reach))
    code, line = next(filter(None, lines), (None, 0))
    return f", read in {code.co_name} at {Path(code.co_filename).name}:{line}" if code else ""


def _word(x: Any) -> str:
    return os.fsdecode(x) if isinstance(x, bytes) else str(x)


def _show(x: Any) -> str:
    if isinstance(x, Static):
        return repr(x.value)
    if type(x).__module__ == "numpy" and not is_tensor(x):
        return f"{_NUMPY}{type(x).__name__} {x}"
    if not is_tensor(x):
        return repr(x) if isinstance(x, int | float | str | bool | None) else f"a {type(x).__name__}"
    where = f" [{x.sharding}]" if isinstance(x, ShardedTensor) else ""
    strides = "" if not isinstance(x, torch.Tensor) or x.is_contiguous() else f" with strides {list(x.stride())}"
    grad = " requires_grad" if getattr(x, "requires_grad", False) else ""
    return f"{short_dtype(x.dtype)}{list(x.shape)}{where}{strides}{grad}"


_FEW = 3
_NEW, _GONE = " is new", " is gone"
_LEAF = "pad to a few shapes; keep a number out of Python's decisions, so that it only enters arithmetic"
_NUMPY = "numpy's "
_PLAIN = "pass float(x) or int(x): a number of Python's is an input, one of numpy's a constant"
_NUMBER = "pass what changes as an argument, where a number is an input, or hold it as a tensor: torch.tensor(x)"
_RECORD = (
    "keep a record that grows in a variable of the loop, or in an object of its own: where it is beside what the "
    "function reads, and other methods read it, the function may do so, too"
)
_SETTING = (
    "hold what a scheduler changes as a tensor, which it fills (lr=torch.tensor(0.1), foreach=False); or call "
    "opt.step() behind the jitted function, which then returns the loss"
)
_GRADIENT = "set gradients to None before every call (zero_grad does), or never"
_ANOTHER = "make it once, outside the loop, and keep it"
