"""Messages between the members of a group of GPUs through shardlib's kernels; `torch_wire.py` sends them through torch.

`Peers` takes members in group order, so nothing is reordered. The kernels run on a stream of their own, in parallel
with computation, and the host never waits: a message starts after the work that is on the current stream, and `finish`
makes that stream wait for the message. All groups share one stream, so all ranks run messages in program order:
kernels of two groups that wait for each other's ranks cannot block each other on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardlib.ops.backend_choice import Choice, requested_backend
from shardlib.ops.collectives.transport import cuda_peers
from shardlib.ops.collectives.transport.cuda_peers import Peers
from shardlib.ops.collectives.transport.flat_messages import resolve_views
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.ops.collectives.transport.torch_wire import Handle, PendingParts

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def requested_op() -> str:
    """Returns the first collective for which SHARDLIB_OPS asks for the kernels, or an empty string."""
    return next((op for op in OPS if requested_backend(op) == "cuda"), "")


def choose_form(op: str, request: CollectiveRequest) -> Choice | str:
    """Chooses the form in which the kernels move a message, or returns why they cannot.

    The longest message decides the form; its size is unknown if sizes differ.
    """
    nbytes, members = request.nbytes, request.members
    if op not in OPS:
        return f"they have no {op}"
    if fault := cuda_peers.find_kernel_fault(op, request.dtype, request.kind, members):
        return fault
    if op == "all_reduce":
        if nbytes <= cuda_peers.load_tuning().one_step_bytes:
            return cuda_peers.choose_form(op, nbytes)
        form = cuda_peers.choose_form(op, -(-nbytes // members))
        return Choice("cuda", form.way, f"each member adds up a part, then gathers the others'; {form.reason}")
    if not request.even:
        return Choice("cuda", "", "sizes differ: the longest message decides the form")
    return cuda_peers.choose_form(op, nbytes // members)


def gather(message: Tensor, counts: Sequence[int], group: GroupHandle) -> PendingParts:
    """Sends every member's message to all; `counts[i]` elements come from member i."""
    out, finish = _send_on_stream(message, lambda x: _peers(group).gather([x], counts))
    return PendingParts(out, counts, counts, message.dtype, group, message, finish=finish)


def exchange(message: Tensor, counts: Sequence[Sequence[int]], group: GroupHandle) -> PendingParts:
    """Starts an all-to-all: `counts[i][j]` elements go from member i to member j."""
    receive = [row[group.position] for row in counts]
    if not any(map(any, counts)):
        nothing = message.new_empty(0)
        return PendingParts(nothing, receive, receive, message.dtype, group, message, finish=lambda: nothing)
    out, finish = _send_on_stream(message, lambda x: _peers(group).exchange([x], counts))
    return PendingParts(out, receive, receive, message.dtype, group, message, finish=finish)


def scatter_sum(message: Tensor, counts: Sequence[int], group: GroupHandle) -> Handle[Tensor]:
    """Sums all members' messages; member i gets `counts[i]` elements of the sum."""
    return Handle(_send_on_stream(message, lambda x: _peers(group).scatter_sum([x], counts))[1])


def reduce(message: Tensor, group: GroupHandle) -> Handle[Tensor]:
    """Sums all members' messages, on every member."""
    return Handle(_send_on_stream(message, lambda x: _peers(group).reduce([x]))[1])


def _send_on_stream(message: Tensor, send: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, Callable[[], Tensor]]:
    """Sends this rank's message on the stream of messages.

    Returns the result, and a function that makes the current stream wait for the result.
    """
    (message,) = resolve_views([message])
    if message.device.type != "cuda":  # the emulation
        (out,) = send(message)
        return out, lambda: out
    side_stream = _message_stream(message.device)
    side_stream.wait_stream(torch.cuda.current_stream(message.device))
    with torch.cuda.stream(side_stream):
        (out,) = send(message)
        done = side_stream.record_event()
    message.record_stream(side_stream)  # `finish` may never be called

    def finish() -> Tensor:
        current = torch.cuda.current_stream(message.device)
        current.wait_event(done)
        out.record_stream(current)  # the side stream owns its memory, and may reuse it
        return out

    return out, finish


@functools.cache
def _message_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all messages of a device; its kernels have priority."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _peers(group: GroupHandle) -> Peers:
    assert group.peers is not None
    return group.peers
