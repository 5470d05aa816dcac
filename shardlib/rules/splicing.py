"""What is put together along a cut dim, of ranges of tensors and of fillings: every device fetches what comes to lie in
its piece, in as few messages as there are ways to go.

With I the gcd of all sizes and ranges a dim is `(p I)`, and a cut of I needs no communication: so a fused weight is put
together without a look at how its parts are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlib.rules.halo import Range, extent, fetch_all, length, overlap, sent
from shardlib.rules.rule import Call, Halo, Path, Rule
from shardlib.rules.shards import held
from shardlib.rules.shifting import exposed, joined
from shardlib.rules.space import Dim, Space, arg, axis, path, result_dtype, result_shape


@dataclass(frozen=True)
class Part:
    """A range of an operand, or of a filling."""

    source: int | None
    start: int
    stop: int
    fill: complex = 0
    negated: bool = False


def splice_rule(call: Call, at: int, parts: Sequence[Part], ranges: Mapping[Path, int] | None = None) -> Rule:
    """The rule of an op that puts `parts` together along dim `at`; other operands (of shape [0]) count as nothing.

    `ranges` are the arguments that count along the dim.
    """
    space, shape, dtype = Space(), result_shape(call), result_dtype(call)
    sources = dict.fromkeys(i for i, m in enumerate(call.operands) if len(m.shape) == len(shape))
    sizes = {i: call.operands[i].shape[at] for i in sources}
    block = math.gcd(shape[at], *sizes.values(), *(n for part in parts for n in (part.start, part.stop)))
    inner = space.dim(block, "i")
    out = space.dim(shape[at] // block, "p") if block else space.dim(shape[at], whole=True)
    outer = {i: space.dim(n // block, "p") if block else space.dim(n, whole=True) for i, n in sizes.items()}
    begins = [*itertools.accumulate((part.stop - part.start for part in parts), initial=0)]
    if not out:
        space.whole |= {f for d in outer.values() for f in d}

    def needs(source: int | None) -> list[Callable[[Range], Range]]:
        """Which blocks of a source are in a range of the result, part by part."""

        def one(part: Part, begin: int) -> Callable[[Range], Range]:
            def need(mine: Range) -> Range:
                low, high = overlap((begin // block, (begin + part.stop - part.start) // block), mine)
                return low + (part.start - begin) // block, high + (part.start - begin) // block

            return need

        return [one(part, begin) for part, begin in zip(parts, begins, strict=False) if part.source == source]

    def form(tensors: Sequence[Tensor], inside: int) -> Tensor:
        mine, found = extent(out, shape[at] // block), {}
        for i, label in outer.items():
            x = exposed(tensors[i], at, label, sizes[i] // block, inside)
            wanted = [need(mine) for need in needs(i)]
            found[i] = iter(fetch_all(x, at, label, wanted, name="input")) if wanted else iter(())
        filled = (need(mine) for need in needs(None))
        pieces = []
        for part in parts:
            if part.source is not None:
                piece = next(found[part.source]).to(dtype)
            else:
                blank = [*x.shape[:at], length(next(filled)), inside, *x.shape[at + 2 :]]
                piece = tensors[next(iter(sources))].new_full(blank, part.fill)
            pieces.append(-piece if part.negated else piece)
        return joined(torch.cat(pieces, at), at)

    follows = {d[0]: out[0] for d in outer.values() if d and out and d[0] not in space.whole}
    rest = space.dims([1 if i == at else n for i, n in enumerate(shape)])
    whole = [*(space.dims(m.shape, whole=[0]) for i, m in enumerate(call.operands) if i not in sources)]
    skipped = iter(whole)

    def labels(outer: Dim) -> list[Dim]:
        return [(*outer, *inner) if i == at else d for i, d in enumerate(rest)]

    return space.rule(
        [labels(outer[i]) if i in sources else next(skipped) for i in range(len(call.operands))],
        [labels(out)],
        reduce=dict.fromkeys(follows, "none"),
        ints={path: (n // block, inner) for path, n in (ranges or {}).items()} if block else {},
        linear=[range(len(call.operands))] if not any(part.fill for part in parts) else [],
        local=lambda local: local.run(form, local.args[0], held(local, inner)),
        local_factors={*follows, *out},
        follows=follows,
        halos=[
            Halo(d[0], i, True, sent(sizes[i] // block, shape[at] // block, *needs(i)))
            for i, d in outer.items()
            if d and d[0] in follows and needs(i)
        ],
    )


def cat(call: Call) -> Rule:
    """Old-style empty operands (shape [0]) count as nothing."""
    rank = len(result_shape(call))
    at = axis(arg(call, 1, "dim", 0), rank)
    return splice_rule(call, at, [Part(i, 0, m.shape[at]) for i, m in enumerate(call.operands) if len(m.shape) == rank])


def splice(call: Call) -> Rule:
    at, sources, starts, stops, fills, negated = (arg(call, i, name) for i, name in enumerate(_ARGUMENTS, 1))
    of, minus = (None if i < 0 else i for i in sources), negated or [False] * len(fills)
    parts = [Part(*part) for part in zip(of, starts, stops, fills, minus, strict=True)]
    ends = {path(call, 3, "starts"): starts, path(call, 4, "stops"): stops}
    ranges = {(*where, i): n for where, numbers in ends.items() for i, n in enumerate(numbers)}
    return splice_rule(call, at, parts, ranges)


_ARGUMENTS = ("dim", "sources", "starts", "stops", "fills", "negated")
