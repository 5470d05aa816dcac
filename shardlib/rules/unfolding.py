"""Windows of a dim as a dim of their own, whose elements are a last dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardlib.rules.lineup import whole
from shardlib.rules.notation import gradient
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.space import arg, axis, result_shape
from shardlib.rules.stencil import nonempty


def _rule(call: Call, shape: Sequence[int], windows: Sequence[int], first: int, dim: str) -> Rule:
    """The rule of a value of this `shape` and its windows, or of their gradient: `dim, size, step` stand at `first`.

    Windows that touch are factors of the dim. Where elements only move, no operation is counted.
    """
    if not shape:
        return replace(whole(call), flops=0)
    at, size = axis(arg(call, first, dim), len(shape)), arg(call, first + 1, "size")
    touching = size == arg(call, first + 2, "step") and shape[at] == windows[at] * size
    words = [f"d{i}" for i in range(len(shape))]
    before, after = " ".join(words[:at]), " ".join(words[at + 1 :])
    words[at], last, note = ("(o k)", "k", "k:whole o:local") if touching else ("t", "_", "o:windows(t, size, step)")
    text = f"{' '.join(words)} -> {before} o {after} {last} | {note} {{0}}"
    if first > 1:
        sizes = " ".join(f"{word}:size(input_sizes.{i})" for i, word in enumerate(words))
        text = f"{gradient(text)} {sizes}"
    return pattern(text, local=nonempty if touching else None, flops=0)(call)


def _unfold(call: Call) -> Rule:
    """`unfold(x, dimension, size, step)`."""
    return _rule(call, call.operands[0].shape, result_shape(call), 1, "dimension")


def _unfold_backward(call: Call) -> Rule:
    """`unfold_backward(grad, input_sizes, dim, size, step)`."""
    return _rule(call, result_shape(call), call.operands[0].shape, 2, "dim")


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["unfold", "unfold_copy"], _unfold),
    "unfold_backward": _unfold_backward,
}
