"""Texts of turns, and the errors for ranks that meet in different turns.

Ranks compare hashes of texts. A rank posts the text of a hash in the store when it first uses the hash, so that all
ranks can read it once their hashes differ. The many texts of calls with numbers are posted only on suspicion.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from shardlib.core.errors import ShardingError
from shardlib.distributed.store import Store

KEEP = 64  # turns that a rank remembers
PATIENCE = 0.25  # seconds after which a waiting rank checks the turns of the others
_WITH = "\t"  # between the name of a program and the numbers of a call
_FROM = "\v"  # between these and the origin of its tensors
_MASK = (1 << 63) - 1

Entry = tuple[int, int, int]  # turn, program, line


def hash_texts(*texts: str) -> int:
    """Hashes texts to a number, the same in every process."""
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little") & _MASK | 1


def call_text(text: str, numbers: str, lineage: int) -> str:
    """Returns the text of a program's call with these numbers and tensors of this lineage."""
    name, newline, collectives = text.partition("\n")
    return f"{name}{_WITH}{numbers}{_FROM}{lineage:x}{newline}{collectives}"


def backward_text(text: str, turn: int, call: int) -> str:
    """Returns the text of the backward program of the call with these numbers of turns and calls before it."""
    name, newline, collectives = text.partition("\n")
    return f"the backward of {name} as called in place {turn}.{call}{newline}{collectives}"


class Texts:
    """Posts and reads the texts of one world for one rank."""

    def __init__(self, room: str, store: Callable[[], Store]) -> None:
        self._room, self._store = f"{room}/texts", store
        self._posted: set[int] = set()
        self._later: dict[int, tuple[int, Callable[[], str]]] = {}  # of recent turns

    def __contains__(self, key: int) -> bool:
        return key in self._posted

    def post(self, key: int, text: str) -> None:
        """Posts the text of a hash in the store."""
        if key not in self._posted:
            self._posted.add(key)
            self._store().put(f"{self._room}/{key}", text)

    def defer(self, turn: int, key: int, text: Callable[[], str]) -> None:
        """Keeps the text of a turn's hash for `post_deferred`."""
        self._later[turn % KEEP] = key, text

    def post_deferred(self) -> None:
        """Posts the texts of the recent turns."""
        for key, text in self._later.values():
            self.post(key, text())

    def forget(self) -> None:
        """Forgets the recent turns."""
        self._later.clear()

    def read(self, key: int) -> str:
        """Reads the text of a hash; waits a moment, since another rank may be about to post it."""
        store, end = self._store(), time.monotonic() + 2 * PATIENCE
        while not (text := store.find(f"{self._room}/{key}")) and time.monotonic() < end:
            time.sleep(0.01)
        return text or "?"

    def describe(self, entry: Sequence[int], *, lineage: bool = False) -> str:
        """Describes a turn; its fourth number, if any, is the index of a collective."""
        name, *collectives = self.read(entry[1]).split("\n")
        name, _, numbers = name.partition(_WITH)
        numbers, _, origin = numbers.partition(_FROM)
        name += f" with {numbers}" if numbers else ""
        name += f" with tensors of origin {origin}" if lineage else ""
        which = entry[3] if len(entry) > 3 else 0
        turn = f"{collectives[which]} of {name}" if which < len(collectives) else name
        return f"{turn}, called at {self.read(entry[2])}"

    def out_of_step(
        self, rank: int, mine: Sequence[int], other: int, theirs: Sequence[int], *, threads: bool
    ) -> ShardingError:
        """Returns the error for two ranks that meet in different turns, or in different collectives of one turn."""
        self.post_deferred()
        one, two = (self.read(entry[1]).partition("\n")[0].partition(_WITH) for entry in (mine, theirs))
        alike = mine[2] == theirs[2] and one[0] == two[0] and one[2] != two[2]
        numbers = alike and one[2].partition(_FROM)[0] != two[2].partition(_FROM)[0]
        lineage = alike and not numbers
        words = {r: self.describe(e, lineage=lineage) for r, e in ((rank, mine), (other, theirs))}
        if words[rank] == words[other]:
            words = {rank: f"{words[rank]} [{mine[1]:016x}]", other: f"{words[other]} [{theirs[1]:016x}]"}
        summary, rule, remedy = (
            "the ranks are out of step",
            _SAME_ORDER,
            _NOT_BY_RANK + (_ONE_THREAD if threads else ""),
        )
        if alike:
            summary = f"the ranks call one program with different {'numbers' if numbers else 'tensors'}"
            rule, remedy = (_SAME_NUMBERS, _PASS_ALIKE) if numbers else (_SAME_TENSORS, _IN_ORDER)
        return ShardingError(summary, [f"rank {r} is in {words[r]}" for r in sorted(words)], rule=rule, remedy=remedy)


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


def cannot_continue(why: str) -> ShardingError:
    """Returns the error for ranks that take no more turns after an earlier error."""
    first, *rest = why.split("\n")
    return ShardingError(
        f"the ranks cannot go on: {first.removesuffix(':')}",
        [line.removeprefix("  * ") for line in rest if line.startswith("  * ")],
        rule="after an error in a collective no rank knows what the others wait for",
        remedy="mend the first error, and start all ranks again",
    )
