"""Pointwise ops of a trace that are called again on operands of the same form: nobody is asked what they make.

Torch takes half a millisecond for a node: it looks for decompositions, computes the result on fake tensors, notes what
it knows. Of the second update `p - rate * grad` of parameters of one shape all of that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from shardlib.internals import SLOT, FakeTensor, OpOverload, fake_like, schema_of, set_slot
from shardlib.rules.pointwise import is_pointwise

Key = tuple[Any, ...]
# They take every number, and make the same of each: a rate is another one in every call.
_OF_ANY_NUMBER = frozenset({"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp"})


class Repeated:
    """What pointwise ops made in a trace, by the forms of their operands."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._known: dict[Key, Any] = {}  # the result of the first call, which all share; None: it was not one op
        self._is_pointwise: dict[int, bool] = {}  # by the id of an op, which torch keeps

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """What `op` makes, by `call`, or as it did before."""
        nodes: list[Any] = []
        if (key := self._key(op, args, kwargs, nodes)) is None:
            return call()
        known = self._known.get(key)
        if known is not None:
            return self._again(op, known, nodes, kwargs)
        out = call()
        if key not in self._known:
            self._known[key] = self._alone(op, nodes, out)
        return out

    def _key(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], nodes: list[Any]) -> Key | None:
        """The forms of all operands, which join `nodes` as they stand in the graph; None of other than plain calls."""
        if (found := self._is_pointwise.get(id(op))) is None:
            found = isinstance(op, OpOverload) and op.namespace == "aten" and is_pointwise(op)
            found = found and [x.alias_info for x in schema_of(op).returns] == [None]
            self._is_pointwise[id(op)] = found
        if not found:
            return None
        key: list[Any] = [id(op), torch.get_default_dtype(), *kwargs]
        for x in (*args, *kwargs.values()):
            if type(x) is FakeTensor:
                slot = get_proxy_slot(x, self._tracer, None)
                if slot is None or slot.constant is not None or x.dtype.is_complex:
                    return None
                nodes.append(slot.proxy.node)
                key += (x.shape, x.stride(), x.dtype, x.device)
            elif type(x) is float and op.overloadpacket.__name__ in _OF_ANY_NUMBER:
                nodes.append(x)
                key.append(float)
            elif x is None or type(x) in (bool, int, float, str, torch.dtype):
                nodes.append(x)
                key += (type(x), x)
            else:
                return None
        return tuple(key)

    def _alone(self, op: Any, nodes: Sequence[Any], out: Any) -> Any:
        """What the node of a result says of it, where that is all that the call wrote."""
        slot = get_proxy_slot(out, self._tracer, None) if type(out) is FakeTensor else None
        if slot is None or slot.constant is not None:
            return None
        node: fx.Node = slot.proxy.node
        same = node.target is op and [*node.args, *node.kwargs.values()] == nodes
        return node.meta["val"] if same else None

    def _again(self, op: OpOverload, form: Any, nodes: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        count, name = len(nodes) - len(kwargs), op.overloadpacket.__name__
        named = dict(zip(kwargs, nodes[count:], strict=True))
        node = self._tracer.create_node("call_function", op, tuple(nodes[:count]), named, name)
        node.meta["val"] = form
        made: Tensor = fake_like(form)
        set_slot(made, self._tracer, SLOT(fx.Proxy(node, self._tracer), None))
        return made
