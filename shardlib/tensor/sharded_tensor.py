"""ShardedTensor: a tensor of global shape whose shards live on the devices of a mesh.

A process of virtual devices has all shards; a rank has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.core.context import is_tracing
from shardlib.core.context import tracing_flag as _tracing
from shardlib.core.errors import ShardingError
from shardlib.core.plain_types import PlainClass
from shardlib.core.recorders import refuse_recorded
from shardlib.core.torch_internals.torch_private import (
    IS_PARAMETER,
    count_dispatch_modes,
    make_wrapper,
    no_torch_function,
)
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FactorNames
from shardlib.sharding.spec import P, Sizes, Spec, collect_sizes, resolve_many
from shardlib.sharding.typos import warn_of_typo
from shardlib.tensor.eager_cache import OPS_KEYED_BY_NUMBER_TYPE, PROGRAMS, append_to_key
from shardlib.tensor.eager_ranges import PROFILER, PROFILING, run_in_profiler_range
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.host_offload import OFFLOADED, share_shards
from shardlib.tensor.local_shards import LocalShard, device_of, refuse_misfits
from shardlib.tensor.no_storage import without_storage
from shardlib.tensor.python_values import PythonValues
from shardlib.tensor.tensor_meta import Form, short_dtype
from shardlib.tensor.view_aliases import note_view, pending_marks


class _MissingShards:
    """Restores `_locals` on access after a write through another tensor, or after an offload."""

    def __get__(self, x: ShardedTensor | None, owner: type) -> Any:
        if x is None:
            return self
        return tensor_hooks.restore_shards(x)


class ShardedTensor(PlainClass, PythonValues):
    """A tensor of global shape, sharded over a mesh; returned by `shard` and by jitted functions.

    It shares memory with no plain tensor. (The constructor takes over the given shards: never write to them later. It
    raises `ShardingError` if they do not fit the layout.)

    Example:
        >>> from shardlib import Mesh, shard
        >>> with Mesh(data=2, tensor=2):
        ...     x = shard(torch.arange(8.0).view(4, 2), "batch@data feature@tensor")
        >>> x
        ShardedTensor(f32[4@data, 2@tensor] on Mesh(data=2, tensor=2))
        >>> x.shape, [tuple(s.data.shape) for s in x.shards]
        (torch.Size([4, 2]), [(2, 1), (2, 1), (2, 1), (2, 1)])
        >>> x.full_tensor().sum()
        tensor(28.)
    """

    __slots__ = ("_origin",)  # on ranks, a number for the computation of its values (`distributed/provenance.py`)

    _origin: int
    _form: Form
    _locals: tuple[torch.Tensor, ...] = _MissingShards()  # type: ignore[assignment] # unless the instance has its own

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls,
        locals_: Sequence[torch.Tensor],
        layout: Layout,
        mesh: Mesh,
        names: FactorNames | None = None,
        requires_grad: bool = False,
    ) -> ShardedTensor:
        refuse_misfits(f"ShardedTensor of layout {layout}", locals_, layout, mesh)
        device = device_of(locals_, mesh)
        shards = tuple([x.detach() if x.requires_grad else x for x in locals_])  # `from_local` keeps histories
        self = wrap(Form.intern(layout, mesh, locals_[0].dtype, device, names), shards)
        if requires_grad:
            self.requires_grad_()
        return self

    @property
    def sharding(self) -> Layout:
        """The exact layout (`Tensor.layout` is torch's: strided or sparse)."""
        return self._form.layout

    @property
    def mesh(self) -> Mesh:
        return self._form.mesh

    @property
    def spec(self) -> Spec:
        """The layout as a spec, with known names of dims."""
        return Spec.from_layout(self._form.layout, self._form.names)

    @property
    def shards(self) -> tuple[LocalShard, ...]:
        """This process's shards (meta tensors on ranks of other stages), for reading, with their history."""
        _refuse_in_trace(self, "shards")
        refuse_recorded("x.shards", self)
        mesh, shards = self.mesh, tensor_hooks.local_shards(self, None)
        ranks = [mesh.rank_of(c) for c in mesh.own_coords()] if mesh.kind == "virtual" else [mesh.rank]
        return tuple(LocalShard(r, mesh.coords(r), x) for r, x in zip(ranks, shards, strict=True))

    def to_local(self, *, grad_placements: Sequence[Any] | None = None) -> torch.Tensor:
        """Returns this rank's shard (rank 0's on virtual devices), for reading; differentiable.

        Other devices and tensors may share its memory, so write only to a clone. As for `DTensor.to_local`, the
        gradient of a shard is a shard of the gradient, unless `grad_placements`, a DTensor placement per mesh axis,
        differ: `[Partial()]` adds up the ranks' gradients of a whole tensor. On virtual devices, gradients of unread
        shards are zeros, and those of copies add up.

        Raises `ShardingError` for a partial sum that requires gradients, and for placements of other local shapes.

        Example:
            >>> from shardlib import Mesh, shard
            >>> with Mesh(data=2):
            ...     x = shard(torch.ones(4, requires_grad=True), "n@data")
            >>> (3 * x.to_local()).sum().backward()
            >>> x.grad.full_tensor()
            tensor([3., 3., 0., 0.])
        """
        _refuse_in_trace(self, "to_local")
        refuse_recorded("x.to_local()", self)
        return tensor_hooks.local_shards(self, grad_placements)[0]

    def is_conj(self) -> bool:
        """True for a lazy conjugate, such as `x.conj()`."""
        return super().is_conj() or _CONJ in pending_marks(self)

    def is_neg(self) -> bool:
        """True for a lazy negative, such as the imaginary part of a conjugate."""
        return super().is_neg() or _NEG in pending_marks(self)

    def full_tensor(self) -> torch.Tensor:
        """Returns the whole as a plain tensor; differentiable. On ranks a collective: every rank must call it."""
        _refuse_in_trace(self, "full_tensor")
        return tensor_hooks.gather_full(self)

    def redistribute(
        self, spec: str | P | Spec, /, *, sizes: Sizes | int | None = None, **lengths: int
    ) -> ShardedTensor:
        """Returns the same values in the layout of `spec`; `sizes` and `lengths` are as in `shard`. Differentiable.

        On ranks this is a collective: every rank must call it.
        """
        _refuse_in_trace(self, "redistribute")
        item = ("x", self.shape, spec, collect_sizes(sizes, lengths))
        (resolved,) = resolve_many([item], self.mesh, call="redistribute")
        warn_of_typo("redistribute(x)", resolved.required_spec, self.mesh)
        return tensor_hooks.redistribute(self, resolved)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As `Tensor.backward`; raises `ShardingError` for a tensor that has no history."""
        if not self.requires_grad:
            raise ShardingError(
                f"{typeof(self)} has no history to go back through",
                rule="a result has a history if an argument, or a parameter that is read, requires gradients",
                remedy="x.requires_grad_() before the call; a function that calls backward() itself sets .grad, and "
                "leaves nothing to go back through",
            )
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """As `Tensor.register_hook`; raises `ShardingError` for an intermediate of the program."""
        refuse_intermediate_result(self, "register_hook")
        if self.grad_fn is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]
        # All results of a program share one node, which also runs if only another result is used.
        return super().register_hook(lambda grad: None if grad is None else hook(grad))  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        """As `Tensor.retain_grad`; raises `ShardingError` for an intermediate of the program."""
        refuse_intermediate_result(self, "retain_grad")
        super().retain_grad()

    @property
    def data(self) -> ShardedTensor:
        """As `Tensor.data`: the same memory without history; accepts another ShardedTensor."""
        return super().data  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, ShardedTensor) and not _tracing.get():
            raise ShardingError(
                f"the data of {typeof(self)} is set to a plain tensor of shape {list(value.shape)}",
                rule="a ShardedTensor stays one",
                remedy="place the value first, x.data = shard(value, spec), or x.copy_(value); code that gives the "
                "parameters of a module other sizes runs before parallelize",
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if _tracing.get():
            return
        assert isinstance(value, ShardedTensor), "refused above"
        self._form, self._origin = value._form, value._origin
        share_shards(value, self)
        note_view(value, self, ())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `Tensor.to`; raises `ShardingError` for a device type other than the mesh's."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, str | torch.device):
                self._refuse_device(torch.device(x))
        return super().to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Any:
        """As `Tensor.cuda`; raises `ShardingError` if the mesh is not on GPUs."""
        self._refuse_device(torch.device("cuda"))
        return super().cuda(*args, **kwargs)

    def _refuse_device(self, device: torch.device) -> None:
        if device.type not in (self.mesh.device, "meta", "cpu"):
            raise ShardingError(
                f"{typeof(self)} goes to {device}",
                [f"it lives on {self.mesh}, whose devices are {self.mesh.device}"],
                rule="a mesh says which devices its tensors live on",
                remedy=f"x.full_tensor().to({str(device)!r}), or place it on Mesh(..., device={device.type!r})",
            )

    def __format__(self, spec: str) -> str:
        return tensor_hooks.format_with_spec(self, spec)

    def __copy__(self) -> ShardedTensor:
        out = self.detach().requires_grad_(self.requires_grad)
        out.__dict__.update({k: x for k, x in self.__dict__.items() if k == IS_PARAMETER} | user_attributes(self))
        return out  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return tensor_hooks.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return tensor_hooks.reduce_tensor(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override] # torch's own takes tensor_contents
        return f"ShardedTensor({typeof(self)} on {format_mesh_axes(self.mesh)})"

    def __str__(self) -> str:
        return tensor_hooks.format_tensor(self)

    def _repr_html_(self) -> str:
        return tensor_hooks.draw_html(self)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # `build_key`, inlined: this is the cost of a cached eager op.
        number = id(op)
        loose = number in OPS_KEYED_BY_NUMBER_TYPE
        key: list[Any] = [number, _default_dtype()]
        add = key.append
        for x in args:
            kind = type(x)
            if kind is ShardedTensor:
                add(x._form)
            elif kind is int:
                add(int if loose else x)
            elif x is None:
                add(None)
            elif kind is list and (not x or type(x[0]) is int):
                add((list, len(x)))
                key += x
            else:
                append_to_key(key, (x,), loose)
        if kwargs:
            add(tuple(kwargs))
            append_to_key(key, kwargs.values(), loose)
        if _tracing.get():  # keys would read traced numbers
            return tensor_hooks.trace_op(op, args, kwargs or {})
        cache_key = tuple(key)
        if (run := PROGRAMS.get(cache_key)) is None or count_dispatch_modes():  # a mode may record ops
            return tensor_hooks.dispatch(op, args, kwargs or {}, cache_key)
        return (
            run_in_profiler_range(op, "on ShardedTensors", run, args, kwargs)
            if PROFILER[PROFILING]
            else run(args, kwargs)
        )


def refuse_intermediate_result(x: torch.Tensor, method: str) -> None:
    """Refuses a method on the gradient of a result from which its own program computes another result."""
    if (name := x.__dict__.get("_within")) is not None:
        raise ShardingError(
            f"{method} of a result of {name}, from which {name} computes another result: {typeof(x)}",
            rule="the way back through a program leads from its results to its inputs, not from result to result",
            remedy="make the later result outside, of this one; or add a zero inside, h = h + zero, which is an "
            "argument with requires_grad=True: its gradient is that of h",
        )


def _refuse_in_trace(x: ShardedTensor, name: str) -> None:
    """Raises the error of traced values: a value read now would be a constant of the program."""
    if is_tracing():
        raise AttributeError(f"a traced function reads .{name} of {typeof(x)}", name=name, obj=x)


def wrap(form: Form, locals_: tuple[torch.Tensor, ...]) -> ShardedTensor:
    """Returns the tensor of this form with these shards of this process."""
    x: ShardedTensor = make_wrapper(
        ShardedTensor, form.shape, form.strides, form.offset, None, form.dtype, torch.strided, form.device
    )
    x._form, x._locals, x._origin = form, locals_, 0
    return x


# Attributes of parameters: specs of where these live, if elsewhere.
PLACEMENT_ATTRIBUTES = ("gradient_at", "moments_at")
REGATHER = "regather"  # if True, the gathered parameter is not kept from the forward to the backward pass


def user_attributes(x: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that users set on a tensor."""
    return {k: y for k, y in x.__dict__.items() if k not in _OWN}


_CONJ, _NEG = torch.ops.aten._conj.default, torch.ops.aten._neg_view.default
_OWN = frozenset({"_form", "_locals", OFFLOADED, "_memory", "_path", IS_PARAMETER, "_within", "proxy"})
_default_dtype = torch.get_default_dtype  # quotients of integers have it


def format_mesh_axes(mesh: Mesh) -> str:
    """Returns the text of a mesh without its rules: `Mesh(data=2)`, or `Mesh(stage=2, data=2).at(stage=1)`."""
    text = f"Mesh({', '.join(f'{name}={n}' for name, n in mesh.shape.items())})"
    return text if mesh.stage is None else f"{text}.at({mesh.stage_axis}={mesh.stage})"


def typeof(x: torch.Tensor) -> str:
    """Returns the type of a tensor with its layout.

    Example:
        >>> typeof(torch.zeros(2, 3))
        'f32[2, 3]'
    """
    layout = x.sharding if isinstance(x, ShardedTensor) else Layout.replicated(x.shape)
    body, plus, pending = str(layout).partition("+")
    if not plus:
        return f"{short_dtype(x.dtype)}[{body}]"
    return f"{short_dtype(x.dtype)}[{body.strip()}] +{pending}"


without_storage(ShardedTensor, typeof)
