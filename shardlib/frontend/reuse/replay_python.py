"""Pieces that change objects they are given, as a layer fills a cache: Python runs in every call, torch in the first.

`Recording` notes what the code of a piece asks of torch while it is traced apart: functions in order, and what they are
given. `Following` runs the code of another call for real, with everything that it does to objects, but not the
functions: as long as it asks for the same ones, of tensors in the same places, it is given tensors of the same forms,
which nothing has computed. Those that are still there when it ends become results of the copy. Whoever asks for
something else, or leaves the dispatcher a trace of it, is `NotOnceError`. So the code may look at what it likes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from shardlib.core.torch_private import INTO_FUNCTION, OpOverload, function_modes, saved_hooks, transforms
from shardlib.frontend.copy_nodes import alike
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.state_walk import plain_form
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.guards.value_kinds import PLAIN, QUICK
from shardlib.frontend.hazards.memory_queries import ASKED, user_is_asking
from shardlib.frontend.results import refuse_attributes
from shardlib.frontend.reuse.loop_replay import NotOnceError
from shardlib.frontend.side_effects.mutation_values import itself
from shardlib.tensor.sharded_tensor import ShardedTensor

Form = Any  # of what a function is given, or gives: tensors by their numbers, all else as it is


class Asking(TorchFunctionMode):
    """Refuses to tell what a tensor of one piece cannot tell for those of others: where it begins, where it is from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and user_is_asking(sys._getframe(1)):
            raise NotOnceError("it asks who a tensor is")
        return func(*args, **(kwargs or {}))


class OtherError(NotOnceError):
    """A call that looked like another one does something else."""


