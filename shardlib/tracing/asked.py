"""Questions of a traced function about an argument's memory that nothing but the argument at hand can answer.

Where a tensor begins in its storage, and whether a bit of it says that it is to be conjugated, is no part of a call's
key: batches that are slices of one tensor run one program. A function that asks is told for tensors of their own
memory, and refused others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardlib.errors import ShardingError
from shardlib.tracing.lines import is_internal, line_at


class Asked(TorchFunctionMode):
    """While on, notes the line of the user's where a tensor's place in memory is asked for, and what torch refused."""

    def __init__(self) -> None:
        super().__init__()
        self.explain: Callable[[Exception], ShardingError | None] = lambda error: None
        self.line: Any = None
        self.refusal: ShardingError | None = None  # for the first question that a tensor of a trace cannot answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS or (func in _STRIDED and (len(args) > 3 or (kwargs and "storage_offset" in kwargs))):
            frame = sys._getframe(1)
            if not is_internal(frame.f_code.co_filename):
                self.line = line_at(frame.f_code, frame.f_lineno)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.refusal = self.refusal or self.explain(error)
            raise


def at_home(x: Any) -> bool:
    """Whether a tensor begins where its storage does, and its bytes are its values."""
    return not isinstance(x, torch.Tensor) or (not x.storage_offset() and not x.is_conj() and not x.is_neg())


def refuse_guests(name: str, line: Any, arguments: Iterable[tuple[str, Any]]) -> None:
    """Refuse arguments that are not `at_home` for a function that asks."""
    wrong = [
        f"{of} begins at element {x.storage_offset()} of its storage" if x.storage_offset() else f"{of} is conjugated"
        for of, x in arguments
        if not at_home(x)
    ]
    if wrong:
        raise ShardingError(
            f"{name} asks where its arguments lie in memory, at {line}",
            wrong,
            rule="a program's inputs begin at element 0 of memory of their own, whatever they are views of",
            remedy="pass x.clone(), or leave storage_offset out",
        )


_QUESTIONS = frozenset(
    {torch.Tensor.storage_offset, torch.Tensor.is_conj, torch.is_conj, torch.Tensor.is_neg, torch.is_neg}
)
_STRIDED = frozenset(
    {
        *(torch.as_strided, torch.Tensor.as_strided, torch.as_strided_copy, torch.Tensor.as_strided_),
        *(torch.as_strided_scatter, torch.Tensor.as_strided_scatter),
    }
)
