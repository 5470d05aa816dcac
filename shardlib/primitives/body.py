"""Collectives of per-device code, and the two doors between it and the global program.

Inside a `shard_map` body a tensor is what one device holds. `to_local` goes in, `from_local` comes out; every
collective in between is an op `shardlib::manual_<kind>` that a traced graph carries to the compiler. As a map on the
local tensors of all devices together each of them is linear (but for max and min), and its gradient is its transpose:
the sum of all is its own, gathering and reduce-scattering are each other's. A gradient is what the transposed
collectives say, with nothing left out: devices that return the same share the cotangent of it, and what reaches an
argument is summed over the axes that do not cut it, once. That they do return the same is proved (`claims`).
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
from shardlib.core.torch_private import follow_tangents, last_number
from shardlib.primitives import vmap_body
from shardlib.primitives.boundary import Door
from shardlib.primitives.form_dims import FormDims
from shardlib.primitives.per_device import PerDevice, in_order
from shardlib.primitives.per_device_ops import dispatch
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.spec import Spec

PerDevice.dispatch = dispatch


# --- the body that runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Body:
    """The per-device code that runs now: a `shard_map` body along its axes `manual`, or the local form of a rule.

    `like` is one of its values. Where all devices run at once, `stacked`, values are `PerDevice`; else each is what one
    device holds. `manual` includes the axes of the bodies `around`. In a local form the axes are the dims of the rule,
    of no mesh, and `form` says of each what this device has.
    """

    mesh: Mesh | None
    manual: tuple[str, ...]
    like: Tensor | None = None
    stacked: bool = False
    around: Body | None = None
    form: FormDims | None = None
    dims: Mapping[str, int] = field(default_factory=dict)  # of a local form: in how many pieces each is cut
    spans: list[tuple[int, int]] = field(default_factory=list)  # the numbers that autograd gave to its nodes

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes, with the number of devices along each."""
        return self.dims if self.mesh is None else self.mesh.axes

    @property
    def own(self) -> tuple[str, ...]:
        """Those of its axes that no body around has."""
        return self.manual if self.around is None else tuple(a for a in self.manual if a not in self.around.manual)

    def count(self, axes: Sequence[str]) -> int:
        """The number of devices along axes."""
        return math.prod(self.axes[name] for name in axes)

    @property
    def left(self) -> tuple[str, ...]:
        """The axes that are left to the compiler."""
        return tuple(name for name in self.axes if name not in self.manual)


_body: ContextVar[Body | None] = ContextVar("shardlib_body", default=None)
_differentiated: weakref.WeakSet[Body] = weakref.WeakSet()  # a history holds the bodies that it leads through


def current_body() -> Body | None:
    """The `shard_map` body that runs now, or that autograd goes back through; None outside."""
    body = _body.get()
    if body is not None or not _differentiated or (number := backward_node_number()) is None:
        return body
    spans = ((start, id(body), body) for body in _differentiated for start, end in body.spans if start <= number < end)
    return max(spans, default=(0, 0, None))[2]  # the innermost begins last


@contextmanager
def entered(body: Body) -> Iterator[None]:
    token, start = _body.set(body), last_number()
    try:
        yield
    finally:
        _body.reset(token)
        if last_number() > start:
            body.spans.append((start, last_number()))
            _differentiated.add(body)


def group(call: str, axis: str | Sequence[str]) -> tuple[Body, tuple[str, ...], int]:
    """The body, the mesh axes and the number of devices that `call` is about."""
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
    n = 1
    for name in axes:
        n *= body.axes[name]
    return body, axes, n


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
        """The same call on tensors that have one more dim, in front."""
        dims = vmap_body.DIMS.get(self.kind, 0)
        return replace(self, args=(*(d + 1 for d in self.args[:dims]), *self.args[dims:]))


_TRANSPOSE: dict[str, Callable[[Communication], Communication]] = {
    "all_reduce": lambda call: call,
    "all_gather": lambda call: replace(call, kind="reduce_scatter"),
    "reduce_scatter": lambda call: replace(call, kind="all_gather"),
    "all_to_all": lambda call: replace(call, args=(call.args[1], call.args[0], call.args[2])),
    "ppermute": lambda call: replace(call, args=(_reversed(call.args[0]),)),
}


def _reversed(pairs: tuple[int, ...]) -> tuple[int, ...]:
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


# --- the doors --------------------------------------------------------------------------------------------------------


