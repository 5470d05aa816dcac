"""Proof of a sharding rule by brute force: an op on the whole against the op on its pieces.

For one call, every factor that the rule allows to be cut is cut over 2, 3 and 4 devices (so that pieces are even,
uneven and empty), over two axes at once, in lopsided pieces, and every pair of factors over two axes. Each time the op
is lowered and run as in any program, on virtual devices; what they hold is put together as the rule says, and compared
in value, shape and dtype. Pieces are slices of the whole, or lie in memory with their dims in the other order, as a
kernel before may have left them: every other cut has such. Random addends show whether the op is linear where the rule
says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.lower.local_forms.local_builder import BORDERS
from shardlib.compiler.program.steps import Inside
from shardlib.core.errors import ShardingError
from shardlib.rules.dtype_sums import holds
from shardlib.rules.notation import parse, reach
from shardlib.rules.proof_cuts import cuts
from shardlib.rules.rule import Rule
from shardlib.rules.table import overload_of, text_of
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.testing.run_one_op import RAISED, ROUNDING, Trial, same, tensors_of

_MOST = 12  # faults that are told


@dataclass(frozen=True)
class Proof:
    """What was proved: the op, its rule where a user wrote one, the call's shapes, and in how many cuts."""

    op: str
    rule: str
    shapes: tuple[tuple[int, ...], ...]
    cuts: int

    def __str__(self) -> str:
        said = f" ({self.rule})" if self.rule else ""
        return f"{self.op}{said} of {', '.join(map(str, map(list, self.shapes)))}: right in all {self.cuts} cuts"


def prove(op: Any, /, *args: Any, **kwargs: Any) -> Proof:
    """Prove the sharding rule of `op` for the call `op(*args, **kwargs)`; its `Proof`, which prints.

    `op` is an op of torch, or what `torch.library.custom_op` returns. Tensors are small and plain, of any shapes that
    the op takes: sizes of 5 to 8 make pieces that differ, different sizes tell dims apart, random float64 numbers tell
    wrong values from rounding. A dim of size 1 is no factor, so it is never cut.

    Raises:
        ShardingError: the op has no rule, the rule does not fit the call's shapes, or some cut gives other results than
            the whole call; each is told with the cut, the result, and how far it is off.

    Example:
        >>> import torch, shardlib as sl
        >>> @sl.rule("... m k, k n -> ... m n | k:sum {0} {1}")
        ... @torch.library.custom_op("docs::proved", mutates_args=())
        ... def proved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ...     return a @ b
        >>> _ = proved.register_fake(lambda a, b: a @ b)
        >>> print(sl.prove(proved, torch.randn(5, 6), torch.randn(6, 7)))
        docs::proved (... m k, k n -> ... m n | k:sum {0} {1}) of [5, 6], [6, 7]: right in all 19 cuts
    """
    target = overload_of(op, "proved")
    call = Trial.of(target, args, kwargs)
    if call.op.rule is None:
        own = target.namespace not in ("aten", "prims")
        raise ShardingError(
            f"{call.op.target.name()} has no sharding rule for this call",
            [f"operand {i} has shape {list(x.shape)}" for i, x in enumerate(call.tensors)],
            rule="rules belong to ops that are no other ops together; one without runs on whole operands",
            remedy='@sl.rule("...") above the custom op; sl.rule(op) says what to write'
            if own
            else "step.plan(...) of a function that calls it shows the ops that it is made of: prove these",
        )
    if wrong := list(_bookkeeping(call)):
        raise _refused(call, "does not fit the call", wrong)
    every = list(cuts(call.op.rule))
    if len(every) == 1:
        raise _refused(call, "is not put to the test", ["no dim of this call may be cut: they are whole, or of size 1"])
    if text_of(target) and (short := list(dict.fromkeys(_all_fetched(call)))):
        raise _refused(
            call, "is not put to the test", short, "prove it with longer tensors: of more than twice the halo"
        )
    if text_of(target) and (idle := list(_shows_nothing(call))):
        raise _refused(call, "is not put to the test", idle, "prove it with random numbers, torch.randn(5, 6)")
    if wrong := [*_wrong(call), *_not_linear(call), *_idle_sets(call), *_wrong_of_nothing(call)]:
        raise _refused(call, "is wrong", wrong)
    return Proof(call.op.target.name(), text_of(target), tuple(tuple(x.shape) for x in call.tensors), len(every))


