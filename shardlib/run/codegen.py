"""Program -> straight-line Python source over plain tensors, for some devices of the mesh.

For one device the source is that device's program. For all devices of a virtual mesh it is one function that runs
segment by segment between collectives, device after device; a value that is provably the same on several devices is
computed once and shared. A local tensor is dropped at its last use.
"""

from __future__ import annotations

import copy
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.aten.traits import has
from shardlib.lower.program import Collective, Instr, Program, Var, reads
from shardlib.lower.sym import Sym
from shardlib.lower.varying import Primes, primes, varying
from shardlib.meshes.axis import Axis, Coords, member_coords
from shardlib.meshes.mesh import Mesh
from shardlib.run.reuse import borrowed, in_place, overwrites
from shardlib.scalar import Scalar


@dataclass
class Source:
    """Generated code: `text` defines `program(pieces, leaves)`, run in `namespace`.

    `pieces` are those of each input of the program; `leaves` are those of the call, and `numbers` says which of them
    are read.
    """

    text: str
    namespace: dict[str, Any]
    numbers: tuple[int, ...] = ()

    def compile(self) -> Callable[..., tuple[Any, ...]]:
        exec(compile(self.text, "<shardlib program>", "exec"), self.namespace)
        function: Callable[..., tuple[Any, ...]] = self.namespace["program"]
        return function


@dataclass
class _Statement:
    text: str
    outs: tuple[str, ...]
    ins: tuple[str, ...]