class Doors(torch.autograd.Function):
    """Through which tensors come into a body, and out of it."""


def to_local(x: Tensor, door: Door, body: Body) -> Tensor:
    """What one device holds of the global tensor x; its gradient is summed over the axes that do not cut x."""
    return _ToLocal.apply(x, door, body)  # type: ignore[no-any-return,no-untyped-call]


def from_local(x: Tensor, door: Door, body: Body) -> Tensor:
    """The global tensor of which each device holds x; several that hold the same share its gradient equally."""
    return _FromLocal.apply(x, door, body)  # type: ignore[no-any-return,no-untyped-call]


class _ToLocal(Doors):
    @staticmethod
    def forward(x: Tensor, door: Door, body: Body) -> Any:
        if body.stacked:
            with torch.DisableTorchFunction():  # the stack is no value of the body around
                return _taken_apart(x, door, body)
        return torch.ops.shardlib.to_local(x, door.spec, list(door.local_shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Door, Body], output: Tensor) -> None:
        _, ctx.door, ctx.body = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        door: Door = ctx.door
        if door.copies > 1:
            grad = Communication("all_reduce", door.unmentioned, ("sum",))(grad)
        return from_local(grad, door, ctx.body), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return to_local(tangent, ctx.door, ctx.body)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, None], x: Tensor, door: Door, body: Body
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return to_local(x.movedim(in_dims[0], 0), door.batched(info.batch_size), body), 0


class _FromLocal(Doors):
    @staticmethod
    def forward(x: Tensor, door: Door, body: Body) -> Any:
        if body.stacked:
            with torch.DisableTorchFunction():
                return _put_together(x, door, body)
        claim = (door.claim,) if door.claim else ()
        return torch.ops.shardlib.from_local(x, door.spec, list(door.global_shape), *claim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Door, Body], output: Tensor) -> None:
        _, ctx.door, ctx.body = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        door: Door = ctx.door
        local = to_local(grad, door, ctx.body)
        return (local / door.copies if door.copies > 1 else local), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return from_local(tangent, ctx.door, ctx.body)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, None], x: Tensor, door: Door, body: Body
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return from_local(x.movedim(in_dims[0], 0), door.batched(info.batch_size), body), 0


def _taken_apart(x: Tensor, door: Door, body: Body) -> PerDevice:
    """What all devices hold of a tensor, which may be one of the body around."""
    mesh = body.mesh
    assert mesh is not None, "a shard_map is on a mesh"
    outside = x.axes if isinstance(x, PerDevice) else ()
    layout = Spec.convert(door.spec).resolve(door.global_shape, mesh, name="x").layout
    stack = vmap_body.cut(x.stack if isinstance(x, PerDevice) else x, layout, door.local_shape, mesh, len(outside))
    now = (*outside, *vmap_body.cutting(layout, mesh))
    axes = in_order(mesh, now)
    order = [now.index(name) for name in axes]
    stack = stack.permute([*order, *range(len(now), stack.dim())])
    return PerDevice(vmap_body.placed(stack, *((name,) for name in axes)), axes, mesh, body.manual)


def _put_together(x: Tensor, door: Door, body: Body) -> Tensor:
    """The tensor of which all devices hold x; of what those that should hold the same hold, the mean."""
    mesh = body.mesh
    assert mesh is not None, "a shard_map is on a mesh"
    if not isinstance(x, PerDevice):
        x = PerDevice(x, (), mesh, body.manual)
    around = body.around.manual if body.around is not None else ()
    layout = Spec.convert(door.spec).resolve(door.global_shape, mesh, name="x").layout
    cutting = vmap_body.cutting(layout, mesh)
    stack = vmap_body.placed(x.stack, *((name,) for name in x.axes))
    for d, name in reversed([*enumerate(x.axes)]):
        if name not in around and name not in cutting:
            number = stack.is_floating_point() or stack.is_complex()
            stack = stack.mean(d) if number else stack.select(d, 0)
    outside = tuple(name for name in x.axes if name in around)
    inner = x.like(stack, [name for name in x.axes if name in around or name in cutting])
    now, wanted = in_order(mesh, (*outside, *cutting)), (*outside, *cutting)
    order = [now.index(name) for name in wanted]
    stack = inner.over(now)
    stack = stack.permute([*order, *range(len(now), stack.dim())])
    out = vmap_body.join(stack, layout, mesh, len(outside))
    return out if body.around is None else PerDevice(out, outside, mesh, around)
