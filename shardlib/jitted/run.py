"""One call of a compiled function: its pieces in, its results out, and what it does to memory beside.

Writes to arguments are results of the program: they are applied when it has run. So are `.grad`s that it sets. An
argument in `donate_argnums` gives its memory up, where nobody else holds it.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch

from shardlib.arrays import arrays_of, bounds, share_an_element
from shardlib.calls.parts import rebind
from shardlib.errors import ShardingError
from shardlib.internals import memory_of, memory_uses
from shardlib.jitted.unrolled import Pieces, builder, gatherer, origins, wrapper
from shardlib.meshes.axis import alike
from shardlib.meshes.mesh import Mesh
from shardlib.plans.plan import Plan
from shardlib.program.steps import Compute, Program, Var
from shardlib.program.steps import leaves as values_in
from shardlib.ranks.lineage import note
from shardlib.ranks.telling import number
from shardlib.run import Runner
from shardlib.scalar import Scalar
from shardlib.specs.layout import Layout
from shardlib.state import compiling
from shardlib.tensors.form import Form
from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing.ending import After


@dataclass(frozen=True)
class Input:
    """One input of a program: which leaf of the call it is, its layout, and what makes its memory ours to reuse.

    `firsts` are the devices of this process that hold different pieces, each with the number of devices that hold it.
    """

    leaf: int
    name: str
    layout: Layout
    donated: bool
    firsts: tuple[tuple[int, int], ...]


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
    after: After
    own: int  # the first of them that the function itself returns
    returned: int  # with what it keeps
    kept: tuple[Any, ...] = ()
    made_of: Callable[[list[Any]], int] | None = None  # on ranks, the origin of what a call makes

    @functools.cached_property
    def donates(self) -> bool:
        return any(given.donated for given in self.inputs)

    @functools.cached_property
    def acts(self) -> bool:
        """Whether a call does more than to return values."""
        return bool(self.donates or self.after.writes or self.after.rebound)

    @functools.cached_property
    def arrays(self) -> list[tuple[int, int]]:
        """Where the memory of the numpy arrays that the function holds begins and ends."""
        return list(map(bounds, arrays_of(self.kept)))


def entry(plan: Plan, program: Program, mesh: Mesh, runner: Runner, kept: Sequence[Any] = ()) -> Entry:
    """Make a program callable: a plan's own, or the forward half of it."""
    traced = plan.compiled.traced
    inputs = []
    for i, (leaf, name, var) in enumerate(zip(traced.input_leaves, traced.input_names, program.inputs, strict=False)):
        layout, donated = _layout(var), i in program.donated
        inputs.append(Input(leaf, name, layout, donated, tuple(Counter(alike(mesh.own_coords(), layout.axes)).items())))
    named = plan.output_names[: len(plan.output_names) - len(traced.after.gradients)]
    outputs = tuple(forms(program.outputs[: len(named)], mesh, named, traced.strides))
    same = {i: at for i, at in traced.same.items() if outputs[i] is outputs[at]}  # and live in one place
    return Entry(
        plan.name,
        mesh,
        runner,
        tuple(inputs),
        outputs,
        gatherer([(given.leaf, given.layout) for given in inputs], mesh),
        wrapper(outputs),
        _with_leaves(builder(traced.out_tree, same), traced.after.leaves),
        traced.after,
        traced.out_tree.num_leaves,
        len(traced.output_names),
        tuple(kept),
        _origins(plan, program, inputs) if mesh.kind == "distributed" else None,
    )


def _origins(plan: Plan, program: Program, inputs: Sequence[Input]) -> Callable[[list[Any]], int]:
    read = (x for s in program.steps if isinstance(s, Compute) for x in values_in((s.args, s.kwargs), Scalar))
    numbers = sorted({leaf for x in read for leaf in x.leaves()})
    what = number(plan.name, *plan.compiled.traced.result_names)
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
        yield Form.of(_layout(out), mesh, out.dtype, device, called, said) if isinstance(out, Var) else None


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
            note(origin, out)
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
        _refuse_overlaps(entry, leaves)
    pieces = entry.gather(leaves)
    gone = _donate(entry, leaves, pieces) if entry.donates else ()
    origin = entry.made_of(leaves) if entry.made_of is not None else 0
    raw = entry.runner(pieces, leaves, None, origin) if origin else entry.runner(pieces, leaves)
    for leaf in gone:
        leaf._locals = _Gone(entry.name)
    out = entry.wrap(raw)
    note(origin, out)
    saved: Sequence[Any] = raw[len(entry.outputs) :]
    if after.writes:
        saved = _kept_from_writes(entry, leaves, saved)
        _apply(entry, leaves, out)
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


def _apply(entry: Entry, leaves: Sequence[Any], out: Sequence[Any]) -> None:
    """Write to arguments what the function wrote to them, and set their gradients."""
    with torch.no_grad():
        for leaf, at in entry.after.written:
            into, value = leaves[leaf], out[at]
            if type(into) is ShardedTensor and type(into._locals) is _Gone:
                continue  # it was donated: nobody reads it again
            into.detach().copy_(value if type(into) is ShardedTensor else value.to_local())
        taken = [
            (leaf, what, leaves[of] if what == "grad" else leaves[of].detach()) for leaf, what, of in entry.after.takes
        ]
        taken += [(leaf, "data", _as_kind(leaves[leaf], out[at])) for leaf, at in entry.after.data]
        for leaf, what, value in taken:
            setattr(leaves[leaf], what, value)
        for leaf, there in entry.after.grads:
            leaves[leaf].grad = None if there is None else _as_kind(leaves[leaf], out[there])


