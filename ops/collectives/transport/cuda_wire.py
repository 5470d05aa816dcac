"""Messages between the members of a group of GPUs through shardlib's kernels, as `torch_wire.py` sends them through
torch.

`Peers` knows the members in group order, so nothing is put in order here. The kernels run on a stream of their own,
beside what is computed, and the host waits for nothing: a message begins behind what the current stream has come to,
and `finish` lets that stream wait for it. All groups share the stream, so that all ranks run messages in the order of
the program: kernels of two groups that wait for each other's ranks cannot keep each other from the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardlib.ops.backend_choice import Choice, wanted
from shardlib.ops.collectives.transport import cuda_peers
from shardlib.ops.collectives.transport.cuda_peers import Peers
from shardlib.ops.collectives.transport.flat_messages import settled
from shardlib.ops.collectives.transport.torch_wire import Flight, Handle

if TYPE_CHECKING:
    from shardlib.ops.collectives.transport.groups import GroupHandle

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def asked() -> str:
    """The first collective for which SHARDLIB_OPS asks for the kernels; empty when there is none."""
    return next((op for op in OPS if wanted(op) == "cuda"), "")


def serve(op: str, nbytes: int, even: bool, dtype: torch.dtype, kind: str, n: int) -> Choice | str:
    """The form in which the kernels move `nbytes`, or what they cannot do in this case.

    The bytes are those of the op's whole tensor. Its longest message decides the form; where sizes differ, that one is
    not known here.

    Example:
        >>> print(serve("all_gather", 4 << 10, True, torch.float32, "", 4))
        cuda/packets: a small message: its flags travel in it
        >>> print(serve("all_gather", 4 << 10, False, torch.float32, "", 4))
        cuda: sizes differ: the longest message decides the form
        >>> serve("all_reduce", 4 << 10, True, torch.float32, "max", 4)
        'the kernels form sums, no max'
    """
    if fault := cuda_peers.unserved(op, dtype, kind, n):
        return fault
    if op == "all_reduce":
        if nbytes <= cuda_peers.tuned().one_step_bytes:
            return cuda_peers.choose(op, nbytes)
        form = cuda_peers.choose(op, -(-nbytes // n))
        return Choice("cuda", form.way, f"each member adds up a part, then gathers the others'; {form.reason}")
    if not even:
        return Choice("cuda", "", "sizes differ: the longest message decides the form")
    return cuda_peers.choose(op, nbytes // n)


def gather(message: Tensor, counts: Sequence[int], group: GroupHandle) -> Flight:
    """Every member's message to all; `counts[i]` elements come from member i."""
    out, finish = _sent(message, lambda x: _peers(group).gather([x], counts))
    return Flight(out, counts, counts, message.dtype, group, message, finish=finish)


def exchange(message: Tensor, counts: Sequence[Sequence[int]], group: GroupHandle) -> Flight:
    """An all-to-all: `counts[i][j]` elements go from member i to member j."""
    receive = [row[group.position] for row in counts]
    if not any(map(any, counts)):
        nothing = message.new_empty(0)
        return Flight(nothing, receive, receive, message.dtype, group, message, finish=lambda: nothing)
    out, finish = _sent(message, lambda x: _peers(group).exchange([x], counts))
    return Flight(out, receive, receive, message.dtype, group, message, finish=finish)


def scatter_sum(message: Tensor, counts: Sequence[int], group: GroupHandle) -> Handle[Tensor]:
    """The sum of all members' messages, of which member i gets `counts[i]` elements."""
    return Handle(_sent(message, lambda x: _peers(group).scatter_sum([x], counts))[1])


def reduce(message: Tensor, group: GroupHandle) -> Handle[Tensor]:
    """The sum of all members' messages, on every member."""
    return Handle(_sent(message, lambda x: _peers(group).reduce([x]))[1])


def _sent(message: Tensor, send: Callable[[Tensor], list[Tensor]]) -> tuple[Tensor, Callable[[], Tensor]]:
    """What comes of a message of this rank, and how the current stream waits for it."""
    (message,) = settled([message])
    if message.device.type != "cuda":  # the emulation
        (out,) = send(message)
        return out, lambda: out
    beside = _stream(message.device)
    beside.wait_stream(torch.cuda.current_stream(message.device))
    with torch.cuda.stream(beside):
        (out,) = send(message)
        done = beside.record_event()
    message.record_stream(beside)  # should nobody wait for it

    def finish() -> Tensor:
        here = torch.cuda.current_stream(message.device)
        here.wait_event(done)
        out.record_stream(here)  # its memory is the other stream's, which may go on with it
        return out

    return out, finish


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """That of all messages of a device; its kernels go first where there is room for some."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _peers(group: GroupHandle) -> Peers:
    assert group.peers is not None
    return group.peers