def _shows_nothing(call: Trial) -> Iterator[str]:
    """Numbers that would hide which element went where."""
    many = [x for x in call.tensors if x.numel() > 1]
    if many and all(bool((x == x.flatten()[0]).all()) for x in many):
        yield "its operands are the same number everywhere, which tells no element from another"
    for i, x in enumerate(call.results):
        if isinstance(x, Tensor) and x.numel() and bool(x.isnan().all()):
            yield f"result {i} is NaN everywhere"


def _wrong_of_nothing(call: Trial) -> Iterator[str]:
    """What is wrong with a maximum of numbers below zero, or a minimum of such above: 0 for a piece of nothing is that
    of some."""
    for kind, sign in (("max", -1), ("min", 1)):
        if text_of(call.op.target) and kind in call.rule.reduce.values():
            for whole in (True, False):
                if (there := _beyond(call, sign, whole)) is not None:
                    yield from _wrong(there)
                    break


def _beyond(call: Trial, sign: int, whole: bool) -> Trial | None:
    """The call of numbers of one sign, `whole` ones, too; None where the op takes no such numbers, or makes none."""

    def moved(x: Tensor) -> Tensor:
        return (x.abs() + 1) * sign if x.is_floating_point() or (whole and x.dtype.is_signed) else x

    tensors = tuple(moved(x) for x in call.tensors)
    try:
        made = call.called(tensors)
    except RAISED:
        return None
    if any(bool(x.isnan().any()) for x in made):
        return None
    rest = iter(made)
    return replace(
        call, tensors=tensors, results=tuple(next(rest) if isinstance(x, Tensor) else x for x in call.results)
    )


def _all_fetched(call: Trial) -> Iterator[str]:
    """Halos that are as long as the pieces: every device has the whole dim, whatever the op reads."""
    over, mesh = (Axis("a", 2),), Mesh.abstract(a=2)
    for cut in cuts(call.rule, ways=(2,)):
        if cut.axes and all(axes == over for axes in cut.axes.values()):
            try:
                sent = call.program(cut, mesh).collectives
            except ShardingError:
                continue  # the op fails on what it reads there, as `_wrong` says
            fetched = sum(c.bytes for c in sent if isinstance(c.because, Inside) and c.because.how == BORDERS)
            given = zip(call.tensors, call.rule.operands, strict=True)
            if fetched * 2 >= sum(x.nbytes for x, labels in given if any(cut.axes.keys() & {*d} for d in labels)) > 0:
                f = next(iter(cut.axes))
                n = call.rule.sizes[f]
                yield f"{f} has {n} elements, all of which two devices fetch, so its halo shows nothing"


def faults(op: Any, given: tuple[Any, Any], rule: Rule, *, values: bool = True, each: int = 1) -> list[str]:
    """What is wrong with a rule for a call in every `each`-th cut; without `values`, with shapes and dtypes."""
    call = Trial.of(op, *given)
    call.op.rule = rule
    if wrong := list(_bookkeeping(call)):
        return wrong
    try:
        return [*_wrong(call, each, values=values), *(_not_linear(call) if values else ())]
    except ShardingError as error:
        return [str(error)]


def _bookkeeping(call: Trial) -> Iterator[str]:
    """Labels must spell the shapes, and a factor that is cut and lost must be a declared reduction."""
    rule, results = call.rule, call.results
    pairs = [(f"operand {i}", x, rule.operands[i]) for i, x in enumerate(call.tensors)]
    pairs += [(f"result {i}", x, rule.results[i]) for i, x in enumerate(results) if isinstance(x, Tensor)]
    for name, x, labels in pairs:
        spelled = [math.prod(rule.sizes[f] for f in dim) for dim in labels]
        if spelled != list(x.shape):
            yield f"{name} of shape {list(x.shape)} is spelled {labels}, which is {spelled}"
        if len(flat := [f for dim in labels for f in dim]) != len(set(flat)):
            yield f"{name} has a factor twice: {labels}"
    read = {f for labels in rule.operands for dim in labels for f in dim} - rule.whole
    for i, x in enumerate(results):
        lost = read - {f for dim in rule.results[i] for f in dim} - rule.reduce.keys() if isinstance(x, Tensor) else ()
        yield from (f"{f} may be cut, is not in result {i}, and nothing says how it is reduced" for f in sorted(lost))
    yield from _unlike_its_fake(call)


