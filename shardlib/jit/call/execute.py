"""Runs one call of a compiled function: gathers shards, wraps results, and applies effects.

Writes to arguments, and `.grad`s, are results of the program, and are applied after it has run. An argument in
`donate_argnums` gives up its memory if nothing else refers to it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.compiler.codegen.profiler_ranges import Runner
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.call_numbers import list_numbers
from shardlib.compiler.program.steps import Program, Var
from shardlib.core.context import compiling
from shardlib.core.torch_internals.numpy_bridge import array_bounds, find_arrays
from shardlib.core.torch_internals.torch_private import memory_of
from shardlib.distributed.provenance import record_origin
from shardlib.distributed.turn_errors import hash_texts
from shardlib.frontend.side_effects.mutation_values import rebind
from shardlib.frontend.traced_graph import ExtraOutputs
from shardlib.jit.call.generated_glue import Pieces, builder, gatherer, origins, wrapper
from shardlib.jit.call.inputs import Gone, Input, donate
from shardlib.jit.call.unsupported import refuse_overlaps
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import view_aliases
from shardlib.tensor.host_offload import store_on_host, stored_shards
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form


@dataclass(frozen=True)
class Entry:
    """A program that is ready to run, for one key.

    Its outputs are the results of the function, then those that `after` lists, then `saved` values. `gather` takes the
    shards of inputs from leaves, `wrap` makes tensors of outputs, and `build` the function's return value.
    """

    name: str
    mesh: Mesh
    runner: Runner
    inputs: tuple[Input, ...]
    outputs: tuple[Form | None, ...]  # None: no tensor
    gather: Callable[[list[Any]], list[Pieces]]
    wrap: Callable[[Sequence[Any]], list[Any]]
    build: Callable[[list[Any]], Any]
    after: ExtraOutputs
    own: int  # how many outputs the function itself returns
    returned: int  # own outputs and mutation outputs
    kept: tuple[Any, ...] = ()
    made_of: Callable[[list[Any]], int] | None = None  # on ranks, the origin of a call's results
    away: frozenset[int] = frozenset()  # the outputs that are in the host's memory

    @functools.cached_property
    def donates(self) -> bool:
        return any(x.donated or x.replaced for x in self.inputs)

    @functools.cached_property
    def acts(self) -> bool:
        """True if a call has effects."""
        return bool(self.donates or self.after.writes or self.after.rebound)

    @functools.cached_property
    def arrays(self) -> list[tuple[int, int]]:
        """The bounds of the memory of numpy arrays that the function holds."""
        return list(map(array_bounds, find_arrays(self.kept)))


def entry(plan: Plan, program: Program, mesh: Mesh, runner: Runner, kept: Sequence[Any] = ()) -> Entry:
    """Makes a program callable: a plan's own, or the forward half of it."""
    traced = plan.compiled.traced
    inputs = []
    for i, (leaf, name, var) in enumerate(zip(traced.input_leaves, traced.input_names, program.inputs, strict=False)):
        layout, fate = _layout(var), (i in program.donated, i in program.replaced, var.host)
        inputs.append(
            Input(leaf, name, layout, *fate, tuple(Counter(first_replicas(mesh.own_coords(), layout.axes)).items()))
        )
    named = plan.output_names[: len(plan.output_names) - len(traced.after.gradients)]
    outputs = tuple(forms(plan.compiled.program.outputs[: len(named)], mesh, named, traced.strides, plan.stages))
    same = {i: at for i, at in traced.same.items() if outputs[i] is outputs[at]}  # with one layout
    return Entry(
        plan.name,
        mesh,
        runner,
        tuple(inputs),
        outputs,
        gatherer([(x.leaf, x.layout) for x in inputs], mesh, [x.away for x in inputs]),
        wrapper(outputs),
        _with_leaves(builder(traced.out_tree, same), traced.after.leaves),
        traced.after,
        traced.out_tree.num_leaves,
        len(traced.output_names),
        tuple(kept),
        _origins(plan, inputs) if mesh.kind == "distributed" else None,
        frozenset(at for at, out in enumerate(program.outputs) if isinstance(out, Var) and out.host),
    )


