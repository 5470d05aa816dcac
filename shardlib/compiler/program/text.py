"""Writes programs as text, a line for every step, and reads them back.

```
mesh data=2, tensor=2
input x: f32[4@data, 6]
h: f32[4@data, 8] = aten.mm.default(x, w)  ; 192 flop
y: f32[4@data, 8] over h = aten.relu.default(h)
start all_reduce[data] s: f32[] = r {} 4 B
wait s
free y
return s, 3
```

The type of a value shows its layout, or without one the shape on the fullest device (`f32<3, 2>`). A number of the call
is `$` and its leaf. Lines, reasons and graph values are not in the text, nor are the values of captured tensors.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardlib.compiler.program import sym_int
from shardlib.compiler.program.parse_scalar import parse_scalar
from shardlib.compiler.program.steps import Collective, Compute, Copy, Free, Program, Start, Step, Var, Wait
from shardlib.core.call_scalar import Scalar
from shardlib.core.source_lines import Line
from shardlib.core.torch_internals.torch_private import OpOverload
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis, parse_axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.tensor_meta import short_dtype


def show(program: Program, where: Callable[[Line | None], str] | None = None) -> str:
    """Returns the program's text; `where` formats the source line of each step."""
    lines = [f"mesh {', '.join(f'{name}={n}' for name, n in program.mesh.axes.items())}"]
    for i, var in enumerate(program.inputs):
        varies = f" varies [{_axes(axes)}]" if (axes := program.varies.get(var)) is not None else ""
        fate = f" becomes {program.replaced[i]}" if i in program.replaced else ""
        place = " away" * var.host + " elsewhere" * var.elsewhere
        lines.append(f"input {_typed(var)}{place}{varies}{' donated' * (i in program.donated)}{fate}")
    lines += [f"captured {_typed(var)}" for var, _ in program.captured]
    for step in program.steps:
        line = step.line if isinstance(step, Compute) else step.first.line if isinstance(step, Start) else None
        lines.append(show_step(step) + (f"  # {where(line)}" if where is not None and line is not None else ""))
    count = "" if program.owned_outputs is None else f" owned {program.owned_outputs}"
    return "\n".join([*lines, f"return {', '.join(map(_value, program.outputs))}{count}"])


def show_step(step: Step) -> str:
    """Returns one step's line."""
    if isinstance(step, Compute):
        outs = ", ".join("_" if v is None else _typed(v) for v in step.outs)
        over = f" over {', '.join('_' if k is None else step.args[k].name for k in step.over)}" if step.over else ""
        args = ", ".join([*map(_value, step.args), *(f"{k}={_value(v)}" for k, v in step.kwargs.items())])
        part = "" if step.work is None else f" of {step.work}"
        notes = ", ".join([f"{step.flops!r} flop{part}"] * bool(step.flops) + ["copies"] * step.copies)
        return f"{outs}{over}{' = ' if outs else ''}{_target(step.target)}({args}){'  ; ' * bool(notes)}{notes}"
    if isinstance(step, Start):
        first = step.first
        reduce = "" if first.reduce == "sum" else f" {first.reduce}"
        return f"start {first.kind}[{_axes(first.axes)}]{reduce} {' | '.join(map(_move, step.moves))}"
    if isinstance(step, Copy):
        return f"copy {_typed(step.out)} = {step.source.name}"
    if isinstance(step, Free):
        return f"free {', '.join(v.name for v in step.vars)}"
    return f"wait {', '.join(v.name for v in step.outs)}"


def _move(c: Collective) -> str:
    params = ", ".join(f"{k}: {_value(v)}" for k, v in c.params.items())
    return f"{_typed(c.out)} = {c.source.name} {{{params}}} {c.bytes!r} B"


def _typed(var: Var) -> str:
    dtype = short_dtype(var.dtype)
    if var.layout is not None:
        return f"{var.name}: {dtype}[{var.layout}]"
    return f"{var.name}: {dtype}<{'?' if var.shape is None else ', '.join(map(str, var.shape))}>"


def _axes(axes: Sequence[Axis]) -> str:
    return " ".join(map(str, axes))


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__}:{getattr(target, '__qualname__', target.__name__)}"


