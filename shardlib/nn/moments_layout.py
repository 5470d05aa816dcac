"""Outside `jit`, an optimizer steps a parameter where its moments live (ZeRO-1): each device updates its shard of it.

Without this every op between a parameter and its moments would gather the moments. So the parameters and their
gradients are resharded together in front of the step; behind it the new values of the parameters are gathered together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from shardlib.eager.redistribute import resharded
from shardlib.jit.optimizer_state import moments_form
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import relocate


class Resharded(NamedTuple):
    """A tensor that is not in its original placement `home`; `pieces` are those that it was given here."""

    tensor: ShardedTensor
    home: Form
    home_pieces: tuple[Any, ...]
    pieces: tuple[Any, ...]


def reshard(parameters: Iterable[Any]) -> list[Resharded]:
    """Reshard the parameters that have a gradient, and these, as their moments are; returns those that moved."""
    moves: dict[Mesh, list[tuple[ShardedTensor, Form]]] = {}
    for p in parameters:
        grad = p.grad
        form = moments_form(p) if type(grad) is ShardedTensor else None
        if form is None or p.__dict__.get("_path") or grad.__dict__.get("_path") or p.mesh != grad.mesh:
            continue
        for x in (p, grad):
            if (target := _target(x._form, form)) is not None:
                moves.setdefault(form.mesh, []).append((x, target))
    moved: list[Resharded] = []
    for pairs in moves.values():
        tensors, forms = zip(*pairs, strict=True)
        before = [(x, x._form, x._locals) for x in tensors]
        values = resharded(tensors, forms)
        for (x, home, home_pieces), form, pieces in zip(before, forms, values, strict=True):
            relocate(x, form, pieces, x._origin)
            moved.append(Resharded(x, home, home_pieces, pieces))
    return moved


@lru_cache(1 << 12)
def _target(own: Form, form: Form) -> Form | None:
    """Returns the form of a tensor in the layout of another one, or None where it lies so already."""
    if own.layout.canonical == form.layout.canonical:
        return None
    return Form.of(form.layout, form.mesh, own.dtype, form.device, form.names, own.strides, own.offset)


def go_home(moved: Iterable[Resharded]) -> None:
    """Give tensors their original placement. Only those that were written to are resharded."""
    written: dict[Mesh, list[Resharded]] = {}
    for one in moved:
        x = one.tensor
        if x._locals is one.pieces:
            relocate(x, one.home, one.home_pieces, x._origin)
        else:
            written.setdefault(one.home.mesh, []).append(one)
    for ones in written.values():
        values = resharded([one.tensor for one in ones], [one.home for one in ones])
        for one, pieces in zip(ones, values, strict=True):
            relocate(one.tensor, one.home, pieces, one.tensor._origin)
