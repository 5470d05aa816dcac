"""The store of torch.distributed, through which ranks speak when collectives do not work, or not yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from shardlib.core.errors import ShardingError


class Store:
    """The store as one rank uses it. In a room every rank may post one value under its number.

    Raises `ShardingError`, from `cause` where there is one, when the store is gone; `dead` tells which ranks are known
    to be gone too.
    """

    def __init__(
        self,
        rank: int,
        store: Any,
        cause: BaseException | None = None,
        dead: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self.rank, self.store, self.cause, self.dead = rank, store, cause, dead

    def put(self, key: str, value: str) -> None:
        try:
            self.store.set(key, value)
        except dist.DistError as error:
            self._unreachable(error)

    def find(self, key: str) -> str:
        """The value of a key; empty when there is none."""
        try:
            return self.store.get(key).decode() if self.store.check([key]) else ""
        except dist.DistError as error:
            self._unreachable(error)

    def post(self, room: str, value: str | bytes) -> None:
        try:
            self.store.set(f"{room}/{self.rank}", value)  # bytes are taken too
        except dist.DistError as error:
            self._unreachable(error)

    def read(self, room: str, ranks: Iterable[int]) -> dict[int, bytes]:
        try:
            return {r: self.store.get(f"{room}/{r}") for r in ranks}
        except dist.DistError as error:
            self._unreachable(error)

    def verdict(self, room: str, proposed: str = "") -> str:
        """What the first of all ranks proposed; empty when none has yet."""
        try:
            found: bytes = self.store.compare_set(f"{room}/verdict", "", proposed)
            return found.decode()
        except dist.DistError as error:
            self._unreachable(error)

    def wait(
        self, room: str, ranks: Sequence[int], seconds: float, until: Callable[[Sequence[int]], object] | None = None
    ) -> list[int]:
        """Wait until all ranks have posted, or `until(those missing)` holds; returns the ranks still missing."""
        deadline, pause, missing = time.monotonic() + seconds, 0.001, list(ranks)
        try:
            # Store.wait would do, but it logs every timeout from C++, and says nothing about who is missing.
            while not self.store.check([f"{room}/{r}" for r in missing]):
                missing = [r for r in missing if not self.store.check([f"{room}/{r}"])]
                left = deadline - time.monotonic()
                if left <= 0 or (until and until(missing)):
                    return missing
                time.sleep(min(pause, left))
                pause = min(2 * pause, 0.05)
        except dist.DistError as error:
            self._unreachable(error)
        return []

    def exchange(
        self,
        room: str,
        value: str,
        ranks: Sequence[int],
        seconds: float,
        what: str,
        dead: Callable[[Sequence[int]], Sequence[int]] = lambda missing: (),
    ) -> dict[int, str]:
        """Every rank's value.

        Raises `ShardingError` naming the ranks that did not post theirs for `what` in time; at once where `dead` finds
        some of those missing. It is called again and again, and may raise errors of its own.
        """
        self.post(room, value)
        if missing := self.wait(room, ranks, seconds, until=dead):
            refuse_missing(missing, dead(missing), seconds, f"to {what}")
        return {r: text.decode() for r, text in self.read(room, ranks).items()}

    def _unreachable(self, error: dist.DistError) -> NoReturn:
        raise ShardingError(
            f"rank {self.rank} lost the store of torch.distributed",
            [f"rank {r} is dead: its process is gone" for r in self.dead()]
            or ["rank 0, or the launcher that holds the store, is gone"],
            rule="every rank of the mesh takes part in every step",
            remedy="look for the first error in the output of rank 0 and of the launcher",
        ) from (self.cause or error)


def refuse_missing(missing: Sequence[int], dead: Sequence[int], seconds: float, what: str, of: str = "") -> NoReturn:
    """Raise the error for ranks that did not come within some seconds, or never will because these of them are dead."""
    late = f"did not arrive within {seconds:g} s: it is dead or runs other code"
    raise ShardingError(
        f"{names(dead or missing)}{of} did not come {what}",
        [f"rank {r} is dead: its process is gone" for r in dead] or [f"rank {r} {late}" for r in missing],
        rule="every rank runs the same programs in the same order",
        remedy=LOOK,
    )


LOOK = (
    "look for the first error in the output of the ranks named (one that came to its end left the others alone); "
    "SHARDLIB_TIMEOUT=<seconds> waits longer"
)


def own_connection(store: Any) -> Any:
    """A connection to the same store that nobody else waits on; the store itself where it has no such thing."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # torch 2.11 may lack it, and stores inside one process need none
        return store


def names(ranks: Sequence[int]) -> str:
    """Ranks as a sentence has them.

    Example:
        >>> names([0, 2, 3])
        'ranks 0, 2 and 3'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
