"""Collectives of GPUs that reach each other's memory: workspaces in torch's symmetric memory, and the kernels of cuda/.

`Peers` moves flat messages of a group; `virtual` makes one whose ranks are all in this process, on one GPU, and
`cuda_open.py` one for the members of a process group. Everything is enqueued on the current stream; nothing waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.ops import tuning as ops_tuning
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives.transport import cuda_args as plans
from shardlib.ops.collectives.transport.cuda_args import ELEMENTS, MAX_CTAS, MAX_RANKS, Plan, Tuning, workspace_bytes

# (op, output, input, plan): the torch op, or in tests the emulated launcher. Tensors say where and on which stream.
Launch = Callable[[str, Tensor, Tensor, Plan], None]

PLANS = 1024  # that a group keeps


def choose(op: str, longest: int, *, symmetric: bool = False, tuning: Tuning | None = None) -> Choice:
    """The form in which messages go, the longest of `longest` bytes; `symmetric` when the inputs are shared tensors.

    Example:
        >>> print(choose("all_gather", 1 << 10))
        cuda/packets: a small message: its flags travel in it
        >>> print(choose("reduce_scatter", 1 << 26, symmetric=True))
        cuda/direct: peers read the input where it is
    """
    if longest <= (tuning or tuned()).packet_bytes:
        return Choice("cuda", "packets", "a small message: its flags travel in it")
    if symmetric:
        return Choice("cuda", "direct", "peers read the input where it is")
    return Choice("cuda", "staged", "peers read it a chunk at a time from memory that all share")


def tuned() -> Tuning:
    """The tuning for the GPUs of this process."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Tuning(**ops_tuning.TUNING.get(card, {}))


def unserved(op: str, dtype: torch.dtype, kind: str, ranks: int) -> str:
    """Why the kernels cannot do this and NCCL has to; empty when they can.

    Example:
        >>> unserved("reduce_scatter", torch.float64, "sum", 8)
        'the kernels add float32, bfloat16 and float16, not float64'
        >>> unserved("all_gather", torch.float64, "", 8)
        ''
    """
    if ranks > MAX_RANKS:
        return f"the kernels take up to {MAX_RANKS} ranks, not {ranks}"
    if op in ("reduce_scatter", "all_reduce"):
        if kind != "sum":
            return f"the kernels form sums, no {kind}"
        if dtype not in ELEMENTS:
            return f"the kernels add float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return ""


