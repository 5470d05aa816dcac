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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardlib.core.errors import NoDerivativeError, ShardingError
from shardlib.core.torch_private import follow_tangents
from shardlib.primitives import vmap_body
from shardlib.primitives.boundary import Door, Stack
from shardlib.sharding.mesh.mesh import Mesh

_LIB = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, fake: Callable[..., Tensor]) -> None:
    # The result depends on the device: nothing may compute it ahead, on constants. So there is no kernel and this tag.
    _LIB.define(schema, tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"shardlib::{schema.partition('(')[0]}", fake, lib=_LIB)


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """A tensor without values like x, but of `size` along a dim."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def _exchanged(x: Tensor, axes: Any, split_dim: int, concat_dim: int, n: int) -> Tensor:
    shape = list(x.shape)
    shape[split_dim] //= n
    shape[concat_dim] *= n
    return x.new_empty(shape)


_define("to_local(Tensor x, str spec, int[] local_shape) -> Tensor", lambda x, spec, shape: x.new_empty(shape))
# `claim` names a result that is to be the same along the axes which spec leaves out.
_define(
    'from_local(Tensor x, str spec, int[] global_shape, str claim="") -> Tensor',
    lambda x, spec, shape, claim="": x.new_empty(shape),
)
_define("manual_all_reduce(Tensor x, str[] axes, str reduce) -> Tensor", lambda x, axes, reduce: x.new_empty(x.shape))
_define(
    "manual_all_gather(Tensor x, str[] axes, int dim, int n) -> Tensor",
    lambda x, axes, dim, n: resized(x, dim, x.shape[dim] * n),
)
_define(
    "manual_reduce_scatter(Tensor x, str[] axes, int dim, int n) -> Tensor",
    lambda x, axes, dim, n: resized(x, dim, x.shape[dim] // n),
)
_define("manual_all_to_all(Tensor x, str[] axes, int split_dim, int concat_dim, int n) -> Tensor", _exchanged)
_define("manual_ppermute(Tensor x, str[] axes, int[] pairs) -> Tensor", lambda x, axes, pairs: x.new_empty(x.shape))
# In local forms: pieces that differ in size, next to each other; ranges of a cut dim that others have, and the way
# back. `name` is what a plan calls x.
_define(
    "manual_gather(Tensor x, str[] axes, int dim, int total) -> Tensor",
    lambda x, axes, dim, total: resized(x, dim, total),
)
_define(
    "manual_fetch(Tensor x, str[] axes, int dim, int[] have, int[] needs, str name) -> Tensor",
    lambda x, axes, dim, have, needs, name: resized(x, dim, sum(needs[1::2]) - sum(needs[::2])),
)
_define(
    "manual_give_back(Tensor x, str[] axes, int dim, int[] have, int[] want, str name) -> Tensor",
    lambda x, axes, dim, have, want, name: resized(x, dim, want[1] - want[0]),
)
# `like` is any value of the body: it gives the device, and makes the result one of the body's values.
_define(
    "manual_axis_index(Tensor like, str[] axes) -> Tensor", lambda like, axes: like.new_empty((), dtype=torch.int64)
)


# --- the body that runs -----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A device's elements of a dim: the index of the first one in the whole, how many, and how many there are."""

    offset: int
    size: int
    whole: int


class FormDims(Protocol):
    """What a local form may ask of a dim of its rule. It is run for every kind of device, and every number that it is
    told, and that differs, tells devices apart: so it asks for no more than it uses."""

    def piece(self, name: str) -> Piece: ...
    def share(self, name: str) -> int: ...
    def shares(self, name: str) -> list[int]: ...
    def place(self, name: str) -> int: ...


