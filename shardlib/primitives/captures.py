"""Tensors that a `shard_map` body captures from the enclosing program: every device sees them whole.

The mode intercepts operands of torch functions, of transforms and of autograd Functions in the body. A tensor from
outside enters as an argument that no axis shards, so its gradient is summed over all devices. A tensor that the body
creates from no operands is a value of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import PersistentFunctionMode, repeat_in_checkpoints
from shardlib.core.torch_internals.torch_private import (
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
from shardlib.core.torch_internals.traced_nodes import node_of
from shardlib.primitives.body import Body, BoundaryFunction, enter_body, to_local
from shardlib.primitives.boundary import Boundary
from shardlib.primitives.per_device import PerDevice
from shardlib.tensor.sharded_tensor import ShardedTensor


@contextmanager
def running_body(body: Body, before: Any) -> Iterator[Callable[[Any], Any]]:
    """Runs code as a body, also when a checkpoint recomputes it. `before` is the last node outside the body.

    Yields the function that enters a tree of tensors into the body.
    """
    captures: list[Captures] = []

    @contextmanager
    def inside() -> Iterator[None]:
        with enter_body(body), Captures(body, before) as mode:
            captures.append(mode)
            yield

    with repeat_in_checkpoints(inside):
        yield captures[0].enter


_innermost: ContextVar[Captures | None] = ContextVar("shardlib_captures", default=None)


def enter_tensors(tree: Any) -> Any:
    """Enters a tree of tensors into the running body; returns the tree itself outside of bodies."""
    captures = _innermost.get()
    return tree if captures is None else captures.enter(tree)


class Captures(PersistentFunctionMode):
    """While on, tensors from outside enter the body where it reads them."""

    def __init__(self, body: Body, before: Any) -> None:
        super().__init__()
        self.body, self._before = body, before
        self._around = _innermost.get()
        self._level = transform_level()
        self._inside: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}  # by id: a tensor and its local value
        self._entrances: list[ExitStack] = []  # one per `__enter__`: the engine enters the mode again

    def __enter__(self) -> Any:
        entrances = ExitStack()
        for slot in (INTO_GRAD, INTO_VMAP):
            entrances.enter_context(slot.holding(self._through(slot.value)))
        entrances.enter_context(_intercepting_functions(self.enter))
        token = _innermost.set(self)
        entrances.callback(lambda: _innermost.reset(token))
        self._entrances.append(entrances)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._entrances.pop().close()
        if not any(raised):
            for x, local in self._inside.values():
                _refuse_write(x, local)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _innermost.get() is not self or not _is_value_read(func):
            return func(*args, **(kwargs or {}))
        args, kwargs = self.enter((args, kwargs or {}))
        is_data = func == Tensor.data.__get__  # type: ignore[attr-defined]
        if is_data and any(args[0] is local for _, local in self._inside.values()):
            func = Tensor.detach  # shares the tensor's version counter, which `_refuse_write` reads
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._own, out) if self.body.stacked else out

    def _through(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *how: enter(self.enter(x), *how)

    def enter(self, tree: Any) -> Any:
        """Enters a tree of tensors into the body, unless another body or thread runs, or the ops of its values do."""
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
        boundary = Boundary(" ".join(["_"] * len(shape)), shape, shape, axes, self.body.count(axes))
        plain = x is innermost(x)
        with without_transforms() if plain else nullcontext():  # the body may be inside a transform of its own
            local = to_local(x, boundary, self.body)
        if plain or transform_level() == self._level:  # else only that transform may use the local value
            self._inside[key] = x, local
        return local

    def _is_outside(self, x: Tensor) -> bool:
        base = innermost(x)
        if self.body.stacked:
            return not isinstance(base, PerDevice) or base.manual != self.body.manual
        mode = get_proxy_mode()
        if mode is None or self._before is None or mode.tracer.graph is not self._before.graph:
            return False  # the graph of a loop inside this body
        if isinstance(base, ShardedTensor):
            return True
        node = node_of(base)
        return node is not None and not self._before < node

    def _own(self, x: Tensor) -> Tensor:
        """Makes a tensor that a function created from no operands a value of the body, equal on all devices."""
        if isinstance(innermost(x), PerDevice) or x is not innermost(x):
            return x
        mesh = self.body.mesh
        assert mesh is not None, "a shard_map is on a mesh"
        value = PerDevice(x.detach(), (), mesh, self.body.manual)
        return value.requires_grad_() if x.requires_grad else value


def _is_value_read(func: Any) -> bool:
    """True unless a torch function only reads a tensor's metadata or sets an attribute."""
    name = getattr(func, "__name__", "")
    if name != "__get__":
        return bool(name != "__set__")
    attribute = func.__self__
    return isinstance(attribute, property) or attribute.__name__ in ("T", "mT", "H", "mH", "real", "imag", "data")


@contextmanager
def _intercepting_functions(enter: Callable[[Any], Any]) -> Iterator[None]:
    """Applies `enter` to the arguments of the user's autograd Functions."""
    apply = TO_FUNCTION.value.__func__

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(cls, BoundaryFunction):
            args, kwargs = enter((args, kwargs))
        return apply(cls, *args, **kwargs)

    TO_FUNCTION.value = classmethod(applied)
    try:
        yield
    finally:
        TO_FUNCTION.value = classmethod(apply)


def _refuse_write(x: Tensor, local: Tensor) -> None:
    if not local.is_inference() and version_of(local):
        raise ShardingError(
            f"a shard_map body writes to a tensor of shape {list(x.shape)} of the program around it",
            rule="every device sees a copy of what a body closes over, and writes to that",
            remedy="return the new value from the body, and write it outside",
        )
