"""Runs functions on several Gloo processes, which are started once and kept, since importing torch takes seconds.

def check(n): ...                     # at the top of a test module; what it returns is pickled
results = run_ranks(check, 4, 8)      # check(8) on ranks 0 to 3; a list, by rank
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from shardlib.ops.collectives.transport import shm_segment

_GRACE_SECONDS = 15.0  # what the others get to fail by themselves after one rank has
_pools: dict[int, Pool] = {}
allowed = True  # in a test: whether it says that it starts processes


class RankError(AssertionError):
    """A rank raised, died or did not return in time; `errors` has its exception, or what became of it, by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException | str]) -> None:
        super().__init__(message)
        self.errors = errors


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`fn(*args)` on `n` ranks; their results, by rank.

    Raises `RankError` with every failing rank's traceback; the processes are then thrown away, as they are out of step.
    """
    assert allowed, "a test that starts ranks is marked: @pytest.mark.ranks"
    pool = _pools.get(n) or Pool(n)
    _pools[n] = pool
    try:
        return pool.run(fn, *args, timeout=timeout)
    except BaseException:
        _pools.pop(n).close()
        raise


def apart(fn: Callable[..., Any], *args: Any) -> tuple[BaseProcess, Connection]:
    """A process that has imported what ranks have, and runs `fn(pipe, *args)`; and this end of the pipe."""
    assert allowed, "a test that starts processes which have imported torch is marked: @pytest.mark.ranks"
    context = _forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=fn, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def heard(pipe: Connection, seconds: float = 60.0) -> Any:
    """What a process says, within so many seconds."""
    assert pipe.poll(seconds), f"the process has said nothing for {seconds:.0f} s"
    return pipe.recv()


def _forks() -> ForkServerContext:
    """Forks of a process that has imported what they need, and done nothing else, start in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.device_mesh", "pytest", "shardlib"])
    return context


class Pool:
    """`n` processes that are the ranks of one Gloo world."""

    def __init__(self, n: int) -> None:
        # The store is here, so that it outlives a rank that a test kills, and so that its port is free for sure.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _forks()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, n, self.store.port), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """See `run_ranks`; after an error the pool must be closed."""
        job = pickle.dumps((list(sys.path), dict(os.environ), pickle.dumps((fn, args))))
        results: dict[int, Any] = {}
        errors: dict[int, BaseException | str] = {}
        texts: dict[int, str] = {}
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a death is reported below
                pipe.send_bytes(job)
        deadline = time.monotonic() + timeout
        open_ = dict(enumerate(self.pipes))
        while open_ and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(open_.values()), left)
            for rank in [r for r, pipe in open_.items() if pipe in ready]:
                try:
                    ok, value, text = pickle.loads(open_.pop(rank).recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    ok, value, text = False, f"died with exit code {self.processes[rank].exitcode}", ""
                if ok:
                    results[rank] = value
                else:
                    errors[rank], texts[rank] = value, text
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        for rank in open_:
            errors[rank] = "did not return in time"
        if errors:
            lines = [f"rank {rank}: {error}\n{texts.get(rank, '')}" for rank, error in sorted(errors.items())]
            raise RankError("\n".join(lines), errors)
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """Kill all processes; they hold nothing worth keeping."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


TRANSPORTS = ("shm", "gloo", "far")


def speak(transport: str) -> None:
    """On a rank: exchange tensors in shared memory, over Gloo within a machine, or as ranks far from each other do.

    "pairs" puts two ranks on each machine.
    """
    os.environ["SHARDLIB_OPS"] = "torch" if transport == "gloo" else ""
    shm_segment.machine = partial(_machine, transport)


def _machine(transport: str) -> str:
    ranks = {"far": 1, "pairs": 2}.get(transport)
    return f"machine {dist.get_rank() // ranks}" if ranks else "this machine"


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _serve(pipe: Connection, rank: int, n: int, port: int) -> None:
    faulthandler.enable()
    gc.freeze()  # what the fork server imported
    own = {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    os.environ.update(own)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    while True:
        try:
            path, environment, job = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent has closed the pool, or is gone
            os._exit(0)
        sys.path[:] = path  # test modules are imported by the names that the parent knows them by
        # Not what the fork server was started with, nor what an earlier test has set here.
        for name in os.environ.keys() - environment.keys() - own.keys():
            del os.environ[name]
        os.environ.update({**environment, **own})
        torch.manual_seed(0)  # an earlier test may have drawn numbers on one rank only
        ok, answer = _answer(job)
        pipe.send_bytes(answer)
        if not ok:  # as a script would: then its connections close, and its peers' collectives fail
            os._exit(1)


def _answer(job: bytes) -> tuple[bool, bytes]:
    try:
        fn, args = pickle.loads(job)
        return True, pickle.dumps((True, fn(*args), ""))
    except BaseException as error:  # noqa: BLE001  a test may fail in any way; the parent raises it
        text = traceback.format_exc()
        try:
            return False, pickle.dumps((False, _portable(error), text))
        except (pickle.PicklingError, TypeError, AttributeError):
            return False, pickle.dumps((False, f"{type(error).__name__}: {error}", text))


def _portable(error: BaseException) -> BaseException | str:
    """The exception itself if it survives a trip through pickle, otherwise what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except (TypeError, pickle.PicklingError, AttributeError):
        return f"{type(error).__name__}: {error}"
    return error


def only(values: Sequence[Any]) -> Any:
    """The value that all ranks returned; fails when they differ."""
    assert all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]
