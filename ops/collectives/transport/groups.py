"""Groups of ranks: the process group of a collective over some mesh axes, and this rank's position in it.

The members of a group are ordered by their joint coordinate along the axes, major first; the ranks of a process group
are ordered by rank. The orders differ if a minor mesh axis comes first: `(tensor, data)` on `Mesh(data=2, tensor=4)`.
Then one process group serves both orders, and `torch_wire.py` reorders the messages.

A group of CPU tensors whose members are on one machine also has a channel in shared memory. The members decide it
together when the group is made: all of them use the channel, or none. A group of GPUs has peers if SHARDLIB_OPS asks
for shardlib's kernels when the group is made.

If the mesh has a machine model, groups of CPU tensors that span machines choose their collectives' form by it
(`forms.py`). Groups with as many members on each machine also have two levels: groups inside machines, and across.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.distributed import torch_waits, turns, world
from shardlib.distributed.comm_counting import without_counting
from shardlib.distributed.consensus import raise_lost_ranks
from shardlib.distributed.turns import Turn
from shardlib.ops.backend_choice import requested_backend, unavailable_error
from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.cuda_open import open_group
from shardlib.ops.collectives.transport.cuda_peers import Peers, find_kernel_fault
from shardlib.ops.collectives.transport.levels import Cosets, find_levels
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.ops.collectives.transport.shm_channel import Channel
from shardlib.ops.collectives.transport.shm_route import Pair, Route
from shardlib.ops.collectives.transport.shm_world import Session
from shardlib.sharding.mesh.axis import Axis, group_size
from shardlib.sharding.mesh.machine import Span

if TYPE_CHECKING:
    from shardlib.sharding.mesh.mesh import Mesh

T = TypeVar("T")

# Process groups live as long as the default one, which is therefore part of every key.
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
    * `channel`: the members' channel in shared memory, if they have one: they meet in it.
    * `why`: the reason why no tensors are exchanged in shared memory; empty if they are.
    * `peers`: runs the kernels of cuda/ between the members; None unless SHARDLIB_OPS asks for them.
    * `span`: how the members spread over machines, by the machine model; None if no form is chosen by it.
    * `levels`: this rank's groups inside its machine and across machines; None if machines have one member each.
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
    span: Span | None = None
    levels: tuple[GroupHandle, GroupHandle] | None = None

    @property
    def shm(self) -> Channel | None:
        """The channel, if tensors are exchanged in it."""
        return None if self.why else self.channel

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def may_use_gloo(self) -> bool:
        """True if messages may go over Gloo: there is no shared memory, or SHARDLIB_OPS may choose against it."""
        return self.backend == "gloo" and (self.shm is None or bool(os.environ.get("SHARDLIB_OPS")))

    @property
    def transport(self) -> str:
        """The transport of a `CollectiveRequest`: "shm", "cuda", "gloo", "nccl", or "none" for a single member."""
        return "shm" if self.shm is not None else "cuda" if self.peers is not None else self.backend

    def request(self, nbytes: int, even: bool, dtype: torch.dtype, kind: str = "") -> CollectiveRequest:
        """Returns the request for a message between the members."""
        return CollectiveRequest(nbytes, even, dtype, kind, self.transport, self.size, self.why, self.span)


def group_for(mesh: Mesh, axes: tuple[Axis, ...]) -> GroupHandle:
    """Returns the group of this rank over `axes` (whole mesh axes or parts of them), from a cache.

    The first call for some axes is a collective over all ranks: all must call it, in the same order (see `prepare`).
    """
    key = (dist.group.WORLD, mesh, axes)
    handle = _handles.get(key)
    if handle is None:
        prepare(mesh, [axes])
        handle = _handles[dist.group.WORLD, mesh, axes]
    return handle


def prepare(mesh: Mesh, groups: Iterable[tuple[Axis, ...]]) -> None:
    """Makes the groups of a program up front. Every rank calls it with the same axes in the same order.

    Raises `ShardingError` if the mesh has no ranks. Raises it on all ranks if SHARDLIB_OPS asks for shardlib's kernels
    and some member of a group cannot run them.
    """
    if mesh.kind != "distributed":
        raise ShardingError(
            f"{mesh} has no process groups",
            [f"it is {mesh.kind}: its devices are not ranks of torch.distributed"],
            remedy=f"run the script with `torchrun --nproc-per-node {mesh.size}`",
        )
    device_mesh = mesh.device_mesh  # also starts torch.distributed if nothing has yet
    coords = [mesh.all_axes_coords(rank) for rank in range(mesh.size)]
    with _lock:
        session = _session(mesh) if mesh.size > 1 else None
        for axes in groups:
            key = (dist.group.WORLD, mesh, axes)
            if key not in _handles:
                ordered = tuple(sorted({tuple(mesh.group_ranks(axes, c)) for c in coords}))
                whole = axes[0].name if len(axes) == 1 and axes[0].whole else None
                axis_group = device_mesh.get_group(whole) if whole and len(ordered[0]) > 1 else None
                handle = _make_handle(mesh, session, ordered, axis_group)
                if _needs_peers(mesh, handle.size):
                    handle = replace(handle, peers=_open_peers(mesh, handle, ordered))
                if session is not None and (span := predict_span(mesh, axes)) is not None:
                    handle = _split_levels(mesh, session, handle, ordered, span)
                _handles[key] = handle


def predict_transport(mesh: Mesh, axes: tuple[Axis, ...]) -> tuple[str, str]:
    """Returns the transport of the group over `axes`, and the reason why there is no shared memory.

    Communicates nothing: the transport is "open" until the ranks have made the group.
    """
    if (handle := _handles.get((dist.group.WORLD, mesh, axes))) is not None:
        return handle.transport, handle.why
    if group_size(axes) == 1:
        return "none", ""
    if mesh.device == "cpu":
        return "open", ""
    size = group_size(axes)
    return ("cuda" if _needs_peers(mesh, size) else "nccl"), ""  # peers, or an error when the groups are made


def predict_span(mesh: Mesh, axes: tuple[Axis, ...]) -> Span | None:
    """Returns how groups over `axes` of CPU tensors spread over machines; None without a model, or on one machine.

    Where the ranks have made the group, that is how its members do spread.
    """
    if (handle := _handles.get((dist.group.WORLD, mesh, axes))) is not None:
        return handle.span
    if mesh.machine is None or mesh.device != "cpu":
        return None
    span = mesh.machine.span(axes, mesh.shape)
    return span if span.far > 1 and span.inner != span.outer else None  # equal links: the model knows no machines


def _split_levels(mesh: Mesh, session: Session, handle: GroupHandle, cosets: Cosets, span: Span) -> GroupHandle:
    """Adds the span and the levels to a group, if its members spread over machines as the machine model says.

    All ranks of the world call it together, with the groups of all ranks.
    """
    if session.faults:
        return handle
    split = find_levels(cosets, session.machines, span.near)
    if isinstance(split, str):
        return replace(handle, why=f"{handle.why}; {split}" if handle.why else "")
    levels = (_make_handle(mesh, session, split[0]), _make_handle(mesh, session, split[1])) if span.near > 1 else None
    return replace(handle, span=span, levels=levels)


def _process_group(
    device: str, cosets: Cosets, rank: int, axis_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Returns the process group of this rank; `axis_group` is the device mesh's own, if the group is a whole axis."""
    if len(cosets[0]) == 1:
        return None
    world_group = dist.group.WORLD
    key = (world_group, device, cosets)
    if axis_group is not None:
        _process_groups[key] = axis_group
    elif len(cosets) == 1:
        return world_group
    elif key not in _process_groups:
        # Every rank makes every group, so that the group names are the same on all ranks.
        groups = torch_waits.run_watched(
            lambda: [dist.new_group(list(coset), timeout=world.timeout()) for coset in cosets],
            f"make groups of the ranks {', '.join(map(str, cosets))}",
        )
        _process_groups[key] = next(pg for pg, coset in zip(groups, cosets, strict=True) if rank in coset)
    return _process_groups[key]


