"""Refuses arguments of jitted calls: dual tensors, tensors on other devices, written ones that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from typing import Any

import torch

from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.numpy_bridge import share_an_element
from shardlib.eager.placement_autograd import get_tangent
from shardlib.jit.call.inputs import Input
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.local_shards import is_cpu_scalar
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


def refuse_others_than_functions(fn: Any) -> None:
    """Refuses objects that `jit` cannot wrap, and classes."""
    refused: dict[Any, tuple[str, str]] = {
        staticmethod: ("a staticmethod", "put @staticmethod above @sl.jit"),
        classmethod: ("a classmethod", "jit a function of tensors, and call it in the classmethod"),
        type: (f"a class, {getattr(fn, '__name__', '')}", "jit an object of it, or one of its methods"),
        torch.Tensor: ("a tensor", "pass the function: sl.jit(f)(x), not sl.jit(f(x))"),
    }
    for kind, (name, remedy) in refused.items():
        if isinstance(fn, kind):
            raise ShardingError(f"jit is given {name}", rule="jit takes a function of tensors", remedy=remedy)
    if not callable(fn):
        raise ShardingError(f"jit is given {fn!r}", rule="jit takes a function of tensors")


def refuse_tangents(name: str, leaves: Sequence[Any]) -> None:
    """Refuses dual tensors, whose tangents a program would drop."""
    wrong = [x for x in leaves if isinstance(x, torch.Tensor) and get_tangent(x) is not None]
    if wrong:
        raise ShardingError(
            f"{name} is called with dual tensors of forward-mode AD",
            [typeof(x) for x in wrong],
            rule="a jitted call has a program for its values, and one for its gradients",
            remedy="torch.func.jvp around the call, or inside the function",
        )


def refuse_other_devices(plan: Plan, mesh: Mesh, leaves: list[Any]) -> None:
    """Refuses tensors on other devices than the mesh's; numbers on the CPU are moved."""
    traced = plan.compiled.traced
    device = torch.device(mesh.device).type
    wrong = [
        f"{name} of shape {list(leaves[i].shape)} is on {leaves[i].device}"
        for i, name in zip(traced.input_leaves, traced.input_names, strict=True)
        if i >= 0 and leaves[i].device.type != device
        if isinstance(leaves[i], ShardedTensor) or not is_cpu_scalar(leaves[i])
    ]
    if wrong:
        meta = all(leaves[i].device.type in (device, "meta") for i in traced.input_leaves if i >= 0)
        raise ShardingError(
            f"{plan.name} runs on {mesh}, whose devices are {device}",
            wrong,
            rule="arguments live on the devices of the mesh",
            remedy="meta tensors have no values: plan with them (step.plan(...))"
            if meta
            else f"x.to({device!r}) first, or Mesh(..., device=...)",
        )


# --- writes to memory that several inputs share -----------------------------------------------------------------------


def refuse_overlaps(
    name: str, inputs: Sequence[Input], changed: Set[int], arrays: Sequence[tuple[int, int]], leaves: Sequence[Any]
) -> None:
    """Raises `ShardingError` if an input whose leaf is `changed` shares memory with another, or with an array.

    On one device a write would show in all of them.
    """
    memory = [*(_memory(leaves[x.leaf]) for x in inputs), *arrays]
    if all(a[1] <= b[0] for a, b in pairwise(sorted(memory))):
        return
    written = [x.leaf in changed for x in inputs] + [False] * len(arrays)
    spans = [(*span, min(i, len(inputs)), written[i]) for i, span in enumerate(memory)]
    names = [*(x.name for x in inputs), "a numpy array that it closes over"]
    tensors = [leaves[x.leaf] for x in inputs]
    wrong = []
    for group in _overlapping(spans):
        written_to = [i for i, is_written in group if is_written]
        sharing = {k for i in written_to for j, _ in group if i != j and _share(tensors, i, j) for k in (i, j)}
        wrong += [f"{' and '.join(names[i] for i in sorted(sharing))} share memory"] if sharing else []
    if wrong:
        raise ShardingError(
            f"{name} writes to memory that several of its arguments show",
            wrong,
            rule="a function that writes to an argument sees its memory once",
            remedy="pass the tensor once (make views of it inside), or pass x.clone()",
        )


def _overlapping(spans: Iterable[tuple[int, int, int, bool]]) -> list[list[tuple[int, bool]]]:
    """Groups the items of spans (start, end, *item) that overlap."""
    groups: list[list[tuple[int, bool]]] = []
    upto = 0
    for start, end, *item in sorted(spans):
        if start == end:
            continue
        if start >= upto:
            groups.append([])
        groups[-1].append((item[0], bool(item[1])))
        upto = max(upto, end)
    return groups


def _share(tensors: Sequence[torch.Tensor], i: int, j: int) -> bool:
    """True if two inputs with overlapping bounds have a common element; those of `chunk(2, -1)` have none."""
    return max(i, j) == len(tensors) or share_an_element(
        tensors[i], tensors[j], lambda x: 1 + _memory(x)[0] % (1 << _ADDRESS)
    )


def _memory(x: torch.Tensor) -> tuple[int, int]:
    """Returns the first address and the end of an input's memory; a ShardedTensor gets its place in a virtual one."""
    if type(x) is ShardedTensor:
        start = (id(x.__dict__.get("_memory") or x) << _ADDRESS) + int(x.storage_offset()) * x.itemsize
    else:
        start = x.data_ptr()
    steps = sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (steps + 1) * x.itemsize if x.numel() else start


_ADDRESS = 64  # bits: no memory is larger
