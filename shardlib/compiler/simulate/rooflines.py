"""Seconds of one call on a device: of its arithmetic and functions, or of the memory that it touches, as more is.

A row for every family of ops that touches other memory than all of its operands and results. FLOPs are the program's
own (`Compute.flops`), `functions` counts the others. Source: Williams, Waterman and Patterson, "Roofline" (2009).
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
from shardlib.compiler.simulate.special_functions import evaluated, op_name, tiled
from shardlib.core.aten.op_traits import is_view
from shardlib.sharding.mesh.machine import Device, Machine
from shardlib.tensor.tensor_meta import short_dtype


def _whole(step: Compute) -> float:
    return float(sum(v.nbytes for v in (*dict.fromkeys(step.operands), *step.made)))


def _looked_up(step: Compute) -> float:
    """Of the first operand only as much is read as there is in the results."""
    written = sum(v.nbytes for v in step.made)
    return float(2 * written + sum(v.nbytes for v in step.operands[1:]))


def _picked(step: Compute) -> float:
    """One number of the first operand is read for each of the second."""
    first, *others = step.operands
    picked = first.dtype.itemsize * others[0].nbytes / others[0].dtype.itemsize
    return picked + sum(v.nbytes for v in (*others, *step.made))


def _shaped_as(operand: int) -> Callable[[Compute], float]:
    """Of one operand only the shape is read."""
    return lambda step: _whole(step) - step.operands[operand].nbytes


def _added_to(step: Compute) -> float:
    """In place, only what is written is touched, and read before; else all of the operand is copied, too."""
    return float(3 * sum(v.nbytes for v in step.operands[1:])) + (0.0 if step.over else _whole(step))


def _nothing(step: Compute) -> float:
    return 0.0


# What a call touches, by the name of its op; others touch all their operands and results.
BYTES: Mapping[str, Callable[[Compute], float]] = {
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "take"), _looked_up),
    **dict.fromkeys(("nll_loss", "nll_loss_forward", "nll_loss2d", "nll_loss2d_forward"), _picked),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _shaped_as(1)),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"), _shaped_as(0)),
    **dict.fromkeys(("slice_scatter", "select_scatter", "index_put", "index_add", "index_copy", "scatter"), _added_to),
    **dict.fromkeys(("scatter_add", "scatter_reduce"), _added_to),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"), _nothing),
}


def touched(step: Compute) -> float:
    """Bytes of a device's memory that a call reads and writes; 0 for a view."""
    if is_view(step.target) and not step.copies:
        return 0.0
    return BYTES.get(op_name(step.target), _whole)(step)


@functools.cache
def _largest(count: int) -> float:
    """The expected largest of so many standard normal variables: the mean of its quantiles."""
    quantiles = ((i + 0.5) / 1000 for i in range(1000))
    return fmean(NormalDist().inv_cdf(q ** (1 / count)) for q in quantiles)


def slowest(machine: Machine, count: int) -> Machine:
    """The machine as so many devices have it, all of which wait for the slowest: that is its device.

    It takes longer by the largest of `count` normal variables, as is expected.

    Example:
        >>> h100 = Machine.preset("h100")
        >>> [round(h100.device.bandwidth / slowest(h100, n).device.bandwidth, 3) for n in (1, 8, 128, 4096)]
        [1.0, 1.021, 1.039, 1.054]
    """
    device = machine.device
    if not device.spread:
        return machine
    longer = 1 + device.spread * _largest(count)
    rates = {name: getattr(device, name) / longer for name in ("efficiency", "bandwidth", "special")}
    return replace(machine, device=replace(device, **rates, spread=0.0))


def seconds(step: Compute, cost: Cost, device: Device) -> float:
    """Seconds of a call: launched while the one before runs; or, where the device is its own host, before it does
    anything itself, be it no more than a view."""
    busy = arithmetic(step, device) * tiled(step, device.tile) + evaluated(step, device.tile) / device.special
    work = max(busy, cost.bytes / device.bandwidth)
    return max(work, device.launch if cost.launched else 0.0) if device.overlaps else work + device.launch


def arithmetic(step: Compute, device: Device) -> float:
    """Seconds of its FLOPs at the rate of the dtype that most bytes of its operands have."""
    floats = [v for v in step.operands or step.made if v.dtype.is_floating_point or v.dtype.is_complex]
    if not floats or not step.flops:
        return 0.0
    dtype = max(floats, key=lambda v: v.nbytes).dtype
    return step.flops / device.rate(short_dtype(dtype), _width(dtype))


class Cost(NamedTuple):
    """Bytes of memory that a call touches, and whether it is launched by itself."""

    bytes: float
    launched: bool


def fused(program: Program) -> dict[Compute, Cost]:
    """What every call costs where a compiler makes one kernel of calls element by element that follow each other.

    A reduction may end such a kernel. What a kernel makes is read by its own calls for nothing, and written only if
    others read it.
    """
    kernel: dict[Compute, int] = {}
    made: dict[Var, int] = {}  # by which kernel
    epoch = 0  # a kernel ends where something else runs
    for step in program.steps:
        if isinstance(step, Compute) and _by_element(step):
            kernel[step] = epoch
            made |= dict.fromkeys(step.made, epoch)
            epoch += _tagged(step, torch.Tag.reduction)
        elif not isinstance(step, Free) and not _is_free(step):
            epoch += 1
    readers = Counter(program.results)  # of other kernels
    for step in program.steps:
        own = kernel.get(step) if isinstance(step, Compute) else None
        readers.update(v for v in reads(step) if v in made and made[v] != own)
    held = plain(program)
    seen: set[int] = set()
    for step, number in kernel.items():
        outside = [v for v in dict.fromkeys(step.operands) if made.get(v) != number]
        nbytes = sum(v.nbytes for v in (*outside, *(v for v in step.made if readers[v])))
        held[step] = Cost(float(nbytes), number not in seen)
        seen.add(number)
    return held


def plain(program: Program) -> dict[Compute, Cost]:
    """What every call costs, each a kernel of its own."""
    calls = ((step, touched(step)) for step in program.steps if isinstance(step, Compute))
    return {step: Cost(held, bool(held or step.flops)) for step, held in calls}


def _by_element(step: Compute) -> bool:
    return _tagged(step, torch.Tag.pointwise) or _tagged(step, torch.Tag.reduction)


def _tagged(step: Compute, tag: torch.Tag) -> bool:
    return tag in getattr(step.target, "tags", ())


def _is_free(step: Step) -> bool:
    """Whether nothing runs: a view, or a message that starts."""
    return isinstance(step, Start) or (isinstance(step, Compute) and touched(step) == 0)


def _width(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
