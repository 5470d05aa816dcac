"""One call of a compiled function: its pieces in, its results out, and what it does to memory beside.

Writes to arguments are results of the program: they are applied when it has run. So are `.grad`s that it sets. An
argument in `donate_argnums` gives its memory up, where nobody else holds it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.compiler.codegen import Runner
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.nested_args import leaves as values_in
from shardlib.compiler.program.steps import Compute, Program, Var
from shardlib.core.call_scalar import Scalar
from shardlib.core.context import compiling
from shardlib.core.numpy_bridge import array_bounds, find_arrays
from shardlib.core.torch_private import memory_of
from shardlib.distributed.provenance import record_origin
from shardlib.distributed.turn_errors import hash_texts
from shardlib.frontend.epilogue import ExtraOutputs
from shardlib.frontend.side_effects.mutation_values import rebind
from shardlib.jit.call.alias_checks import refuse_overlaps
from shardlib.jit.call.generated_glue import Pieces, builder, gatherer, origins, wrapper
from shardlib.jit.call.inputs import Gone, Input, donate
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

    Its outputs are the results of the function, then what `after` lists, then `saved` values. `gather` takes the pieces
    of its inputs from leaves, `wrap` makes tensors of its outputs, and `build` what the function returns.
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
    own: int  # the first of them that the function itself returns
    returned: int  # with what it keeps
    kept: tuple[Any, ...] = ()
    made_of: Callable[[list[Any]], int] | None = None  # on ranks, the origin of what a call makes
    away: frozenset[int] = frozenset()  # the outputs that are in the host's memory

    @functools.cached_property
    def donates(self) -> bool:
        return any(given.donated or given.replaced for given in self.inputs)

    @functools.cached_property
    def acts(self) -> bool:
        """Whether a call does more than to return values."""
        return bool(self.donates or self.after.writes or self.after.rebound)

    @functools.cached_property
    def arrays(self) -> list[tuple[int, int]]:
        """Where the memory of the numpy arrays that the function holds begins and ends."""
        return list(map(array_bounds, find_arrays(self.kept)))


def entry(plan: Plan, program: Program, mesh: Mesh, runner: Runner, kept: Sequence[Any] = ()) -> Entry:
    """Make a program callable: a plan's own, or the forward half of it."""
    traced = plan.compiled.traced
    inputs = []
    for i, (leaf, name, var) in enumerate(zip(traced.input_leaves, traced.input_names, program.inputs, strict=False)):
        layout, fate = _layout(var), (i in program.donated, i in program.replaced, var.host)
        inputs.append(
            Input(leaf, name, layout, *fate, tuple(Counter(first_replicas(mesh.own_coords(), layout.axes)).items()))
        )
    named = plan.output_names[: len(plan.output_names) - len(traced.after.gradients)]
    outputs = tuple(forms(program.outputs[: len(named)], mesh, named, traced.strides))
    same = {i: at for i, at in traced.same.items() if outputs[i] is outputs[at]}  # and live in one place
    return Entry(
        plan.name,
        mesh,
        runner,
        tuple(inputs),
        outputs,
        gatherer([(given.leaf, given.layout) for given in inputs], mesh, [given.away for given in inputs]),
        wrapper(outputs),
        _with_leaves(builder(traced.out_tree, same), traced.after.leaves),
        traced.after,
        traced.out_tree.num_leaves,
        len(traced.output_names),
        tuple(kept),
        _origins(plan, program, inputs) if mesh.kind == "distributed" else None,
        frozenset(at for at, out in enumerate(program.outputs) if isinstance(out, Var) and out.host),
    )


def _origins(plan: Plan, program: Program, inputs: Sequence[Input]) -> Callable[[list[Any]], int]:
    read = (x for s in program.steps if isinstance(s, Compute) for x in values_in((s.args, s.kwargs), Scalar))
    numbers = sorted({leaf for x in read for leaf in x.leaves()})
    what = hash_texts(plan.name, *plan.compiled.traced.result_names)
    return origins(what, [given.leaf for given in inputs], numbers)


