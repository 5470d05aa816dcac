"""Collectives of per-device code, and the conversions between local and global tensors at a body's boundary.

Inside a `shard_map` body a tensor is one device's shard. `to_local` enters the body, `from_local` leaves it; every
collective is an op `shardlib::manual_<kind>` that a traced graph carries to the compiler.

Except for max and min, a collective is a linear map on the tensors of all devices together, and its gradient is the
transposed map: a sum is its own transpose, all-gather and reduce-scatter are each other's. Devices that return equal
results share the cotangent equally. The cotangent of an argument is summed once over the axes that do not shard it.
`out_spec_claims` proves that results are equal.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import NoDerivativeError, ShardingError
from shardlib.core.mode_restore import backward_node_number
from shardlib.core.torch_internals.torch_private import follow_tangents, last_number
from shardlib.primitives import vmap_body
from shardlib.primitives.boundary import Boundary
from shardlib.primitives.form_dims import FormDims
from shardlib.primitives.per_device import PerDevice, order_axes
from shardlib.primitives.per_device_ops import dispatch
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.spec import Spec

PerDevice.dispatch = dispatch


# --- the running body -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Body:
    """The running per-device code: a `shard_map` body along its axes `manual`, or the local form of a rule.

    * `manual`: the axes, including those of the enclosing body `around`. In a local form: the dims of the rule, whose
      `form` tells this device's elements; there is no mesh.
    * `like`: one of its values.
    * `stacked`: all devices run at once, on `PerDevice` values; else the values are one device's.
    """

    mesh: Mesh | None
    manual: tuple[str, ...]
    like: Tensor | None = None
    stacked: bool = False
    around: Body | None = None
    form: FormDims | None = None
    dims: Mapping[str, int] = field(default_factory=dict)  # of a local form: the number of shards of each dim
    spans: list[tuple[int, int]] = field(default_factory=list)  # ranges of numbers of its autograd nodes

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes, with the number of devices along each."""
        return self.dims if self.mesh is None else self.mesh.axes

    @property
    def own(self) -> tuple[str, ...]:
        """The axes that no enclosing body has."""
        return self.manual if self.around is None else tuple(a for a in self.manual if a not in self.around.manual)

    def count(self, axes: Sequence[str]) -> int:
        """Counts the devices along axes."""
        return math.prod(self.axes[name] for name in axes)

    @property
    def left(self) -> tuple[str, ...]:
        """The axes that are left to the compiler."""
        return tuple(name for name in self.axes if name not in self.manual)


_body: ContextVar[Body | None] = ContextVar("shardlib_body", default=None)
_differentiated: weakref.WeakSet[Body] = weakref.WeakSet()  # autograd nodes keep their bodies alive


def current_body() -> Body | None:
    """Returns the `shard_map` body that runs forward or backward now; None outside."""
    body = _body.get()
    if body is not None or not _differentiated or (number := backward_node_number()) is None:
        return body
    spans = ((start, id(body), body) for body in _differentiated for start, end in body.spans if start <= number < end)
    return max(spans, default=(0, 0, None))[2]  # the innermost body begins last


@contextmanager
def enter_body(body: Body) -> Iterator[None]:
    token, start = _body.set(body), last_number()
    try:
        yield
    finally:
        _body.reset(token)
        if last_number() > start:
            body.spans.append((start, last_number()))
            _differentiated.add(body)


