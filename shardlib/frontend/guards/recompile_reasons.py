"""Explains why a function is compiled again: how two calls differ, and how to avoid it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardlib.core.errors import public
from shardlib.frontend.guards.code_refs import CodeReads
from shardlib.frontend.guards.flatten_call import FlatCall, Static, is_number, is_tensor, leaf_names
from shardlib.frontend.guards.place_names import format_place, name_tensor_keys
from shardlib.frontend.guards.torch_modes import AMBIENT_NAMES
from shardlib.frontend.guards.value_kinds import Description
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import short_dtype

if TYPE_CHECKING:
    from shardlib.frontend.side_effects.snapshot import Snapshot


OFTEN = 8  # programs for one reason before a warning


@public
class RetraceWarning(UserWarning):
    """A function, or an op outside `jit`, is compiled again and again."""


@dataclass(frozen=True)
class HeldValues:
    """The values that a snapshot describes, place by place; `roots` and `tensors` name the places."""

    described: Sequence[tuple[tuple[Any, ...], Any, Description | None]]
    roots: Sequence[str]
    tensors: Sequence[tuple[Any, ...]]

    @cached_property
    def by_name(self) -> Mapping[tuple[Any, ...], Sequence[Description]]:
        """Maps places to descriptions of values; tensor keys have names, which are the same in all calls."""
        values: dict[tuple[Any, ...], list[Description]] = {}
        for at, value, words in self.described:
            values.setdefault(name_tensor_keys(at, self.roots, self.tensors), []).append(words or (repr(value), None))
        return values


class Change(NamedTuple):
    """The predicate of a sentence about a change, and a remedy."""

    text: str
    remedy: str


@dataclass(frozen=True)
class CallRecord:
    """A readable record of one call.

    `leaves` describes the leaves by name, `held` the values that the call reached, and `left` these values after the
    trace. `inputs` are the places of numbers whose values the trace did not read.
    """

    mesh: Any
    ambient: tuple[Any, ...]
    tree: Any
    leaves: Mapping[str, str]
    held: HeldValues
    left: HeldValues
    roots: Sequence[str]
    facts: tuple[Any, ...]
    inputs: Collection[tuple[Any, ...]]


def record_call(
    fn: Callable[..., Any],
    call: FlatCall,
    key: Any,
    looked: Collection[int],
    before: Snapshot,
    after: Snapshot,
) -> CallRecord:
    """Records a call; a number counts only if it is among the `looked` leaves, whose values the trace read."""
    mesh, modes, facts = key
    roots = call.state.roots
    leaves = call.leaves
    names = leaf_names(fn, call, range(len(leaves)))
    words = {
        name: _describe_leaf(x)
        for i, (name, x) in enumerate(zip(names, leaves, strict=True))
        if not is_number(x) or i in looked
    }
    first = len(leaves) - len(before.numbers)
    inputs = {
        name_tensor_keys(at, roots, before.places)
        for i, (_, at) in enumerate(before.numbers.values(), first)
        if i not in looked
    }
    held, left = (HeldValues(x.described, roots, x.places) for x in (before, after))
    return CallRecord(mesh, modes, call.tree, words, held, left, roots, facts, inputs)


def compare_calls(old: CallRecord, new: CallRecord) -> dict[str, Change]:
    """Returns the changes between two calls, by subject."""
    if old.mesh != new.mesh:
        return {"the mesh": Change(f" was {old.mesh}, is {new.mesh}", "give each mesh a jitted function of its own")}
    modes = [(name, a, b) for name, a, b in zip(AMBIENT_NAMES, old.ambient, new.ambient, strict=True) if a != b]
    if modes:
        remedy = "give each mode a jitted function of its own"
        return {name: Change(f": {_to_text(a)} -> {_to_text(b)}", remedy) for name, a, b in modes}
    if old.tree != new.tree:
        change = Change(_compare_leaves(old.roots, new.roots), "pass the same structure in every call")
        return {"the arguments have another structure": change}
    changes = {
        name: Change(f": {old.leaves[name]} -> {now}", _PASS_PYTHON_NUMBER if now.startswith(_NUMPY) else _PAD)
        for name, now in new.leaves.items()
        if old.leaves.get(name, now) != now
    }
    for name in (*new.leaves, *old.leaves):
        if name.endswith(".grad") and (name in old.leaves) != (name in new.leaves):
            changes[name] = Change(
                f": {'a tensor -> None' if name in old.leaves else 'None -> a tensor'}", _KEEP_GRADIENTS
            )
    a, b = next(((a, b) for a, b in zip(old.facts, new.facts, strict=False) if a != b), (None, None))
    if isinstance(a, CodeReads) and isinstance(b, CodeReads) and (replaced := b.replaced(a)):
        return changes | dict.fromkeys(replaced, Change(" is another function now", _CREATE_ONCE))
    other = "what the function closes over, or its arguments hold"
    held = dict(_compare_held(old, new))
    described = {name.partition(", read in ")[0] for name in held if name not in changes}
    changes = {name: change for name, change in changes.items() if name not in described}
    sentences = changes | held | changes or {other: Change(" is another", _PASS_ARGUMENT)}  # in this order
    return dict(sorted(sentences.items(), key=lambda item: _is_consequence(*item)))


def _is_consequence(name: str, change: Change) -> bool:
    """Returns whether a change usually follows from another one: a gradient, a new or removed place."""
    return name.endswith(".grad") or change.text in (_NEW, _GONE)


def join_first(sentences: Sequence[str]) -> str:
    """Joins the first few sentences, and says how many more there are."""
    more = f" and {len(sentences) - _FEW} more" if len(sentences) > _FEW else ""
    return "; ".join(sentences[:_FEW]) + more


def _compare_leaves(old: Sequence[str], new: Sequence[str]) -> str:
    """Lists the leaves of the arguments that are new or gone."""
    more, less = ([name for name in a if name not in b] for a, b in ((new, old), (old, new)))
    text = ", ".join([f"with {join_first(more)}"] * bool(more) + [f"without {join_first(less)}"] * bool(less))
    return f": now {text}" if text else ""


def _compare_held(old: CallRecord, new: CallRecord) -> Iterator[tuple[str, Change]]:
    """Yields the changes in variables and objects, except inside objects that were replaced, added or removed."""
    was_there, is_there = old.left.by_name, new.held.by_name
    whole = {at for at in {**is_there, **was_there} if at and bool(was_there.get(at)) != bool(is_there.get(at))}
    for at in dict.fromkeys((*is_there, *was_there)):
        a, b = list(was_there.get(at, ())), list(is_there.get(at, ()))
        is_inside = any(at[:n] in whole for n in range(1, len(at)))
        if a == b or (at in old.inputs and at in new.inputs) or is_inside:
            continue
        name = format_place(at, new.roots) if at else "a hook"
        where = describe_read(new.facts, at)
        if not a or not b:
            yield name + where, Change(_NEW if b else _GONE, _CREATE_ONCE)
            continue
        differing = (pair for pair in zip((*a, *a), (*b, *b), strict=False) if pair[0] != pair[1])
        (was, _), (now, _) = next(differing, (a[-1], b[-1]))  # without a pair, one list is longer
        if was == now:
            whole.add(at)
            yield name + where, Change(f" is another one now ({now})", _CREATE_ONCE)
        else:
            remedy = _PASS_ARGUMENT
            if "param_groups" in at:
                remedy = _HOLD_AS_TENSOR
            elif now.startswith("a list of "):
                remedy = _MOVE_RECORD
            yield name + where, Change(f": {was} -> {now}", remedy)


def describe_read(facts: Sequence[Any], at: tuple[Any, ...]) -> str:
    """Returns a text with the line on which the function reads a variable; `facts` are those of a call's key."""
    if not at or isinstance(at[0], int):
        return ""
    root, _, attribute = at[0].partition(".")  # `Class.attribute`, or a variable
    attribute = attribute or (at[2] if at[1:2] == (".",) else "")
    lines = (x.line(root, attribute) for x in facts if isinstance(x, CodeReads))
    code, line = next(filter(None, lines), (None, 0))
    return f", read in {code.co_name} at {Path(code.co_filename).name}:{line}" if code else ""


def _to_text(x: Any) -> str:
    return os.fsdecode(x) if isinstance(x, bytes) else str(x)


def _describe_leaf(x: Any) -> str:
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
_PAD = "pad to a few shapes; keep a number out of Python's decisions, so that it only enters arithmetic"
_NUMPY = "numpy's "
_PASS_PYTHON_NUMBER = "pass float(x) or int(x): a number of Python's is an input, one of numpy's a constant"
_PASS_ARGUMENT = "pass what changes as an argument, where a number is an input, or hold it as a tensor: torch.tensor(x)"
_MOVE_RECORD = (
    "keep a growing record in a variable of the loop, or in an object of its own, not in an object that the function "
    "reads"
)
_HOLD_AS_TENSOR = (
    "hold what a scheduler changes as a tensor, which it fills (lr=torch.tensor(0.1), foreach=False); or call "
    "opt.step() behind the jitted function, which then returns the loss"
)
_KEEP_GRADIENTS = "set gradients to None before every call (zero_grad does), or never"
_CREATE_ONCE = "make it once, outside the loop, and keep it"
