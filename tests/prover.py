"""A brute-force machine that proves sharding rules: the op on the whole against the op on the shards.

For one concrete call it cuts every factor that its rule allows over 2, 3 and 4 devices (so that shards are even, uneven
and empty) and over two axes at once, and every pair of factors over two axes; hands every device its shards; runs the
plain op or the rule's local form on all devices in lock-step; puts the results together as the rule says; and compares
values, shapes and dtypes. Besides that it adds up random addends for every linear set, and checks the bookkeeping.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.meshes.axis import Axis
from shardlib.rules import rule_for
from shardlib.rules.rule import Call, Labels, Meta, Rule
from shardlib.specs.layout import Factor, Layout, Pending, Pieces, span

Axes = tuple[Axis, ...]
Coords = dict[str, int]
Sample = tuple[str, tuple[Any, ...], dict[str, Any]]  # name of an op, its arguments


def call_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[torch.Tensor], list[Any]]:
    """What the rules see of a concrete call, its tensors in order, and what it returns."""
    out = kernel(target)(*args, **kwargs)
    results = list(out) if isinstance(out, tuple | list) else [out]
    tensors: list[torch.Tensor] = []

    def abstract(value: Any) -> Any:
        tensors.append(value)
        return Meta(tuple(value.shape), value.dtype)

    abstract_args, abstract_kwargs = mapped((tuple(args), dict(kwargs)), abstract)
    metas = tuple(Meta(tuple(t.shape), t.dtype) for t in tensors)
    outs = tuple(Meta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    return Call(target, abstract_args, abstract_kwargs, metas, outs), tensors, results


def kernel(target: Any) -> Any:
    """What runs an op here: torch's decomposition, when the op has a kernel for other devices only."""
    return torch._decomp.decomposition_table[target] if target.name() in _ELSEWHERE else target


_ELSEWHERE = ("aten::_fused_rms_norm_backward",)


