"""Messages between two ranks: of one stage of a pipeline to the rank at the same place in another stage.

Ranks that share memory send each value when it is ready, by a route (`transport/shm_route.py`). Other messages go over
torch. A message holds one value or several. Both ranks know its layout: each value begins at a multiple of 16 bytes. A
message travels as bytes, so every dtype works on every backend. The ranks of a world agree on the turn (see
`distributed/turns.py`), which messages carry: none of another turn is taken for one of this.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.core.torch_internals.strided_only import as_bytes
from shardlib.distributed import turns, world
from shardlib.distributed.turn_errors import PATIENCE
from shardlib.ops.collectives.transport import groups
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.shm_channel import Transfer
from shardlib.ops.collectives.transport.shm_route import Pair, Route

AHEAD = 4  # receives over torch that have begun and for which the program does not wait yet
_ALIGNMENT = 16  # bytes
_NUMBERS = 11  # bits of a tag that tell the messages of one turn apart; torch takes 31 bits
_POLL_SECONDS = 0.001  # between two moves of running collectives in shared memory


Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a value


@dataclass(frozen=True)
class Incoming:
    """A message that a rank receives: the forms of its values. `number` is that of its last value."""

    peer: int
    number: int
    values: tuple[Form, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the values."""
        return [math.prod(shape) * dtype.itemsize for shape, dtype in self.values]


class Mailbox:
    """The messages of one program, a context manager around each of its calls.

    `routes` holds those of this rank. A send never waits for its receiver; the end of a call waits for all sends.
    Receives begin in the order of the program; over torch, `AHEAD` of them begin before the program needs them. Waits
    raise `CollectiveError` that names the peer if it is gone or late, and what `turns.Patience` raises.
    """

    def __init__(self, incoming: Sequence[Incoming], device: str, routes: Mapping[Pair, Route] | None = None) -> None:
        self._incoming, self._device = tuple(incoming), device
        self._to = {route.ranks[1]: route for route in (routes or {}).values() if route.position == 0}
        self._from = {route.ranks[0]: route for route in (routes or {}).values() if route.position == 1}
        self._reset()

    def _reset(self) -> None:
        self._next = (message for message in self._incoming if message.peer not in self._from)
        self._coming: deque[tuple[Incoming, _Flight]] = deque()
        self._expected = deque((m, form) for m in self._incoming for form in m.values if m.peer in self._from)
        self._arrivals = self._arrive()
        self._queued: list[Transfer] = []  # sends in shared memory that wait for room
        self._held = defaultdict[int, list[Tensor]](list)  # parts of the next message to each rank
        self._sent: list[_Flight] = []
        self._receiver, self._sender = _Waiter(self._device, keeps=True), _Waiter(self._device, keeps=False)

    def __enter__(self) -> None:
        turn, program, line, _ = turns.CURRENT_TURN
        self._tag = zlib.crc32(f"{turn} {program} {line}".encode()) >> (1 + _NUMBERS) << _NUMBERS
        for message in itertools.islice(self._next, AHEAD):
            self._begin(message)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for transfer in self._queued:
                    transfer.finish()
                for flight in self._sent:
                    flight.wait()
            elif not isinstance(error, CollectiveError):  # the next call must not take what this one leaves
                for message, form in self._expected:
                    self._from[message.peer].expect(*form)
        finally:
            self._receiver.stop()
            self._sender.stop()
            self._reset()

    def send(self, x: Tensor, peer: int, number: int, last: bool) -> None:
        """Adds a copy of `x` to the next message, so that the program may write over it; the `last` value sends it."""
        if (route := self._to.get(peer)) is not None:
            if (queued := route.send(x)) is not None:
                self._queued.append(queued)
            return
        self._held[peer].append(x.clone(memory_format=torch.contiguous_format))
        if last:
            message = pack(self._held.pop(peer))
            if len(message):
                work = _start(dist.isend, message, peer, self._tagged(number))
                self._sent.append(self._sender.submit(work, message, peer, f"rank {peer} takes no message"))

    def receive(self) -> Tensor:
        """Waits for the program's next value."""
        return next(self._arrivals)

    def _arrive(self) -> Iterator[Tensor]:
        for message in self._incoming:
            if (route := self._from.get(message.peer)) is not None:
                for _ in message.values:
                    _, form = self._expected.popleft()
                    yield route.receive(*form)
                continue
            _, flight = self._coming.popleft()
            buffer = flight.wait()
            assert buffer is not None, "what was received is kept"
            if (following := next(self._next, None)) is not None:
                self._begin(following)
            yield from unpack(buffer, message)

    def _begin(self, message: Incoming) -> None:
        buffer = torch.empty(_offsets(message.sizes)[-1], dtype=torch.uint8, device=self._device)
        peer, work = message.peer, None
        if len(buffer):
            work = _start(dist.irecv, buffer, peer, self._tagged(message.number))
        self._coming.append((message, self._receiver.submit(work, buffer, peer, f"no message comes from rank {peer}")))

    def _tagged(self, number: int) -> int:
        return int(self._tag | number & ((1 << _NUMBERS) - 1))


