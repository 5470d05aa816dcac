"""Decides whether a call of torch only computes new values, from the nodes that it writes and from its results.

The lists of names allow calls. A call outside them may have an effect: it writes to a tensor, draws random numbers,
starts or reads a gradient, hooks a tensor, or reads a value or its history.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from shardlib.core.torch_internals.torch_private import PYTHON_MODULES, TENSOR_HOOKS, OpOverload, schema_of
from shardlib.frontend.op_meta_cache import BY_VALUES, OWN
from shardlib.ops.constraint import constrain

_FLAGS = ("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_nested", "is_quantized")
_GETTERS = frozenset({"shape", "ndim", "dtype", "device", "layout", "T", "mT", "H", "mH", *_FLAGS})
_SHAPE_QUERIES = frozenset(
    {*_GETTERS, "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex"}
)
# Methods that may return their operand.
_MAY_RETURN_OPERAND = frozenset(
    {"contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "dropout"}
)


def only_computes(func: Any, args: Any, out: Any, tracer: Any, last: fx.Node | None) -> bool:
    """Returns whether a call only computed new values from its operands; its nodes follow `last` in the graph."""
    nodes = set(itertools.takewhile(lambda node: node is not last, reversed(tracer.graph.nodes)))
    if not is_of_torch(func) or not all(node.op == "call_function" and _is_pure(node.target) for node in nodes):
        return False
    name = getattr(func.__self__ if isinstance(func, types.MethodWrapperType) else func, "__name__", "")
    parts = out if isinstance(out, tuple | list) else (out,)
    if not any(isinstance(x, Tensor) for x in parts):
        return name in _SHAPE_QUERIES and not nodes
    if args and out is args[0]:
        return name in _MAY_RETURN_OPERAND and not nodes
    slots = [get_proxy_slot(x, tracer, None) if isinstance(x, Tensor) else None for x in parts]
    is_new = all(slot is not None and slot.proxy.node in nodes for slot in slots)
    return is_new and not any(x.requires_grad and x.is_leaf for x in parts)


def has_hooks(tensors: Iterable[Tensor]) -> bool:
    """Returns whether one of these tensors has a hook on its gradient."""
    with torch.DisableTorchFunction():
        return any(getattr(x, kind, None) for x in tensors for kind in TENSOR_HOOKS)


def is_of_torch(func: Any) -> bool:
    """Returns whether a function is torch's own and may only compute."""
    if isinstance(func, types.MethodWrapperType):  # an attribute's getter
        return func.__name__ == "__get__" and getattr(func.__self__, "__name__", None) in _GETTERS
    if isinstance(func, OpOverload | types.BuiltinFunctionType | types.MethodDescriptorType):
        return True
    if isinstance(func, types.WrapperDescriptorType):
        return func is Tensor.__getitem__
    return func is constrain or getattr(func, "__module__", None) in PYTHON_MODULES


@cache
def _is_pure(op: Any) -> bool:
    if not isinstance(op, OpOverload):
        return op is operator.getitem
    schema = schema_of(op)
    is_trusted = op.namespace == "aten" or schema.name in {*OWN, "shardlib::constrain"}
    is_trusted &= not schema.name.endswith("batch_norm")  # it writes to running statistics, unlike its schema says
    return is_trusted and bool(schema.returns) and not schema.is_mutable and BY_VALUES.isdisjoint(op.tags)
