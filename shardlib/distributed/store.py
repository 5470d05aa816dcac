"""Messages through the store of torch.distributed, for ranks that cannot use collectives, or not yet."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from shardlib.core.errors import ShardingError

Args = ParamSpec("Args")
Result = TypeVar("Result")


def _explain_loss(method: Callable[Concatenate[Store, Args], Result]) -> Callable[Concatenate[Store, Args], Result]:
    @functools.wraps(method)
    def call(self: Store, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except dist.DistError as error:
            raise ShardingError(
                f"rank {self.rank} lost the store of torch.distributed",
                [f"rank {r} is dead: its process is gone" for r in self.dead()]
                or ["rank 0, or the launcher that holds the store, is gone"],
                rule="every rank of the mesh takes part in every step",
                remedy="look for the first error in the output of rank 0 and of the launcher",
            ) from (self.cause or error)

    return call


class Store:
    """The store as one rank uses it. In a room every rank may post one value under its number.

    Raises `ShardingError`, from `cause` if there is one, when the store is gone; `dead` returns the ranks that are gone
    too.
    """

    def __init__(
        self,
        rank: int,
        store: Any,
        cause: BaseException | None = None,
        dead: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self.rank, self.store, self.cause, self.dead = rank, store, cause, dead

    @_explain_loss
    def put(self, key: str, value: str) -> None:
        self.store.set(key, value)

    @_explain_loss
    def find(self, key: str) -> str:
        """Returns the value of a key; "" if there is none."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    @_explain_loss
    def post(self, room: str, value: str | bytes) -> None:
        self.store.set(f"{room}/{self.rank}", value)  # the store also accepts bytes

    @_explain_loss
    def read(self, room: str, ranks: Iterable[int]) -> dict[int, bytes]:
        return {r: self.store.get(f"{room}/{r}") for r in ranks}

    @_explain_loss
    def verdict(self, room: str, proposed: str = "") -> str:
        """Returns the first proposal of all ranks; "" if there is none yet."""
        verdict: bytes = self.store.compare_set(f"{room}/verdict", "", proposed)
        return verdict.decode()

    @_explain_loss
    def wait(
        self, room: str, ranks: Sequence[int], seconds: float, until: Callable[[Sequence[int]], object] | None = None
    ) -> list[int]:
        """Waits until all ranks have posted, or `until(missing)` is true; returns the missing ranks."""
        deadline, pause, missing = time.monotonic() + seconds, 0.001, list(ranks)
        # `Store.wait` logs every timeout from C++, and does not return the missing ranks.
        while not self.store.check([f"{room}/{r}" for r in missing]):
            missing = [r for r in missing if not self.store.check([f"{room}/{r}"])]
            left = deadline - time.monotonic()
            if left <= 0 or (until and until(missing)):
                return missing
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
        return []

    def exchange(
        self,
        room: str,
        value: str,
        ranks: Sequence[int],
        seconds: float,
        task: str,
        dead: Callable[[Sequence[int]], Sequence[int]] = lambda missing: (),
    ) -> dict[int, str]:
        """Returns the values of all ranks.

        Raises `ShardingError` with the ranks that did not post a value for `task` in time; at once if `dead` returns
        some of the missing ranks. It is called repeatedly, and may raise errors of its own.
        """
        self.post(room, value)
        if missing := self.wait(room, ranks, seconds, until=dead):
            refuse_missing(missing, dead(missing), seconds, f"to {task}")
        return {r: text.decode() for r, text in self.read(room, ranks).items()}


def refuse_missing(missing: Sequence[int], dead: Sequence[int], seconds: float, task: str, total: str = "") -> NoReturn:
    """Raises the error for ranks that did not arrive within some seconds, or that cannot since they are dead."""
    late = f"did not arrive within {seconds:g} s: it is dead or runs other code"
    raise ShardingError(
        f"{format_ranks(dead or missing)}{total} did not come {task}",
        [f"rank {r} is dead: its process is gone" for r in dead] or [f"rank {r} {late}" for r in missing],
        rule="every rank runs the same programs in the same order",
        remedy=FIND_FIRST_ERROR,
    )


FIND_FIRST_ERROR = (
    "look for the first error in the output of the ranks named (one that came to its end left the others alone); "
    "SHARDLIB_TIMEOUT=<seconds> waits longer"
)


def clone_connection(store: Any) -> Any:
    """Returns a connection to the same store on which no other thread waits; the store itself if it has no clone."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # torch 2.11 may lack it, and stores inside one process need none
        return store


def format_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks for a sentence: `ranks 0, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
