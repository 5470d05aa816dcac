"""Implements `LocalForm`, with which rules write their local forms: calls and messages, emitted into the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.lower.local_forms.record_torch_code import record_code
from shardlib.compiler.lower.manual import collective_arguments
from shardlib.compiler.program.abstract_device import REFUSALS, Local
from shardlib.compiler.program.nested_args import leaves
from shardlib.compiler.program.steps import Compute, Inside, Var
from shardlib.compiler.program.sym_int import (
    Sym,
    apart,
    axes_of,
    everywhere,
    local_size,
    local_value,
    of_member,
    offset,
    place_in,
    product,
    tabulate,
)
from shardlib.compiler.propagate.propagation import Assignment, OpFactor
from shardlib.core.torch_internals.torch_private import schema_of, without_modes
from shardlib.rules.rule import Labels
from shardlib.sharding import reshard
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis, Coords, group_position, group_size, member_coords
from shardlib.sharding.reshard import Axes

if TYPE_CHECKING:
    from shardlib.compiler.lower.emit import Emitter

BORDERS = "exchanged at the borders"
_DONE = {
    "all_reduce": "reduced",
    "reduce_scatter": "reduced",
    "all_gather": "gathered",
    "all_to_all": "exchanged",
    "ppermute": "passed round",
}


class LocalForm:
    """Emits the steps of a rule's local form; see `shardlib.rules.rule.Local`."""

    def __init__(self, emitter: Emitter, op: Op, assignment: Assignment, args: Any, kwargs: Any) -> None:
        self.call, self.rule, self.args, self.kwargs = op.call, op.required_rule, args, kwargs
        self._shares: dict[str, list[int]] = {}
        self._recordings = 0
        self._emitter, self._op, self._assignment = emitter, op, assignment
        self._builder = emitter.builder
        self.counts_messages = emitter.counts_messages  # so that steps without messages do not matter

    @property
    def origin(self) -> Coords:
        """Coordinates of the first device."""
        return dict.fromkeys(self._builder.mesh.axis_names, 0)

    @property
    def prices(self) -> reshard.Prices:
        """Prices of arithmetic and messages on the mesh's machine."""
        return reshard.Prices.for_mesh(self._builder.mesh)

    @property
    def key(self) -> tuple[Any, ...]:
        """All that the next recording of the library's code may depend on, besides its arguments.

        For most rules, some of these follow from the others; none does for every rule.
        """
        labels, dims = self._emitter.propagation.labels[self._op], self._emitter.propagation.dims
        sizes = tuple([(f, *map(dims.size, own)) for f, own in labels.items()])
        operands = tuple([(v.layout, v.dtype) for v in leaves((self.args, self.kwargs), Var)])
        device = self.device if self._op.node.all_input_nodes else None  # without operands, `call.key` has the device
        place = self._builder.mesh, device, torch.get_default_dtype()
        return self.call.key, id(self.rule), self._recordings, sizes, tuple(self._assignment.items()), operands, place

    @property
    def factors(self) -> list[str]:
        """Names that code may use: the rule's factors, and those of size 1."""
        return [*self.rule.sizes, *self.rule.local.ones]

    @property
    def device(self) -> torch.device:
        """Device of the operands. (Eager calls of tensors on CPUs are planned on meta tensors.)"""
        device: torch.device = self._op.node.all_input_nodes[0].meta["val"].device
        return torch.device("cpu") if device.type == "meta" else device

    def axes(self, factor: str) -> Axes:
        if factor not in self.rule.sizes:  # of size 1
            return ()
        return tuple(a for x in self._emitter.factors(self._op, [factor]) for a in self._assignment.get(x, ()))

    def size(self, factor: str) -> Sym | int:
        if factor not in self.rule.sizes:
            return 1
        return self._emitter.label_size(self._op, factor, self._assignment)

    def has_partial(self, operand: int, factor: str) -> bool:
        layout = [*leaves((self.args, self.kwargs), Var)][operand].layout
        axes = {a for p in ([] if layout is None else layout.pending) for x in p.axes for a in x.primes()}
        return {a for x in self.axes(factor) for a in x.primes()} <= axes

    def offset(self, factor: str) -> Sym | int:
        if factor not in self.rule.sizes:
            return 0
        (first, *rest) = self._emitter.factors(self._op, [factor]) or [(factor, 0)]
        inner = math.prod(self._emitter.leaf_size(self._op, x) for x in rest)
        return offset(self._emitter.leaf_size(self._op, first), self._assignment.get(first, ())) * inner

    def extents(self, factor: str) -> list[tuple[Sym | int, Sym | int, int]]:
        out: list[tuple[Sym | int, Sym | int, int]] = []
        for x in self._emitter.factors(self._op, [factor]):
            n, axes = self._emitter.leaf_size(self._op, x), self._assignment.get(x, ())
            if out and not axes:
                size, begin, whole = out[-1]
                out[-1] = size * int(n), begin * int(n), whole * int(n)
            else:
                out.append((local_size(n, axes), offset(n, axes), int(n)))
        return out

    def ways(self, factor: str) -> int:
        return group_size(self.axes(factor))

    def on_member(self, value: Sym | int, factor: str, member: Callable[[int], int]) -> Sym | int:
        if not isinstance(value, Sym):
            return value
        axes = Axis.merge(self.axes(factor))
        at_member = lambda c: value.at(member_coords(c, axes, member(group_position(c, axes))))
        result: Sym | int = tabulate(at_member, {*value.axes, *axes})
        return result

    def position(self, factor: str) -> Sym | int:
        return place_in(Axis.merge(self.axes(factor)))

    def calc(self, function: Callable[..., Any], *values: Any) -> Any:
        """Evaluates a function of symbolic values as a table, so that an equal result everywhere is a plain number."""
        axes = [a for v in values if isinstance(v, Sym) for a in v.axes]
        return tabulate(lambda c: function(*(local_value(v, c) for v in values)), axes) if axes else function(*values)

    def values(self, value: Any, factor: str) -> list[set[Any]]:
        axes = Axis.merge(self.axes(factor))
        out: list[set[Any]] = [set() for _ in range(self.ways(factor))]
        for coords in everywhere(apart((*axes, *axes_of(value)))):
            out[group_position(coords, axes)].add(local_value(value, coords))
        return out

    def shares(self, factor: str) -> list[int]:
        """Returns the members' sizes of a factor."""
        if factor not in self._shares:
            self._shares[factor] = [size for (size,) in self.values(self.size(factor), factor)]
        return self._shares[factor]

    def send(
        self, value: Var, factor: str, pairs: Sequence[tuple[int, int]], shape: Sequence[Sym | int], *, name: str
    ) -> Var:
        axes = Axis.merge(self.axes(factor))
        source = {dst: src for src, dst in pairs}
        every = [[of_member(n, axes, i) for n in shape] for i in range(self.ways(factor))]
        params: dict[str, Any] = {"pairs": list(pairs)}
        if any(isinstance(n, Sym) for n in shape):
            params["shapes"] = every
        received = (every[source.get(i, i)] for i in range(self.ways(factor)))
        nbytes = max(map(_most, received)) * value.dtype.itemsize
        return self._builder.communicate(
            "ppermute",
            axes,
            value,
            self._var(f"{name}.halo", value.dtype),
            params,
            nbytes,
            reason=f"{self._op.name} needs of {name} what others hold along {factor}",
            because=Inside(self._op, (factor,), name, BORDERS),
        )

    def ppermute(
        self,
        value: Var,
        factor: str,
        pairs: Sequence[tuple[int, int]],
        labels: Labels,
        *,
        name: str,
        holds: Callable[[int], int] = lambda i: i,
        parts: int = 1,
    ) -> Var:
        axes, layout = Axis.merge(self.axes(factor)), self.layout(labels, factor, parts)
        out = self._var(name, value.dtype, layout)
        params: dict[str, Any] = {"pairs": list(pairs)}
        if not all(f.is_even for f in layout.factors):
            local = [product([local_size(f.size, f.axes) for f in dim]) for dim in layout.dims]
            params["shapes"] = [[of_member(n, axes, holds(i)) for n in local] for i in range(self.ways(factor))]
        reason, because = f"{self._op.name} passes {factor} round", Inside(self._op, (factor,), name)
        return self._builder.communicate(
            "ppermute", axes, value, out, params, out.nbytes, reason=reason, because=because
        )

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, which emits steps once per program.

        Two ops need the same borders of one value: a convolution, and the gradient of its weight.
        """
        if key not in self._builder.sent:
            self._builder.sent[key] = make()
        return self._builder.sent[key]

    def now(self, var: Var) -> Var:
        """Returns the variable that replaced `var` since `once` returned it."""
        return self._builder.now.get(var, var)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._recordings += 1
        return record_code(self, function, args, kwargs)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        n = sum(r.real_type.isSubtypeOf(torch.TensorType.get()) for r in schema_of(target).returns)
        step = Compute(target, args, kwargs, (None,) * len(schema_of(target).returns[: max(1, n)]))
        outs = self.emit(target, args, kwargs, self._results(step)[: len(step.outs)])
        return outs[0] if len(outs) == 1 else outs

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: Any, results: Sequence[Local | None]) -> tuple[Var, ...]:
        """Emits a call with these results on the first device."""
        operands = [a.dtype for a in leaves((args, kwargs), Var)]
        dtypes = [(operands or [torch.get_default_dtype()])[0] if x is None else x.dtype for x in results]
        if target is self._op.target and operands == [v.dtype for v in self._op.operands]:
            # another call of the op itself has the dtypes of its results
            dtypes = [d if r is None else r.dtype for r, d in zip(self._op.results, dtypes, strict=False)]
        name = f"{self._op.name}.{schema_of(target).name.split('::')[-1]}"
        outs = tuple(self._var(name, dtype) for dtype in dtypes)
        for out, x in zip(outs, results, strict=False):
            self._builder.first.hold(out, x)
        self._builder.compute(target, args, kwargs, outs, f"part of {self._op.name}")
        return outs

    def communicate(
        self, kind: str, factors: Sequence[str], value: Var, members: Sequence[Any], args: Sequence[Any], nbytes: int
    ) -> Var:
        """Emits a collective along some factors; `members` and `args` are those of `collective_arguments`."""
        axes = Axis.merge(a for f in factors for a in self.axes(f))
        params, reduce, sent = collective_arguments(kind, args, members, group_size(axes), nbytes)
        done, over = _DONE[kind], " and ".join(factors)
        why = f"needs its {reduce} over {over}" if done == "reduced" else f"needs what is {done} along {over}"
        out = self._var(f"{value.name}.{done.replace(' ', '_')}", value.dtype)
        because = Inside(self._op, tuple(factors), how=done)
        reason = f"{self._op.name} {why}"
        return self._builder.communicate(kind, axes, value, out, params, sent, reduce, reason=reason, because=because)

    def _results(self, step: Compute) -> Sequence[Local | None]:
        """Returns a call's results on the first device, as torch's meta kernels compute them."""
        with without_modes():
            try:
                return self._builder.first.compute(step)
            except REFUSALS:  # a meta kernel may be stricter than the kernel that will run
                return [None] * len(step.outs)

    def _var(self, name: str, dtype: torch.dtype, layout: Layout | None = None) -> Var:
        return Var(self._builder.name(name), layout, dtype)

    def layout(self, labels: Labels, factor: str = "", parts: int = 1) -> Layout:
        """Returns the layout of a tensor with these labels, or of one of `parts` parts of every shard of `factor`."""
        emitter, op = self._emitter, self._op
        pairs = [*self.rule.ties.follows.items(), *self.rule.ties.ring.items()]
        alike = {factor, *(t for t, s in pairs if s == factor), *(s for t, s in pairs if t == factor)}

        def one(x: OpFactor) -> Factor:
            size = emitter.leaf_size(op, x)
            if parts > 1 and x[0] in alike and x[1] == 0:
                size //= parts
            return Factor(size, Axis.merge(self._assignment.get(x, ())))

        return Layout(tuple(tuple(one(x) for x in emitter.factors(op, names)) for names in labels)).canonical


def _most(shape: Sequence[Sym | int]) -> int:
    """Returns the elements on the fullest device."""
    axes = apart(a for n in shape for a in axes_of(n))
    return max(math.prod(int(local_value(n, c)) for n in shape) for c in everywhere(axes))
