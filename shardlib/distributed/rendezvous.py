"""Initializes `torch.distributed` from a launcher's environment, also after torchrun has started the ranks again.

torchrun keeps one store over all restarts. It still holds the keys of ranks that are gone, such as the addresses of
their sockets, which new ranks would take for those of each other. So the ranks of one start agree on a prefix of their
own for all keys.
"""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlib.core.errors import ShardingError
from shardlib.distributed.processes import describe_process, is_gone
from shardlib.distributed.store import Store, clone_connection, refuse_missing
from shardlib.distributed.watched import Watch

_NEWEST = "shardlib/start"  # the prefix of the newest start


def initialize(backend: str, timeout: timedelta) -> None:
    """Makes the default process group over the ranks that were started together.

    Raises `ShardingError` that names the ranks that are gone, or did not come within the timeout.
    """
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined] # public, in torch's documents
    except ValueError as error:  # the environment is not a launcher's
        raise ShardingError(
            "torch.distributed cannot be initialized",
            [str(error)],
            rule="RANK and WORLD_SIZE are set, so this process is taken for a rank",
            remedy="start it by torchrun, call torch.distributed.init_process_group(...) first, or unset them",
        ) from error
    prefix, processes = agree_on_prefix(store, rank, size, timeout.total_seconds())
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined] # the same

    def dead() -> list[int]:
        return [r for r, process in enumerate(processes) if r != rank and is_gone(process)]

    def init() -> None:
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)

    Watch(Store(rank, clone_connection(own)), "init", size, dead).run(init, "initialize torch.distributed")


def agree_on_prefix(store: Any, rank: int, size: int, seconds: float) -> tuple[str, list[str]]:
    """Returns a prefix that only ranks of this start use, and where the processes of all ranks are.

    Rank 0 draws the prefix, and lists the ranks that answered to it. A rank that reads the prefix of an earlier start
    finds itself in no list, and reads again.
    """
    mine = json.dumps([secrets.token_hex(8), describe_process()])
    view = Store(rank, store)
    if rank == 0:
        prefix = f"shardlib/{secrets.token_hex(8)}"
        store.set(_NEWEST, prefix)
        members = list(view.exchange(f"{prefix}/members", mine, range(size), seconds, "start").values())
        store.set(f"{prefix}/list", json.dumps(members))
        return prefix, [json.loads(member)[1] for member in members]
    end, pause, prefix = time.monotonic() + seconds, 0.01, ""
    while True:
        if (newest := view.find(_NEWEST)) != prefix:
            prefix = newest
            view.post(f"{prefix}/members", mine)
        members = json.loads(view.find(f"{prefix}/list") or "[]")
        if mine in members:
            return prefix, [json.loads(member)[1] for member in members]
        if time.monotonic() > end:
            refuse_missing([0], [], seconds, "to start")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