def _as_kind(of: torch.Tensor, value: ShardedTensor) -> torch.Tensor:
    return value if type(of) is ShardedTensor else value.to_local().clone()


def _refuse_overlaps(entry: Entry, leaves: Sequence[Any]) -> None:
    """Each input of a program has memory of its own; on one device a write would show in all that share it."""
    memory = [_memory(leaves[given.leaf]) for given in entry.inputs] + entry.arrays
    if all(a[1] <= b[0] for a, b in pairwise(sorted(memory))):
        return
    changed = {leaf for leaf, _ in entry.after.written}
    written = [given.leaf in changed for given in entry.inputs] + [False] * len(entry.arrays)
    spans = [(*span, min(i, len(entry.inputs)), written[i]) for i, span in enumerate(memory)]
    names = [*(given.name for given in entry.inputs), "a numpy array that it closes over"]
    tensors = [leaves[given.leaf] for given in entry.inputs]
    wrong = []
    for group in _overlapping(spans):
        written_to = [i for i, is_written in group if is_written]
        found = {k for i in written_to for j, _ in group if i != j and _share(tensors, i, j) for k in (i, j)}
        wrong += [f"{' and '.join(names[i] for i in sorted(found))} share memory"] if found else []
    if wrong:
        raise ShardingError(
            f"{entry.name} writes to memory that several of its arguments show",
            wrong,
            rule="a function that writes to an argument sees its memory once",
            remedy="pass the tensor once (make views of it inside), or pass x.clone()",
        )


def _overlapping(spans: Iterable[tuple[int, int, int, bool]]) -> list[list[tuple[int, bool]]]:
    """What stands behind the bounds of each, together where they overlap."""
    found: list[list[tuple[int, bool]]] = []
    upto = 0
    for start, end, *item in sorted(spans):
        if start == end:
            continue
        if start >= upto:
            found.append([])
        found[-1].append((item[0], bool(item[1])))
        upto = max(upto, end)
    return found


def _share(tensors: Sequence[torch.Tensor], i: int, j: int) -> bool:
    """Whether two inputs whose bounds overlap have an element in common; `chunk(2, -1)` gives some that have none."""
    if max(i, j) == len(tensors) or any(type(tensors[k]) is ShardedTensor for k in (i, j)):
        return True
    return share_an_element(tensors[i], tensors[j])


def _memory(x: torch.Tensor) -> tuple[int, int]:
    """Where the memory of an input begins and ends; that of a ShardedTensor is an object."""
    if type(x) is ShardedTensor:
        start = id(x.__dict__.get("_memory") or x)
        return start, start + 1
    start = x.data_ptr()
    steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (steps + 1) * x.itemsize if x.numel() else start


def _donate(entry: Entry, leaves: list[Any], pieces: list[tuple[torch.Tensor, ...]]) -> list[ShardedTensor]:
    """Copy what is donated but held by somebody else as well; returns the tensors whose memory is given up.

    A piece may be a view of a plain tensor, a second name of another piece, or still in the hands of whoever called
    `to_local`. Whoever holds it must not see it change, so only memory that nobody else refers to is overwritten.
    """
    gone: list[ShardedTensor] = []
    base = _base()
    counts: dict[int, int] = {}
    for given in entry.inputs:
        counts[id(leaves[given.leaf])] = counts.get(id(leaves[given.leaf]), 0) + 1
    for i, given in enumerate(entry.inputs):
        if not given.donated:
            continue
        leaf, mine = leaves[given.leaf], pieces[i]
        if type(leaf) is ShardedTensor and counts[id(leaf)] == 1 and _sole(mine, given.firsts, 3, base):
            gone.append(leaf)
        else:
            pieces[i] = _copied(mine, given, entry.mesh)
    return gone


def _sole(
    pieces: tuple[torch.Tensor, ...], firsts: tuple[tuple[int, int], ...], holders: int, base: tuple[int, int, int]
) -> bool:
    """Whether only `holders` of this tuple, and nothing beside it, refer to the memory of these pieces."""
    if sys.getrefcount(pieces) > holders + base[0]:
        return False
    for d, n in firsts:
        x = pieces[d]
        if sys.getrefcount(x) > n + base[1] or _uses(x) > base[2]:
            return False
    return True


def _uses(x: torch.Tensor) -> int:
    return int(memory_uses(memory_of(x.untyped_storage())))


def _counted(pieces: tuple[torch.Tensor, ...]) -> tuple[int, int, int]:
    """What the counts of `_sole` are beyond the holders, here and now: interpreters count their own references
    differently, and so does one in which `torch.compile` has been at work."""
    whole = sys.getrefcount(pieces)
    x = pieces[0]
    return whole - 1, sys.getrefcount(x) - 1, _uses(x)


def _base() -> tuple[int, int, int]:
    mine = (torch.zeros(1) + 1,)
    return _counted(mine)


def _copied(pieces: tuple[torch.Tensor, ...], given: Input, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    first = alike(mesh.own_coords(), given.layout.axes)
    made = {i: pieces[i].clone(memory_format=torch.contiguous_format) for i in dict.fromkeys(first)}
    return tuple(made[i] for i in first)


class _Gone(tuple[Any, ...]):
    """The pieces of a tensor that was donated."""

    name: str

    def __new__(cls, name: str) -> _Gone:
        self = super().__new__(cls)
        self.name = name
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise ShardingError(
            f"a tensor is read after it was donated to {self.name}",
            rule="the memory of an argument in donate_argnums may hold other values after the call",
            remedy="read the function's result instead, or leave the argument out of donate_argnums",
        )

    __getitem__ = __iter__ = __len__ = _refuse
