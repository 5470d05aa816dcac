"""Ops that are called again on operands of the same form: nobody is asked what they make, in this trace or a later one.

Torch takes half a millisecond for a node: it looks for decompositions, computes the result on fake tensors, notes what
it knows. Of the second product of two matrices of some shapes all of that is known, and so it is of a view, which is in
the memory of its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from shardlib.core.aten.op_traits import is_view, may_show
from shardlib.core.bounded_cache import Bounded
from shardlib.core.torch_private import SLOT, FakeTensor, OpOverload, fake_of, schema_of, set_slot

Key = tuple[Any, ...]
# They take every number, and make the same of each: a rate is another one in every call.
_OF_ANY_NUMBER = frozenset({"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp", "pow"})
_PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)})
_BY_VALUES = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


_aten = torch.ops.aten
# Views, in the memory of the first operand, of which nothing is known but where they are.
_VIEWS = frozenset({_aten.detach.default, _aten.view.default, _aten.t.default, _aten.transpose.int})
_VIEWS |= {_aten.permute.default, _aten.expand.default, _aten.unsqueeze.default, _aten.slice.Tensor}


class _Form(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


def _form(x: Any) -> _Form:
    return _Form(x.shape, x.stride(), x.dtype, x.fake_device, x.storage_offset())


def _made(op: Any, form: _Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """What an op makes that makes something of this form."""
    x = next(x for x in (*args, *kwargs.values()) if type(x) is FakeTensor)
    memory = args[0].untyped_storage() if op in _VIEWS else None
    made: Tensor = fake_of(x.fake_mode, *form[:4], memory, form.offset)
    return made


_FORMS: Bounded[Key, _Form | None] = Bounded(1 << 13)  # what ops make; None: it was not one node


class Repeated:
    """What ops make in a trace, by the forms of their operands."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._known: dict[Key, Any] = {}  # what nodes of this trace say of their results, which all share

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """What `op` makes, by `call`, or as it did before."""
        nodes: list[Any] = []
        if (key := self._key(op, args, kwargs, nodes)) is None:
            return self._asked(op, args, call)
        if (known := _FORMS.get(key)) is not None:
            if (form := self._known.get(key)) is None:
                form = self._known[key] = _made(op, known, args, kwargs)
            return self._again(op, form, _made(op, known, args, kwargs), nodes, kwargs)
        out = call()
        if key not in _FORMS:
            form = self._known[key] = self._alone(op, nodes, out)
            _FORMS[key] = None if form is None else _form(form)
        return out

    def _asked(self, op: Any, args: Sequence[Any], call: Callable[[], Any]) -> Any:
        """What a call makes; what torch asked on the way of a number that changes nothing is forgotten."""
        given = next((x for x in args if type(x) is torch.SymFloat), None)
        if given is None or not _is_plain(op) or op.overloadpacket.__name__ not in _OF_ANY_NUMBER:
            return call()
        guards: list[Any] = given.node.shape_env.guards
        count, out = len(guards), call()
        slot = get_proxy_slot(out, self._tracer, None) if type(out) is FakeTensor else None
        node = None if slot is None else slot.proxy.node
        if node is not None and node.target is op and any("scalar" in x.meta for x in node.all_input_nodes):
            # one that equals something is a constant by now
            guards[count:] = [g for g in guards[count:] if getattr(g.expr, "rel_op", "") == "=="]
        return out

    def _key(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], nodes: list[Any]) -> Key | None:
        """The forms of all operands, which join `nodes` as they stand in the graph; None of other than plain calls."""
        if not _is_plain(op) and op not in _VIEWS:
            return None
        key: list[Any] = [op, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        plain = True  # whether no tensor is among the arguments
        for x in (*args, *kwargs.values()):
            kind = type(x)
            if kind is FakeTensor:
                slot = get_proxy_slot(x, self._tracer, None)
                if slot is None or slot.constant is not None or x.layout is not torch.strided or x.dtype.is_complex:
                    return None
                nodes.append(slot.proxy.node)
                key += (x.shape, x.stride(), x.dtype, x.fake_device)  # `device` would be an op
                if op in _VIEWS:
                    if x.constant is not None or x.is_neg():
                        return None
                    key.append(x.storage_offset())
                plain = False
            elif kind is float and op.overloadpacket.__name__ in _OF_ANY_NUMBER:
                nodes.append(x)
                key.append(float)
            elif kind in _PLAIN:
                nodes.append(x)
                key += (kind, x)
            elif (kind is list or kind is tuple) and all(type(y) is int or type(y) is bool for y in x):
                nodes.append(x)
                key += (kind, *x)
            else:
                return None
        return None if plain else tuple(key)

    def _alone(self, op: Any, nodes: Sequence[Any], out: Any) -> Any:
        """What the node of a result says of it, where that is all that the call wrote."""
        slot = get_proxy_slot(out, self._tracer, None) if type(out) is FakeTensor else None
        if slot is None or slot.constant is not None:
            return None
        node: fx.Node = slot.proxy.node
        same = node.target is op and [*node.args, *node.kwargs.values()] == nodes
        form = node.meta["val"]
        return form if same and form.layout is torch.strided else None

    def _again(
        self, op: OpOverload, form: Any, made: Tensor, nodes: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The node, whose value is of this form, and what was made as its result."""
        count, name = len(nodes) - len(kwargs), op.overloadpacket.__name__
        named = dict(zip(kwargs, nodes[count:], strict=True))
        node = self._tracer.create_node("call_function", op, tuple(nodes[:count]), named, name)
        node.meta["val"] = form
        set_slot(made, self._tracer, SLOT(fx.Proxy(node, self._tracer), None))
        return made


@cache
def _is_plain(op: Any) -> bool:
    """Whether a call makes one tensor in memory of its own, whose form is a matter of those of its operands."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or is_view(op) or may_show(op):
        return False
    schema = schema_of(op)
    made = [(str(x.type), x.alias_info) for x in schema.returns]
    return made == [("Tensor", None)] and not schema.is_mutable and _BY_VALUES.isdisjoint(op.tags)
