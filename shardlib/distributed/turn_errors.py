"""What turns are called, and the errors for ranks that meet in different ones.

Ranks compare numbers. A rank leaves the text that a number stands for in the store when it first uses it, so that all
find it there once they differ; the texts of calls with numbers, which are many, only when somebody may ask.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from shardlib.core.errors import ShardingError
from shardlib.distributed.store import Store

KEEP = 64  # turns that a rank remembers
PATIENCE = 0.25  # seconds after which who waits looks where the others are
_WITH = "\t"  # between the name of a program and the numbers of a call
_FROM = "\v"  # between these and where its tensors come from
_MASK = (1 << 63) - 1

Entry = tuple[int, int, int]  # turn, program, line


def number(*texts: str) -> int:
    """A number that stands for these texts, the same in every process.

    Example:
        >>> number("a", "b") == number("a", "b") != number("ab")
        True
    """
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little") & _MASK | 1


def called_with(text: str, numbers: str, lineage: int) -> str:
    """The text of a program, called with these numbers, and with tensors that come from there."""
    name, newline, collectives = text.partition("\n")
    return f"{name}{_WITH}{numbers}{_FROM}{lineage:x}{newline}{collectives}"


def backward_of(text: str, turn: int, call: int) -> str:
    """The text of a program that goes back through a call which was made after so many turns and calls."""
    name, newline, collectives = text.partition("\n")
    return f"the backward of {name} as called in place {turn}.{call}{newline}{collectives}"


class Texts:
    """The texts of one world, as one rank says and finds them."""

    def __init__(self, room: str, store: Callable[[], Store]) -> None:
        self._room, self._store = f"{room}/said", store
        self._said: set[int] = set()
        self._later: dict[int, tuple[int, Callable[[], str]]] = {}  # of recent turns

    def __contains__(self, what: int) -> bool:
        return what in self._said

    def say(self, what: int, text: str) -> None:
        """Leave the text of a number where all ranks find it."""
        if what not in self._said:
            self._said.add(what)
            self._store().put(f"{self._room}/{what}", text)

    def say_later(self, turn: int, what: int, text: Callable[[], str]) -> None:
        """The text of a turn's number, for `explain`."""
        self._later[turn % KEEP] = what, text

    def explain(self) -> None:
        """Say what the recent turns are, since somebody may ask now."""
        for what, text in self._later.values():
            self.say(what, text())

    def forget(self) -> None:
        """Forget the recent turns."""
        self._later.clear()

    def told(self, what: int) -> str:
        """The text; who is out of step, too, may be about to say it."""
        store, end = self._store(), time.monotonic() + 2 * PATIENCE
        while not (text := store.find(f"{self._room}/{what}")) and time.monotonic() < end:
            time.sleep(0.01)
        return text or "?"

    def describe(self, entry: Sequence[int], *, lineage: bool = False) -> str:
        """A turn in words; its fourth number, where it has one, says which of its collectives is meant."""
        name, *collectives = self.told(entry[1]).split("\n")
        name, _, numbers = name.partition(_WITH)
        numbers, _, origin = numbers.partition(_FROM)
        name += f" with {numbers}" if numbers else ""
        name += f" with tensors of origin {origin}" if lineage else ""
        which = entry[3] if len(entry) > 3 else 0
        what = f"{collectives[which]} of {name}" if which < len(collectives) else name
        return f"{what}, called at {self.told(entry[2])}"

    def out_of_step(
        self, rank: int, mine: Sequence[int], other: int, theirs: Sequence[int], *, threads: bool
    ) -> ShardingError:
        """The error for two ranks that meet in different turns, or in different collectives of one."""
        self.explain()
        one, two = (self.told(entry[1]).partition("\n")[0].partition(_WITH) for entry in (mine, theirs))
        alike = mine[2] == theirs[2] and one[0] == two[0] and one[2] != two[2]
        numbers = alike and one[2].partition(_FROM)[0] != two[2].partition(_FROM)[0]
        lineage = alike and not numbers
        words = {r: self.describe(e, lineage=lineage) for r, e in ((rank, mine), (other, theirs))}
        if words[rank] == words[other]:
            words = {rank: f"{words[rank]} [{mine[1]:016x}]", other: f"{words[other]} [{theirs[1]:016x}]"}
        what, rule, remedy = "the ranks are out of step", _SAME_ORDER, _NOT_BY_RANK + (_ONE_THREAD if threads else "")
        if alike:
            what = f"the ranks call one program with different {'numbers' if numbers else 'tensors'}"
            rule, remedy = (_SAME_NUMBERS, _PASS_ALIKE) if numbers else (_SAME_TENSORS, _IN_ORDER)
        return ShardingError(what, [f"rank {r} is in {words[r]}" for r in sorted(words)], rule=rule, remedy=remedy)


_SAME_ORDER = "every rank runs the same programs in the same order, each called from the same line"
_SAME_NUMBERS = "a number among the arguments is the same on all ranks"
_PASS_ALIKE = "compute the number alike everywhere, or pass what differs as a tensor: sl.from_local(x, spec)"
_SAME_TENSORS = (
    "what all ranks pass is one tensor: placed from the same values, or made by the same operations; a plain one has "
    "the same values everywhere"
)
_IN_ORDER = (
    "go through tensors in an order that all ranks share (a list, a dict, sorted(names); a set has none), and let no "
    "operation, number, batch or step of an optimizer depend on the rank; SHARDLIB_CHECK=always names the plain tensor"
)
_NOT_BY_RANK = (
    "let nothing that communicates (a jitted function, full_tensor, print, ops that move pieces) depend on the rank"
)
_ONE_THREAD = (
    "; this rank uses collectives in several threads, which have no common order with other ranks' threads unless the "
    "program gives them one: use them in one thread"
)


def cannot_go_on(why: str) -> ShardingError:
    """The error for ranks that take no more turns since something went wrong before."""
    first, *rest = why.split("\n")
    return ShardingError(
        f"the ranks cannot go on: {first.removesuffix(':')}",
        [line.removeprefix("  * ") for line in rest if line.startswith("  * ")],
        rule="after an error in a collective nobody knows what the others wait for",
        remedy="mend the first error, and start all ranks again",
    )
