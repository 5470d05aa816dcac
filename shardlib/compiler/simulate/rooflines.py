"""Estimates the seconds of one call on a device: the maximum over its arithmetic and its memory traffic.

There is a row for every family of ops that touches other memory than all of its operands and results. FLOPs are the
program's own (`Compute.flops`). Source: Williams, Waterman and Patterson, "Roofline" (2009).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist, fmean
from typing import NamedTuple

import torch

from shardlib.compiler.program.steps import Compute, Free, Program, Start, Step, Var, reads
from shardlib.compiler.simulate.special_functions import PRODUCTS, evaluated, op_name, tiled
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.machine import Device, Machine
from shardlib.tensor.tensor_meta import short_dtype


def _whole(step: Compute) -> float:
    return float(sum(v.nbytes for v in (*dict.fromkeys(step.operands), *step.out_vars)))


def _lookup_bytes(step: Compute) -> float:
    """Reads as much of the first operand as there is in the results."""
    written = sum(v.nbytes for v in step.out_vars)
    return float(2 * written + sum(v.nbytes for v in step.operands[1:]))


def _picked_bytes(step: Compute) -> float:
    """Reads one number of the first operand for each of the second."""
    first, *others = step.operands
    read = first.dtype.itemsize * others[0].nbytes / others[0].dtype.itemsize
    return read + sum(v.nbytes for v in (*others, *step.out_vars))


def _shaped_as(operand: int) -> Callable[[Compute], float]:
    """Reads only the shape of one operand."""
    return lambda step: _whole(step) - step.operands[operand].nbytes


def _added_to(step: Compute) -> float:
    """Reads and writes the updated elements; out of place, the operand is copied, too."""
    return float(3 * sum(v.nbytes for v in step.operands[1:])) + (0.0 if step.over else _whole(step))


def _nothing(step: Compute) -> float:
    return 0.0


# The bytes that a call touches, by the name of its op; other ops touch all their operands and results.
BYTES: Mapping[str, Callable[[Compute], float]] = {
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "take"), _lookup_bytes),
    **dict.fromkeys(("nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward"), _picked_bytes),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _shaped_as(1)),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"), _shaped_as(0)),
    **dict.fromkeys(("slice_scatter", "select_scatter", "index_put", "index_add", "index_copy", "scatter"), _added_to),
    **dict.fromkeys(("scatter_add", "scatter_reduce"), _added_to),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"), _nothing),
}


def touched(step: Compute) -> float:
    """Returns the bytes of a device's memory that a call reads and writes; 0 for a view."""
    if is_view(step.target) and not step.copies:
        return 0.0
    return BYTES.get(op_name(step.target), _whole)(step)


@functools.cache
def _largest(count: int) -> float:
    """Returns the expected maximum of `count` standard normal variables, as the mean of its quantiles."""
    quantiles = ((i + 0.5) / 1000 for i in range(1000))
    return fmean(NormalDist().inv_cdf(q ** (1 / count)) for q in quantiles)


def slowest(machine: Machine, count: int) -> Machine:
    """Returns the machine with the slowest of `count` devices, for which the others wait.

    The device is slower by the expected maximum of `count` normal variables.
    """
    device = machine.device
    if not device.spread:
        return machine
    longer = 1 + device.spread * _largest(count)
    rates = {name: getattr(device, name) / longer for name in ("efficiency", "bandwidth", "special")}
    return replace(machine, device=replace(device, **rates, spread=0.0))


def seconds(step: Compute, cost: Cost, device: Device) -> float:
    """Returns the seconds of a call.

    A device with a host overlaps launches with the call before. One that is its own host adds the launch to each call.
    """
    busy = arithmetic(step, device) * tiled(step, device.tile)
    if device.attention is not None and op_name(step.target) in PRODUCTS:
        busy /= device.attention
    else:
        busy += evaluated(step, device.tile) / device.special
    work = max(busy, cost.bytes / device.bandwidth)
    return max(work, device.launch if cost.launched else 0.0) if device.overlaps else work + device.launch


def arithmetic(step: Compute, device: Device) -> float:
    """Returns the seconds of a call's FLOPs, at the rate of the dtype of its largest operand."""
    floats = [v for v in step.operands or step.out_vars if v.dtype.is_floating_point or v.dtype.is_complex]
    if not floats or not step.flops:
        return 0.0
    dtype = max(floats, key=lambda v: v.nbytes).dtype
    return step.flops / device.rate(short_dtype(dtype), _width(dtype))


class Cost(NamedTuple):
    """The bytes that a call touches, and True if it is launched as a kernel of its own."""

    bytes: float
    launched: bool


def fused(program: Program) -> dict[Compute, Cost]:
    """Returns the cost of every call, if a compiler fuses successive pointwise calls into one kernel.

    A reduction may end such a kernel. A kernel reads its own results for free, and writes those that others read.
    """
    kernel: dict[Compute, int] = {}
    producer: dict[Var, int] = {}  # value -> its kernel
    epoch = 0  # any other step ends a kernel
    for step in program.steps:
        if isinstance(step, Compute) and _by_element(step):
            kernel[step] = epoch
            producer |= dict.fromkeys(step.out_vars, epoch)
            epoch += _tagged(step, torch.Tag.reduction)
        elif not isinstance(step, Free) and not _is_free(step):
            epoch += 1
    readers = Counter(program.results)  # of other kernels
    for step in program.steps:
        own = kernel.get(step) if isinstance(step, Compute) else None
        readers.update(v for v in reads(step) if v in producer and producer[v] != own)
    held = plain(program)
    seen: set[int] = set()
    for step, number in kernel.items():
        outside = [v for v in dict.fromkeys(step.operands) if producer.get(v) != number]
        nbytes = sum(v.nbytes for v in (*outside, *(v for v in step.out_vars if readers[v])))
        held[step] = Cost(float(nbytes), number not in seen)
        seen.add(number)
    return held


def plain(program: Program) -> dict[Compute, Cost]:
    """Returns the cost of every call as a kernel of its own."""
    calls = ((step, touched(step)) for step in program.steps if isinstance(step, Compute))
    return {step: Cost(held, bool(held or step.flops)) for step, held in calls}


def _by_element(step: Compute) -> bool:
    return _tagged(step, torch.Tag.pointwise) or _tagged(step, torch.Tag.reduction)


def _tagged(step: Compute, tag: torch.Tag) -> bool:
    return tag in getattr(step.target, "tags", ())


def _is_free(step: Step) -> bool:
    """True if a step runs no kernel: a view, or the start of a message."""
    return isinstance(step, Start) or (isinstance(step, Compute) and touched(step) == 0)


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
