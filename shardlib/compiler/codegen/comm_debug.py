"""Reports the collectives of a plan to `CommDebugMode`, once for each call, on every transport.

Torch's mode counts dispatched ops of c10d. Programs send through shared memory, in bundles or inside one process, and
ranks exchange messages that are not in the plan (the greeting of a turn). So a program runs hidden from the mode, and
reports its collectives afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardlib.compiler.codegen.profiler_ranges import label
from shardlib.compiler.program.steps import Collective
from shardlib.core.torch_internals.torch_private import PACKET, c10d_functional
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
    """Wraps `run` so that it reports its collectives to modes that count."""
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
    """A collective that has run, in the form in which a mode sees an op."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        setattr(self, PACKET, getattr(c10d_functional, _OPS[collective.kind]))

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return label([self._collective])