class Peers:
    """The ranks of a group that this process runs, and the memory through which all of its ranks speak.

    Methods take one flat, contiguous message of every rank that is run here (one, unless virtual) and return one result
    of each. `form` and `ctas` override `choose` and the tuning; they must be the same on all ranks, as the sizes must.
    A captured CUDA graph may hold these calls and may be replayed, in the same order on all ranks.
    """

    def __init__(
        self, group: plans.Group, ranks: Sequence[int], tuning: Tuning, report: Tensor, launch: Launch
    ) -> None:
        self.group, self.ranks, self.tuning, self.size = group, tuple(ranks), tuning, int(group.ranks)
        self.present = range(int(group.rank), int(group.rank + group.present))
        self.memory: list[Tensor] = []  # what the pointers in plans point to
        self.most_ctas = MAX_CTAS  # that a rank may have
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._shared: dict[int, list[int]] = {}  # where a tensor's storage begins here: where all ranks' do
        self._launch = launch
        self._stream: torch.cuda.Stream | None = None
        self._report = report
        self._words = (ctypes.c_uint64 * report.numel()).from_address(report.data_ptr())

    def gather(self, messages: Sequence[Tensor], counts: Sequence[int], form: str = "", ctas: int = 0) -> list[Tensor]:
        """All ranks' messages one after the other; `counts[i]` elements come from rank i."""
        outs = [x.new_empty(sum(counts)) for x in messages]
        return self._run("all_gather", tuple(counts), messages, outs, form, ctas)

    def exchange(
        self, messages: Sequence[Tensor], counts: Sequence[Sequence[int]], form: str = "", ctas: int = 0
    ) -> list[Tensor]:
        """Rank i's message holds `counts[i][j]` elements for each rank j; a result holds what came from each rank."""
        outs = [x.new_empty(sum(row[r] for row in counts)) for r, x in zip(self.present, messages, strict=True)]
        return self._run("all_to_all", tuple(map(tuple, counts)), messages, outs, form, ctas)

    def scatter_sum(
        self, messages: Sequence[Tensor], counts: Sequence[int], form: str = "", ctas: int = 0
    ) -> list[Tensor]:
        """The sum of all messages, of which rank i gets `counts[i]` elements; the bits of `combine` in
        `flat_messages.py`."""
        outs = [x.new_empty(counts[r]) for r, x in zip(self.present, messages, strict=True)]
        return self._run("reduce_scatter", tuple(counts), messages, outs, form, ctas)

    def reduce(self, messages: Sequence[Tensor], ctas: int = 0) -> list[Tensor]:
        """The sum of all messages, on every rank; the bits of `combine`."""
        total, n = messages[0].numel(), self.size
        if messages[0].nbytes <= self.tuning.one_step_bytes:
            outs = [torch.empty_like(x) for x in messages]
            return self._run("reduce_scatter", (total,), messages, outs, "", ctas)
        step = -(-total // n // 64) * 64  # parts that begin at multiples of 16 bytes
        counts = [max(0, min(step, total - i * step)) for i in range(n)]
        return self.gather(self.scatter_sum(messages, counts, ctas=ctas), counts, ctas=ctas)

    def check(self) -> None:
        """Raise `CollectiveError` if a kernel gave up: then its results, and all later ones, are worth nothing.

        Every call checks first; what the GPU has not come to yet is not seen, so call it behind a synchronization, too.
        """
        size = len(plans.REPORT)
        if any(states := self._words[::size]):
            rank = next(i for i, state in enumerate(states) if state)
            raise CollectiveError(plans.explain(self._words[rank * size : (rank + 1) * size], self.ranks))

    def share(self, tensor: Tensor, addresses: Sequence[int]) -> None:
        """From now on messages in `tensor` are read in place; `addresses[i]` is where rank i's tensor begins.

        All ranks share together, and send the same parts of such tensors. A part may be written to when the stream has
        come past the call.
        """
        self.memory.append(tensor)
        start = tensor.untyped_storage().data_ptr()
        self._shared[start] = [address - (tensor.data_ptr() - start) for address in addresses]

    def _run(
        self,
        op: str,
        counts: tuple[Any, ...],
        messages: Sequence[Tensor],
        outs: list[Tensor],
        form: str,
        ctas: int,
    ) -> list[Tensor]:
        self.check()
        inputs = self._inputs(messages)
        key = (op, counts, messages[0].dtype, form, ctas, inputs is None)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:  # of sizes that never come back
                self._plans.clear()
            plan = self._plans[key] = self._plan(*key)
        if inputs is not None:
            for i, address in enumerate(inputs):
                plan.input[i] = address
        for rank, x, out in zip(self.present, messages, outs, strict=True):
            plan.input[rank], plan.output[rank] = x.data_ptr(), out.data_ptr()
        self._follow(outs[0].device)
        self._launch(op, outs[0], messages[0], plan)
        return outs

    def _plan(self, op: str, counts: tuple[Any, ...], dtype: torch.dtype, form: str, ctas: int, apart: bool) -> Plan:
        item = dtype.itemsize
        longest = max(map(max, counts) if op == "all_to_all" else counts) * item
        form = form or choose(op, longest, symmetric=not apart, tuning=self.tuning).way
        if form == "direct" and apart:
            raise ValueError(f"the form {form} of {op} reads shared tensors, and this message lies in none")
        plan: Plan
        if op == "reduce_scatter":
            plan = plans.reduce_scatter(self.group, form, counts, dtype)
        elif op == "all_gather":
            plan = plans.all_gather(self.group, form, [n * item for n in counts])
        else:
            plan = plans.all_to_all(self.group, form, [[n * item for n in row] for row in counts])
        plan.group.ctas = self._ctas(longest, form, ctas)
        return plan

    def _ctas(self, longest: int, form: str, ctas: int) -> int:
        """Small messages take as many CTAs as have something to do: one for 4 bytes, or 4 KB, of each thread."""
        wanted = ctas or self.tuning.ctas
        each = self.tuning.threads * (4 if form == "packets" else 128)
        return max(1, min(wanted, self.most_ctas, -(-longest // each)))

    def _inputs(self, messages: Sequence[Tensor]) -> list[int] | None:
        """Where the ranks' messages are, if they lie in shared tensors."""
        if not self._shared:
            return None
        x = messages[0]  # it may be empty, and has no data_ptr then
        addresses = self._shared.get(x.untyped_storage().data_ptr())
        offset = int(x.storage_offset()) * x.itemsize
        return None if addresses is None else [address + offset for address in addresses]

    def _follow(self, device: torch.device) -> None:
        """Calls of a group run one after the other, on whatever streams they are made."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream


def launch(op: str, out: Tensor, x: Tensor, plan: Plan) -> None:
    """The torch op of the CUDA library."""
    getattr(torch.ops.shardlib_cuda, op).default(out, x, plan.words)


def virtual(
    ranks: int,
    device: torch.device | str = "cuda",
    tuning: Tuning | None = None,
    *,
    present: range | None = None,
    seconds: float = 10.0,
    multicast: bool = False,
    launch: Launch = launch,
) -> Peers:
    """All ranks of a group on one device, each with a workspace of its own: for tests, and to measure on one GPU.

    With `present`, only these take part: the others are ranks that never come. Messages may be shared tensors as they
    are. `multicast` is for the emulation, which does without the address.
    """
    tuning = tuning or tuned()
    here = present or range(ranks)
    spaces = [torch.zeros(workspace_bytes(ranks, tuning), dtype=torch.uint8, device=device) for _ in range(ranks)]
    report = report_of(len(here), torch.device(device))
    group = group_of(ranks, here, tuning, seconds, [x.data_ptr() for x in spaces], report)
    group.multicast = spaces[0].data_ptr() if multicast else 0
    peers = Peers(group, range(ranks), tuning, report, launch)
    peers.memory += spaces
    if torch.device(device).type == "cuda":  # all ranks run at once, a CTA on a multiprocessor
        peers.most_ctas = min(MAX_CTAS, torch.cuda.get_device_properties(device).multi_processor_count // len(here))
    return peers


def group_of(
    ranks: int, present: range, tuning: Tuning, seconds: float, addresses: Sequence[int], report: Tensor
) -> plans.Group:
    """The group as kernels see it; `addresses[i]` is rank i's workspace in this process."""
    group = plans.Group(ranks=ranks, rank=present[0], present=len(present), ctas=tuning.ctas, threads=tuning.threads)
    group.limit_ns, group.packet_words = int(seconds * 1e9), tuning.packet_bytes // 4
    group.window, group.chunk = tuning.window, tuning.chunk
    group.workspace[:ranks] = addresses
    for row, rank in enumerate(present):
        group.report[rank] = report[row].data_ptr()
    return group


def report_of(rows: int, device: torch.device) -> Tensor:
    """Memory of the host, to which the GPU writes under the same address: a row for each rank that runs here."""
    return torch.zeros(rows, len(plans.REPORT), dtype=torch.int64, pin_memory=device.type == "cuda")