def _value(x: Any) -> str:
    if isinstance(x, Var):
        return x.name
    if isinstance(x, Scalar):
        return x.text(lambda number: f"${number.leaf}")
    if isinstance(x, tuple | list):
        return f"[{', '.join(map(_value, x))}]"
    if isinstance(x, set | frozenset):
        return f"{type(x).__name__}({', '.join(sorted(map(_value, x)))})"
    text = repr(x)
    return f"<{_named(x)}>" if callable(x) or " at 0x" in text else text


def _named(x: Any) -> str:
    """Returns the name of a function or class, or of an object's class; the same in all processes."""
    named = x if isinstance(x, type) or hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"


# Reading --------------------------------------------------------------------------------------------------------------


def parse(text: str, captured: Mapping[str, torch.Tensor] | None = None) -> Program:
    """Reads a program's text, on an abstract mesh; `captured` are the captured tensors by name (default: zeros).

    Raises ValueError for another text.
    """
    try:
        return _Reader(captured or {}).read(text)
    except (KeyError, AttributeError, ImportError, SyntaxError) as error:
        raise ValueError(f"it is no program: {type(error).__name__}: {error}") from error


_DTYPES = {short_dtype(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_TYPED = re.compile(r"(?P<name>[^\s:,]+): (?P<dtype>\w+)(?P<shape>\[.*\]|<.*>)")


class _Reader:
    def __init__(self, captured: Mapping[str, torch.Tensor]) -> None:
        self.captured = captured
        self.vars: dict[str, Var] = {}
        self.mesh: Mapping[str, int] = {}

    def read(self, text: str) -> Program:
        steps: list[Step] = []
        inputs: list[Var] = []
        captured: list[tuple[Var, torch.Tensor]] = []
        donated: set[int] = set()
        varies: dict[Var, tuple[Axis, ...]] = {}
        replaced: dict[int, int] = {}
        outputs, own_count = "", None
        for line in filter(None, (_before(line, "  # ").strip() for line in text.splitlines())):
            word, _, rest = line.partition(" ")
            if word == "mesh":
                self.mesh = {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", rest)}
            elif word == "input":
                pattern = r"(.*?[\]>])( away)?( elsewhere)?(?: varies \[(.*)\])?( donated)?(?: becomes (\d+))?"
                typed, is_away, is_elsewhere, axes, is_donated, fate = self.match(pattern, rest)
                inputs.append(self.make(typed, host=is_away is not None, elsewhere=is_elsewhere is not None))
                replaced |= {} if fate is None else {len(inputs) - 1: int(fate)}
                donated |= {len(inputs) - 1} if is_donated else set()
                varies |= {} if axes is None else {inputs[-1]: self.axes(axes)}
            elif word == "captured":
                var = self.make(rest)
                shape = var.shape or () if var.layout is None else var.layout.shape
                captured.append((var, self.captured.get(var.name, torch.zeros(shape, dtype=var.dtype))))
            elif word == "return":
                outputs, number = self.match(r"(.*?)(?: owned (\d+))?", rest)
                own_count = None if number is None else int(number)
            else:
                steps.append(self.step(line))
        results = tuple(map(self.value, _split(outputs)))
        mesh = Mesh.abstract(dict(self.mesh))
        tensors = tuple(inputs), tuple(captured)
        return Program(mesh, tuple(steps), *tensors, results, frozenset(donated), varies, own_count, replaced)

    def step(self, line: str) -> Step:
        word, _, rest = line.partition(" ")
        if word == "start":
            kind, axes, reduce, moves = self.match(r"(\w+)\[(.*?)\]( max| min|) (.*)", rest)
            return Start(
                tuple(self.move(kind, self.axes(axes), reduce.strip() or "sum", m) for m in moves.split(" | "))
            )
        if word in ("wait", "free"):
            variables = tuple(self.vars[name] for name in rest.split(", "))
            return Wait(variables) if word == "wait" else Free(variables)
        if word == "copy":
            out, source = self.match(r"(.*) = (\S+)", rest)
            return Copy(self.vars[source], self.make(out))
        return self.compute(line)

    def compute(self, line: str) -> Compute:
        call = _before(line, "  ; ")
        notes = line[len(call) :].removeprefix("  ; ")
        flops, work, copies = self.match(r"(?:(\S+) flop(?: of (.*?))?)?(?:, )?(copies)?", notes)
        outs, over, target, arguments = self.match(r"(?:(.*?)(?: over (.*?))? = )?([\w.:<>]+)\((.*)\)", call)
        items = [_keyword(x) for x in _split(arguments)]
        args = tuple(self.value(x) for name, x in items if not name)
        kwargs = {name: self.value(x) for name, x in items if name}
        results = tuple(None if x == "_" else self.make(x) for x in _split(outs or ""))
        names = [x.name if isinstance(x, Var) else "" for x in args]
        places = tuple(None if x == "_" else names.index(x) for x in _split(over or ""))
        part = None if work is None else sym_int.parse(work, self.mesh)
        if isinstance(part, int):
            raise ValueError(f"{work} is the same work on every device: {line}")
        return Compute(
            _op(target),
            args,
            kwargs,
            results,
            flops=float(flops or 0),
            over=places,
            copies=copies is not None,
            work=part,
        )

    def move(self, kind: str, axes: tuple[Axis, ...], reduce: str, text: str) -> Collective:
        out, source, params_text, nbytes = self.match(r"(.*) = (\S+) \{(.*)\} (\S+) B", text)
        params = {k: self.value(v) for k, v in (x.split(": ", 1) for x in _split(params_text))}
        result = self.make(out, host=kind == "to_host")
        return Collective(kind, axes, self.vars[source], result, params, ast.literal_eval(nbytes), reduce)

    def match(self, pattern: str, text: str) -> tuple[Any, ...]:
        if (match := re.fullmatch(pattern, text)) is None:
            raise ValueError(f"{text!r} is no step of a program")
        return match.groups()

    def make(self, text: str, *, host: bool = False, elsewhere: bool = False) -> Var:
        if (match := _TYPED.fullmatch(text)) is None:
            raise ValueError(f"{text!r} says no name and type")
        name, dtype, inside = match["name"], _DTYPES[match["dtype"]], match["shape"][1:-1]
        if match["shape"][0] == "[":
            var = Var(name, Layout.parse(inside, self.mesh), dtype, host=host, elsewhere=elsewhere)
        else:
            shape = None if inside == "?" else tuple(map(int, _split(inside)))
            var = Var(name, None, dtype, shape=shape, host=host, elsewhere=elsewhere)
        self.vars[name] = var
        return var

    def axes(self, text: str) -> tuple[Axis, ...]:
        parts = (parse_axis(x) for x in text.split())
        return tuple(Axis(name, size or self.mesh[name], pre, self.mesh[name]) for name, pre, size in parts)

    def value(self, text: str) -> Any:
        if text in self.vars:
            return self.vars[text]
        if text[:1] in ("'", '"'):
            return ast.literal_eval(text)
        if text.startswith("[") and text.endswith("]"):
            return [self.value(x) for x in _split(text[1:-1])]
        if "$" in text:
            return parse_scalar(text)
        if text.startswith("torch."):
            return getattr(torch, text.removeprefix("torch."))
        if text in ("inf", "-inf", "nan"):
            return float(text)
        if text.startswith("("):
            with contextlib.suppress(ValueError):
                return complex(text)
        if text.startswith("device("):
            (name, index) = self.match(r"device\(type='(\w+)'(?:, index=(\d+))?\)", text)
            return torch.device(name if index is None else f"{name}:{index}")
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return sym_int.parse(text, self.mesh)


def _op(text: str) -> Any:
    if ":" in text:
        module, _, name = text.partition(":")
        return operator.attrgetter(name)(importlib.import_module(module))
    return operator.attrgetter(text)(torch.ops)


def _keyword(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", text)
    return (match[1], match[2]) if match else ("", text)


def _split(text: str) -> list[str]:
    """Splits at commas outside of brackets and quotes."""
    return list(_parts(text)) if text.strip() else []


def _parts(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for i, c in _bare(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and not depth:
            yield text[begin:i].strip()
            begin = i + 1
    yield text[begin:].strip()


def _bare(text: str) -> Iterator[tuple[int, str]]:
    """Yields the characters outside of quotes, with their positions."""
    quote, escaped = "", False
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and not escaped else quote
            escaped = c == "\\" and not escaped
        elif c in "'\"":
            quote = c
        else:
            yield i, c


def _before(text: str, mark: str) -> str:
    """Returns the text before a mark that is outside of quotes."""
    return next((text[:i] for i, _ in _bare(text) if text.startswith(mark, i)), text)