def _origins(plan: Plan, inputs: Sequence[Input]) -> Callable[[list[Any]], int]:
    halves = plan.compiled.halves
    numbers = list_numbers(plan.compiled.program if halves is None else halves.forward)  # of all stages
    name_digest = hash_texts(plan.name, *plan.compiled.traced.result_names)
    return origins(name_digest, [x.leaf for x in inputs], numbers)


def _with_leaves(build: Callable[[list[Any]], Any], leaves: Sequence[tuple[int, bool]]) -> Callable[[list[Any]], Any]:
    """Returns `build` with some results turned into leaves of autograd."""
    if not leaves:
        return build

    def marked(out: list[Any]) -> Any:
        out = list(out)
        for i, is_parameter in leaves:
            out[i] = torch.nn.Parameter(out[i]) if is_parameter else out[i].requires_grad_()
        return build(out)

    return marked


def forms(
    outputs: Sequence[Any],
    mesh: Mesh,
    names: Sequence[Any],
    strides: Sequence[tuple[int, ...] | None],
    stages: Iterable[int | None] = itertools.repeat(None),
) -> Iterator[Form | None]:
    """Yields the forms of a program's results as ShardedTensors, with the strides that they have on one device.

    `stages` has the stage that each result of a pipeline lives on; None: all that the program runs on.
    """
    device = torch.empty(0, device=mesh.device).device
    for out, name, stride, stage in zip(outputs, names, strides, stages, strict=False):
        yield (
            Form.intern(_layout(out), mesh if stage is None else mesh.on_stage(stage), out.dtype, device, name, stride)
            if isinstance(out, Var)
            else None
        )


def _layout(var: Var) -> Layout:
    assert var.layout is not None, f"{var} is no value of the program"
    return var.layout


# --- running ----------------------------------------------------------------------------------------------------------


def caller(entry: Entry) -> Callable[[list[Any]], Any]:
    """Returns a function that calls the program on the leaves of a call."""
    if entry.acts:
        return lambda leaves: finished(entry, leaves, results(entry, leaves)[0])
    gather, runner, wrap, build = entry.gather, entry.runner, entry.wrap, entry.build
    if (made_of := entry.made_of) is not None:

        def call(leaves: list[Any]) -> Any:
            origin = made_of(leaves)
            out = wrap(runner(gather(leaves), leaves, None, origin))
            record_origin(origin, out)
            return build(out)

        return call
    return lambda leaves: build(wrap(runner(gather(leaves), leaves)))


def finished(entry: Entry, leaves: list[Any], out: list[Any]) -> Any:
    """Applies mutations of objects, and returns the function's return value."""
    if entry.after.rebound:
        with compiling.lock:
            rebind(entry.after.rebound, leaves, out)
        del out[entry.own :]
    return entry.build(out)


