"""The inputs of a program, and which of them give their memory up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.refcounts import Counts, ShardTuples, is_sole_owner, measure_sole_owner
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.view_aliases import Memory


@dataclass(frozen=True)
class Input:
    """One input of a program: which leaf of the call it is, its layout, and what makes its memory ours to reuse.

    Its memory is `donated`, or the program itself writes there what is `replaced`; or it is `away`, on the host.
    `firsts` are the devices of this process that hold different pieces, each with the number of devices that hold it.
    """

    leaf: int
    name: str
    layout: Layout
    donated: bool
    replaced: bool
    away: bool
    firsts: tuple[tuple[int, int], ...]


def donate(
    inputs: Sequence[Input], leaves: list[Any], pieces: list[tuple[torch.Tensor, ...]], mesh: Mesh
) -> list[ShardedTensor]:
    """Copy what would be written over but is held by somebody else as well; returns the tensors that are given up.

    A piece may be a view of a plain tensor, a second name of another piece, or still in the hands of whoever called
    `to_local`. Whoever holds it must not see it change, so only memory that nobody else refers to is overwritten.
    Writes to a plain tensor show in all that share its memory, on one device, too: what replaces it is written there.
    """
    gone: list[ShardedTensor] = []
    base = measure_sole_owner()
    counts = Counter(id(leaves[given.leaf]) for given in inputs)
    for i, given in enumerate(inputs):
        if not given.donated and not given.replaced:
            continue
        leaf = leaves[given.leaf]
        if given.replaced:
            if not _is_at_home(leaf, pieces, i, given.firsts, base):
                pieces[i] = _copied(pieces[i], given, mesh)
        elif type(leaf) is ShardedTensor and counts[id(leaf)] == 1 and is_sole_owner(pieces, i, given.firsts, 2, base):
            gone.append(leaf)
        else:
            pieces[i] = _copied(pieces[i], given, mesh)
    return gone


def _is_at_home(
    leaf: torch.Tensor, pieces: ShardTuples, i: int, firsts: tuple[tuple[int, int], ...], base: Counts
) -> bool:
    """Whether what is written to these pieces shows in `leaf`, in its views and aliases, and in nothing else."""
    if leaf.is_inference():
        return False
    if type(leaf) is not ShardedTensor:
        return bool(memory_of(pieces[i][0].untyped_storage()) == memory_of(leaf.untyped_storage()))
    memory: Memory | None = leaf.__dict__.get("_memory")
    if memory is not None:
        memory.forget(but=leaf)
    return not leaf.__dict__.get("_path") and is_sole_owner(pieces, i, firsts, 2 + (memory is not None), base)


def _copied(pieces: tuple[torch.Tensor, ...], given: Input, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    first = first_replicas(mesh.own_coords(), given.layout.axes)
    made = {i: pieces[i].clone(memory_format=torch.contiguous_format) for i in dict.fromkeys(first)}
    return tuple(made[i] for i in first)


class Gone(tuple[Any, ...]):
    """The pieces of a tensor that was donated."""

    name: str

    def __new__(cls, name: str) -> Gone:
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
