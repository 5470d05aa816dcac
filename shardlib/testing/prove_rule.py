"""Proves a sharding rule by brute force: compares an op on whole tensors with the op on shards.

For one call, every factor that the rule lets be sharded is sharded over 2, 3 and 4 devices, so that shards are even,
uneven and empty; over two axes at once; and in chosen uneven sizes. Every pair of factors is sharded over two axes.
Each time the op is lowered and run on virtual devices. The gathered results are compared in value, shape and dtype.
Every other cut has shards whose dims lie in memory in reverse order. Random addends test the linearity that a rule
declares.
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
from shardlib.rules.dtype_sums import can_hold_sum
from shardlib.rules.notation import parse
from shardlib.rules.table import overload_of, user_rule_text
from shardlib.rules.trial_shardings import trial_shardings
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.testing.run_one_op import EMPTY_SHARD, RAISED, ROUNDING, Trial, is_close, list_tensors

_MOST = 12  # faults in an error


@dataclass(frozen=True)
class Proof:
    """A proved call: the op, its rule if a user wrote one, the shapes of its operands, and the number of cuts.

    Example:
        >>> import torch
        >>> proof = prove(torch.ops.aten.mm.default, torch.randn(5, 6), torch.randn(6, 7))
        >>> proof.shapes, proof.cuts > 0
        (((5, 6), (6, 7)), True)
    """

    op: str
    rule: str
    shapes: tuple[tuple[int, ...], ...]
    cuts: int

    def __str__(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"{self.op}{rule} of {', '.join(map(str, map(list, self.shapes)))}: right in all {self.cuts} cuts"


def prove(op: Any, /, *args: Any, **kwargs: Any) -> Proof:
    """Proves the sharding rule of `op` for the call `op(*args, **kwargs)`; returns a `Proof`, which prints.

    `op` is an op of torch, or the result of `torch.library.custom_op`. Pass small plain tensors of any valid shapes:
    sizes of 5 to 8 give shards of different sizes, different sizes tell dims apart, and random float64 numbers tell
    wrong values from rounding. A dim of size 1 is no factor and is never sharded.

    Raises:
        ShardingError: the op has no rule, the rule does not fit the call's shapes, or some cut gives other results than
            the whole call. The error lists each cut, its result and the difference.

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
    call = Trial.trace(target, args, kwargs)
    if call.op.rule is None:
        is_custom = target.namespace not in ("aten", "prims")
        raise ShardingError(
            f"{call.op.target.name()} has no sharding rule for this call",
            [f"operand {i} has shape {list(x.shape)}" for i, x in enumerate(call.tensors)],
            rule="rules belong to ops that are no other ops together; one without runs on whole operands",
            remedy='@sl.rule("...") above the custom op; sl.rule(op) says what to write'
            if is_custom
            else "step.plan(...) of a function that calls it shows the ops that it is made of: prove these",
        )
    if wrong := list(label_faults(call)):
        raise _proof_error(call, "does not fit the call", wrong)
    all_cuts = list(trial_shardings(call.op.rule))
    if len(all_cuts) == 1:
        raise _proof_error(
            call, "is not put to the test", ["no dim of this call may be sharded: they are whole, or of size 1"]
        )
    if user_rule_text(target) and (short := list(dict.fromkeys(_too_short_for_halos(call)))):
        raise _proof_error(
            call, "is not put to the test", short, "prove it with longer tensors: of more than twice the halo"
        )
    if user_rule_text(target) and (hiding := list(_uninformative_values(call))):
        raise _proof_error(call, "is not put to the test", hiding, "prove it with random numbers, torch.randn(5, 6)")
    if wrong := [
        *result_faults(call),
        *linearity_faults(call),
        *_useless_linear_sets(call),
        *_empty_shard_faults(call),
    ]:
        raise _proof_error(call, "is wrong", wrong, _PAD if any(EMPTY_SHARD in fault for fault in wrong) else _FIX)
    return Proof(
        call.op.target.name(), user_rule_text(target), tuple(tuple(x.shape) for x in call.tensors), len(all_cuts)
    )


