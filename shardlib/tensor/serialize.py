"""Copies of ShardedTensors, in this process and in files.

A tensor is stored with its mesh, by axes, and with the pieces that this process holds: all of them on virtual devices,
so that such a file can be read anywhere; one on a rank, so that each rank reads what it has written. It comes back onto
the current mesh where that has the same axes, otherwise onto its own. `torch.load(weights_only=True)` takes such files,
since nothing but tensors, text and numbers is stored, unless somebody gave a tensor attributes of other kinds. In a
file a view is a tensor of its own; `copy.deepcopy` keeps what shares memory together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any

import torch

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import IS_PARAMETER
from shardlib.distributed import world
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import Names
from shardlib.tensor.hooks import above
from shardlib.tensor.local_shards import owned, refuse_misfits
from shardlib.tensor.sharded_tensor import HOMES, REGATHER, ShardedTensor, marks, typeof, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Memory


def reduced(x: ShardedTensor) -> tuple[Any, ...]:
    """What pickle needs to make `x` again."""
    form = x._form
    rank = form.mesh.rank if form.mesh.kind == "distributed" else None
    written = str(form.layout), str(form.mesh), form.names, form.strides, form.offset
    is_param = bool(x.__dict__.get(IS_PARAMETER))
    return restored, (x._locals, *written, rank, x.requires_grad, is_param, marks(x))


def restored(
    pieces: tuple[torch.Tensor, ...],
    layout: str,
    mesh: str,
    names: Names,
    strides: tuple[int, ...],
    offset: int,
    rank: int | None,
    requires_grad: bool,
    is_param: bool,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> ShardedTensor:
    """The tensor that `reduced` wrote down; raises `ShardingError` where its mesh cannot be had here."""
    saved = Mesh.abstract(Mesh.parse(_abstract(mesh)).axes)
    here = _mesh(mesh, saved, rank)
    at = Layout.parse(layout, saved.axes)
    names = tuple(tuple(dim) for dim in names)
    if rank is None and here.kind == "distributed":
        whole = at.gather(list(zip(saved.all_coords(), pieces, strict=True)))
        pieces = owned(whole, at, here, donated=True)
    refuse_misfits(f"a stored tensor of layout {layout}", pieces, at, here)
    form = Form.of(at, here, pieces[0].dtype, pieces[0].device, names, tuple(strides), offset)
    return _finished(wrap(form, tuple(pieces)), requires_grad, is_param, attributes)


def _mesh(text: str, saved: Mesh, rank: int | None) -> Mesh:
    """The mesh that a stored tensor comes back to."""
    mesh = current_mesh()
    same = mesh is not None and mesh.kind != "abstract" and list(mesh.axes.items()) == list(saved.axes.items())
    faults = []
    if rank is not None:
        if world.kind() != "distributed":
            faults.append(f"it is the piece of rank {rank}, this process is no rank")
        elif world.rank() != rank:
            faults.append(f"it is the piece of rank {rank}, this is rank {world.rank()}")
        elif mesh is not None and not same:
            faults.append(f"the current mesh is {mesh}")
    elif not same and world.kind() == "distributed":
        faults.append(f"it has {saved.size} virtual devices, the current mesh is {mesh}")
    if faults:
        raise ShardingError(
            f"a stored tensor on {text} cannot be read here",
            faults,
            rule="a tensor comes back onto a mesh with the axes that it was stored with, on a rank its own piece",
            remedy="read it inside `with` such a mesh, or store x.full_tensor()",
        )
    return mesh if same and mesh is not None else Mesh.parse(text)


def _abstract(text: str) -> str:
    return text if text.startswith("Mesh.abstract") else text.replace("Mesh(", "Mesh.abstract(", 1)


def deep_copy(x: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """For `copy.deepcopy`: pieces of its own, its gradient's and its attributes too; what shared memory shares it."""
    if id(x) in memo:
        known: ShardedTensor = memo[id(x)]
        return known
    if not x.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    if is_tracing():
        copied: Any = x.detach().clone()
        memo[id(x)] = copied
        return _finished(copied, x.requires_grad, bool(x.__dict__.get(IS_PARAMETER)), {})
    out = wrap(x._form, copy.deepcopy(x._locals, memo))
    memo[id(x)] = out
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        if id(memory) not in memo:
            memo[id(memory)] = Memory(memory.form, copy.deepcopy(memory.locals, memo))
        memo[id(memory)].join(out, x.__dict__["_path"])
    is_param = bool(x.__dict__.get(IS_PARAMETER))  # a deep copy of a parameter has no attributes, in torch
    kept = {k: y for k, y in marks(x).items() if k in (*HOMES, REGATHER) or not is_param}
    _finished(out, x.requires_grad, is_param, copy.deepcopy(kept, memo))
    if x.grad is not None and not is_param:  # nor a gradient
        out.grad = copy.deepcopy(x.grad, memo)
    return out


def _finished(x: ShardedTensor, requires_grad: bool, is_param: bool, attributes: Mapping[str, Any]) -> ShardedTensor:
    if requires_grad:
        x.requires_grad_()
    if is_param:
        setattr(x, IS_PARAMETER, True)
    x.__dict__.update(attributes)
    return x


# The second entry reads files that were written when this module was `shardlib.tensors.persist`.
torch.serialization.add_safe_globals([restored, (restored, "shardlib.tensors.persist.restored")])


def sent(x: ShardedTensor) -> tuple[Any, ...]:
    """What another process needs to make `x` again; raises `ShardingError`, as torch does, where history is lost."""
    if x.requires_grad and not x.is_leaf:
        raise ShardingError(
            f"{typeof(x)} goes to another process, and is no leaf",
            rule="autograd does not cross processes",
            remedy="send x.detach()",
        )
    return reduced(x)


above.deep_copy, above.reduced = deep_copy, reduced
ForkingPickler.register(ShardedTensor, sent)
