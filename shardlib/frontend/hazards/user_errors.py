"""Explains torch's errors in a traced function: the user's line, the function, its operands by name, torch's words.

The traceback has the operands. Calls of torch go through function modes in a trace, so the frame of a mode holds the
call, and the user's frame around it the names of the tensors.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from shardlib.core.context import is_tracing
from shardlib.core.errors import NoProgramError, ShardingError
from shardlib.core.source_lines import error_line, user_line
from shardlib.core.torch_internals.torch_private import FAKES_LOG
from shardlib.frontend.hazards.fake_tensor_gaps import RealOutcome, try_on_real_tensors
from shardlib.frontend.hazards.numpy_args import explain_array_use

_KINDS = (TypeError, IndexError, ValueError, OverflowError, AssertionError, RuntimeError)
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[2])

# Members of a ShardedTensor that a traced value has not -> what to write instead.
_INSTEAD = {
    "full_tensor": "use the tensor itself: inside jit it is the whole one; return it, and call .full_tensor() outside",
    "redistribute": "shard(x, spec)",
    "to_local": "a shard_map: its body sees this device's piece",
    "shards": "a shard_map: its body sees this device's piece",
    "mesh": "sl.current_mesh()",
    "spec": "shard(x, spec) says where it lives; step.plan(...).layout_of(name) answers outside",
    "sharding": "shard(x, spec) says where it lives; step.plan(...).layout_of(name) answers outside",
}

# The errors are also of torch's own type, for code that catches it.
_TYPES: dict[type, Any] = {kind: type(f"Sharding{kind.__name__}", (ShardingError, kind), {}) for kind in _KINDS}
_TYPES[ValueError] = ShardingError

_NOT_TRIED = RealOutcome()

# Torch logs errors of fake tensors with their traceback; our error says the same.
logging.getLogger(FAKES_LOG).addFilter(lambda record: not is_tracing())


def explain_mistake(error: Exception, names: Mapping[int, str]) -> ShardingError | None:
    """Returns the error that explains torch's refusal on the user's line; None if other code raised.

    `names` are those of the traced function's inputs, by their ids.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor) and error.name in _INSTEAD:
        return NoProgramError(
            f"the traced function reads .{error.name} of a tensor",
            [str(error_line(error))],
            rule="inside jit every tensor is a whole one; where it lives is decided when all of the function is known",
            remedy=_INSTEAD[error.name],
        )
    if isinstance(error, TypeError) and re.search("must be Tensor, not (?!NoneType)", str(error)):
        return ShardingError(
            f"torch refuses an argument: {_first_sentence(error)}",
            [str(error_line(error) or user_line(sys._getframe(1)))],
            rule="containers keep their structure: a list is no tensor, as on one device",
            remedy="pass torch.tensor(x) for numbers, and the tensors in it for a batch of a DataLoader: model(*batch)",
        )
    if isinstance(error, RuntimeError) and "escaped from inside a function being vmapped" in str(error):
        return ShardingError(
            "the traced function reads a value of a vmap behind its end",
            [str(error_line(error))],
            rule="a vmap ends with its function; what a checkpoint in it runs again, for a gradient, runs behind that",
            remedy="put torch.utils.checkpoint around it, or into the function of a scan in it",
        )
    if isinstance(error, RuntimeError) and "Creating a Parameter from an instance of type" in str(error):
        return ShardingError(
            "the traced function makes a parameter of a ShardedTensor",
            [str(error_line(error))],
            rule="torch makes parameters of the type that it is given, and inside jit values are tensors of the trace",
            remedy="x.detach().clone().requires_grad_() inside; or make the parameter outside",
        )
    frames = list(frames_of(error))
    if (refused_array := explain_array_use(error, frames)) is not None:
        return refused_array
    if isinstance(error, ShardingError) or not isinstance(error, _KINDS) or not _library(frames[-1]):
        return None
    if isinstance(error, AssertionError) and not frames[-1].f_code.co_filename.startswith(_TORCH):
        return None
    name, operands = find_failed_call(error, names)
    if not name:
        return None
    line = error_line(error) or user_line(sys._getframe(1))  # torch's code of modules has no line of the user's
    call = _call(error) or {}
    outcome = try_on_real_tensors(call["func"], call.get("args", ()), call.get("kwargs") or {})
    places = [*([str(line)] if line else []), *_modules(frames)]
    return describe_refusal(error, name, places, ((label or "an operand", x) for label, x in operands), outcome)