def mapped(value: Any, f: Callable[[Any], Any], kind: Any = torch.Tensor) -> Any:
    """`value` with every leaf of `kind` replaced, in the order of arguments."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(v, f, kind) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, f, kind) for k, v in value.items()}
    return f(value) if isinstance(value, kind) else value


# The machine ----------------------------------------------------------------------------------------------------------


class Sym:
    """An int that differs by device."""

    def __init__(self, at: Callable[[Coords], int]) -> None:
        self.at = at

    def _with(self, other: Any, op: Callable[[int, int], int]) -> Sym:
        return Sym(lambda c: op(self.at(c), other.at(c) if isinstance(other, Sym) else other))

    def __add__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: a // b)

    def eq(self, other: Any) -> Sym:
        return self._with(other, lambda a, b: int(a == b))

    def at_most(self, other: int) -> Sym:
        return self._with(other, min)

    __radd__ = __add__
    __rmul__ = __mul__


class Ref:
    """A local value: on every device another tensor."""


@dataclass
class Tape:
    """`Local`: writes a local form down as instructions, and runs them on all devices in lock-step."""

    rule: Rule
    call: Call
    cut: Mapping[str, Axes]
    devices: list[Coords]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[Any, ...]] = field(default_factory=list)

    def axes(self, factor: str) -> Axes:
        return self.cut.get(factor, ())

    def size(self, factor: str) -> Sym:
        n, axes = extent(self.rule.sizes, self.cut, factor), self.axes(factor)
        return Sym(lambda c: span(n, axes, c)[1] - span(n, axes, c)[0])

    def offset(self, factor: str) -> Sym:
        n, axes = extent(self.rule.sizes, self.cut, factor), self.axes(factor)
        return Sym(lambda c: span(n, axes, c)[0])

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        outs = tuple(Ref() for _ in target._schema.returns)
        self.steps.append((kernel(target), args, kwargs, outs))
        return outs[0] if len(outs) == 1 else outs

    def all_reduce(self, value: Any, factor: str, kind: str, labels: Labels | None = None) -> Any:
        out = Ref()
        self.steps.append(("all_reduce", value, self.axes(factor), kind, self._said(labels), out))
        return out

    def all_gather(self, value: Any, factor: str, dim: int, labels: Labels, size: Any = 1) -> Any:
        out = Ref()
        told = [self._said((row,)) for row in labels]
        told[dim] = Sym(lambda c: size.at(c) if isinstance(size, Sym) else size)
        self.steps.append(("all_gather", value, self.axes(factor), dim, told, out))
        return out

    def _said(self, labels: Labels | None) -> Sym | None:
        """How many elements a device has of a value with these labels: a plan counts its bytes by them."""
        at = None if labels is None else layout(self.rule.sizes, labels, self.cut)
        return None if at is None else Sym(lambda c: math.prod(at.local_shape(c)))

    def pieces(self, factor: str) -> list[tuple[Sym, Sym, int]]:
        return [(self.size(factor), self.offset(factor), self.rule.sizes[factor])]

    def ways(self, factor: str) -> int:
        return math.prod(a.size for a in self.axes(factor))

    def position(self, factor: str) -> Sym:
        axes = self.axes(factor)
        return Sym(lambda c: _place(c, axes))

    def of(self, value: Any, factor: str, member: Callable[[int], int]) -> Any:
        axes = self.axes(factor)
        return (
            value if not isinstance(value, Sym) else Sym(lambda c: value.at(_member(c, axes, member(_place(c, axes)))))
        )

    def calc(self, function: Callable[..., Any], *values: Any) -> Any:
        """A plain value where it is the same everywhere, as in a program."""
        out = Sym(lambda c: function(*(v.at(c) if isinstance(v, Sym) else v for v in values)))
        alike = {out.at(c) for c in self.devices}
        return alike.pop() if len(alike) == 1 else out

    def values(self, value: Any, factor: str) -> list[set[Any]]:
        axes = self.axes(factor)
        out: list[set[Any]] = [set() for _ in range(self.ways(factor))]
        for coords in self.devices:
            out[_place(coords, axes)].add(value.at(coords) if isinstance(value, Sym) else value)
        return out

    def send(
        self, value: Any, factor: str, pairs: Sequence[tuple[int, int]], shape: Sequence[Any], *, name: str
    ) -> Any:
        out = Ref()
        self.steps.append(("send", value, self.axes(factor), list(pairs), list(shape), out))
        return out

    def ppermute(
        self,
        value: Any,
        factor: str,
        pairs: Sequence[tuple[int, int]],
        labels: Labels,
        *,
        name: str,
        holds: Callable[[int], int] = lambda i: i,
        parts: int = 1,
    ) -> Any:
        out = Ref()
        self.steps.append(("ppermute", value, self.axes(factor), list(pairs), out))
        return out

    def run(self, values: list[dict[Ref, torch.Tensor]]) -> None:
        """Run all steps; `values` holds each device's tensors."""
        for step in self.steps:
            if step[0] == "all_reduce":
                self._all_reduce(values, *step[1:])
                continue
            if step[0] == "ppermute":
                self._ppermute(values, *step[1:])
                continue
            if step[0] == "send":
                self._send(values, *step[1:])
                continue
            if step[0] == "all_gather":
                self._all_gather(values, *step[1:])
                continue
            target, args, kwargs, outs = step
            for coords, mine in zip(self.devices, values, strict=True):
                results = target(*self.here(args, coords, mine), **self.here(kwargs, coords, mine))
                if results is None:  # it only looks
                    continue
                results = results if isinstance(results, tuple) else (results,)
                mine.update(zip(outs, results, strict=True))

    def _all_reduce(
        self,
        values: list[dict[Ref, torch.Tensor]],
        value: Ref,
        axes: Axes,
        kind: str,
        told: Sym | None,
        out: Ref,
    ) -> None:
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[kind]
        names = {a.name for a in axes}
        groups: dict[Any, list[int]] = {}
        for i, coords in enumerate(self.devices):
            groups.setdefault(tuple(v for k, v in coords.items() if k not in names), []).append(i)
        for group in groups.values():
            total = values[group[0]][value]
            said = told.at(self.devices[group[0]]) if told is not None else total.numel()
            if total.numel() != said:
                raise ValueError(f"{total.numel()} elements are reduced, where {said} were said")
            for i in group[1:]:
                total = combine(total, values[i][value])
            for i in group:
                values[i][out] = total

    def _all_gather(
        self, values: list[dict[Ref, torch.Tensor]], value: Ref, axes: Axes, dim: int, told: list[Sym], out: Ref
    ) -> None:
        for coords, mine in zip(self.devices, values, strict=True):
            pieces = []
            for place in range(math.prod(a.size for a in axes)):
                there = _member(coords, axes, place)
                pieces.append(values[self.devices.index(there)][value])
                have, said = tuple(pieces[-1].shape), tuple(n.at(there) for n in told)
                if have != said:
                    raise ValueError(f"a piece {have} is gathered, where {said} was said")
            mine[out] = torch.cat(pieces, dim)

    def _ppermute(
        self, values: list[dict[Ref, torch.Tensor]], value: Ref, axes: Axes, pairs: list[tuple[int, int]], out: Ref
    ) -> None:
        source = {dst: src for src, dst in pairs}
        for coords, mine in zip(self.devices, values, strict=True):
            there = _member(coords, axes, source[_place(coords, axes)])
            mine[out] = values[self.devices.index(there)][value]

    def _send(
        self,
        values: list[dict[Ref, torch.Tensor]],
        value: Ref,
        axes: Axes,
        pairs: list[tuple[int, int]],
        shape: list[Any],
        out: Ref,
    ) -> None:
        source = {dst: src for src, dst in pairs}
        for coords, mine in zip(self.devices, values, strict=True):
            have, said = tuple(mine[value].shape), tuple(self.here(shape, coords, mine))
            if have != said:
                raise ValueError(f"a piece {have} is sent, where {said} was said")
            here = _place(coords, axes)
            there = values[self.devices.index(_member(coords, axes, source.get(here, here)))][value]
            mine[out] = there if here in source else torch.zeros_like(there)

    def here(self, value: Any, coords: Coords, mine: Mapping[Ref, torch.Tensor]) -> Any:
        return mapped(mapped(value, lambda r: mine[r], Ref), lambda s: s.at(coords), Sym)


