"""`Machine.measure`: the machine at hand, timed. Products, copies and calls in this process; sums between ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from shardlib.jit import jit
from shardlib.machine import Device, Link, Machine
from shardlib.manual.collectives import all_gather
from shardlib.meshes.mesh import Mesh
from shardlib.ranks import world
from shardlib.shard_map import shard_map
from shardlib.specs.spec import P
from shardlib.tensors.agreed import from_local

_SIDE = 1024  # of the matrices that are multiplied
_COPIED = 1 << 26  # bytes
_SENT = (1 << 14, 1 << 18, 1 << 22)  # bytes of a rank's piece
_ROUNDS = 7


def measure() -> Machine:
    """The machine that this process, or this world of ranks, runs on; see `Machine.measure`."""
    device = _device(torch.device(world.device_type(None, world.kind())))
    ranks = world.size() or 1
    device, link = (device, Machine.preset("cpu").inner) if ranks == 1 else _slowest(device, _link(ranks), ranks)
    return Machine(device, link, link, node=ranks)


def _device(where: torch.device) -> Device:
    rates = {}
    for name, dtype in (("f64", torch.float64), ("f32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.rand(_SIDE, _SIDE, device=where).to(dtype)
        rates[name] = 2 * _SIDE**3 / _median(partial(torch.mm, a, a), where)
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=where)
    copied = _median(source.clone, where)
    small = torch.zeros(16, device=where)
    launch = _median(lambda: [small.add(1.0) for _ in range(100)], where) / 100
    host = 2 * _COPIED / copied
    if where.type == "cuda":
        pinned = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=True)
        host = _COPIED / _median(lambda: pinned.to(where, non_blocking=True), where)
        memory = float(torch.cuda.get_device_properties(where).total_memory)
    else:
        memory = _host_memory()
    return Device(rates, 2 * _COPIED / copied, memory, host, launch, overlaps=where.type == "cuda")


def _link(ranks: int) -> Link:
    """A latency for every hop and a rate, fitted to all-gathers of several sizes, as a program's own run."""
    with Mesh(ranks=ranks):
        times = []
        for nbytes in _SENT:
            x = torch.zeros(nbytes // 4 * ranks)
            spread = jit(lambda x: x + 0, in_specs=(P("ranks"),))(x)
            gather = jit(shard_map(lambda p: all_gather(p, "ranks"), in_specs=(P("ranks"),), out_specs=P()))
            times.append(_median(partial(gather, spread), spread.device))
    wires = [nbytes * (ranks - 1) for nbytes in _SENT]
    rate = (wires[-1] - wires[-2]) / max(times[-1] - times[-2], 1e-9)
    return Link(rate, max(times[0] - wires[0] / rate, 0.0) / (ranks - 1))


def _slowest(device: Device, link: Link, ranks: int) -> tuple[Device, Link]:
    """Of all ranks, figure by figure, so that all have one machine."""
    rates = [*device.flops.values(), device.bandwidth, device.memory, device.host, link.bandwidth]
    mine = torch.tensor([[*rates, -device.launch, -link.latency]], dtype=torch.float64)
    with Mesh(ranks=ranks):
        *flops, bandwidth, memory, host, wire, launch, latency = from_local(mine, P("ranks")).amin(0).tolist()
    named = dict(zip(device.flops, flops, strict=True))
    return Device(named, bandwidth, memory, host, -launch, overlaps=device.overlaps), Link(wire, -latency)


def _median(call: Callable[[], object], where: torch.device) -> float:
    """Seconds of a call; the median of several, after one that does not count."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


Machine.measured = staticmethod(measure)