def _unlike_its_fake(call: Trial) -> Iterator[str]:
    """Programs are made of what an op of a user says by `register_fake`."""
    if call.op.target.namespace in ("aten", "prims", "shardlib"):
        return
    try:
        found = call.called([x.to("meta") for x in call.tensors])
    except RAISED as error:
        yield f"the op has no form for tensors without values (register_fake): {str(error).partition('.')[0]}"
        return
    for i, (x, want) in enumerate(zip(found, tensors_of(call.results), strict=False)):
        if x.shape != want.shape or x.dtype != want.dtype:
            say, made = (f"{list(y.shape)} of {y.dtype}" for y in (x, want))
            yield f"result {i} is {made}, and its register_fake says {say}"


def _wrong(call: Trial, each: int = 1, *, values: bool = True) -> Iterator[str]:
    """What is wrong with the results, of every `each`-th cut."""
    turns = itertools.cycle([True, False] if call.takes_turned else [False])
    for cut, turned in zip(itertools.islice(cuts(call.rule), 0, None, each), turns, strict=False):
        try:
            yield from (f"{cut}: {fault}" for fault in call.faults(cut, turned, values=values))
        except ShardingError as error:  # of a local form, which says what is wrong with it
            if _reads_around(call):
                yield f"{cut}: of what it reads there, {', '.join(error.offenders)}"
                continue
            what = f"{error.what}, with {cut}"
            raise ShardingError(what, error.offenders, rule=error.rule, remedy=error.remedy) from error


def _reads_around(call: Trial) -> bool:
    """Whether a user's op itself runs on what its rule says that it reads."""
    said = text_of(call.op.target)
    return bool(said) and any(reach(kind) for _, kind in parse(said).notes)


def _not_linear(call: Trial) -> Iterator[str]:
    """Random addends on the operands of every linear set must add up to the result of their sums."""
    for members, size in itertools.product(filter(None, call.rule.linear), (1, 10_000)):
        if any(call.tensors[i].dtype == torch.bool for i in members):
            continue  # truth values are no sums
        other = [_addend(x, size) if i in members else x for i, x in enumerate(call.tensors)]
        total = [x + y if i in members else x for i, (x, y) in enumerate(zip(call.tensors, other, strict=True))]
        one, two, both = (call.called(xs) for xs in (call.tensors, other, total))
        room = max(ROUNDING.get(x.dtype, 0.0) for x in (*call.tensors, *both))
        if not all(same(x + y, z, room, size) for x, y, z in zip(one, two, both, strict=True)):
            yield f"it is not linear in the operands {_set(members)}"
            return


def _idle_sets(call: Trial) -> Iterator[str]:
    """Sets of a user's rule that no sum passes, since a result cannot hold it."""
    said = text_of(call.op.target)
    if said and len((rule := parse(said)).operands) == len(call.tensors):
        for members in (x for x in rule.linear if x not in call.rule.linear):
            pairs = [(call.tensors[i].dtype, x.dtype) for i in sorted(members) for x in tensors_of(call.results)]
            for old, new in dict.fromkeys((old, new) for old, new in pairs if not holds(new, old)):
                names = (str(dtype).removeprefix("torch.") for dtype in (old, new))
                yield "{} says that sums may be pending, and a sum of {} is none in {}".format(_set(members), *names)


def _set(members: frozenset[int]) -> str:
    return f"{{{','.join(map(str, sorted(members)))}}}"


def _addend(x: Tensor, size: int) -> Tensor:
    """Random numbers of that size, exact ones for a tensor of whole numbers."""
    if x.is_floating_point() or x.is_complex():
        return torch.randn_like(x) * size
    return torch.randint_like(x, min(size, 20) + 1)


_MEND = "mend the rule: mark what is summed (k:sum), what must stay whole (k:whole), and linear operands ({0})"


def _refused(call: Trial, what: str, wrong: Sequence[str], remedy: str = _MEND) -> ShardingError:
    said = text_of(call.op.target)
    more = [f"and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
    return ShardingError(
        f"the rule of {call.op.target.name()}{f', {said!r},' if said else ''} {what}",
        [*wrong[:_MOST], *more],
        rule="an op on pieces gives the pieces of its results; what a result lacks is reduced as the rule says",
        remedy=remedy,
    )
