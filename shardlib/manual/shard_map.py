"""`shard_map`: per-device code inside a global program, the manual escape hatch.

The body is traced inline: `to_local` in front of it, `from_local` behind it, local values in between. Its arithmetic
runs as it is written, on every device. In a program for one device the body runs on all devices at once, stacked
(`stacked.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardlib.errors import ShardingError
from shardlib.manual import doors, stacked
from shardlib.manual.body import Body, current_body, entered, from_local, to_local
from shardlib.manual.doors import Cut, Stack
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.pullback import Differentiable
from shardlib.state import is_single_device, is_tracing
from shardlib.tensors.tensor import ShardedTensor


def shard_map(fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh | None = None) -> Callable[..., Any]:
    """A function of global tensors, from `fn`, which says what each device does with its local ones.

    `in_specs` (one entry per argument) and `out_specs` are prefix pytrees of specs. An argument's spec says how it is
    cut: a dim cut over an axis of n devices is n times smaller inside. A result's spec says how the devices' results
    are put together; an axis that it does not name is one along which all devices return the same. Inside, devices
    talk through `psum`, `all_gather`, `ppermute` and the other collectives. Traced into the program inside a jitted
    function; outside it is a program of its own. Differentiable in both; the gradient of an argument is summed over
    the axes that do not cut it.

    Raises `ShardingError` where an axis does not divide a dim (all of them at once), for specs that are left out or
    open, outside any mesh and inside another body.

    Example:
        >>> import shardlib as sl
        >>> def matmul(x, w):  # x: [rows, k / 4], w: [k / 4, columns]
        ...     return sl.psum(x @ w, "tensor")
        >>> with sl.Mesh(tensor=4):
        ...     f = sl.shard_map(matmul, in_specs=("_ k@tensor", "k@tensor _"), out_specs="_ _")
        ...     print(f(torch.ones(2, 8), torch.ones(8, 3)).full_tensor())
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
    """
    return ShardMapped(fn, in_specs, out_specs, mesh)


class ShardMapped:
    """What `shard_map` returns: call it with global tensors."""

    def __init__(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh | None) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.in_specs, self.out_specs, self.mesh = fn, in_specs, out_specs, mesh
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self._program = Differentiable(functools.wraps(fn)(lambda *args: self._inline(*args)))

    def __call__(self, *args: Any) -> Any:
        mesh = self._mesh(args)
        if is_tracing():
            return self._inline(*args)
        if is_single_device():
            return self._stacked(mesh, *args)
        with mesh:
            return self._program(*args)

    def _mesh(self, args: Sequence[Any]) -> Mesh:
        current = current_mesh()
        mesh = self.mesh or current
        if mesh is None:
            mesh = next((x.mesh for x in pytree.tree_leaves(args) if isinstance(x, ShardedTensor)), None)
        if mesh is None:
            raise ShardingError(
                f"shard_map({self.name}) is outside any mesh",
                rule="its specs name axes of the current mesh",
                remedy="call it inside `with Mesh(data=2, tensor=4):`, or give mesh=",
            )
        if is_tracing() and mesh != current:
            raise ShardingError(
                f"shard_map({self.name}) is on {mesh}, the program on {current}", rule="a program runs on one mesh"
            )
        if current_body() is not None:
            raise ShardingError(
                f"shard_map({self.name}) is inside the body of another shard_map",
                rule="in a body every mesh axis is already manual",
                remedy="call fn itself, on the local tensors",
            )
        return mesh

    # The ways to run ------------------------------------------------------------------------------------------

    def _inline(self, *args: Any) -> Any:
        mesh = self._mesh(args)
        cuts = self._arguments(args, mesh)
        leaves, tree = pytree.tree_flatten(args)
        local = [x if cut is None else to_local(x, cut.door) for x, cut in zip(leaves, cuts, strict=True)]
        like = next((x for x, cut in zip(local, cuts, strict=True) if cut is not None), None)
        with entered(Body(mesh, like)):
            out = self.fn(*pytree.tree_unflatten(local, tree))
        return self._put_together(out, mesh, lambda x, cut: from_local(x, cut.door))

    def _stacked(self, mesh: Mesh, *args: Any) -> Any:
        cuts = self._arguments(args, mesh)
        leaves, tree = pytree.tree_flatten(args)
        pieces = [stacked.cut(x, cut.layout, mesh) for x, cut in zip(leaves, cuts, strict=True) if cut is not None]
        index = torch.arange(mesh.size, device=pieces[0].device if pieces else None)
        depth, others = stacked.depth(), []

        def body(rank: Tensor, *local: Tensor) -> list[Tensor]:
            feed = iter(local)
            own = [x if cut is None else next(feed) for x, cut in zip(leaves, cuts, strict=True)]
            with entered(Body(mesh, None, rank, depth)):
                flat, out_tree = pytree.tree_flatten(self.fn(*pytree.tree_unflatten(own, tree)))
            others.append((flat, out_tree))
            return [x for x in flat if isinstance(x, Tensor)]

        results = iter(torch.vmap(body, randomness="different")(index, *pieces))
        ((flat, out_tree),) = others
        # The results' shapes on one device are what the specs are read against.
        shaped = [Stack(next(results)) if isinstance(x, Tensor) else x for x in flat]
        out = pytree.tree_unflatten(shaped, out_tree)
        return self._put_together(out, mesh, lambda x, cut: stacked.join(x.pieces, cut.layout, mesh))

    def _arguments(self, args: tuple[Any, ...], mesh: Mesh) -> list[Cut | None]:
        what = f"shard_map({self.name}) in_specs"
        if isinstance(self.in_specs, tuple | list) and len(self.in_specs) != len(args):
            raise ShardingError(
                f"{what} has {len(self.in_specs)} entries, the call has {len(args)} arguments",
                rule="in_specs has one entry per argument",
            )
        return doors.arguments(args, self.in_specs, mesh, what)

    def _put_together(self, out: Any, mesh: Mesh, join: Callable[[Any, Cut], Tensor]) -> Any:
        cuts = doors.results(out, self.out_specs, mesh, f"shard_map({self.name}) out_specs")
        leaves, tree = pytree.tree_flatten(out)
        joined = [x if cut is None else join(x, cut) for x, cut in zip(leaves, cuts, strict=True)]
        return pytree.tree_unflatten(joined, tree)
