"""Loops in Python: rounds that ask the same of torch are traced once, and written out again for the others.

The calls of torch that a function makes come as a stream. Where the stream repeats itself (`RepeatFinder`), one more
round is recorded and traced apart (`loop_body.trace_body`), if all of its calls only compute (`pure_calls`). From then
on the user's code runs as ever, but torch does not: as long as each call is the recorded one, of tensors in the same
places, the code gets fake tensors that nothing has computed, and the end of the round writes the nodes of all its
calls. A call that differs ends this: the calls of the open round run after all, and the next ones as they come.

Values of rounds have another history than the ones of a plain trace, and some have no node at all. So they may only be
read by calls that compute, and be differentiated. Any other use makes the trace begin anew, and every round is traced.
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
from shardlib.core.torch_private import (
    ASKS_IS_VIEW,
    INTO_FUNCTION,
    SLOT,
    any_autocast,
    count_dispatch_modes,
    function_modes,
    set_slot,
    transforms,
)
from shardlib.frontend.copy_nodes import node_of, shows
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.hazards.memory_queries import GRAD_FN
from shardlib.frontend.reuse.loop_replay import Body, NotOnceError
from shardlib.frontend.reuse.pure_calls import has_hooks, is_of_torch, last_node, only_computes
from shardlib.frontend.reuse.recorded_round import Env, Round
from shardlib.frontend.reuse.repeat_finder import RepeatFinder, leaves_of
from shardlib.frontend.reuse.replay_python import Following, OtherError
from shardlib.frontend.reuse.subgraph_reuse import Once

Place = tuple[Line, Line]  # a traced function, and a line of a round
_NOT_FOLLOWED: set[Place] = set()  # of rounds that were more than a computation
# They show the nodes of any value's history, or the order in which these run.
_OF_HISTORY = (GRAD_FN, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class Loops(TorchFunctionMode):
    """Follows the calls of torch that a traced function makes, wherever pieces of it may be traced apart."""

    def __init__(self, once: Once, tracer: Any, name: Line) -> None:
        super().__init__()
        self._once, self._tracer, self._name = once, tracer, name
        self._values: dict[int, tuple[weakref.ref[Tensor], Round]] = {}  # of followed rounds, by id
        self._modes = count_dispatch_modes()
        self._is_busy = False
        self._door = ExitStack()
        once.interrupt = self.interrupt
        self._listen()

    def _listen(self) -> None:
        """Begin to look for rounds."""
        self._repeats, self._last = RepeatFinder(), last_node(self._tracer.graph)
        self._start: int | None = None  # the call with which the recorded round begins
        self._record: Round | None = None
        self._body: Body | None = None  # of the round that is followed
        self._outside: list[int] = []
        self._outputs: list[int] = []
        self._following: Following | None = None
        self._count = 0  # calls of the open round that were answered
        self._is_worth = False  # whether a round was written out

    def __enter__(self) -> Any:
        into = INTO_FUNCTION.value

        def entered(args: Any) -> Any:
            if not self._is_busy and any(mode is self for mode in function_modes()):  # it has a gradient of its own
                self.interrupt()
            return into(args)

        self._door.enter_context(INTO_FUNCTION.holding(entered))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._door.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_busy:
            return func(*args, **kwargs)
        if not self._is_open():
            if self._count:
                raise self._failure("the modes around a round change", self._record)
            self._listen()
            return self._run(func, args, kwargs)
        line = user_line(sys._getframe(1))
        if self._body is not None:
            try:
                return self._apart(partial(self._answer, func, args, kwargs, line))
            except NotOnceError:
                if self._once.refused:
                    raise
                self.interrupt()
        return self._apart(partial(self._hear, func, args, kwargs, line))

    def _apart(self, run: Callable[[], Any]) -> Any:
        """Run something whose calls are not the user's."""
        self._is_busy = True
        try:
            return run()
        finally:
            self._is_busy = False

    def _is_open(self) -> bool:
        """Returns whether no mode but those of the trace is on; autocast keeps casts of one round for the next."""
        is_plain = not transforms() and not any_autocast() and count_dispatch_modes() == self._modes
        return is_plain and self._once.is_open()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call. Raises NotOnceError if it does more than compute with values of followed rounds."""
        is_backward = func in (Tensor.backward, torch.autograd.grad)  # the first argument, or outputs, may be values
        others = {k: x for k, x in kwargs.items() if k != "outputs"} if is_backward else kwargs
        record = self._record_of((args[is_backward:], others))
        if record is None and self._values and func in _OF_HISTORY:
            _, record = next(iter(self._values.values()))
        if record is None:
            return func(*args, **kwargs)
        last = last_node(self._tracer.graph)
        out = func(*args, **kwargs) if is_of_torch(func) else None
        with torch.DisableTorchFunction():
            if func in _OF_HISTORY or not only_computes(func, args, out, self._tracer, last):
                raise self._failure("a value of a round is more than computed with", record)
        return out

    def _record_of(self, x: Any) -> Round | None:
        """Returns the round of the first value in a nest of arguments that a followed round has handed out."""
        for leaf in leaves_of(x) if self._values else ():
            refer, record = self._values.get(id(leaf), (None, None))
            if refer is not None and refer() is leaf:
                return record
        return None

    def _failure(self, why: str, record: Round | None) -> NotOnceError:
        """The error with which the trace begins anew, and does not follow this round."""
        self._once.refused = True
        self._give_up(record)
        return NotOnceError(why)

    def _give_up(self, record: Round | None) -> None:
        """Follow no round of these lines any more."""
        if record is not None:
            _NOT_FOLLOWED.update((self._name, call.line) for call in record.calls)

    # --- until a round is known ---------------------------------------------------------------------------------------

    def _hear(self, func: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """Call a function, as a part of the stream."""
        if line is None or last_node(self._tracer.graph) is not self._last:  # no call has written the last nodes
            self._listen()
        with torch.DisableTorchFunction():
            step = self._repeats.begin(func, (line, modules.get().entries), args, kwargs)
        if not self._repeats.is_repeating:
            self._start = self._record = None
        elif step == self._start:
            self._record = Round(self._tracer)
        if self._record is None or line is None:
            out = self._run(func, args, kwargs)
        else:
            out = self._record.take(func, args, kwargs, line, self._run)
        self._last = last_node(self._tracer.graph)
        with torch.DisableTorchFunction():
            self._repeats.end(out)
        if self._record is not None and self._record.is_refused:
            self._give_up(self._record)
            self._listen()
        elif self._record is not None and len(self._record.calls) == self._repeats.period:
            self._close(self._record)
        elif self._start is None and (self._name, line) not in _NOT_FOLLOWED:
            self._start = self._repeats.round_start()
        return out

    def _close(self, record: Round) -> None:
        """The recorded round is at its end: trace it apart, and follow it from the next call on."""
        if not record.made:
            self._listen()
            return
        values = [record.value(*x) for x in self._repeats.handed_on(self._start or 0)]
        self._outputs = sorted({at for at in values if at is not None})
        self._outside = record.outside()
        self._once.used = True  # whatever goes wrong from here on, the trace begins anew without this
        try:
            self._body = record.trace(self._outside, self._outputs)
        except (NotOnceError, ShardingError, RuntimeError):  # it writes to a tensor that it finds, say
            self._give_up(self._record)
            self._listen()
        else:
            self._once.made += self._body.made
            record.close()

    # --- once it is ---------------------------------------------------------------------------------------------------

    def _answer(self, func: Any, args: Any, kwargs: Any, line: Line | None) -> Any:
        """Answer a call without running it, if it is the next one of the round."""
        record = self._record
        assert record is not None, "a round is followed"
        if self._following is None:
            self._following = Following(record, ())
        if line != record.calls[self._count].line or modules.get().entries != record.modules:
            raise OtherError("another line")
        before = len(self._following.met)
        out = self._following.answer(func, args, kwargs)
        self._once.used = True
        for at in range(before, len(self._following.met)):
            x = self._following.met[at]()
            if at in record.made and x is not None:
                self._values[id(x)] = weakref.ref(x), record
                set_slot(x, self._tracer, _Uncomputed(partial(self._failure, "a value of a round is kept", record)))
        self._count += 1
        if self._count == len(record.calls):
            self._write(record, self._following)
        return out

    def _write(self, record: Round, following: Following) -> None:
        """The round is at its end: write its nodes."""
        assert self._body is not None, "a round is followed"
        leaves: list[Any] = [following.met[at]() for at in self._outside]
        if last_node(self._tracer.graph) is not following.last:
            raise self._failure("no call of a round has written the last nodes", record)
        if has_hooks(leaves):
            raise self._failure("a tensor that a round reads has hooks, whose order would be another one", record)
        self._body(*leaves, made=[following.met[at]() for at in self._outputs])
        self._following, self._count, self._is_worth = None, 0, True

    def interrupt(self) -> None:
        """No call comes next that the open round has: its calls run after all, in the name of their lines."""
        if self._count and not self._is_busy:
            self._apart(self._run_open_round)
        if self._body is not None and not self._is_worth:
            self._give_up(self._record)
        self._listen()

    def _run_open_round(self) -> None:
        record, following = self._record, self._following
        assert record is not None, "a round is open"
        assert following is not None, "a round is open"
        is_last = last_node(self._tracer.graph) is following.last
        if ambient(State()) != record.ambient or not self._is_open() or not is_last:
            raise self._failure("an open round ends under other modes", record)
        env: Env = {at: x for at in self._outside if at < len(following.met) and (x := following.met[at]()) is not None}
        record.replay(env, self._count)
        for at in record.made:
            x = following.met[at]() if at in env else None
            if x is not None:
                if ASKS_IS_VIEW(env[at]):
                    raise self._failure("a view of an open round is kept", record)
                _replace(x, env[at])


class _Uncomputed(SLOT):  # type: ignore[misc]
    """Stands for the node of a value that nothing has computed: whoever asks for it begins the trace anew."""

    def __init__(self, failure: Callable[[], Exception]) -> None:
        self._failure = failure

    @property
    def proxy(self) -> Any:
        raise self._failure()

    constant = proxy


class _Same(torch.autograd.Function):
    """A tensor that nothing has computed gets the history of one that was computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: list[Tensor]) -> Tensor:
        return holder[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _replace(x: Tensor, value: Tensor) -> None:
    """From now on, x is this value in the graph, and for autograd."""
    shows(x, node_of(value))
    if value.requires_grad:
        _Same.apply(value, [x])  # type: ignore[no-untyped-call]
