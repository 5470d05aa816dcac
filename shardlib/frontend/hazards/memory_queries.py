"""Answers or refuses queries of a traced function about memory, history and `.grad` of tensors.

The storage offset and the conjugate bit of a tensor are not in a call's key: batches that are slices of one tensor run
one program. If a function queries them, it gets the answer for tensors with memory of their own, and other arguments
are refused. Queries for leaves are answered for the caller's tensor, not for its stand-in. Addresses, storages and
counts of writes differ from call to call: such queries are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import is_internal, line_at
from shardlib.core.torch_internals.torch_private import ASKS_BASE, ASKS_IS_VIEW, ASKS_VERSION
from shardlib.frontend.hazards.grad_reads import GRAD_ACCESSES, GradReads


class TensorQueryMode(TorchFunctionMode):
    """Answers queries while on; notes the user's line of one about memory, and the first refusal."""

    def __init__(self, grads: GradReads) -> None:
        super().__init__()
        self.grads = grads
        self.explain: Callable[[Exception], ShardingError | None] = lambda error: None
        self.line: Any = None
        self.refusal: ShardingError | None = None  # of the first query that a tensor of a trace cannot answer
        self.inputs: dict[int, tuple[str, Any]] = {}  # id of a stand-in -> name and tensor of the caller

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS or (func in _STRIDED and (len(args) > 3 or (kwargs and "storage_offset" in kwargs))):
            frame = _query_frame(sys._getframe(1))
            if not is_internal(frame.f_code.co_filename):
                self.line = line_at(frame.f_code, frame.f_lineno)
        elif func in GRAD_ACCESSES:
            self.grads.note_access(func, args[0], sys._getframe(1))
        elif func in _OF_THE_CALLERS:
            name, x = self.inputs.get(id(args[0]), ("a value of the trace", args[0]))
            frame = _query_frame(sys._getframe(1))
            if func in (_IS_LEAF, _RETAINS_GRAD):
                return func(x) if getattr(x, "requires_grad", False) else func(*args)
            if not is_internal(frame.f_code.co_filename) and (fact := self._find_varying_fact(func, args[0], x)):
                self.refusal = _varying_error(name, fact, line_at(frame.f_code, frame.f_lineno))
                raise self.refusal
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.refusal = self.refusal or self.explain(error)
            raise

    def _find_varying_fact(self, func: Any, stand_in: Any, x: Any) -> str:
        """Returns the queried fact in words if it differs from call to call; else ""."""
        if func is torch.Tensor.data_ptr or (id(stand_in) in self.inputs and func != GRAD_FN):
            return _OF_THE_CALLERS[func]
        return _OF_THE_CALLERS[func] if func == GRAD_FN and x is not stand_in and not x.is_leaf else ""


def _varying_error(name: str, fact: str, line: Any) -> ShardingError:
    return ShardingError(
        f"the traced function asks for {fact} of {name}",
        [str(line)],
        rule="a program runs with other tensors in each call: what depends on who they are is nothing that it knows",
        remedy="ask before the call, and pass the answer as an argument; `x is y` tells whether two arguments are one",
    )


def _query_frame(frame: Any) -> Any:
    """Returns the caller's frame of a query, given the frame around the mode."""
    return frame.f_back.f_back if frame.f_code.co_name == "handle_torch_function" else frame  # of a method in Python


def owns_memory(x: Any) -> bool:
    """Returns whether a tensor begins at its storage's first element, and its bytes are its values."""
    return not isinstance(x, torch.Tensor) or (not x.storage_offset() and not x.is_conj() and not x.is_neg())


def refuse_offset_inputs(name: str, line: Any, arguments: Iterable[tuple[str, Any]]) -> None:
    """Refuses arguments without memory of their own, for a function that queries it."""
    wrong = [
        f"{label} begins at element {x.storage_offset()} of its storage"
        if x.storage_offset()
        else f"{label} is conjugated"
        for label, x in arguments
        if not owns_memory(x)
    ]
    if wrong:
        raise ShardingError(
            f"{name} asks where its arguments lie in memory, at {line}",
            wrong,
            rule="a program's inputs begin at element 0 of memory of their own, also if they are views",
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
TENSOR_QUERIES = _QUESTIONS.union(_OF_THE_CALLERS, _STRIDED)


def is_user_query(frame: Any) -> bool:
    """Returns whether the query of a tensor, around a mode's frame, comes from the user's code."""
    return not is_internal(_query_frame(frame).f_code.co_filename)
