"""Traces a user's function into one functional graph of ATen ops, with the user's line on every node.

The function runs on fake tensors, and Python runs as it is written: its ints, floats and flags become constants of the
graph. A run fails if a number has to be a constant, or if an equal module or loop does more than compute. Then the
function runs again without that assumption.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardlib.core.errors import TraceAnewError
from shardlib.core.torch_internals.torch_private import LOADED_BY_FAKES, late
from shardlib.frontend.guards.flatten_call import flatten_call, is_number
from shardlib.frontend.guards.number_inputs import NumberMode, UnsupportedNumbersError
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.hazards.default_dtype import restore_default_on_error
from shardlib.frontend.hazards.escaped_values import collect_survivors
from shardlib.frontend.hazards.grad_reads import GradReads
from shardlib.frontend.reuse.loop_replay import backward_mismatches
from shardlib.frontend.reuse.subgraph_reuse import SubgraphReuse
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.trace_attempt import TraceAttempt, TraceRequest
from shardlib.frontend.traced_graph import TracedFunction

# Errors of Python and torch where a number is not what they expect.
_NOT_NUMBERS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    UnsupportedNumbersError,
)
_ATTEMPTS = 6  # with modules that are traced once


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    static: Collection[int | str] = (),
    device: torch.device | str | None = None,
    state: StateWalk | None = None,
    differentiate: bool = False,
    exact: bool = False,
    apart: Collection[int] = (),
    watch: MutationTracker | None = None,
) -> TracedFunction:
    """Traces `fn(*args, **kwargs)`.

    Inputs of the graph are the tensors among the arguments, those of `state`, and numbers that only enter arithmetic.
    Tensors may be real, meta, fake or sharded: the trace reads only shape, strides, dtype, device and `requires_grad`.
    All other leaves are constants, as are arguments whose position or name is in `static`, and other tensors that `fn`
    closes over. Writes to inputs become results.

    `device` overrides the device of the inputs; if it is not the CPU, `fn` makes its tensors there, too. With `exact`,
    all numbers are constants. With `differentiate`, cotangents of the results become inputs, and the gradients of all
    inputs that require one become results. One tensor in several places of the call is one input, except for the leaves
    in `apart`. New values in the places that `watch` reads are among the results.

    Raises ShardingError, with the user's line, if `fn` needs the value of a tensor, or if a shape depends on values.
    """
    late(LOADED_BY_FAKES)  # now, while no frame holds a value of the trace
    call = flatten_call(fn, args, kwargs or {}, static, state)
    device = None if device is None else torch.device(device)
    request = TraceRequest(fn, call, static, device, differentiate, apart, watch)
    is_plain = state is not None and state.exact
    changes_numbers = watch is not None and watch.before.numbers
    if not exact and (changes_numbers or (any(map(is_number, call.arguments)) and not is_plain)):
        try:
            return _trace_repeatedly(request, functools.partial(NumberMode, is_plain))
        except _NOT_NUMBERS:  # code needs more of a number than arithmetic: then it is a constant
            if watch is not None:
                watch.restore()
    return _trace_repeatedly(request, lambda: None)


def _trace_repeatedly(request: TraceRequest, make_numbers: Callable[[], NumberMode | None]) -> TracedFunction:
    """Traces the function until no module that is traced once does more than compute."""
    state, watch, once = request.call.state, request.watch, SubgraphReuse()
    for attempt in itertools.count():
        numbers, grads = make_numbers(), GradReads(hidden=not state.changing.grads)
        failed: list[str] = []
        token = backward_mismatches.set(failed)
        try:
            traced, survivors = _trace(request, numbers, once, grads)
            grads.refuse_hidden(state.grads)
        except Exception as error:  # without reuse, the function raises its own errors again, to the caller
            grads.refuse_hidden(state.grads)
            if not once.used or watch is None or isinstance(error, TraceAnewError):
                raise
        else:
            if not (once.refused or failed):
                own = () if numbers is None else numbers.wrapped
                return replace(traced, outlived=(*survivors, *once.made, *own))
        finally:
            backward_mismatches.reset(token)
        assert watch is not None, "only functions that are watched reuse modules"
        once = SubgraphReuse(none=attempt == _ATTEMPTS or not once.refused)  # refused modules are not tried again
        watch.restore()
    raise AssertionError("unreachable")


@restore_default_on_error()
def _trace(
    request: TraceRequest, numbers: NumberMode | None, once: SubgraphReuse, grads: GradReads
) -> tuple[TracedFunction, tuple[weakref.ref[Any], ...]]:
    """Traces the function once; returns its graph, and its values that may outlive the trace."""
    attempt = TraceAttempt(request, numbers, once, grads)
    traced = attempt.run()
    input_ids = {id(x) for pair in attempt.lifted.stand_ins() for x in pair}
    return traced, collect_survivors(attempt.tracer.tensor_tracker, input_ids)
