"""Collectives as `CommDebugMode` counts them: those of the plan, once for each call, whatever carries them.

Torch's mode counts ops of c10d as they are dispatched. Programs move their pieces in shared memory, in bundles or
inside one process, and ranks say more to each other than the plan shows (the greeting of a turn). So a program runs
where the mode does not look, and tells it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardlib.compiler.codegen.profiler_ranges import label
from shardlib.compiler.program.steps import Collective
from shardlib.core.torch_private import PACKET, c10d_functional
from shardlib.distributed import comm_counting

# Torch has no functional permutation; its own `permute_tensor` is an all-to-all.
_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "ppermute": "all_to_all_single",
}


def counted(run: Callable[..., Any], collectives: Sequence[Collective]) -> Callable[..., Any]:
    """`run`, which runs these collectives; modes that count are told."""
    if not collectives:
        return run

    def call(*args: Any) -> Any:
        if not comm_counting.active_modes:
            return run(*args)
        modes = comm_counting.counters_here()
        with comm_counting.without_counting():
            out = run(*args)
            for mode in modes:
                for collective in collectives:
                    mode.__torch_dispatch__(_Ran(collective), ())
        return out

    return call


class _Ran:
    """A collective that has run, as a mode sees an op that it calls."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        setattr(self, PACKET, getattr(c10d_functional, _OPS[collective.kind]))

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return label([self._collective])
