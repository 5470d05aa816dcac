"""One call of a compiled function: which program it is for, its pieces in, its results out.

A warm call must cost little next to the program itself. So calls are recognised by a signature that is read off the
arguments without building a pytree: containers by their type and keys, sharded tensors by a number that stands for
shape, dtype and layout together, everything else by value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from shardlib.errors import ShardingError
from shardlib.lower.program import Var
from shardlib.meshes.mesh import Mesh
from shardlib.plans.plan import Plan
from shardlib.run import Runner
from shardlib.specs.layout import Layout
from shardlib.tensors.form import Form
from shardlib.tensors.tensor import ShardedTensor, cut_up, wrap


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
    """A program that is ready to run, for one signature."""

    plan: Plan
    mesh: Mesh
    runner: Runner
    inputs: tuple[Input, ...]
    outputs: tuple[Form | None, ...]  # None: no tensor
    build: Callable[[list[Any]], Any]
    donates: bool


def entry(plan: Plan, mesh: Mesh, runner: Runner) -> Entry:
    """Make a plan's program callable."""
    program, traced = plan.compiled.program, plan.compiled.traced
    inputs = []
    for i, (leaf, name, var) in enumerate(zip(traced.input_leaves, traced.input_names, program.inputs, strict=True)):
        layout, donated = _layout(var), i in program.donated
        inputs.append(Input(leaf, name, layout, donated, tuple(_firsts(layout, mesh))))
    device = torch.empty(0, device=mesh.device).device
    outputs = [
        Form.of(_layout(out), mesh, out.dtype, device, names) if isinstance(out, Var) else None
        for out, names in zip(program.outputs, plan.output_names, strict=True)
    ]
    return Entry(plan, mesh, runner, tuple(inputs), tuple(outputs), _builder(traced.out_tree), bool(program.donated))


def _layout(var: Var) -> Layout:
    assert var.layout is not None, f"{var} is no value of the program"
    return var.layout


def _firsts(layout: Layout, mesh: Mesh) -> Iterator[tuple[int, int]]:
    coords = mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(mesh.rank)]
    keys = [tuple(a.coord(c) for a in layout.axes) for c in coords]
    return ((keys.index(key), keys.count(key)) for key in dict.fromkeys(keys))


# --- running ----------------------------------------------------------------------------------------------------------


def run(entry: Entry, mesh: Mesh, leaves: list[Any]) -> Any:
    """Call the program on the leaves of a call."""
    pieces = []
    for given in entry.inputs:
        leaf = leaves[given.leaf]
        if type(leaf) is ShardedTensor:
            pieces.append(leaf._locals)
        else:
            pieces.append(tuple(cut_up(leaf.detach(), given.layout, mesh)))
    gone = _donate(entry, leaves, pieces) if entry.donates else ()
    results = entry.runner(pieces)
    for leaf in gone:
        leaf._locals = _Gone(entry.plan.name)
    out = [r if form is None else wrap(form, r) for r, form in zip(results, entry.outputs, strict=True)]
    return entry.build(out)


def _donate(entry: Entry, leaves: list[Any], pieces: list[tuple[torch.Tensor, ...]]) -> list[ShardedTensor]:
    """Copy what is donated but held by somebody else as well; returns the tensors whose memory is given up.

    A piece may be a view of a plain tensor, a second name of another piece, or still in the hands of whoever called
    `to_local`. Whoever holds it must not see it change, so only memory that nobody else refers to is overwritten.
    """
    gone: list[ShardedTensor] = []
    counts: dict[int, int] = {}
    for given in entry.inputs:
        counts[id(leaves[given.leaf])] = counts.get(id(leaves[given.leaf]), 0) + 1
    for i, given in enumerate(entry.inputs):
        if not given.donated:
            continue
        leaf, mine = leaves[given.leaf], pieces[i]
        if type(leaf) is ShardedTensor and counts[id(leaf)] == 1 and _sole(mine, given.firsts, 3):
            gone.append(leaf)
        else:
            pieces[i] = _copied(mine, given, entry.mesh)
    return gone


