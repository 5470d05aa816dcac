"""Fragments of a pipelined step, and the fragments that each of them needs.

A model is a chain of *chunks*. Every stage of the mesh runs one chunk, or several (virtual stages). A *fragment* is the
work of one stage on one microbatch in one direction, for one of its chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardlib.core.errors import ShardingError

Kind = Literal["F", "B", "W"]
_TEXT = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


class Fragment(NamedTuple):
    """The work of `stage` on one microbatch for its `chunk`, counted on the stage from 0.

    Kinds are `F` (forward), `B` (backward; if weights are apart, only the gradients of activations) and `W` (the
    gradients of weights).

    Example:
        >>> str(Fragment("F", 3, stage=1)), str(Fragment("B", 0, stage=1, chunk=2))
        ('F3', 'B0.2')
        >>> Fragment.parse("B0.2", stage=1) == Fragment("B", 0, 1, 2)
        True
    """

    kind: Kind
    microbatch: int
    stage: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    def __repr__(self) -> str:
        return f"{self} of stage {self.stage}"

    @staticmethod
    def parse(text: str, stage: int) -> Fragment:
        """Parses the text that `str` prints; raises `ShardingError` for another one."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ShardingError(
                f"{text!r} is no fragment",
                rule="a fragment is F, B or W, the number of its microbatch, and behind a dot its chunk",
                remedy='"F0", "B3", "W2.1"',
            )
        kind, microbatch, chunk = match.groups()
        return Fragment(kind, int(microbatch), stage, int(chunk or 0))  # type: ignore[arg-type]


@dataclass(frozen=True)
class PipelineShape:
    """The sizes of a pipeline: `stages` of the mesh, `microbatches`, and `chunks` per stage.

    Chunk c of stage i is number c * stages + i of the chain. With `folded` the chain turns around at the last stage, so
    that the first stage also has the last chunk (a V). With `split_weights` the gradients of weights are fragments of
    their own.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    folded: bool = False
    split_weights: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("F", "B", "W") if self.split_weights else ("F", "B")

    @property
    def chain_length(self) -> int:
        """The number of chunks of all stages."""
        return self.stages * self.chunks

    def position(self, stage: int, chunk: int) -> int:
        """Returns the position in the chain of a stage's chunk."""
        turns = self.folded and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - stage if turns else stage)

    def stage_and_chunk(self, position: int) -> tuple[int, int]:
        """Returns the stage that runs a position of the chain, and its chunk there.

        Example:
            >>> [PipelineShape(2, 1, chunks=2, folded=True).stage_and_chunk(i) for i in range(4)]
            [(0, 0), (1, 0), (1, 1), (0, 1)]
        """
        chunk, place = divmod(position, self.stages)
        return (self.stages - 1 - place if self.folded and chunk % 2 == 1 else place), chunk

    def fragments(self, stage: int) -> Iterator[Fragment]:
        """Yields all fragments of one stage."""
        for kind in self.kinds:
            for microbatch in range(self.microbatches):
                for chunk in range(self.chunks):
                    yield Fragment(kind, microbatch, stage, chunk)

    def needs(self, fragment: Fragment) -> tuple[Fragment, ...]:
        """Returns the fragments that a chain-shaped model needs before this one.

        Example:
            >>> shape = PipelineShape(stages=2, microbatches=4)
            >>> [shape.needs(Fragment(*x)) for x in (("F", 0, 1), ("B", 0, 0), ("B", 0, 1))]
            [(F0 of stage 0,), (B0 of stage 1,), (F0 of stage 1,)]
        """
        kind, microbatch, stage, chunk = fragment
        if kind == "W":
            return (fragment._replace(kind="B"),)
        position = self.position(stage, chunk)
        if kind == "B" and position == self.chain_length - 1:
            return (fragment._replace(kind="F"),)
        if kind == "F" and position == 0:
            return ()
        other, chunk = self.stage_and_chunk(position + (1 if kind == "B" else -1))
        return (Fragment(kind, microbatch, other, chunk),)
