"""Pipeline schedules: short functions that order the fragments of a stage.

A schedule is a *comparator*, which says of two fragments of one stage whether the first runs before the second, or a
function that returns the order of every stage. Pictures: time runs to the right, a row per stage, `0` is F0, `a` is B0,
and capitals are weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from typing import Any

from shardlib.compiler.stages.fragments import Fragment, PipelineShape
from shardlib.compiler.stages.list_schedule import list_schedule
from shardlib.compiler.stages.timetable import Orders, make_timetable, refuse_incomplete
from shardlib.core.errors import ShardingError

Comparator = Callable[[Fragment, Fragment, PipelineShape], bool]


def gpipe(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
    """All forward fragments, then all backward ones (Huang et al. 2019, arXiv:1811.06965).

    ::

        0123    abcd
         0123  abcd
          0123abcd
    """
    return a.kind == "F" if a.kind != b.kind else _earlier(a, b, shape)


def one_f_one_b(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
    """After as many forward fragments as stages follow, one forward and one backward in turn.

    Stage i holds at most P - i microbatches (PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503).

    ::

        012  a3b c d
         01 a2b3c d
          0a1b2c3d
    """
    return _position_1f1b(a, shape) < _position_1f1b(b, shape)


def _position_1f1b(f: Fragment, shape: PipelineShape) -> tuple[int, int]:
    """F of microbatch m runs in front of B of m - (stages that follow)."""
    if f.kind == "F":
        return f.microbatch - (shape.stages - 1 - f.stage), 0
    return f.microbatch, 1


def zb_h1(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
    """1F1B with the gradients of weights put off: stage i runs W of m behind B of m + i.

    No stage holds more than P microbatches, and the bubble is a third (Qi et al. 2024, arXiv:2401.10241).
    """
    return _position_zb_h1(a, shape) < _position_zb_h1(b, shape)


def _position_zb_h1(f: Fragment, shape: PipelineShape) -> tuple[int, int]:
    return (f.microbatch + f.stage, 2) if f.kind == "W" else _position_1f1b(f, shape)


def interleaved_1f1b(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
    """1F1B over several chunks per stage, in rounds of P microbatches (Narayanan et al. 2021, arXiv:2104.04473).

    The bubble is divided by the number of chunks.
    """
    return _position_interleaved(a, shape) < _position_interleaved(b, shape)


def _position_interleaved(f: Fragment, shape: PipelineShape) -> tuple[int, int]:
    """The k-th forward fragment runs in front of the backward one that comes `warmup` places earlier."""
    rounds, inside = divmod(f.microbatch, shape.stages)
    chunk = f.chunk if f.kind == "F" else shape.chunks - 1 - f.chunk
    size = min(shape.stages, shape.microbatches - rounds * shape.stages)  # the last round may be smaller
    k = rounds * shape.stages * shape.chunks + chunk * size + inside
    if f.kind == "B":
        return k, 1
    warmup = 2 * (shape.stages - 1 - f.stage) + (shape.chunks - 1) * shape.stages
    return k - warmup, 0


def zb_v(shape: PipelineShape) -> Orders:
    """Two chunks per stage in a V, and the gradients of weights fill the gaps (Qi et al. 2024, arXiv:2405.15362).

    Every stage holds at most 2 P chunks' microbatches (the memory of 1F1B). It waits only before its first and behind
    its last fragment if F, B and W take equally long, transfers take no time, and there are 2 P microbatches or more.

    ::

        0120aA1bBaA2cC3bB3dcCdDD
         0011aAaA22bBbB33ccddCCDD

    The order is a list schedule. A stage runs F before B, the chunk next to the end of the chain first. W runs first
    while memory is full and forward fragments are left, otherwise last: so enough W are left for the last gaps.
    """
    return list_schedule(shape, _rank_zb_v, limits=[2 * shape.stages] * shape.stages)


def _rank_zb_v(f: Fragment, full: bool) -> tuple[int, int, int]:
    ranks = {"F": 2 - f.chunk, "B": 3 + f.chunk, "W": 0 if full else 5}
    return ranks[f.kind], f.microbatch, -f.chunk


def _earlier(a: Fragment, b: Fragment, shape: PipelineShape) -> bool:
    """Orders fragments of one kind by microbatch, then along the chain (backward: against it)."""
    sign = 1 if a.kind == "F" else -1
    return (a.microbatch, sign * a.chunk) < (b.microbatch, sign * b.chunk)


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule by name: its comparator, or the function that returns all orders, and the shapes that it serves."""

    order: Callable[..., Any]
    is_comparator: bool = True
    folded: bool = False
    split_weights: bool = False
    chunks: int | None = 1  # None: any number
    automatic_chunks: int = 1  # of any number, those of an automatic cut


