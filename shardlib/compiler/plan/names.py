"""Names of values and dims in printed plans: the user's own names where possible.

An input has the function's name for it (`params.layers[0].wq`). The last value of a source line has the name that the
line assigns; any other value has the name of its node in the graph. A dim has the logical name of an annotation, of
this dim or of the one that it is a part of.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.program.steps import Var
from shardlib.compiler.propagate import GraphDecisions
from shardlib.compiler.propagate.dim_factors import DimFactor
from shardlib.core.aten.op_traits import has_trait
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.placement import FactorNames, FixedLayout
from shardlib.tensor.tensor_meta import short_dtype

Named = tuple[tuple[str | None, Factor], ...]  # one dim: its factors, and their names


@dataclass(frozen=True)
class Naming:
    """Names for everything in one compiled function.

    With `by_layer`, names of dims come from the decisions about one of equal layers. This is fast, and serves `dims`,
    `layout` and `leaf` only.
    """

    compiled: Compiled
    by_layer: bool = False

    @cached_property
    def decided(self) -> GraphDecisions:
        """The decisions that dims are named by."""
        return self.compiled.decisions(by_layer=self.by_layer)

    # Values ---------------------------------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The short names of the inputs, in order."""
        full = [name for name, _ in self.compiled.inputs]
        short = Counter(shorten(name) for name in full)
        return tuple(name if short[shorten(name)] > 1 else shorten(name) for name in full)

    @cached_property
    def _names(self) -> dict[Value, str]:
        names = {value: name for name, (_, value) in zip(self.inputs, self.compiled.inputs, strict=True)}
        for op in self.compiled.graph.ops:
            for i, r in enumerate(op.results):
                if r is not None:
                    names[r] = op.name if i == 0 else f"{op.name}.{i}"
        taken = {*names.values(), *(shorten(n) for n in names.values())}
        for text, value in _assigned(self.compiled.graph.ops):
            name, n = text, 0
            while name in taken:
                n += 1
                name = f"{text}_{n}"
            taken.add(name)
            names[value] = name
        return names

    def value(self, value: Value) -> str:
        """Returns the name of a value; a view has the name of its base."""
        seen = self.compiled.propagated.propagation.twins.get(value, value)
        while seen.op is not None and _is_renamed(seen.op):
            seen = seen.op.operands[0]
        return self._names.get(seen, seen.name)

    def own(self, value: Value) -> str:
        """Returns a value's own name, also of a view."""
        return self._names.get(value, value.name)

    def var(self, var: Var) -> str:
        if var.value is None:
            return var.name
        return self.value(var.value) + ("" if var.part is None else " ({} of {})".format(*var.part))

    def call(self, op: Op, limit: int = 4) -> str:
        """Writes an op as a call on named values, at most `limit` of them; an annotation as the user wrote it."""
        if op.constrains or has_trait(op.target, "enters_body"):
            name = "shard" if op.constrains else "shard_map"
            return f"{name}({self.value(op.operands[0])}, {str(op.node.args[1])!r})"
        operands = [self.value(v) for v in op.operands[:limit]] + ["..."] * (len(op.operands) > limit)
        return f"{op_name(op)}({', '.join(operands)})"

    def find(self, name: str) -> Value | None:
        """Returns the value of a name: an input's (long or short), a printed one, or the graph's own."""
        for short, (long, value) in zip(self.inputs, self.compiled.inputs, strict=True):
            if name in (short, long):
                return value
        by_name = {own: value for value, own in self._names.items()}
        if name in by_name:
            return by_name[name]
        return next((v for v in self.compiled.graph.values() if v.name == name), None)

    # Dims -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> dict[tuple[DimFactor, ...], str]:
        """Names of runs of dim factors that one annotated factor was split into; a major part shares the name."""
        propagation = self.decided.decisions.propagation
        whole: dict[tuple[DimFactor, ...], str] = {(leaf,): name for leaf, name in propagation.names.items()}
        parts: dict[tuple[DimFactor, ...], tuple[int, str]] = {}
        fixed: list[tuple[Sequence[Sequence[DimFactor]], FixedLayout]] = [
            (propagation.value[v], f) for v, (_, f) in propagation.pinned_values.items()
        ]
        for i, (_, f) in propagation.outputs.items():
            fixed.append((propagation.value[self.decided.graph.outputs[i]], f))
        for dims, f in fixed:
            for leaves, factors, names in zip(dims, f.layout.dims, f.names, strict=True):
                for run, name in zip(_runs(leaves, factors, propagation.dims.size), names, strict=False):
                    if not name or not run:
                        continue
                    whole.setdefault(run, name)
                    for n in range(1, len(run)):
                        rest = len(run) - n
                        if rest < parts.get(run[:n], (rest + 1, ""))[0]:
                            parts[run[:n]] = (rest, name)
        return {run: name for run, (_, name) in parts.items()} | whole

    def dims(self, var: Var) -> tuple[Named, ...]:
        """Returns the dims of a variable as named factors; unnamed neighbors are merged."""
        assert var.layout is not None
        value, propagation = var.value, self.decided.decisions.propagation
        if value is not None and value.manual:  # its shape is that of one device
            return tuple(tuple((None, f) for f in dim) for dim in var.layout.dims)
        if value is not None and not value.constant:
            value = self.decided.representative(value)
        if value is None or value.constant or var.placement is None or value not in propagation.value:
            return tuple(tuple((None, f) for f in dim) for dim in var.layout.dims)
        cut = iter(var.placement[0])
        return tuple(
            self._dim([(leaf, Factor(propagation.dims.size(leaf), next(cut))) for leaf in leaves])
            for leaves in propagation.value[value]
        )

    def _dim(self, parts: Sequence[tuple[DimFactor, Factor]]) -> Named:
        out: list[tuple[str | None, Factor]] = []
        same = self.decided.decisions.propagation.same
        i = 0
        while i < len(parts):
            for j in range(len(parts), i, -1):
                name = self._groups.get(tuple(same.get(leaf, leaf) for leaf, _ in parts[i:j]))
                melted = _melt(f for _, f in parts[i:j])
                if name and len(melted) == 1:
                    out.append((name, melted[0]))
                    i = j
                    break
            else:
                before = [f for name, f in out[-1:] if name is None]
                melted = _melt([*before, parts[i][1]])
                out[len(out) - len(before) :] = [(None, f) for f in melted]
                i += 1
        return tuple(out) or ((None, Factor(1)),)

    def typed(self, var: Var) -> str:
        """`f32[batch=8@data, (heads=4@tensor 32)] +tensor`."""
        if var.layout is None:
            return ""
        show = lambda name, f: f"{name}={f}" if name else str(f)
        return f"{short_dtype(var.dtype)}[{', '.join(self._dims(var, show))}]{_partial_sums(var)}"

    def spec(self, var: Var) -> str:
        """`mm_3[batch@data heads@tensor] +tensor`, in the notation of specs."""
        if var.layout is None:
            return self.var(var)
        return f"{self.var(var)}[{self.layout(var)}]{_partial_sums(var)}"

    def layout(self, var: Var) -> str:
        """`batch@data heads@tensor`: the dims of a variable in the notation of specs."""
        show = lambda name, f: str(f) if name is None else str(f).replace(str(f.size), name, 1)
        return " ".join(self._dims(var, show))

    def _dims(self, var: Var, show: Callable[[str | None, Factor], str]) -> Iterator[str]:
        """Writes every dim; several factors stand in parentheses."""
        for dim in self.dims(var):
            words = " ".join(show(name, f) for name, f in dim)
            yield words if len(dim) == 1 else f"({words})"

    def aligned(self, var: Var) -> FactorNames:
        """Returns a name for each factor of a variable's canonical layout."""
        assert var.layout is not None
        out = []
        for dim, named in zip(var.layout.dims, self.dims(var), strict=True):
            same = len(dim) == len(named) and all(f == g for f, (_, g) in zip(dim, named, strict=True))
            out.append(tuple(name for name, _ in named) if same else (None,) * len(dim))
        return tuple(out)

    def leaf(self, leaf: DimFactor) -> str:
        """Returns the name of a dim factor, or its size."""
        return self._groups.get((leaf,), str(self.decided.decisions.propagation.dims.size(leaf)))


