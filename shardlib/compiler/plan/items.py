"""The tensors and the collectives of a plan as items that can be grouped: each with its module, phase and role."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardlib.compiler.graph.ir import Op, Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.annotated_inputs import annotated_inputs
from shardlib.compiler.plan.explain import Explainer
from shardlib.compiler.plan.groups import INPUT, OUTPUT, STATE, Item
from shardlib.compiler.plan.module_tensors import input_positions
from shardlib.compiler.plan.names import Naming, shorten
from shardlib.compiler.plan.phases import BACKWARD, FORWARD, OPTIMIZER, op_phases
from shardlib.compiler.program.steps import Asked, Collective, Inside, Var
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.core.source_lines import format_file_line
from shardlib.sharding.mesh.machine import Machine
from shardlib.tensor.tensor_meta import short_dtype

WEIGHT, GRADIENT, NEW = "weight", "gradient", "new value"  # roles


@dataclass(frozen=True)
class Items:
    """The items of one compiled function; they are read off one of equal layers, and so are fast."""

    compiled: Compiled

    @cached_property
    def naming(self) -> Naming:
        """Names of inputs and dims."""
        return Naming(self.compiled, by_layer=True)

    @cached_property
    def explainer(self) -> Explainer:
        """Reasons of collectives."""
        return Explainer(self.compiled, self.naming)

    # Tensors --------------------------------------------------------------------------------------------------------

    @cached_property
    def inputs(self) -> tuple[Item, ...]:
        """One item an input; moments of an optimizer (`opt.state[w].exp_avg`) are compared with their parameters."""
        named = list(zip(self.naming.inputs, self.compiled.program.inputs, strict=True))
        by_name = dict(named)
        items = []
        for i, (name, var) in enumerate(named):
            match = _MOMENT.fullmatch(name)
            owner = by_name.get(match["owner"]) if match else None
            if match and owner is not None:
                path, note = f"{match['state']}[*].{match['kind']}", _compared(var, owner)
                items.append(Item(STATE, path, "", short_dtype(var.dtype), note, var.nbytes, i))
            else:
                note = self._layout(var) + ("" if i in self.annotated else "  (inferred)")
                items.append(Item(INPUT, name, "", self._type(var), note, var.nbytes, i))
        return tuple(items)

    @cached_property
    def results(self) -> tuple[Item, ...]:
        """One item a tensor that the function returns; new values of inputs and gradients are none."""
        named = zip(self.compiled.traced.output_names, self.compiled.program.outputs, strict=False)
        return tuple(
            Item(OUTPUT, shorten(name), "", self._type(var), self._layout(var), var.nbytes, i)
            for i, (name, var) in enumerate(named)
            if isinstance(var, Var)
        )

    @cached_property
    def annotated(self) -> set[int]:
        """The positions of inputs with a spec."""
        return annotated_inputs(self.compiled)

    def _type(self, var: Var) -> str:
        shape = var.value.shape if var.value is not None else ()
        return f"{short_dtype(var.dtype)}[{', '.join(map(str, shape))}]"

    def _layout(self, var: Var) -> str:
        """Returns dims as in a spec, `batch@data embed`; `whole` if every device holds everything."""
        if var.layout is None:
            return "differs by device"
        if not (var.layout.axes or var.layout.pending):
            return "whole"
        return self.naming.layout(var) + "".join(f" {p}" for p in var.layout.pending)

    # Collectives ----------------------------------------------------------------------------------------------------

    @cached_property
    def collectives(self) -> tuple[Item, ...]:
        """One item a collective; seconds are 0 on a mesh without a machine."""
        seconds = self._seconds
        items = []
        for i, c in enumerate(self.compiled.program.collectives):
            path, role, is_tensor = self._subject(c)
            kind, note = f"{c.kind}[{' '.join(map(str, c.axes))}]", self._reason(c, role)
            items.append(Item(self._phase(c), path, role, kind, note, c.bytes, i, seconds.get(c, 0.0), is_tensor))
        return tuple(items)

    @cached_property
    def simulated(self) -> Simulated | None:
        """One call of the whole program on the machine of the mesh; None without a machine."""
        compiled, machine = self.compiled, self.compiled.mesh.machine
        return None if machine is None else Simulated(compiled.program, compiled.traced.name, Machine.convert(machine))

    @cached_property
    def _seconds(self) -> dict[Collective, float]:
        """The simulated seconds of each message, shared by its collectives by their bytes."""
        seconds = dict[Collective, float]()
        for start, flight in ({} if self.simulated is None else self.simulated.timeline.message_seconds).items():
            total = sum(c.bytes for c in start.moves)
            seconds |= {c: flight * c.bytes / total if total else flight / len(start.moves) for c in start.moves}
        return seconds

    def _subject(self, c: Collective) -> tuple[str, str, bool]:
        """Returns the path of what a collective moves, its role, and whether it is a tensor with a name."""
        before, _ = self.explainer.ends(c)
        value = before.value
        position = None if value is None else self._source_positions.get(value)
        if position is not None:
            value, item = self.compiled.inputs[position][1], self.inputs[position]
            return item.path, item.phase if item.phase == STATE else WEIGHT if value in self._trained else "", True
        if value in self._gradients:
            return self._gradients[value], GRADIENT, True
        reader = c.because.by if isinstance(c.because, Asked) else None
        if isinstance(reader, int) and self.output_roles[reader][1]:
            return self.output_roles[reader]
        if value in self._new_values:
            return self._new_values[value], NEW, True
        return self._module(c), "", False

    def _module(self, c: Collective) -> str:
        """Returns the module that makes a sum or needs a value elsewhere; without modules, the source line."""
        ops = self._ops(c)
        path = next(filter(None, map(self._path, ops)), "")
        return path or format_file_line(next((op.line for op in ops if op.line is not None), c.line))

    def _ops(self, c: Collective) -> list[Op]:
        """Returns the ops that a collective belongs to; first the one that causes it."""
        if isinstance(c.because, Inside):
            return [c.because.op]
        origin, before = self.explainer.origin(c), self.explainer.ends(c)[0].value
        makers = [v.op for v in (origin, before) if v is not None and v.op is not None]
        readers = [c.because.by] if isinstance(c.because, Asked) and isinstance(c.because.by, Op) else []
        return [*makers, *readers] if c.source.layout is not None and c.source.layout.pending else [*readers, *makers]

    def _path(self, op: Op) -> str:
        inside = op.node.meta.get("modules", ())
        if not inside or not inside[-1].path:
            return ""
        prefixes = {*self._read_prefixes(op)} or self._prefixes.get(inside[0].instance, {""})
        return (next(iter(prefixes)) if len(prefixes) == 1 else f"{inside[0].kind}.") + str(inside[-1].path)

    @cached_property
    def _prefixes(self) -> dict[int, set[str]]:
        """Maps outermost modules to the prefix of their paths in names of inputs: `model.`.

        A module may read several sets of weights, and a recorded round of a loop belongs to several modules.
        """
        prefixes: dict[int, set[str]] = {}
        for op in dict.fromkeys(op for value in self._source_positions for op, _ in value.readers):
            for prefix in self._read_prefixes(op):
                prefixes.setdefault(op.node.meta["modules"][0].instance, set()).add(prefix)
        return prefixes

    def _read_prefixes(self, op: Op) -> Iterator[str]:
        """Yields the prefixes of the path of an op's module in the names of the inputs that the op reads."""
        inside, positions = op.node.meta.get("modules", ()), self._source_positions
        for name in (self.naming.inputs[positions[v]] for v in op.operands if v in positions):
            if inside and inside[-1].path and (at := f".{name}".rfind(f".{inside[-1].path}.")) >= 0:
                yield name[:at]

    def _reason(self, c: Collective, role: str) -> str:
        """Returns why a collective is there, in a few words that are the same for all layers."""
        reader = c.because.by if isinstance(c.because, Asked) else None
        if not role or c.kind != "all_gather" or reader is None:
            return self.explainer.brief(c)
        if isinstance(reader, Op):
            return "gathered for use"
        if role == NEW:
            return "kept gathered between calls"
        return f"returned as {'.grad' if reader in self._grads else shorten(self._result_names[reader])}"

    # Phases ---------------------------------------------------------------------------------------------------------

    def _phase(self, c: Collective) -> str:
        """Returns the phase of the op that makes a value; of an input or forward value, that of its reader."""
        phases, before = self._phases, self.explainer.ends(c)[0].value
        if isinstance(c.because, Inside):
            return phases[c.because.op]
        reader = c.because.by if isinstance(c.because, Asked) and isinstance(c.because.by, Op) else None
        maker = None if before is None else before.op
        phase = FORWARD if maker is None else phases[maker]
        if phase != FORWARD:
            return phase
        return BACKWARD if c.backward else FORWARD if reader is None else phases[reader]

    @cached_property
    def _phases(self) -> dict[Op, str]:
        return op_phases(self.compiled.graph.ops)

    # Names ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _input_names(self) -> dict[Value | None, str]:
        return {value: name for name, (_, value) in zip(self.naming.inputs, self.compiled.inputs, strict=True)}

    @cached_property
    def _gradients(self) -> dict[Value | None, str]:
        """Maps gradients to the names of their inputs: those that are returned, and those that an optimizer reads."""
        graph, names, roles = self.compiled.graph, self._input_names, self.output_roles
        pairs = [(v, names[v.like]) for v in graph.values() if v.like in names and not v.constant]
        pairs += [
            (v, roles[i][0]) for i, v in enumerate(graph.outputs) if isinstance(v, Value) and roles[i][1] == GRADIENT
        ]
        gradients: dict[Value | None, str] = dict(reversed(pairs))
        for op in (op for op in graph.ops if self._phases[op] == OPTIMIZER):
            weights = [v for v in op.operands if v in self._trained and self._is_no_state(v)]
            if len(weights) == 1:
                pairs += [(v, names[weights[0]]) for v in op.operands if v.shape == weights[0].shape]
        for value, name in pairs:
            for v in self._sources(value):
                gradients.setdefault(v, name)
        return gradients

    def _sources(self, value: Value) -> Iterator[Value]:
        """Yields the gradients of a value's size from which views and the optimizer's code compute it."""
        at: Value | None = value
        while at is not None and at.op is not None:
            if at in self._backward_values:
                yield at
            op, size = at.op, math.prod(at.shape)
            is_update = self._phases[op] == OPTIMIZER and at not in self._new_weights
            operands = [v for v in op.operands if v.op is not None and math.prod(v.shape) == size]
            operands.sort(key=lambda v: v not in self._backward_values)
            at = operands[0] if operands and (op.transparent or is_update) else None

    @cached_property
    def _backward_values(self) -> set[Value]:
        """The values of the backward pass, and those of the optimizer that only scale, add or view them."""
        values = set[Value]()
        for op in self.compiled.graph.ops:
            for result in (v for v in op.results if v is not None):
                alike = [v in values for v in op.operands if math.prod(v.shape) == math.prod(result.shape)]
                is_scaled = self._phases[op] == OPTIMIZER and any(alike) and all(alike)
                if self._phases[op] == BACKWARD or (is_scaled and result not in self._new_values):
                    values.add(result)
        return values

    @cached_property
    def _new_values(self) -> dict[Value | None, str]:
        """Maps new values of inputs to the inputs' names."""
        outputs, roles = self.compiled.graph.outputs, self.output_roles
        return {v: roles[i][0] for i, v in enumerate(outputs) if isinstance(v, Value) and roles[i][1] == NEW}

    @cached_property
    def _new_weights(self) -> set[Value | None]:
        """The new values of inputs that are no moments of an optimizer."""
        inputs = {item.path for item in self.inputs if item.phase == INPUT}
        return {value for value, name in self._new_values.items() if name in inputs}

    def _is_no_state(self, value: Value) -> bool:
        at = self._positions.get(value)
        return at is not None and self.inputs[at].phase != STATE

    @cached_property
    def _positions(self) -> dict[Value | None, int]:
        return {value: i for i, (_, value) in enumerate(self.compiled.inputs)}

    @cached_property
    def _source_positions(self) -> Mapping[Value, int]:
        """Maps the inputs, and views and casts of them, to the inputs' positions."""
        return input_positions(self.compiled)

    @cached_property
    def _trained(self) -> set[Value | None]:
        """The inputs that have gradients or get new values."""
        names = {name for name, role, _ in self.output_roles.values() if role}
        written = {value for value, name in self._input_names.items() if name in names}
        return {*written, *(v.like for v in self.compiled.graph.values() if not v.constant)}

    @cached_property
    def _result_names(self) -> tuple[str, ...]:
        return self.compiled.traced.result_names

    @cached_property
    def _grads(self) -> set[int | None]:
        """The positions of outputs that become `.grad`."""
        return {at for _, at in self.compiled.traced.after.grads}

    @cached_property
    def output_roles(self) -> dict[int, tuple[str, str, bool]]:
        """The path and the role of every output."""
        traced = self.compiled.traced
        named = dict(zip(traced.input_leaves, self.naming.inputs, strict=True))
        roles = {at: (shorten(name), "", True) for at, name in enumerate(self._result_names)}
        after = traced.after
        for leaf, at in (*after.grads, *after.gradients):
            roles |= {at: (named[leaf], GRADIENT, True)} if at is not None and leaf in named else {}
        return roles | {at: (named[leaf], NEW, True) for leaf, at in after.written}


def _compared(moment: Var, owner: Var) -> str:
    """Returns how a moment lies beside its parameter."""
    if moment.layout is None or owner.layout is None or moment.value is None or owner.value is None:
        return ""
    if moment.value.shape != owner.value.shape:
        return "over " + " ".join(map(str, moment.layout.axes)) if moment.layout.axes else "whole"
    more = [str(a) for a in moment.layout.axes if a not in owner.layout.axes]
    less = [str(a) for a in owner.layout.axes if a not in moment.layout.axes]
    more = [f"also over {' '.join(more)}"] * bool(more) + [f"not over {' '.join(less)}"] * bool(less)
    return ", ".join(["as its parameter", *more])


_MOMENT = re.compile(r"(?P<state>.+?)\[(?P<owner>.+)\]\.(?P<kind>[\w.]+)")
