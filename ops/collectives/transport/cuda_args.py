"""The arguments of the CUDA collectives, as `cuda/collectives.h` declares them: fields of 8 bytes.

A plan holds what one collective moves between all ranks of a group. It is made once per sizes; a call only writes the
addresses of this process' inputs and outputs into it.
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

_STEP, _CALL = 20, 24  # the lowest bits of op and form, and of the call's number, in a flag

_word = ctypes.c_int64
_words = ctypes.c_int64 * MAX_RANKS


class Group(ctypes.Structure):
    """The ranks of a group, and the memory through which they communicate."""

    _fields_ = [
        *((name, _word) for name in ("ranks", "rank", "present", "ctas", "threads", "limit_ns", "packet_words")),
        *((name, _word) for name in ("window", "chunk", "op", "multicast")),
        ("workspace", _words),
        ("report", _words),
    ]


_HEAD = [("group", Group), ("form", _word), ("input", _words), ("output", _words)]


class Plan(ctypes.Structure):
    """The fields that all three plans share."""

    group: Group
    form: int
    input: ctypes.Array[ctypes.c_int64]
    output: ctypes.Array[ctypes.c_int64]

    words: torch.Tensor  # owns the plan's memory, as int64; the torch ops take it

    @classmethod
    def zeros(cls) -> Self:
        """Makes a plan of zeros."""
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
    """Launch parameters and memory of a group's kernels; equal on all ranks.

    The defaults are guesses; `ops/measured.json` holds what was measured, by card.

    * `ctas`: CTAs for a large message, each of `threads`. Fewer leave more SMs to concurrent matmuls.
    * `packet_bytes`: a message up to this size is sent as packets.
    * `one_step_bytes`: in an all-reduce up to this size, every rank sums all of the message.
    * `window`: bytes that a rank stages at a time; its workspace holds two windows.
    * `chunk`: bytes of a CTA's part between two flags.
    """

    ctas: int = 32
    threads: int = 512
    packet_bytes: int = 16 << 10
    one_step_bytes: int = 64 << 10
    window: int = 32 << 20
    chunk: int = 128 << 10


def workspace_bytes(ranks: int, tuning: Tuning) -> int:
    """Returns the bytes of one rank's workspace: see `cuda/peers.cuh`."""
    packets = 2 * ranks * (tuning.packet_bytes // 4)
    return CONTROL_BYTES + 8 * (COUNTERS * MAX_RANKS * MAX_CTAS + packets) + 2 * tuning.window


def all_gather(group: Group, form: str, sizes: Sequence[int]) -> AllGather:
    """Plans to send `sizes[i]` bytes of rank i to all ranks."""
    plan = AllGather.zeros()
    _fill_head(plan, group, form, "all_gather")
    plan.bytes_of[: len(sizes)] = sizes
    plan.place[: len(sizes)] = [0, *itertools.accumulate(sizes)][:-1]
    return plan


def all_to_all(group: Group, form: str, sizes: Sequence[Sequence[int]]) -> AllToAll:
    """Plans to send `sizes[i][j]` bytes from rank i to rank j."""
    plan = AllToAll.zeros()
    _fill_head(plan, group, form, "all_to_all")
    for row, sent in zip(plan.sizes, sizes, strict=False):
        row[: len(sent)] = sent
    return plan


def reduce_scatter(group: Group, form: str, counts: Sequence[int], dtype: torch.dtype) -> ReduceScatter:
    """Plans to sum over all ranks and to give `counts[i]` elements to rank i; a single count is for all ranks."""
    plan = ReduceScatter.zeros()
    _fill_head(plan, group, form, "reduce_scatter")
    plan.element, plan.segments = ELEMENTS[dtype], len(counts)
    plan.count[: len(counts)] = counts
    return plan


def explain_report(report: Sequence[int], ranks: Sequence[int]) -> str:
    """Formats a kernel's report as an error text; `ranks` are the members' global ranks."""
    field = dict(zip(REPORT, report, strict=True))
    rank, peer = ranks[field["rank"]], ranks[field["peer"]]
    counter, due, seen = WAITED_FOR[field["counter"]], field["target"], field["seen"]
    differs = counter != "packet" and seen >> _CALL == due >> _CALL and seen >> _STEP != due >> _STEP
    why = "is in another collective, or in another form of it" if differs else "is gone, late, or runs other code"
    due_text, seen_text = (f"call {value}" if counter == "packet" else _format_flag(value) for value in (due, seen))
    return (
        f"{OPS[field['op']]}: rank {rank} gave up waiting for rank {peer}, which {why}\n"
        f'(flag "{counter}" of CTA {field["cta"]}: {due_text} was due, {seen_text} seen)'
    )


def _format_flag(value: int) -> str:
    """Formats the value of a flag: see `mark` in `cuda/peers.cuh`."""
    if value == 0:
        return "none"
    op, form = divmod(value >> _STEP & 15, len(FORMS))
    return f"call {value >> _CALL} {OPS[op]}/{FORMS[form]} step {value & (1 << _STEP) - 1}"


def _fill_head(plan: Plan, group: Group, form: str, op: str) -> None:
    ctypes.memmove(ctypes.addressof(plan), ctypes.addressof(group), ctypes.sizeof(Group))
    plan.group.op = OPS.index(op)
    plan.form = FORMS.index(form)
