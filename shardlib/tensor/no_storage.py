"""What a tensor in pieces has not: one memory. Whoever asks for it is told so, before C++ reads at address 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardlib.core.errors import NoStorageError
from shardlib.core.torch_private import TYPED_STORAGE

_PIECE = "x.to_local() is this device's piece, x.full_tensor() the whole as a plain tensor"

# What asks for the memory -> what is said of the tensor, and what to do instead.
_ASKS: dict[str, tuple[str, str]] = {
    "data_ptr": (
        "has no address",
        "x.full_tensor() is the whole as a plain tensor, to be saved, say; x.to_local().data_ptr() is this device's "
        "piece",
    ),
    "untyped_storage": ("has no storage", _PIECE),
    "storage": ("has no storage", _PIECE),
    TYPED_STORAGE: ("has no storage", _PIECE),
    "apply_": ("has no values that Python could go through", "write it as ops on the whole: x.copy_(x * 2)"),
    "share_memory_": ("cannot be put into shared memory", "x.full_tensor().share_memory_(), or x.to_local()'s"),
    "pin_memory": ("cannot be pinned", "pin the plain tensor, and place it then: shard(x.pin_memory(), spec)"),
    "__dlpack__": ("cannot be handed out by DLPack", f"hand out a plain tensor: {_PIECE}"),
    "__dlpack_device__": ("cannot be handed out by DLPack", f"hand out a plain tensor: {_PIECE}"),
}


def without_storage(cls: type[torch.Tensor], typeof: Callable[[Any], str]) -> None:
    """Give a class of tensors methods that refuse to show its memory, by `NoStorageError`.

    Example:
        >>> from shardlib import Mesh, shard
        >>> with Mesh(data=2):
        ...     shard(torch.zeros(4), "n@data").share_memory_()
        Traceback (most recent call last):
        shardlib.core.errors.NoStorageError: f32[4@data] cannot be put into shared memory
        Rule: a tensor in pieces has no storage of its own
        Remedy: x.full_tensor().share_memory_(), or x.to_local()'s
    """
    for name, (said, remedy) in _ASKS.items():
        setattr(cls, name, _refusing(name, said, remedy, typeof))


def _refusing(name: str, said: str, remedy: str, typeof: Callable[[Any], str]) -> Callable[..., NoReturn]:
    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> NoReturn:
        raise NoStorageError(
            f"{typeof(self)} {said}", rule="a tensor in pieces has no storage of its own", remedy=remedy
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Refused: there is no one memory."
    return refuse