def _session(mesh: Mesh) -> Session:
    """Returns the session of this world. The first call makes it, together with all ranks."""
    key = (dist.group.WORLD, mesh.device)
    if key not in _sessions:
        _forget_worlds()
        _sessions[key] = Session(mesh.rank, mesh.size, mesh.device)
    return _sessions[key]


def open_routes(mesh: Mesh, pairs: Sequence[Pair]) -> dict[Pair, Route]:
    """Opens routes in shared memory for messages between these pairs of ranks; returns those to and from this rank.

    Every rank calls it with the same pairs. Both ranks of a pair have the route, or neither. Raises `ShardingError` on
    all ranks if SHARDLIB_OPS asks for shared memory and some pair has no route.
    """
    requested = requested_backend("send")
    if requested == "torch" or not pairs:
        return {}
    with _lock:
        session = _session(mesh)
        session.open_routes(pairs)
    if requested is not None and (fault := next(filter(None, map(session.route_faults.__getitem__, pairs)), "")):
        raise unavailable_error("send", requested, fault)
    return {pair: session.routes[pair] for pair in pairs if pair in session.routes}


def advance() -> bool:
    """Moves running collectives in shared memory on without waiting; returns whether some still run."""
    sessions = [session for (world_group, _), session in _sessions.items() if world_group is dist.group.WORLD]
    return sum(session.advance() for session in sessions) > 0


