"""Why a function is compiled again: what two calls differ in, in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.calls.ambient import NAMES
from shardlib.calls.flat import FlatCall, Static, is_number, is_tensor, names_of
from shardlib.calls.reach import Reach
from shardlib.tensors.tensor import ShardedTensor, short_dtype


@dataclass(frozen=True)
class Seen:
    """One call as a reader sees it."""

    mesh: Any
    ambient: tuple[Any, ...]
    tree: Any
    leaves: Mapping[str, str]
    known: tuple[Any, ...]


def seen(fn: Callable[..., Any], call: FlatCall, key: Any, looked: Mapping[int, Any]) -> Seen:
    """A call in words; numbers count where the function looked at them."""
    mesh, modes, known = key
    leaves = call.leaves
    names = names_of(fn, call, range(len(leaves)))
    words = {
        name: _show(x) for i, (name, x) in enumerate(zip(names, leaves, strict=True)) if not is_number(x) or i in looked
    }
    return Seen(mesh, modes, call.tree, words, known)


def difference(old: Seen, new: Seen) -> dict[str, str]:
    """What changed: a sentence by its subject."""
    if old.mesh != new.mesh:
        return {"the mesh": f" was {old.mesh}, is {new.mesh}"}
    modes = {
        n: f": {_word(a)} -> {_word(b)}" for n, a, b in zip(NAMES, old.ambient, new.ambient, strict=True) if a != b
    }
    if modes:
        return modes
    if old.tree != new.tree:
        return {"the arguments have another structure": ""}
    changes = {
        name: f": {old.leaves[name]} -> {now}" for name, now in new.leaves.items() if old.leaves.get(name, now) != now
    }
    if changes:
        return changes
    facts = [(a, b) for a, b in zip(old.known, new.known, strict=False) if a != b]
    if facts and isinstance(facts[0][0], Reach) and isinstance(facts[0][1], Reach):
        return dict.fromkeys(dict.fromkeys(facts[0][1].replaced(facts[0][0])), " is another function now")
    more = f" ({facts[0][0]!r} -> {facts[0][1]!r})" if facts else ""
    return {f"what the function closes over, or its arguments hold{more}": ""}


def _word(x: Any) -> str:
    return os.fsdecode(x) if isinstance(x, bytes) else str(x)


def _show(x: Any) -> str:
    if isinstance(x, Static):
        return repr(x.value)
    if not is_tensor(x):
        return repr(x) if isinstance(x, int | float | str | bool | None) else f"a {type(x).__name__}"
    where = f" [{x.sharding}]" if isinstance(x, ShardedTensor) else ""
    strides = "" if not isinstance(x, torch.Tensor) or x.is_contiguous() else f" with strides {list(x.stride())}"
    grad = " requires_grad" if getattr(x, "requires_grad", False) else ""
    return f"{short_dtype(x.dtype)}{list(x.shape)}{where}{strides}{grad}"
