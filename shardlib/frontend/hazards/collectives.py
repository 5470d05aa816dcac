"""Refuses collectives of torch.distributed in a traced function, before any rank sends something.

Their tensors are a rank's own, and a traced function has whole ones. Queries (`get_rank`, `get_world_size`) are fine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import user_line
from shardlib.core.torch_internals.torch_private import C10D
from shardlib.frontend.hazards.unsupported import COLLECTIVES
from shardlib.frontend.lifted_inputs import LiftedInputs


def collectives_error(calls: Sequence[str]) -> ShardingError:
    """Returns the error for these calls, each with its line."""
    rule, remedy = COLLECTIVES
    return ShardingError("a jitted function calls collectives of torch.distributed", calls, rule=rule, remedy=remedy)


def refuse_while_tracing(op: str) -> None:
    """Raises `ShardingError` if a function is being traced; `op` names a call outside of c10d's functions."""
    if is_tracing():
        refuse_collective(op, sys._getframe(1))


def refuse_collective(op: str, frame: FrameType) -> NoReturn:
    """Raises the error for the call around `frame`; the trace raises it again if the function catches it."""
    error = collectives_error([f"{_public_name(frame) or op} at {user_line(frame)}"])
    if (lifted := LiftedInputs.current()) is not None:
        lifted.refusal = error
    raise error


def _public_name(frame: FrameType | None) -> str:
    """Returns the function or class of torch.distributed that the user called."""
    name = ""
    while frame is not None:
        if frame.f_globals.get("__name__") == C10D:
            name = f"torch.distributed.{frame.f_code.co_qualname.partition('.')[0]}"
        frame = frame.f_back
    return name
