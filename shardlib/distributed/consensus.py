"""Raises an error that names the ranks that disagree or are gone, within a timeout, instead of a hang.

`compare_programs` compares the ranks' programs before the first run. `raise_lost_ranks` finds the lost ranks after a
collective failed. Both use the store of `torch.distributed`, which works when collectives do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.distributed.store import FIND_FIRST_ERROR, format_ranks, refuse_missing
from shardlib.distributed.turn_errors import KEEP
from shardlib.distributed.turns import Order, Turn, current

if TYPE_CHECKING:
    from shardlib.sharding.mesh.mesh import Mesh

_REPLY_SECONDS = 10.0  # for live peers that are about to answer
_SAME = "every rank runs the same programs in the same order"


def compare_programs(mesh: Mesh, digest: str, text: str, timeout: float | None = None) -> None:
    """Waits until every rank is about to run the program `digest`; `text` has its name in the first line.

    Raises `ShardingError` with the ranks that did not arrive within `timeout` seconds (None: SHARDLIB_TIMEOUT), or the
    ranks whose program differs, with the first different line.
    """
    if mesh.kind != "distributed" or mesh.size == 1:
        return
    name, everyone = text.partition("\n")[0], range(mesh.size)
    with Turn(f"the first call of {name}", digest) as order:
        _compare(order, digest, text, name, everyone, timeout)


def _compare(order: Order, digest: str, text: str, name: str, everyone: Sequence[int], timeout: float | None) -> None:
    seconds = world.timeout().total_seconds() if timeout is None else timeout
    store, room, dead = order.store(), f"{order.room}/agree/{order.meetings}", order.watcher()
    order.meetings += 1
    store.post(f"{room}/digest", digest)
    if missing := store.wait(f"{room}/digest", everyone, seconds, until=dead):
        refuse_missing(missing, dead(missing), seconds, f"to run {name}", f" of {len(everyone)}")
    digests = store.read(f"{room}/digest", everyone)
    if len(set(digests.values())) > 1:
        # Texts may be long, so ranks send them only in case of an error.
        store.post(f"{room}/line", order.texts.read(order.recent[order.turn % KEEP][2]))
        store.post(f"{room}/what", zlib.compress(text.encode()))
        silent = store.wait(f"{room}/what", everyone, _REPLY_SECONDS)
        sent = store.read(f"{room}/what", [r for r in everyone if r not in silent])
        lines = {r: line.decode() for r, line in store.read(f"{room}/line", sorted(sent)).items()}
        order.forget()  # all ranks raise this error, and can continue together
        raise ShardingError(
            "the ranks are about to run different programs",
            _differences(digests, {r: zlib.decompress(data).decode() for r, data in sent.items()})
            + ([f"rank {r} calls it at {line}" for r, line in lines.items()] if len(set(lines.values())) > 1 else []),
            rule=_SAME,
            remedy="start all ranks from the same code, configuration and input shapes; let nothing depend on the rank",
        )
    order.dead(ask=True)  # reads where their processes are while the store is available


def raise_lost_ranks(mesh: Mesh, error: BaseException, timeout: float = 10.0) -> NoReturn:
    """Raises, from the `error` of a failed collective, a `ShardingError` that names the ranks that are gone.

    Ranks that see the failure sign in. If a rank that did not ran on this machine, its process is checked; otherwise it
    is reported as silent after `timeout` seconds.
    """
    order = current()
    store, room, everyone = order.store(error), f"{order.room}/alive/{order.meetings}", range(mesh.size)
    store.post(room, b"")
    watch = order.watcher()
    order.look(error)
    silent = store.wait(room, everyone, timeout, until=lambda missing: watch(missing) or store.verdict(room))
    # Ranks exit after their errors. So the first verdict is right, and later ranks adopt it.
    if dead := order.dead(everyone):
        offenders = [f"rank {r} is dead: its process is gone" for r in dead]
    elif not getattr(error, "is_late", True):
        offenders = [str(error)]
    elif silent:
        offenders = [f"rank {r} gave no sign of life within {timeout:g} s" for r in silent]
    elif getattr(error, "culprit", None) is not None:
        offenders = [f"{error}; it is alive: it was slower than that, or it waits in another collective"]
    else:
        offenders = ["all ranks are alive: they waited in different collectives, or one was slower than the timeout"]
    offenders = store.verdict(room, "\n".join(offenders)).split("\n")
    order.give_up("\n".join([f"a collective failed on rank {mesh.rank}:", *(f"  * {o}" for o in offenders)]))
    raise ShardingError(
        f"a collective failed on rank {mesh.rank} of {mesh.size}",
        offenders,
        rule="every rank of the mesh takes part in every step",
        remedy=FIND_FIRST_ERROR,
    ) from error


def _differences(digests: Mapping[int, bytes], texts: Mapping[int, str]) -> list[str]:
    """Describes every program but the most common one, which counts as correct."""
    holders: dict[bytes, list[int]] = {}
    for rank, digest in digests.items():
        holders.setdefault(digest, []).append(rank)
    right, *others = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    return [_difference(right, other, digests, texts) for other in others]


def _difference(right: list[int], other: list[int], digests: Mapping[int, bytes], texts: Mapping[int, str]) -> str:
    def program(ranks: list[int]) -> tuple[str, list[str]]:
        name, *lines = next((texts[r] for r in ranks if r in texts), "a program that it did not show").split("\n")
        verb = "runs" if len(ranks) == 1 else "run"
        return f"{format_ranks(ranks)} {verb} {name} [{digests[ranks[0]].decode()[:8]}]", lines

    (one, old), (two, new) = program(other), program(right)
    for number, (a, b) in enumerate(zip(old, new, strict=False), 1):
        if a != b:
            return f"{one}, {two}; line {number} is {a.strip()!r} on the first and {b.strip()!r} on the second"
    if len(old) != len(new):
        return f"{one}, {two}; the first has {len(old)} lines, the second {len(new)}"
    return f"{one}, {two}"
