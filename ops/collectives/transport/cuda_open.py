"""Opens `Peers` for the members of a process group: GPUs of one machine, over torch's symmetric memory."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardlib.build.build_recipe import Missing
from shardlib.core.torch_internals.torch_private import SYMMETRIC_MEMORY, default_store, late
from shardlib.distributed import world
from shardlib.distributed.store import Store
from shardlib.ops import native_libs
from shardlib.ops.collectives.transport.cuda_args import workspace_bytes
from shardlib.ops.collectives.transport.cuda_peers import (
    Peers,
    find_kernel_fault,
    launch,
    load_tuning,
    make_group,
    make_report,
)

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle

_opened = 0  # groups that this process has opened: the same number on all ranks


def open_group(handle: GroupHandle, device: torch.device) -> Peers | str:
    """Opens the peers of a process group whose GPUs reach each other's memory; else returns the reason.

    All members call it together: all get peers, or all get a reason. Memory: `workspace_bytes` on every member.
    """
    symmetric_memory = late(SYMMETRIC_MEMORY)

    global _opened
    _opened += 1
    tuning = load_tuning()
    me, seconds = handle.ranks[handle.position], world.timeout().total_seconds()
    store, room = Store(me, default_store()), f"shardlib/cuda/{_opened}/{handle.name}"

    def agree(step: str, fault: str) -> dict[int, str]:
        return store.exchange(f"{room}/{step}", fault, handle.ranks, seconds, "share GPU memory")

    hellos = agree("hello", _find_fault(handle, device) or f"@{_machine()}/{torch.cuda.current_device()}")
    if faults := [f"rank {rank}: {text}" for rank, text in hellos.items() if not text.startswith("@")]:
        return faults[0]
    machines = {rank: text.rpartition("/")[0] for rank, text in hellos.items()}
    if other := [rank for rank in handle.ranks if machines[rank] != machines[handle.ranks[0]]]:
        return f"ranks {handle.ranks[0]} and {other[0]} are on different machines"
    tunings = agree("tuning", repr(tuning))
    if other := [rank for rank in handle.ranks if tunings[rank] != tunings[handle.ranks[0]]]:
        return f"ranks {handle.ranks[0]} and {other[0]} have cards that are tuned otherwise"
    assert handle.pg is not None
    order = handle.by_rank or range(handle.size)
    addresses, multicast, fault = [0] * handle.size, 0, ""
    try:
        space = symmetric_memory.empty(workspace_bytes(handle.size, tuning), dtype=torch.uint8, device=device)
        space.zero_()
        torch.cuda.synchronize(device)
        shared = symmetric_memory.rendezvous(space, handle.pg)
        for member, address in zip(order, shared.buffer_ptrs, strict=True):
            addresses[member] = address
        multicast = shared.multicast_ptr
    except RuntimeError as error:
        fault = str(error).splitlines()[0]
    if faults := [f"rank {rank}: {text}" for rank, text in agree("memory", fault).items() if text]:
        return f"torch shares no GPU memory ({faults[0]})"
    report = make_report(1, device)
    present = range(handle.position, handle.position + 1)
    group = make_group(handle.size, present, tuning, seconds, addresses, report)
    group.multicast = multicast
    peers = Peers(group, handle.ranks, tuning, report, launch)
    peers.memory.append(space)
    return peers


def _find_fault(handle: GroupHandle, device: torch.device) -> str:
    ops = native_libs.cuda()
    if isinstance(ops, Missing):
        return str(ops)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than the kernels' sm_80"
    return find_kernel_fault("", torch.float32, "", handle.size)


def _machine() -> str:
    """Returns a text that is equal in processes on one machine, under one kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