SCHEDULES: Mapping[str, PipelineSchedule] = {
    "gpipe": PipelineSchedule(gpipe, chunks=None),
    "1f1b": PipelineSchedule(one_f_one_b),
    "interleaved_1f1b": PipelineSchedule(interleaved_1f1b, chunks=None, automatic_chunks=2),
    "zb_h1": PipelineSchedule(zb_h1, split_weights=True),
    "zb_v": PipelineSchedule(zb_v, is_comparator=False, folded=True, split_weights=True, chunks=2),
}


def order_fragments(schedule: str | Comparator | Sequence[Sequence[str]], shape: PipelineShape) -> Orders:
    """Returns the fragments of each stage in the order of a schedule.

    `schedule` is a name of `SCHEDULES`, a comparator, or the texts of all fragments, a row per stage. Raises
    `ShardingError` for an unknown name, an order that leaves fragments out or runs one twice, and for a deadlock.

    Example:
        >>> for order in order_fragments("1f1b", PipelineShape(stages=2, microbatches=3)):
        ...     print(*order)
        F0 F1 B0 F2 B1 B2
        F0 B0 F1 B1 F2 B2
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ShardingError(f"no pipeline schedule is called {schedule!r}", [f"there are {', '.join(SCHEDULES)}"])
        named = SCHEDULES[schedule]
        orders = _sort(named.order, shape) if named.is_comparator else named.order(shape)
    elif callable(schedule):
        orders = _sort_partly(schedule, shape)
    else:
        orders = [[Fragment.parse(x, stage) for x in row] for stage, row in enumerate(schedule)]
    refuse_incomplete(orders, shape)
    make_timetable(orders, shape.needs, lambda fragment: 1.0)
    return orders


def _sort(comparator: Comparator, shape: PipelineShape) -> Orders:
    def compare(a: Fragment, b: Fragment) -> int:
        return -1 if comparator(a, b, shape) else 1

    return [sorted(shape.fragments(stage), key=cmp_to_key(compare)) for stage in range(shape.stages)]


def _sort_partly(comparator: Comparator, shape: PipelineShape) -> Orders:
    """Sorts by a comparator that may leave pairs open; of several next fragments, the one that is ready first runs."""
    waiting: list[dict[Fragment, set[Fragment]]] = []
    for stage in range(shape.stages):
        fragments = list(shape.fragments(stage))
        waiting.append({b: {a for a in fragments if a is not b and comparator(a, b, shape)} for b in fragments})
        _refuse_contradictions(waiting[-1])
    orders: list[list[Fragment]] = [[] for _ in waiting]
    finished: set[Fragment] = set()
    while any(waiting):
        running = []
        for before in waiting:
            free = [f for f, others in before.items() if others <= finished]
            ready = [f for f in free if all(x in finished for x in shape.needs(f))]
            if ready:
                running.append(min(ready, key=lambda f: ("BFW".index(f.kind), f.microbatch, f.chunk)))
        if not running:  # a deadlock: the model check names the fragments
            return [[*order, *_in_order(before, finished)] for order, before in zip(orders, waiting, strict=True)]
        for f in running:
            del waiting[f.stage][f]
            orders[f.stage].append(f)
        finished.update(running)
    return orders


def _in_order(before: Mapping[Fragment, set[Fragment]], finished: set[Fragment]) -> list[Fragment]:
    """Returns the fragments that are left, each behind those that the comparator puts before it."""
    return sorted(before, key=lambda f: len(before[f] - finished))


def _refuse_contradictions(before: Mapping[Fragment, set[Fragment]]) -> None:
    pairs = {
        (a, b) for b, others in before.items() for a in others if b in before[a] and (a.kind, a[1:]) < (b.kind, b[1:])
    }
    if pairs:
        raise ShardingError(
            "the schedule contradicts itself",
            [f"{a!r} and {b!r} each run before the other" for a, b in sorted(pairs)[:10]],
            rule="a comparator returns True for at most one order of two fragments",
        )