def resolve_group(call: str, axis: str | Sequence[str]) -> tuple[Body, tuple[str, ...], int]:
    """Returns the running body, the axes of the collective `call`, and the number of devices along them."""
    body = current_body()
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if body is None:
        raise ShardingError(
            f"{call} over {axis!r} is outside any shard_map",
            rule="collectives act on what one device holds, which only the body of a shard_map sees",
            remedy="call it in fn of sl.shard_map(fn, in_specs, out_specs)",
        )
    if body.form is not None and (wrong := [name for name in axes if name not in body.axes]):
        raise ShardingError(
            f"{call} over {axis!r} in the local form of a rule",
            [f"the rule has no dim {name!r}" for name in wrong],
            rule="a local form communicates along the dims of its rule",
            remedy=f"use dims of {', '.join(filter(str.isidentifier, body.manual))}",
        )
    faults = [f"{body.mesh} has no axis {name!r}" for name in axes if name not in body.axes]
    faults += [f"axis {name!r} is left to the compiler" for name in body.left if name in axes]
    faults += [f"axis {name!r} is named twice" for name in dict.fromkeys(axes) if axes.count(name) > 1]
    if faults or not (axes or body.form):
        raise ShardingError(
            f"{call} over {axis!r}",
            faults or ["no axis is named"],
            rule="a collective runs over one mesh axis, or several distinct ones, major first"
            + (": those that the shard_map is manual over" if body.left else ""),
            remedy=f"use axes of {', '.join(body.manual)}",
        )
    return body, axes, body.count(axes)


# --- differentiable calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Communication:
    """One collective: `shardlib::manual_<kind>(x, axes, *args)`."""

    kind: str
    axes: tuple[str, ...]
    args: tuple[Any, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    @property
    def is_extremum(self) -> bool:
        return self.kind == "all_reduce" and self.args[0] in ("max", "min")

    def transposed(self) -> Communication:
        return _TRANSPOSE[self.kind](self)

    def batched(self) -> Communication:
        """Returns the call for tensors with one more leading dim."""
        dims = vmap_body.DIMS.get(self.kind, 0)
        return replace(self, args=(*(d + 1 for d in self.args[:dims]), *self.args[dims:]))


_TRANSPOSE: dict[str, Callable[[Communication], Communication]] = {
    "all_reduce": lambda call: call,
    "all_gather": lambda call: replace(call, kind="reduce_scatter"),
    "reduce_scatter": lambda call: replace(call, kind="all_gather"),
    "all_to_all": lambda call: replace(call, args=(call.args[1], call.args[0], call.args[2])),
    "ppermute": lambda call: replace(call, args=(_reverse_pairs(call.args[0]),)),
}


def _reverse_pairs(pairs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x for i in range(0, len(pairs), 2) for x in (pairs[i + 1], pairs[i]))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, call: Communication) -> Any:
        return getattr(torch.ops.shardlib, f"manual_{call.kind}")(x, list(call.axes), *call.args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Communication], output: Tensor) -> None:
        ctx.call = inputs[1]
        if ctx.call.is_extremum:
            ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        call: Communication = ctx.call
        if call.is_extremum:
            raise NoDerivativeError(
                f"a gradient flows through p{call.args[0]} over {', '.join(map(repr, call.axes))}",
                rule=f"p{call.args[0]} has no derivative: which device holds the {call.args[0]} is not kept",
                remedy="detach its operand, as a stable softmax does with its maximum",
            )
        return call.transposed()(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        call: Communication = ctx.call
        if not call.is_extremum:
            return call(tangent)
        x, extremum = ctx.saved_tensors
        total = replace(call, args=("sum",))
        with follow_tangents(True):
            holds = (x == extremum).to(tangent.dtype)
            return total(holds * tangent) / total(holds)  # devices that tie share it, as in torch.amax

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, call: Communication) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return call.batched()(x.movedim(in_dims[0], 0)), 0


# --- the boundary -----------------------------------------------------------------------------------------------------


class BoundaryFunction(torch.autograd.Function):
    """Moves tensors into a body or out of it."""


def to_local(x: Tensor, boundary: Boundary, body: Body) -> Tensor:
    """Returns one device's shard of the global tensor x; sums its gradient over the axes that do not shard x."""
    return _ToLocal.apply(x, boundary, body)  # type: ignore[no-any-return,no-untyped-call]


def from_local(x: Tensor, boundary: Boundary, body: Body) -> Tensor:
    """Returns the global tensor whose shards are x; devices with equal shards share its gradient equally."""
    return _FromLocal.apply(x, boundary, body)  # type: ignore[no-any-return,no-untyped-call]


