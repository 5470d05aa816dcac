"""Collectives of GPUs that reach each other's memory: workspaces in torch's symmetric memory, and the kernels of cuda/.

`Peers` moves flat messages of a group. `cuda_open.py` makes the peers of a process group; tests make peers whose
ranks are all in this process, on one GPU. All work is enqueued on the current stream; the host never waits.
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
from shardlib.ops.collectives.transport.cuda_args import ELEMENTS, MAX_CTAS, MAX_RANKS, Plan, Tuning

# (op, output, input, plan): the torch op or, in tests, the emulated launcher. The tensors give device and stream.
Launch = Callable[[str, Tensor, Tensor, Plan], None]

MAX_PLANS = 1024  # that a group keeps


def choose_form(op: str, longest: int, *, symmetric: bool = False, tuning: Tuning | None = None) -> Choice:
    """Chooses the form of messages of up to `longest` bytes; `symmetric` if the inputs are shared tensors."""
    if longest <= (tuning or load_tuning()).packet_bytes:
        return Choice("cuda", "packets", "a small message: its flags travel in it")
    if symmetric:
        return Choice("cuda", "direct", "peers read the input where it is")
    return Choice("cuda", "staged", "peers read it a chunk at a time from memory that all share")


def load_tuning() -> Tuning:
    """Returns the tuning for the GPUs of this process."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Tuning(**ops_tuning.TUNING.get(card, {}))


def find_kernel_fault(op: str, dtype: torch.dtype, kind: str, ranks: int) -> str:
    """Returns why the kernels cannot run this and NCCL has to; empty if they can."""
    if ranks > MAX_RANKS:
        return f"the kernels take up to {MAX_RANKS} ranks, not {ranks}"
    if op in ("reduce_scatter", "all_reduce"):
        if kind != "sum":
            return f"the kernels form sums, no {kind}"
        if dtype not in ELEMENTS:
            return f"the kernels add float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return ""


