"""What Shardy makes of a program, what shardlib makes of it, and how the two differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import shardlib as sl
from shardlib import Mesh, P
from shardlib.compiler.plan.plan import Plan
from shardlib.sharding.layout import Layout
from shardlib.sharding.reshard import DEFAULT_PRICES
from tests.validation.shardy.programs import Program, Sharding, Value

_PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
_EXPORT = (
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives,cse))"
)


@dataclass(frozen=True)
class Sent:
    """The bytes that a device sends, the collectives, and the estimated seconds of communication and arithmetic."""

    bytes: float
    collectives: tuple[str, ...]
    seconds: float


def everything(p: Program) -> Program:
    """`p` with every line's value returned, so that its sharding can be read off."""
    return replace(p, outputs=tuple(line.out for line in p.lines))


# Shardy ---------------------------------------------------------------------------------------------------------------


def shardy_shardings(p: Program) -> tuple[str, ...]:
    """Run Shardy's propagation pipeline on the StableHLO text of `p`; the sharding of every line's value."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager

    with mlir.make_ir_context():
        module = ir.Module.parse(everything(p).stablehlo)
        passmanager.PassManager.parse(_PROPAGATE).run(module.operation)
        return tuple(_results(module, everything(p)))


def shardy(p: Program) -> Sent:
    """The same pipeline, then its insertion of reshards."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager

    with mlir.make_ir_context():
        module = ir.Module.parse(p.stablehlo)
        passmanager.PassManager.parse(_PROPAGATE).run(module.operation)
        passmanager.PassManager.parse(_EXPORT).run(module.operation)
        moves = list(_collectives(module, p.mesh))
        work = sum(_work(module, p.mesh))
    sent = sum(n for n, _ in moves)
    seconds = work + sum(DEFAULT_PRICES.comm_seconds((), n) for n, _ in moves)
    return Sent(sent, tuple(text for _, text in moves), seconds)


