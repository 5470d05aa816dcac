"""Copies ShardedTensors in this process, and pickles them to files.

A file holds the axes of a tensor's mesh and this process's shards. On virtual devices these are all shards, so that any
process can read the file; a rank reads the file that it wrote. The tensor is restored onto the current mesh if that has
the same axes, otherwise onto its own. `torch.load(weights_only=True)` takes such files, since they hold only tensors,
text and numbers, unless a tensor has other attributes. In a file a view is a tensor of its own; `copy.deepcopy` keeps
shared memory.
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
from shardlib.core.torch_internals.torch_private import IS_PARAMETER
from shardlib.distributed import world
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import FactorNames
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.local_shards import device_of, refuse_misfits, split_into_owned_shards
from shardlib.tensor.sharded_tensor import PLACEMENT_ATTRIBUTES, REGATHER, ShardedTensor, typeof, user_attributes, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Memory


def reduce_tensor(x: ShardedTensor) -> tuple[Any, ...]:
    """Returns the function and arguments by which pickle restores `x`."""
    form = x._form
    rank = form.mesh.rank if form.mesh.kind == "distributed" else None
    state = str(form.layout), str(form.mesh), form.names, form.strides, form.offset
    is_param = bool(x.__dict__.get(IS_PARAMETER))
    return restored, (x._locals, *state, rank, x.requires_grad, is_param, user_attributes(x))


def restored(
    pieces: tuple[torch.Tensor, ...],
    layout: str,
    mesh: str,
    names: FactorNames,
    strides: tuple[int, ...],
    offset: int,
    rank: int | None,
    requires_grad: bool,
    is_param: bool,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> ShardedTensor:
    """Restores a pickled tensor; raises `ShardingError` if its mesh does not fit this process."""
    saved = Mesh.parse(_abstract(mesh))
    target = _target_mesh(mesh, saved, rank)
    parsed = Layout.parse(layout, saved.axes)
    names = tuple(tuple(dim) for dim in names)
    if rank is None and target.kind == "distributed":
        whole = parsed.gather(list(zip(saved.all_coords(), pieces, strict=True)))
        pieces = split_into_owned_shards(whole, parsed, target, donated=True)
    refuse_misfits(f"a stored tensor of layout {layout}", pieces, parsed, target)
    form = Form.intern(parsed, target, pieces[0].dtype, device_of(pieces, target), names, tuple(strides), offset)
    return _set_attributes(wrap(form, tuple(pieces)), requires_grad, is_param, attributes)


def _target_mesh(text: str, saved: Mesh, rank: int | None) -> Mesh:
    """Returns the mesh of a restored tensor: on the current mesh its stage, if there is one, else all stages."""
    mesh = current_mesh()
    same = mesh is not None and mesh.kind != "abstract" and list(mesh.axes.items()) == list(saved.axes.items())
    faults = []
    if rank is not None:
        if world.kind() != "distributed":
            faults.append(f"it is the shard of rank {rank}, this process is no rank")
        elif world.rank() != rank:
            faults.append(f"it is the shard of rank {rank}, this is rank {world.rank()}")
        elif mesh is not None and (not same or list(mesh.shape.items()) != list(saved.shape.items())):
            faults.append(f"the current mesh is {mesh}")
    elif not same and world.kind() == "distributed":
        faults.append(f"it has {saved.stage_size} virtual devices, the current mesh is {mesh}")
    if faults:
        raise ShardingError(
            f"a stored tensor on {text} cannot be read here",
            faults,
            rule="a tensor comes back onto a mesh with the axes that it was stored with, on a rank its own shard",
            remedy="read it inside `with` such a mesh, or store x.full_tensor()",
        )
    if not same or mesh is None:
        return Mesh.parse(text)
    has_stage = mesh.stage_axis is not None and saved.stage is not None and saved.stage < mesh.stages
    return mesh.on_stage(saved.stage) if has_stage and mesh.stage is None else mesh


def _abstract(text: str) -> str:
    return text if text.startswith("Mesh.abstract") else text.replace("Mesh(", "Mesh.abstract(", 1)


def deep_copy(x: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """Copies shards, gradient and attributes for `copy.deepcopy`; tensors that shared memory still share it."""
    if id(x) in memo:
        copy_of_x: ShardedTensor = memo[id(x)]
        return copy_of_x
    if not x.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    if is_tracing():
        copied: Any = x.detach().clone()
        memo[id(x)] = copied
        return _set_attributes(copied, x.requires_grad, bool(x.__dict__.get(IS_PARAMETER)), {})
    out = wrap(x._form, copy.deepcopy(x._locals, memo))
    memo[id(x)] = out
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        if id(memory) not in memo:
            memo[id(memory)] = Memory(memory.form, copy.deepcopy(memory.locals, memo))
        memo[id(memory)].join(out, x.__dict__["_path"])
    is_param = bool(x.__dict__.get(IS_PARAMETER))  # in torch, a deep copy of a parameter has no attributes
    kept = {k: y for k, y in user_attributes(x).items() if k in (*PLACEMENT_ATTRIBUTES, REGATHER) or not is_param}
    _set_attributes(out, x.requires_grad, is_param, copy.deepcopy(kept, memo))
    if x.grad is not None and not is_param:  # nor a gradient
        out.grad = copy.deepcopy(x.grad, memo)
    return out


def _set_attributes(
    x: ShardedTensor, requires_grad: bool, is_param: bool, attributes: Mapping[str, Any]
) -> ShardedTensor:
    if requires_grad:
        x.requires_grad_()
    if is_param:
        setattr(x, IS_PARAMETER, True)
    x.__dict__.update(attributes)
    return x


# The second entry reads files from a time when this module was `shardlib.tensors.persist`.
torch.serialization.add_safe_globals([restored, (restored, "shardlib.tensors.persist.restored")])


def reduce_for_process(x: ShardedTensor) -> tuple[Any, ...]:
    """Reduces `x` for another process; raises `ShardingError`, as torch does, for a tensor with history."""
    if x.requires_grad and not x.is_leaf:
        raise ShardingError(
            f"{typeof(x)} goes to another process, and is no leaf",
            rule="autograd does not cross processes",
            remedy="send x.detach()",
        )
    return reduce_tensor(x)


tensor_hooks.deep_copy, tensor_hooks.reduce_tensor = deep_copy, reduce_tensor
ForkingPickler.register(ShardedTensor, reduce_for_process)
