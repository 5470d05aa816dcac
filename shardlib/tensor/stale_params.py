"""Remembers parameters that were replaced in their module: an old reference is to a parameter without training."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.core.errors import ShardingError

_replaced = WeakTensorKeyDictionary()  # old parameter -> its name, and the new one


def note_replaced(old: Tensor, name: str, new: Tensor) -> None:
    """Records a replaced parameter. Its attribute `replaced` is part of calls' keys, so old programs are not used."""
    _replaced[old] = name, weakref.ref(new)
    old.replaced = name  # type: ignore[attr-defined]


def forget_replaced(x: Tensor) -> None:
    """Records that a parameter is in its module again."""
    if x in _replaced:
        del _replaced[x]
        del x.replaced  # type: ignore[attr-defined]


def find_successor(x: Any) -> Tensor | None:
    """Returns the live tensor that replaced `x`, or None."""
    if not _replaced or not isinstance(x, Tensor) or x not in _replaced:
        return None
    find_successor: Tensor | None = _replaced[x][1]()
    return find_successor


def refuse_replaced(problem: str, tensors: Iterable[tuple[str, Any]], remedy: str) -> None:
    if not _replaced:
        return
    wrong = [
        f"{name} was {_replaced[x][0]}, in whose place is a parameter on the mesh"
        for name, x in tensors
        if isinstance(x, Tensor) and x in _replaced
    ]
    if wrong:
        raise ShardingError(
            problem,
            wrong,
            rule="parallelize and materialize replace parameters by new ones, and the old ones are not trained",
            remedy=remedy,
        )