def _results(module: Any, p: Program) -> Iterator[str]:
    main = module.body.operations[1]
    of_results = main.attributes["res_attrs"] if "res_attrs" in main.attributes else [{}] * len(p.outputs)
    for value, attributes in zip(p.outputs, of_results, strict=True):
        text = str(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else ""
        yield written(_dims(text) or ((),) * len(value.dims))


_AXIS = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')


def _dims(text: str) -> Sharding:
    """`[{"a", "b":(1)2}, {}]` as axes per dim; parts of axes as shardlib writes them."""
    body = re.search(r"@mesh, \[(.*?)\](?:, |>|$)", text)
    found = re.findall(r"\{(.*?)\}", body[1]) if body else []
    return tuple(tuple(f"{n}:({pre}){k}" if k else n for n, pre, k in _AXIS.findall(dim)) for dim in found)


def _collectives(module: Any, mesh: dict[str, int]) -> Iterator[tuple[float, str]]:
    """Bytes that a device sends under ring algorithms, and the text, of every collective of the module."""
    for op in module.body.operations[1].body.blocks[0].operations:
        kind = op.operation.name.removeprefix("sdy.")
        if kind not in _BYTES:
            continue
        out = _dims(str(op.attributes["out_sharding"]))
        local = 4.0
        for size, axes in zip(op.result.type.shape, out, strict=True):
            local *= -(-size // math.prod(_size(a, mesh) for a in axes))
        yield _BYTES[kind](local, _members(op, kind, mesh)), str(op).strip()


def _work(module: Any, mesh: dict[str, int]) -> Iterator[float]:
    """Estimated seconds of every op's arithmetic on one device, by the figures that shardlib decides with."""
    main = module.body.operations[1]
    cuts: dict[Any, Sharding] = {}
    block = main.body.blocks[0]
    of_arguments = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else [{}] * len(block.arguments)
    for value, attributes in zip(block.arguments, of_arguments, strict=True):
        cuts[value] = _dims(str(attributes["sdy.sharding"])) if "sdy.sharding" in attributes else ()

    def local(value: Any, dims: Sequence[int] | None = None) -> float:
        shape, cut = value.type.shape, cuts.get(value) or ((),) * len(value.type.shape)
        chosen = range(len(shape)) if dims is None else dims
        return math.prod(shape[i] / math.prod(_size(a, mesh) for a in cut[i]) for i in chosen)

    for op in block.operations:
        name = "out_sharding" if "out_sharding" in op.attributes else "sdy.sharding"
        for value in op.results:
            cuts[value] = _dims(str(op.attributes[name])) if name in op.attributes else ()
        if not op.operation.name.startswith("stablehlo.") or op.operation.name in _FREE:
            continue
        touched = 4 * sum(local(v) for v in (*op.operands, *op.results))
        flops = local(op.results[0])
        if op.operation.name == "stablehlo.dot_general":
            contracted = re.search(r"contracting_dimensions = \[(.*?)\]", str(op.attributes["dot_dimension_numbers"]))
            inner = [int(i) for i in contracted[1].split(",")] if contracted else []
            flops *= 2 * local(op.operands[0], inner)
        yield max(flops / DEFAULT_PRICES.flops(4), touched / DEFAULT_PRICES.bandwidth)


_FREE = ("stablehlo.reshape", "stablehlo.transpose", "stablehlo.broadcast_in_dim", "stablehlo.constant")


def _size(axis: str, mesh: dict[str, int]) -> int:
    return int(axis.partition(")")[2]) if ":" in axis else mesh[axis]


def _members(op: Any, kind: str, mesh: dict[str, int]) -> int:
    """How many devices take part: the product of the axes that the collective names."""
    name = {"all_gather": "gathering_axes", "all_reduce": "reduction_axes", "reduce_scatter": "reduce_scatter_axes"}
    if kind == "all_to_all":
        named = re.findall(r"axes = \[(.*?)\]|\[(.*?)\]:", str(op))
        text = " ".join("".join(pair) for pair in named) or str(op).split("%")[1].split("out_sharding")[0]
    else:
        text = str(op.attributes[name[kind]]) if kind in name else ""
    return math.prod(int(k) if k else mesh[n] for n, _, k in _AXIS.findall(text))


# `local` is what a device holds of the result.
_BYTES = {
    "all_gather": lambda local, n: local * (n - 1) / n,
    "all_reduce": lambda local, n: 2 * local * (n - 1) / n,
    "reduce_scatter": lambda local, n: local * (n - 1),
    "all_to_all": lambda local, n: local * (n - 1) / n,
    "collective_permute": lambda local, n: local,
}


# shardlib -------------------------------------------------------------------------------------------------------------


def our_shardings(p: Program) -> tuple[str, ...]:
    """Plan the torch function of `p`; the sharding of every line's value."""
    return tuple(layout_text(out.layout) for out in plan(everything(p)).compiled.program.outputs)


def ours(p: Program) -> Sent:
    """Plan the torch function of `p`; nothing runs."""
    best = plan(p)
    texts = tuple(f"{c.kind} {c.bytes:,.0f} {c.reason}" for c in best.compiled.program.collectives)
    search = best.compiled.propagated.search
    return Sent(best.comm_bytes, texts, sum(search.estimate.program_seconds(search.choices)))


def plan(p: Program) -> Plan:
    namespace: dict[str, Any] = {"torch": torch, "shard": sl.shard, "P": P}
    exec(p.torch, namespace)
    specs = tuple(None if at is None else P(*(axes or None for axes in at)) for _, at in p.inputs)
    with Mesh.abstract(p.mesh):
        return sl.jit(namespace["program"], in_specs=specs).plan(
            *(torch.empty(p.shape(v), device="meta") for v, _ in p.inputs)
        )


def layout_text(layout: Layout) -> str:
    """A layout in Shardy's terms: axes per dim; a factor behind one that is not used up keeps its own place."""
    dims = []
    for dim in layout.canonical.dims:
        axes: list[str] = []
        for i, factor in enumerate(dim):
            used_up = all(f.ways == f.size for f in dim[:i])
            axes += [str(a) if used_up else f"{a} inside" for a in factor.axes]
        dims.append(tuple(axes))
    return written(tuple(dims))


def written(sharding: Sharding) -> str:
    """A sharding as text: `[data, tensor pipe, -]`."""
    return f"[{', '.join(' '.join(axes) or '-' for axes in sharding)}]"


# The comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One value that the two shard differently."""

    value: Value
    op: str
    shardy: str
    ours: str

    def __str__(self) -> str:
        dims = " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in self.value.dims)
        return f"{self.value.name} = {self.op} -> {dims}: Shardy {self.shardy}, shardlib {self.ours}"


def differences(p: Program, theirs: Sequence[str], mine: Sequence[str]) -> list[Difference]:
    pairs: Sequence[tuple[Any, str, str]] = list(zip(p.lines, theirs, mine, strict=True))
    return [Difference(line.out, line.op, a, b) for line, a, b in pairs if a != b]
