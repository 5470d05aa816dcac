"""Fourier transforms: the transformed dims stay whole, and all ops are linear.

The last transformed dim may change its size, since real signals have half a spectrum.
"""

from __future__ import annotations

import math

from shardlib.rules.iteration_space import arg, result_shape
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, RuleFn


def _flops(call: Call, _: int) -> int:
    shape, new = call.operands[0].shape, result_shape(call)
    steps: int = sum(max(shape[i], new[i]).bit_length() for i in arg(call, "dim"))
    return 5 * steps * max(math.prod(shape), math.prod(new))


# The FFT libraries refuse empty batches. A complex transform keeps the size of the dim, so both sides share its factor.
_NOTES = "dim:whole ...:local {0}"
_TRANSFORM = pattern(f"[dim] -> [_] | {_NOTES}", emit=nonempty, flops=_flops)
_COMPLEX = pattern(f"[dim] -> [dim] | {_NOTES}", emit=nonempty, flops=_flops)

ROWS: dict[str, RuleFn | str] = {**dict.fromkeys(["_fft_r2c", "_fft_c2r"], _TRANSFORM), "_fft_c2c": _COMPLEX}
