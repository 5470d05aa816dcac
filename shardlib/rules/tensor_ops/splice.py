"""What is put together along cut dims, of ranges of tensors and of fillings: every device fetches what comes to lie in
its piece, in as few messages as there are ways to go.

With I the gcd of all sizes and ranges a dim is `(p I)`, and a cut of I needs no communication: so a fused weight is put
together without a look at how its parts are cut. Pads put fillings around a value, rolls its end in front of its begin.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import Dim, Space, arg, axis, path, result, result_shape
from shardlib.rules.local_forms.halo import Range, extent, fetch, length, overlap, padded
from shardlib.rules.local_forms.helpers import cut, torch_code
from shardlib.rules.rule import Call, Held, Local, Path, Reads, Rule
from shardlib.rules.tensor_ops.slice_shift import exposed, granularity, joined


@dataclass(frozen=True)
class Part:
    """A range of an operand, or of a filling, which lies from `begin` on in what is put together."""

    source: int | None
    start: int
    stop: int
    fill: complex = 0
    negated: bool = False
    mirrored: bool = False
    begin: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Spliced:
    """Dim `at` of a result, of so many elements, put together of `parts` of operands of these `sizes`.

    `out` and `outer` are the blocks of the result and of operands, `inner` is what is in one.
    """

    at: int
    parts: Sequence[Part]
    sizes: Mapping[int, int]
    size: int
    block: int
    inner: Dim
    out: Dim
    outer: Mapping[int, Dim]

    @staticmethod
    def of(space: Space, at: int, parts: Sequence[Part], sizes: Mapping[int, int], size: int, *, same: bool) -> Spliced:
        """`same` says that the result has the dim of the one operand."""
        block = math.gcd(size, *sizes.values(), *(n for part in parts for n in (part.start, part.stop)))
        most = max((part.size for part in parts if part.source is not None), default=0)
        block = 1 if same else min(block, 1) if any(part.mirrored for part in parts) else granularity(block, size, most)
        inner = space.dim(block, "i")
        out = space.dim(size // block, "p") if block else space.dim(size, whole=True)
        blocks = {i: n // block if block else n for i, n in sizes.items()}
        outer = {i: out if same else space.dim(n, "p", whole=not block) for i, n in blocks.items()}
        if not out:
            space.whole |= {f for d in outer.values() for f in d}
        begins = itertools.accumulate((part.size for part in parts), initial=0)
        parts = [replace(part, begin=begin) for part, begin in zip(parts, begins, strict=False)]
        return Spliced(at, parts, sizes, size, block, inner, out, outer)

    @property
    def follows(self) -> dict[str, str]:
        return {d[0]: self.out[0] for d in self.outer.values() if d and self.out and d != self.out}

    @property
    def reads(self) -> dict[str, Reads]:
        """Where the result's blocks are in operands, of each by its longest part."""
        found: dict[str, Reads] = {}
        for part in self.parts:
            if part.source is not None and not part.mirrored and (name := self.outer[part.source]) and self.block:
                at, count = (part.start - part.begin) // self.block, part.size // self.block
                if name != self.out and self.out and (name[0] not in found or found[name[0]].elements < count):
                    found[name[0]] = Reads(self.out[0], 1, at, at, count)
        return found

    @property
    def held(self) -> list[Held]:
        """The operands that are one block of the result."""
        of = Counter(part.source for part in self.parts)
        return [
            Held(self.out[0], part.begin // self.block, part.source)
            for part in self.parts
            if part.source is not None
            and self.outer[part.source] == ()
            and of[part.source] == 1
            and self.block
            and self.out
        ]

    @property
    def factors(self) -> set[str]:
        return {f for d in (self.out, *self.outer.values()) for f in d}

    def need(self, part: Part, mine: Range) -> Range:
        """Which blocks of its source are in a range of the result."""
        first, stop = part.begin // self.block, (part.begin + part.size) // self.block
        low, high = overlap((first, stop), mine)
        if part.mirrored:  # where blocks are single elements
            return part.stop + part.begin - high, part.stop + part.begin - low
        shift = part.start // self.block - first
        return low + shift, high + shift

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """A device's piece of the result."""
        at, mine, found = self.at, extent(self.out, self.size // self.block), {}
        for i, label in self.outer.items():
            x = exposed(tensors[i], at, label, self.sizes[i] // self.block, self.inner, self.block)
            wanted = [self.need(part, mine) for part in self.parts if part.source == i]
            found[i] = iter(fetch(x, at, label, wanted, name="input")) if wanted else iter(())
        pieces = []
        for part in self.parts:
            if part.source is not None:
                piece = next(found[part.source]).to(dtype)
                piece = piece.flip(at) if part.mirrored else piece
            else:
                blank = [*x.shape[:at], length(self.need(part, mine)), *x.shape[at + 1 :]]
                piece = x.new_full(blank, part.fill, dtype=dtype)
            pieces.append(-piece if part.negated else piece)
        return joined(torch.cat(pieces, at), at)


def _spliced(
    call: Call,
    parts: Mapping[int, Sequence[Part]],
    ranges: Mapping[int, Mapping[Path, int]],
    rest: Callable[..., Tensor] = lambda x, *_: x,
    *,
    same: bool = False,
) -> Rule:
    """The rule of an op that puts dims of its result together; other operands (of shape [0]) count as nothing.

    `ranges` are the arguments that count along a dim. `rest` does what is left of a value: it gets which dims are done,
    and the op's arguments behind the first.
    """
    space, shape = Space(), result_shape(call)
    there = [i for i, m in enumerate(call.operands) if m.rank == len(shape)]
    splices = {
        at: Spliced.of(space, at, of, {i: call.operands[i].shape[at] for i in there}, shape[at], same=same)
        for at, of in parts.items()
    }
    others = space.dims([1 if at in parts else n for at, n in enumerate(shape)])

    def labels(i: int | None) -> list[Dim]:
        blocks = {at: s.out if i is None else s.outer[i] for at, s in splices.items()}
        return [(*blocks[at], *splices[at].inner) if at in parts else d for at, d in enumerate(others)]

    def form(local: Local, x: Any, *args: Any) -> Tensor:
        done = {at: s for at, s in splices.items() if cut(local, s.factors)}
        for s in done.values():
            x = s.form([x] if isinstance(x, Tensor) else x, result(call).dtype)
        return rest(x, done, *args)

    follows = {i: o for s in splices.values() for i, o in s.follows.items() if i not in space.whole}
    led = {*follows, *(f for s in splices.values() for f in s.out)}
    return space.rule(
        [labels(i) if i in there else space.dims(m.shape, whole=[0]) for i, m in enumerate(call.operands)],
        [labels(None)],
        reduce=dict.fromkeys(follows, "none"),
        ints={
            path: (n // splices[at].block, splices[at].inner)
            for at, counted in ranges.items()
            for path, n in counted.items()
            if splices[at].block
        },
        linear=[range(len(call.operands))] if not any(part.fill for of in parts.values() for part in of) else [],
        local=torch_code(form),
        local_factors=led,
        follows=follows,
        reads={k: v for s in splices.values() for k, v in s.reads.items()},
        held=tuple(held for s in splices.values() for held in s.held),
    )


def cat(call: Call) -> Rule:
    """Old-style empty operands (shape [0]) count as nothing."""
    rank = len(result_shape(call))
    at = axis(arg(call, "dim"), rank)
    return _spliced(call, {at: [Part(i, 0, m.shape[at]) for i, m in enumerate(call.operands) if m.rank == rank]}, {})


def splice(call: Call) -> Rule:
    at, sources, starts, stops, fills, *flags = (arg(call, name) for name in _ARGUMENTS)
    of, marks = (None if i < 0 else i for i in sources), [given or [False] * len(fills) for given in flags]
    parts = [Part(*part) for part in zip(of, starts, stops, fills, *marks, strict=True)]
    ends = {path(call, "starts"): starts, path(call, "stops"): stops}
    return _spliced(call, {at: parts}, {at: {(*w, i): n for w, ns in ends.items() for i, n in enumerate(ns)}})


_ARGUMENTS = ("dim", "sources", "starts", "stops", "fills", "negated", "mirrored")


def pad(call: Call) -> Rule:
    """`constant_pad_nd(x, pad, value)`; of negative numbers it is a slice."""
    shape, amounts, value = call.operands[0].shape, arg(call, "pad"), arg(call, "value")
    parts, ranges = {}, {}
    for k, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        at = len(shape) - 1 - k
        if before or after:
            kept = Part(0, max(-before, 0), shape[at] - max(-after, 0))
            parts[at] = [Part(None, 0, max(before, 0), value), kept, Part(None, 0, max(after, 0), value)]
            ranges[at] = {(*path(call, "pad"), 2 * k): before, (*path(call, "pad"), 2 * k + 1): after}

    def rest(x: Tensor, done: Container[int], amounts: Sequence[int], fill: float) -> Tensor:
        left = [0 if x.dim() - 1 - k // 2 in done else n for k, n in enumerate(amounts)]
        return padded(x, left, fill)

    return _spliced(call, parts, ranges, rest)


def roll(call: Call) -> Rule:
    """Without dims the flattened value is rolled: nothing may be cut."""
    shape = call.operands[0].shape
    shifts, dims = ([n] if isinstance(n, int) else list(n) for n in (arg(call, "shifts"), arg(call, "dims")))
    if not dims:
        x = (space := Space()).dims(shape, whole=range(len(shape)))
        return space.rule([x], [x], linear=[{0}])
    by: dict[int, int] = {}
    for d, n in zip(dims, shifts, strict=True):
        at = axis(d, len(shape))
        by[at] = (by.get(at, 0) + n) % max(shape[at], 1)
    parts = {at: [Part(0, shape[at] - n, shape[at]), Part(0, 0, shape[at] - n)] for at, n in by.items() if shape[at]}

    def rest(x: Tensor, done: Container[int], *_: Any) -> Tensor:
        left = [at for at, n in by.items() if n and at not in done]
        return torch.roll(x, [by[at] for at in left], left) if left else x

    return _spliced(call, parts, {}, rest, same=True)
