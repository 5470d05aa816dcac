"""Answers or refuses Python's questions about a value of a trace: its text, its bytes, its address.

A value of a trace has a type and no numbers. Printing shows the type; what would need the bytes is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import user_line
from shardlib.core.torch_internals.private_names import Slot
from shardlib.core.torch_internals.torch_private import DataDependentOutputException, FakeTensor, innermost
from shardlib.tensor.sharded_tensor import typeof

_HANDLE_ERROR = Slot("logging.Handler.handleError")


def is_traced(x: Any) -> bool:
    """Returns whether `x` is a value of a trace, also inside a torch.func transform."""
    return isinstance(innermost(x), FakeTensor)


def format_traced(x: Tensor, **_: Any) -> str | None:
    """Returns the text of a traced value: its type, and how to see more."""
    return f'<{typeof(x)}, traced: sl.debug_print("{{}}", x) shows its values>' if is_traced(x) else None


def format_traced_spec(x: Tensor, spec: str) -> str | None:
    """Returns the text in an f-string; None for a format of numbers, which torch refuses."""
    return None if spec else format_traced(x)


@contextmanager
def raise_from_logging() -> Iterator[None]:
    """Makes `logging.info("%.3f", x)` of a traced value raise; logging would print a traceback and go on."""
    handle_error = _HANDLE_ERROR.value

    def raise_refusal(handler: logging.Handler, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], DataDependentOutputException):
            raise
        handle_error(handler, record)

    with _HANDLE_ERROR.holding(raise_refusal):
        yield


def refuse_pickle(x: Tensor, *_: Any) -> None:
    """Refuses to write a value of a trace to a file."""
    remedy = "return the tensor, and save it outside: torch.save(step(x), path)"
    _refuse(x, "saves a tensor", remedy, rule="the values of tensors are known only when the program runs")


def refuse_dlpack(x: Tensor, **_: Any) -> None:
    """Refuses to hand out the memory of a value of a trace."""
    remedy = "return the tensor, and hand it out outside; what needs memory is an op: torch.library.custom_op"
    _refuse(x, "hands out the memory of a tensor by DLPack", remedy)


def refuse_address(x: Tensor) -> None:
    """Refuses to say where a value of a trace is."""
    remedy = "compare tensors by `is`; code that needs memory is an op: torch.library.custom_op"
    _refuse(x, "asks for the address of a tensor", remedy)


def _refuse(x: Tensor, action: str, remedy: str, rule: str = "a tensor has memory only when the program runs") -> None:
    if is_traced(x):
        raise ShardingError(
            f"the traced function {action}, {typeof(x)}",
            [str(user_line(sys._getframe(2)))],
            rule=f"Python runs once, on shapes; {rule}",
            remedy=remedy,
        )
