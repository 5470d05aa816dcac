"""shardlib's own collectives on GPUs: calls of a group follow each other on whatever streams they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardlib.ops import _cuda_peers
from shardlib.ops._cuda_peers import Peers


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

    follow = Peers._follow
    peers = _cuda_peers.virtual(2, "cpu", launch=launch)
    with (
        mock.patch.object(torch.cuda, "current_stream") as current,
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
        mock.patch.object(Peers, "_follow", lambda self, _: follow(self, torch.device("cuda", 0))),
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
