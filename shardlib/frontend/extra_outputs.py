"""Describes the outputs of a traced graph beside the function's results: written inputs, `.grad`s, gradients."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.frontend.side_effects.mutation_values import Mutation


@dataclass(frozen=True)
class ExtraOutputs:
    """The outputs of a graph behind the function's results, in this order; leaves are those of the call.

    `grads`: (leaf, position of its new `.grad`, or None if the call drops it).
    `written`: (leaf, position of its new value).
    `data`: (leaf, position of the tensor whose memory it gets).
    `takes`: (leaf, `grad` or `data`, the leaf that becomes its gradient, or whose memory it gets).
    `gradients`: (leaf, position of its gradient).
    `cotangents`: the results that have gradients, by position.
    `within`: those of `cotangents` from which another one is computed.
    `rebound`: places that hold other values after a call; new tensors among these follow the function's results.
    `reached`: for each gradient, the cotangents from which autograd's history leads to it. (Zeros are gradients, too.)
    `read`: leaves whose memory the backward pass reads.
    `leaves`: results at which the caller's history begins, each with True for a parameter. The function made it a leaf.
    `refused`: results that have no backward pass, though they depend on the leaf `root`, which requires a gradient;
    `why` is torch's reason.
    """

    grads: tuple[tuple[int, int | None], ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    data: tuple[tuple[int, int], ...] = ()
    takes: tuple[tuple[int, str, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    cotangents: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    rebound: tuple[Mutation, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    read: tuple[int, ...] = ()
    leaves: tuple[tuple[int, bool], ...] = ()
    refused: tuple[int, ...] = ()
    root: int = -1
    why: str = ""

    @property
    def writes(self) -> bool:
        """True if a call changes its inputs."""
        return bool(self.written or self.data or self.takes or self.grads)
