"""Shows a program's steps as ranges of `torch.profiler`, with the user's modules and lines.

An op is `mm in layers.0.up at train.py:12`, a collective `all_reduce[data] 1.5 kB at train.py:12`. The profiled program
has a source of its own, generated when a profiler first runs, so ranges cost nothing without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch.autograd import profiler

from shardlib.compiler.program.steps import Collective, Compute
from shardlib.core.source_lines import format_path_line
from shardlib.core.text_tables import format_si
from shardlib.core.torch_internals.torch_private import is_profiling

Runner = Callable[..., tuple[Any, ...]]  # takes the inputs' shards and the leaves of a call, for its numbers


def watched(plain: Runner, make: Callable[[], Runner]) -> Runner:
    """Returns a function that runs `plain`, or, under a profiler, the result of `make()`, which is called once."""
    ranged = cache(make)

    def run(pieces: Sequence[Any], leaves: Sequence[Any] = ()) -> tuple[Any, ...]:
        if is_profiling():
            return ranged()(pieces, leaves)
        return plain(pieces, leaves)

    return run


def ranged(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wraps `fn` in a range of that name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with profiler.record_function(name):
            return fn(*args, **kwargs)

    return call


def op_label(op: str, step: Compute) -> str:
    """`mm in layers.0.up at train.py:12`; `mm in layers.0.up, backward of train.py:12`."""
    inside = next((x.path or x.kind for x in reversed(step.inside)), "")
    where = f"{', backward of' if step.backward else ' at'} {format_path_line(step.line)}"
    return f"{op}{f' in {inside}' if inside else ''}{where}"


def label(bundle: Sequence[Collective]) -> str:
    """Labels a message: `all_reduce[data] 1.5 kB at train.py:12, train.py:14`."""
    first = bundle[0]
    lines = ", ".join(dict.fromkeys(("backward of " if c.backward else "") + format_path_line(c.line) for c in bundle))
    return f"{first.kind}[{' '.join(map(str, first.axes))}] {format_si(sum(c.bytes for c in bundle), 'B')} at {lines}"
