"""The plan: the program of a function on a mesh, to be read before it runs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

from shardlib.compiler.graph.ir import Value
from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan import exports
from shardlib.compiler.plan.brief_text import brief_text
from shardlib.compiler.plan.diff import PlanDiff, diff
from shardlib.compiler.plan.explain import Explainer
from shardlib.compiler.plan.items import Items
from shardlib.compiler.plan.names import Naming, shorten
from shardlib.compiler.plan.page.write_page import notebook_cell, page_text, write_page
from shardlib.compiler.plan.pipeline_view import PipelineView
from shardlib.compiler.plan.plain_data import plan_dict
from shardlib.compiler.plan.plan_warnings import PlanWarning, plan_warnings
from shardlib.compiler.plan.planned_collective import PlannedCollective, planned_collectives
from shardlib.compiler.plan.redundant_work import Redundant, redundant
from shardlib.compiler.plan.rows import Rows, full_text
from shardlib.compiler.plan.terminal import show, text_width
from shardlib.compiler.plan.totals import busiest_sender, sent_bytes, tabulate_collectives
from shardlib.compiler.plan.view_pipeline import view_pipeline
from shardlib.compiler.program import flops
from shardlib.compiler.program.buffers import host_bytes, peak_bytes
from shardlib.compiler.program.steps import Program, Var, makes
from shardlib.compiler.program.text import show as show_program
from shardlib.compiler.propagate.solver.lower_bound import LowerBound, lower_bound
from shardlib.compiler.simulate.simulated import Simulated
from shardlib.compiler.stages.stage_times import simulate_stages
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Line, format_path_line
from shardlib.core.text_tables import format_si, format_table
from shardlib.primitives.debug_print import OP as PRINT
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.placement import FactorNames


class Plan(exports.Exports):
    """The printable result of propagation and lowering; made by `step.plan(*args)`, without any device.

    Example:
        >>> import torch, shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     plan = sl.jit(lambda x: x.sum(), in_specs=("batch@data _",)).plan(torch.ones(4, 3))
        >>> plan.comm_bytes, [c.kind for c in plan.collectives]
        (4.0, ['all_reduce'])
        >>> str(plan.layout_of("x"))
        '4@data, 3'
        >>> plan.collectives[0].reason
        'sum_1[] +data -> [], sum over batch; returned as result'
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.name, self.mesh = compiled.traced.name, compiled.mesh

    def __copy__(self) -> Plan:
        return self  # plans are immutable

    def __deepcopy__(self, _: Any) -> Plan:
        return self

    def __reduce__(self) -> NoReturn:
        raise ShardingError(
            f"the plan of {self.name} is pickled",
            rule="a plan holds the functions and tensors of its process",
            remedy="keep str(plan) or plan.to_dict(); or make it again, step.plan(*args), where it is read",
        )

    # Figures --------------------------------------------------------------------------------------------------------

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """Every collective of the program, in order."""
        return planned_collectives(self.compiled, self._explainer)

    @property
    def comm_bytes(self) -> float:
        """Wire bytes that one device sends by collectives in one call (ring algorithms); of a pipeline, the most on any
        stage."""
        return sent_bytes(busiest_sender(self))

    @cached_property
    def flops(self) -> float:
        """Floating-point operations in one call, on the busiest device: two for a multiply-add, one for a pointwise
        result."""
        return max(map(flops.flops, self.programs))

    @cached_property
    def redundant(self) -> tuple[Redundant, ...]:
        """Work that several devices do identically, by op, line and axes; most FLOPs first, then most bytes.

        The plan's text reports it from 5 % of the FLOPs on.

        Example:
            >>> import torch, shardlib as sl
            >>> with sl.Mesh(data=4, tensor=2):
            ...     product = sl.jit(lambda x, w: x @ w, in_specs=("m@data _", "..."))
            ...     plan = product.plan(torch.ones(8, 4), torch.ones(4, 4))
            >>> most = plan.redundant[0]
            >>> most.op, most.flops, most.bytes, most.copies, most.axes
            ('mm', 32.0, 16, 2, ('tensor',))
        """
        return redundant(self.compiled.program)

    @cached_property
    def peak_memory(self) -> int:
        """The most bytes of local tensors alive at once on the fullest device, arguments and results included."""
        return max(map(peak_bytes, self.programs))

    @cached_property
    def host_memory(self) -> int:
        """The most bytes that one device has at once in its host's memory (`sl.Schedule(offload=...)`)."""
        return max(map(host_bytes, self.programs))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of all devices, or one per stage."""
        compiled = self.compiled
        return (compiled.program,) if compiled.staged is None else compiled.staged.programs

    @cached_property
    def lower_bound(self) -> LowerBound:
        """The gap between the decisions and the best possible ones, by the solver's own estimate; computed on demand.

        Example:
            >>> import torch, shardlib as sl
            >>> with sl.Mesh(data=2):
            ...     product = sl.jit(lambda x, w: x @ w, in_specs=("m@data _", "_ n@data"))
            ...     plan = product.plan(torch.ones(64, 8), torch.ones(8, 16))
            >>> plan.lower_bound.gap, plan.lower_bound.exact
            (0.0, True)
        """
        compiled = self.compiled
        return lower_bound(compiled.propagated.search)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each stage of planning took."""
        return dict(self.compiled.seconds)

    @property
    def replicated_ops(self) -> tuple[str, ...]:
        """Ops that run on every device with whole operands, because they have no rule; single elements do not count."""
        ops = (op for op in self.compiled.graph.ops if op.rule is None and not op.manual and op.target is not PRINT)
        large = (op for op in ops if any(x is not None and math.prod(x.shape) > 1 for x in (*op.operands, *op.results)))
        return tuple(f"{op.target} at {format_path_line(op.line)}" for op in large)

    @property
    def stages(self) -> Sequence[int | None]:
        """The stage that each output lives on; None: all of them."""
        compiled = self.compiled
        return compiled.staged.output_stages if compiled.staged is not None else (None,) * len(compiled.program.outputs)

    @cached_property
    def pipeline(self) -> PipelineView | None:
        """The stages, their messages and their timetable, simulated on the mesh's machine; None without stages."""
        at = Machine.convert(self.mesh.machine)
        return None if self.compiled.staged is None else view_pipeline(self.compiled, self._naming, at)

    # Questions ------------------------------------------------------------------------------------------------------

    @cached_property
    def _naming(self) -> Naming:
        return Naming(self.compiled)

    @cached_property
    def _explainer(self) -> Explainer:
        return Explainer(self.compiled, self._naming)

    @property
    def rows(self) -> Rows:
        """The lines of `full`."""
        return Rows(self.compiled, self._naming, self._explainer)

    @cached_property
    def items(self) -> Items:
        """Inputs, results and collectives, each with its module and phase, to be grouped (`compiler/plan/groups`)."""
        return Items(self.compiled)

    @cached_property
    def warnings(self) -> tuple[PlanWarning, ...]:
        """Repeated work, large gathers, tensors and names without annotation, ...: each with a remedy."""
        return plan_warnings(self)

    @cached_property
    def output_names(self) -> tuple[FactorNames, ...]:
        """Logical names per output, dim and factor, aligned with the outputs' layouts."""
        return tuple(self._naming.aligned(v) if isinstance(v, Var) else () for v in self.compiled.program.outputs)

    def layout_of(self, item: str | Value) -> Layout:
        """Returns the layout of an input (`"params['w']"` or `"params.w"`), an output (`"result[0]"`) or a value of the
        program, by the name that the plan prints. Raises KeyError for any other name."""
        layout = self._var(item).layout
        assert layout is not None
        return layout

    def explain(self, item: str | PlannedCollective | int) -> str:
        """Explains the layout of a value, or a collective (or the i-th), as a chain back to annotations.

        Raises KeyError for a name that is none of the plan's, IndexError past the last collective.
        """
        if isinstance(item, PlannedCollective):
            item = self.collectives.index(item)
        if isinstance(item, int):
            collectives = self.compiled.program.collectives
            if not -len(collectives) <= item < len(collectives):
                count = len(collectives) or "none"
                raise IndexError(f"{self.name} has no collective {item}: it has {count}, counted from 0")
            return self._explainer.collective(collectives[item])
        var = self._var(item)
        value = var.value if var.value is not None else self._naming.find(item)
        assert value is not None
        return self._explainer.value(value, var)

    def _var(self, item: str | Value) -> Var:
        value: Value | None
        if isinstance(item, str):
            for name, out in zip(self.compiled.traced.result_names, self.compiled.program.outputs, strict=True):
                if item in (name, shorten(name)) and isinstance(out, Var):
                    return out
            value = self._naming.find(self.compiled.traced.twins.get(item, item))
        else:
            value = item
        program = self.compiled.program
        for var in (*program.inputs, *(v for step in program.steps for v in makes(step))):
            if var.layout is not None and (var.name == item or (value is not None and var.value is value)):
                return var
        names = ", ".join(self._naming.inputs[:20])
        raise KeyError(f"{self.name} has no value {item!r}; its inputs are {names}")

    def diff(self, other: Plan) -> PlanDiff:
        """Compares this plan with another one, in bytes, FLOPs, memory and layouts, line by line.

        Raises `ShardingError` for another object.

        Example:
            >>> import torch, shardlib as sl
            >>> product = lambda x, w: x @ w
            >>> with sl.Mesh(data=2):
            ...     before = sl.jit(product).plan(torch.ones(4, 4), torch.ones(4, 4))
            ...     after = sl.jit(product, in_specs=("m@data _", None)).plan(torch.ones(4, 4), torch.ones(4, 4))
            >>> change = before.diff(after)
            >>> change.inputs, change.lines[0].flops
            ((('x', 'f32[4, 4]', 'f32[m=4@data, 4]'),), (128.0, 64.0))
            >>> bool(before.diff(before))
            False
        """
        return diff(self, other)

    def simulate(self, machine: Machine | str | None = None, *, fused: bool = False) -> Simulated:
        """Estimates one call on `machine` (an `sl.Machine`, its text, or None: the machine of the mesh).

        The result has seconds, exposed communication, utilization and memory over time; nothing runs. `fused` counts
        successive pointwise calls as one kernel, as a compiler would. Of a pipeline, the result is that of the stage
        with most work, and the fullest stage's memory. Raises `ShardingError` if the machine has links for other axes.

        Example:
            >>> import torch, shardlib as sl
            >>> x = torch.empty(8192, 8192, device="meta")
            >>> with sl.Mesh.abstract(data=8):
            ...     plan = sl.jit(lambda x, y: x @ y, in_specs=("_ k@data", "k@data _")).plan(x, x)
            >>> [f"{step.exposed / step.seconds:.0%}" for step in map(plan.simulate, ("h100", "a100-40"))]
            ['32%', '17%']
        """
        at = Machine.convert(self.compiled.mesh.machine if machine is None else machine)
        if (staged := self.compiled.staged) is not None:
            return simulate_stages(staged, self.name, at, fused=fused)
        if machine is None and not fused and self.items.simulated is not None:
            return self.items.simulated
        return Simulated(self.compiled.program, self.name, at, fused=fused)

    # Forms ----------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Returns totals per kind of collective, axis and backend, the reasons for the backends, FLOPs and memory."""
        rows, lines = tabulate_collectives(self)
        return "\n".join([*format_table(rows), *lines])

    def __repr__(self) -> str:
        count = len(busiest_sender(self).collectives)
        return (
            f"<plan of {self.heading}: {count} collective{'s' * (count != 1)}, "
            f"{format_si(self.comm_bytes, 'B')} sent per device, peak memory {format_si(self.peak_memory, 'B')}>"
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, detail: str = "brief", width: int | None = None) -> str:
        """Returns the plan as text: at most 60 lines, or with `detail="full"` every step (`full`).

        The brief text has `width` columns: by default those of the terminal, at most 120. Raises `ShardingError` for
        another `detail`.
        """
        if detail == "full":
            return self.full
        if detail != "brief":
            problem = f"the plan of {self.name} has no text with detail={detail!r}"
            raise ShardingError(problem, remedy='detail="brief" or detail="full"')
        return brief_text(self, width or text_width())

    def show(self) -> None:
        """Prints `text()` by rich: in color on a terminal."""
        show(self)

    @cached_property
    def full(self) -> str:
        """The text with every input, step and output; the same in every terminal."""
        return full_text(self)

    def _repr_html_(self) -> str:
        return notebook_cell(self)

    def html(self, path: str | os.PathLike[str], *, machine: Machine | str | None = None) -> None:
        """Writes the plan as one HTML file that loads nothing: source, program, layouts, memory and reasons.

        The page shows the streams of `machine`, simulated (None: the machine of the mesh, or none). Raises
        `ShardingError` if the file cannot be written.

        Example:
            >>> import tempfile, torch, shardlib as sl
            >>> with sl.Mesh(data=2):
            ...     plan = sl.jit(lambda x: x.sum(), in_specs=("batch@data _",)).plan(torch.ones(4, 3))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     plan.html(f"{folder}/plan.html", machine="h100")
        """
        write_page(path, page_text(self.heading, [self], machine))

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data (JSON-ready)."""
        return plan_dict(self)

    def listing(self, where: Callable[[Line | None], str] = format_path_line) -> str:
        """Returns the program's text, step by step; equal plans have equal listings. `where` formats source lines."""
        return show_program(self.compiled.program, where)

    @property
    def heading(self) -> str:
        """`mlp on data=2, tensor=4 (8 devices, virtual)`."""
        axes = ", ".join(f"{name}={n}" for name, n in self.mesh.shape.items())
        return f"{self.name} on {axes} ({self.mesh.size} devices, {self.mesh.kind})"
