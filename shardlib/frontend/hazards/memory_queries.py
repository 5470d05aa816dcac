"""Questions of a traced function about an argument's memory that nothing but the argument at hand can answer.

Where a tensor begins in its storage, and whether a bit of it says that it is to be conjugated, is no part of a call's
key: batches that are slices of one tensor run one program. A function that asks is told for tensors of their own
memory, and refused others. Whether a tensor is a leaf is part of the key, and told of the caller's tensor, not of what
stands for it. Addresses, storages and counts of writes, which differ from call to call, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import is_internal, line_at
from shardlib.core.torch_private import ASKS_BASE, ASKS_IS_VIEW, ASKS_VERSION
from shardlib.frontend.hazards.grad_reads import ASKED as GRADS
from shardlib.frontend.hazards.grad_reads import Grads


class Asked(TorchFunctionMode):
    """While on, notes the line of the user's where a tensor's place in memory is asked for, and what torch refused."""

    def __init__(self, grads: Grads) -> None:
        super().__init__()
        self.grads = grads
        self.explain: Callable[[Exception], ShardingError | None] = lambda error: None
        self.line: Any = None
        self.refusal: ShardingError | None = None  # for the first question that a tensor of a trace cannot answer
        self.inputs: dict[int, tuple[str, Any]] = {}  # what stands for an input -> its name, the caller's tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS or (func in _STRIDED and (len(args) > 3 or (kwargs and "storage_offset" in kwargs))):
            frame = _asking(sys._getframe(1))
            if not is_internal(frame.f_code.co_filename):
                self.line = line_at(frame.f_code, frame.f_lineno)
        elif func in GRADS:
            self.grads.asked(func, args[0], sys._getframe(1))
        elif func in _OF_THE_CALLERS:
            name, x = self.inputs.get(id(args[0]), ("a value of the trace", args[0]))
            frame = _asking(sys._getframe(1))
            if func in (_IS_LEAF, _RETAINS_GRAD):
                return func(x) if getattr(x, "requires_grad", False) else func(*args)
            if not is_internal(frame.f_code.co_filename) and (what := self._never_told(func, args[0], x)):
                self.refusal = _never(name, what, line_at(frame.f_code, frame.f_lineno))
                raise self.refusal
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.refusal = self.refusal or self.explain(error)
            raise

    def _never_told(self, func: Any, asked: Any, x: Any) -> str:
        """What is asked for, if that is nothing that a trace can tell of this tensor."""
        if func is torch.Tensor.data_ptr or (id(asked) in self.inputs and func != GRAD_FN):
            return _OF_THE_CALLERS[func]
        return _OF_THE_CALLERS[func] if func == GRAD_FN and x is not asked and not x.is_leaf else ""


def _never(name: str, what: str, line: Any) -> ShardingError:
    return ShardingError(
        f"the traced function asks for {what} of {name}",
        [str(line)],
        rule="a program runs with other tensors in each call: what depends on who they are is nothing that it knows",
        remedy="ask before the call, and pass the answer as an argument; `x is y` tells whether two arguments are one",
    )


def _asking(frame: Any) -> Any:
    """Who calls, where a mode is told of it in this frame."""
    return frame.f_back.f_back if frame.f_code.co_name == "handle_torch_function" else frame  # of a method in Python


def at_home(x: Any) -> bool:
    """Whether a tensor begins where its storage does, and its bytes are its values."""
    return not isinstance(x, torch.Tensor) or (not x.storage_offset() and not x.is_conj() and not x.is_neg())


def refuse_guests(name: str, line: Any, arguments: Iterable[tuple[str, Any]]) -> None:
    """Refuse arguments that are not `at_home` for a function that asks."""
    wrong = [
        f"{of} begins at element {x.storage_offset()} of its storage" if x.storage_offset() else f"{of} is conjugated"
        for of, x in arguments
        if not at_home(x)
    ]
    if wrong:
        raise ShardingError(
            f"{name} asks where its arguments lie in memory, at {line}",
            wrong,
            rule="a program's inputs begin at element 0 of memory of their own, whatever they are views of",
            remedy="pass x.clone(), or leave storage_offset out",
        )


_QUESTIONS = frozenset(
    {torch.Tensor.storage_offset, torch.Tensor.is_conj, torch.is_conj, torch.Tensor.is_neg, torch.is_neg}
)
_IS_LEAF, _RETAINS_GRAD = torch.Tensor.is_leaf.__get__, torch.Tensor.retains_grad.__get__  # type: ignore[attr-defined]
GRAD_FN = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_OF_THE_CALLERS: dict[Any, str] = {
    _IS_LEAF: "",
    _RETAINS_GRAD: "",
    GRAD_FN: "the history (grad_fn)",
    torch.Tensor.data_ptr: "the address (data_ptr)",
    torch.Tensor.untyped_storage: "the storage",
    torch.Tensor.storage: "the storage",
    ASKS_VERSION: "the number of writes (_version)",
    ASKS_IS_VIEW: "what it is a view of (_is_view)",
    ASKS_BASE: "what it is a view of (_base)",
    torch.Tensor.is_set_to: "the storage (is_set_to)",
    torch.Tensor.output_nr.__get__: "the place in its history (output_nr)",  # type: ignore[attr-defined]
}
_STRIDED = frozenset(
    {
        *(torch.as_strided, torch.Tensor.as_strided, torch.as_strided_copy, torch.Tensor.as_strided_),
        *(torch.as_strided_scatter, torch.Tensor.as_strided_scatter),
    }
)
ASKED = _QUESTIONS.union(_OF_THE_CALLERS, _STRIDED)


def user_is_asking(frame: Any) -> bool:
    """Whether a function mode that is told of a question in this frame is told of a user's."""
    return not is_internal(_asking(frame).f_code.co_filename)