def pack(values: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of contiguous values, each at a multiple of 16 bytes; those of a single one are a view."""
    parts = [as_bytes(x) for x in values]
    if len(parts) == 1:
        return parts[0]
    offsets = _offsets([len(part) for part in parts])
    message = parts[0].new_empty(offsets[-1])
    for at, part in zip(offsets, parts, strict=False):
        message[at : at + len(part)] = part
    return message


def unpack(message: Tensor, like: Incoming) -> Iterator[Tensor]:
    """Yields the values of a message; several have memory of their own."""
    for at, size, (shape, dtype) in zip(_offsets(like.sizes), like.sizes, like.values, strict=False):
        part = message[at : at + size]
        yield (part if len(like.values) == 1 else part.clone()).view(dtype).view(shape)


def broadcast(x: Tensor, source: int, group: GroupHandle) -> None:
    """Copies the tensor `x` of the rank `source` into `x` of every member."""
    try:
        dist.broadcast(x, source, group=group.pg)
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Returns where each value begins, and the end of the last one."""
    starts = [0]
    for size in sizes[:-1]:
        starts.append(-(-(starts[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
    return [*starts, starts[-1] + sizes[-1]]


def _start(begin: Any, message: Tensor, peer: int, tag: int) -> Any:
    try:
        return begin(message, peer, tag=tag)
    except RuntimeError as error:
        raise _lost(peer, str(error)) from error


def _lost(peer: int, text: str) -> CollectiveError:
    error = CollectiveError(text)
    error.culprit = peer
    return error


class _Flight:
    """A message on its way, with the text of its error. With `keeps` the buffer stays when it has landed."""

    def __init__(self, keeps: bool, work: Any, buffer: Tensor, peer: int, fault: str) -> None:
        self.keeps, self.work, self.peer, self.fault = keeps, work, peer, fault
        self.buffer: Tensor | None = buffer
        self.landed = threading.Event()
        self.error: RuntimeError | None = None

    def land(self) -> None:
        """Waits in torch, for as long as the process group does."""
        try:
            if self.work is not None:
                self.work.wait()
        except RuntimeError as error:
            self.error = error
        self.work = None
        if not self.keeps:
            self.buffer = None
        self.landed.set()

    def wait(self) -> Tensor | None:
        """Waits and returns the buffer. Meanwhile it moves running collectives on, and checks the ranks' turns."""
        if not self.landed.is_set():
            look, seconds = turns.Patience(), world.timeout().total_seconds()
            end = time.monotonic() + seconds
            # Members of collectives in shared memory wait for what this rank does for them.
            while not self.landed.wait(_POLL_SECONDS if groups.advance() else PATIENCE):
                look()
                if time.monotonic() > end:
                    raise _lost(self.peer, f"{self.fault} within {seconds:g} s")
        if self.error is not None:
            raise _lost(self.peer, f"{self.fault}: {self.error}") from self.error
        return self.buffer


class _Waiter:
    """Waits for messages in the order in which they begin: a thread, as Gloo ends all of a rank's connections if a wait
    with a limit of time fails. On other devices waits do not block."""

    def __init__(self, device: str, *, keeps: bool) -> None:
        self._has_thread, self._keeps = device == "cpu", keeps
        self._flights: SimpleQueue[_Flight | None] | None = None

    def submit(self, *message: Any) -> _Flight:
        flight = _Flight(self._keeps, *message)
        if not self._has_thread:
            flight.land()
            return flight
        if self._flights is None:
            self._flights = SimpleQueue()
            threading.Thread(target=_land_all, args=(self._flights,), daemon=True, name="shardlib messages").start()
        self._flights.put(flight)
        return flight

    def stop(self) -> None:
        """Ends the thread behind the last message."""
        if self._flights is not None:
            self._flights.put(None)


def _land_all(flights: SimpleQueue[_Flight | None]) -> None:
    while (flight := flights.get()) is not None:
        flight.land()
