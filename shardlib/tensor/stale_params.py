"""Parameters that a module no longer has, since others took their place: who holds one holds what nobody trains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.core.errors import ShardingError

_replaced = WeakTensorKeyDictionary()  # the old one -> its name, and the new one


def note(old: Tensor, name: str, new: Tensor) -> None:
    """Another tensor is in its place now. The attribute is in the keys of calls, so what was compiled before is not
    used any more."""
    _replaced[old] = name, weakref.ref(new)
    old.replaced = name  # type: ignore[attr-defined]


def forget(x: Tensor) -> None:
    """It is in its place again."""
    if x in _replaced:
        del _replaced[x]
        del x.replaced  # type: ignore[attr-defined]


def successor(x: Any) -> Tensor | None:
    """What took the place of a tensor, if something did that is still there."""
    if not _replaced or not isinstance(x, Tensor) or x not in _replaced:
        return None
    found: Tensor | None = _replaced[x][1]()
    return found


def refuse_replaced(what: str, tensors: Iterable[tuple[str, Any]], remedy: str) -> None:
    """Raise `ShardingError` for those of some tensors, each with what it is called, that were replaced."""
    if not _replaced:
        return
    wrong = [
        f"{name} was {_replaced[x][0]}, in whose place is a parameter on the mesh"
        for name, x in tensors
        if isinstance(x, Tensor) and x in _replaced
    ]
    if wrong:
        raise ShardingError(
            what,
            wrong,
            rule="parallelize and materialize put new parameters in the place of old ones, which nobody trains then",
            remedy=remedy,
        )
