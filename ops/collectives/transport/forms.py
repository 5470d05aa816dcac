"""Forms of a collective whose group spans machines, and the choice among them by the machine model.

Shapes: p ranks, k on each of f machines; M bytes are the whole tensor (an all-to-all's: the operand of one rank).

* ring: the backend's own; every rank passes shards of M / p to its neighbor.
* two_level: inside the machines, across them, inside (see `two_level.py`). Rank i of a machine only speaks to the ranks
  i of the others, so each shard enters a machine once.
* exchange: every rank sends to every other one. scatter_gather: two of them, of parts.

A rank begins its messages one after the other, each the latency of its link after the one before. Source: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from shardlib.core.text_tables import format_si
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.transport.flat_messages import sum_dtype
from shardlib.ops.collectives.transport.torch_wire import find_native_fault
from shardlib.sharding.mesh.machine import Span

BUFFER_BYTES = 256 << 20  # the most that a form may hold beside operand and result, where another form can run
_WAYS = {"ring": "native"}  # a form's name as a way of torch, where they differ


@dataclass(frozen=True)
class Form:
    """A way of a collective to send its bytes between machines.

    * `across`: bytes that leave each machine, of one group; the mean over machines if sizes differ.
    * `buffers`: bytes that a rank holds beside operand and result.
    * `seconds`: by the machine model.
    * `others`: the forms that were not chosen; `note` says why further ones cannot run.
    """

    name: str
    across: float
    buffers: float
    seconds: float
    others: tuple[Form, ...] = ()
    note: str = ""

    @property
    def reason(self) -> str:
        notes = [f"{other.name} {format_si(other.across, 'B')}" for other in self.others]
        text = ", ".join([*notes, *filter(None, [self.note])])
        return f"{format_si(self.across, 'B')} leave each machine" + (f" ({text})" if text else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    @property
    def choice(self) -> Choice:
        """The form as a way over torch."""
        return Choice("torch", _WAYS.get(self.name, self.name), self.reason)

    def share(self, part: float) -> Form:
        """Returns the same form for a part of the message's bytes."""
        return replace(self, across=self.across * part, others=tuple(other.share(part) for other in self.others))


def choose_form(
    op: str, nbytes: float, even: bool, dtype: torch.dtype, kind: str, span: Span, limit: float = BUFFER_BYTES
) -> Form:
    """Chooses the fastest form whose buffers stay below `limit` bytes; of those above it the one with the least.

    `nbytes` counts the op's whole tensor, `even` says that all shards have one size. A two-level sum of short floats
    sends them as float32, so that it is rounded once.

    Example:
        >>> from shardlib.sharding.mesh.machine import Link
        >>> span = Span(4, 2, Link(1e9, 1e-5), Link(1e8, 5e-5, sharing=4))
        >>> print(choose_form("all_gather", 16e6, True, torch.float32, "", span))
        two_level: 8 MB leave each machine (ring 14 MB, exchange 32 MB)
        >>> print(choose_form("all_gather", 16e6, False, torch.float32, "", span))
        exchange: 32 MB leave each machine (sizes differ)
    """
    notes = []
    elements = nbytes / dtype.itemsize
    padded = -(-elements // span.size) * span.size if op == "all_reduce" else elements  # of a message in two levels
    wide = padded * sum_dtype(dtype, kind).itemsize
    forms = [make(wide if make is _two_level else nbytes, span) for make in _FORMS[op]]
    if op == "all_reduce":
        gathers = [make(padded * dtype.itemsize if make is _two_level else nbytes, span) for make in _FORMS[op]]
        forms = [*map(_both, forms, gathers), _exchange(nbytes * span.size, span)]
        if fault := find_native_fault(dtype, kind, "gloo"):
            notes.append(fault)
            forms = [form for form in forms if form.name != "ring"]
    elif not even:
        notes.append("sizes differ")
        forms = [_exchange(nbytes, span)]
    if span.near == 1:
        forms = [form for form in forms if form.name != "two_level"]
    large = [form for form in forms if form.buffers > limit]
    if len(large) == len(forms):
        return min(forms, key=lambda form: form.buffers)
    notes += [f"{form.name} needs {format_si(form.buffers, 'B')} of buffers" for form in large]
    best, *others = sorted((form for form in forms if form not in large), key=lambda form: form.seconds)
    return replace(best, others=tuple(others), note=", ".join(notes))


def _ring(nbytes: float, s: Span) -> Form:
    sent = nbytes * (s.size - 1) / s.size
    hops = (s.size - s.far) * s.inner.latency + (s.far - 1) * s.outer.latency
    return Form("ring", sent, 0.0, hops + sent / s.ring)


def _two_level(nbytes: float, s: Span) -> Form:
    shard = nbytes / s.size
    inside = (s.near - 1) * (s.inner.latency + s.far * shard / s.inner.bandwidth)
    outside = (s.far - 1) * (s.outer.latency + shard / s.shared)
    return Form("two_level", s.near * (s.far - 1) * shard, 2 * s.far * shard, inside + outside)


def _two_level_exchange(nbytes: float, s: Span) -> Form:
    """Inside, the ranks of a machine sort their shards by the rank that sends them on."""
    inside = (s.near - 1) * (s.inner.latency + nbytes / s.near / s.inner.bandwidth)
    outside = (s.far - 1) * (s.outer.latency + nbytes / s.far / s.shared)
    return Form("two_level", s.near * (s.far - 1) / s.far * nbytes, nbytes, inside + outside)


def _exchange(nbytes: float, s: Span) -> Form:
    shard = nbytes / s.size
    inside, outside = s.near - 1, s.size - s.near
    hops = inside * s.inner.latency + outside * s.outer.latency
    seconds = hops + max(inside * shard / s.inner.bandwidth, outside * shard / s.shared)
    return Form("exchange", s.near * outside * shard, (s.size - 1) * shard, seconds)


def _both(scatter: Form, gather: Form) -> Form:
    """A reduction is scattered, then gathered."""
    name = "scatter_gather" if gather.name == "exchange" else gather.name
    return Form(name, scatter.across + gather.across, scatter.buffers, scatter.seconds + gather.seconds)


# Gloo has no ring for a reduce_scatter.
_FORMS: Mapping[str, tuple[Callable[[float, Span], Form], ...]] = {
    "all_gather": (_ring, _two_level, _exchange),
    "reduce_scatter": (_two_level, _exchange),
    "all_reduce": (_ring, _two_level, _exchange),
    "all_to_all": (_two_level_exchange, _exchange),
}
OPS = tuple(_FORMS)