def _uninformative_values(call: Trial) -> Iterator[str]:
    """Yields operands and results whose values would hide a misplaced element."""
    many = [x for x in call.tensors if x.numel() > 1]
    if many and all(bool((x == x.flatten()[0]).all()) for x in many):
        yield "its operands are the same number everywhere, which tells no element from another"
    for i, x in enumerate(call.results):
        if isinstance(x, Tensor) and x.numel() and bool(x.isnan().all()):
            yield f"result {i} is NaN everywhere"


def _empty_shard_faults(call: Trial) -> Iterator[str]:
    """Yields faults of a maximum of negative numbers, or a minimum of positive ones.

    An op that returns 0 for an empty shard is wrong only for these.
    """
    for kind, sign in (("max", -1), ("min", 1)):
        if user_rule_text(call.op.target) and kind in call.rule.reduce.values():
            for integers in (True, False):
                if (signed := _with_sign(call, sign, integers)) is not None:
                    yield from result_faults(signed)
                    break


def _with_sign(call: Trial, sign: int, integers: bool) -> Trial | None:
    """Returns the call with numbers of one sign (`integers`, too); None if the op refuses them or returns NaN."""

    def set_sign(x: Tensor) -> Tensor:
        return (x.abs() + 1) * sign if x.is_floating_point() or (integers and x.dtype.is_signed) else x

    tensors = tuple(set_sign(x) for x in call.tensors)
    try:
        results = call.run(tensors)
    except RAISED:
        return None
    if any(bool(x.isnan().any()) for x in results):
        return None
    rest = iter(results)
    return replace(
        call, tensors=tensors, results=tuple(next(rest) if isinstance(x, Tensor) else x for x in call.results)
    )


def _too_short_for_halos(call: Trial) -> Iterator[str]:
    """Yields factors whose halos are as long as the shards: every device has the whole dim, so halos prove nothing."""
    over, mesh = (Axis("a", 2),), Mesh.abstract(a=2)
    for cut in trial_shardings(call.rule, ways=(2,)):
        if cut.axes and all(axes == over for axes in cut.axes.values()):
            try:
                sent = call.program(cut, mesh).collectives
            except ShardingError:
                continue  # the op fails on its halo, which `result_faults` reports
            fetched = sum(c.bytes for c in sent if isinstance(c.because, Inside) and c.because.how == BORDERS)
            operands = zip(call.tensors, call.rule.operands, strict=True)
            if (
                fetched * 2
                >= sum(x.nbytes for x, labels in operands if any(cut.axes.keys() & {*d} for d in labels))
                > 0
            ):
                f = next(iter(cut.axes))
                n = call.rule.sizes[f]
                yield f"{f} has {n} elements, and two devices fetch them all, so its halo shows nothing"


def label_faults(call: Trial) -> Iterator[str]:
    """Yields labels that do not spell the shapes, and lost factors without a declared reduction."""
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
        yield from (f"{f} is not in result {i}, may be sharded, and has no reduction" for f in sorted(lost))
    yield from _fake_faults(call)


def _fake_faults(call: Trial) -> Iterator[str]:
    """Yields differences between a custom op and its `register_fake`, which programs rely on."""
    if call.op.target.namespace in ("aten", "prims", "shardlib"):
        return
    try:
        fakes = call.run([x.to("meta") for x in call.tensors])
    except RAISED as error:
        yield f"the op has no form for tensors without values (register_fake): {str(error).partition('.')[0]}"
        return
    for i, pair in enumerate(zip(list_tensors(call.results), fakes, strict=False)):
        real, fake = (f"{list(x.shape)} of {x.dtype}" for x in pair)
        if real != fake:
            yield f"result {i} is {real}, and its register_fake says {fake}"