def results(entry: Entry, leaves: list[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Runs the program; returns own results and mutation outputs, and the shards saved for the backward pass."""
    after = entry.after
    if after.written:
        changed = {leaf for leaf, _ in after.written}
        refuse_overlaps(entry.name, entry.inputs, changed, entry.arrays, leaves)
    pieces = entry.gather(leaves)
    gone = donate(entry.inputs, leaves, pieces, entry.mesh) if entry.donates else ()
    origin = entry.made_of(leaves) if entry.made_of is not None else 0
    raw = entry.runner(pieces, leaves, None, origin) if origin else entry.runner(pieces, leaves)
    for leaf in gone:
        leaf._locals = Gone(entry.name)
    out = entry.wrap(raw)
    record_origin(origin, out)
    for at in entry.away:
        if at < len(out):
            store_on_host(out[at], out[at]._locals, out[at]._origin)
    saved: Sequence[Any] = raw[len(entry.outputs) :]
    if after.writes:
        saved = _kept_from_writes(entry, leaves, saved)
        _apply(entry, leaves, out, pieces)
    del out[entry.returned :]
    return out, saved


def _kept_from_writes(entry: Entry, leaves: Sequence[Any], saved: Sequence[Any]) -> Sequence[Any]:
    """Copies saved shards that the call is about to write over in plain arguments."""
    written = {memory_of(leaves[leaf].untyped_storage()) for leaf, _ in entry.after.written if _is_plain(leaves[leaf])}
    if not written:
        return saved
    copies: dict[int, torch.Tensor] = {}

    def kept(piece: Any) -> Any:
        if piece is None or memory_of(piece.untyped_storage()) not in written:
            return piece
        if id(piece) not in copies:
            copies[id(piece)] = piece.clone()
        return copies[id(piece)]

    return [tuple(map(kept, pieces)) for pieces in saved]


def _is_plain(x: Any) -> bool:
    return type(x) is not ShardedTensor


def _apply(entry: Entry, leaves: Sequence[Any], out: Sequence[Any], pieces: Sequence[Pieces]) -> None:
    """Applies writes to arguments, and sets their gradients."""
    with torch.no_grad():
        written = {x.leaf: pieces[i] for i, x in enumerate(entry.inputs) if x.replaced}
        for leaf, at in entry.after.written:
            into, value = leaves[leaf], out[at]
            if at in entry.away and _is_alike(into, value) and store_on_host(into, stored_shards(value), value._origin):
                torch.autograd.graph.increment_version(into)
                continue
            if type(into) is ShardedTensor and type(into._locals) is Gone:
                continue  # donated: it is not read again
            if _is_written(into, value, written.get(leaf)):
                torch.autograd.graph.increment_version(into)
            else:
                into.detach().copy_(value if type(into) is ShardedTensor else value._locals[0])
        taken = [
            (leaf, attribute, leaves[source] if attribute == "grad" else leaves[source].detach())
            for leaf, attribute, source in entry.after.takes
        ]
        taken += [(leaf, "data", _as_kind(leaves[leaf], out[at])) for leaf, at in entry.after.data]
        for leaf, attribute, value in taken:
            setattr(leaves[leaf], attribute, value)
        for leaf, position in entry.after.grads:
            leaves[leaf].grad = None if position is None else _as_kind(leaves[leaf], out[position])


def _is_written(into: torch.Tensor, value: ShardedTensor, target: Pieces | None) -> bool:
    """True if a tensor needs no copy: the program wrote the value in place, or the tensor takes over its shards."""
    if type(into) is not ShardedTensor:
        if target is None or value._locals[0] is not target[0] or into.is_inference():
            return False
        return bool(memory_of(target[0].untyped_storage()) == memory_of(into.untyped_storage()))
    if not _is_alike(into, value):
        return False
    if into.mesh != value.mesh:  # it moves to the stage that writes to it
        into.data = value
        return True
    view_aliases.assign_shards(into, *(_settled(value._locals),) * 2, value._origin)
    return True


def _is_alike(into: ShardedTensor, value: ShardedTensor) -> bool:
    """True if the tensor can take over the value's shards."""
    if into.is_inference() or into.__dict__.get("_path"):
        return False
    return (into._form.layout.canonical, into.dtype) == (value._form.layout.canonical, value.dtype)


def _settled(pieces: Pieces) -> Pieces:
    """Copies shards that are small views of larger memory."""
    for x in pieces:
        if x.untyped_storage().nbytes() != x.numel() * x.itemsize:
            own = {id(y): y.clone(memory_format=torch.contiguous_format) for y in pieces}
            return tuple(own[id(y)] for y in pieces)
    return pieces


def _as_kind(like: torch.Tensor, value: ShardedTensor) -> torch.Tensor:
    return value if type(like) is ShardedTensor else value._locals[0].clone()
