"""Generated programs that both shardlib and Shardy understand.

Dims are made of named atoms (`b`, `s`, `h` ...), each at most once in a value, so that a program says itself which dims
are the same. A program prints as a torch function and as a StableHLO module with sdy annotations.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

Atoms = tuple[str, ...]
Dims = tuple[Atoms, ...]
Sharding = tuple[tuple[str, ...], ...]  # per dim, the mesh axes that cut it, major first


@dataclass(frozen=True)
class Value:
    """A tensor: its name, and per dim the atoms that it is made of, major first."""

    name: str
    dims: Dims

    @property
    def atoms(self) -> Atoms:
        return tuple(a for dim in self.dims for a in dim)


@dataclass(frozen=True)
class Line:
    """One op. `arg` is what the op needs besides values: a permutation, a dim, a sharding."""

    op: str
    out: Value
    operands: tuple[Value, ...]
    arg: tuple[int, ...] | Sharding = ()


@dataclass(frozen=True)
class Program:
    """Sizes of atoms and mesh axes; inputs with their annotations; lines; the values that are returned."""

    sizes: dict[str, int]
    mesh: dict[str, int]
    inputs: tuple[tuple[Value, Sharding | None], ...]
    lines: tuple[Line, ...]
    outputs: tuple[Value, ...]

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[a] for a in dim) for dim in value.dims)

    @property
    def torch(self) -> str:
        """The source of a function of the inputs."""
        body = [f"    {line.out.name} = {_torch(self, line)}" for line in self.lines]
        names = ", ".join(v.name for v, _ in self.inputs)
        outs = ", ".join(v.name for v in self.outputs)
        return "\n".join([f"def program({names}):", *body, f"    return ({outs},)"])

    @property
    def stablehlo(self) -> str:
        """The text of a module whose `main` takes the inputs and returns the outputs."""
        axes = ", ".join(f'"{name}"={n}' for name, n in self.mesh.items())
        parameters = ", ".join(
            f"%{v.name}: {self._type(v)}" + (f" {{sdy.sharding = #sdy.sharding{_written(at)}}}" if at else "")
            for v, at in self.inputs
        )
        results = ", ".join(map(self._type, self.outputs))
        body = [f"    {text}" for line in self.lines for text in _stablehlo(self, line)]
        names = ", ".join(f"%{v.name}" for v in self.outputs)
        return "\n".join(
            [
                "module {",
                f"  sdy.mesh @mesh = <[{axes}]>",
                f"  func.func public @main({parameters}) -> ({results}) {{",
                *body,
                f"    return {names} : {results}",
                "  }",
                "}",
            ]
        )

    def _type(self, value: Value) -> str:
        return _tensor(self.shape(value))


# As torch -------------------------------------------------------------------------------------------------------------

_UNARY = {"tanh": "torch.tanh({})", "exponential": "torch.exp({})", "negate": "-{}"}
_BINARY = {"add": "{} + {}", "multiply": "{} * {}", "subtract": "{} - {}"}
_REDUCED = {"sum": "{}.sum({})", "max": "{}.amax({})"}


def _torch(p: Program, line: Line) -> str:
    names = [v.name for v in line.operands]
    if line.op in _UNARY:
        return _UNARY[line.op].format(*names)
    if line.op in _BINARY:  # the second operand is broadcast from the right
        return _BINARY[line.op].format(*names)
    if line.op in _REDUCED:
        return _REDUCED[line.op].format(names[0], line.arg[0])
    if line.op == "contract":
        return f"torch.einsum({_equation(line)!r}, {', '.join(names)})"
    if line.op == "transpose":
        return f"{names[0]}.permute({', '.join(map(str, line.arg))})"
    if line.op == "reshape":
        return f"{names[0]}.reshape({', '.join(map(str, p.shape(line.out)))})"
    if line.op == "softmax":
        return f"torch.softmax({names[0]}, -1)"
    assert line.op == "constrain"
    return f"shard({names[0]}, P({', '.join(map(repr, map(_entry, line.arg)))}))"


def _entry(axes: object) -> object:
    assert isinstance(axes, tuple)
    return axes or None


def _equation(line: Line) -> str:
    letters: dict[Atoms, str] = {}
    terms = [
        "".join(letters.setdefault(dim, string.ascii_lowercase[len(letters)]) for dim in v.dims)
        for v in (*line.operands, line.out)
    ]
    return f"{terms[0]},{terms[1]}->{terms[2]}"


# As StableHLO ---------------------------------------------------------------------------------------------------------


def _tensor(shape: Sequence[int]) -> str:
    return f"tensor<{'x'.join(map(str, (*shape, 'f32')))}>"


def _written(sharding: Sharding) -> str:
    dims = ", ".join("{" + ", ".join(f'"{a}"' for a in axes) + "}" for axes in sharding)
    return f"<@mesh, [{dims}]>"


def _stablehlo(p: Program, line: Line) -> list[str]:
    out, operands = line.out, line.operands
    types = [_tensor(p.shape(v)) for v in operands]
    result = _tensor(p.shape(out))
    name, first = f"%{out.name}", f"%{operands[0].name}"
    if line.op in _UNARY:
        return [f"{name} = stablehlo.{line.op} {first} : {result}"]
    if line.op in _BINARY:
        second, lines = f"%{operands[1].name}", []
        if operands[1].dims != out.dims:
            start = len(out.dims) - len(operands[1].dims)
            dims = list(range(start, len(out.dims)))
            lines = [f"{name}_b = stablehlo.broadcast_in_dim {second}, dims = {dims} : ({types[1]}) -> {result}"]
            second = f"{name}_b"
        return [*lines, f"{name} = stablehlo.{line.op} {first}, {second} : {result}"]
    if line.op in _REDUCED:
        return _reduced(name, first, types[0], result, line.op, int(str(line.arg[0])))
    if line.op == "contract":
        a, b = operands
        shared = [d for d in a.dims if d in b.dims]
        batch, contracted = [d for d in shared if d in out.dims], [d for d in shared if d not in out.dims]
        pairs = [f"{[v.dims.index(d) for d in of]}" for of in (batch, contracted) for v in (a, b)]
        batching = f"batching_dims = {pairs[0]} x {pairs[1]}, " if batch else ""
        return [
            f"{name} = stablehlo.dot_general {first}, %{b.name}, {batching}"
            f"contracting_dims = {pairs[2]} x {pairs[3]} : ({types[0]}, {types[1]}) -> {result}"
        ]
    if line.op == "transpose":
        return [f"{name} = stablehlo.transpose {first}, dims = {list(line.arg)} : ({types[0]}) -> {result}"]
    if line.op == "reshape":
        return [f"{name} = stablehlo.reshape {first} : ({types[0]}) -> {result}"]
    if line.op == "softmax":
        last = len(out.dims) - 1
        small = _tensor(p.shape(out)[:-1])
        spread = f"dims = {list(range(last))} : ({small}) -> {result}"
        return [
            *_reduced(f"{name}_m", first, result, small, "max", last),
            f"{name}_mb = stablehlo.broadcast_in_dim {name}_m, {spread}",
            f"{name}_d = stablehlo.subtract {first}, {name}_mb : {result}",
            f"{name}_e = stablehlo.exponential {name}_d : {result}",
            *_reduced(f"{name}_s", f"{name}_e", result, small, "sum", last),
            f"{name}_sb = stablehlo.broadcast_in_dim {name}_s, {spread}",
            f"{name} = stablehlo.divide {name}_e, {name}_sb : {result}",
        ]
    assert line.op == "constrain"
    return [f"{name} = sdy.sharding_constraint {first} {_written(line.arg)} : {result}"]  # type: ignore[arg-type]


def _reduced(name: str, source: str, given: str, result: str, kind: str, dim: int) -> list[str]:
    start, op = {"sum": ("0.0", "add"), "max": ("0xFF800000", "maximum")}[kind]
    return [
        f"{name}_0 = stablehlo.constant dense<{start}> : tensor<f32>",
        f"{name} = stablehlo.reduce({source} init: {name}_0) applies stablehlo.{op} across dimensions = [{dim}]"
        f" : ({given}, tensor<f32>) -> {result}",
    ]


# Drawing --------------------------------------------------------------------------------------------------------------

_ATOMS = {"b": (32, 64, 128), "s": (128, 256, 512), "h": (8, 16), "d": (64, 128), "f": (512, 1024), "v": (2048, 4096)}


@dataclass
class _Draw:
    rng: random.Random
    sizes: dict[str, int]
    mesh: dict[str, int]
    home: dict[str, tuple[str, ...]] | None  # where an atom lives, if everybody agrees; None: each annotation says
    inputs: list[tuple[Value, Sharding | None]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def input(self, dims: Dims, chance: float = 0.5) -> Value:
        value = Value(f"x{len(self.inputs)}", dims)
        self.inputs.append((value, self.sharding(dims) if self.rng.random() < chance else None))
        return value

    def sharding(self, dims: Dims) -> Sharding:
        """An annotation: of every dim the major atom may be cut."""
        home = self.home if self.home is not None else _settle(self.rng, [d[0] for d in dims], self.sizes, self.mesh)
        return tuple(home.get(d[0], ()) for d in dims)

    def emit(self, op: str, dims: Dims, *operands: Value, arg: tuple[int, ...] | Sharding = ()) -> Value:
        out = Value(f"y{len(self.lines)}", dims)
        self.lines.append(Line(op, out, operands, arg))
        return out


def _settle(
    rng: random.Random, atoms: Sequence[str], sizes: dict[str, int], mesh: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """Give mesh axes to atoms, each axis to one of them or to none."""
    home: dict[str, tuple[str, ...]] = {}
    for axis in rng.sample(list(mesh), len(mesh)):
        atom = rng.choice([*atoms, None])
        if atom is not None:
            axes = (*home.get(atom, ()), axis)
            if sizes[atom] % math.prod(mesh[a] for a in axes) == 0:
                home[atom] = axes
    return home


def draw(seed: int, *, conflicts: bool) -> Program:
    """A program of 3 to 14 ops; without `conflicts` every annotation of an atom says the same."""
    rng = random.Random(seed)
    sizes = {atom: rng.choice(choices) for atom, choices in _ATOMS.items()}
    mesh = {name: rng.choice([2, 2, 4]) for name in ("data", "tensor", "pipe")[: rng.randint(1, 3)]}
    d = _Draw(rng, sizes, mesh, None if conflicts else _settle(rng, list(sizes), sizes, mesh))
    pool = [d.input(tuple((a,) for a in rng.choice([("b", "s", "d"), ("b", "d"), ("b", "s", "h", "d")])), 0.9)]
    length = rng.randint(3, 14)
    while len(d.lines) < length:
        value = _step(d, rng.choice(pool[-3:]))
        if value is not None:
            pool.append(value)
    read = {v.name for line in d.lines for v in line.operands}
    outputs = [line.out for line in d.lines if line.out.name not in read]
    return Program(sizes, mesh, tuple(d.inputs), tuple(d.lines), tuple(outputs))


def _step(d: _Draw, x: Value) -> Value | None:
    """One more op on `x`, or None where the drawn one does not fit."""
    kind = d.rng.choices(
        ["unary", "binary", "bias", "contract", "transpose", "merge", "split", "reduce", "softmax", "constrain"],
        [2, 3, 2, 6, 1, 1, 2, 1, 1, 1.5],
    )[0]
    made = [line.out for line in d.lines]
    if kind == "unary":
        return d.emit(d.rng.choice(list(_UNARY)), x.dims, x)
    if kind == "binary":
        others = [v for v in made if v.dims == x.dims and v != x]
        other = d.rng.choice(others) if others and d.rng.random() < 0.7 else d.input(x.dims, 0.3)
        return d.emit(d.rng.choice(list(_BINARY)), x.dims, x, other)
    if kind == "bias" and len(x.dims) > 1:
        return d.emit("add", x.dims, x, d.input(x.dims[d.rng.randint(1, len(x.dims) - 1) :], 0.3))
    if kind == "contract":
        return _contract(d, x, made)
    if kind == "transpose" and len(x.dims) > 1:
        order = d.rng.sample(range(len(x.dims)), len(x.dims))
        if order == sorted(order):
            return None
        return d.emit("transpose", tuple(x.dims[i] for i in order), x, arg=tuple(order))
    if kind == "merge" and len(x.dims) > 2:
        i = d.rng.randrange(len(x.dims) - 1)
        if d.home is not None and set(d.home) & set(x.dims[i + 1]):
            return None  # a cut inside a dim, which Shardy cannot say: it gathers, shardlib does not
        return d.emit("reshape", (*x.dims[:i], x.dims[i] + x.dims[i + 1], *x.dims[i + 2 :]), x)
    if kind == "split" and (fused := [i for i, dim in enumerate(x.dims) if len(dim) > 1]):
        i = fused[0]
        return d.emit("reshape", (*x.dims[:i], x.dims[i][:1], x.dims[i][1:], *x.dims[i + 1 :]), x)
    if kind == "reduce" and len(x.dims) > 1:
        i = d.rng.randrange(len(x.dims))
        return d.emit(d.rng.choice(list(_REDUCED)), (*x.dims[:i], *x.dims[i + 1 :]), x, arg=(i,))
    if kind == "softmax" and len(x.dims) > 1:
        return d.emit("softmax", x.dims, x)
    if kind == "constrain" and not _annotated(d, x):
        return d.emit("constrain", x.dims, x, arg=d.sharding(x.dims))
    return None


def _annotated(d: _Draw, x: Value) -> bool:
    return any(v == x for v, _ in d.inputs) or any(x == v.out and v.op == "constrain" for v in d.lines)


def _contract(d: _Draw, x: Value, made: Sequence[Value]) -> Value | None:
    """A product with a weight, or with a value that shares whole dims: dims of both, then x's, then the other's."""
    others = [v for v in made if v != x and set(v.dims) & set(x.dims) and _apart(v, x)]
    if others and d.rng.random() < 0.4:
        other = d.rng.choice(others)
        shared = [dim for dim in x.dims if dim in other.dims]
        batch = d.rng.sample(shared, d.rng.randint(0, len(shared) - 1))
    else:
        contracted = d.rng.choice(x.dims)
        new = [(a,) for a in d.sizes if a not in x.atoms]
        batch = [dim for dim in x.dims if dim != contracted and d.rng.random() < 0.15]
        added = d.rng.sample(new, min(len(new), d.rng.randint(1, 2)))
        dims = (*batch, *d.rng.sample([contracted, *added], 1 + len(added)))
        other = d.input(dims, 0.6)
        shared = [*batch, contracted]
    batch = [dim for dim in x.dims if dim in batch]
    free = [dim for v in (x, other) for dim in v.dims if dim not in shared]
    dims = (*batch, *free)
    if not dims or len(dims) > 5 or math.prod(d.sizes[a] for dim in dims for a in dim) > 2**31:
        return None
    return d.emit("contract", dims, x, other)


def _apart(a: Value, b: Value) -> bool:
    """Whether atoms that both have stand in dims that both have: then no atom is twice in a product."""
    shared = {atom for dim in set(a.dims) & set(b.dims) for atom in dim}
    return set(a.atoms) & set(b.atoms) == shared