def _with_leaves(build: Callable[[list[Any]], Any], leaves: Sequence[tuple[int, bool]]) -> Callable[[list[Any]], Any]:
    """`build`, and at some results a history begins."""
    if not leaves:
        return build

    def marked(out: list[Any]) -> Any:
        out = list(out)
        for i, is_parameter in leaves:
            out[i] = torch.nn.Parameter(out[i]) if is_parameter else out[i].requires_grad_()
        return build(out)

    return marked


def forms(
    outputs: Sequence[Any], mesh: Mesh, names: Sequence[Any], strides: Sequence[tuple[int, ...] | None]
) -> Iterator[Form | None]:
    """What the results of a program are as ShardedTensors, with the strides that they have on one device."""
    device = torch.empty(0, device=mesh.device).device
    for out, called, said in zip(outputs, names, strides, strict=False):
        yield Form.intern(_layout(out), mesh, out.dtype, device, called, said) if isinstance(out, Var) else None


def _layout(var: Var) -> Layout:
    assert var.layout is not None, f"{var} is no value of the program"
    return var.layout


# --- running ----------------------------------------------------------------------------------------------------------


def caller(entry: Entry) -> Callable[[list[Any]], Any]:
    """A function that calls the program on the leaves of a call."""
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
    """What the function returns, given its results and what it keeps, which is put in its place."""
    if entry.after.rebound:
        with compiling.lock:
            rebind(entry.after.rebound, leaves, out)
        del out[entry.own :]
    return entry.build(out)


def results(entry: Entry, leaves: list[Any]) -> tuple[list[Any], Sequence[Any]]:
    """The function's own results by leaf, then what it keeps; and the pieces that are saved for the backward pass."""
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
    """What the backward pass will read is as it was before the call writes to plain arguments."""
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
    """Write to arguments what the function wrote to them, and set their gradients."""
    with torch.no_grad():
        written = {given.leaf: pieces[i] for i, given in enumerate(entry.inputs) if given.replaced}
        for leaf, at in entry.after.written:
            into, value = leaves[leaf], out[at]
            if at in entry.away and _is_alike(into, value) and store_on_host(into, stored_shards(value), value._origin):
                torch.autograd.graph.increment_version(into)
                continue
            if type(into) is ShardedTensor and type(into._locals) is Gone:
                continue  # it was donated: nobody reads it again
            if _is_written(into, value, written.get(leaf)):
                torch.autograd.graph.increment_version(into)
            else:
                into.detach().copy_(value if type(into) is ShardedTensor else value._locals[0])
        taken = [
            (leaf, what, leaves[of] if what == "grad" else leaves[of].detach()) for leaf, what, of in entry.after.takes
        ]
        taken += [(leaf, "data", _as_kind(leaves[leaf], out[at])) for leaf, at in entry.after.data]
        for leaf, what, value in taken:
            setattr(leaves[leaf], what, value)
        for leaf, there in entry.after.grads:
            leaves[leaf].grad = None if there is None else _as_kind(leaves[leaf], out[there])


def _is_written(into: torch.Tensor, value: ShardedTensor, there: Pieces | None) -> bool:
    """Whether a tensor has a value already: the program wrote it there, or its pieces can be the tensor's own."""
    if type(into) is not ShardedTensor:
        if there is None or value._locals[0] is not there[0] or into.is_inference():
            return False
        return bool(memory_of(there[0].untyped_storage()) == memory_of(into.untyped_storage()))
    if not _is_alike(into, value):
        return False
    view_aliases.assign_shards(into, *(_settled(value._locals),) * 2, value._origin)
    return True


def _is_alike(into: ShardedTensor, value: ShardedTensor) -> bool:
    """Whether the pieces of a value can be those of a tensor."""
    if into.is_inference() or into.__dict__.get("_path"):
        return False
    return (into._form.layout.canonical, into.dtype) == (value._form.layout.canonical, value.dtype)


def _settled(pieces: Pieces) -> Pieces:
    """Pieces that keep no more memory alive than they show."""
    for x in pieces:
        if x.untyped_storage().nbytes() != x.numel() * x.itemsize:
            own = {id(y): y.clone(memory_format=torch.contiguous_format) for y in pieces}
            return tuple(own[id(y)] for y in pieces)
    return pieces


def _as_kind(of: torch.Tensor, value: ShardedTensor) -> torch.Tensor:
    return value if type(of) is ShardedTensor else value._locals[0].clone()
