"""Calls of torch.distributed that communicate, while a function is traced: refused before any rank sends something.

Their tensors are a rank's own, and a traced function has whole ones. What only asks (`get_rank`, `get_world_size`) is
answered by torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import user_line
from shardlib.core.torch_private import C10D
from shardlib.frontend.hazards.unsupported import COLLECTIVES
from shardlib.frontend.lifted_inputs import Lifted


def collectives_error(calls: Sequence[str]) -> ShardingError:
    """Returns the error for these calls, each with its line."""
    rule, remedy = COLLECTIVES
    return ShardingError("a jitted function calls collectives of torch.distributed", calls, rule=rule, remedy=remedy)


def refuse_while_tracing(op: str) -> None:
    """Raise `ShardingError` if a function is being traced; `op` stands for calls that no function of c10d makes."""
    if is_tracing():
        refuse_collective(op, sys._getframe(1))


def refuse_collective(op: str, frame: FrameType) -> NoReturn:
    """Raise the error for the call that `frame` is inside of, also if the function catches it."""
    error = collectives_error([f"{_public_name(frame) or op} at {user_line(frame)}"])
    if (lifted := Lifted.current()) is not None:
        lifted.refusal = error
    raise error


def _public_name(frame: FrameType | None) -> str:
    """The function, or class, of torch.distributed that the user called."""
    name = ""
    while frame is not None:
        if frame.f_globals.get("__name__") == C10D:
            name = f"torch.distributed.{frame.f_code.co_qualname.partition('.')[0]}"
        frame = frame.f_back
    return name
