"""The arguments of the CUDA collectives, as `cuda/collectives.h` has them: fields of 8 bytes.

A plan says what one collective moves between all ranks of a group. It is made once for some sizes; per call only the
addresses of this process' inputs and outputs are written into it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

MAX_RANKS, MAX_CTAS, COUNTERS, CONTROL_BYTES = 16, 256, 2, 128
FORMS = ("packets", "staged", "direct", "multicast")
OPS = ("all_gather", "all_to_all", "reduce_scatter")
REPORT = ("state", "op", "rank", "peer", "counter", "cta", "target", "seen")
WAITED_FOR = ("arrived", "done", "packet")
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_STEP, _CALL = 20, 24  # where, in a flag, what is called begins, and the number of the call

_word = ctypes.c_int64
_words = ctypes.c_int64 * MAX_RANKS


class Group(ctypes.Structure):
    """Who takes part, and through which memory."""

    _fields_ = [
        *((name, _word) for name in ("ranks", "rank", "present", "ctas", "threads", "limit_ns", "packet_words")),
        *((name, _word) for name in ("window", "chunk", "op", "multicast")),
        ("workspace", _words),
        ("report", _words),
    ]


_HEAD = [("group", Group), ("form", _word), ("input", _words), ("output", _words)]


class Plan(ctypes.Structure):
    """What all three have in common."""

    group: Group
    form: int
    input: ctypes.Array[ctypes.c_int64]
    output: ctypes.Array[ctypes.c_int64]

    words: torch.Tensor  # the plan as int64 words, which have the memory: what the torch ops take

    @classmethod
    def made(cls) -> Self:
        """A plan of zeros."""
        words = torch.zeros(ctypes.sizeof(cls) // 8, dtype=torch.int64)
        plan = cls.from_address(words.data_ptr())
        plan.words = words
        return plan


class AllGather(Plan):
    _fields_ = [*_HEAD, ("bytes_of", _words), ("place", _words)]


class AllToAll(Plan):
    _fields_ = [*_HEAD, ("sizes", _words * MAX_RANKS)]


class ReduceScatter(Plan):
    _fields_ = [*_HEAD, ("element", _word), ("segments", _word), ("count", _words)]


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a group's kernels are launched and how much memory it has; the same on all ranks. These figures are guesses:
    what was measured on a card is in `ops/tuning.py`.

    * `ctas`: of a large message, each of `threads`. Fewer leave more SMs to matmuls that run meanwhile.
    * `packet_bytes`: a message up to this size goes as packets.
    * `one_step_bytes`: of an all-reduce up to this size every rank sums all.
    * `window`: bytes that a rank stages at a time; its workspace has two of them.
    * `chunk`: bytes of a CTA's part between two flags.
    """

    ctas: int = 32
    threads: int = 512
    packet_bytes: int = 16 << 10
    one_step_bytes: int = 64 << 10
    window: int = 32 << 20
    chunk: int = 128 << 10


def workspace_bytes(ranks: int, tuning: Tuning) -> int:
    """Bytes of one rank's workspace: see `cuda/peers.cuh`.

    Example:
        >>> workspace_bytes(2, Tuning(packet_bytes=64, window=1024))
        68224
    """
    packets = 2 * ranks * (tuning.packet_bytes // 4)
    return CONTROL_BYTES + 8 * (COUNTERS * MAX_RANKS * MAX_CTAS + packets) + 2 * tuning.window


def all_gather(group: Group, form: str, sizes: Sequence[int]) -> AllGather:
    """Every rank's `sizes[i]` bytes to all ranks."""
    plan = AllGather.made()
    _begin(plan, group, form, "all_gather")
    plan.bytes_of[: len(sizes)] = sizes
    plan.place[: len(sizes)] = [0, *itertools.accumulate(sizes)][:-1]
    return plan


def all_to_all(group: Group, form: str, sizes: Sequence[Sequence[int]]) -> AllToAll:
    """`sizes[i][j]` bytes from rank i to rank j."""
    plan = AllToAll.made()
    _begin(plan, group, form, "all_to_all")
    for row, of_rank in zip(plan.sizes, sizes, strict=False):
        row[: len(of_rank)] = of_rank
    return plan


def reduce_scatter(group: Group, form: str, counts: Sequence[int], dtype: torch.dtype) -> ReduceScatter:
    """The sum over all ranks, `counts[i]` elements of it to rank i; of a single count, all to all of them."""
    plan = ReduceScatter.made()
    _begin(plan, group, form, "reduce_scatter")
    plan.element, plan.segments = ELEMENTS[dtype], len(counts)
    plan.count[: len(counts)] = counts
    return plan


def explain(report: Sequence[int], ranks: Sequence[int]) -> str:
    """What a kernel's report says, with the ranks' names in the world.

    Example:
        >>> print(explain([1, 0, 2, 3, 0, 5, flag(7, "all_gather", "staged", 2), 0], [8, 9, 10, 11]))
        all_gather: rank 10 gave up waiting for rank 11, which is gone, late, or runs other code
        (flag "arrived" of CTA 5: call 7 all_gather/staged step 2 was due, none seen)
    """
    said = dict(zip(REPORT, report, strict=True))
    counter, due, seen = WAITED_FOR[said["counter"]], said["target"], said["seen"]
    apart = counter != "packet" and seen >> _CALL == due >> _CALL and seen >> _STEP != due >> _STEP
    why = "is in another collective, or in another form of it" if apart else "is gone, late, or runs other code"
    told = (f"call {value}" if counter == "packet" else _told(value) for value in (due, seen))
    return (
        f"{OPS[said['op']]}: rank {ranks[said['rank']]} gave up waiting for rank {ranks[said['peer']]}, which {why}\n"
        f'(flag "{counter}" of CTA {said["cta"]}: {next(told)} was due, {next(told)} seen)'
    )


def flag(call: int, op: str, form: str, step: int) -> int:
    """What a flag holds: see `mark` in `cuda/peers.cuh`."""
    return call << _CALL | (OPS.index(op) * len(FORMS) + FORMS.index(form)) << _STEP | step


def _told(value: int) -> str:
    if value == 0:
        return "none"
    op, form = divmod(value >> _STEP & 15, len(FORMS))
    return f"call {value >> _CALL} {OPS[op]}/{FORMS[form]} step {value & (1 << _STEP) - 1}"


def _begin(plan: Plan, group: Group, form: str, op: str) -> None:
    ctypes.memmove(ctypes.addressof(plan), ctypes.addressof(group), ctypes.sizeof(Group))
    plan.group.op = OPS.index(op)
    plan.form = FORMS.index(form)
