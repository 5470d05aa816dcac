"""Groups of ranks: which process group a collective over some mesh axes runs on, and where this rank stands in it.

The members of a group are ordered by their joint coordinate along the axes, major first; the ranks of a process group
are ordered by rank. Both agree unless a minor mesh axis comes first, as `(tensor, data)` on `Mesh(data=2, tensor=4)`:
then one process group serves both orders, and `torch_wire.py` puts the messages in order.

A group of CPU tensors whose members are on one machine also has a channel in shared memory. Its members decide that
together, when the groups are made: all of them use it, or none. A group of GPUs has peers when SHARDLIB_OPS asks for
shardlib's kernels by then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.distributed import torch_waits, world
from shardlib.distributed import turns as order
from shardlib.distributed.comm_counting import without_counting
from shardlib.distributed.consensus import raise_lost_ranks
from shardlib.distributed.turns import Turn
from shardlib.ops.backend_choice import unavailable
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.cuda_open import open_group
from shardlib.ops.collectives.transport.cuda_peers import Peers, unserved
from shardlib.ops.collectives.transport.shm_channel import Channel
from shardlib.ops.collectives.transport.shm_world import Session
from shardlib.sharding.mesh.axis import Axis, group_size

if TYPE_CHECKING:
    from shardlib.sharding.mesh.mesh import Mesh

T = TypeVar("T")

Cosets = tuple[tuple[int, ...], ...]  # all groups over the same axes; together they are all ranks, each once

# Process groups live and die with the default one, so that one is part of every key.
_handles: dict[tuple[object, Mesh, tuple[Axis, ...]], GroupHandle] = {}
_process_groups: dict[tuple[object, str, Cosets], dist.ProcessGroup] = {}
_sessions: dict[tuple[object, str], Session] = {}
_peers: dict[tuple[object, Cosets], Peers] = {}  # these cosets are in group order
_lock = Lock()


@dataclass(frozen=True)
class GroupHandle:
    """One group of ranks, as one member sees it.

    * `ranks`: the members, in group order.
    * `pg`: their process group; None when this rank is alone.
    * `position`: this rank's index in `ranks`.
    * `backend`: "gloo" or "nccl".
    * `by_rank`: group positions in the process group's order; None when the orders agree.
    * `channel`: the members' channel in shared memory, where they have one: they meet in it.
    * `why`: why no tensors are exchanged in it.
    * `peers`: the kernels' way to the other GPUs; None where SHARDLIB_OPS did not ask for it.
    """

    ranks: tuple[int, ...]
    pg: dist.ProcessGroup | None
    position: int
    backend: str
    by_rank: tuple[int, ...] | None = None
    name: str = ""
    channel: Channel | None = None
    why: str = ""
    peers: Peers | None = None

    @property
    def shm(self) -> Channel | None:
        """The channel of those who exchange tensors in shared memory."""
        return None if self.why else self.channel

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def may_use_gloo(self) -> bool:
        """Whether messages go over Gloo, or some may, since SHARDLIB_OPS or a rare dtype keeps them from the memory."""
        return self.backend == "gloo" and (self.shm is None or bool(os.environ.get("SHARDLIB_OPS")))

    @property
    def transport(self) -> str:
        """What `choose` of a collective is told: "shm", "cuda", "gloo", "nccl", or "none" for a single member."""
        return "shm" if self.shm is not None else "cuda" if self.peers is not None else self.backend


def group_for(mesh: Mesh, axes: tuple[Axis, ...]) -> GroupHandle:
    """The group of this rank over `axes` (whole mesh axes or parts of them), from a cache.

    The first call for some axes is a collective over all ranks: all must make it, in one order (see `prepare`).
    """
    key = (dist.group.WORLD, mesh, axes)
    handle = _handles.get(key)
    if handle is None:
        prepare(mesh, [axes])
        handle = _handles[dist.group.WORLD, mesh, axes]
    return handle


def prepare(mesh: Mesh, groups: Iterable[tuple[Axis, ...]]) -> None:
    """Make the groups of a program up front; every rank calls it with the same axes in the same order.

    Raises `ShardingError` when the mesh has no ranks, or, on all ranks, when SHARDLIB_OPS asks for shardlib's kernels
    and some members of a group cannot run them.
    """
    if mesh.kind != "distributed":
        raise ShardingError(
            f"{mesh} has no process groups",
            [f"it is {mesh.kind}: its devices are not ranks of torch.distributed"],
            remedy=f"run the script with `torchrun --nproc-per-node {mesh.size}`",
        )
    device_mesh = mesh.device_mesh  # also starts torch.distributed where nothing has yet
    coords = mesh.all_coords()
    with _lock:
        session = _session(mesh) if mesh.size > 1 else None
        for axes in groups:
            key = (dist.group.WORLD, mesh, axes)
            if key not in _handles:
                ranks = tuple(mesh.group_ranks(axes, coords[mesh.rank]))
                cosets = tuple(sorted({tuple(sorted(mesh.group_ranks(axes, c))) for c in coords}))
                whole = axes[0].name if len(axes) == 1 and axes[0].whole else None
                known = device_mesh.get_group(whole) if whole and len(ranks) > 1 else None
                pg = _process_group(mesh.device, cosets, mesh.rank, known)
                ordered = tuple(sorted({tuple(mesh.group_ranks(axes, c)) for c in coords}))
                handle = _handle(ranks, mesh.rank, pg, session, ordered)
                if _asks_for_peers(mesh, len(ranks)):
                    handle = replace(handle, peers=_peers_of(mesh, handle, ordered))
                _handles[key] = handle


def transport(mesh: Mesh, axes: tuple[Axis, ...]) -> tuple[str, str]:
    """What `choose` of a collective over `axes` is told of its group, and why the group shares no memory.

    Nothing is communicated: what the ranks have not settled yet is "open".
    """
    if (handle := _handles.get((dist.group.WORLD, mesh, axes))) is not None:
        return handle.transport, handle.why
    if group_size(axes) == 1:
        return "none", ""
    if mesh.device == "cpu":
        return "open", ""
    size = group_size(axes)
    return ("cuda" if _asks_for_peers(mesh, size) else "nccl"), ""  # peers, or an error when the groups are made


def _process_group(device: str, cosets: Cosets, rank: int, known: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if len(cosets[0]) == 1:
        return None
    world_group = dist.group.WORLD
    key = (world_group, device, cosets)
    if known is not None:
        _process_groups[key] = known
    elif len(cosets) == 1:
        return world_group
    elif key not in _process_groups:
        # Every rank makes every group, those of others too: that is what keeps the ranks' group names the same.
        made = torch_waits.run_watched(
            lambda: [dist.new_group(list(coset), timeout=world.timeout()) for coset in cosets],
            f"make groups of the ranks {', '.join(map(str, cosets))}",
        )
        _process_groups[key] = next(pg for pg, coset in zip(made, cosets, strict=True) if rank in coset)
    return _process_groups[key]


def _session(mesh: Mesh) -> Session:
    """What the ranks of this world share; made at the first call, which all ranks make."""
    key = (dist.group.WORLD, mesh.device)
    if key not in _sessions:
        _forget_worlds()
        _sessions[key] = Session(mesh.rank, mesh.size, mesh.device)
    return _sessions[key]


def _forget_worlds() -> None:
    """Drop what belongs to worlds that were destroyed."""
    for old in [k for k in _sessions if k[0] is not dist.group.WORLD]:
        _sessions.pop(old).close()
    caches: list[dict[Any, Any]] = [_handles, _process_groups, _peers]
    for cache in caches:
        for key in [k for k in cache if k[0] is not dist.group.WORLD]:
            del cache[key]


def _asks_for_peers(mesh: Mesh, size: int) -> bool:
    return mesh.device != "cpu" and size > 1 and not unserved("", torch.uint8, "", size) and bool(cuda_wire.asked())


def _peers_of(mesh: Mesh, handle: GroupHandle, cosets: Cosets) -> Peers:
    """This group's peers. All ranks of the world come here together, so that all go on or none does."""
    key = (dist.group.WORLD, cosets)
    if key not in _peers:
        opened = open_group(handle, torch.device(mesh.device, torch.cuda.current_device()))
        now = order.current()
        store, seconds = now.store(), world.timeout().total_seconds()
        room, now.meetings = f"{now.room}/peers/{now.meetings}", now.meetings + 1
        fault = opened if isinstance(opened, str) else ""
        said = store.exchange(room, fault, range(mesh.size), seconds, "make groups of ranks", now.watcher())
        if faults := [text for text in said.values() if text]:
            raise unavailable(cuda_wire.asked(), "cuda", faults[0])
        assert isinstance(opened, Peers)
        _peers[key] = opened
    return _peers[key]


