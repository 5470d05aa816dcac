"""The graph of the compiler: ops with their rules, over values.

An FX node with several results and its `getitem`s become one `Op` with several result `Value`s. A value is *constant*
if it depends on no input. Constants take no part in decisions: devices slice them, or compute their shards, for free.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.aten.schemas import get_fill_value, may_draw_random
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line
from shardlib.core.torch_internals.torch_private import PER_RANK, schema_of
from shardlib.frontend.hazards.collectives import collectives_error
from shardlib.rules import rule_for
from shardlib.rules.rule import Call, Meta, Rule


@dataclass(frozen=True)
class Rows:
    """Rows of a value lie in groups along `dim`; `ends` holds the end of each group."""

    ends: Value
    dim: int


@dataclass(frozen=True)
class Owns:
    """Allows an op to compute only the rows of its device's groups, if `factor`, which counts groups, is sharded.

    It then needs only these rows of the operands `reads`. An op that `begins` has whole operands, and saves work.
    """

    factor: str
    ends: Value
    reads: frozenset[int]
    begins: bool = False


@dataclass(frozen=True)
class Ordered:
    """Allows each device to order an op's factors `rows` by itself, by the sort `name`; `plain` is the rule without."""

    name: str
    rows: tuple[str, ...]
    plain: Rule


@dataclass(eq=False)
class Value:
    """One tensor of the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: Op | None  # None for inputs and captured tensors
    index: int = 0
    constant: bool = False
    manual: bool = False  # a device's tensor inside a shard_map body: its shape is local, it has no layout
    readers: list[tuple[Op, int]] = field(default_factory=list)  # an op and the operand's position
    is_output: bool = False
    like: Value | None = None  # its input, for a gradient; for a constant, an input with equal dims
    again: bool = False  # the backward pass gathers it again
    rows: Rows | None = None  # devices may hold only the rows of their own groups
    counted: str | None = None  # the sort whose rows it counts; each device may count its own
    times: int = 1  # how many values of the whole graph it represents

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


@dataclass(eq=False)
class Op:
    """One call of an ATen, shardlib or custom op, with its rule; without a rule it runs replicated."""

    name: str
    call: Call
    rule: Rule | None
    operands: tuple[Value, ...]
    results: tuple[Value | None, ...]
    node: fx.Node
    line: Line | None
    backward: bool
    kind: str = field(init=False)  # the op's bare name: `mm`, `to_local`
    target: Any = field(init=False)
    owns: Owns | None = None
    ordered: Ordered | None = None
    times: int = 1  # how many ops of the whole graph it represents, in a folded graph

    def __post_init__(self) -> None:
        self.target = self.call.target
        self.kind = _kind(self.target)

    @cached_property
    def manual(self) -> bool:
        """True for per-device code: an op inside a shard_map body, or at its entry or exit."""
        return _is_manual(self.target) or any(v.manual for v in self.operands)

    @cached_property
    def constant(self) -> bool:
        """True if the op has results, and all of them are constant."""
        results = [r for r in self.results if r is not None]
        return bool(results) and all(r.constant for r in results)

    @cached_property
    def constrains(self) -> bool:
        """True for `shard`: the op fixes a layout."""
        return has_trait(self.target, "constrains")

    @property
    def required_rule(self) -> Rule:
        """The rule of an op that must have one."""
        assert self.rule is not None, f"{self} has no rule"
        return self.rule

    @property
    def transparent(self) -> bool:
        return self.rule is not None and self.rule.transparent

    def __repr__(self) -> str:
        return f"{self.name} = {self.target}"


@dataclass
class Graph:
    """Ops in order; inputs, captured tensors (name -> tensor) and outputs (a value, or a Python constant)."""

    ops: list[Op]
    inputs: list[Value]
    captured: list[tuple[Value, torch.Tensor]]
    outputs: list[Value | Any]

    @property
    def size(self) -> int:
        """The number of ops, or of ops that a folded graph represents."""
        return sum(op.times for op in self.ops)

    def by_use(self) -> list[Value]:
        """Returns inputs and captured tensors in the order of their first readers, not of the arguments."""
        read = dict.fromkeys(v for op in self.ops for v in op.operands if v.op is None)
        return list(read | dict.fromkeys((*self.inputs, *(value for value, _ in self.captured))))

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        yield from (value for value, _ in self.captured)
        for op in self.ops:
            yield from (r for r in op.results if r is not None)


def viewed(value: Value) -> Value:
    """Returns the value that this one is a view of, or itself."""
    while value.op is not None and value.op.transparent:
        (value,) = value.op.operands
    return value


def is_zero(value: Value) -> bool:
    """True if a value is known to be all zeros."""
    return is_all(value, 0)


def is_all(value: Value, number: int) -> bool:
    """True if every element of a value is known to be this number."""
    op = viewed(value).op
    fill: object = None if op is None else get_fill_value(op.node)
    return type(fill) in (int, float) and fill == number


def _meta(val: Any) -> Meta | None:
    return Meta(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


def build(gm: fx.GraphModule) -> Graph:
    """Builds the graph of a simplified FX graph; looks up every op's rule."""
    values: dict[fx.Node, Value] = {}
    inputs: list[Value] = []
    captured: list[tuple[Value, torch.Tensor]] = []
    ops: list[Op] = []
    outputs: list[Any] = []
    by_node: dict[fx.Node, Op] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder":
            constant = bool(node.meta.get("constant"))  # whole in every process, and needs no gradient
            value = values[node] = Value(node.name, tuple(val.shape), val.dtype, None, constant=constant)
            inputs.append(value)
        elif node.op == "get_attr":
            tensor = operator.attrgetter(node.target)(gm)
            value = values[node] = Value(node.name, tuple(tensor.shape), tensor.dtype, None, constant=True)
            captured.append((value, tensor.resolve_conj().resolve_neg()))
        elif node.op == "output":
            outputs = [values[x] if isinstance(x, fx.Node) else x for x in node.args[0]]
        elif node.target is operator.getitem:
            source = by_node[node.args[0]]
            result = source.results[node.args[1]]
            assert result is not None
            values[node] = result
            _note_like(node, values)
        else:
            op = by_node[node] = _op(node, val, values)
            ops.append(op)
            if not isinstance(val, tuple | list) and op.results[0] is not None:
                values[node] = op.results[0]
                _note_like(node, values)
    for out in outputs:
        if isinstance(out, Value):
            out.is_output = True
    _refuse_random(ops)
    _refuse_collectives(ops)
    return Graph(ops, inputs, captured, outputs)


