"""`PerDevice`: one tensor of a body's code, on all devices at once.

It has the shape of one device's shard, and holds all shards, stacked over the axes along which they vary. Every op is a
`vmap` over these axes, below autograd. So autograd nodes, hooks and checkpoints of a body hold tensors that are valid
after the body ends. If devices write different values into a tensor that was equal on all of them, it is stacked then,
with all its views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import (
    DATA,
    innermost,
    make_wrapper,
    no_torch_function,
    without_transforms,
)
from shardlib.sharding.mesh.mesh import Mesh


class PerDevice(Tensor):
    """`stack` has a leading dim for each of `axes`, in the order of the mesh; `manual` are the axes of the body."""

    stack: Tensor
    axes: tuple[str, ...]
    mesh: Mesh
    manual: tuple[str, ...]
    _owner: PerDevice | None
    _replay: Callable[[PerDevice], Tensor]
    _views: weakref.WeakValueDictionary[int, PerDevice]  # by id: == of tensors compares values

    __torch_function__ = no_torch_function
    dispatch: ClassVar[Callable[..., Any]]  # set by `body`: the modules of ops import this one

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
        """Makes another value of the same body."""
        return PerDevice(stack, tuple(axes), self.mesh, self.manual)

    def over(self, axes: Iterable[str]) -> Tensor:
        """Returns the stack over these axes; expands it along axes over which it does not vary."""
        stack = self.stack
        for d, name in enumerate(order_axes(self.mesh, axes)):
            if name not in self.axes:
                stack = stack.unsqueeze(d).expand(*stack.shape[:d], self.mesh.axes[name], *stack.shape[d:])
        return stack

    def stack_over(self, axes: Iterable[str]) -> None:
        """Stacks the memory of this tensor and of all its views over these axes, too."""
        owner = self if self._owner is None else self._owner
        all_axes = order_axes(self.mesh, {*owner.axes, *axes})
        if all_axes == owner.axes:
            return
        owner.stack, owner.axes = owner.over(all_axes).clone(), all_axes
        for view in owner._views.values():
            replayed = view._replay(owner)
            assert isinstance(replayed, PerDevice), "a view of a body's value is one"
            view.stack, view.axes = replayed.stack, replayed.axes

    def mark_view_of(self, owner: PerDevice, replay: Callable[[PerDevice], Tensor]) -> None:
        """Records that this is a view of `owner`, which `replay` makes again."""
        if owner._owner is not None:
            first = owner._replay
            self._owner, self._replay = owner._owner, lambda x: replay(first(x))  # type: ignore[arg-type]
        else:
            self._owner, self._replay = owner, replay
        self._owner._views[id(self)] = self

    def replace_view(self, view: PerDevice) -> PerDevice:
        """Makes this tensor another view of the same memory."""
        if view._owner is self:  # another tensor becomes the owner
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


def order_axes(mesh: Mesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the axes in the order of the mesh."""
    names = {*axes}
    return tuple(name for name in mesh.axis_names if name in names)


def find_per_device(x: Any) -> PerDevice | None:
    """Returns the value of a body inside a tensor's transform wrappers; None for other tensors."""
    base = innermost(x)
    return base if isinstance(base, PerDevice) else None
