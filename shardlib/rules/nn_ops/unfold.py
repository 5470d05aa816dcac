"""Windows of a dim as a dim of their own, whose elements are a last dim."""

from __future__ import annotations

from dataclasses import replace

from shardlib.rules.iteration_space import arg, axis, is_backward, result_shape, words
from shardlib.rules.local_forms.index_dims import whole
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn


def _rule(call: Call) -> Rule:
    """`unfold(x, dimension, size, step)`, or `unfold_backward(grad, input_sizes, dim, size, step)`.

    Windows that touch are factors of the dim. Where elements only move, no operation is counted.
    """
    backward = is_backward(call)
    shape, windows = (call.operands[0].shape, result_shape(call))[:: -1 if backward else 1]
    if not shape:
        return replace(whole(call), flops=0)
    dim, size, step = (arg(call, name) for name in ("dim" if backward else "dimension", "size", "step"))
    at = axis(dim, len(shape))
    touching = size == step and shape[at] == windows[at] * size
    dims = words("d", len(shape)).split()
    before, after = " ".join(dims[:at]), " ".join(dims[at + 1 :])
    dims[at], last, note = ("(o k)", "k", "k:whole o:local") if touching else ("t", "_", "o:windows(t, size, step)")
    text = f"{' '.join(dims)} -> {before} o {after} {last} | {note} {{0}}"
    if backward:
        sizes = " ".join(f"{word}:size(input_sizes.{i})" for i, word in enumerate(dims))
        text = f"{gradient(text)} {sizes}"
    return pattern(text, local=nonempty if touching else None, flops=0)(call)


ROWS: dict[str, RuleFn | str] = dict.fromkeys(["unfold", "unfold_copy", "unfold_backward"], _rule)
