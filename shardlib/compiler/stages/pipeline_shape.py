"""Chooses the sizes of a pipeline from its schedule and from the stages that the code names."""

from __future__ import annotations

from shardlib.compiler.stages.fragments import PipelineShape
from shardlib.compiler.stages.schedules import SCHEDULES
from shardlib.compiler.stages.timetable import Orders, make_timetable
from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import Microbatches


def count_live(shape: PipelineShape, orders: Orders) -> list[int]:
    """Returns how many microbatches each chunk of the chain holds at once."""
    table = make_timetable(orders, shape.needs, lambda fragment: 1.0)
    return [-(-table.live(shape.stage_and_chunk(i)[0]) // shape.chunks) for i in range(shape.chain_length)]


def choose_shape(call: Microbatches, stages: int, named: set[int]) -> PipelineShape:
    """Returns the shape for a mesh of `stages`, where the code names the parts `named` of the model.

    Raises `ShardingError` for parts that nothing names, and for a schedule that runs fewer parts.
    """
    schedule = SCHEDULES.get(call.schedule) if isinstance(call.schedule, str) else None
    chunks = max(1, -(-(max(named, default=0) + 1) // stages))
    if schedule is not None and not (named and schedule.chunks is None):
        chunks = max(chunks, schedule.chunks or schedule.default_chunks)
    missing = sorted({*range(stages * chunks)} - named)
    if named and missing:
        raise ShardingError(
            f"stages without work: {', '.join(map(str, missing))}",
            [f"the mesh has {stages} stages, with {chunks} part{'s' * (chunks > 1)} of the model each"],
            rule="every stage runs a part of the forward pass",
            remedy=f"with sl.stage(i): for every i from 0 to {stages * chunks - 1}; or a mesh of fewer stages",
        )
    folded, split = (schedule.folded, schedule.split_weights) if schedule is not None else (False, _has_weights(call))
    if schedule is not None and schedule.chunks == 1 and chunks > 1:
        raise ShardingError(
            f"the schedule {call.schedule!r} runs one part of the model per stage",
            [f"the program names {stages * chunks} stages, the mesh has {stages}"],
            remedy='schedule="interleaved_1f1b"',
        )
    return PipelineShape(stages, call.n, chunks, folded, split)


def _has_weights(call: Microbatches) -> bool:
    return not callable(call.schedule) and any(text.startswith("W") for row in call.schedule for text in row)