def find_failed_call(error: Exception, names: Mapping[int, str]) -> tuple[str, list[tuple[str, Any]]]:
    """Returns the name of the function of torch that raised, and its operands, each with the user's name or ""."""
    frames = list(frames_of(error))
    call = _call(error)
    if call is None:
        return "", []
    labels = dict(names) | _members(frames) | _locals([f for f in frames if not _library(f)][-1:])
    operands = [*_operands(call.get("args", ())), *_operands(tuple((call.get("kwargs") or {}).values()))]
    return getattr(call["func"], "__name__", str(call["func"])), [(labels.get(id(x), ""), x) for x in operands]


def _call(error: Exception) -> Mapping[str, Any] | None:
    """Returns the call of torch that raised: its `func`, `args` and `kwargs`."""
    call = next((f.f_locals for f in reversed([*frames_of(error)]) if f.f_code.co_name == "__torch_function__"), None)
    return None if call is None or "func" not in call else call


def describe_refusal(
    error: Exception,
    name: str,
    places: Sequence[str],
    operands: Iterable[tuple[str, Any]],
    outcome: RealOutcome = _NOT_TRIED,
) -> ShardingError:
    """Returns torch's error for a call of `name` with these operands, as a `ShardingError` of the same type.

    `places` are the line and the module of the call; `outcome` comes from the call on real tensors, whose words users
    know.
    """
    if outcome.error is not None:
        rule = "shapes and dtypes are those of one device; in a shard_map body, of one shard"
        remedy = "mend the line: plain torch refuses these operands, too"
    elif outcome.runs:
        rule = (
            "torch works out shapes and dtypes on tensors without values, and refuses more of them than on one device"
        )
        remedy = "convert operands and numbers to the dtype of the result yourself: x.to(dtype), bool(1j)"
    else:
        rule = "a jitted function, and the forward of a parallelized module, calls torch as on one device"
        remedy = "mend the line: it fails on one device, too, unless Python looks at values, which are not known yet"
    out: ShardingError = _TYPES[next(kind for kind in _KINDS if isinstance(error, kind))](
        f"torch refuses {name}: {_first_sentence(outcome.error or error).rstrip('.')}",
        [*places, *(f"{label} is {_described(x)}" for label, x in operands)],
        rule=rule,
        remedy=remedy,
    )
    return out


def _modules(frames: Sequence[FrameType]) -> list[str]:
    """Returns the place of the innermost running module: `in layers.0.up, a Linear`."""
    running = [m for f in frames if isinstance(m := f.f_locals.get("self"), torch.nn.Module)]
    paths = [name for name, m in running[0].named_modules() if m is running[-1]] if running else []
    return [f"in {path}, {_article(type(running[-1]).__name__)}" for path in paths[:1] if path]


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yields the frames that an error went through, the innermost last."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_TORCH, _HERE))


def _members(frames: Sequence[FrameType]) -> dict[int, str]:
    """Names parameters and buffers of the modules whose methods run."""
    modules = {id(m): m for f in frames if isinstance(m := f.f_locals.get("self"), torch.nn.Module)}
    return {
        id(x): f"{type(m).__name__}.{name}"
        for m in modules.values()
        for name, x in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
    }


def _locals(frames: Sequence[FrameType]) -> dict[int, str]:
    return {id(x): name for f in frames for name, x in f.f_locals.items() if isinstance(x, torch.Tensor | list)}


def _operands(args: Any) -> Iterator[Any]:
    """Yields tensors, also those in lists, and lists in the place of a tensor."""
    for x in args:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, slice):
            yield from _operands((x.start, x.stop, x.step))
        elif isinstance(x, list | tuple):
            inside = list(_operands(x))
            yield from inside or ([x] if isinstance(x, list) and x and not isinstance(x[0], int) else [])


def _described(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__} of {len(x)}, no tensor"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
