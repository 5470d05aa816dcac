"""`fetch` and `give_back` of local forms, as steps: who holds what of a dim, and who needs what of it."""

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
    """Ranges `needs` of a dim of which every device has one range, `have`, next to each other."""
    (mine,), calc = have, rows.local.calc
    # Members with a lower position come first; of the rest of the ring, those that are furthest along.
    lower: list[list[Slab]] = [[] for _ in needs]
    upper: list[list[Slab]] = [[] for _ in needs]
    for shift, found in rows.exchanged(mine, needs):
        behind = calc(lambda at, s: int(at >= s), rows.local.position(rows.factor), shift)
        for k, part in found:
            low = calc(lambda n, yes: n * yes, part.size, behind)
            lower[k].append(part.cut(0, low))
            upper[k].append(part.cut(low, calc(lambda n, low: n - low, part.size, low)))
    own = [rows.of(mine, calc(intersect, mine, need)) for need in needs]
    parts = [part for k, here in enumerate(own) for part in (*lower[k], here, *upper[k]) if not _none(part.size)]
    return _joined(rows, parts or own[:1]).value


def give_back(rows: Slab, have: Sequence[Any], want: Sequence[Any]) -> Var:
    """The sum of what all devices, which have addends for one range, have for another one."""
    (have, mine) = have[0], want[0]
    total = rows.framed(have, mine).value
    for shift, found in rows.exchanged(have, [mine]):
        theirs = rows.local.calc(intersect, rows.elsewhere(have, shift), mine)
        for _, part in found:
            total = rows.local.op(ADD, total, part.framed(theirs, mine).value)
    return total


def _joined(rows: Slab, parts: Sequence[Slab]) -> Slab:
    """Slabs next to each other."""
    if len(parts) == 1:
        return parts[0]
    size = rows.local.calc(lambda *n: sum(n), *(part.size for part in parts))
    return rows._with(rows.local.op(CAT, [part.value for part in parts], rows.dim), size)


@dataclass(frozen=True)
class Slab:
    """What a device has of a tensor whose dim `dim` is cut along `factor`: its value and shape (maybe symbolic).

    `name` is what a plan calls it.
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

    def of(self, have: Any, kept: Any) -> Slab:
        """Range `kept`, where it covers range `have`."""
        start = self.local.calc(lambda have, kept: kept[0] - have[0], have, kept)
        return self.cut(start, self.local.calc(length, kept))

    def cut(self, start: Any, n: Any) -> Slab:
        """`n` of them, from `start` on."""
        if _none(start) and _none(self.local.calc(lambda a, b: a - b, n, self.size)):
            return self
        return self._with(self.local.op(NARROW, self.value, self.dim, start, n), n)

    def framed(self, have: Any, want: Any) -> Slab:
        """What covers range `have`, as it covers `want`, with zeros."""
        calc, inner = self.local.calc, self.of(have, kept := self.local.calc(intersect, have, want))
        before = calc(lambda r, want: r[0] - want[0] if length(r) else length(want), kept, want)
        after = calc(lambda r, want: want[1] - r[1] if length(r) else 0, kept, want)
        if _none(before) and _none(after):
            return inner
        pads = [0, 0] * (len(self.shape) - 1 - self.dim) + [before, after]
        return self._with(self.local.op(PAD, inner.value, pads, 0), calc(length, want))

    def elsewhere(self, value: Any, shift: int) -> Any:
        """What a symbolic value is on the device `shift` places before this one, round the ring."""
        n = self.local.ways(self.factor)
        return self.local.on_member(value, self.factor, lambda i: (i - shift) % n)

    def exchanged(self, have: Any, needs: Sequence[Any]) -> Iterator[tuple[int, list[tuple[int, Slab]]]]:
        """For every shift: what a device that needs these ranges gets of the device `shift` places before it, which
        has range `have`, with the number of the range; in the order of the holders."""
        local, key = self.local, (self.value, self.local.axes(self.factor), self.dim, have, *needs)
        flying = local.once(key, lambda: [*self._sent(have, needs)])
        for shift, some, part in flying:  # all are on their way before the first is waited for
            found, at, part = [], 0, self._with(local.now(part.value), part.size)
            for k in some:
                arrived = local.calc(intersect, self.elsewhere(have, shift), needs[k])
                size = local.calc(length, arrived)
                found.append((k, part.cut(at, size)))
                at = local.calc(lambda a, b: a + b, at, size)
            yield shift, found

    def _sent(self, have: Any, needs: Sequence[Any]) -> Iterator[tuple[int, list[int], Slab]]:
        """The messages: how far each goes, which ranges are in it, and what arrives."""
        local, factor, n = self.local, self.factor, self.local.ways(self.factor)
        haves, wanted = local.values(have, factor), [local.values(need, factor) for need in needs]
        for shift, pairs in match_senders(haves, [set().union(*of) for of in zip(*wanted, strict=True)]):
            some = [k for k, of in enumerate(wanted) if any(at == shift for at, _ in match_senders(haves, of))]
            sent = _joined(
                self, [self.of(have, local.calc(intersect, have, self.elsewhere(needs[k], -shift))) for k in some]
            )
            got = local.send(sent.value, factor, pairs, sent.shape, name=self.name)
            # Zeros come to whom nobody sends, as many as it sends itself.
            size = local.on_member(sent.size, factor, [_source(pairs, i) for i in range(n)].__getitem__)
            yield shift, some, sent._with(got, size)

    def _with(self, value: Any, size: Any) -> Slab:
        return replace(self, value=value, shape=(*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]))


def _source(pairs: Sequence[tuple[int, int]], at: int) -> int:
    """Whose value a member has after an exchange: its own (but zeros) where nobody sends to it."""
    return next((src for src, dst in pairs if dst == at), at)


def _none(n: Any) -> bool:
    return isinstance(n, int) and n == 0
