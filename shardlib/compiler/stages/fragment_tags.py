"""The fragment that a step belongs to: the cut writes it into the tag of the step's line, and passes keep lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardlib.compiler.program.steps import Compute, Start, Step, Wait
from shardlib.compiler.stages.fragments import Fragment, Kind, PipelineShape
from shardlib.core.fragment_tag import NO_TAG
from shardlib.core.source_lines import Line


def tag_step(step: Step, fragment: Fragment, shape: PipelineShape) -> Step:
    """Returns a step of a lowered program whose line names its fragment. A wait belongs to the step before it."""
    if isinstance(step, Wait):
        return step
    if isinstance(step, Start):
        return Start(tuple(replace(c, line=_tagged(c.line, fragment, shape)) for c in step.moves))
    assert isinstance(step, Compute), "a lowered program only calls and communicates"
    return replace(step, line=_tagged(step.line, fragment, shape))


def _tagged(line: Line | None, f: Fragment, shape: PipelineShape) -> Line | None:
    if line is None:
        return None
    tag = line.tag._replace(stage=shape.position(f.stage, f.chunk), microbatch=f.microbatch, kind=f.kind)
    return line._replace(tag=tag)


def fragments_of(steps: Sequence[Step], shape: PipelineShape) -> list[Fragment | None]:
    """Returns the fragment of each step of a stage's program, after any passes.

    An untagged call belongs to the same fragment as the call before it, a wait to the same one as the next call.
    None: a step runs in front of all fragments, or behind them. A call of the forward pass that the backward pass
    repeats belongs to the backward fragment.
    """
    result = [_fragment(step, shape) for step in steps]
    calls = [i for i, step in enumerate(steps) if isinstance(step, Compute)]
    inside = slice(0, 1 + max((i for i in calls if result[i] is not None), default=-1))
    current = None
    for i, step in enumerate(steps[inside]):
        if isinstance(step, Compute):
            current = result[i] = result[i] or current
    for i, step in reversed([*enumerate(steps[inside])]):
        if isinstance(step, Compute):
            current = result[i]
        elif not isinstance(step, Start):
            result[i] = current
    return result


def fragment_order(steps: Sequence[Step], fragments: Sequence[Fragment | None]) -> list[Fragment]:
    """Returns the fragments in the order in which their last calls run; passes let messages begin earlier."""
    last = {f: i for i, (step, f) in enumerate(zip(steps, fragments, strict=True)) if isinstance(step, Compute)}
    return sorted((f for f in last if f is not None), key=last.__getitem__)


def _fragment(step: Step, shape: PipelineShape) -> Fragment | None:
    at = step.first if isinstance(step, Start) else step if isinstance(step, Compute) else None
    tag = NO_TAG if at is None or at.line is None else at.line.tag
    if at is None or tag.kind is None or tag.stage is None or tag.microbatch is None:
        return None
    kind: Kind = "B" if tag.kind == "F" and at.backward else tag.kind
    return Fragment(kind, tag.microbatch, *shape.stage_and_chunk(tag.stage))