class _ToLocal(BoundaryFunction):
    @staticmethod
    def forward(x: Tensor, boundary: Boundary, body: Body) -> Any:
        if body.stacked:
            with torch.DisableTorchFunction():  # the stack is no value of the enclosing body
                return _split_into_shards(x, boundary, body)
        return torch.ops.shardlib.to_local(x, boundary.spec, list(boundary.local_shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Boundary, Body], output: Tensor) -> None:
        _, ctx.boundary, ctx.body = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        boundary: Boundary = ctx.boundary
        if boundary.copies > 1:
            grad = Communication("all_reduce", boundary.unmentioned, ("sum",))(grad)
        return from_local(grad, boundary, ctx.body), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return to_local(tangent, ctx.boundary, ctx.body)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, None], x: Tensor, boundary: Boundary, body: Body
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return to_local(x.movedim(in_dims[0], 0), boundary.batched(info.batch_size), body), 0


class _FromLocal(BoundaryFunction):
    @staticmethod
    def forward(x: Tensor, boundary: Boundary, body: Body) -> Any:
        if body.stacked:
            with torch.DisableTorchFunction():
                return _join_shards(x, boundary, body)
        claim = (boundary.claim,) if boundary.claim else ()
        return torch.ops.shardlib.from_local(x, boundary.spec, list(boundary.global_shape), *claim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Boundary, Body], output: Tensor) -> None:
        _, ctx.boundary, ctx.body = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        boundary: Boundary = ctx.boundary
        local = to_local(grad, boundary, ctx.body)
        return (local / boundary.copies if boundary.copies > 1 else local), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return from_local(tangent, ctx.boundary, ctx.body)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, None], x: Tensor, boundary: Boundary, body: Body
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return from_local(x.movedim(in_dims[0], 0), boundary.batched(info.batch_size), body), 0


def _split_into_shards(x: Tensor, boundary: Boundary, body: Body) -> PerDevice:
    """Splits a global tensor, which may be a value of the enclosing body, into all devices' shards."""
    mesh = body.mesh
    assert mesh is not None, "a shard_map is on a mesh"
    outside = x.axes if isinstance(x, PerDevice) else ()
    layout = Spec.convert(boundary.spec).resolve(boundary.global_shape, mesh, name="x").layout
    whole = x.stack if isinstance(x, PerDevice) else x
    stack = vmap_body.split_shards(whole, layout, boundary.local_shape, mesh, len(outside))
    leading = (*outside, *vmap_body.sharding_axes(layout, mesh))
    axes = order_axes(mesh, leading)
    order = [leading.index(name) for name in axes]
    stack = stack.permute([*order, *range(len(leading), stack.dim())])
    return PerDevice(vmap_body.constrain_leading(stack, *((name,) for name in axes)), axes, mesh, body.manual)


def _join_shards(x: Tensor, boundary: Boundary, body: Body) -> Tensor:
    """Joins all devices' shards x to the global tensor; takes the mean of shards that the spec says are equal."""
    mesh = body.mesh
    assert mesh is not None, "a shard_map is on a mesh"
    if not isinstance(x, PerDevice):
        x = PerDevice(x, (), mesh, body.manual)
    around = body.around.manual if body.around is not None else ()
    layout = Spec.convert(boundary.spec).resolve(boundary.global_shape, mesh, name="x").layout
    sharding = vmap_body.sharding_axes(layout, mesh)
    stack = vmap_body.constrain_leading(x.stack, *((name,) for name in x.axes))
    for d, name in reversed([*enumerate(x.axes)]):
        if name not in around and name not in sharding:
            has_mean = stack.is_floating_point() or stack.is_complex()
            stack = stack.mean(d) if has_mean else stack.select(d, 0)
    outside = tuple(name for name in x.axes if name in around)
    inner = x.like(stack, [name for name in x.axes if name in around or name in sharding])
    present, leading = order_axes(mesh, (*outside, *sharding)), (*outside, *sharding)
    order = [present.index(name) for name in leading]
    stack = inner.over(present)
    stack = stack.permute([*order, *range(len(present), stack.dim())])
    out = vmap_body.join_shards(stack, layout, mesh, len(outside))
    return out if body.around is None else PerDevice(out, outside, mesh, around)
