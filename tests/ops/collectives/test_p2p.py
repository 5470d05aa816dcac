"""Messages between two ranks: bytes, order, errors, and collectives that go on meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.distributed import turns
from shardlib.ops.collectives import all_reduce
from shardlib.ops.collectives.p2p import Form, Incoming, Mailbox, pack, unpack
from shardlib.ops.collectives.transport import groups, shm_segment
from shardlib.ops.collectives.transport.shm_route import RING, Pair
from shardlib.ops.collectives.transport.shm_segment import Segment, SegmentError
from shardlib.sharding.mesh.axis import Axis
from tests.helpers.ranks import Pool, RankError, run_ranks

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


TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "torch"])
AXES = (Axis("data", 2),)
BOTH = [(0, 1), (1, 0)]  # pairs of ranks


def in_turn(body: Callable[[Mailbox], object], incoming: Sequence[Incoming] = (), pairs: Sequence[Pair] = ()) -> None:
    """Runs `body(mailbox)` as one turn of a program with these messages; `pairs` share memory, if they can."""
    size = dist.get_world_size()
    mailbox = Mailbox(incoming, "cpu", groups.open_routes(sl.Mesh(stage=size, stages="stage"), pairs))
    with turns.Turn("messages"), mailbox:
        body(mailbox)


def form_of(x: torch.Tensor) -> Form:
    return tuple(x.shape), x.dtype


# Values.

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64, torch.uint64)
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*INTEGERS, *FLOATS, torch.complex32, torch.complex64, torch.complex128)


def random_bits(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    item = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape, item), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def samples() -> list[torch.Tensor]:
    """Values of all dtypes, with NaNs among them, and of many strides."""
    generator = torch.Generator().manual_seed(0)
    values = [random_bits((3, 5), dtype, generator) for dtype in DTYPES]
    x = random_bits((6, 4, 10), torch.float32, generator)
    values += [x.permute(2, 0, 1), x[1::2, :, ::3], x[:, :1].expand(6, 7, 10), x[0, 0, 0], x[:, :0], x[2:2]]
    z = random_bits((4, 3), torch.complex64, generator)
    values += [z.conj(), z.t().conj().imag, z[::2].t()]
    big = random_bits((3 * RING // 2,), torch.uint8, generator)  # more than the ring, in several rounds
    return [*values, big, big.view(-1, 3).t(), x]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def transfer_samples() -> int:
    """Rank 0 sends them, which rank 1 compares; the count of those that differ."""
    rank, values = dist.get_rank(), samples()
    incoming = [Incoming(0, i, (form_of(x),)) for i, x in enumerate(values)] if rank else []
    wrong = 0

    def body(mailbox: Mailbox) -> None:
        nonlocal wrong
        for i, x in enumerate(values):
            if rank:
                y = mailbox.receive()
                wrong += form_of(y) != form_of(x) or not y.is_contiguous() or not torch.equal(bits(x), bits(y))
            else:
                mailbox.send(x, 1, i, last=True)

    in_turn(body, incoming, [(0, 1)])
    return wrong


@TRANSPORTS
@pytest.mark.ranks
def test_values_arrive_bit_for_bit(transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", f"send={transport}")
    assert run_ranks(transfer_samples, 2) == [0, 0]


# Order.


def flow(calls: int, n: int, size: int) -> list[float]:
    """Rank 0 sends n values in each call, which rank 1 takes late; both use the same numbers in each call."""
    rank, taken = dist.get_rank(), list[float]()
    incoming = [Incoming(0, i, (((size,), torch.float32),)) for i in range(n)] if rank else []

    def body(call: int, mailbox: Mailbox) -> None:
        if rank == 0:
            x = torch.empty(size)
            for i in range(n):
                mailbox.send(x.fill_(call * n + i), 1, i, last=True)  # the next one overwrites it
            x.fill_(-1.0)
        dist.barrier()  # no send waits for its receiver
        if rank:
            values = [mailbox.receive() for _ in range(n)]
            assert all(x.eq(x[0]).all() for x in values)
            taken.extend(x[0].item() for x in values)

    for call in range(calls):
        in_turn(partial(body, call), incoming, [(0, 1)])
    dist.barrier()
    return taken


@TRANSPORTS
@pytest.mark.parametrize(("n", "size"), [(100, 2), (6, RING // 8)])  # more rounds, and bytes, than a ring has
@pytest.mark.ranks
def test_calls_with_the_same_numbers_keep_their_order(n, size, transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", f"send={transport}")
    assert run_ranks(flow, 2, 3, n, size) == [[], [float(i) for i in range(3 * n)]]


def leave_in_the_middle() -> list[float]:
    """In the first call, rank 1 takes one of three values and raises; then both go on."""
    rank, taken = dist.get_rank(), list[float]()
    incoming = [Incoming(0, i, (((1,), torch.float32),)) for i in range(3)] if rank else []

    def body(call: int, mailbox: Mailbox) -> None:
        for i in range(3):
            if rank == 0:
                mailbox.send(torch.full((1,), 10.0 * call + i), 1, i, last=True)
                continue
            taken.append(mailbox.receive().item())
            if call == 0:
                raise KeyError(call)

    for call in range(2):
        try:
            in_turn(partial(body, call), incoming, [(0, 1)])
        except KeyError:
            assert call == 0
    return taken


@pytest.mark.ranks
def test_a_call_that_raises_leaves_no_message_to_the_next():
    assert run_ranks(leave_in_the_middle, 2) == [[], [0.0, 10.0, 11.0, 12.0]]


# Collectives meanwhile.


def around() -> float:
    """A ring of waits: 0 awaits 2, which awaits 3 in a sum, which awaits 1, which awaits 0 in a sum that has begun."""
    rank, x = dist.get_rank(), torch.ones(1 << 23)  # more than a rank's staging memory holds
    with sl.Mesh(stage=2, data=2, stages="stage") as mesh:
        groups.prepare(mesh, [AXES])
        group = groups.group_for(mesh, AXES)
        assert group.transport == "shm"
        incoming = [Incoming({0: 2, 3: 1}[rank], 0, (((1,), torch.float32),))] if rank in (0, 3) else []
        received, began = torch.zeros(1), torch.zeros(1)

        def body(mailbox: Mailbox) -> None:
            if rank in (0, 1):
                if rank == 1:
                    dist.recv(began, 0)  # after this, rank 0 only moves the sum on while it awaits its message
                running = all_reduce.start(x, group)
                if rank == 0:
                    dist.send(began, 1)
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

        in_turn(body, incoming, [(1, 3), (2, 0)])
        dist.barrier()
    return received.item()


@TRANSPORTS
@pytest.mark.ranks
def test_a_rank_that_awaits_a_message_takes_part_in_collectives(transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", f"send={transport}")
    monkeypatch.setenv("SHARDLIB_TIMEOUT", "30")
    assert run_ranks(around, 4, timeout=400) == [2.0, 0.0, 0.0, 2.0]


def both_full() -> list[float]:
    """Two ranks that send each other more than their rings hold, and sum more than their staging memory, before any
    of them receives."""
    rank, x, size = dist.get_rank(), torch.ones(1 << 23), RING // 2
    incoming = [Incoming(1 - rank, i, (((size,), torch.float32),)) for i in range(3)]
    values: list[float] = []
    with sl.Mesh(data=2) as mesh:
        group = groups.group_for(mesh, AXES)

        def body(mailbox: Mailbox) -> None:
            running = all_reduce.start(x, group)
            for i in range(3):
                mailbox.send(torch.full((size,), 1.0 * i), 1 - rank, i, last=True)
            if rank:
                values.append(running.finish()[-1].item())
            values.extend(mailbox.receive()[-1].item() for _ in range(3))
            if not rank:
                values.append(running.finish()[-1].item())

        in_turn(body, incoming, BOTH)
    return sorted(values)


@pytest.mark.ranks
def test_full_rings_and_full_staging_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setenv("SHARDLIB_TIMEOUT", "30")
    assert run_ranks(both_full, 2) == [[0.0, 1.0, 2.0, 2.0]] * 2


# Errors.


def await_nothing(mailbox: Mailbox) -> None:
    os.environ["SHARDLIB_TIMEOUT"] = "1"
    mailbox.receive()


def send_too_much(mailbox: Mailbox) -> None:
    os.environ["SHARDLIB_TIMEOUT"] = "1"
    mailbox.send(torch.ones(RING // 2), 1, 0, last=True)


def wait_in_vain(body: Callable[[Mailbox], None]) -> tuple[str, int | None]:
    """On rank 0, the error of `body`, which waits for rank 1, and the culprit; rank 1 sends and takes nothing."""
    error = CollectiveError("")
    if dist.get_rank():
        in_turn(lambda mailbox: None, pairs=BOTH)
    else:
        incoming = [Incoming(1, 0, (((1,), torch.float32),))] if body is await_nothing else []
        try:
            in_turn(body, incoming, BOTH)
        except CollectiveError as caught:
            error = caught
    dist.barrier()
    return str(error), error.culprit


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (await_nothing, "no message comes from rank 1 within 1 s"),
        (send_too_much, "rank 1 takes no message within 1 s"),
    ],
)
@TRANSPORTS
@pytest.mark.ranks
def test_a_rank_that_is_late_is_named(body, text, transport, monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", f"send={transport}")
    with closing(Pool(2)) as pool:  # its own: the message is still under way in its processes
        assert pool.run(wait_in_vain, body)[0] == (text, 1)


def die() -> None:
    """Rank 1 dies before it sends its second message."""
    rank = dist.get_rank()
    incoming = [] if rank else [Incoming(1, i, (((3,), torch.float32),)) for i in range(2)]

    def body(mailbox: Mailbox) -> None:
        if rank:
            mailbox.send(torch.ones(3), 0, 0, last=True)
            os.kill(os.getpid(), signal.SIGKILL)
        mailbox.receive(), mailbox.receive()

    in_turn(body, incoming, [(1, 0)])


@pytest.mark.ranks
def test_a_killed_sender_is_named():
    with closing(Pool(2)) as pool, pytest.raises(RankError) as caught:
        pool.run(die)
    assert caught.value.errors[1] == f"died with exit code {-signal.SIGKILL}"
    assert str(caught.value.errors[0]) == "rank 1 is dead: its process is gone"


# Who shares memory.


def open_and_send(setting: str, prepare: str) -> tuple[list[Pair], float, str]:
    """The routes of this rank, a value that crosses, and the error of `open_routes`."""
    rank = dist.get_rank()
    os.environ["SHARDLIB_OPS"] = setting
    if prepare and rank == 1:
        PREPARE[prepare]()
    try:
        routes = groups.open_routes(sl.Mesh(stage=2, stages="stage"), BOTH)
    except ShardingError as error:
        return [], 0.0, str(error)
    value = 0.0

    def body(mailbox: Mailbox) -> None:
        nonlocal value
        mailbox.send(torch.tensor(2.0 + rank), 1 - rank, 0, last=True)
        value = mailbox.receive().item()

    in_turn(body, [Incoming(1 - rank, 0, (((), torch.float32),))], BOTH)
    return list(routes), value, ""


def _no_memory() -> None:
    def refuse(segment: Segment, size: int) -> int:
        raise SegmentError(f"cannot reserve {size >> 20} MiB of shared memory: Cannot allocate memory")

    Segment.reserve = refuse  # type: ignore[method-assign]


def _elsewhere() -> None:
    shm_segment.machine = lambda: "elsewhere"


PREPARE = {f.__name__: f for f in (_no_memory, _elsewhere)}


@pytest.mark.parametrize(
    ("setting", "prepare", "routes"),
    [("", "", BOTH), ("send=torch", "", []), ("torch", "", []), ("", "_no_memory", [(0, 1)]), ("", "_elsewhere", [])],
)
@pytest.mark.ranks
def test_both_ranks_have_a_route_or_neither(setting, prepare, routes):
    with closing(Pool(2)) as pool:
        assert pool.run(open_and_send, setting, prepare) == [(routes, 3.0, ""), (routes, 2.0, "")]


@pytest.mark.ranks
def test_shared_memory_that_is_asked_for_is_not_replaced():
    with closing(Pool(2)) as pool:
        results = pool.run(open_and_send, "send=shm", "_no_memory")
    for _, _, text in results:
        assert "SHARDLIB_OPS asks for send=shm, which cannot run here" in text
        assert "rank 1: cannot reserve 4 MiB of shared memory: Cannot allocate memory" in text
