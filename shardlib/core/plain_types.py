"""The class of a tensor as a function for one device sees it: `torch.Tensor` or `nn.Parameter`.

While a function is traced its tensors are FakeTensors, and in eager mode they are ShardedTensors. Code that reads
`type(x)` or `x.__class__` still sees plain tensors. `x.__class__` is a property of these classes. `type` is a builtin,
so modules whose code calls it get a global variable of that name for that time.
"""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import IS_PARAMETER, FakeTensor

_showing: ContextVar[bool] = ContextVar("shardlib_plain_types", default=False)
_LOCK = threading.Lock()
_users: Counter[int] = Counter()  # traces and calls that use a module's variable, by the id of its globals


class PlainClass:
    """A base of tensor classes that say `torch.Tensor` or `nn.Parameter` where plain types are shown."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return plain_class(self)


class _PlainType(type):
    """The class of `plain_type`: called with one object it answers as Python's `type` does, on plain tensors."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not plain_type:  # a metaclass that derives from it
            return super().__call__(*args, **kwargs)
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = plain_class(*args)
        return cls if kind is type else kind  # for `type(x) is type`

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type) if cls is plain_type else super().__instancecheck__(x)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is plain_type else super().__subclasscheck__(kind)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is plain_type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is plain_type else super().__hash__()


class plain_type(type, metaclass=_PlainType):
    """Python's `type` where plain types are shown."""

    __class_getitem__: Any = classmethod(types.GenericAlias)


def plain_class(x: Any) -> Any:
    """Returns the class of `x`, and of a tensor of a trace or on a mesh, where plain types are shown, the plain one."""
    kind = type(x)
    if not _showing.get() or not issubclass(kind, PlainClass):
        return kind
    return torch.nn.Parameter if x.__dict__.get(IS_PARAMETER) else torch.Tensor


@contextmanager
def plain_types(spaces: Mapping[int, dict[str, Any]]) -> Iterator[None]:
    """While on, `type(x)` of a tensor is plain in code with these globals (by their ids), and so is `x.__class__`."""
    token = _showing.set(True)
    with _LOCK:
        for number, space in spaces.items():
            _users[number] += 1
            space.setdefault("type", plain_type)
    try:
        yield
    finally:
        _showing.reset(token)
        with _LOCK:
            for number, space in spaces.items():
                _users[number] -= 1
                if not _users[number]:
                    del _users[number]
                    if space.get("type") is plain_type:
                        del space["type"]


def has_own_type(space: Mapping[str, Any]) -> bool:
    """True if globals have a variable `type` of the user's."""
    return "type" in space and space["type"] is not plain_type


FakeTensor.__bases__ = (PlainClass, torch.Tensor)
