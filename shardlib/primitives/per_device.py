"""`PerDevice`: one tensor of a body's code, on all devices at once.

It has the shape that one device sees, and holds what all of them have, stacked over the axes along which it varies.
Every op is a `vmap` over these axes, below autograd. So a history, a hook or a checkpoint that is made in a body holds
tensors that are the same thing behind its end. Where devices write what differs into a tensor that was the same on all
of them, it is stacked then, with all views of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardlib.core.torch_private import DATA, innermost, make_wrapper, no_torch_function, without_transforms
from shardlib.sharding.mesh.mesh import Mesh


class PerDevice(Tensor):
    """`stack` has a dim in front for each of `axes`, in the order of the mesh; `manual` are the axes of the body."""

    stack: Tensor
    axes: tuple[str, ...]
    mesh: Mesh
    manual: tuple[str, ...]
    _owner: PerDevice | None
    _replay: Callable[[PerDevice], Tensor]
    _views: weakref.WeakValueDictionary[int, PerDevice]  # by id: == of tensors compares values

    __torch_function__ = no_torch_function
    dispatch: ClassVar[Callable[..., Any]]  # set by `body`: ops are written above this class

    @staticmethod
    def __new__(cls, stack: Tensor, axes: Sequence[str], mesh: Mesh, manual: tuple[str, ...]) -> PerDevice:
        k = len(axes)
        self: PerDevice = make_wrapper(
            cls, stack.shape[k:], strides=stack.stride()[k:], dtype=stack.dtype, device=stack.device
        )
        self.stack, self.axes, self.mesh, self.manual = stack, tuple(axes), mesh, manual
        self._owner, self._views = None, weakref.WeakValueDictionary()
        return self

    def __init__(self, *_: Any) -> None: ...

    def like(self, stack: Tensor, axes: Iterable[str]) -> PerDevice:
        """Another value of the same body."""
        return PerDevice(stack, tuple(axes), self.mesh, self.manual)

    def over(self, axes: Iterable[str]) -> Tensor:
        """The stack over these axes, of which those along which it does not vary are expanded."""
        wanted = in_order(self.mesh, axes)
        stack = self.stack
        for d, name in enumerate(wanted):
            if name not in self.axes:
                stack = stack.unsqueeze(d).expand(*stack.shape[:d], self.mesh.axes[name], *stack.shape[d:])
        return stack

    def vary(self, axes: Iterable[str]) -> None:
        """Stack the memory of this tensor, and of all that shows it, over these axes as well."""
        owner = self if self._owner is None else self._owner
        wanted = in_order(self.mesh, {*owner.axes, *axes})
        if wanted == owner.axes:
            return
        owner.stack, owner.axes = owner.over(wanted).clone(), wanted
        for view in owner._views.values():
            again = view._replay(owner)
            assert isinstance(again, PerDevice), "a view of a body's value is one"
            view.stack, view.axes = again.stack, again.axes

    def shows(self, owner: PerDevice, replay: Callable[[PerDevice], Tensor]) -> None:
        """Note that this is a view of another one, and how it is made again."""
        if owner._owner is not None:
            first = owner._replay
            self._owner, self._replay = owner._owner, lambda x: replay(first(x))  # type: ignore[arg-type]
        else:
            self._owner, self._replay = owner, replay
        self._owner._views[id(self)] = self

    def become(self, view: PerDevice) -> PerDevice:
        """Be another view of the same memory from now on."""
        if view._owner is self:  # which is the owner no more
            owner = self.like(self.stack, self.axes)
            owner._views, self._views = self._views, owner._views
            for other in owner._views.values():
                other._owner = owner
        if view._owner is not None:
            self._replay, self._owner = view._replay, view._owner
            self._owner._views[id(self)] = self
        self.stack, self.axes = view.stack, view.axes
        with without_transforms():
            DATA.__set__(self, view)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        with torch.DisableTorchFunction():  # modes have seen the call
            return cls.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PerDevice({list(self.shape)}, over {', '.join(self.axes) or 'no axis'})"


def in_order(mesh: Mesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Axes in the order of the mesh."""
    wanted = {*axes}
    return tuple(name for name in mesh.axis_names if name in wanted)


def value_of(x: Any) -> PerDevice | None:
    """The value of a body that a tensor is, whatever transforms follow it; None of other tensors."""
    base = innermost(x)
    return base if isinstance(base, PerDevice) else None
