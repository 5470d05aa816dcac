"""Tensors that live in the host's memory: until somebody reads one, who brings it back."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

import torch

from shardlib.ops import offload
from shardlib.ops.collectives.transport.torch_wire import Handle

if TYPE_CHECKING:
    from shardlib.tensor.sharded_tensor import ShardedTensor

AWAY = "_away"  # the attribute that has the pieces then

LOCK = RLock()

Pieces = tuple[torch.Tensor, ...]


def brought(pieces: Pieces) -> Pieces:
    """These pieces of the host's memory on the devices."""
    return _each(pieces, offload.to_device)


def brought_back(x: ShardedTensor) -> Pieces | None:
    """The pieces of a tensor that was away, and lives on the devices from now on; None if it is not known where."""
    own = x.__dict__
    with LOCK:
        if "_locals" not in own and AWAY in own:
            memory = own.get("_memory")
            own["_locals"] = brought(own[AWAY]) if memory is None else memory.locals
            del own[AWAY]
        found: Pieces | None = own.get("_locals")
        return found


def at_rest(x: ShardedTensor) -> Pieces:
    """The pieces of a tensor, wherever it lives."""
    own = x.__dict__
    with LOCK:
        found: Pieces = own[AWAY] if "_locals" not in own and AWAY in own else x._locals
        return found


def share(x: ShardedTensor, out: ShardedTensor) -> None:
    """Give `out` the pieces of `x`, where these live."""
    with LOCK:
        pieces = at_rest(x)
        here, there = ("_locals", AWAY) if "_locals" in x.__dict__ else (AWAY, "_locals")
        out.__dict__[here] = pieces
        out.__dict__.pop(there, None)


def sent(x: ShardedTensor) -> Pieces:
    """The pieces of a tensor in the host's memory, where it lives from now on."""
    own = x.__dict__
    with LOCK:
        if "_locals" not in own and AWAY in own:
            found: Pieces = own[AWAY]
            return found
        pieces = _each(x._locals, offload.to_host)
        stow(x, pieces, x._origin)
        return pieces


def stow(x: ShardedTensor, pieces: Pieces, origin: int) -> bool:
    """Give a tensor other pieces, of this origin, in the host's memory; False where others show its memory, so that it
    has to be on the devices."""
    own = x.__dict__
    with LOCK:
        if (memory := own.get("_memory")) is not None:
            members = (member() for member in memory.members)
            if own["_path"] or any(
                y is not x and y.__dict__.get("_memory") is memory for y in members if y is not None
            ):
                return False
            del own["_memory"], own["_path"]
        own[AWAY], x._origin = pieces, origin
        own.pop("_locals", None)
        return True


def _each(pieces: Pieces, move: Callable[[torch.Tensor], Handle[torch.Tensor]]) -> Pieces:
    """Move pieces; one that several devices have, once."""
    flying = {id(x): move(x) for x in pieces}
    there = {key: handle.finish() for key, handle in flying.items()}
    return tuple(there[id(x)] for x in pieces)
