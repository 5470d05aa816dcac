"""`Machine.measure`: the machine at hand, timed. Products, copies and calls on each rank; messages between ranks.

Processes of one machine share its cores and its memory: all ranks are timed at once, so that a figure is what each of
them gets while all work.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist

from shardlib.distributed import world
from shardlib.jit.jit import jit
from shardlib.jit.shard_map import shard_map
from shardlib.ops.matmul import mm
from shardlib.primitives.collectives import all_gather, psum
from shardlib.sharding.mesh.machine import Device, Link, Machine
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.spec import P
from shardlib.tensor.rank_checks import from_local

_SIDE = {"cpu": 512, "cuda": 4096}  # of the matrices that are multiplied
_COPIED = {"cpu": 1 << 22, "cuda": 1 << 27}  # bytes, as many as a value of a step may have
_COPIES = 24  # of as many values as no cache holds
_NUMBERS = 1 << 16  # of which functions are worked out
_TILE = 128  # of attention, of which no op tells
_SENT = (1 << 12, 1 << 16, 1 << 20)  # bytes of a rank's piece
# A figure is the lower quartile of means, each of what is done in that time: many turns of processes that share a core.
_SECONDS, _BATCHES = 0.1, 9
_MESSAGES = 10  # or the median of what so many messages take: all ranks send as many


def measure() -> Machine:
    """The machine that this process, or this world of ranks, runs on; see `Machine.measure`."""
    ranks = world.size() or 1
    if ranks > 1:
        Mesh(ranks=ranks).device_mesh  # noqa: B018 - starts torch.distributed where nothing has yet
    mesh = current_mesh()
    there = None if mesh is None or mesh.kind == "abstract" else mesh.device
    device = _device(torch.device(there or world.device_type(None, world.kind())))
    device, link = (device, Machine.preset("cpu").inner) if ranks == 1 else _mean(device, _link(ranks), ranks)
    return Machine(device, link, link, node=ranks)


def _device(where: torch.device) -> Device:
    rates, side, copied = {}, _SIDE[where.type], _COPIED[where.type]
    for name, dtype in (("f64", torch.float64), ("f32", torch.float32), ("bf16", torch.bfloat16)):
        factors = [torch.rand(side, side, device=where).to(dtype) for _ in range(_COPIES)]
        rates[name] = 2 * side**3 / (_seconds(partial(_multiplied, factors), where) / _COPIES)
    values = [torch.zeros(copied // 4, device=where) for _ in range(_COPIES)]
    bandwidth = 3 * copied / (_seconds(partial(_added, values), where) / _COPIES)
    small = torch.zeros(16, device=where)
    launch = _seconds(lambda: [small + 1.0 for _ in range(100)], where) / 100
    special = math.inf  # of a GPU: no op of torch's waits for them alone
    host = bandwidth / 2
    if where.type == "cuda":
        pinned = torch.zeros(copied, dtype=torch.uint8, pin_memory=True)
        host = copied / _seconds(lambda: pinned.to(where, non_blocking=True), where)
        memory = float(torch.cuda.get_device_properties(where).total_memory)
    else:
        memory = _host_memory()
        x = torch.rand(_NUMBERS)
        special = _NUMBERS / _seconds(lambda: x.exp(), where)
    return Device(rates, bandwidth, memory, host, launch, special=special, tile=_TILE, overlaps=where.type == "cuda")


def _multiplied(values: list[torch.Tensor]) -> None:
    """Products of some matrices, which no cache holds any more."""
    for i, x in enumerate(values):
        mm(x, values[i - 1])


def _added(values: list[torch.Tensor]) -> None:
    """Each of some values becomes the sum of two others, which no cache holds any more."""
    third = len(values) // 3
    for i, out in enumerate(values):
        torch.add(values[i - third], values[i - 2 * third], out=out)


def _link(ranks: int) -> Link:
    """A latency for every hop and a rate, fitted to gathers and sums of several sizes, as a program's own run: between
    products, so that a message waits for the last rank, and what carries it for a core."""
    rows, seconds = [], []
    with Mesh(ranks=ranks):
        for nbytes in _SENT:
            x = jit(lambda x: x + 0, in_specs=(P("ranks"),))(torch.zeros(nbytes // 4 * ranks))
            bare = _behind_a_product(lambda p: p + 0, x, P("ranks"))
            for call, out, hops, wire in (
                (lambda p: all_gather(p, "ranks"), P(), ranks - 1, nbytes * (ranks - 1)),
                (lambda p: psum(p, "ranks"), P(), 2 * (ranks - 1), 2 * nbytes * (ranks - 1) / ranks),
            ):
                rows.append([hops, wire])
                seconds.append(max(_apart(_behind_a_product(call, x, out), bare, x.device), 1e-9))
    a, b = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    latency, each = (max(float(t), 1e-12) for t in torch.linalg.lstsq(a / b[:, None], torch.ones_like(b)).solution)
    return Link(1 / each, latency)


def _behind_a_product(call: Callable[..., torch.Tensor], x: torch.Tensor, out: P) -> Callable[[], object]:
    step = partial(jit(shard_map(call, in_specs=(P("ranks"),), out_specs=out)), x)
    a = torch.rand(_SIDE["cpu"] // 2, _SIDE["cpu"] // 2, device=x.device)
    return lambda: (a @ a, step())


def _apart(call: Callable[[], object], bare: Callable[[], object], where: torch.device) -> float:
    """Seconds that a call takes beyond another: the median of differences, of batches that alternate."""
    for first in (call, bare):
        first()
    dist.barrier()
    return statistics.median(_batch(call, where, _MESSAGES) - _batch(bare, where, _MESSAGES) for _ in range(_BATCHES))


def _mean(device: Device, link: Link, ranks: int) -> tuple[Device, Link]:
    """Of all ranks, figure by figure, so that all have one machine; of memory, the least that one of them has."""
    rates = {f.name: getattr(device, f.name) for f in fields(Device) if isinstance(getattr(device, f.name), float)}
    mine = [*device.flops.values(), *rates.values(), link.bandwidth, link.latency]
    with Mesh(ranks=ranks):
        ours = from_local(torch.tensor([mine], dtype=torch.float64), P("ranks"))
        means, least = ours.mean(0).tolist(), ours.amin(0).tolist()
    named = dict(zip((*device.flops, *rates), means, strict=False))
    flops = {dtype: named.pop(dtype) for dtype in device.flops}
    named["memory"] = least[[*device.flops, *rates].index("memory")]
    return replace(device, flops=flops, **named), Link(*means[-2:])


def _seconds(call: Callable[[], object], where: torch.device) -> float:
    """Seconds of a call: of some batches, each of many calls, the lower quartile of means, since what else runs on a
    machine makes calls longer and never shorter. All ranks begin together."""
    call()
    if world.initialized():
        dist.barrier()
    return statistics.quantiles((_batch(call, where) for _ in range(_BATCHES)), n=4)[0]


def _batch(call: Callable[[], object], where: torch.device, most: int | None = None) -> float:
    """Seconds of a call, the mean of as many as a while has, or of so many. A GPU is waited for once, behind them."""
    if where.type == "cuda" and most is None:
        most = math.ceil(_SECONDS / max(_batch(call, where, 1), 1e-6))
    start = time.perf_counter()
    for count in itertools.count(1):
        call()
        seconds = time.perf_counter() - start
        if count == most or (most is None and seconds >= _SECONDS):
            break
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        seconds = time.perf_counter() - start
    return seconds / count


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


Machine.measured = staticmethod(measure)
