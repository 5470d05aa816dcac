"""`unfold`: the windows of a dim as a dim of their own, and their elements as the last dim."""

from __future__ import annotations

from dataclasses import replace

from shardlib.rules.iteration_space import arg, dim_names, is_backward, normalize_dim, result_shape
from shardlib.rules.local_forms.index_dims import replicated
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.notation import gradient_pattern
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn


def _rule(call: Call) -> Rule:
    """`unfold(x, dimension, size, step)`, or `unfold_backward(grad, input_sizes, dim, size, step)`.

    Adjacent windows are factors of the dim. Moves count no operations.
    """
    backward = is_backward(call)
    shape, windows = (call.operands[0].shape, result_shape(call))[:: -1 if backward else 1]
    if not shape:
        return replace(replicated(call), flops=0)
    dim, size, step = (arg(call, name) for name in ("dim" if backward else "dimension", "size", "step"))
    at = normalize_dim(dim, len(shape))
    touching = size == step and shape[at] == windows[at] * size
    dims = dim_names("d", len(shape)).split()
    before, after = " ".join(dims[:at]), " ".join(dims[at + 1 :])
    dims[at], last, note = ("(o k)", "k", "k:whole o:local") if touching else ("t", "_", "o:windows(t, size, step)")
    text = f"{' '.join(dims)} -> {before} o {after} {last} | {note} {{0}}"
    if backward:
        sizes = " ".join(f"{word}:size(input_sizes.{i})" for i, word in enumerate(dims))
        text = f"{gradient_pattern(text)} {sizes}"
    return pattern(text, emit=nonempty if touching else None, flops=0)(call)


ROWS: dict[str, RuleFn | str] = dict.fromkeys(["unfold", "unfold_copy", "unfold_backward"], _rule)