@dataclass
class Generator:
    """Writes the source for `devices`; `collective` writes what one collective is on this runtime."""

    program: Program
    devices: Sequence[Coords]
    share: bool = True
    ranges: bool = False  # collectives are ranges of a profiler
    namespace: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.varies: dict[Var, Primes] = {}
        if len(self.devices) > 1:
            everything = None if self.share else primes(self._mesh_axes())
            self.varies = varying(self.program, everything)
        self._names: dict[tuple[Var, tuple[int, ...]], str] = {}
        self._taken: dict[str, int] = {"pieces": 1, "leaves": 1, "program": 1, "float": 1}
        self._numbers: dict[int, str] = {}  # leaf of the call -> its name
        self._bound: dict[Any, str] = {}
        self._statements: list[_Statement] = []
        self._flying: dict[Var, _Statement] = {}
        self._overwrites: dict[Instr, int] = {}
        self._own: dict[str, str] = {}  # a result's name -> that of its copy

    def _mesh_axes(self) -> Iterable[Axis]:
        sizes: dict[str, int] = {}
        for c in self.devices:
            for name, i in c.items():
                sizes[name] = max(sizes.get(name, 0), i + 1)
        return (Axis(name, n) for name, n in sizes.items())

    # Names ----------------------------------------------------------------------------------------------------------

    def name(self, var: Var, coords: Coords) -> str:
        """The identifier of `var` on the device at `coords`."""
        key = (var, tuple(a.coord(coords) for a in self.varies.get(var, ())))
        if (known := self._names.get(key)) is None:
            base = re.sub(r"\W", "_", var.name)
            if not base.isidentifier() or keyword.iskeyword(base):
                base = f"v_{base}"
            if key[1]:
                base += "_d" + "".join(map(str, key[1]))
            known = self._names[key] = self.fresh(base)
        return known

    def fresh(self, base: str) -> str:
        """An identifier that nothing else uses."""
        base = re.sub(r"\W", "_", base)
        n = self._taken.get(base, 0)
        self._taken[base] = n + 1
        return self.fresh(f"{base}_{n}") if n else base

    def bind(self, value: Any, hint: str) -> str:
        """A global name for an object that has no literal."""
        key = id(value)
        if (known := self._bound.get(key)) is None:
            known = self._bound[key] = self.fresh(hint)
            self.namespace[known] = value
        return known

    # Steps ----------------------------------------------------------------------------------------------------------

    def generate(
        self,
        communicate: Callable[[Generator, tuple[Collective, ...]], None],
        events: Sequence[Instr | tuple[Collective, ...]] | None = None,
    ) -> Source:
        """The source; `communicate` writes what starts together, `events` is the program in another order."""
        if events is None:
            events = [(s,) if isinstance(s, Collective) else s for s in self.program.steps]
        donated = [self.program.inputs[i] for i in self.program.donated]
        self._overwrites = overwrites(self.program, events, self.varies, donated)
        segment: list[Instr] = []
        for event in events:
            if isinstance(event, tuple):
                self._segment(segment)
                segment = []
                communicate(self, event)
            else:
                segment.append(event)
        self._segment(segment)
        self.wait_for([v for v in self.program.outputs if isinstance(v, Var)])
        self._copy(borrowed(self.program, events, donated))
        return Source(self._render(), self.namespace, tuple(self._numbers))

    def _copy(self, results: Sequence[Var]) -> None:
        """Give these results memory of their own."""
        for var in results:
            for name in dict.fromkeys(self.name(var, c) for c in self.devices):
                own = self._own[name] = self.fresh(name)
                self.emit(f"{own} = {name}.clone()", [own], [name])

    def _segment(self, steps: list[Instr]) -> None:
        done: set[tuple[int, tuple[int, ...]]] = set()
        for coords in self.devices:
            for i, step in enumerate(steps):
                first = next((v for v in step.outs if v is not None), None)
                given = [first] if first is not None else list(reads(step))
                axes = primes(a for v in given for a in self.varies.get(v, ()))
                key = (i, tuple(a.coord(coords) for a in axes))
                if key not in done:
                    done.add(key)
                    self._instr(step, coords)

    def finish_later(self, variables: Iterable[Var], text: str, outs: Iterable[str], ins: Iterable[str]) -> None:
        """Emit this statement just before any of `variables` is first read."""
        self._flying |= dict.fromkeys(variables, _Statement(text, tuple(outs), tuple(ins)))

    def wait_for(self, variables: Iterable[Var]) -> None:
        """Emit what finishes `variables`."""
        for var in variables:
            if (landing := self._flying.pop(var, None)) is not None:
                self._statements.append(landing)
                for name in [v for v, s in self._flying.items() if s is landing]:
                    del self._flying[name]

    def _instr(self, step: Instr, coords: Coords) -> None:
        if self._flying:
            self.wait_for(reads(step))
        target, operands = step.target, list(step.args)
        if (k := self._overwrites.get(step)) is not None:
            target = in_place(target)
            operands[0], operands[k] = operands[k], operands[0]
        args = [self.literal(a, coords) for a in operands]
        args += [f"{k}={self.literal(v, coords)}" for k, v in step.kwargs.items()]
        outs = tuple("_" if v is None else self.name(v, coords) for v in step.outs)
        left = ", ".join(outs)
        call = f"{self.bind(fast_binding(target), _short(target))}({', '.join(args)})"
        if len(step.outs) == 1 and isinstance(getattr(step.target, "_schema", None), torch._C.FunctionSchema):
            left += "," if _returns_list(step.target) else ""
        self.emit(f"{left} = {call}" if outs else call, outs, [self.name(v, coords) for v in reads(step)])

    def emit(self, text: str, outs: Iterable[str], ins: Iterable[str]) -> None:
        self._statements.append(_Statement(text, tuple(o for o in outs if o != "_"), tuple(ins)))

    def literal(self, x: Any, coords: Coords) -> str:
        if isinstance(x, Var):
            return self.name(x, coords)
        if isinstance(x, Sym):
            return self.literal(x.at(coords), coords)
        if isinstance(x, Scalar):
            return x.text(self._number)
        if isinstance(x, tuple | list):
            return "[" + ", ".join(self.literal(y, coords) for y in x) + "]"
        if x is None or isinstance(x, bool | int | str) or (isinstance(x, float) and x - x == 0):
            return repr(x)
        return self.bind(x, "number" if isinstance(x, complex) else str(x).replace("torch.", ""))

    def _number(self, given: Scalar) -> str:
        if given.leaf not in self._numbers:
            base = re.sub(r"\W", "_", given.name)
            self._numbers[given.leaf] = self.fresh(base if base.isidentifier() else f"n_{base}")
        return self._numbers[given.leaf]

    def members(self, step: Collective) -> list[list[Coords]]:
        """The groups of a collective among the generated devices, each as its members' coordinates in group order.

        Groups whose source and result are the same values are listed once.
        """
        n = 1
        for a in step.axes:
            n *= a.size
        group = set(primes(step.axes))
        varying = dict.fromkeys((*self.varies.get(step.source, ()), *self.varies.get(step.out, ())))
        rest = tuple(a for a in varying if a not in group)
        seen: dict[tuple[int, ...], list[Coords]] = {}
        for coords in self.devices:
            key = tuple(a.coord(coords) for a in rest)
            if key not in seen:
                seen[key] = [member_coords(coords, step.axes, i) for i in range(n)]
        return list(seen.values())

    # Text -----------------------------------------------------------------------------------------------------------

    def _render(self) -> str:
        lines = ["def program(pieces, leaves=()):"]
        for i, var in enumerate(self.program.inputs):
            first: dict[str, int] = {}  # the devices whose pieces differ
            for d, coords in enumerate(self.devices):
                first.setdefault(self.name(var, coords), d)
            if len(first) == len(self.devices):
                lines.append(f"    {', '.join(first)}, = pieces[{i}]")
            else:
                lines += [f"    {name} = pieces[{i}][{d}]" for name, d in first.items()]
        for var, tensor in self.program.captured:
            here = _captured(tensor, self.program.mesh)
            self.namespace |= {self.name(var, c): here for c in self.devices}
        results = []
        for i, out in enumerate(self.program.outputs):
            if isinstance(out, Var):
                names_here = [self.name(out, c) for c in self.devices]
                owns = self.program.owned is None or i < self.program.owned
                parts = ", ".join(self._own.get(name, name) if owns else name for name in names_here)
                results.append(f"({parts},)")
            elif isinstance(out, Scalar):
                results.append(out.text(self._number))
            elif isinstance(out, set | bytearray):  # each call has its own
                results.append(f"{self.bind(copy.copy, 'copy')}({self.bind(out, 'constant')})")
            else:
                results.append(self.bind(out, "constant"))
        ending = f"    return ({', '.join(results)}{',' if results else ''})"
        captured = {self.name(var, c) for var, _ in self.program.captured for c in self.devices}
        keep = captured | set(re.findall(r"\w+", ending))
        last: dict[str, int] = {}
        for i, s in enumerate(self._statements):
            for name in (*s.outs, *s.ins):
                last[name] = i
        drops: dict[int, list[str]] = {}
        for name, i in last.items():
            if name not in keep:
                drops.setdefault(i, []).append(name)
        lines += [f"    {name} = leaves[{leaf}]" for leaf, name in self._numbers.items()]
        for i, s in enumerate(self._statements):
            lines.append("    " + s.text + (f"; del {', '.join(drops[i])}" if i in drops else ""))
        return "\n".join([*lines, ending, ""])


