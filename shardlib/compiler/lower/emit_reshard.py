"""Emits a reshard step: views that expose a factor as a dim, sizes per member, local slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.program.steps import Asked, Var
from shardlib.compiler.program.sym_int import (
    Sym,
    apart,
    axes_of,
    everywhere,
    local_size,
    local_value,
    of_member,
    offset,
    product,
    table,
    tabulate,
)
from shardlib.core.aten.op_names import CAT, NARROW, PERMUTE, RESHAPE
from shardlib.sharding.chunks import shard_range
from shardlib.sharding.mesh.axis import Axis, Coords, group_position, group_size, member_coords
from shardlib.sharding.reshard import Axes, RefactorExchange, Step
from shardlib.sharding.reshard.refactor_exchange import Dim, held_ranges

LocalDims = tuple[tuple[tuple[int, Axes], ...], ...]  # per dim, (size, axes) per factor
LocalShape = list[Sym | int]
Places = Callable[[Coords], list[tuple[int, int]]]  # ranges (start, size) of a dim of each device's shard


class Mover:
    """Emits the steps of reshards."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def step(self, step: Step, var: Var, dims: LocalDims, out: Var, *, reason: str, because: Asked | None) -> None:
        """Emits `step` from `var`, whose factors are `dims`, to `out`."""
        if step.crossing:
            self.cross(step.crossing, var, out, reason, because)
            return
        if step.exchanges:
            self._exchange(step, var, dims, out, reason, because)
            return
        new, params = _reshard_dims(dims, step), {}
        x, back, pairs = var, None, []
        if step.kind == "ppermute":
            old_axes, new_axes = ([axes for dim in shards for _, axes in dim] for shards in (dims, new))
            params = {"pairs": _senders(step.axes, old_axes, new_axes)}
        elif step.kind != "all_reduce":
            pairs = [_locate(dims, step.factor)] + ([_locate(dims, step.to)] if step.kind == "all_to_all" else [])
            x, at, back = self._expose(var, dims, pairs, new)
            params = _step_params(step, dims, new, pairs, at)
        result = self._before(out, back)
        if step.kind == "slice":
            self._call(NARROW, (x, *params.values()), result)
        else:
            args = step.kind, step.axes, x, result, params, step.bytes, step.reduce
            self.builder.communicate(*args, reason, because)
        self._view_back(result, out, back)

    def _exchange(self, step: Step, var: Var, dims: LocalDims, out: Var, reason: str, because: Asked | None) -> None:
        """Emits an all_to_all of several factors: row i goes to member i, and a row from each member returns."""
        local = [_local(size, axes) for dim in dims for size, axes in dim]
        n, parts = group_size(step.axes), [group_size(axes) for axes, _, _ in step.exchanges]
        split = [[k for k, x in enumerate(step.exchanges) if x.to == i] for i in range(len(local))]
        joined = [[k for k, x in enumerate(step.exchanges) if x.factor == i][::-1] for i in range(len(local))]
        rest = [size // math.prod(parts[k] for k in ks) for size, ks in zip(local, split, strict=True)]
        sizes, columns = [*parts, *rest], product(rest)
        assert not isinstance(columns, Sym), f"{step} exchanges shards of one size"

        def order(parted: list[list[int]]) -> list[int]:
            """Returns the order of dims in which each factor follows the parts split from it, or joined into it."""
            return [k for i, ks in enumerate(parted) for k in (*ks, len(parts) + i)]

        before, after = order(split), order(joined)
        x = self._viewed(RESHAPE, var, [sizes[k] for k in before])
        x = self._viewed(PERMUTE, x, [before.index(k) for k in range(len(sizes))])
        x = self._viewed(RESHAPE, x, [n, columns])
        received = Var(self.builder.name(f"{var.name}.sent"), None, var.dtype)
        params = {"split_dim": 0, "split_sizes": [1] * n, "concat_dim": 1, "concat_sizes": [columns] * n}
        self.builder.communicate(step.kind, step.axes, x, received, params, step.bytes, step.reduce, reason, because)
        x = self._viewed(PERMUTE, self._viewed(RESHAPE, received, sizes), after)
        self._call(RESHAPE, (x, [product([_local(n, a) for n, a in dim]) for dim in _reshard_dims(dims, step)]), out)

    def _viewed(self, target: Any, x: Var, how: Sequence[Sym | int]) -> Var:
        view = Var(self.builder.name(f"{x.name.partition('.sent')[0]}.sent"), None, x.dtype)
        with self.builder.at(None):
            self._call(target, (x, [*how]), view)
        return view

    def cross(self, crossing: RefactorExchange, var: Var, out: Var, reason: str, because: Asked | None) -> None:
        """Emits the exchange of a dim that is factored in another way: each member sends what others will hold."""
        d, axes = crossing.dim, (*crossing.axes, *crossing.others)
        x, received = var, out
        if not _in_order(crossing.leaving, crossing.before, axes):
            x = Var(self.builder.name(f"{var.name}.sent"), None, var.dtype)
            self._ordered(var, d, crossing.leaving, axes, x)
        if not _in_order(crossing.arriving, crossing.after, axes):
            received = Var(self.builder.name(f"{out.name}.sent"), None, out.dtype)

        own = apart(axes, crossing.axes)
        tables = [crossing.sent(c) for c in everywhere(own, crossing.axes)]  # one of every group
        sizes: list[list[Any]] = [*tables[0]]
        if any(other != sizes for other in tables):
            sizes = [[table(own, each) for each in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
        params = {"split_dim": d, "split_sizes": sizes, "concat_dim": d, "concat_sizes": []}
        self.builder.communicate(
            "all_to_all", crossing.axes, x, received, params, crossing.bytes, "sum", reason, because
        )
        if received is not out:
            self._ordered(received, d, crossing.arriving, axes, out)

    def _ordered(self, x: Var, d: int, places: Places, axes: Axes, out: Var) -> None:
        """Concatenates ranges of dim d."""
        parts = []
        for k in range(max(len(places(c)) for c in everywhere(apart(axes)))):
            start, size = (tabulate(partial(_place, places, k, i), axes) for i in (0, 1))
            parts.append(Var(self.builder.name(f"{x.name.partition('.')[0]}.part"), None, x.dtype))
            with self.builder.at(None):
                self._call(NARROW, (x, d, start, size), parts[-1])
        self._call(CAT, (parts, d), out)

    def slice_all(self, var: Var, dims: LocalDims, out: Var) -> None:
        """Slices a whole value to the shard that `dims` describes."""
        have: LocalDims = tuple(tuple((n, ()) for n, _ in dim) for dim in dims)
        sharded = [(d, k) for d, dim in enumerate(dims) for k, (_, axes) in enumerate(dim) if axes]
        for d, k in sharded:
            size, axes = dims[d][k]
            new = _replace(have, d, k, axes)
            x, (where,), back = self._expose(var, have, [(d, k)], new)
            post = product([n for n, _ in dims[d][k + 1 :]])
            start, length = _relative(size, (), size, axes)
            last = (d, k) == sharded[-1]
            end = out if last else Var(self.builder.name(out.name), None, var.dtype)
            result = self._before(end, back)
            self._call(NARROW, (x, where, start * post, length * post), result)
            self._view_back(result, end, back)
            var, have = end, new

    def _call(self, target: Any, args: tuple[Any, ...], out: Var) -> None:
        self.builder.compute(target, args, {}, [out], "reshard")

    def _expose(
        self, var: Var, dims: LocalDims, pairs: list[tuple[int, int]], new: LocalDims
    ) -> tuple[Var, list[int], LocalShape | None]:
        """Views `var` so that each factor of `pairs` is the major one of its dim.

        Returns the view, the dims of the factors, and the shape to view the result back (None: no view was needed).
        """
        before = {(d, k): [p for p in pairs if p[0] == d and p[1] < k] for d, k in pairs}
        splits = sorted(p for p in {*pairs} if before[p] or any(_local(n, a) != 1 for n, a in dims[p[0]][: p[1]]))
        at = [d + sum(split <= (d, k) for split in splits) for d, k in pairs]
        if not splits:
            return var, at, None
        shape: LocalShape = []
        for d, dim in enumerate(dims):
            edges = [0, *(k for e, k in splits if e == d), len(dim)]
            for start, stop in pairwise(edges):
                shape.append(product([_local(n, a) for n, a in dim[start:stop]]))
        view = Var(self.builder.name(f"{var.name}.split"), None, var.dtype)
        with self.builder.at(None):
            self._call(RESHAPE, (var, shape), view)
        return view, at, [product([_local(n, a) for n, a in dim]) for dim in new]

    def _before(self, out: Var, back: LocalShape | None) -> Var:
        """Returns the variable that a step writes: `out`, or the one that is viewed back to it."""
        return out if back is None else Var(self.builder.name(f"{out.name}.split"), None, out.dtype)

    def _view_back(self, result: Var, out: Var, back: LocalShape | None) -> None:
        if back is not None:
            self._call(RESHAPE, (result, back), out)


def _in_order(places: Places, dim: Dim, axes: Axes) -> bool:
    """Returns whether these ranges are the whole local dim in its order, on every device."""
    for c in everywhere(apart(axes)):
        n = sum(b - a for a, b in held_ranges(dim, c))
        if places(c) != ([(0, n)] if n else []):
            return False
    return True


def _place(places: Places, k: int, i: int, coords: Coords) -> int:
    """Returns the start (i=0) or the size (i=1) of the k-th range on a device; 0 if it has fewer ranges."""
    ranges = places(coords)
    return ranges[k][i] if k < len(ranges) else 0


def _step_params(
    step: Step, dims: LocalDims, new: LocalDims, pairs: list[tuple[int, int]], at: list[int]
) -> dict[str, Any]:
    """Returns the parameters of a step; those of a slice are dim, start and length, in this order."""
    d, k = pairs[0]
    post = _after(dims, d, k, pairs)
    if step.kind == "slice":
        start, length = _relative(*dims[d][k], *new[d][k])
        return {"dim": at[0], "start": start * post, "length": length * post}
    if step.kind == "all_to_all" and step.factor == step.to:
        sizes = _exchanged(dims[d][k], new[d][k], step.axes, post)
        return {"split_dim": at[0], "split_sizes": sizes, "concat_dim": at[0], "concat_sizes": []}
    if step.kind == "all_to_all":
        (e, m) = pairs[1]
        split = _member_sizes(*new[e][m], step.axes, _after(dims, e, m, pairs))
        concat = _member_sizes(*dims[d][k], step.axes, post)
        return {"split_dim": at[1], "split_sizes": split, "concat_dim": at[0], "concat_sizes": concat}
    finer = dims[d][k] if step.kind == "all_gather" else new[d][k]
    return {"dim": at[0], "sizes": _member_sizes(*finer, step.axes, post)}


def _local(size: int, axes: Axes) -> Sym | int:
    return local_size(size, Axis.merge(axes))


def _locate(dims: LocalDims, flat: int) -> tuple[int, int]:
    for d, dim in enumerate(dims):
        if flat < len(dim):
            return d, flat
        flat -= len(dim)
    raise IndexError(flat)


def _after(dims: LocalDims, d: int, k: int, pairs: Sequence[tuple[int, int]]) -> Any:
    """Returns the local size of the factors behind one factor, in the dim that `_expose` made for it."""
    stop = min([m for e, m in pairs if e == d and m > k], default=len(dims[d]))
    return product([_local(n, a) for n, a in dims[d][k + 1 : stop]])


def _reshard_dims(dims: LocalDims, step: Step) -> LocalDims:
    after = iter(zip(step.sizes, step.result, strict=True))
    return tuple(tuple(next(after) for _ in dim) for dim in dims)


def _replace(dims: LocalDims, d: int, k: int, axes: Axes) -> LocalDims:
    dim = dims[d]
    return (*dims[:d], (*dim[:k], (dim[k][0], axes), *dim[k + 1 :]), *dims[d + 1 :])


def _relative(whole: int, old: Axes, size: int, new: Axes) -> tuple[Any, Any]:
    """Returns the start and length of a device's shard of `size` over `new` inside its shard of `whole` over `old`."""
    old, new = Axis.merge(old), Axis.merge(new)
    return offset(size, new) - offset(whole, old), local_size(size, new)


def _member_sizes(size: int, finer: Axes, group: Axes, post: Sym | int) -> list[Sym | int]:
    """Returns the members' sizes along the dim, in group order; the group's axes are the minor ones of `finer`."""
    local = product([local_size(size, finer), post])
    if not isinstance(local, Sym):
        return [local] * group_size(group)
    return [of_member(local, group, i) for i in range(group_size(group))]


def _exchanged(old: tuple[int, Axes], new: tuple[int, Axes], group: Axes, post: Sym | int) -> list[list[Sym | int]]:
    """Returns the elements that each member sends to each, if a factor's size and axes change from `old` to `new`."""
    (have, before), (want, after) = ((n, Axis.merge(a)) for n, a in (old, new))

    def sent(coords: Coords, i: int, j: int) -> int:
        sender, receiver = (member_coords(coords, group, m) for m in (i, j))
        (a, b), (c, d) = shard_range(have, before, sender), shard_range(want, after, receiver)
        return max(0, min(b, d) - max(a, c)) * int(local_value(post, coords))

    others, members = {*before, *after, *axes_of(post)}, range(group_size(group))
    return [[tabulate(partial(sent, i=i, j=j), others, group) for j in members] for i in members]


def _senders(group: Axes, old: Sequence[Axes], new: Sequence[Axes]) -> list[tuple[int, int]]:
    """Returns the (source, destination) positions of a ppermute that turns axes `old` into `new`, per factor.

    Each shard has as many holders after as before. A member that holds the same shard before and after keeps it.
    """
    origin = {a.name: 0 for axes in (group, *old, *new) for a in axes}
    members = [member_coords(origin, group, i) for i in range(group_size(group))]
    before, after = ([tuple(group_position(c, axes) for axes in shards) for c in members] for shards in (old, new))
    kept = [i for i, (p, q) in enumerate(zip(before, after, strict=True)) if p == q]
    free: dict[tuple[int, ...], list[int]] = {}
    for i, shard in enumerate(before):
        if i not in kept:
            free.setdefault(shard, []).append(i)
    moved = [(free[shard].pop(0), i) for i, shard in enumerate(after) if i not in kept]
    return sorted([*((i, i) for i in kept), *moved], key=lambda pair: pair[1])