def result_faults(call: Trial, each: int = 1, *, values: bool = True) -> Iterator[str]:
    """Yields the faults of the results of every `each`-th cut."""
    orders = itertools.cycle([True, False] if call.takes_reversed_strides else [False])
    for cut, is_reversed in zip(itertools.islice(trial_shardings(call.rule), 0, None, each), orders, strict=False):
        try:
            yield from (f"{cut}: {fault}" for fault in call.find_faults(cut, is_reversed, values=values))
        except ShardingError as error:  # of a local form
            if _has_custom_halo(call):
                yield f"{cut}: of what it reads there, {', '.join(error.offenders)}"
                continue
            message = f"{error.what}, with {cut}"
            raise ShardingError(message, error.offenders, rule=error.rule, remedy=error.remedy) from error


def _has_custom_halo(call: Trial) -> bool:
    """True for a user's rule with a halo: the op itself runs on shard and halo."""
    rule = user_rule_text(call.op.target)
    return bool(rule) and any(note.extent for note in parse(rule).notes)


def linearity_faults(call: Trial) -> Iterator[str]:
    """Yields a linear set for which results of random addends do not add up to the result of their sum."""
    for members, size in itertools.product(filter(None, call.rule.linear), (1, 10_000)):
        if any(call.tensors[i].dtype == torch.bool for i in members):
            continue  # booleans have no sums
        other = [_addend(x, size) if i in members else x for i, x in enumerate(call.tensors)]
        total = [x + y if i in members else x for i, (x, y) in enumerate(zip(call.tensors, other, strict=True))]
        one, two, both = (call.run(xs) for xs in (call.tensors, other, total))
        tolerance = max(ROUNDING.get(x.dtype, 0.0) for x in (*call.tensors, *both))
        if not all(is_close(x + y, z, tolerance, size) for x, y, z in zip(one, two, both, strict=True)):
            yield f"it is not linear in the operands {_set(members)}"
            return


def _useless_linear_sets(call: Trial) -> Iterator[str]:
    """Yields linear sets of a user's rule that no partial sum can pass, since a result's dtype cannot hold it."""
    text = user_rule_text(call.op.target)
    if text and len((rule := parse(text)).operands) == len(call.tensors):
        for members in (x for x in rule.linear if x not in call.rule.linear):
            pairs = [(call.tensors[i].dtype, x.dtype) for i in sorted(members) for x in list_tensors(call.results)]
            for old, new in dict.fromkeys((old, new) for old, new in pairs if not can_hold_sum(new, old)):
                names = (str(dtype).removeprefix("torch.") for dtype in (old, new))
                yield "{} says that sums may be pending, and a sum of {} is none in {}".format(_set(members), *names)


def _set(members: frozenset[int]) -> str:
    return f"{{{','.join(map(str, sorted(members)))}}}"


def _addend(x: Tensor, size: int) -> Tensor:
    """Returns random numbers of that size, integers for a tensor of integers."""
    if x.is_floating_point() or x.is_complex():
        return torch.randn_like(x) * size
    return torch.randint_like(x, min(size, 20) + 1)


_FIX = "mend the rule: mark what is summed (k:sum), what must stay whole (k:whole), and linear operands ({0})"
_PAD = (
    "the op refuses an empty shard: mark the dim `:local` and give a local form that pads an empty shard, "
    "sl.rule(text, local=f), or keep the dim whole (docs/rules.md)"
)


def _proof_error(call: Trial, problem: str, wrong: Sequence[str], remedy: str = _FIX) -> ShardingError:
    rule = user_rule_text(call.op.target)
    more = [f"and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
    return ShardingError(
        f"the rule of {call.op.target.name()}{f', {rule!r},' if rule else ''} {problem}",
        [*wrong[:_MOST], *more],
        rule="an op on shards gives the shards of its results; what a result lacks is reduced as the rule says",
        remedy=remedy,
    )