def _melt(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    return _melted(tuple(factors))


@lru_cache(1 << 12)
def _melted(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    merged = (Factor(f.size, Axis.merge(f.axes)) for f in factors)
    return Layout((tuple(merged),)).canonical.dims[0]


def _partial_sums(var: Var) -> str:
    assert var.layout is not None
    return "".join(f" {p}" for p in var.layout.pending)


def _runs(leaves: Sequence[DimFactor], factors: Sequence[Factor], size_of: object) -> Iterator[tuple[DimFactor, ...]]:
    """Yields the dim factors of each annotated factor of a dim."""
    assert callable(size_of)
    rest = list(leaves)
    for f in factors:
        run, n = [], 1
        size = int(f.size)
        while rest and n < size:
            run.append(rest.pop(0))
            n *= size_of(run[-1])
        yield tuple(run) if n == size else ()


_ASSIGNMENT = re.compile(r"(\w+)\s*(?::[^=]+)?=(?!=)")


def _assigned(ops: Sequence[Op]) -> Iterator[tuple[str, Value]]:
    """Yields names that source lines assign, with the last value of the line; forward code only."""
    for op, after in zip_longest(ops, ops[1:]):
        same = after is not None and after.line == op.line and after.backward == op.backward
        if same or op.line is None or op.backward or "lambda" in op.line.text:
            continue
        assignment = _ASSIGNMENT.match(op.line.text)
        value = op.results[0] if len(op.results) == 1 else None
        while value is not None and value.op is not None and _is_renamed(value.op):
            value = value.op.operands[0]
        if assignment and value is not None and value.op is not None and value.op.line == op.line:
            yield assignment[1], value


def _is_renamed(op: Op) -> bool:
    """True for ops whose result has the name of the operand: views, annotations, and arguments of shard_map bodies."""
    return op.transparent or op.constrains or has_trait(op.target, "enters_body")


def op_name(op: Op) -> str:
    """`_log_softmax` -> `log_softmax`."""
    return op.kind.strip("_")


def shorten(name: str) -> str:
    """A path into the arguments with attribute dots for keys.

    Example:
        >>> shorten("params['layers'][0]['wq']")
        'params.layers[0].wq'
    """
    return re.sub(r"\['([\w.]+)'\]", r".\1", name)