def _place(coords: Coords, axes: Axes) -> int:
    place = 0
    for a in axes:
        place = place * a.size + coords[a.name]
    return place


def _member(coords: Coords, axes: Axes, place: int) -> Coords:
    out = dict(coords)
    for a in reversed(axes):
        place, out[a.name] = divmod(place, a.size)
    return out


def run(call: Call, rule: Rule, tensors: Sequence[torch.Tensor], cut: Mapping[str, Axes]) -> list[list[Any]]:
    """The results of every device, when the factors in `cut` are cut."""
    names = {a.name: a.of for axes in cut.values() for a in axes}
    devices = [dict(zip(names, c, strict=True)) for c in itertools.product(*map(range, names.values()))]
    tape = Tape(rule, call, cut, devices)
    refs = [Ref() for _ in tensors]
    queue = iter(refs)
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda _: next(queue), Meta)
    for path, (k, factors) in rule.ints.items():
        size = math.prod([tape.size(f) for f in factors]) * k if factors else k
        args, kwargs = put((args, kwargs), (1, *path) if isinstance(path[0], str) else (0, *path), size)
    tape.args, tape.kwargs = args, kwargs
    if rule.local is not None and any(cut.get(f) for f in rule.local_factors):
        out = rule.local(tape)
    else:
        out = Ref()
        tape.steps.append((lambda *a, **k: (kernel(call.target)(*a, **k),), args, kwargs, (out,)))
    layouts = [layout(rule.sizes, labels, cut) for labels in rule.operands]
    values = [{ref: at.scatter(t, c) for ref, t, at in zip(refs, tensors, layouts, strict=True)} for c in devices]
    tape.run(values)
    each = [tape.here(out, c, mine) for c, mine in zip(devices, values, strict=True)]
    return [list(o) if isinstance(o, tuple | list) else [o] for o in each]


def put(value: Any, path: Sequence[Any], new: Any) -> Any:
    """`value` with what sits at `path` replaced."""
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: put(value[path[0]], path[1:], new)}
    items = list(value)
    items[path[0]] = put(items[path[0]], path[1:], new)
    return type(value)(items)


def layout(
    sizes: Mapping[str, int], labels: Labels, cut: Mapping[str, Axes], pending: Sequence[Pending] = ()
) -> Layout:
    dims = tuple(tuple(Factor(extent(sizes, cut, f), cut.get(f, ())) for f in dim) or (Factor(1),) for dim in labels)
    return Layout(dims, tuple(pending))


# The proof ------------------------------------------------------------------------------------------------------------


class Chosen(dict[str, Axes]):
    """A cut in which the pieces of some factors are chosen: lopsided, with an empty one among them."""

    def __init__(self, cut: Mapping[str, Axes], *factors: str) -> None:
        super().__init__(cut)
        self.factors = factors


