"""The local form of ops that read a dim some places to both sides: a device gets them of its neighbours.

It runs the op on its piece with what stands around it, and drops what belongs to others. So the op does at the ends of
the whole dim what it always does there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardlib.internals import pytree
from shardlib.rules.halo import Range, extent, fetch, length, overlap, sent
from shardlib.rules.rule import Halo, Labels, Local

Reach = tuple[int, int]  # how many elements in front of its own a result reads, and how many behind it


def stencil(reach: Mapping[str, Reach]) -> Callable[[Local], Any]:
    """The local form of an op whose results read these factors so far; each is a dim of its own wherever it is."""

    def local(local: Local) -> Any:
        sizes, target = local.rule.sizes, local.call.target

        def around(f: str) -> tuple[Range, Range]:
            """This device's piece, and what the op runs on: something, also where it has nothing."""
            mine = extent((f,), sizes[f])
            return mine, _reads(reach[f], sizes[f])(mine) if length(mine) else (mine[0], mine[0] + 1)

        def form(*args: Any, **kwargs: Any) -> Any:
            flat, tree = pytree.tree_flatten((args, kwargs))
            operands, ranges = iter(local.rule.operands), {f: around(f) for f in reach if f in sizes}
            for i, x in enumerate(flat):
                for dim, f in _along(next(operands), reach) if isinstance(x, Tensor) else ():
                    mine, frame = ranges[f]
                    need = frame if length(mine) else mine
                    flat[i] = fetch(flat[i], dim, (f,), need, frame, name="input")
            args, kwargs = pytree.tree_unflatten(flat, tree)
            found = target(*args, **kwargs)
            outs = list(found) if isinstance(found, tuple) else [found]
            for i, labels in enumerate(local.rule.results):
                for dim, f in _along(labels, reach):
                    mine, frame = ranges[f]
                    outs[i] = outs[i].narrow(dim, mine[0] - frame[0], length(mine))
            return tuple(outs) if isinstance(found, tuple) else outs[0]

        return local.run(form, *local.args, **local.kwargs)

    return local


def halos(reach: Mapping[str, Reach], sizes: Mapping[str, int], operands: Sequence[Labels]) -> list[Halo]:
    """What it sends of these operands."""
    return [
        Halo(f, i, True, sent(sizes[f], sizes[f], _reads(reach[f], sizes[f])))
        for i, labels in enumerate(operands)
        for _, f in _along(labels, reach)
    ]


def _reads(reach: Reach, size: int) -> Callable[[Range], Range]:
    return lambda r: overlap((0, size), (r[0] - reach[0], r[1] + reach[1]))


def _along(labels: Labels, reach: Mapping[str, Reach]) -> list[tuple[int, str]]:
    """The dims of these labels that are read around, with their factors."""
    return [(dim, f) for dim, label in enumerate(labels) for f in label if f in reach]
