"""One round of a loop in Python, as it was recorded: it can run again, of other tensors, and be traced apart."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from shardlib.core.source_lines import Line, modules, replayed
from shardlib.core.torch_private import OpOverload
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.hazards.memory_queries import ASKED
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import Body, NotOnceError
from shardlib.frontend.reuse.replay_python import Recording
from shardlib.frontend.reuse.subgraph import place, refuse_shared
from shardlib.ops.constraint import constrain
from shardlib.primitives.random.keys import rehearsed

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

    def take(self, func: Any, args: Any, kwargs: Any, line: Line) -> Any:
        """Call a function, and note the call."""
        try:
            around = ambient(State()), modules.get().entries
            if func in ASKED or not is_of_torch(func) or around != (self.ambient, self.modules):
                raise NotOnceError("it is more than a computation")
            with torch.DisableTorchFunction():
                request = self.form_of(func, args, kwargs)
                call = _Call(func, self._numbered(args), self._numbered(kwargs), line)
        except NotOnceError:
            self.is_refused = True
            return func(*args, **kwargs)
        last = self._end()
        out = func(*args, **kwargs)
        try:
            with torch.DisableTorchFunction():
                self._refuse_old(out, last)
                self.note(func, args, kwargs, request, out)
            self.calls.append(call)
        except NotOnceError:
            self.is_refused = True
        return out

    def _end(self) -> fx.Node | None:
        return next(iter(reversed(self._tracer.graph.nodes)), None)

    def _refuse_old(self, out: Any, last: fx.Node | None) -> None:
        """Refuse a result that was there before, such as a `.grad`: the call has written no node for it."""
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and self.number(x) is None:
                slot = get_proxy_slot(x, self._tracer, None)
                if slot is None or (last is not None and not slot.proxy.node > last):
                    raise NotOnceError("it finds a tensor")

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
            if has_tensors or call.func is Tensor.__setitem__:
                _bind(gives, call.run(env), env)

    def trace(self, outside: Sequence[int], outputs: Sequence[int]) -> Body:
        """The round as a body: of the tensors that it finds, to these of those that it makes."""

        def flat(*tensors: Tensor) -> list[Tensor]:
            env = dict(zip(outside, tensors, strict=True))
            self.replay(env, len(self.calls))
            return [env[at] for at in outputs]

        leaves: list[Any] = [self.met[at]() for at in outside]
        names, line = list(map(str, outside)), self.calls[0].line
        with rehearsed():
            body = trace_body(flat, leaves, names, line, differentiate=torch.is_grad_enabled(), strict=True)
        refuse_shared(body, copied=False)
        for x in body.captured:
            place(x, {})
        return body


def is_of_torch(func: Any) -> bool:
    """Whether a function is torch's, and asks nothing of autograd's engine."""
    if isinstance(func, OpOverload | types.BuiltinFunctionType | types.MethodDescriptorType):
        return True
    if isinstance(func, types.WrapperDescriptorType | types.MethodWrapperType):
        return True
    module = getattr(func, "__module__", None) or ""
    return func is constrain or (module.startswith("torch.") and not module.startswith("torch.autograd"))


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