def extent(sizes: Mapping[str, int], cut: Mapping[str, Axes], factor: str) -> int:
    """The size of a factor, with its pieces where the cut chooses them."""
    n, axes = sizes.get(factor, 1), cut.get(factor, ())
    if not isinstance(cut, Chosen) or factor not in cut.factors:
        return n
    ways = math.prod(a.size for a in axes)
    return Pieces((n // 2 + 1, *(0,) * (ways - 2), n - n // 2 - 1), axes)


def cuts(rule: Rule, ways: Sequence[int] = (2, 3, 4)) -> Iterator[dict[str, Axes]]:
    """Every way of cutting that is tried: none, one factor, one factor over two axes, two factors."""
    tied = {**rule.rounds, **rule.follows}
    free = [f for f in rule.sizes if f not in rule.whole and f not in tied]
    a, b = Axis("a", 2), Axis("b", 3)
    yield {}
    for f in free:
        yield from ({f: (Axis("a", n),)} for n in ways)
        yield {f: (a, Axis("b", 2))}
        if rule.sizes[f]:
            yield Chosen({f: (b,)}, f)
    for f, g in itertools.combinations(free, 2):
        yield {f: (a,), g: (b,)}
    for t, s in tied.items():
        yield from ({t: axes, s: axes} for axes in (*((Axis("a", n),) for n in ways), (a, Axis("b", 2))))
        yield {t: (a,), s: (a, b)}
        if rule.sizes[s] and rule.sizes[t]:
            yield from (Chosen({t: (b,), s: (b,)}, *factors) for factors in ((s,), (s, t)))
        yield from ({t: (b,), s: (b,), f: (a,)} for f in free if f != s)


def prove(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rule: Rule | None,
    values: bool = True,
    tolerance: float = 1e-12,
) -> list[str]:
    """What is wrong with `rule` for this call; an empty list is a proof.

    `values=False` compares shapes and dtypes only.
    """
    call, tensors, results = call_of(target, args, kwargs or {})
    if rule is None:
        return [f"{target}: no rule"]
    wrong = bookkeeping(call, rule)
    if wrong:
        return [f"{target}: {w}" for w in wrong]
    for cut in cuts(rule):
        text = ", ".join(f"{f}[{Factor(extent(rule.sizes, cut, f), axes)}]" for f, axes in cut.items())
        wrong += [
            f"{target} with {text or 'nothing cut'}: {w}"
            for w in _one(call, rule, tensors, results, cut, values, tolerance)
        ]
    wrong += [f"{target}: {w}" for w in linearity(call, rule, tensors, tolerance)]
    return wrong


def bookkeeping(call: Call, rule: Rule) -> list[str]:
    """Labels must spell the shapes, and a factor that is cut and lost must be a declared reduction."""
    wrong = []
    pairs = [(f"operand {i}", m, x) for i, (m, x) in enumerate(zip(call.operands, rule.operands, strict=True))]
    pairs += [(f"result {i}", m, x) for i, (m, x) in enumerate(zip(call.results, rule.results, strict=True)) if m]
    for name, meta, labels in pairs:
        spelled = tuple(math.prod(rule.sizes[f] for f in d) for d in labels)
        if spelled != meta.shape:
            wrong.append(f"{name} is labelled {labels}, of sizes {spelled}, but has shape {meta.shape}")
        flat = [f for d in labels for f in d]
        if len(flat) != len(set(flat)):
            wrong.append(f"{name} has a factor twice: {labels}")
    read = {f for labels in rule.operands for d in labels for f in d}
    for i, (meta, labels) in enumerate(zip(call.results, rule.results, strict=True)):
        lost = read - {f for d in labels for f in d} - rule.whole - rule.reduce.keys() if meta else set()
        wrong += [f"{f} may be cut, is missing from result {i} and is no declared reduction" for f in sorted(lost)]
    wrong += [f"{f} has size 1" for f, n in rule.sizes.items() if n == 1]
    known = rule.whole | rule.reduce.keys() | rule.local_factors | {f for _, fs in rule.ints.values() for f in fs}
    wrong += [f"{f} has no size" for f in sorted(known - rule.sizes.keys())]
    return wrong


def _one(
    call: Call,
    rule: Rule,
    tensors: Sequence[torch.Tensor],
    results: Sequence[Any],
    cut: Mapping[str, Axes],
    values: bool,
    tolerance: float,
) -> list[str]:
    try:
        each = run(call, rule, tensors, cut)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    names = {a.name: a.of for axes in cut.values() for a in axes}
    devices = [dict(zip(names, c, strict=True)) for c in itertools.product(*map(range, names.values()))]
    wrong = []
    for i, want in enumerate(results):
        if not isinstance(want, torch.Tensor):
            continue
        labels = rule.results[i]
        have = {f for d in labels for f in d}
        pending = [
            Pending(owed, rule.reduce[f])
            for f, axes in cut.items()
            if (owed := tuple(x for x in axes if all(x not in cut.get(h, ()) for h in have)))
            and f not in have
            and rule.reduce.get(f, "none") != "none"
            and any(f in d for o in rule.operands for d in o)
        ]
        at = layout(rule.sizes, labels, cut, pending)
        if any(len(out) <= i for out in each):
            wrong.append(f"a device has no result {i}")
            continue
        shards = [(c, out[i]) for c, out in zip(devices, each, strict=True)]
        bad = [(c, tuple(x.shape)) for c, x in shards if tuple(x.shape) != at.local_shape(c)]
        if bad:
            coords, shape = bad[0]
            wrong.append(f"result {i} is {shape} on device {coords}, not {at.local_shape(coords)}")
        elif any(x.dtype != want.dtype for _, x in shards):
            wrong.append(f"result {i} is {shards[0][1].dtype}, not {want.dtype}")
        elif values:
            if not _copies_agree(at, shards, tolerance):
                wrong.append(f"result {i} differs between devices that should hold the same")
            elif len({p.kind for p in pending}) > 1:
                continue  # a planner never makes two kinds of pending reduction at once
            elif not same(at.gather(shards), want, tolerance):
                wrong.append(f"result {i} is wrong")
    return wrong


def _copies_agree(at: Layout, shards: Sequence[tuple[Coords, torch.Tensor]], tolerance: float) -> bool:
    """Devices that hold the same part, and the same addend of it, hold the same numbers."""
    first: dict[Any, torch.Tensor] = {}
    for coords, x in shards:
        part = tuple(span(f.size, f.axes, coords) for f in at.factors)
        key = (part, tuple(a.coord(coords) for a in at.pending_axes))
        if not same(x, first.setdefault(key, x), tolerance):
            return False
    return True


def linearity(call: Call, rule: Rule, tensors: Sequence[torch.Tensor], tolerance: float = 1e-12) -> list[str]:
    """Random addends on the operands of every linear set must add up to the result of their sums."""
    wrong = []
    for members in rule.linear:
        if not members or any(not (tensors[i].is_floating_point() or tensors[i].is_complex()) for i in members):
            continue
        other = [torch.randn_like(t) if i in members else t for i, t in enumerate(tensors)]
        total = [t + u if i in members else t for i, (t, u) in enumerate(zip(tensors, other, strict=True))]
        outs = [_plain(call, x) for x in (tensors, other, total)]
        room = max(tolerance, *(_precision(t.dtype) for t in tensors))
        if not all(same(a + b, c, room) for a, b, c in zip(*outs, strict=True)):
            wrong.append(f"not linear in operands {sorted(members)}")
    return wrong


def _plain(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    queue = iter(tensors)
    args, kwargs = mapped((call.args, dict(call.kwargs)), lambda _: next(queue), Meta)
    out = kernel(call.target)(*args, **kwargs)
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]


def _precision(dtype: torch.dtype) -> float:
    """What rounding may cost in a few operations."""
    return {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 0.0)


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal in shape and dtype, and in value up to the precision of the dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    room = max(tolerance, _precision(a.dtype))
    return torch.allclose(a, b, rtol=room, atol=room, equal_nan=True)


# Calls by name --------------------------------------------------------------------------------------------------------


def target_of(name: str) -> Any:
    """The op that `mm`, `add.Tensor` or `shardlib::attention` names."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")


def check(sample: Sample, planted: Callable[[Call], Rule | None] = rule_for) -> list[str]:
    """What is wrong with the rule of one call; `planted` gives another rule in its place."""
    name, args, kwargs = sample
    target = target_of(name)
    call, *_ = call_of(target, args, kwargs)
    # What `empty` holds means nothing.
    return prove(target, args, kwargs, rule=planted(call), values="empty" not in name)


def rule_of(name: str, *args: Any, **kwargs: Any) -> Rule:
    """The rule of a call that has one."""
    found = rule_for(call_of(target_of(name), args, kwargs)[0])
    assert found is not None
    return found
