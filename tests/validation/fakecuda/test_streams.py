"""shardlib's own collectives on GPUs: on a stream of their own, and in order on whatever streams calls are made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardlib.ops.collectives.transport import cuda_wire
from shardlib.ops.collectives.transport.cuda_peers import Peers
from tests.helpers.virtual_peers import virtual_peers


class Stream:
    """Stands in for a CUDA stream; notes which streams it waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, list[str]()

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


def enqueued(order: Sequence[int], *, capturing: bool = False) -> tuple[list[str], list[Stream]]:
    """The streams on which kernels of one group were enqueued, when calls are made on streams in this order."""
    streams, log = [Stream("a"), Stream("b"), Stream("c")], list[str]()

    def launch(op: str, out: Tensor, x: Tensor, plan: Any) -> None:
        log.append(torch.cuda.current_stream().name)  # type: ignore[attr-defined]

    follow = Peers._follow_stream
    peers = virtual_peers(2, "cpu", launch=launch)
    with (
        mock.patch.object(torch.cuda, "current_stream") as current,
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
        mock.patch.object(Peers, "_follow_stream", lambda self, _: follow(self, torch.device("cuda", 0))),
    ):
        for i in order:
            current.return_value = streams[i]
            peers.gather([torch.zeros(8), torch.ones(8)], [8, 8])
    return log, streams


def test_a_call_waits_for_the_stream_of_the_call_before() -> None:
    log, (a, b, c) = enqueued([0, 0, 1, 0, 2, 2])
    assert log == ["a", "a", "b", "a", "c", "c"]
    assert (a.waits, b.waits, c.waits) == (["b"], ["a"], ["a"])


@pytest.mark.parametrize("order", [[0], [0, 0, 0]])
def test_one_stream_waits_for_nothing(order: list[int]) -> None:
    assert not any(s.waits for s in enqueued(order)[1])


def test_a_captured_graph_keeps_its_own_order() -> None:
    assert not any(s.waits for s in enqueued([0, 1, 0], capturing=True)[1])


# --- beside what is computed ------------------------------------------------------------------------------------------


class Recorded(Stream):
    """Notes what is enqueued on it, in order: kernels, and what it waits for, by how far that had come by then."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.queue = list[str]()

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> str:
        return f"{self.name}:{len(self.queue)}"

    def wait_event(self, event: str) -> None:
        self.queue.append(f"wait for {event}")


class OnCuda(Tensor):
    """Says that it lies on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]
    known: ClassVar[list[tuple[int, str]]] = []  # whose memory which stream uses, beside that where it was made

    def record_stream(self, stream: Any) -> None:
        self.known.append((self.data_ptr(), stream.name))


@contextmanager
def two_streams() -> Iterator[tuple[Recorded, Recorded, Any]]:
    """The current stream, that of messages, and a group whose kernels are noted where they are enqueued."""
    here, beside = Recorded("here"), Recorded("beside")
    OnCuda.known.clear()
    current = [here]

    @contextmanager
    def on(stream: Recorded) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def run(name: str) -> Callable[..., list[Tensor]]:
        def call(messages: list[Tensor], *counts: Any) -> list[Tensor]:
            current[-1].queue.append(name)
            return [torch.zeros(8).as_subclass(OnCuda)]

        return call

    peers = SimpleNamespace(**{name: run(name) for name in ("gather", "exchange", "scatter_sum", "reduce")})
    group = SimpleNamespace(peers=peers, position=0, size=2, by_rank=(1, 0))
    with (
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda device=None: current[-1]),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(cuda_wire, "_message_stream", return_value=beside),
        mock.patch.object(cuda_wire, "resolve_views", lambda xs: [x.as_subclass(OnCuda) for x in xs]),
    ):
        yield here, beside, group


SENT: dict[str, Callable[[Tensor, Any], Any]] = {
    "gather": lambda x, group: cuda_wire.gather(x, [4, 4], group),
    "exchange": lambda x, group: cuda_wire.exchange(x, [[4, 4], [4, 4]], group),
    "scatter_sum": lambda x, group: cuda_wire.scatter_sum(x, [4, 4], group),
    "reduce": cuda_wire.reduce,
}


@pytest.mark.parametrize("name", SENT)
def test_a_message_runs_beside_what_is_computed(name: str) -> None:
    """It begins behind what was enqueued by then; only who reads what comes waits for it, and for nothing later."""
    with two_streams() as (here, beside, group):
        here.queue.append("before")
        flying = SENT[name](torch.ones(8), group)
        here.queue.append("between")
        SENT["reduce"](torch.ones(8), group)
        flying.parts() if name in ("gather", "exchange") else flying.finish()
        assert [stream for _, stream in OnCuda.known] == ["beside", "beside", "here"]
    assert beside.queue == ["wait for here:1", name, "wait for here:2", "reduce"]
    assert here.queue == ["before", "between", "wait for beside:2"]


@pytest.mark.parametrize("name", SENT)
def test_a_message_is_held_until_it_was_waited_for(name: str) -> None:
    """Its memory is the current stream's: given back earlier, it would be written to while it is sent."""
    with two_streams() as (_, _, group):
        message = torch.ones(8)
        memory = StorageWeakRef(message.untyped_storage())
        flying = SENT[name](message, group)
        del message
        gc.collect()
        assert not memory.expired()
        del flying
        gc.collect()
        assert memory.expired()


def test_nothing_is_sent_where_nobody_sends_anything() -> None:
    with two_streams() as (_, beside, group):
        cuda_wire.exchange(torch.ones(0), [[0, 0], [0, 0]], group)
    assert "exchange" not in beside.queue
