"""Reuses traces of code that changes objects, as a layer fills a cache: Python runs in every call, torch in the first.

`CallRecording` records the torch functions that the code calls while it is traced, and their arguments. `CallReplay`
runs the code of another call, with all its effects on objects, but not the torch functions. As long as it calls the
same ones, on tensors in the same places, it gets tensors of the same forms, which hold no computed values. Those still
alive at the end become results of the copied graph. Code that calls something else, or writes nodes, raises
`NotReusableError`. So the code may read any object.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from shardlib.core.torch_internals.torch_private import (
    INTO_FUNCTION,
    OpOverload,
    function_modes,
    saved_hooks,
    transforms,
)
from shardlib.core.torch_internals.traced_nodes import last_node
from shardlib.frontend.copy_nodes import make_like
from shardlib.frontend.guards.reached_state import plain_form
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.guards.value_kinds import PLAIN, QUICK
from shardlib.frontend.hazards.memory_queries import TENSOR_QUERIES, is_user_query
from shardlib.frontend.results import refuse_attributes
from shardlib.frontend.reuse.loop_replay import NotReusableError
from shardlib.frontend.side_effects.mutation_values import itself
from shardlib.tensor.sharded_tensor import ShardedTensor

Form = Any  # an argument or a result: tensors as their numbers, other values unchanged


class IdentityGuard(TorchFunctionMode):
    """Refuses user code that reads the storage or the history of a tensor, which differ between calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_identity_read(func, sys._getframe(1))
        return func(*args, **(kwargs or {}))


class MismatchError(NotReusableError):
    """A call that looked like a recorded one does something else."""


