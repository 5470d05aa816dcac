"""What a call writes to, and what else shows that memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.numpy_bridge import share_an_element
from shardlib.jit.call.inputs import Input
from shardlib.tensor.sharded_tensor import ShardedTensor


def refuse_overlaps(
    name: str, inputs: Sequence[Input], changed: Set[int], arrays: Sequence[tuple[int, int]], leaves: Sequence[Any]
) -> None:
    """Raise `ShardingError` where an input whose leaf is `changed` shares memory with another, or with an array.

    On one device a write would show in all that share it.
    """
    memory = [*(_memory(leaves[given.leaf]) for given in inputs), *arrays]
    if all(a[1] <= b[0] for a, b in pairwise(sorted(memory))):
        return
    written = [given.leaf in changed for given in inputs] + [False] * len(arrays)
    spans = [(*span, min(i, len(inputs)), written[i]) for i, span in enumerate(memory)]
    names = [*(given.name for given in inputs), "a numpy array that it closes over"]
    tensors = [leaves[given.leaf] for given in inputs]
    wrong = []
    for group in _overlapping(spans):
        written_to = [i for i, is_written in group if is_written]
        found = {k for i in written_to for j, _ in group if i != j and _share(tensors, i, j) for k in (i, j)}
        wrong += [f"{' and '.join(names[i] for i in sorted(found))} share memory"] if found else []
    if wrong:
        raise ShardingError(
            f"{name} writes to memory that several of its arguments show",
            wrong,
            rule="a function that writes to an argument sees its memory once",
            remedy="pass the tensor once (make views of it inside), or pass x.clone()",
        )


def _overlapping(spans: Iterable[tuple[int, int, int, bool]]) -> list[list[tuple[int, bool]]]:
    """What stands behind the bounds of each, together where they overlap."""
    found: list[list[tuple[int, bool]]] = []
    upto = 0
    for start, end, *item in sorted(spans):
        if start == end:
            continue
        if start >= upto:
            found.append([])
        found[-1].append((item[0], bool(item[1])))
        upto = max(upto, end)
    return found


def _share(tensors: Sequence[torch.Tensor], i: int, j: int) -> bool:
    """Whether two inputs whose bounds overlap have an element in common; `chunk(2, -1)` gives some that have none."""
    return max(i, j) == len(tensors) or share_an_element(
        tensors[i], tensors[j], lambda x: 1 + _memory(x)[0] % (1 << _ADDRESS)
    )


def _memory(x: torch.Tensor) -> tuple[int, int]:
    """Where the memory of an input begins and ends; a ShardedTensor is where it would be in one that it shares."""
    if type(x) is ShardedTensor:
        start = (id(x.__dict__.get("_memory") or x) << _ADDRESS) + int(x.storage_offset()) * x.itemsize
    else:
        start = x.data_ptr()
    steps = sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (steps + 1) * x.itemsize if x.numel() else start


_ADDRESS = 64  # bits: no memory is larger
