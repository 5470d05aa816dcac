"""Reuses rounds of Python loops: rounds with the same torch calls are traced once, and copied for the others.

The torch calls of a function form a stream. Where the stream repeats itself (`RepeatFinder`), one more round is
recorded, and traced as a body (`loop_body.trace_body`) if all its calls only compute (`pure_calls`). From then on the
user's code runs as before, but torch does not. While each call matches the recorded one, on tensors in the same places,
the code gets fake tensors that hold no computed values. The end of the round writes the nodes of all its calls. A call
that differs ends this: the calls of the open round then run, and so do the next ones.

Values of copied rounds have another history than in a plain trace, and some have no node at all. So only calls that
compute may read them, and autograd may differentiate them. Any other use restarts the trace without reusing the round.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, modules, user_line
from shardlib.core.torch_internals.torch_private import (
    ASKS_IS_VIEW,
    SLOT,
    any_autocast,
    count_dispatch_modes,
    set_slot,
    transforms,
)
from shardlib.core.torch_internals.traced_nodes import last_node
from shardlib.frontend.copy_nodes import find_node, set_node
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.hazards.memory_queries import GRAD_FN
from shardlib.frontend.reuse.loop_replay import Body, NotReusableError
from shardlib.frontend.reuse.pure_calls import has_hooks, is_of_torch, only_computes
from shardlib.frontend.reuse.recorded_round import Env, RecordedRound
from shardlib.frontend.reuse.repeat_finder import RepeatFinder, leaves_of
from shardlib.frontend.reuse.replay_python import CallReplay, MismatchError, intercept_autograd_functions
from shardlib.frontend.reuse.subgraph_reuse import SubgraphReuse

Place = tuple[Line, Line]  # a traced function, and a line of a round
_NOT_FOLLOWED: set[Place] = set()  # rounds that did more than compute
# They show the history of a value, or the order in which its nodes run.
_HISTORY_READS = (GRAD_FN, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class LoopReuse(TorchFunctionMode):
    """Watches the torch calls of a traced function for repeated rounds, and replays those."""

    def __init__(self, reuse: SubgraphReuse, tracer: Any, name: Line) -> None:
        super().__init__()
        self._reuse, self._tracer, self._name = reuse, tracer, name
        self._values: dict[int, tuple[weakref.ref[Tensor], RecordedRound]] = {}  # values of copied rounds, by id
        self._modes = count_dispatch_modes()
        self._is_busy = False
        self._entered = ExitStack()
        reuse.interrupt = self.interrupt
        self._reset()

    def _reset(self) -> None:
        """Drops the current round, and starts to look for a new one."""
        self._repeats, self._last = RepeatFinder(), last_node(self._tracer.graph)
        self._start: int | None = None  # the first call of the recorded round
        self._record: RecordedRound | None = None
        self._body: Body | None = None  # of the round that is replayed
        self._outside: list[int] = []
        self._outputs: list[int] = []
        self._following: CallReplay | None = None
        self._count = 0  # answered calls of the open round
        self._has_written = False  # True once a round was written

    def __enter__(self) -> Any:
        self._entered.enter_context(intercept_autograd_functions(self, self._interrupt_unless_busy))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        if not self._is_open():
            if self._count:
                raise self._failure("the modes around a round change", self._record)
            self._reset()
            return self._run(func, args, kwargs)
        line = user_line(sys._getframe(1))
        if self._body is not None:
            try:
                return self._run_unobserved(partial(self._answer_call, func, args, kwargs, line))
            except NotReusableError:
                if self._reuse.refused:
                    raise
                self.interrupt()
        return self._run_unobserved(partial(self._observe, func, args, kwargs, line))

    def _run_unobserved(self, run: Callable[[], Any]) -> Any:
        """Runs code whose torch calls are not the user's."""
        self._is_busy = True
        try:
            return run()
        finally:
            self._is_busy = False

    def _is_open(self) -> bool:
        """Returns whether only the trace's own modes are on; autocast would reuse casts of one round in the next."""
        is_plain = not transforms() and not any_autocast() and count_dispatch_modes() == self._modes
        return is_plain and self._reuse.is_open()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a call. Raises `NotReusableError` if it does more than compute with values of copied rounds."""
        is_backward = func in (Tensor.backward, torch.autograd.grad)  # its first argument may be such a value
        others = {k: x for k, x in kwargs.items() if k != "outputs"} if is_backward else kwargs
        record = self._record_of((args[is_backward:], others))
        if record is None and self._values and func in _HISTORY_READS:
            _, record = next(iter(self._values.values()))
        if record is None:
            return func(*args, **kwargs)
        last = last_node(self._tracer.graph)
        out = func(*args, **kwargs) if is_of_torch(func) else None
        with torch.DisableTorchFunction():
            if func in _HISTORY_READS or not only_computes(func, args, out, self._tracer, last):
                raise self._failure("a call does more than compute with a value of a round", record)
        return out

    def _record_of(self, x: Any) -> RecordedRound | None:
        """Returns the round of the first value of a copied round in a nest of arguments."""
        for leaf in leaves_of(x) if self._values else ():
            refer, record = self._values.get(id(leaf), (None, None))
            if refer is not None and refer() is leaf:
                return record
        return None

    def _failure(self, why: str, record: RecordedRound | None) -> NotReusableError:
        """Returns the error that restarts the trace, in which this round is not followed."""
        self._reuse.refused = True
        self._stop_following(record)
        return NotReusableError(why)

    def _stop_following(self, record: RecordedRound | None) -> None:
        """Excludes the lines of a round in later traces."""
        if record is not None:
            _NOT_FOLLOWED.update((self._name, call.line) for call in record.calls)

    # --- before a round is traced -------------------------------------------------------------------------------------

    def _observe(self, func: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """Runs a call as a part of the stream, and records it if it belongs to a round."""
        if line is None or last_node(self._tracer.graph) is not self._last:  # other code has written nodes
            self._reset()
        with torch.DisableTorchFunction():
            step = self._repeats.begin(func, (line, modules.get().entries), args, kwargs)
        if not self._repeats.is_repeating:
            self._start = self._record = None
        elif step == self._start:
            self._record = RecordedRound(self._tracer)
        if self._record is None or line is None:
            out = self._run(func, args, kwargs)
        else:
            out = self._record.take(func, args, kwargs, line, self._run)
        self._last = last_node(self._tracer.graph)
        with torch.DisableTorchFunction():
            self._repeats.end(out)
        if self._record is not None and self._record.is_refused:
            self._stop_following(self._record)
            self._reset()
        elif self._record is not None and len(self._record.calls) == self._repeats.period:
            self._close(self._record)
        elif self._start is None and (self._name, line) not in _NOT_FOLLOWED:
            self._start = self._repeats.round_start()
        return out

    def _close(self, record: RecordedRound) -> None:
        """Ends the recording of a round: traces it as a body, which the next calls replay."""
        if not record.created:
            self._reset()
            return
        values = [record.value(*x) for x in self._repeats.handed_on(self._start or 0)]
        self._outputs = sorted({i for i in values if i is not None})
        self._outside = record.outside()
        self._reuse.used = True  # an error from here on restarts the trace without this
        try:
            self._body = record.trace(self._outside, self._outputs)
        except (NotReusableError, ShardingError, RuntimeError):  # for example, it writes to a tensor from outside
            self._stop_following(self._record)
            self._reset()
        else:
            self._reuse.made += self._body.trace_values
            record.close()

    # --- after a round is traced --------------------------------------------------------------------------------------

    def _answer_call(self, func: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """Answers the next call of the round without running it. Raises `MismatchError` for another call."""
        record = self._record
        assert record is not None, "a round is followed"
        if self._following is None:
            self._following = CallReplay(record, ())
        if line != record.calls[self._count].line or modules.get().entries != record.modules:
            raise MismatchError("it is on another line")
        before = len(self._following.met)
        out = self._following.answer(func, args, kwargs)
        self._reuse.used = True
        for i in range(before, len(self._following.met)):
            x = self._following.met[i]()
            if i in record.created and x is not None:
                self._values[id(x)] = weakref.ref(x), record
                set_slot(x, self._tracer, _Uncomputed(partial(self._failure, "a value of a round is kept", record)))
        self._count += 1
        if self._count == len(record.calls):
            self._write_round(record, self._following)
        return out

    def _write_round(self, record: RecordedRound, following: CallReplay) -> None:
        """Ends a replayed round: writes its nodes."""
        assert self._body is not None, "a round is followed"
        leaves: list[Any] = [following.met[i]() for i in self._outside]
        if last_node(self._tracer.graph) is not following.last:
            raise self._failure("code between the calls of a round writes nodes", record)
        if has_hooks(leaves):
            raise self._failure("a tensor that a round reads has hooks, whose order would change", record)
        self._body(*leaves, results=[following.met[i]() for i in self._outputs])
        self._following, self._count, self._has_written = None, 0, True

    def interrupt(self) -> None:
        """Ends an open round before its end: runs its calls, each under its own source line."""
        if self._count and not self._is_busy:
            self._run_unobserved(self._run_open_round)
        if self._body is not None and not self._has_written:
            self._stop_following(self._record)
        self._reset()

    def _interrupt_unless_busy(self) -> None:
        if not self._is_busy:
            self.interrupt()

    def _run_open_round(self) -> None:
        record, following = self._record, self._following
        assert record is not None, "a round is open"
        assert following is not None, "a round is open"
        is_last = last_node(self._tracer.graph) is following.last
        if ambient(StateWalk()) != record.ambient or not self._is_open() or not is_last:
            raise self._failure("an open round ends under other modes", record)
        env: Env = {i: x for i in self._outside if i < len(following.met) and (x := following.met[i]()) is not None}
        record.replay(env, self._count)
        for i in record.created:
            x = following.met[i]() if i in env else None
            if x is not None:
                if ASKS_IS_VIEW(env[i]):
                    raise self._failure("a view of an open round is kept", record)
                _replace(x, env[i])


class _Uncomputed(SLOT):  # type: ignore[misc]
    """Stands for the node of a value that no op has computed; a read of the node restarts the trace."""

    def __init__(self, failure: Callable[[], Exception]) -> None:
        self._failure = failure

    @property
    def proxy(self) -> Any:
        raise self._failure()

    constant = proxy


class _Same(torch.autograd.Function):
    """Gives a tensor that no op has computed the history of a computed one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: list[Tensor]) -> Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _replace(x: Tensor, value: Tensor) -> None:
    """Makes `x` this value in the graph and for autograd."""
    set_node(x, find_node(value))
    if value.requires_grad:
        _Same.apply(value, [x])  # type: ignore[no-untyped-call]