class _Asked(Asking):
    """Numbers the tensors that functions of torch are given, in the order in which they come; `given` come first."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.met: list[Callable[[], Tensor | None]] = []
        self._number: dict[int, int] = {}
        for x in given:
            self._meet(x, partial(itself, x))

    def _meet(self, x: Tensor, refer: Callable[[], Tensor | None]) -> int:
        self._number[id(x)] = len(self.met)
        self.met.append(refer)
        return len(self.met) - 1

    def number(self, x: Tensor) -> int | None:
        """That of a tensor which was met."""
        at = self._number.get(id(x))
        return at if at is not None and self.met[at]() is x else None  # another one may have its id by now

    def form_of(self, func: Any, args: Any, kwargs: Any) -> Form:
        """What is asked: a function, what it is given, and the modes around it."""
        if transforms() or saved_hooks(True) is not None:
            raise NotOnceError("a transform, or hooks on what is saved")
        return func, self._form(args), self._form(kwargs), ambient(State())

    def _form(self, x: Any) -> Form:
        kind = type(x)
        if isinstance(x, Tensor):
            if (at := self.number(x)) is not None:
                return Tensor, at
            return Tensor, self._meet(x, partial(itself, x)), _outside(x)
        if kind in QUICK and kind is not float:
            return kind, x
        if kind in PLAIN:
            return kind, repr(x)
        if kind is tuple or kind is list:
            return kind, *map(self._form, x)
        if kind is dict:
            return kind, *((k, self._form(y)) for k, y in x.items())
        if kind is slice:
            return kind, self._form(x.start), self._form(x.stop), self._form(x.step)
        if kind in _NAMES or isinstance(x, type):
            return x
        raise NotOnceError(f"a function of torch has to do with a {kind.__name__}")


class Recording(_Asked):
    """Notes what is asked, in `steps`: each with the form of what comes of it, and the forms of new tensors."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__(given)
        self.steps: list[tuple[Form, Form, bool]] = []
        self.made: dict[int, Tensor] = {}  # by number, what new ones are like
        self.outputs: list[int] = []  # what may be left, by number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and user_is_asking(sys._getframe(1)):
            raise NotOnceError("it asks who a tensor is")
        asked = self.form_of(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        with torch.DisableTorchFunction():
            self.note(func, args, kwargs or {}, asked, out)
        return out

    def note(self, func: Any, args: Any, kwargs: Any, request: Form, out: Any) -> None:
        """Note a call and its result. Raises NotOnceError for one that does more than compute."""
        if out is None and func is not Tensor.__setitem__ and _has_tensors([*args, *kwargs.values()]):
            raise NotOnceError("what it does to a tensor is no value")
        if isinstance(out, Tensor) and _writes(func) and self.number(out) not in self.made:
            raise NotOnceError("it writes to what it finds")
        self.steps.append((request, self._gives(out), _has_tensors(out)))

    def _gives(self, out: Any) -> Form:
        if isinstance(out, Tensor) and self.number(out) is None:
            at = self._meet(out, partial(itself, out))
            self.made[at] = alike(out)
            self.made[at].requires_grad_(out.requires_grad)
            return Tensor, at
        if isinstance(out, tuple | list) and _has_tensors(out):
            return type(out), *map(self._gives, out)
        return self._form(out)

    def close(self) -> dict[int, int]:
        """Let the values of the trace go; returns the numbers of those that come from outside, by their ids."""
        found = {id(refer()): at for at, refer in enumerate(self.met) if at not in self.made}
        self.met.clear()
        self._number.clear()
        return found


class Following(_Asked):
    """Takes what is asked by one call for what was asked in another, and gives tensors of the same forms."""

    def __init__(self, record: Recording, given: Sequence[Tensor]) -> None:
        super().__init__(given)
        mode = get_proxy_mode()
        assert mode is not None, "a function is being traced"
        self._record, self._graph, self._step = record, mode.tracer.graph, 0
        self.last = next(iter(reversed(self._graph.nodes)), None)
        self._wrong: NotOnceError | None = None  # which somebody may have caught
        self._door = ExitStack()

    def __enter__(self) -> Any:
        into = INTO_FUNCTION.value

        def entered(args: Any) -> Any:
            if any(mode is self for mode in function_modes()):  # another thread has others
                self._wrong = self._wrong or NotOnceError("something has a gradient of its own")
                raise self._wrong
            return into(args)

        self._door.enter_context(INTO_FUNCTION.holding(entered))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._door.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if func in ASKED and user_is_asking(sys._getframe(1)):
                raise NotOnceError("it asks who a tensor is")
            return self.answer(func, args, kwargs or {})
        except NotOnceError as error:
            self._wrong = self._wrong or error
            if isinstance(func, OpOverload):  # torch's own code may ask, which passes on no error
                return func(*args, **(kwargs or {}))
            raise

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._step == len(self._record.steps):
            raise OtherError("it asks for more")
        asked, gives, has_tensors = self._record.steps[self._step]
        self._step += 1
        if self.form_of(func, args, kwargs) != asked:
            raise OtherError("it asks for something else")
        if has_tensors:
            with torch.DisableTorchFunction():
                return self._made(gives)
        if func is Tensor.__setitem__:
            return None
        if self._form(out := func(*args, **kwargs)) != gives:
            raise OtherError("it is told something else")
        return out

    def _made(self, gives: Form) -> Any:
        kind, *rest = gives
        if kind is not Tensor:
            return kind(map(self._made, rest))
        (at,) = rest
        if at < len(self.met):
            return self.met[at]()
        like = self._record.made[at]
        x = alike(like).requires_grad_(like.requires_grad)
        self._meet(x, weakref.ref(x))
        return x

    def end(self) -> dict[int, Tensor]:
        """The code has run: what is left of what was made, by number."""
        if self._wrong is not None:
            raise self._wrong
        if self._step != len(self._record.steps):
            raise OtherError("it asks for less")
        if next(iter(reversed(self._graph.nodes))) is not self.last:
            raise NotOnceError("something is computed where nobody sees it")
        left = {at: x for at in self._record.made if (x := self.met[at]()) is not None}
        if not left.keys() <= set(self._record.outputs):
            raise NotOnceError("it keeps another value")
        refuse_attributes(("a result", None, x) for x in left.values())
        return left


def _outside(x: Tensor) -> Form:
    """What is to be the same of a tensor that nobody made here."""
    with torch.DisableTorchFunction():
        form = x._form if type(x) is ShardedTensor else plain_form(x)
        return form, x.requires_grad, isinstance(x, nn.Parameter)


def _has_tensors(out: Any) -> bool:
    return isinstance(out, Tensor) or (isinstance(out, tuple | list) and any(map(_has_tensors, out)))


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


_NAMES = (torch.memory_format, torch.layout)
