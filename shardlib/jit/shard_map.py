"""`shard_map`: per-device code inside a global program, the manual escape hatch.

The body is traced inline, between `to_local` and `from_local`, on local values. Its arithmetic runs as written on every
device. In a program for one device, and if axes are left to the compiler, the body runs on all devices at once: its
values are `PerDevice` tensors (`primitives/per_device.py`). Outside jit a call is a jitted function of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from shardlib.core.context import is_single_device, is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.torch_internals.torch_private import innermost, pytree
from shardlib.core.torch_internals.traced_nodes import last_node
from shardlib.frontend.guards.argument_specs import specs_by_argument
from shardlib.frontend.guards.flatten_call import NO_NAMES, argument_names, signature_names, signature_of
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.jit.jit import Jitted, jit
from shardlib.primitives import boundary
from shardlib.primitives.body import Body, current_body, from_local, to_local
from shardlib.primitives.boundary import Boundary, PlacedBoundary
from shardlib.primitives.captures import enter_tensors, running_body
from shardlib.primitives.out_spec_claims import ResultClaim, check_results
from shardlib.primitives.per_device import PerDevice, find_per_device, order_axes
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor


def shard_map(
    fn: Callable[..., Any] | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    mesh: Mesh | None = None,
    *,
    check: bool = True,
    axis_names: Collection[str] | None = None,
) -> Any:
    """Makes a function of global tensors from `fn`, which works on each device's local tensors.

    `in_specs` (a tuple with one entry per positional argument, or a dict by parameter name) and `out_specs` are prefix
    pytrees of specs. An argument's spec says how it is sharded: a dim over an axis of n devices is n times smaller
    inside. A result's spec says how the devices' results are joined; along an axis that it does not name, all devices
    return equal values. Inside, devices communicate by `psum`, `all_gather`, `ppermute` and the other collectives. In
    a jitted function the body is traced into the program; outside it is a program of its own. Both are differentiable;
    the gradient of an argument is summed over the axes that its spec does not name. Works as a decorator, also of
    methods.

    A tensor that `fn` closes over is whole on every device, even if it is sharded, and its gradient is summed over all
    devices; pass it with an in_spec to see a shard. `fn` may write to its own tensors, and to its arguments, which are
    copies. Checkpoints, hooks and autograd Functions in it may communicate in the backward pass.

    shard_map proves that devices return equal values. A value varies over the axes that shard the arguments behind it,
    and over the axes of `axis_index`, `ppermute`, `all_to_all` and `reduce_scatter`. A `psum`, `pmean`, `pmax`, `pmin`
    or `all_gather` over an axis makes it equal along that axis. `check=False` takes your word for it.

    With `axis_names` the body is per-device along these axes only: specs and collectives name no others. Along the
    other axes tensors are whole, the compiler infers their sharding, `shard` may fix it, and an inner shard_map may
    take these axes. With `check=False`, results that differ along an axis that their spec does not name are averaged.

    Raises `ShardingError` if an axis does not divide a dim (all such dims at once). It also refuses specs that are left
    out or open, or name axes that are left to the compiler; results that differ along an axis that their spec does not
    name; writes to tensors that `fn` closes over; and calls outside any mesh, or inside another body of the same axes.

    Example:
        >>> import torch
        >>> import shardlib as sl
        >>> @sl.shard_map(in_specs=("_ k@tensor", "k@tensor _"), out_specs="_ _")
        ... def matmul(x, w):  # x: [rows, k / 4], w: [k / 4, columns]
        ...     return sl.psum(x @ w, "tensor")
        >>> with sl.Mesh(tensor=4):
        ...     print(matmul(torch.ones(2, 8), w=torch.ones(8, 3)).full_tensor())
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
        >>> with sl.Mesh(data=2, tensor=4):
        ...     mean = sl.shard_map(lambda x: sl.pmean(x.sum(0), "data"), "b@data _", "_", axis_names={"data"})
        ...     print(sl.typeof(mean(sl.shard(torch.ones(4, 8), "b@data c@tensor"))))
        f32[8@tensor]
    """
    if fn is None:
        return functools.partial(
            shard_map, in_specs=in_specs, out_specs=out_specs, mesh=mesh, check=check, axis_names=axis_names
        )
    return ShardMapped(fn, in_specs, out_specs, mesh, check, None if axis_names is None else frozenset(axis_names))


class ShardMapped:
    """The result of `shard_map`: call it with global tensors."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        mesh: Mesh | None,
        check: bool = True,
        axis_names: frozenset[str] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.in_specs, self.out_specs, self.mesh, self.check = fn, in_specs, out_specs, mesh, check
        self.axis_names = axis_names
        self.name: str = name_of(fn)
        self._program: Jitted | None = None  # for calls outside jit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mesh = self._mesh(register_mappings((args, kwargs)))
        args, kwargs = self._bound(args, kwargs)
        if is_tracing() or is_single_device():
            return self._run(args, kwargs)
        if self._program is None:
            alone = ShardMapped(self.fn, self.in_specs, self.out_specs, self.mesh, self.check, self.axis_names)

            def run(*args: Any, **kwargs: Any) -> Any:
                return alone._run(args, kwargs)

            self._program = jit(functools.update_wrapper(run, self.fn))
        with mesh:
            return self._program(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds a method: `in_specs` has no entry for `self`."""
        if instance is None:
            return self
        fn = self.fn.__get__(instance, owner)
        return ShardMapped(fn, self.in_specs, self.out_specs, self.mesh, self.check, self.axis_names)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call with arguments by position where possible; TypeError if `fn` does not take them."""
        if not kwargs or (signature := signature_of(self.fn)) is None:
            return args, kwargs
        bound = signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def _mesh(self, args: Any) -> Mesh:
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
        self._axes(mesh)
        return mesh

    def _axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the axes that are manual in this body, in the order of the mesh."""
        manual = frozenset(mesh.axis_names) if self.axis_names is None else self.axis_names
        if wrong := [f"the mesh has no axis {name!r}" for name in sorted(manual - {*mesh.axis_names})]:
            raise ShardingError(
                f"shard_map({self.name}) is manual over {sorted(manual)}, on {mesh}",
                wrong,
                rule="axis_names are axes of the mesh; the others are left to the compiler",
                remedy=f"use axes of {', '.join(mesh.axis_names)}",
            )
        if not manual:
            raise ShardingError(
                f"shard_map({self.name}) is manual over no axis",
                rule="axis_names are the axes that fn sees one device of; left out, they are all",
                remedy="call fn itself, or leave axis_names out",
            )
        around = current_body()
        if around is not None and (twice := [name for name in around.manual if name in manual]):
            raise ShardingError(
                f"shard_map({self.name}) is inside the body of another shard_map",
                [f"axis {name!r} is manual there already" for name in twice],
                rule="a body holds one device's piece along its manual axes: there is nothing left to cut",
                remedy=f"axis_names={around.left}" if around.left else "call fn itself, on the local tensors",
            )
        return tuple(name for name in mesh.axis_names if name in manual)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the body in a program for a mesh or one device, or in a transform of torch.func outside jit."""
        mesh = self._mesh((args, kwargs))
        own, around = self._axes(mesh), current_body()
        args, kwargs = enter_tensors((args, kwargs))
        manual = own if around is None else order_axes(mesh, (*around.manual, *own))
        stacked = not is_tracing() or is_single_device() or len(manual) < len(mesh.axis_names) or around is not None
        cuts = self._arguments(args, kwargs, mesh)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        body, before = Body(mesh, manual, stacked=stacked, around=around), last_node()
        local = [x if cut is None else to_local(x, cut.boundary, body) for x, cut in zip(leaves, cuts, strict=True)]
        like = next((innermost(x) for x, cut in zip(local, cuts, strict=True) if cut is not None), None)
        own_args, own_kwargs = pytree.tree_unflatten(local, tree)
        body = replace(body, like=like)
        with running_body(body, before) as inside:
            out = inside(self.fn(*own_args, **own_kwargs))
        return self._put_together(out, body)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[PlacedBoundary | None]:
        """Returns the boundary of each leaf of the arguments; a tuple of specs needs an entry for each argument."""
        label, specs = f"shard_map({self.name})", self.in_specs
        if isinstance(specs, tuple | list):
            later = [name for name in (signature_names(self.fn) or NO_NAMES).plain if name in kwargs]
            called = argument_names(self.fn, len(args), later)
            if len(specs) != len(called):
                raise ShardingError(
                    f"{label} in_specs has {len(specs)} entries, the call has {len(called)} arguments",
                    [f"{name} has no entry" for name in called[len(specs) :]]
                    or [f"{i}: {spec!r} is for no argument" for i, spec in [*enumerate(specs)][len(called) :]],
                    rule="in_specs has one entry per argument; they are " + (", ".join(called) or "none"),
                    remedy="write P() for an argument that every device has whole; in_specs may be a dict by name",
                )
            by_argument = tuple(specs[: len(args)]), dict(zip(later, specs[len(args) :], strict=True))
        else:
            by_argument = specs_by_argument(self.fn, label, specs, len(args), kwargs)
        return boundary.bind_arguments(args, kwargs, by_argument, mesh, self._axes(mesh), f"{label} in_specs")

    def _put_together(self, out: Any, body: Body) -> Any:
        mesh = body.mesh
        assert mesh is not None, "a shard_map is on a mesh"
        cuts = boundary.bind_results(out, self.out_specs, mesh, body.own, f"shard_map({self.name})", claim=self.check)
        leaves, tree = pytree.tree_flatten(out)
        if is_tracing() and body.stacked:
            claims = [
                (cut.boundary, find_per_device(x)) for x, cut in zip(leaves, cuts, strict=True) if cut is not None
            ]
            check_results(
                [_claimed(boundary, x, body) for boundary, x in claims if boundary.claim and x is not None], mesh
            )
        joined = [x if cut is None else from_local(x, cut.boundary, body) for x, cut in zip(leaves, cuts, strict=True)]
        return pytree.tree_unflatten(joined, tree)


def _claimed(boundary: Boundary, x: PerDevice, body: Body) -> ResultClaim:
    return ResultClaim(boundary.claim, x.shape, boundary.spec, frozenset(x.axes).intersection(boundary.unmentioned))