def _handle(
    ranks: tuple[int, ...], rank: int, pg: dist.ProcessGroup | None, session: Session | None, cosets: Cosets
) -> GroupHandle:
    order = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    by_rank = None if order == tuple(range(len(ranks))) else order
    backend = str(dist.get_backend(pg)) if pg is not None else "none"
    name = str(pg.group_name) if pg is not None else ""
    channel: Channel | None = None
    why = ""
    if session is not None and pg is not None:
        channel_or_why = session.channel(cosets)
        if isinstance(channel_or_why, str):
            why = channel_or_why
        else:
            channel, why = channel_or_why, session.unused
            channel.process_groups.append(pg)
    return GroupHandle(ranks, pg, ranks.index(rank), backend, by_rank, name, channel, why)


def together(mesh: Mesh, turn: Turn, axes: tuple[Axis, ...], call: Callable[[GroupHandle], T]) -> T:
    """The result of `call`, one collective of the group over these axes that is a turn of its own."""
    mesh.device_mesh  # noqa: B018 - starts torch.distributed where nothing has yet
    with without_counting(), turn as order:
        try:
            group = group_for(mesh, axes)
            if group.may_use_gloo:
                order.meet([group])
            return call(group)
        except CollectiveError as error:
            raise_lost_ranks(mesh, error)
