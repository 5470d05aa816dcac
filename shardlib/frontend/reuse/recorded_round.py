"""Records one round of a Python loop, which can run again on other tensors, or be traced as a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.core.source_lines import Line, modules, replayed
from shardlib.core.torch_internals.traced_nodes import last_node
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import Body, NotReusableError
from shardlib.frontend.reuse.pure_calls import has_hooks, only_computes
from shardlib.frontend.reuse.replay_python import CallRecording
from shardlib.frontend.reuse.subgraph import captured_position, refuse_shared_memory
from shardlib.primitives.random.keys import discarding_draws

Env = dict[int, Tensor]


class _Number(NamedTuple):
    """Stands for a tensor among the arguments of a call: its number in the round."""

    number: int


class _Call(NamedTuple):
    """One call of torch; numbers stand for the tensors among its arguments."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    line: Line

    def run(self, env: Env) -> Any:
        token = replayed.set(self.line)
        try:
            return self.func(*_with_tensors(self.args, env), **_with_tensors(self.kwargs, env))
        finally:
            replayed.reset(token)


class RecordedRound(CallRecording):
    """One recorded round: its `calls`, parallel to the `steps` of the recording."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(())
        self._tracer = tracer
        self.calls: list[_Call] = []
        self.ambient, self.modules = ambient(StateWalk()), modules.get().entries
        self.is_refused = False  # True if a call has an effect, so that other rounds have to run it

    def take(self, func: Any, args: Any, kwargs: Any, line: Line, run: Callable[..., Any]) -> Any:
        """Calls a function by `run`, and records the call."""
        try:
            if (ambient(StateWalk()), modules.get().entries) != (self.ambient, self.modules):
                raise NotReusableError("other modes")
            with torch.DisableTorchFunction():
                request = self.form_of(func, args, kwargs)
                call = _Call(func, self._numbered(args), self._numbered(kwargs), line)
        except NotReusableError:
            self.is_refused = True
            return run(func, args, kwargs)
        last = last_node(self._tracer.graph)
        out = run(func, args, kwargs)
        with torch.DisableTorchFunction():
            self.is_refused = not only_computes(func, args, out, self._tracer, last)
            if not self.is_refused:
                self.note(func, args, kwargs, request, out)
                self.calls.append(call)
        return out

    def _numbered(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            index = self.number(x)
            assert index is not None, "arguments are numbered"
            return _Number(index)
        return _mapped(x, self._numbered)

    def outside(self) -> list[int]:
        """Returns the numbers of the tensors from outside the round."""
        return [i for i in range(len(self.met)) if i not in self.created]

    def value(self, step: int, place: int) -> int | None:
        """Returns the number of a result of a call; None if the call creates no such tensor."""
        numbers = [i for i in _numbers(self.steps[step][1]) if i in self.created]
        return numbers[place] if place < len(numbers) else None

    def replay(self, env: Env, count: int) -> None:
        """Runs the first `count` calls again on the tensors in `env`, and adds their results to `env`."""
        for call, (_, result, has_tensors) in zip(self.calls[:count], self.steps[:count], strict=True):
            if has_tensors:
                _bind(result, call.run(env), env)

    def trace(self, outside: Sequence[int], outputs: Sequence[int]) -> Body:
        """Traces the round as a body, from the tensors from outside to its `outputs`."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            env = dict(zip(outside, tensors, strict=True))
            self.replay(env, len(self.calls))
            return [env[at] for at in outputs]

        leaves: list[Any] = [self.met[at]() for at in outside]
        if has_hooks(leaves):
            raise NotReusableError("a tensor that it reads has hooks")
        names, line = list(map(str, outside)), self.calls[0].line
        with discarding_draws():
            body = trace_body(flat, leaves, names, line, differentiate=torch.is_grad_enabled(), strict=True)
        refuse_shared_memory(body, copied=False)
        for x in body.captured:
            captured_position(x, {})
        return body


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """Applies `change` to the items of a list, tuple, dict or slice; returns other values unchanged."""
    if isinstance(x, slice):
        return slice(*map(change, (x.start, x.stop, x.step)))
    if type(x) in (list, tuple):
        return type(x)(map(change, x))
    if isinstance(x, dict):
        return {k: change(y) for k, y in x.items()}
    return x


def _with_tensors(x: Any, env: Env) -> Any:
    """Replaces numbers in a nest of arguments by their tensors."""
    return env[x.number] if type(x) is _Number else _mapped(x, partial(_with_tensors, env=env))


def _numbers(form: Any) -> list[int]:
    """Returns the numbers of the tensors in the form of a result."""
    kind, *rest = form if type(form) is tuple else (None,)
    return [rest[0]] if kind is Tensor else [i for x in rest for i in _numbers(x)]


def _bind(form: Any, out: Any, env: Env) -> None:
    """Adds the tensors of a result to `env`, under the numbers in the result's form."""
    kind, *rest = form if type(form) is tuple else (None,)
    if kind is Tensor:
        env[rest[0]] = out
    elif isinstance(out, tuple | list):
        for x, y in zip(rest, out, strict=True):
            _bind(x, y, env)
