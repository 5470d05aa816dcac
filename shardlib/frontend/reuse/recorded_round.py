"""One round of a loop in Python, as it was recorded: it can run again, of other tensors, and be traced apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.core.source_lines import Line, modules, replayed
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import Body, NotOnceError
from shardlib.frontend.reuse.pure_calls import has_hooks, last_node, only_computes
from shardlib.frontend.reuse.replay_python import Recording
from shardlib.frontend.reuse.subgraph import place, refuse_shared
from shardlib.primitives.random.keys import discarding_draws

Env = dict[int, Tensor]


class _Number(NamedTuple):
    """A tensor among the arguments of a call, by its number in the round."""

    at: int


class _Call(NamedTuple):
    """One call of torch; the tensors among its arguments are numbers."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    line: Line

    def run(self, env: Env) -> Any:
        token = replayed.set(self.line)
        try:
            return self.func(*_filled(self.args, env), **_filled(self.kwargs, env))
        finally:
            replayed.reset(token)


class Round(Recording):
    """One round, as it was recorded: `calls` beside its `steps`."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(())
        self._tracer = tracer
        self.calls: list[_Call] = []
        self.ambient, self.modules = ambient(State()), modules.get().entries
        self.is_refused = False  # whether other rounds may not do without its calls

    def take(self, func: Any, args: Any, kwargs: Any, line: Line, run: Callable[..., Any]) -> Any:
        """Call a function by `run`, and note the call."""
        try:
            if (ambient(State()), modules.get().entries) != (self.ambient, self.modules):
                raise NotOnceError("other modes")
            with torch.DisableTorchFunction():
                request = self.form_of(func, args, kwargs)
                call = _Call(func, self._numbered(args), self._numbered(kwargs), line)
        except NotOnceError:
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
            at = self.number(x)
            assert at is not None, "arguments are numbered"
            return _Number(at)
        return _mapped(x, self._numbered)

    def outside(self) -> list[int]:
        """The numbers of tensors that the round finds."""
        return [at for at in range(len(self.met)) if at not in self.made]

    def value(self, step: int, place: int) -> int | None:
        """The number of a result of a call; None if the call makes nothing."""
        numbers = [at for at in _numbers(self.steps[step][1]) if at in self.made]
        return numbers[place] if place < len(numbers) else None

    def replay(self, env: Env, count: int) -> None:
        """Run the first calls again, of the tensors in `env`; their results join these."""
        for call, (_, gives, has_tensors) in zip(self.calls[:count], self.steps[:count], strict=True):
            if has_tensors:
                _bind(gives, call.run(env), env)

    def trace(self, outside: Sequence[int], outputs: Sequence[int]) -> Body:
        """The round as a body: of the tensors that it finds, to these of those that it makes."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            env = dict(zip(outside, tensors, strict=True))
            self.replay(env, len(self.calls))
            return [env[at] for at in outputs]

        leaves: list[Any] = [self.met[at]() for at in outside]
        if has_hooks(leaves):
            raise NotOnceError("a tensor that it finds has hooks")
        names, line = list(map(str, outside)), self.calls[0].line
        with discarding_draws():
            body = trace_body(flat, leaves, names, line, differentiate=torch.is_grad_enabled(), strict=True)
        refuse_shared(body, copied=False)
        for x in body.captured:
            place(x, {})
        return body


def _mapped(x: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of lists, tuples, dicts and slices, of other items."""
    if isinstance(x, slice):
        return slice(*map(change, (x.start, x.stop, x.step)))
    if type(x) in (list, tuple):
        return type(x)(map(change, x))
    if isinstance(x, dict):
        return {k: change(y) for k, y in x.items()}
    return x


def _filled(x: Any, env: Env) -> Any:
    return env[x.at] if type(x) is _Number else _mapped(x, partial(_filled, env=env))


def _numbers(gives: Any) -> list[int]:
    kind, *rest = gives if type(gives) is tuple else (None,)
    return [rest[0]] if kind is Tensor else [at for x in rest for at in _numbers(x)]


def _bind(gives: Any, out: Any, env: Env) -> None:
    """The tensors of a result get their numbers."""
    kind, *rest = gives if type(gives) is tuple else (None,)
    if kind is Tensor:
        env[rest[0]] = out
    elif isinstance(out, tuple | list):
        for x, y in zip(rest, out, strict=True):
            _bind(x, y, env)