class Peers:
    """The ranks of a group that this process runs, and the memory through which the group communicates.

    Methods take one flat, contiguous message of every rank of this process (one, unless virtual) and return one result
    for each. `form` and `ctas` override `choose_form` and the tuning. They must be equal on all ranks, as the sizes
    must. A captured CUDA graph may hold these calls and may be replayed, in the same order on all ranks.
    """

    def __init__(
        self, group: plans.Group, ranks: Sequence[int], tuning: Tuning, report: Tensor, launch: Launch
    ) -> None:
        self.group, self.ranks, self.tuning, self.size = group, tuple(ranks), tuning, int(group.ranks)
        self.present = range(int(group.rank), int(group.rank + group.present))
        self.memory: list[Tensor] = []  # tensors to which the plans hold pointers
        self.most_ctas = MAX_CTAS  # of one rank
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._shared: dict[int, list[int]] = {}  # address of a shared tensor's storage: its addresses on all ranks
        self._launch = launch
        self._stream: torch.cuda.Stream | None = None
        self._report = report
        self._words = (ctypes.c_uint64 * report.numel()).from_address(report.data_ptr())

    def gather(self, messages: Sequence[Tensor], counts: Sequence[int], form: str = "", ctas: int = 0) -> list[Tensor]:
        """Concatenates all ranks' messages; `counts[i]` elements come from rank i."""
        outs = [x.new_empty(sum(counts)) for x in messages]
        return self._run("all_gather", tuple(counts), messages, outs, form, ctas)

    def exchange(
        self, messages: Sequence[Tensor], counts: Sequence[Sequence[int]], form: str = "", ctas: int = 0
    ) -> list[Tensor]:
        """Sends `counts[i][j]` elements from rank i to rank j; a result concatenates what arrived from each rank."""
        outs = [x.new_empty(sum(row[r] for row in counts)) for r, x in zip(self.present, messages, strict=True)]
        return self._run("all_to_all", tuple(map(tuple, counts)), messages, outs, form, ctas)

    def scatter_sum(
        self, messages: Sequence[Tensor], counts: Sequence[int], form: str = "", ctas: int = 0
    ) -> list[Tensor]:
        """Sums all messages, bitwise as `flat_messages.combine`; rank i gets `counts[i]` elements."""
        outs = [x.new_empty(counts[r]) for r, x in zip(self.present, messages, strict=True)]
        return self._run("reduce_scatter", tuple(counts), messages, outs, form, ctas)

    def reduce(self, messages: Sequence[Tensor], ctas: int = 0) -> list[Tensor]:
        """Sums all messages on every rank, bitwise as `flat_messages.combine`."""
        total, n = messages[0].numel(), self.size
        if messages[0].nbytes <= self.tuning.one_step_bytes:
            outs = [torch.empty_like(x) for x in messages]
            return self._run("reduce_scatter", (total,), messages, outs, "", ctas)
        step = -(-total // n // 64) * 64  # each part begins at a multiple of 16 bytes
        counts = [max(0, min(step, total - i * step)) for i in range(n)]
        return self.gather(self.scatter_sum(messages, counts, ctas=ctas), counts, ctas=ctas)

    def check(self) -> None:
        """Raises `CollectiveError` if a kernel gave up: its results, and all later ones, are invalid.

        Every collective calls it first. It sees only kernels that have run, so call it after a synchronization, too.
        """
        size = len(plans.REPORT)
        if any(states := self._words[::size]):
            rank = next(i for i, state in enumerate(states) if state)
            raise CollectiveError(plans.explain_report(self._words[rank * size : (rank + 1) * size], self.ranks))

    def share(self, tensor: Tensor, addresses: Sequence[int]) -> None:
        """Lets kernels read messages in `tensor` in place from now on; `addresses[i]` is where rank i's tensor is.

        All ranks call it together, and send the same parts of shared tensors. A part may be overwritten by work that
        follows the collective on its stream.
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
        inputs = self._shared_addresses(messages)
        key = (op, counts, messages[0].dtype, form, ctas, inputs is not None)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:  # most are for sizes that never return
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(*key)
        if inputs is not None:
            for i, address in enumerate(inputs):
                plan.input[i] = address
        for rank, x, out in zip(self.present, messages, outs, strict=True):
            plan.input[rank], plan.output[rank] = x.data_ptr(), out.data_ptr()
        self._follow_stream(outs[0].device)
        self._launch(op, outs[0], messages[0], plan)
        return outs

    def _make_plan(
        self, op: str, counts: tuple[Any, ...], dtype: torch.dtype, form: str, ctas: int, symmetric: bool
    ) -> Plan:
        item = dtype.itemsize
        longest = max(map(max, counts) if op == "all_to_all" else counts) * item
        form = form or choose_form(op, longest, symmetric=symmetric, tuning=self.tuning).way
        if form == "direct" and not symmetric:
            raise ValueError(f"the form {form} of {op} reads shared tensors, and this message lies in none")
        plan: Plan
        if op == "reduce_scatter":
            plan = plans.reduce_scatter(self.group, form, counts, dtype)
        elif op == "all_gather":
            plan = plans.all_gather(self.group, form, [n * item for n in counts])
        else:
            plan = plans.all_to_all(self.group, form, [[n * item for n in row] for row in counts])
        plan.group.ctas = self._choose_ctas(longest, form, ctas)
        return plan

    def _choose_ctas(self, longest: int, form: str, ctas: int) -> int:
        """Limits the CTAs of a small message to those that have work: 4 bytes per thread in packets, else 128."""
        cta_bytes = self.tuning.threads * (4 if form == "packets" else 128)
        return max(1, min(ctas or self.tuning.ctas, self.most_ctas, -(-longest // cta_bytes)))

    def _shared_addresses(self, messages: Sequence[Tensor]) -> list[int] | None:
        """Returns the addresses of all ranks' messages, or None if they lie in no shared tensors."""
        if not self._shared:
            return None
        x = messages[0]  # an empty tensor has no data_ptr, but its storage has
        addresses = self._shared.get(x.untyped_storage().data_ptr())
        offset = int(x.storage_offset()) * x.itemsize
        return None if addresses is None else [address + offset for address in addresses]

    def _follow_stream(self, device: torch.device) -> None:
        """Makes the current stream wait for the group's last call: calls of a group never overlap."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._stream not in (None, stream) and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
        self._stream = stream


def launch(op: str, out: Tensor, x: Tensor, plan: Plan) -> None:
    """Calls the torch op of the CUDA library."""
    getattr(torch.ops.shardlib_cuda, op).default(out, x, plan.words)


def make_group(
    ranks: int, present: range, tuning: Tuning, seconds: float, addresses: Sequence[int], report: Tensor
) -> plans.Group:
    """Makes the group's arguments for kernels; `addresses[i]` is rank i's workspace in this process."""
    group = plans.Group(ranks=ranks, rank=present[0], present=len(present), ctas=tuning.ctas, threads=tuning.threads)
    group.limit_ns, group.packet_words = int(seconds * 1e9), tuning.packet_bytes // 4
    group.window, group.chunk = tuning.window, tuning.chunk
    group.workspace[:ranks] = addresses
    for row, rank in enumerate(present):
        group.report[rank] = report[row].data_ptr()
    return group


def make_report(rows: int, device: torch.device) -> Tensor:
    """Allocates host memory to which the GPU writes reports under the same address, a row for each rank."""
    return torch.zeros(rows, len(plans.REPORT), dtype=torch.int64, pin_memory=device.type == "cuda")