def _sole(pieces: tuple[torch.Tensor, ...], firsts: tuple[tuple[int, int], ...], holders: int) -> bool:
    """Whether only `holders` of this tuple, and nothing beside it, refer to the memory of these pieces."""
    if sys.getrefcount(pieces) > holders + _BASE[0]:
        return False
    for d, n in firsts:
        x = pieces[d]
        if sys.getrefcount(x) > n + _BASE[1] or _uses(x) > _BASE[2]:
            return False
    return True


def _uses(x: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def _counted(pieces: tuple[torch.Tensor, ...]) -> tuple[int, int, int]:
    """What the counts of `_sole` are beyond the holders, here: interpreters count their own references differently."""
    whole = sys.getrefcount(pieces)
    x = pieces[0]
    return whole - 1, sys.getrefcount(x) - 1, _uses(x)


def _base() -> tuple[int, int, int]:
    mine = (torch.zeros(1) + 1,)
    return _counted(mine)


_BASE = _base()


def _copied(pieces: tuple[torch.Tensor, ...], given: Input, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    coords = mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(mesh.rank)]
    made: dict[tuple[int, ...], torch.Tensor] = {}
    out = []
    for c, x in zip(coords, pieces, strict=True):
        key = tuple(a.coord(c) for a in given.layout.axes)
        if key not in made:
            made[key] = x.clone(memory_format=torch.contiguous_format)
        out.append(made[key])
    return tuple(out)


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


# --- recognising calls ------------------------------------------------------------------------------------------------


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]] | None:
    """The leaves of a call in pytree order, and what decides which program runs it; None if it needs a closer look."""
    leaves: list[Any] = []
    known: list[Any] = []
    if _read(args, leaves, known) and _read(kwargs, leaves, known):
        return leaves, tuple(known)
    return None


def _read(x: Any, leaves: list[Any], known: list[Any]) -> bool:
    kind = type(x)
    if kind is ShardedTensor:
        leaves.append(x)
        number = x._form.number
        known.append(-1 - number if x.requires_grad else number)
        return True
    if kind is tuple or kind is list:
        known.append(kind)
        known.append(len(x))
        return all(_read(y, leaves, known) for y in x)
    if kind is dict:
        known.append(kind)
        known.append(tuple(x))
        return all(_read(y, leaves, known) for y in x.values())
    leaves.append(x)
    if isinstance(x, torch.Tensor):
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return False
        known.append((kind, x.shape, x.dtype, x.device, x.requires_grad))
        return True
    if kind in _BY_VALUE:
        known.append(kind)
        known.append(x)
        return True
    return False


_BY_VALUE = frozenset({int, float, bool, str, type(None)})


def _builder(tree: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """`tree_unflatten`, written out for the plain containers that results mostly are."""
    names: dict[str, Any] = {}

    def write(x: Any) -> str | None:
        if type(x) is _Leaf:
            return f"x[{x.index}]"
        if type(x) is dict:
            parts = [(f"k{len(names)}", names.setdefault(f"k{len(names)}", key), write(y)) for key, y in x.items()]
            return None if any(y is None for _, _, y in parts) else f"{{{', '.join(f'{k}: {y}' for k, _, y in parts)}}}"
        if type(x) is tuple or type(x) is list:
            texts = [write(y) for y in x]
            if any(text is None for text in texts):
                return None
            inner = "".join(f"{text}, " for text in texts)
            return f"({inner})" if type(x) is tuple else f"[{inner}]"
        return None

    text = write(pytree.tree_unflatten([_Leaf(i) for i in range(tree.num_leaves)], tree))
    if text is None:
        return lambda leaves: pytree.tree_unflatten(leaves, tree)
    build: Callable[[list[Any]], Any] = eval(f"lambda x: {text}", names)
    return build


@dataclass(frozen=True)
class _Leaf:
    index: int
