"""Caches the forms of ops' results by the forms of their operands, across traces.

Torch takes half a millisecond for a node: it looks for decompositions, computes the result on fake tensors, and notes
facts. The second product of two matrices of the same shapes skips that. So does a view, which is in the memory of its
operand, and an op with several results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from shardlib.core.aten.op_traits import is_view, may_return_view
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.torch_internals.fake_tensors import make_fake
from shardlib.core.torch_internals.torch_private import SLOT, FakeTensor, OpOverload, memory_of, schema_of, set_slot

Key = tuple[Any, ...]
# Their results have the same form for every number: a learning rate is another number in every call.
_OF_ANY_NUMBER = frozenset({"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp", "pow"})
_PLAIN = frozenset({bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None)})
BY_VALUES = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


_aten = torch.ops.aten
# Views in the memory of the first operand.
_VIEWS = frozenset({_aten.detach.default, _aten.view.default, _aten.t.default, _aten.transpose.int})
_VIEWS |= {_aten.permute.default, _aten.expand.default, _aten.unsqueeze.default, _aten.slice.Tensor}
_VIEWS |= {_aten._unsafe_view.default, _aten.select.int, _aten.squeeze.dim}
_VIEWS |= {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int}
OWN = frozenset({"shardlib::attention", "shardlib::attention_backward"})  # ops of shardlib's that only compute


class _Facts(NamedTuple):
    """Constant facts about an op."""

    op: Any
    is_cached: bool
    is_view: bool
    takes_any_number: bool


class _Form(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


class _Results(NamedTuple):
    """The results of an op: tensors of these forms, in a tuple, in a list, or a single one (None)."""

    kind: type | None
    forms: tuple[_Form | None, ...]  # None: no tensor


def _form(x: Any) -> _Form | None:
    return None if x is None else _Form(x.shape, x.stride(), x.dtype, x.fake_device, x.storage_offset())


def _fakes(results: _Results, first: Any, is_view: bool) -> list[Tensor | None]:
    """Returns tensors of these forms; those of a view are in the memory of its first operand."""
    mode, memory = first.fake_mode, first.untyped_storage() if is_view else None
    return [x if x is None else make_fake(mode, *x[:4], memory, x.offset) for x in results.forms]


# Results by key; None if the call wrote more than the op's own nodes.
_FORMS: BoundedCache[Key, _Results | None] = BoundedCache(1 << 13)


class OpMetaCache:
    """The results of ops in a trace, by the forms of their operands."""

    def __init__(self, tracer: Any, write: Callable[..., fx.Node]) -> None:
        self._tracer, self._write = tracer, write
        self._slots = tracer.tensor_tracker
        self._known: dict[Key, tuple[_Results, list[Any]]] = {}  # with the `val`s that nodes of this trace share

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """Returns the results of `op`: those of `call`, or new tensors of the cached forms."""
        nodes: list[Any] = []
        tensors: list[Any] = []
        if (key := self._key(op, args, kwargs, nodes, tensors)) is None:
            return self._call_any_number(op, args, call)
        if (entry := self._known.get(key)) is None and (results := _FORMS.get(key)) is not None:
            entry = self._known[key] = results, _fakes(results, tensors[0], op in _VIEWS)
        if entry is not None:
            return self._again(op, entry, tensors[0], nodes, kwargs)
        out = call()
        if key not in _FORMS:
            values = self._alone(op, nodes, tensors[0], out)
            kind = None if type(out) is FakeTensor else type(out)
            _FORMS[key] = results = None if values is None else _Results(kind, tuple(map(_form, values)))
            if results is not None and values is not None:
                self._known[key] = results, values
        return out

    def _call_any_number(self, op: Any, args: Sequence[Any], call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, and drops torch's guards on a number that does not change the form."""
        number = next((x for x in args if type(x) is torch.SymFloat), None)
        if number is None or not _is_plain(op) or op.overloadpacket.__name__ not in _OF_ANY_NUMBER:
            return call()
        guards: list[Any] = number.node.shape_env.guards
        count, out = len(guards), call()
        slot = get_proxy_slot(out, self._tracer, None) if type(out) is FakeTensor else None
        node = None if slot is None else slot.proxy.node
        if node is not None and node.target is op and any("scalar" in x.meta for x in node.all_input_nodes):
            # an equality makes a constant of the number
            guards[count:] = [g for g in guards[count:] if getattr(g.expr, "rel_op", "") == "=="]
        return out

    def _key(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], nodes: list[Any], tensors: list[Any]
    ) -> Key | None:
        """Returns the key of a plain call, or None. Operands join `nodes`, as in the graph, and `tensors`."""
        facts = _facts.get(id(op)) or _note(op)
        if not facts.is_cached:
            return None
        key: list[Any] = [id(op), torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        for x in (*args, *kwargs.values()):
            kind = type(x)
            if kind is FakeTensor:
                if (node := self._operand(x, facts, key)) is None:
                    return None
                nodes.append(node)
                tensors.append(x)
            elif kind is float and facts.takes_any_number:
                nodes.append(x)
                key.append(float)
            elif kind in _PLAIN:
                nodes.append(x)
                key += (kind, x)
            elif (kind is list or kind is tuple) and all(type(y) is int or type(y) is bool for y in x):
                nodes.append(x)
                key += (kind, *x)
            elif kind is list and all(type(y) is FakeTensor for y in x):
                key += (kind, len(x))
                parts = [self._operand(y, facts, key) for y in x]
                if None in parts:
                    return None
                nodes.append(parts)
                tensors += x
            else:
                return None
        return tuple(key) if tensors else None

    def _operand(self, x: Any, facts: _Facts, key: list[Any]) -> fx.Node | None:
        """Returns the node of a tensor, whose form joins the key; None if the tensor has other properties."""
        slot = self._slots.get(x)
        if slot is None or slot.constant is not None or x.layout is not torch.strided or x.dtype.is_complex:
            return None
        key += (x.shape, x.stride(), x.dtype, x.fake_device)  # `device` would be an op
        if facts.is_view:
            if x.constant is not None or x.is_neg():
                return None
            key.append(x.storage_offset())
        node: fx.Node = slot.proxy.node
        return node

    def _alone(self, op: Any, nodes: Sequence[Any], first: Any, out: Any) -> list[Any] | None:
        """Returns the `val`s of the results' nodes, or None if the call wrote other nodes, too."""
        parts = list(out) if type(out) in (tuple, list) else [out]
        tensors = [x for x in parts if x is not None]
        slots = [get_proxy_slot(x, self._tracer, None) if type(x) is FakeTensor else None for x in tensors]
        if not slots or any(slot is None or slot.constant is not None for slot in slots):
            return None
        if any(x.layout is not torch.strided for x in (first, *tensors)):  # they have no storage to compare
            return None
        node: fx.Node = slots[0].proxy.node  # type: ignore[union-attr]
        of_parts = [node]
        if type(out) is not FakeTensor:
            node = node.all_input_nodes[0]
            of_parts = list(node.users)
            if [(x.target, *x.args) for x in of_parts] != [(operator.getitem, node, i) for i in range(len(parts))]:
                return None
        memories = [memory_of(x.untyped_storage()) for x in tensors]
        is_placed = set(memories) == {memory_of(first.untyped_storage())} if op in _VIEWS else _differ(memories)
        values = [x.meta.get("val") for x in of_parts]
        same = node.target is op and [*node.args, *node.kwargs.values()] == nodes and is_placed
        return values if same and all(x is None or x.layout is torch.strided for x in values) else None

    def _again(
        self, op: OpOverload, entry: tuple[_Results, list[Any]], first: Any, nodes: list[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Writes the nodes, with the cached values, and returns new tensors as their results."""
        results, values = entry
        fakes = _fakes(results, first, op in _VIEWS)
        count = len(nodes) - len(kwargs)
        named = dict(zip(kwargs, nodes[count:], strict=True))
        node = self._write(op, tuple(nodes[:count]), named, op.overloadpacket.__name__)
        if results.kind is None:
            return self._track(fakes[0], node, values[0])
        node.meta["val"] = results.kind(values)
        for i, (x, value) in enumerate(zip(fakes, values, strict=True)):
            self._track(x, self._write(operator.getitem, (node, i), {}), value)
        return results.kind(fakes)

    def _track(self, x: Tensor | None, node: fx.Node, value: Any) -> Tensor | None:
        """Makes a tensor the value of a node, whose `val` is `value`; returns the tensor."""
        if x is not None:
            node.meta["val"] = value
            set_slot(x, self._tracer, SLOT(fx.Proxy(node, self._tracer), None))
        return x


_facts: dict[int, _Facts] = {}  # by the op's id; the entry keeps the op alive


def _note(op: Any) -> _Facts:
    facts = _facts[id(op)] = _Facts(op, _is_plain(op) or op in _VIEWS, op in _VIEWS, _takes_any_number(op))
    return facts


def _takes_any_number(op: Any) -> bool:
    return isinstance(op, OpOverload) and op.overloadpacket.__name__ in _OF_ANY_NUMBER


def _differ(memories: Sequence[int]) -> bool:
    return len(set(memories)) == len(memories)


@cache
def _is_plain(op: Any) -> bool:
    """Returns whether the results have memory of their own, and forms that follow from those of the operands."""
    if not isinstance(op, OpOverload) or is_view(op) or may_return_view(op):
        return False
    schema = schema_of(op)
    if op.namespace != "aten" and schema.name not in OWN:
        return False
    results = {(str(x.type), x.alias_info) for x in schema.returns}
    return results == {("Tensor", None)} and not schema.is_mutable and BY_VALUES.isdisjoint(op.tags)