def _note_like(node: fx.Node, values: dict[fx.Node, Value]) -> None:
    value = values[node]
    like = node.meta.get("like" if value.constant else "gradient of")
    source = values.get(like) if like is not None else None
    free = source is not None and not (source.constant or source.manual or value.manual)
    value.like = source if free and source is not None and source.shape == value.shape else None


def _op(node: fx.Node, val: Any, values: dict[fx.Node, Value]) -> Op:
    operands: list[Value] = []
    metas: dict[Value, Meta] = {}

    def abstract(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            value = values[arg]
            operands.append(value)
            if value not in metas:
                metas[value] = Meta(value.shape, value.dtype)
            return metas[value]
        if isinstance(arg, tuple | list):
            return tuple(abstract(a) for a in arg)
        return arg

    args = tuple(abstract(a) for a in node.args)
    kwargs = {k: abstract(v) for k, v in node.kwargs.items()}
    results = tuple(map(_meta, val)) if isinstance(val, tuple | list) else (_meta(val),)
    call = Call(node.target, args, kwargs, tuple(metas[v] for v in operands), results)
    inside = any(v.manual for v in operands) or _is_manual(node.target)
    rule = None if inside else rule_for(call)
    op = Op(node.name, call, rule, tuple(operands), (), node, node.meta.get("line"), bool(node.meta.get("backward")))
    # A creation op reads at most the shape and dtype of its operand, so its result is constant.
    creation = (
        is_creation(node.target)
        and rule is not None
        and all(not set(_flat(o)) & {f for r in rule.results for f in _flat(r)} for o in rule.operands)
    )
    manual = inside and not has_trait(node.target, "leaves_body")
    if manual and not has_trait(node.target, "enters_body"):
        _refuse_captured(op)
    constant = creation or (bool(operands) and all(v.constant for v in operands)) or not operands
    constant = constant and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
    names = [node.name if len(results) == 1 else f"{node.name}.{i}" for i in range(len(results))]
    op.results = tuple(
        None if m is None else Value(name, m.shape, m.dtype, op, i, constant and not manual, manual)
        for i, (name, m) in enumerate(zip(names, results, strict=True))
    )
    for i, v in enumerate(operands):
        v.readers.append((op, i))
    return op


def _flat(labels: tuple[tuple[str, ...], ...]) -> list[str]:
    return [f for dim in labels for f in dim]


def is_creation(target: Any) -> bool:
    return has_trait(target, "creates")


@cache
def is_body_boundary(target: Any) -> bool:
    """True if a tensor enters or leaves a shard_map body."""
    return has_trait(target, "enters_body") or has_trait(target, "leaves_body")


@cache
def _kind(target: Any) -> str:
    return str(schema_of(target).name).split("::")[-1]


@cache
def _is_manual(target: Any) -> bool:
    """True if an op always belongs to a shard_map body."""
    return has_trait(target, "per_device") or is_body_boundary(target)


def _refuse_random(ops: Iterable[Op]) -> None:
    """Refuses draws whose numbers are not keyed by element: devices with the same shard would draw different ones."""
    if random := [op for op in ops if _draws(op)]:
        places, count = Counter(f"{op.target} at {op.line}" for op in random), len(random)
        raise ShardingError(
            f"the program draws random numbers by ops that cannot be sharded, in {count} place{'s' * (count != 1)}",
            [place if n == 1 else f"{place} ({n} times)" for place, n in places.items()],
            rule="a number is drawn from its element's place in the whole tensor; these ops draw one after the other",
            remedy="draw them outside and pass them in, or make them of uniform and normal numbers",
        )


def _draws(op: Op) -> bool:
    if _is_manual(op.target) or has_trait(op.target, "draws_key"):  # the tag only keeps torch from merging them
        return False
    return may_draw_random(op.call.target, op.call.args, op.call.kwargs)


def _refuse_collectives(ops: Iterable[Op]) -> None:
    collectives = [f"{op.target} at {op.line}" for op in ops if getattr(op.target, "namespace", "") in PER_RANK]
    if collectives:
        raise collectives_error(collectives)


def _refuse_captured(op: Op) -> None:
    captured = [v for v in op.operands if not v.manual and not v.constant]
    if captured:
        raise ShardingError(
            "a shard_map body reads tensors of the program around it",
            [f"{v.name} of shape {list(v.shape)}, at {op.line}" for v in captured],
            rule="a body sees local tensors, and only those that come in as its arguments",
            remedy="pass the tensor to the shard_map, with a spec in in_specs (P() for a replicated one)",
        )
