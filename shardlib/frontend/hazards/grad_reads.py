"""Tracks whether a traced function reads a `.grad` from before the call; if not, its program serves any.

The trace hides such gradients. Code that reads one before it is dropped has looked, and so has autograd's engine, which
adds to it. `zero_grad` reads a gradient only to drop it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import TraceAnewError
from shardlib.core.source_lines import is_internal

_GRAD: Any = torch.Tensor.grad  # the descriptor of the class
_GET = _GRAD.__get__
GRAD_ACCESSES = frozenset({_GET, _GRAD.__set__, _GRAD.__delete__})
_ZEROING = {inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, torch.nn.Module)}


class LookedAtGradientError(TraceAnewError):
    """A function looks at a `.grad` that was hidden from it."""


class GradReads:
    """`looked`: True if code read a hidden `.grad`; `dropped`: ids of tensors whose `.grad` was dropped unread."""

    def __init__(self, *, hidden: bool) -> None:
        self.hidden = hidden  # else gradients are inputs, and reads are not tracked
        self.looked = False
        self.dropped: set[int] = set()
        self._watched: dict[int, Tensor] = {}

    def watch(self, x: Tensor) -> None:
        """Watches a tensor whose `.grad` is hidden."""
        if self.hidden:
            self._watched[id(x)] = x

    def note_access(self, func: Any, x: Tensor, frame: Any) -> None:
        """Notes that code in a frame reads, sets or deletes a `.grad`."""
        if not self.hidden or id(x) in self.dropped:
            return
        if id(x) not in self._watched:  # it may be another stand-in of a watched tensor
            self.looked |= x.is_leaf and x.requires_grad
        elif _GET(x) is None and (func != _GET or _is_zeroing(frame)):
            self.dropped.add(id(x))
        else:
            self.looked = True

    def refuse_hidden(self, grads: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Raises `LookedAtGradientError` if code read a `.grad` that was hidden from it."""
        if self.looked and any(grad is not None for _, grad in grads):
            raise LookedAtGradientError

    def finish(self) -> None:
        """Checks the gradients that are left when the function has returned."""
        left = (x for i, x in self._watched.items() if i not in self.dropped)
        self.looked |= any(x.grad is not None for x in left if x.is_leaf or x.retains_grad)


def _is_zeroing(frame: Any) -> bool:
    while frame.f_code.co_name == "__torch_function__" and is_internal(frame.f_code.co_filename):
        frame = frame.f_back  # a mode that passes the call on, such as a default device
    return frame.f_code in _ZEROING and frame.f_locals["set_to_none"] is True
