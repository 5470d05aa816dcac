"""Offloads tensors to the host's memory; reading a tensor brings it back to the devices."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

import torch

from shardlib.ops import offload
from shardlib.ops.collectives.transport.torch_wire import Handle

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor

OFFLOADED = "_away"  # the attribute with the shards in the host's memory

OFFLOAD_LOCK = RLock()

Shards = tuple[torch.Tensor, ...]


def copy_to_device(shards: Shards) -> Shards:
    return _move(shards, offload.to_device)


def restore_to_device(x: ShardedTensor) -> Shards | None:
    """Brings a tensor's shards back to the devices and returns them; None if another tensor wrote to its memory."""
    own = x.__dict__
    with OFFLOAD_LOCK:
        if "_locals" not in own and OFFLOADED in own:
            memory = own.get("_memory")
            own["_locals"] = copy_to_device(own[OFFLOADED]) if memory is None else memory.locals
            del own[OFFLOADED]
        shards: Shards | None = own.get("_locals")
        return shards


def stored_shards(x: ShardedTensor) -> Shards:
    """Returns the shards of a tensor, in the host's memory or on the devices."""
    own = x.__dict__
    with OFFLOAD_LOCK:
        shards: Shards = own[OFFLOADED] if "_locals" not in own and OFFLOADED in own else x._locals
        return shards


def share_shards(x: ShardedTensor, out: ShardedTensor) -> None:
    """Gives `out` the shards of `x`, offloaded or not."""
    with OFFLOAD_LOCK:
        shards = stored_shards(x)
        used, unused = ("_locals", OFFLOADED) if "_locals" in x.__dict__ else (OFFLOADED, "_locals")
        out.__dict__[used] = shards
        out.__dict__.pop(unused, None)


def move_to_host(x: ShardedTensor) -> Shards:
    """Offloads a tensor to the host's memory, and returns its shards there."""
    own = x.__dict__
    with OFFLOAD_LOCK:
        if "_locals" not in own and OFFLOADED in own:
            offloaded: Shards = own[OFFLOADED]
            return offloaded
        shards = _move(x._locals, offload.to_host)
        store_on_host(x, shards, x._origin)
        return shards


def store_on_host(x: ShardedTensor, shards: Shards, origin: int) -> bool:
    """Gives a tensor new shards in the host's memory; returns False if other tensors share its memory."""
    own = x.__dict__
    with OFFLOAD_LOCK:
        if (memory := own.get("_memory")) is not None:
            members = (member() for member in memory.members)
            if own["_path"] or any(
                y is not x and y.__dict__.get("_memory") is memory for y in members if y is not None
            ):
                return False
            del own["_memory"], own["_path"]
        own[OFFLOADED], x._origin = shards, origin
        own.pop("_locals", None)
        return True


def _move(shards: Shards, start: Callable[[torch.Tensor], Handle[torch.Tensor]]) -> Shards:
    """Moves each distinct shard once; all transfers overlap."""
    transfers = {id(x): start(x) for x in shards}
    moved = {key: transfer.finish() for key, transfer in transfers.items()}
    return tuple(moved[id(x)] for x in shards)
