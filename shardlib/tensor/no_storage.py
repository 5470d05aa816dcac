"""Refuses access to the storage of a ShardedTensor, which has none, before C++ reads at address 0.

Libraries that save tensors compare the addresses and sizes of storages to find shared memory. For these, ShardedTensors
that share memory have one identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardlib.core.context import is_tracing
from shardlib.core.errors import NoStorageError
from shardlib.core.torch_internals.torch_private import TYPED_STORAGE
from shardlib.tensor.view_aliases import memory_of

_SHARD = "x.to_local() is this device's shard, x.full_tensor() the whole as a plain tensor"
_SAVE = "save full tensors, {name: x.full_tensor() for name, x in state.items()}, which all ranks gather"

# Method that needs the storage -> the problem and the remedy for its error.
_REFUSED: dict[str, tuple[str, str]] = {
    "data_ptr": ("has no address", f"{_SAVE}; x.to_local().data_ptr() is this device's shard"),
    TYPED_STORAGE: ("has no storage", f"{_SAVE}; {_SHARD}"),
    "apply_": ("has no values that Python could go through", "write it as ops on the whole: x.copy_(x * 2)"),
    "share_memory_": ("cannot be put into shared memory", "x.full_tensor().share_memory_(), or x.to_local()'s"),
    "pin_memory": ("cannot be pinned", "pin the plain tensor, and place it then: shard(x.pin_memory(), spec)"),
    "__dlpack__": ("cannot be handed out by DLPack", f"hand out a plain tensor: {_SHARD}"),
    "__dlpack_device__": ("cannot be handed out by DLPack", f"hand out a plain tensor: {_SHARD}"),
}


class MemoryIdentity:
    """Stands in for the storage of a ShardedTensor: equal for tensors that share memory.

    Other methods of storages raise `NoStorageError`.
    """

    def __init__(self, x: Any, description: str, unit: int) -> None:
        self._memory, self._description, self._unit = memory_of(x), description, unit
        self.device = x.device

    @property
    def _cdata(self) -> int:
        return id(self._memory)

    def data_ptr(self) -> int:
        """Returns a number that identifies the memory in this process, equal for views; it is no address."""
        return id(self._memory)

    def nbytes(self) -> int:
        """Returns the size of the whole memory, as one device would have it."""
        form = self._memory.form
        return form.shape.numel() * form.dtype.itemsize

    def size(self) -> int:
        """Returns the size in bytes, or in elements where `x.storage()` was called."""
        return self.nbytes() // self._unit

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _error(self._description, f"has no storage, and .{name} is read", f"{_SAVE}; {_SHARD}")


def without_storage(cls: type[torch.Tensor], typeof: Callable[[Any], str]) -> None:
    """Gives a class of tensors methods that refuse access to a storage by `NoStorageError`."""

    def untyped_storage(self: torch.Tensor, unit: int = 1) -> MemoryIdentity:
        """Returns an object that is equal for tensors that share memory; it has no bytes."""
        if is_tracing():
            raise _error(typeof(self), "has no storage in a traced function", _SHARD)
        return MemoryIdentity(self, typeof(self), unit)

    def storage(self: torch.Tensor) -> MemoryIdentity:
        """Returns the same as `untyped_storage`, in units of elements."""
        return untyped_storage(self, self.itemsize)

    cls.untyped_storage, cls.storage = untyped_storage, storage  # type: ignore[assignment, method-assign]
    for name, (problem, remedy) in _REFUSED.items():
        setattr(cls, name, _refusing_method(name, problem, remedy, typeof))


def _refusing_method(name: str, problem: str, remedy: str, typeof: Callable[[Any], str]) -> Callable[..., NoReturn]:
    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _error(typeof(self), problem, remedy)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Refused: a ShardedTensor has no storage."
    return refuse


def _error(description: str, problem: str, remedy: str) -> NoStorageError:
    return NoStorageError(f"{description} {problem}", rule="a ShardedTensor has no storage of its own", remedy=remedy)
