"""Concatenations of ranges of tensors and of fillings along sharded dims: cat, splice, pad, roll.

Each device fetches the elements of its shard, with one message per distance between devices. With I the gcd of all
sizes and ranges a dim is `(p I)`, and a sharding of I needs no communication: a fused weight is concatenated however
its parts are sharded. A pad puts fillings around a value, a roll puts its end before its start.
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

from shardlib.rules.iteration_space import Dim, Space, arg, argument_path, normalize_dim, result, result_shape
from shardlib.rules.local_forms.halo import Range, fetch, intersect, length, shard_range
from shardlib.rules.local_forms.helpers import from_torch_code, pad_constant, sharded_factors
from shardlib.rules.rule import Call, LocalBuilder, Path, Rule, RuleFn, SingleBlock, WindowMap
from shardlib.rules.tensor_ops.slice_shift import block_size, join_blocks, split_blocks


@dataclass(frozen=True)
class Part:
    """A range of an operand, or a filling, at position `begin` of the result."""

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
class Concatenation:
    """Dim `at` of a result of `size` elements, which consists of `parts` of operands with these `sizes`.

    `out` and `outer` are the factors of blocks in the result and in the operands; `inner` is the factor inside a block.
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
    def of_parts(
        space: Space, at: int, parts: Sequence[Part], sizes: Mapping[int, int], size: int, *, same: bool
    ) -> Concatenation:
        """Creates the factors of the dims; with `same`, the result shares the dim of the one operand."""
        block = math.gcd(size, *sizes.values(), *(n for part in parts for n in (part.start, part.stop)))
        if same or any(part.mirrored for part in parts):
            block = 1 if same else min(block, 1)
        else:
            longest = max((part.size for part in parts if part.source is not None), default=0)
            block = block_size(block, size, longest)
        inner = space.dim(block, "i")
        out = space.dim(size // block, "p") if block else space.dim(size, whole=True)
        blocks = {i: n // block if block else n for i, n in sizes.items()}
        outer = {i: out if same else space.dim(n, "p", whole=not block) for i, n in blocks.items()}
        if not out:
            space.whole |= {f for d in outer.values() for f in d}
        begins = itertools.accumulate((part.size for part in parts), initial=0)
        parts = [replace(part, begin=begin) for part, begin in zip(parts, begins, strict=False)]
        return Concatenation(at, parts, sizes, size, block, inner, out, outer)

    @property
    def follows(self) -> dict[str, str]:
        return {d[0]: self.out[0] for d in self.outer.values() if d and self.out and d != self.out}

    @property
    def windows(self) -> dict[str, WindowMap]:
        """The positions of the result's blocks in each operand, from its longest part."""
        windows: dict[str, WindowMap] = {}
        for part in self.parts:
            if part.source is not None and not part.mirrored and (name := self.outer[part.source]) and self.block:
                at, count = (part.start - part.begin) // self.block, part.size // self.block
                if name != self.out and self.out and (name[0] not in windows or windows[name[0]].elements < count):
                    windows[name[0]] = WindowMap(self.out[0], 1, at, at, count)
        return windows

    @property
    def blocks(self) -> list[SingleBlock]:
        """The operands that are a single block of the result."""
        uses = Counter(part.source for part in self.parts)
        return [
            SingleBlock(self.out[0], part.begin // self.block, part.source)
            for part in self.parts
            if part.source is not None
            and self.outer[part.source] == ()
            and uses[part.source] == 1
            and self.block
            and self.out
        ]

    @property
    def factors(self) -> set[str]:
        return {f for d in (self.out, *self.outer.values()) for f in d}

    def need(self, part: Part, mine: Range) -> Range:
        """Returns the blocks of a part's source in a range of the result."""
        first, stop = part.begin // self.block, (part.begin + part.size) // self.block
        low, high = intersect((first, stop), mine)
        if part.mirrored:  # blocks are single elements
            return part.stop + part.begin - high, part.stop + part.begin - low
        shift = part.start // self.block - first
        return low + shift, high + shift

    def form(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """This device's shard of the result."""
        at, mine, fetched = self.at, shard_range(self.out, self.size // self.block), {}
        for i, label in self.outer.items():
            x = split_blocks(tensors[i], at, label, self.sizes[i] // self.block, self.inner, self.block)
            needs = [self.need(part, mine) for part in self.parts if part.source == i]
            fetched[i] = iter(fetch(x, at, label, needs, name="input")) if needs else iter(())
        blocks = []
        for part in self.parts:
            if part.source is not None:
                block = next(fetched[part.source]).to(dtype)
                block = block.flip(at) if part.mirrored else block
            else:
                shape = [*x.shape[:at], length(self.need(part, mine)), *x.shape[at + 1 :]]
                block = x.new_full(shape, part.fill, dtype=dtype)
            blocks.append(-block if part.negated else block)
        return join_blocks(torch.cat(blocks, at), at)


def _concatenation_rule(
    call: Call,
    parts: Mapping[int, Sequence[Part]],
    ranges: Mapping[int, Mapping[Path, int]],
    rest: Callable[..., Tensor] = lambda x, *_: x,
    *,
    same: bool = False,
) -> Rule:
    """Returns the rule of an op that concatenates `parts` along dims; operands of another rank (shape [0]) are ignored.

    `ranges` are the arguments that count along a dim. `rest(x, done, *args)` does the op's work along the dims that are
    not in `done`.
    """
    space, shape = Space(), result_shape(call)
    tensors = {i: m for i, m in enumerate(call.operands) if m.rank == len(shape)}
    dims = {
        at: Concatenation.of_parts(
            space, at, parts_of_dim, {i: m.shape[at] for i, m in tensors.items()}, shape[at], same=same
        )
        for at, parts_of_dim in parts.items()
    }
    others = space.dims([1 if at in parts else n for at, n in enumerate(shape)])

    def labels(i: int | None) -> list[Dim]:
        outer = {at: dim.out if i is None else dim.outer[i] for at, dim in dims.items()}
        return [(*outer[at], *dims[at].inner) if at in parts else d for at, d in enumerate(others)]

    def form(local: LocalBuilder, x: Any, *args: Any) -> Tensor:
        done = {at: dim for at, dim in dims.items() if sharded_factors(local, dim.factors)}
        for dim in done.values():
            x = dim.form([x] if isinstance(x, Tensor) else x, result(call).dtype)
        return rest(x, done, *args)

    follows = {i: o for dim in dims.values() for i, o in dim.follows.items() if i not in space.whole}
    return space.rule(
        [labels(i) if i in tensors else space.dims(m.shape, whole=[0]) for i, m in enumerate(call.operands)],
        [labels(None)],
        reduce=dict.fromkeys(follows, "none"),
        ints={
            path: (n // dims[at].block, dims[at].inner)
            for at, numbers in ranges.items()
            for path, n in numbers.items()
            if dims[at].block
        },
        linear=[range(len(call.operands))] if not any(part.fill for dim in dims.values() for part in dim.parts) else [],
        emit=from_torch_code(form),
        local_factors={*follows, *(f for dim in dims.values() for f in dim.out)},
        follows=follows,
        windows={f: window for dim in dims.values() for f, window in dim.windows.items()},
        blocks=tuple(block for dim in dims.values() for block in dim.blocks),
    )


def _cat(call: Call) -> Rule:
    """Torch ignores operands of shape [0]."""
    rank = len(result_shape(call))
    at = normalize_dim(arg(call, "dim"), rank)
    parts = [Part(i, 0, m.shape[at]) for i, m in enumerate(call.operands) if m.rank == rank]
    return _concatenation_rule(call, {at: parts}, {})


def _splice(call: Call) -> Rule:
    at, indices, starts, stops, fills, *flags = (arg(call, name) for name in _ARGUMENTS)
    sources, marks = (None if i < 0 else i for i in indices), [flag or [False] * len(fills) for flag in flags]
    parts = [Part(*part) for part in zip(sources, starts, stops, fills, *marks, strict=True)]
    ends = {argument_path(call, "starts"): starts, argument_path(call, "stops"): stops}
    ranges = {(*path, i): n for path, numbers in ends.items() for i, n in enumerate(numbers)}
    return _concatenation_rule(call, {at: parts}, {at: ranges})


_ARGUMENTS = ("dim", "sources", "starts", "stops", "fills", "negated", "mirrored")


def _pad(call: Call) -> Rule:
    """`constant_pad_nd(x, pad, value)`, where negative numbers crop."""
    shape, amounts, value = call.operands[0].shape, arg(call, "pad"), arg(call, "value")
    parts, ranges = {}, {}
    for k, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        at = len(shape) - 1 - k
        if before or after:
            middle = Part(0, max(-before, 0), shape[at] - max(-after, 0))
            parts[at] = [Part(None, 0, max(before, 0), value), middle, Part(None, 0, max(after, 0), value)]
            ranges[at] = {(*argument_path(call, "pad"), 2 * k): before, (*argument_path(call, "pad"), 2 * k + 1): after}

    def rest(x: Tensor, done: Container[int], amounts: Sequence[int], fill: float) -> Tensor:
        left = [0 if x.dim() - 1 - k // 2 in done else n for k, n in enumerate(amounts)]
        return pad_constant(x, left, fill)

    return _concatenation_rule(call, parts, ranges, rest)


def _roll(call: Call) -> Rule:
    """Without dims the op rolls the flattened value, which stays whole."""
    shape = call.operands[0].shape
    shifts, dims = ([n] if isinstance(n, int) else list(n) for n in (arg(call, "shifts"), arg(call, "dims")))
    if not dims:
        x = (space := Space()).dims(shape, whole=range(len(shape)))
        return space.rule([x], [x], linear=[{0}])
    shift: dict[int, int] = {}
    for d, n in zip(dims, shifts, strict=True):
        at = normalize_dim(d, len(shape))
        shift[at] = (shift.get(at, 0) + n) % max(shape[at], 1)
    parts = {at: [Part(0, shape[at] - n, shape[at]), Part(0, 0, shape[at] - n)] for at, n in shift.items() if shape[at]}

    def rest(x: Tensor, done: Container[int], *_: Any) -> Tensor:
        left = [at for at, n in shift.items() if n and at not in done]
        return torch.roll(x, [shift[at] for at in left], left) if left else x

    return _concatenation_rule(call, parts, {}, rest, same=True)


ROWS: dict[str, RuleFn | str] = {"cat": _cat, "shardlib::splice": _splice, "constant_pad_nd": _pad, "roll": _roll}
