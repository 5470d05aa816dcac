"""What a `shard_map` body reads of the program around it: every device sees the tensor whole.

Whatever a function of torch gets in the body, what enters a transform there and what an autograd Function is applied
to is looked at first. A tensor from outside goes through the body's door, as an argument that no axis cuts would, so
its gradient is summed over all devices. What the body makes of nothing is a value of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import PersistentFunctionMode, repeat_in_checkpoints
from shardlib.core.torch_private import (
    INTO_GRAD,
    INTO_VMAP,
    TO_FUNCTION,
    hears_nothing,
    innermost,
    pytree,
    transform_level,
    version_of,
    without_transforms,
)
from shardlib.primitives.body import Body, Doors, entered, to_local
from shardlib.primitives.boundary import Door
from shardlib.primitives.per_device import PerDevice
from shardlib.tensor.sharded_tensor import ShardedTensor


def last_node() -> Any:
    """The last node of the graph that is being traced; None where none is."""
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


@contextmanager
def running(body: Body, before: Any) -> Iterator[Callable[[Any], Any]]:
    """In a body; so is what a checkpoint in it runs again. `before` is the last node that is no part of it.

    Yields a function of a tree of tensors, which gives them as the body sees them.
    """
    captures: list[Captures] = []

    @contextmanager
    def inside() -> Iterator[None]:
        with entered(body), Captures(body, before) as mode:
            captures.append(mode)
            yield

    with repeat_in_checkpoints(inside):
        yield captures[0].entered


_innermost: ContextVar[Captures | None] = ContextVar("shardlib_captures", default=None)


def seen_inside(tree: Any) -> Any:
    """A tree of tensors as the body sees them that runs now, if one does."""
    captures = _innermost.get()
    return tree if captures is None else captures.entered(tree)


class Captures(PersistentFunctionMode):
    """While on, tensors from outside of the body enter it where they are read."""

    def __init__(self, body: Body, before: Any) -> None:
        super().__init__()
        self.body, self._before = body, before
        self._around = _innermost.get()
        self._level = transform_level()
        self._inside: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # by id: a tensor, and what a device has of it
        self._entrances: list[ExitStack] = []  # of each time that it is on: the engine switches it on again

    def __enter__(self) -> Any:
        entrances = ExitStack()
        for slot in (INTO_GRAD, INTO_VMAP):
            entrances.enter_context(slot.holding(self._through(slot.value)))
        entrances.enter_context(_applied_to(self.entered))
        token = _innermost.set(self)
        entrances.callback(lambda: _innermost.reset(token))
        self._entrances.append(entrances)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._entrances.pop().close()
        if not any(raised):
            for x, local in self._inside.values():
                _refuse_written(x, local)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _innermost.get() is not self or not _reads_values(func):
            return func(*args, **(kwargs or {}))
        args, kwargs = self.entered((args, kwargs or {}))
        is_data = func == Tensor.data.__get__  # type: ignore[attr-defined]
        if is_data and any(args[0] is local for _, local in self._inside.values()):
            func = Tensor.detach  # which counts writes together with the tensor
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._own, out) if self.body.stacked else out

    def _through(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *how: enter(self.entered(x), *how)

    def entered(self, tree: Any) -> Any:
        """A tree of tensors as the body sees them; below the body, and in another one or another thread, as they are.

        Below the body are ops of its values.
        """
        if hears_nothing() or _innermost.get() is not self:
            return tree
        with torch.DisableTorchFunction():
            return pytree.tree_map_only(Tensor, self._value, tree)

    def _value(self, x: Tensor) -> Tensor:
        if not self._is_outside(x):
            return x
        if self._around is not None:
            x = self._around._value(x)
        key = id(x), torch.is_grad_enabled()
        if key in self._inside:
            return self._inside[key][1]
        shape, axes = tuple(x.shape), self.body.own
        door = Door(" ".join(["_"] * len(shape)), shape, shape, axes, self.body.count(axes))
        plain = x is innermost(x)
        with without_transforms() if plain else nullcontext():  # a transform in the body may be on
            local = to_local(x, door, self.body)
        if plain or transform_level() == self._level:  # else it is part of that transform alone
            self._inside[key] = x, local
        return local

    def _is_outside(self, x: Tensor) -> bool:
        base = innermost(x)
        if self.body.stacked:
            return not isinstance(base, PerDevice) or base.manual != self.body.manual
        mode = get_proxy_mode()
        if mode is None or self._before is None or mode.tracer.graph is not self._before.graph:
            return False  # the body of a loop in this one
        if isinstance(base, ShardedTensor):
            return True
        slot = get_proxy_slot(base, mode.tracer, None)
        return slot is not None and not self._before < slot.proxy.node

    def _own(self, x: Tensor) -> Tensor:
        """What a function makes of nothing is the same on all devices."""
        if isinstance(innermost(x), PerDevice) or x is not innermost(x):
            return x
        mesh = self.body.mesh
        assert mesh is not None, "a shard_map is on a mesh"
        value = PerDevice(x.detach(), (), mesh, self.body.manual)
        return value.requires_grad_() if x.requires_grad else value


def _reads_values(func: Any) -> bool:
    """Whether a function of torch is no question about a tensor, and no assignment to an attribute of one."""
    name = getattr(func, "__name__", "")
    if name != "__get__":
        return bool(name != "__set__")
    of = func.__self__
    return isinstance(of, property) or of.__name__ in ("T", "mT", "H", "mH", "real", "imag", "data")


@contextmanager
def _applied_to(enter: Callable[[Any], Any]) -> Iterator[None]:
    """What an autograd Function of the user's is applied to goes through `enter` first."""
    apply = TO_FUNCTION.value.__func__

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(cls, Doors):
            args, kwargs = enter((args, kwargs))
        return apply(cls, *args, **kwargs)

    TO_FUNCTION.value = classmethod(applied)
    try:
        yield
    finally:
        TO_FUNCTION.value = classmethod(apply)


def _refuse_written(x: Tensor, local: Tensor) -> None:
    if not local.is_inference() and version_of(local):
        raise ShardingError(
            f"a shard_map body writes to a tensor of shape {list(x.shape)} of the program around it",
            rule="every device sees a copy of what a body closes over, and writes to that",
            remedy="return the new value from the body, and write it outside",
        )