class _CallMatcher(IdentityGuard):
    """Numbers the arguments of torch functions in the order of their first use, `inputs` first.

    `met` holds a reference to each numbered tensor.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.met: list[Callable[[], Tensor | None]] = []
        self._number: dict[int, int] = {}
        for x in inputs:
            self._meet(x, partial(itself, x))

    def _meet(self, x: Tensor, refer: Callable[[], Tensor | None]) -> int:
        self._number[id(x)] = len(self.met)
        self.met.append(refer)
        return len(self.met) - 1

    def number(self, x: Tensor) -> int | None:
        """Returns the number of a tensor; None if it has none."""
        at = self._number.get(id(x))
        return at if at is not None and self.met[at]() is x else None  # another tensor may have the id now

    def form_of(self, func: Any, args: Any, kwargs: Any) -> Form:
        """Returns the form of a call: the function, its arguments, and the modes around it."""
        if transforms() or saved_hooks(True) is not None:
            raise NotReusableError("a transform or saved-tensor hooks are active")
        return func, self._form(args), self._form(kwargs), ambient(StateWalk())

    def _form(self, x: Any) -> Form:
        kind = type(x)
        if isinstance(x, Tensor):
            if (at := self.number(x)) is not None:
                return Tensor, at
            return Tensor, self._meet(x, partial(itself, x)), _form_of_outside(x)
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
        if kind in _ENUMS or isinstance(x, type):
            return x
        raise NotReusableError(f"a torch function takes or returns a {kind.__name__}")


class CallRecording(_CallMatcher):
    """Records calls in `steps`: the form of the call, the form of its result, and whether the result has tensors."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        self.steps: list[tuple[Form, Form, bool]] = []
        self.created: dict[int, Tensor] = {}  # tensors of the form of new ones, by number
        self.outputs: list[int] = []  # numbers of the tensors that may outlive the code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_identity_read(func, sys._getframe(1))
        request = self.form_of(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        with torch.DisableTorchFunction():
            self.note(func, args, kwargs or {}, request, out)
        return out

    def note(self, func: Any, args: Any, kwargs: Any, request: Form, out: Any) -> None:
        """Records a call and its result. Raises `NotReusableError` for a call that does more than compute."""
        if out is None and func is not Tensor.__setitem__ and _has_tensors([*args, *kwargs.values()]):
            raise NotReusableError("a call on a tensor returns no value")
        if isinstance(out, Tensor) and _writes(func) and self.number(out) not in self.created:
            raise NotReusableError("it writes to a tensor from outside")
        self.steps.append((request, self._result_form(out), _has_tensors(out)))

    def _result_form(self, out: Any) -> Form:
        if isinstance(out, Tensor) and self.number(out) is None:
            at = self._meet(out, partial(itself, out))
            self.created[at] = make_like(out)
            self.created[at].requires_grad_(out.requires_grad)
            return Tensor, at
        if isinstance(out, tuple | list) and _has_tensors(out):
            return type(out), *map(self._result_form, out)
        return self._form(out)

    def close(self) -> dict[int, int]:
        """Releases the tensors of the trace; returns the numbers of those from outside, by id."""
        numbers = {id(refer()): at for at, refer in enumerate(self.met) if at not in self.created}
        self.met.clear()
        self._number.clear()
        return numbers


class CallReplay(_CallMatcher):
    """Answers the torch calls of the code like those of a recording, with tensors of the same forms."""

    def __init__(self, record: CallRecording, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        mode = get_proxy_mode()
        assert mode is not None, "a function is being traced"
        self._record, self._graph, self._step = record, mode.tracer.graph, 0
        self.last = last_node(self._graph)
        self._wrong: NotReusableError | None = None  # raised again at the end, since user code may catch it
        self._entered = ExitStack()

    def __enter__(self) -> Any:
        self._entered.enter_context(intercept_autograd_functions(self, self._refuse_autograd_function))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered.close()

    def _refuse_autograd_function(self) -> None:
        self._wrong = self._wrong or NotReusableError("it calls an autograd Function")
        raise self._wrong

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            _refuse_identity_read(func, sys._getframe(1))
            return self.answer(func, args, kwargs or {})
        except NotReusableError as error:
            self._wrong = self._wrong or error
            if isinstance(func, OpOverload):  # torch's own code may call this, and would drop the error
                return func(*args, **(kwargs or {}))
            raise

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of the next call. Raises `MismatchError` if it is not the recorded one."""
        if self._step == len(self._record.steps):
            raise MismatchError("it makes more calls")
        request, result, has_tensors = self._record.steps[self._step]
        self._step += 1
        if self.form_of(func, args, kwargs) != request:
            raise MismatchError("it makes another call")
        if has_tensors:
            with torch.DisableTorchFunction():
                return self._create(result)
        if func is Tensor.__setitem__:
            return None
        if self._form(out := func(*args, **kwargs)) != result:
            raise MismatchError("a call has another result")
        return out

    def _create(self, form: Form) -> Any:
        """Creates tensors of the form of a result, which hold no computed values."""
        kind, *rest = form
        if kind is not Tensor:
            return kind(map(self._create, rest))
        (at,) = rest
        if at < len(self.met):
            return self.met[at]()
        like = self._record.created[at]
        x = make_like(like).requires_grad_(like.requires_grad)
        self._meet(x, weakref.ref(x))
        return x

    def end(self) -> dict[int, Tensor]:
        """Returns the created tensors that outlive the code, by number."""
        if self._wrong is not None:
            raise self._wrong
        if self._step != len(self._record.steps):
            raise MismatchError("it makes fewer calls")
        if last_node(self._graph) is not self.last:
            raise NotReusableError("it computes outside of torch functions")
        left = {at: x for at in self._record.created if (x := self.met[at]()) is not None}
        if not left.keys() <= set(self._record.outputs):
            raise NotReusableError("it keeps another value")
        refuse_attributes(("a result", None, x) for x in left.values())
        return left


@contextmanager
def intercept_autograd_functions(mode: TorchFunctionMode, act: Callable[[], None]) -> Iterator[None]:
    """While on, calls `act` before each autograd Function that runs under `mode`, which does not see it."""
    into = INTO_FUNCTION.value

    def entered(args: Any) -> Any:
        if any(other is mode for other in function_modes()):  # another thread has other modes
            act()
        return into(args)

    with INTO_FUNCTION.holding(entered):
        yield


def _refuse_identity_read(func: Any, caller: types.FrameType) -> None:
    """Raises `NotReusableError` if user code reads the storage or the history of a tensor."""
    if func in TENSOR_QUERIES and is_user_query(caller):
        raise NotReusableError("it reads the identity of a tensor")


def _form_of_outside(x: Tensor) -> Form:
    """Returns the facts that a tensor from outside must share with the recorded one."""
    with torch.DisableTorchFunction():
        form = x._form if type(x) is ShardedTensor else plain_form(x)
        return form, x.requires_grad, isinstance(x, nn.Parameter)


def _has_tensors(out: Any) -> bool:
    return isinstance(out, Tensor) or (isinstance(out, tuple | list) and any(map(_has_tensors, out)))


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


_ENUMS = (torch.memory_format, torch.layout)
