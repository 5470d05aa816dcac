"""Messages between two ranks: bytes, order, errors, and collectives that go on meanwhile."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.core.errors import CollectiveError
from shardlib.distributed import turns
from shardlib.ops.collectives import all_reduce
from shardlib.ops.collectives.p2p import Incoming, Mailbox, pack, unpack
from shardlib.ops.collectives.transport import groups
from shardlib.sharding.mesh.axis import Axis
from tests.helpers.ranks import Pool, run_ranks

VALUES = {
    "one": [torch.arange(6.0).view(2, 3)],
    "strided": [torch.arange(6.0).view(2, 3).t()],
    "scalars": [torch.tensor(1.5), torch.tensor(2, dtype=torch.int64), torch.tensor(True)],
    "conjugate": [torch.tensor([1 + 2j, 3j]).conj(), torch.zeros(3, dtype=torch.bfloat16)],
    "empty": [torch.ones(0, 4), torch.ones(3), torch.ones(2, 0)],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_unpack_inverts_pack(values):
    forms = tuple((tuple(x.shape), x.dtype) for x in values)
    parts = list(unpack(pack([x.contiguous() for x in values]), Incoming(0, 0, forms)))
    for part, x in zip(parts, values, strict=True):
        torch.testing.assert_close(part, x.resolve_conj())
    assert len({part.untyped_storage().data_ptr() for part in parts if part.numel()}) == sum(
        bool(part.numel()) for part in parts
    )


def in_turn(body, incoming):
    """Runs `body(mailbox)` as one turn of a program with these messages."""
    mailbox = Mailbox(incoming, "cpu")
    with turns.Turn("messages"), mailbox:
        body(mailbox)


def flow(calls: int, n: int) -> list[float]:
    """Rank 0 sends n values in each call, which rank 1 takes late; both use the same numbers in each call."""
    taken: list[float] = []
    incoming = [Incoming(0, i, (((2,), torch.float32),)) for i in range(n)] if dist.get_rank() else []

    def body(call: int, mailbox: Mailbox) -> None:
        if dist.get_rank():
            taken.extend(mailbox.receive().sum().item() for _ in range(n))
            return
        x = torch.empty(2)
        for i in range(n):
            mailbox.send(x.fill_(call * n + i), 1, i, last=True)  # the next one overwrites it
        x.fill_(-1.0)

    for call in range(calls):
        in_turn(partial(body, call), incoming)
    dist.barrier()
    return taken


@pytest.mark.ranks
def test_calls_with_the_same_numbers_keep_their_order():
    assert run_ranks(flow, 2, 3, 20) == [[], [2.0 * i for i in range(60)]]


def around() -> float:
    """A ring of waits: 0 awaits 2, which awaits 3 in a sum, which awaits 1, which awaits 0 in a sum that has begun."""
    rank, x = dist.get_rank(), torch.ones(1 << 23)  # more than a rank's staging memory holds
    with sl.Mesh(stage=2, data=2, stages="stage") as mesh:
        axes = (Axis("data", 2),)
        groups.prepare(mesh, [axes])
        group = groups.group_for(mesh, axes)
        incoming = [Incoming({0: 2, 3: 1}[rank], 0, (((1,), torch.float32),))] if rank in (0, 3) else []
        received = torch.zeros(1)

        def body(mailbox: Mailbox) -> None:
            if rank in (0, 1):
                running = all_reduce.start(x, group)
                if rank == 0:
                    received.copy_(mailbox.receive())
                total = running.finish()
                if rank == 1:
                    mailbox.send(total[:1], 3, 0, last=True)
                return
            if rank == 3:
                received.copy_(mailbox.receive())
            total = all_reduce.start(x, group).finish()
            if rank == 2:
                mailbox.send(total[:1], 0, 0, last=True)

        in_turn(body, incoming)
        dist.barrier()
    return received.item()


@pytest.mark.ranks
def test_a_rank_that_awaits_a_message_takes_part_in_collectives(monkeypatch):
    monkeypatch.setenv("SHARDLIB_TIMEOUT", "60")
    assert run_ranks(around, 4, timeout=400) == [2.0, 0.0, 0.0, 2.0]


def await_nothing() -> str:
    if dist.get_rank() == 1:
        dist.barrier()
        return ""

    def body(mailbox: Mailbox) -> None:
        with pytest.raises(CollectiveError) as caught:
            mailbox.receive()
        assert caught.value.culprit == 1
        raise caught.value

    text = ""
    try:
        in_turn(body, [Incoming(1, 0, (((1,), torch.float32),))])
    except CollectiveError as error:
        text = str(error)
    dist.barrier()
    return text


@pytest.mark.ranks
def test_a_late_message_is_an_error_that_names_its_sender(monkeypatch):
    monkeypatch.setenv("SHARDLIB_TIMEOUT", "2")
    with closing(Pool(2)) as pool:  # its own: the receive is still under way in its processes
        assert pool.run(await_nothing)[0] == "no message comes from rank 1 within 2 s"
