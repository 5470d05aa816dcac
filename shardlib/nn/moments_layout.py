"""Reshards parameters to the layout of their moments for an optimizer's step outside `jit` (ZeRO-1).

Otherwise every op on a parameter and its moments would gather the moments. Parameters and gradients are resharded
together before the step. After the step the new values of the parameters are gathered together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from shardlib.eager.redistribute import reshard_together
from shardlib.jit.optimizer_state import moments_form
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import relocate


class Resharded(NamedTuple):
    """A resharded tensor with its original form and shards; `shards` are the resharded ones."""

    tensor: ShardedTensor
    original_form: Form
    original_shards: tuple[Any, ...]
    shards: tuple[Any, ...]


def reshard(parameters: Iterable[Any]) -> list[Resharded]:
    """Reshards parameters with gradients, and the gradients, to the layout of the moments; returns them."""
    moves: dict[Mesh, list[tuple[ShardedTensor, Form]]] = {}
    for p in parameters:
        grad = p.grad
        form = moments_form(p) if type(grad) is ShardedTensor else None
        if form is None or p.__dict__.get("_path") or grad.__dict__.get("_path") or p.mesh != grad.mesh:
            continue
        for x in (p, grad):
            if (target := _form_like(x._form, form)) is not None:
                moves.setdefault(form.mesh, []).append((x, target))
    resharded: list[Resharded] = []
    for pairs in moves.values():
        tensors, forms = zip(*pairs, strict=True)
        before = [(x, x._form, x._locals) for x in tensors]
        values = reshard_together(tensors, forms)
        for (x, old_form, old_shards), form, shards in zip(before, forms, values, strict=True):
            relocate(x, form, shards, x._origin)
            resharded.append(Resharded(x, old_form, old_shards, shards))
    return resharded


@lru_cache(1 << 12)
def _form_like(own: Form, form: Form) -> Form | None:
    """Returns `own` in the layout of `form`, or None if it has that layout already."""
    if own.layout.canonical == form.layout.canonical:
        return None
    return Form.intern(form.layout, form.mesh, own.dtype, form.device, form.names, own.strides, own.offset)


def restore_layouts(resharded: Iterable[Resharded]) -> None:
    """Gives tensors their original layout; only written ones are resharded."""
    written: dict[Mesh, list[Resharded]] = {}
    for item in resharded:
        x = item.tensor
        if x._locals is item.shards:
            relocate(x, item.original_form, item.original_shards, x._origin)
        else:
            written.setdefault(item.original_form.mesh, []).append(item)
    for items in written.values():
        values = reshard_together([item.tensor for item in items], [item.original_form for item in items])
        for item, shards in zip(items, values, strict=True):
            relocate(item.tensor, item.original_form, shards, item.tensor._origin)