def _forget_worlds() -> None:
    """Drops everything that belongs to worlds that were destroyed."""
    for key in [k for k in _sessions if k[0] is not dist.group.WORLD]:
        _sessions.pop(key).close()
    caches: list[dict[Any, Any]] = [_handles, _process_groups, _peers]
    for cache in caches:
        for key in [k for k in cache if k[0] is not dist.group.WORLD]:
            del cache[key]


def _needs_peers(mesh: Mesh, size: int) -> bool:
    return (
        mesh.device != "cpu"
        and size > 1
        and not find_kernel_fault("", torch.uint8, "", size)
        and bool(cuda_wire.requested_op())
    )


def _open_peers(mesh: Mesh, handle: GroupHandle, cosets: Cosets) -> Peers:
    """Opens this group's peers. All ranks of the world call it together and exchange errors: all go on, or none."""
    key = (dist.group.WORLD, cosets)
    if key not in _peers:
        opened = open_group(handle, torch.device(mesh.device, torch.cuda.current_device()))
        order = turns.current()
        store, seconds = order.store(), world.timeout().total_seconds()
        room, order.meetings = f"{order.room}/peers/{order.meetings}", order.meetings + 1
        fault = opened if isinstance(opened, str) else ""
        faults = store.exchange(room, fault, range(mesh.size), seconds, "make groups of ranks", order.watcher())
        if first := next(filter(None, faults.values()), ""):
            raise unavailable_error(cuda_wire.requested_op(), "cuda", first)
        assert isinstance(opened, Peers)
        _peers[key] = opened
    return _peers[key]


def _make_handle(
    mesh: Mesh, session: Session | None, cosets: Cosets, axis_group: dist.ProcessGroup | None = None
) -> GroupHandle:
    """Makes this rank's group among `cosets`, which are in group order; all ranks of the world call it together."""
    ranks = next(coset for coset in cosets if mesh.rank in coset)
    pg = _process_group(mesh.device, tuple(sorted(tuple(sorted(coset)) for coset in cosets)), mesh.rank, axis_group)
    members = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
    by_rank = None if members == tuple(range(len(ranks))) else members
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
    return GroupHandle(ranks, pg, ranks.index(mesh.rank), backend, by_rank, name, channel, why)


def run_in_turn(mesh: Mesh, turn: Turn, axes: tuple[Axis, ...], call: Callable[[GroupHandle], T]) -> T:
    """Runs `call`, one collective of the group over `axes`, as a turn of its own, and returns its result."""
    mesh.device_mesh  # noqa: B018 - starts torch.distributed if nothing has yet
    with without_counting(), turn as order:
        try:
            group = group_for(mesh, axes)
            if group.may_use_gloo:
                order.meet([group])
            return call(group)
        except CollectiveError as error:
            raise_lost_ranks(mesh, error)
