"""Who holds the memory of pieces: what nobody else refers to may be written over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import gt

import torch

from shardlib.core.torch_private import memory_of, memory_uses, tensor_uses

Every = Sequence[tuple[torch.Tensor, ...]]  # the pieces of several tensors
Counts = tuple[int, ...]


def counts_alone() -> Counts:
    """The counts of a piece that nobody else holds, in a tuple that only one other holds."""
    return _counted([(torch.zeros(1) + 1,)], 0, 0)


def is_sole(pieces: Every, i: int, firsts: Iterable[tuple[int, int]], holders: int, base: Counts) -> bool:
    """Whether only `holders` of the i-th tuple, and nothing beside it, refer to the memory of its pieces.

    `firsts` are the devices that hold different pieces, each with the number of devices that hold it; `base` is what
    `counts_alone` says.
    """
    whole, piece, *below = base
    for d, n in firsts:
        if any(map(gt, _counted(pieces, i, d), (whole + holders - 1, piece + n - 1, *below))):
            return False
    return True


def _counted(pieces: Every, i: int, d: int) -> Counts:
    """How many refer to a tuple of pieces, to one of these, to its storage, and to both below Python; and whether other
    processes may.

    All that is counted is looked up in this frame: interpreters differ in how often a call refers to its arguments, and
    one differs from itself where `torch.compile` has been at work. So counts of this frame compare with each other.
    """
    x = pieces[i][d]
    storage = x.untyped_storage()
    sent = x.is_cpu and storage.is_shared()  # on GPUs it says so of all
    known = int(memory_uses(memory_of(storage))), int(tensor_uses(x)), int(sent)
    return sys.getrefcount(pieces[i]), sys.getrefcount(x), sys.getrefcount(storage), *known
