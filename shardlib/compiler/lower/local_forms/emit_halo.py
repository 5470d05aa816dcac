"""Emits `fetch` and `give_back` of local forms: exchanges of ranges of a dim between the devices that shard it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardlib.compiler.program.steps import Var
from shardlib.core.aten.op_names import ADD, CAT, NARROW, PAD
from shardlib.rules.local_forms.halo import intersect, length, match_senders

if TYPE_CHECKING:
    from shardlib.compiler.lower.local_forms.local_builder import LocalForm


def fetch(rows: Slab, have: Sequence[Any], needs: Sequence[Any]) -> Var:
    """Returns the ranges `needs` of a dim, concatenated; every device holds one range, `have`."""
    (mine,), calc = have, rows.local.calc
    # Ranges of members with a lower position come first; ranges that wrapped around the ring come last.
    lower: list[list[Slab]] = [[] for _ in needs]
    upper: list[list[Slab]] = [[] for _ in needs]
    for shift, received in rows.exchanged(mine, needs):
        behind = calc(lambda at, s: int(at >= s), rows.local.position(rows.factor), shift)
        for k, part in received:
            low = calc(lambda n, yes: n * yes, part.size, behind)
            lower[k].append(part.narrow(0, low))
            upper[k].append(part.narrow(low, calc(lambda n, low: n - low, part.size, low)))
    own = [rows.subrange(mine, calc(intersect, mine, need)) for need in needs]
    parts = [part for k, local in enumerate(own) for part in (*lower[k], local, *upper[k]) if not _is_zero(part.size)]
    return _joined(rows, parts or own[:1]).value


def give_back(rows: Slab, have: Sequence[Any], want: Sequence[Any]) -> Var:
    """Returns the sum over all devices of range `want`; every device holds addends for range `have`."""
    (have, mine) = have[0], want[0]
    total = rows.framed(have, mine).value
    for shift, received in rows.exchanged(have, [mine]):
        theirs = rows.local.calc(intersect, rows.elsewhere(have, shift), mine)
        for _, part in received:
            total = rows.local.op(ADD, total, part.framed(theirs, mine).value)
    return total


def _joined(rows: Slab, parts: Sequence[Slab]) -> Slab:
    """Concatenates slabs."""
    if len(parts) == 1:
        return parts[0]
    size = rows.local.calc(lambda *n: sum(n), *(part.size for part in parts))
    return rows._with(rows.local.op(CAT, [part.value for part in parts], rows.dim), size)


@dataclass(frozen=True)
class Slab:
    """A device's part of a tensor whose dim `dim` is sharded along `factor`: its value, and its shape (maybe symbolic).

    `name` is the tensor's name in the plan.
    """

    local: LocalForm
    factor: str
    dim: int
    name: str
    value: Var
    shape: tuple[Any, ...]

    @property
    def size(self) -> Any:
        return self.shape[self.dim]

    def subrange(self, have: Any, kept: Any) -> Slab:
        """Returns range `kept` of a slab that covers range `have`."""
        start = self.local.calc(lambda have, kept: kept[0] - have[0], have, kept)
        return self.narrow(start, self.local.calc(length, kept))

    def narrow(self, start: Any, n: Any) -> Slab:
        """Returns `n` elements of the dim from `start` on."""
        if _is_zero(start) and _is_zero(self.local.calc(lambda a, b: a - b, n, self.size)):
            return self
        return self._with(self.local.op(NARROW, self.value, self.dim, start, n), n)

    def framed(self, have: Any, want: Any) -> Slab:
        """Returns range `want` of a slab that covers range `have`, padded with zeros."""
        calc, inner = self.local.calc, self.subrange(have, kept := self.local.calc(intersect, have, want))
        before = calc(lambda r, want: r[0] - want[0] if length(r) else length(want), kept, want)
        after = calc(lambda r, want: want[1] - r[1] if length(r) else 0, kept, want)
        if _is_zero(before) and _is_zero(after):
            return inner
        pads = [0, 0] * (len(self.shape) - 1 - self.dim) + [before, after]
        return self._with(self.local.op(PAD, inner.value, pads, 0), calc(length, want))

    def elsewhere(self, value: Any, shift: int) -> Any:
        """Returns a symbolic value as it is on the device `shift` positions before this one on the ring."""
        n = self.local.ways(self.factor)
        return self.local.on_member(value, self.factor, lambda i: (i - shift) % n)

    def exchanged(self, have: Any, needs: Sequence[Any]) -> Iterator[tuple[int, list[tuple[int, Slab]]]]:
        """Yields, per shift, the slabs received from the device `shift` positions before, with the ranges' numbers.

        That device holds range `have`; this one needs the ranges `needs`.
        """
        local, key = self.local, (self.value, self.local.axes(self.factor), self.dim, have, *needs)
        flying = local.once(key, lambda: [*self._sent(have, needs)])
        for shift, some, part in flying:  # all messages start before the first wait
            received, at, part = [], 0, self._with(local.now(part.value), part.size)
            for k in some:
                arrived = local.calc(intersect, self.elsewhere(have, shift), needs[k])
                size = local.calc(length, arrived)
                received.append((k, part.narrow(at, size)))
                at = local.calc(lambda a, b: a + b, at, size)
            yield shift, received

    def _sent(self, have: Any, needs: Sequence[Any]) -> Iterator[tuple[int, list[int], Slab]]:
        """Emits the messages; yields each one's shift, the numbers of its ranges, and the received slab."""
        local, factor, n = self.local, self.factor, self.local.ways(self.factor)
        haves, wanted = local.values(have, factor), [local.values(need, factor) for need in needs]
        for shift, pairs in match_senders(haves, [set().union(*each) for each in zip(*wanted, strict=True)]):
            some = [k for k, each in enumerate(wanted) if any(at == shift for at, _ in match_senders(haves, each))]
            sent = _joined(
                self, [self.subrange(have, local.calc(intersect, have, self.elsewhere(needs[k], -shift))) for k in some]
            )
            got = local.send(sent.value, factor, pairs, sent.shape, name=self.name)
            # A member without a sender receives zeros, as many as it sends itself.
            size = local.on_member(sent.size, factor, [_source(pairs, i) for i in range(n)].__getitem__)
            yield shift, some, sent._with(got, size)

    def _with(self, value: Any, size: Any) -> Slab:
        return replace(self, value=value, shape=(*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]))


def _source(pairs: Sequence[tuple[int, int]], at: int) -> int:
    """Returns the sender to a member of an exchange, or the member itself if it has none."""
    return next((src for src, dst in pairs if dst == at), at)


def _is_zero(n: Any) -> bool:
    return isinstance(n, int) and n == 0