def _captured(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A tensor that the function closes over, or wrote down, where the mesh's are: copied once, not at every call."""
    return tensor.to(mesh.device)


def _short(target: Any) -> str:
    return str(
        getattr(target, "_schema", target).name if hasattr(target, "_schema") else getattr(target, "__name__", "op")
    ).split("::")[-1]


def _returns_list(target: Any) -> bool:
    """Whether the op's one return is a list of tensors (so that its results are unpacked)."""
    returns = target._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch._C.ListType)


_FAST: Mapping[str, Any] = {
    name: getattr(torch.Tensor, name)
    for name in ("expand", "permute", "t", "transpose", "unsqueeze", "reshape", "new_zeros", "new_ones", "new_full")
}


def _resolved(target: Any) -> Callable[..., Any]:
    """The op with its results conjugated where it only marked them so: bytes do not carry such a bit along."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = target(*args, **kwargs)
        return tuple(x.resolve_conj() for x in out) if isinstance(out, tuple) else out.resolve_conj()

    return call


def _as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a local shard as another dtype; it may have other strides than the whole tensor that was traced."""
    return (x if x.is_contiguous() else x.contiguous()).view(dtype)


def _copied_as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as_dtype(x, dtype).clone()


def fast_binding(target: Any) -> Any:
    """The cheapest callable for an op: torch's C functions parse arguments faster than `torch.ops` does.

    The two take the same arguments, and but for `reduction` mean the same where one is left out; where torch has no
    function of that name, the op itself is called.
    """
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return target
    if any(str(a.type) == "List[Optional[Tensor]]" for a in schema.arguments):
        return target  # torch's own functions do not take the None of x[:, i]
    if any(a.name == "reduction" for a in schema.arguments):
        return target  # left out, it is no reduction to torch's own function, and a mean to the op
    name = schema.name.removeprefix("aten::")
    if has(target, "leaves marks"):
        return _resolved(target)
    if name == "view" and schema.overload_name == "dtype":
        return _as_dtype
    if name == "view_copy" and schema.overload_name == "dtype":
        return _copied_as_dtype
    if has(target, "reshapes"):
        return torch.Tensor.reshape  # a local shard may have other strides than the whole tensor that was traced
    if name.endswith("_") and hasattr(torch.Tensor, name):
        return getattr(torch.Tensor, name)
    return _FAST.get(name) or getattr(torch._C._VariableFunctions, name, target)