@dataclass(frozen=True)
class Body:
    """The per-device code that runs now: a `shard_map` body along its axes `manual`, or the local form of a rule.

    `like` is one of its values while it is traced as it is written, for one device. Where all devices run at once,
    stacked, `indices` are the device's coordinates by axis, each batched in the vmap for its axis. In a local form the
    axes are the dims of the rule, of no mesh, and `form` says of each what this device has.
    """

    mesh: Mesh | None
    manual: tuple[str, ...]
    like: Tensor | None = None
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    form: FormDims | None = None
    dims: Mapping[str, int] = field(default_factory=dict)  # of a local form: in how many pieces each is cut

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes, with the number of devices along each."""
        return self.dims if self.mesh is None else self.mesh.axes

    @property
    def left(self) -> tuple[str, ...]:
        """The axes that are left to the compiler."""
        return tuple(name for name in self.axes if name not in self.manual)


_body: ContextVar[Body | None] = ContextVar("shardlib_body", default=None)


def current_body() -> Body | None:
    """The `shard_map` body that runs now; None outside."""
    return _body.get()


@contextmanager
def entered(body: Body) -> Iterator[None]:
    token = _body.set(body)
    try:
        yield
    finally:
        _body.reset(token)


def group(call: str, axis: str | Sequence[str]) -> tuple[Body, tuple[str, ...], int]:
    """The body, the mesh axes and the number of devices that `call` is about."""
    body = _body.get()
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
    """One collective: `shardlib::manual_<kind>(x, axes, *args)`.

    Where all devices run at once, `stack` are those of its axes whose members x shows already, as dims in front.
    """

    kind: str
    axes: tuple[str, ...]
    args: tuple[Any, ...] = ()
    stack: tuple[str, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        body = _body.get()
        indices = [body.indices[name] for name in self.axes] if body is not None and body.indices else []
        return _Linear.apply(x, self, *indices)  # type: ignore[no-any-return,no-untyped-call]

    @property
    def is_extremum(self) -> bool:
        return self.kind == "all_reduce" and self.args[0] in ("max", "min")

    def transposed(self) -> Communication:
        return _TRANSPOSE[self.kind](self)

    def batched(self) -> Communication:
        """The same call on tensors that have one more dim, in front."""
        dims = _DIMS.get(self.kind, 0)
        return replace(self, args=(*(d + 1 for d in self.args[:dims]), *self.args[dims:]))


_DIMS = {"all_gather": 1, "leave": 1, "reduce_scatter": 1, "all_to_all": 2}  # how many of a call's arguments are dims

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
    """Where all devices run at once, `indices` are operands: so the vmap for each of a call's axes comes by."""

    @staticmethod
    def forward(x: Tensor, call: Communication, *indices: Tensor) -> Any:
        return getattr(torch.ops.shardlib, f"manual_{call.kind}")(x, list(call.axes), *call.args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.call, *indices = inputs[1:]
        ctx.nothing = (None, *(None for _ in indices))
        if ctx.call.is_extremum:
            ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Communication = ctx.call
        if call.is_extremum:
            raise NoDerivativeError(
                f"a gradient flows through p{call.args[0]} over {', '.join(map(repr, call.axes))}",
                rule=f"p{call.args[0]} has no derivative: which device holds the {call.args[0]} is not kept",
                remedy="detach its operand, as a stable softmax does with its maximum",
            )
        return call.transposed()(grad), *ctx.nothing

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        call: Communication = ctx.call
        if not call.is_extremum:
            return call(tangent)
        x, extremum = ctx.saved_tensors
        total = replace(call, args=("sum",))
        with follow_tangents(True):
            holds = (x == extremum).to(tangent.dtype)
            return total(holds * tangent) / total(holds)  # devices that tie share it, as in torch.amax

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, call: Communication, *indices: Tensor
    ) -> tuple[Tensor, int | None]:
        here = [i for i, d in enumerate(in_dims[2:]) if d is not None]
        same, k = call.kind in vmap_body.SAME, len(call.stack)
        if not here:  # a vmap inside the body, or one for another axis
            assert in_dims[0] is not None, "vmap rules run for batched operands only"
            return _Linear.apply(x.movedim(in_dims[0], k), call.batched(), *indices), 0 if same else k  # type: ignore[no-untyped-call]
        members = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        name = [a for a in call.axes if a not in call.stack][here[0]]
        call, rest = replace(call, stack=(name, *call.stack)), [*indices[: here[0]], *indices[here[0] + 1 :]]
        if rest:
            out = _Linear.apply(members, call, *rest)  # type: ignore[no-untyped-call]
        else:
            out = vmap_body.collective(members, call.stack, call.axes, call.kind, call.args)
        return out, None if same else 0


def left(x: Tensor, indices: Mapping[str, Tensor]) -> Stack:
    """A result of a body, outside of its vmaps: stacked over those axes of `indices` along which it varies."""
    axes = vmap_body.varying(x, indices)
    if not axes:
        return Stack(x, ())
    sizes = [group("leave", name)[2] for name in axes]
    pieces = Communication("leave", axes, (0, math.prod(sizes)))(x.unsqueeze(0))
    return Stack(pieces.reshape([*sizes, *pieces.shape[1:]]), axes)


def to_local(x: Tensor, door: Door) -> Tensor:
    """What one device holds of the global tensor x; its gradient is summed over the axes that do not cut x."""
    return _ToLocal.apply(x, door)  # type: ignore[no-any-return,no-untyped-call]


def from_local(x: Tensor, door: Door) -> Tensor:
    """The global tensor of which each device holds x; several that hold the same share its gradient equally."""
    return _FromLocal.apply(x, door)  # type: ignore[no-any-return,no-untyped-call]


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, door: Door) -> Any:
        return torch.ops.shardlib.to_local(x, door.spec, list(door.local_shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Door], output: Tensor) -> None:
        ctx.door = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        door: Door = ctx.door
        if door.copies > 1:
            grad = Communication("all_reduce", door.unmentioned, ("sum",))(grad)
        return from_local(grad, door), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return to_local(tangent, ctx.door)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, door: Door) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return to_local(x.movedim(in_dims[0], 0), door.batched(info.batch_size)), 0


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, door: Door) -> Any:
        claim = (door.claim,) if door.claim else ()
        return torch.ops.shardlib.from_local(x, door.spec, list(door.global_shape), *claim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Door], output: Tensor) -> None:
        ctx.door = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        door: Door = ctx.door
        local = to_local(grad, door)
        return (local / door.copies if door.copies > 1 else local), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return from_local(tangent, ctx.door)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, door: Door) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "vmap rules run for batched operands only"
        return from_local(x.movedim(in_dims[0], 0), door.batched(info.batch_size)), 0
