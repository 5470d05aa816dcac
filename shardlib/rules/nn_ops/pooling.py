"""Pooling: batch and channels may be sharded, and spatial dims, which exchange their borders.

Spatial dims of results are windows of those of the input (`rules/local_forms/stencil.py`). Each window has the padding
that it has in the whole plane. Indices are positions in the whole plane. Adaptive pools have adjacent windows where the
sizes divide, and blocks of copies where all dims grow by whole numbers. Their other dims stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardlib.rules.iteration_space import arg, is_backward, result_shape
from shardlib.rules.local_forms.stencil import Reach, Stencil, nonempty
from shardlib.rules.local_forms.window import Window, per_dim
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn


def _windows(call: Call, x: Sequence[int], out: Sequence[int]) -> Sequence[Window | None]:
    """Returns the windows of each spatial dim; None where the windows of a dim differ."""
    dims, name = len(x), str(call.target)
    if "fractional" in name or "unpool" in name:
        return [None] * dims
    if "adaptive" in name:
        return [Window(a // b, a // b) if b and a and a % b == 0 else None for a, b in zip(x, out, strict=True)]
    kernel, padding = (per_dim(arg(call, name), dims) for name in ("kernel_size", "padding"))
    stride, dilation = per_dim(arg(call, "stride") or kernel, dims), per_dim(arg(call, "dilation", 1), dims)
    return [*map(Window, kernel, stride, padding, dilation)]


def _rule(call: Call) -> Rule:
    name, dims = str(call.target), 3 if "3d" in str(call.target) else 2
    backward = is_backward(call)
    small, large = (call.operands[0].shape, result_shape(call))[:: 1 if backward else -1]
    sizes = list(zip(large[-dims:], small[-dims:], strict=True))
    if "adaptive_avg" in name and all(b and a % b == 0 for b, a in sizes):
        return _copied(call, [a // b for b, a in sizes], backward=backward)
    windows = _windows(call, *zip(*sizes, strict=True))
    read, pooled = ([f"{'h' if a == b else f}{k}" for k, (a, b) in enumerate(sizes)] for f in "io")
    reach = {
        o: Reach.windows(i, *size, window, ceil=arg(call, "ceil_mode", False))
        for o, i, size, window in zip(pooled, read, sizes, windows, strict=True)
        if window and 1 not in size
    }
    x, out = (
        " ".join(w if o in reach else "_" for w, o in zip(words, pooled, strict=True)) for words in (read, pooled)
    )
    x, out = f"... c {x}", f"... c {out}"
    if backward:
        text = f"{', '.join([out, x, *[out] * (len(call.operands) - 2)])} -> {x}"
    else:
        text = f"{', '.join([x, *_other_operands(call, dims, x)])} -> {', '.join([out] * len(call.results))}"
    notes = "c:local {0}" if backward or "avg" in name or "unpool" in name else "c:local"
    if "adaptive" in name and not backward:
        notes += "".join(f" {o}:size(output_size.{k})" for k, o in enumerate(pooled) if o in reach)
    stencil = Stencil(reach, backward, 1 if backward else None, partial(_run, dims))
    flops = math.prod(small) * math.prod(w.kernel for w in windows if w)
    return pattern(f"{text} | {notes}", stencil=stencil, flops=lambda *_: flops)(call)


def _copied(call: Call, times: Sequence[int], *, backward: bool) -> Rule:
    """Returns the rule of an adaptive pool that copies each element `times` times along each dim."""
    x = " ".join(f"h{k}" for k in range(len(times)))
    out = " ".join(f"(h{k} r{k})" for k in range(len(times)))
    text = f"... c {out}, ... c {x} -> ... c {x}" if backward else f"... c {x} -> ... c {out}"
    notes = " ".join(f"h{k}:local r{k}:whole" for k in range(len(times)))
    if not backward:
        notes += "".join(f" (h{k} r{k}):size(output_size.{k})" for k in range(len(times)))
    return pattern(f"{text} | c:local {notes} {{0}}", emit=nonempty)(call)


def _other_operands(call: Call, dims: int, x: str) -> list[str]:
    """Returns the other operands of forward ops: indices, or numbers `[n, c, dims]` that place windows."""
    if "unpool" in str(call.target):
        return [x]
    batch = "..." if call.operands[0].rank > dims + 1 else "1"
    return [f"{batch} {'c' if m.shape[1] > 1 else '1'} _" for m in call.operands[1:]]


def _run(dims: int, local: LocalBuilder, args: dict[str, Any], begins: Mapping[int, int]) -> Any:
    """Runs the op on a part of the plane that begins at `begins`, and converts indices."""
    call, part = local.call, args["self"].shape
    if is_backward(call):
        if "indices" in args and begins:
            at = {d: -n for d, n in begins.items()}
            index = _convert_index(args["indices"], call.operands[1].shape, part, at, dims)
            args["indices"] = index.clamp(min=0)  # indices outside of the part belong to gradients of 0
        return call.target(**args)
    results = call.target(**args)
    if len(call.results) == 1 or not begins:
        return results
    return results[0], _convert_index(results[1], part, call.operands[0].shape, begins, dims)


def _convert_index(
    index: Tensor, have: Sequence[int], want: Sequence[int], begin: Mapping[int, int], dims: int
) -> Tensor:
    """Converts flat indices into the plane of shape `have` to those into `want`, in which it starts at `begin`."""
    coordinates = {}
    for at in range(len(have) - 1, len(have) - dims, -1):
        rest = index // max(have[at], 1)
        coordinates[at] = index - rest * have[at]
        index = rest
    first = len(have) - dims
    total = index + begin[first] if first in begin else index
    for at, x in reversed(coordinates.items()):
        total = total * want[at] + (x + begin[at] if at in begin else x)
    return total


_NAMES = ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "fractional_max_pool")
_PLANES = ("2d", "3d")
ROWS: dict[str, RuleFn | str] = {
    f"{name}{dims}{end}": _rule
    for dims in _PLANES
    for name, ends in (
        *((name, ("", "_backward")) for name in _NAMES),
        ("max_pool", ("_with_indices", "_with_indices_backward")),
        ("max_unpool", ("",)),
    )
    for end in ends
}
