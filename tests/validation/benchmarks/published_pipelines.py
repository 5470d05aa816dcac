"""Simulated pipelines of Llama beside steps that others measured on H100s. Nothing runs.

`python -m tests.validation.benchmarks.published_pipelines` plans models of one and two layers on the mesh of one stage.
It takes the seconds of a layer, and of the rest, from their simulated forward and backward passes. The timetable of the
pipeline follows from them, and from the messages between stages. Reducing gradients and the optimizer come behind.
Nothing is fitted on these rows: machines are the preset, and the one of `published` with the efficiency that it fits on
a step without a pipeline. `tests/validation/benchmarks/PUBLISHED.md` has the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardlib as sl
from shardlib.compiler.program.steps import Collective, Compute, Program, Start, Step, Var
from shardlib.compiler.simulate.collectives import transfer
from shardlib.compiler.simulate.rooflines import slowest
from shardlib.compiler.simulate.timeline import COMPUTE, timeline
from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.schedules import order_fragments
from shardlib.compiler.stages.timetable import Timetable, make_timetable
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.machine import Machine
from tests.validation.benchmarks.published import TITAN, waited

FITTED = replace(TITAN, device=replace(TITAN.device, efficiency=0.559))  # as `published` fits it on its first row
DGX = Machine.preset("h100")
VOCABULARY = 128256
SIZES: dict[str, dict[str, int]] = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


@dataclass(frozen=True)
class Row:
    """A measured step: `batch` sequences per step, `rows` per microbatch; `measured` in tokens per second and GPU."""

    source: str
    size: str
    gpus: int
    tensor: int
    stages: int
    batch: int
    measured: float
    context: int = 1
    chunks: int = 1
    rows: int = 1
    sequence: int = 8192
    schedule: str = "interleaved_1f1b"
    fp8: bool = False
    recomputed: bool = False
    overlapped: bool = True  # messages of tensor parallelism are hidden behind products, all of them
    exposed_sums: int = 0  # messages of tensor parallelism in a layer's backward pass that are not hidden
    gathered_heads: int = 0  # of keys, which are gathered along `context` before attention; 0: they travel beside it
    machine: Machine = DGX

    @property
    def replicas(self) -> int:
        return self.gpus // (self.tensor * self.context * self.stages)

    @property
    def shape(self) -> PipelineShape:
        return PipelineShape(self.stages, self.batch // (self.replicas * self.rows), self.chunks)

    @property
    def axes(self) -> dict[str, int]:
        return {"stage": self.stages, "data": self.replicas, "context": self.context, "tensor": self.tensor}

    @property
    def hidden(self) -> int:
        return SIZES[self.size]["hidden_size"]

    @property
    def slow_machine(self) -> Machine:
        """The machine with the slowest of all devices, for which the others wait."""
        return slowest(self.machine, self.gpus)


def meta_rate(teraflops: float, sequence: int) -> float:
    """Returns tokens per second and GPU of Llama 405B for TFLOP/s and GPU, attention counted as causal."""
    layers, hidden = SIZES["405B"]["num_hidden_layers"], SIZES["405B"]["hidden_size"]
    return teraflops * 1e12 / (6 * 405e9 + 6 * layers * sequence * hidden)


# Keys are repeated for all queries before they are gathered. Asynchronous tensor parallelism hides a reduce_scatter
# behind the product that it sends, and the input gradients of several products are added first: two sums in each layer.
_TITAN: dict[str, Any] = {"size": "405B", "gpus": 512, "tensor": 8, "stages": 8, "fp8": True, "recomputed": True}
_TITAN |= {"source": "torchtitan", "machine": FITTED, "exposed_sums": 2, "gathered_heads": 128}
_META: dict[str, Any] = {"source": "Llama 3", "size": "405B", "tensor": 8, "stages": 16, "chunks": 8}
_META |= {"overlapped": False, "gathered_heads": 8}
ROWS = (
    Row("Megatron-Bridge", "70B", 64, 4, 8, 256, 1664, chunks=5, fp8=True),
    Row("Megatron-Bridge", "405B", 1024, 8, 8, 1536, 328, context=2, chunks=8, fp8=True),
    Row(batch=256, rows=4, schedule="1f1b", measured=100, **_TITAN),
    Row(batch=256, rows=4, chunks=2, measured=128, **_TITAN),
    *(
        Row(batch=64 // n, context=n, sequence=32768 * n, schedule="1f1b", measured=speed, **_TITAN)
        for n, speed in ((1, 76), (2, 47), (4, 31), (8, 16))
    ),
    Row(gpus=8192, batch=2048, measured=meta_rate(430, 8192), **_META),
    Row(gpus=16384, batch=2048, measured=meta_rate(400, 8192), **_META),
    Row(gpus=16384, batch=128, measured=meta_rate(380, 131072), context=16, sequence=131072, **_META),
)


class Pass(NamedTuple):
    """Seconds of a forward and a backward pass."""

    forward: float
    backward: float

    def minus(self, other: Pass) -> Pass:
        return Pass(self.forward - other.forward, self.backward - other.backward)


def predict(row: Row) -> tuple[float, Timetable]:
    """Returns tokens per second and GPU, and the timetable of the pipeline."""
    one, two = simulate_passes(row, 1), simulate_passes(row, 2)
    layer = two.minus(one)
    rest = one.minus(layer)  # embedding, head and loss
    gather, stream = gather_keys(row), 2 * row.rows * row.sequence // row.context * row.hidden
    exposed = row.exposed_sums * move(row, "reduce_scatter", ("tensor",), stream * (row.tensor - 1) / row.tensor)
    layer = Pass(layer.forward + gather, layer.backward + gather + exposed)  # of keys again, or of their gradients
    if row.recomputed:
        layer = layer._replace(backward=layer.forward + layer.backward)
    shape = row.shape
    layers = count_layers(SIZES[row.size]["num_hidden_layers"], shape.chain_length)

    def seconds(f: Fragment) -> float:
        position, kind = shape.position(f.stage, f.chunk), "FB".index(f.kind)
        return layers[position] * layer[kind] + (rest[kind] if position == shape.chain_length - 1 else 0.0)

    hop = move(row, "ppermute", ("stage",), stream / row.tensor)
    orders = order_fragments(row.schedule, shape)
    table = make_timetable(orders, shape.needs, seconds, lambda source, target: hop)
    total = table.seconds + finish_step(row)
    return row.batch * row.sequence / row.gpus / total, table


def count_layers(layers: int, chunks: int) -> list[int]:
    """Returns the layers of each chunk: equally many, but one less from the ends on where they do not divide.

    Example:
        >>> count_layers(10, 4)
        [2, 3, 3, 2]
    """
    each = -(-layers // chunks)
    counts = [each] * chunks
    for i in range(each * chunks - layers):
        counts[i // 2 if i % 2 else -1 - i // 2] -= 1
    return counts


def gather_keys(row: Row) -> float:
    """Returns the seconds of gathering the keys and values of a layer along `context`."""
    head = 2 * 2 * row.rows * row.sequence * row.hidden // SIZES[row.size]["num_attention_heads"]
    wire = row.gathered_heads / row.tensor * head * (row.context - 1) / row.context
    return move(row, "all_gather", ("context",), wire) if wire else 0.0


def simulate_passes(row: Row, layers: int) -> Pass:
    """Simulates one microbatch of a model of few layers on the mesh of one stage."""
    program = plan_stage(row.size, layers, row.context, row.tensor, row.rows, row.sequence)
    program = waited(without_hidden_messages(program, row.overlapped), "tensor")
    program = in_fp8(program) if row.fp8 else program
    line = timeline(program, row.slow_machine, fused=True)
    turn = min(e.start for e in line.events if e.stream == COMPUTE and isinstance(e.step, Compute) and e.step.backward)
    return Pass(turn, line.seconds - turn)


@cache
def plan_stage(size: str, layers: int, context: int, tensor: int, rows: int, sequence: int) -> Program:
    """Plans the forward and backward pass of a microbatch in bf16."""
    config = LlamaConfig(
        num_key_value_heads=8, vocab_size=VOCABULARY, use_cache=False, **SIZES[size] | {"num_hidden_layers": layers}
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    shard_sequences(model)
    with sl.Mesh.abstract(context=context, tensor=tensor, machine=DGX):
        sl.parallelize(model)
        ids = torch.zeros(rows, sequence, dtype=torch.int64, device="meta")
        return sl.jit(step, schedule=sl.Schedule(parts=1)).plan(model, ids).compiled.program


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss


CUT, WHOLE = sl.P(None, ("context", "tensor"), None), sl.P(None, "context", None)
COLUMNS = sl.P(None, "context", "tensor")


def shard_sequences(model: LlamaForCausalLM) -> None:
    """Shards sequences over `context`, and the residual stream over `tensor`, too (Korthikanti et al. 2022).

    Heads and the inner features of each layer are sharded over `tensor`.
    """

    def gather(module: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(sl.shard(x, WHOLE) for x in args)
        return args, {k: sl.shard(x, WHOLE) if k == "hidden_states" else x for k, x in kwargs.items()}

    def scatter(module: Any, args: Any, out: Any) -> Any:
        return sl.shard(out, CUT) if isinstance(out, torch.Tensor) else (sl.shard(out[0], CUT), *out[1:])

    for part in (part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)):
        part.register_forward_pre_hook(gather, with_kwargs=True)
        part.register_forward_hook(scatter)
        for name, linear in part.named_children():
            if name in ("o_proj", "down_proj"):
                linear.register_forward_pre_hook(lambda module, args: (sl.shard(args[0], COLUMNS),))
            elif name.endswith("_proj"):
                linear.register_forward_hook(lambda module, args, out: sl.shard(out, COLUMNS))
    model.model.embed_tokens.register_forward_hook(scatter)
    model.lm_head.register_forward_pre_hook(gather, with_kwargs=True)


def without_hidden_messages(program: Program, overlapped: bool) -> Program:
    """Makes messages free: sums of gradients, which run once per step, and those that run beside products.

    Messages along `context` reorder sequences, which the published runs do once, and bring keys (`gather_keys`).
    """

    def free(c: Collective) -> Collective:
        names = [axis.name for axis in c.axes]
        hidden = names == ["context"] or (names == ["tensor"] and overlapped)
        return replace(c, bytes=0.0) if hidden else c

    return replace(
        program,
        steps=tuple(Start(tuple(map(free, s.moves))) if isinstance(s, Start) else s for s in program.steps),
    )


def in_fp8(program: Program) -> Program:
    """Makes the products of layers read float8: activations and gradients are converted, weights once per step."""
    weights = set(program.entry_values)
    narrow: dict[Var, Var] = {}
    steps: list[Step] = []
    for s in program.steps:
        if isinstance(s, Compute) and is_view(s.target) and weights & set(s.operands):
            weights |= set(s.out_vars)
        if isinstance(s, Compute) and _is_product_of_a_layer(s):
            factors = s.args[-2:]
            for v in factors:
                if v not in narrow:
                    narrow[v] = replace(v, dtype=torch.float8_e4m3fn)
                    convert = torch.ops.aten.view.dtype if v in weights else torch.ops.aten._to_copy.default
                    steps.append(Compute(convert, (v,), {}, (narrow[v],), s.line, s.backward))
            s = replace(s, args=(*s.args[:-2], *map(narrow.__getitem__, factors)))
        steps.append(s)
    return replace(program, steps=tuple(steps))


def _is_product_of_a_layer(s: Compute) -> bool:
    if s.target is not torch.ops.aten.mm.default:
        return False
    layouts = [v.layout for v in (*s.operands, *s.out_vars) if v.layout is not None]
    return not any(VOCABULARY in layout.shape for layout in layouts)  # the head


def finish_step(row: Row) -> float:
    """Returns the seconds of reducing gradients, gathering weights, and AdamW, with the state sharded over replicas.

    Of several chunks, only the last one's gradients and the first one's weights travel while the stage waits.
    """
    config = SIZES[row.size]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    attention = 2 * hidden * hidden * (1 + 8 / config["num_attention_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * inner)
    weights = (layers + 2 * VOCABULARY * hidden) / (row.tensor * row.stages)
    group = row.replicas * row.context
    sent = 2 * weights / row.chunks * (group - 1) / group
    axes = ("data", "context")
    moved = move(row, "reduce_scatter", axes, sent) + move(row, "all_gather", axes, sent)
    touched = 28 * weights / group  # three float32 are read and written, a gradient is read, and a weight written
    return moved + touched / row.machine.device.bandwidth


def move(row: Row, kind: str, names: tuple[str, ...], wire: float) -> float:
    """Returns the seconds of a message along some axes of the whole mesh."""
    mesh = sl.Mesh.abstract(row.axes, machine=row.machine)
    span = row.machine.span([mesh.axis(name) for name in names if row.axes[name] > 1], row.axes)
    return transfer(kind, wire, span).seconds


def lines() -> Iterator[str]:
    """Yields the lines of the table."""
    heads = "source", "model", "layout", "sequence", "microbatches", "bubble", "tokens/s and GPU", "simulated", "off by"
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for row in ROWS:
        speed, table = predict(row)
        axes = " x ".join(f"{name} {n}" for name, n in row.axes.items() if n > 1)
        layout = f"{axes}, {row.chunks} chunks" if row.chunks > 1 else axes
        off = speed / row.measured - 1
        cells = (
            row.source,
            f"{row.size} {'fp8' if row.fp8 else 'bf16'}",
            layout,
            f"{row.sequence:,}",
            row.shape.microbatches,
            f"{table.bubble:.1%}",
            f"{row.measured:,.0f}",
            f"{speed:,.0f}",
            f"{off:+.1%}" + ("" if math.fabs(off) <= 0.15 else ", a miss"),
        )
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    for text in lines():
        print(text, flush=True)
