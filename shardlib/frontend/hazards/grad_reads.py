"""Whether a traced function looks at a `.grad` that it finds; if not, its program is for any.

While it is traced there is none. So somebody has looked who asks for one before it is dropped, and so has autograd's
engine, which adds to one. `zero_grad` asks only in order to drop it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import TraceAnewError
from shardlib.core.source_lines import is_internal

_GRAD: Any = torch.Tensor.grad  # of the class: what gets and sets it
_GET = _GRAD.__get__
ASKED = frozenset({_GET, _GRAD.__set__, _GRAD.__delete__})
_ZEROING = {inspect.unwrap(of.zero_grad).__code__ for of in (torch.optim.Optimizer, torch.nn.Module)}


class LookedAtGradientError(TraceAnewError):
    """A function looks at a `.grad` that was hidden from it."""


class Grads:
    """`looked`: whether anybody has; `dropped`, by their ids: the tensors whose `.grad` went unseen."""

    def __init__(self, *, hidden: bool) -> None:
        self.hidden = hidden  # those that are found; else they are inputs, and nothing is to be noted
        self.looked = False
        self.dropped: set[int] = set()
        self._found: dict[int, Tensor] = {}

    def watch(self, x: Tensor) -> None:
        """Something whose `.grad`, as it is found, is hidden."""
        if self.hidden:
            self._found[id(x)] = x

    def asked(self, func: Any, x: Tensor, frame: Any) -> None:
        """Somebody asks for, sets or deletes a `.grad`, in this frame."""
        if not self.hidden or id(x) in self.dropped:
            return
        if id(x) not in self._found:  # it stands for another tensor, it may be
            self.looked |= x.is_leaf and x.requires_grad
        elif _GET(x) is None and (func != _GET or _is_zeroing(frame)):
            self.dropped.add(id(x))
        else:
            self.looked = True

    def refuse_hidden(self, found: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Raise `LookedAtGradientError` if somebody looked, and was shown none where there is one."""
        if self.looked and any(grad is not None for _, grad in found):
            raise LookedAtGradientError

    def finish(self) -> None:
        """The function has returned."""
        left = (x for i, x in self._found.items() if i not in self.dropped)
        self.looked |= any(x.grad is not None for x in left if x.is_leaf or x.retains_grad)


def _is_zeroing(frame: Any) -> bool:
    while frame.f_code.co_name == "__torch_function__" and is_internal(frame.f_code.co_filename):
        frame = frame.f_back  # a mode of torch's own, which hands it on: a default device, say
    return frame.f_code in _ZEROING and frame.f_locals["set_to_none"] is True
