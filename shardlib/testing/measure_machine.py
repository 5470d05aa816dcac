"""`Machine.measure`: times matrix products, copies and calls on each rank, and messages between ranks.

All ranks are timed at once, since processes of one machine share its cores and memory.
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

_SIDE = {"cpu": 512, "cuda": 4096}  # rows of the multiplied matrices
_COPIED = {"cpu": 1 << 22, "cuda": 1 << 27}  # bytes of a copied tensor, typical for a step
_COPIES = 24  # tensors, more than a cache holds
_NUMBERS = 1 << 16  # elements for special functions
_TILE = 128  # rows of a tile of attention, which no op reveals

_SENT = (1 << 12, 1 << 16, 1 << 20)  # bytes of a rank's shard
_SECONDS, _BATCHES = 0.1, 9  # duration of a batch of calls (many time slices of a shared core), and their number
_MESSAGES = 10  # messages in a batch, the same on all ranks


def measure() -> Machine:
    """Returns the machine of this process, or of all ranks; see `Machine.measure`."""
    ranks = world.size() or 1
    if ranks > 1:
        Mesh(ranks=ranks).device_mesh  # noqa: B018 - starts torch.distributed where nothing has yet
    mesh = current_mesh()
    kind = world.device_type(None, world.kind()) if mesh is None or mesh.kind == "abstract" else mesh.device
    device = _measure_device(torch.device(kind))
    if ranks == 1:
        link = Machine.preset("cpu").inner
    else:
        device, link = _average_over_ranks(device, _measure_link(ranks), ranks)
    return Machine(device, link, link, node=ranks)


def _measure_device(where: torch.device) -> Device:
    rates, side, copied = {}, _SIDE[where.type], _COPIED[where.type]
    for name, dtype in (("f64", torch.float64), ("f32", torch.float32), ("bf16", torch.bfloat16)):
        factors = [torch.rand(side, side, device=where).to(dtype) for _ in range(_COPIES)]
        rates[name] = 2 * side**3 / (_time_call(partial(_multiply, factors), where) / _COPIES)
    values = [torch.zeros(copied // 4, device=where) for _ in range(_COPIES)]
    bandwidth = 3 * copied / (_time_call(partial(_add, values), where) / _COPIES)
    small = torch.zeros(16, device=where)
    launch = _time_call(lambda: [small + 1.0 for _ in range(100)], where) / 100
    special = math.inf  # on a GPU no op of torch is limited by special functions alone
    host = bandwidth / 2
    if where.type == "cuda":
        pinned = torch.zeros(copied, dtype=torch.uint8, pin_memory=True)
        host = copied / _time_call(lambda: pinned.to(where, non_blocking=True), where)
        memory = float(torch.cuda.get_device_properties(where).total_memory)
    else:
        memory = _host_memory()
        x = torch.rand(_NUMBERS)
        special = _NUMBERS / _time_call(lambda: x.exp(), where)
    return Device(rates, bandwidth, memory, host, launch, special=special, tile=_TILE, overlaps=where.type == "cuda")


def _multiply(values: list[torch.Tensor]) -> None:
    """Multiplies neighboring matrices, more than a cache holds."""
    for i, x in enumerate(values):
        mm(x, values[i - 1])


def _add(values: list[torch.Tensor]) -> None:
    """Writes the sum of two others to each tensor, more than a cache holds."""
    third = len(values) // 3
    for i, out in enumerate(values):
        torch.add(values[i - third], values[i - 2 * third], out=out)


def _measure_link(ranks: int) -> Link:
    """Fits a latency per hop and a bandwidth to gathers and sums of several sizes.

    They run between matrix products, as in a program, so that messages wait for the last rank and for a core.
    """
    rows, seconds = [], []
    with Mesh(ranks=ranks):
        for nbytes in _SENT:
            x = jit(lambda x: x + 0, in_specs=(P("ranks"),))(torch.zeros(nbytes // 4 * ranks))
            local = _after_product(lambda p: p + 0, x, P("ranks"))
            for call, out, hops, wire in (
                (lambda p: all_gather(p, "ranks"), P(), ranks - 1, nbytes * (ranks - 1)),
                (lambda p: psum(p, "ranks"), P(), 2 * (ranks - 1), 2 * nbytes * (ranks - 1) / ranks),
            ):
                rows.append([hops, wire])
                seconds.append(max(_time_difference(_after_product(call, x, out), local, x.device), 1e-9))
    a, b = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    latency, per_byte = (max(float(t), 1e-12) for t in torch.linalg.lstsq(a / b[:, None], torch.ones_like(b)).solution)
    return Link(1 / per_byte, latency)


def _after_product(call: Callable[..., torch.Tensor], x: torch.Tensor, out: P) -> Callable[[], object]:
    """Returns a call of a matrix product, then of `call` per device."""
    step = partial(jit(shard_map(call, in_specs=(P("ranks"),), out_specs=out)), x)
    a = torch.rand(_SIDE["cpu"] // 2, _SIDE["cpu"] // 2, device=x.device)
    return lambda: (a @ a, step())


def _time_difference(call: Callable[[], object], local: Callable[[], object], where: torch.device) -> float:
    """Returns the seconds that a call takes beyond another: the median over alternating batches."""
    for warm_up in (call, local):
        warm_up()
    dist.barrier()
    return statistics.median(
        _time_batch(call, where, _MESSAGES) - _time_batch(local, where, _MESSAGES) for _ in range(_BATCHES)
    )


def _average_over_ranks(device: Device, link: Link, ranks: int) -> tuple[Device, Link]:
    """Averages each figure over all ranks, so that all describe one machine; takes the minimum of memory."""
    figures = {f.name: getattr(device, f.name) for f in fields(Device) if isinstance(getattr(device, f.name), float)}
    mine = [*device.flops.values(), *figures.values(), link.bandwidth, link.latency]
    with Mesh(ranks=ranks):
        all_ranks = from_local(torch.tensor([mine], dtype=torch.float64), P("ranks"))
        means, least = all_ranks.mean(0).tolist(), all_ranks.amin(0).tolist()
    named = dict(zip((*device.flops, *figures), means, strict=False))
    flops = {dtype: named.pop(dtype) for dtype in device.flops}
    named["memory"] = least[[*device.flops, *figures].index("memory")]
    return replace(device, flops=flops, **named), Link(*means[-2:])


def _time_call(call: Callable[[], object], where: torch.device) -> float:
    """Returns the seconds of a call: the lower quartile of the means of batches, since other load only adds time.

    All ranks begin together.
    """
    call()
    if world.initialized():
        dist.barrier()
    return statistics.quantiles((_time_batch(call, where) for _ in range(_BATCHES)), n=4)[0]


def _time_batch(call: Callable[[], object], where: torch.device, most: int | None = None) -> float:
    """Returns the mean seconds of `most` calls, or of the calls in `_SECONDS`; synchronizes a GPU once, at the end."""
    if where.type == "cuda" and most is None:
        most = math.ceil(_SECONDS / max(_time_batch(call, where, 1), 1e-6))
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
