"""Bags and segments: sums of rows of a table.

Bags need whole indices. Along a sharded vocabulary each device sums its own rows, and reads the rows of other devices
as one spare row of zeros after its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from shardlib.rules.iteration_space import arg, dim_names, is_backward, normalize_dim, result_shape
from shardlib.rules.local_forms.helpers import ReducedDims, check_index, from_torch_code, locate_index, sharded_factors
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn

SUM, MEAN, MAX = range(3)  # values of `mode`


def _spare(index: Tensor, rows: int, padding: int = -1) -> Tensor:
    """Indices into this shard; those of other devices' rows, and of the padding, name a spare row after the last."""
    mine, skipped = locate_index(index, "v", padding)
    return mine.masked_fill(skipped, rows)


def _for_rows(form: Callable[..., Any]) -> Callable[[LocalBuilder], Any]:
    """Uses `form` where the rows of the table are sharded, else the op itself."""
    return lambda local: from_torch_code(form)(local) if sharded_factors(local, ["v"]) else nonempty(local)


def _with_spare_row(local: LocalBuilder, table: Tensor, index: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """This shard of the table, which may be empty, with a spare row of zeros, and the indices into it."""
    mine = _spare(check_index(index, local.call.operands[0].shape[0]), len(table), padding)
    return pad(ReducedDims.over(local, [1]).fill_empty(table, 0), [0, 0, 0, 1]), mine


def _bag(
    local: LocalBuilder, table: Tensor, index: Tensor, offsets: Tensor, by_count: bool = False, mode: int = SUM,
    sparse: bool = False, weights: Tensor | None = None, last: bool = False, padding: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    target = local.call.target
    # The other results do not depend on the table's values: 1 stands for the padding, 0 for all other rows.
    kinds = (index == padding).to(index.dtype)
    options = (by_count, mode, sparse, weights, last, 1 if padding >= 0 else -1)
    _, *counts = target(table.new_zeros(2, 1), kinds, offsets, *options)
    padded, mine = _with_spare_row(local, table, index, padding)
    out = target(padded, mine, offsets, False, SUM, False, weights, last, -1)[0].narrow(1, 0, table.shape[1])
    if mode == MEAN:
        bags = result_shape(local.call)[0]  # a GPU adds one more count
        out = out / counts[1].narrow(0, 0, bags).clamp_min(1).unsqueeze(1)
    return out, *counts


def _elements_read(call: Call, _: int) -> int:
    """Returns the number of elements of all rows that the indices name."""
    index = next(m for m in call.operands if not (m.dtype.is_floating_point or m.dtype.is_complex))
    return math.prod(index.shape) * call.operands[0].shape[1]


def _embedding_bag(call: Call) -> Rule:
    """The other results are integers: sizes of bags, and positions of maxima, for which the rows stay whole."""
    takes_max = arg(call, "mode") == MAX
    kinds = "v:whole d:local d:none" if takes_max else "v:sum v:local d:local d:none"
    weights = ", _" if len(call.operands) == 4 else ""
    text = f"v d, _, _{weights} -> _ d, _, _, {'_ d' if takes_max else '_'} | {kinds}"
    return pattern(text, emit=_for_rows(_bag), complete=frozenset({1, 2, 3}), flops=_elements_read)(call)


def _bag_backward(first: int) -> RuleFn:
    """Returns the rule of the op `(grad, indices, ..., bag sizes, maxima, size, ...)`; the size is argument `first`."""

    def form(local: LocalBuilder, grad: Tensor, index: Tensor, *rest: Any) -> Tensor:
        *before, counted, maxima = rest[: first - 2]
        n, by_count, mode, *others, padding = rest[first - 2 :]
        maxima = _spare(maxima, n) if mode == MAX else maxima
        arguments = *before, counted, maxima, n + 1, by_count, mode, *others, -1
        out: Tensor = local.call.target(grad, _spare(index, n, padding), *arguments).narrow(0, 0, n)
        return out

    def rule(call: Call) -> Rule:
        takes_max, whole = arg(call, "mode") == MAX, ", ".join("_" * (first - 2))
        # Torch's CPU kernel scales a row by the counts of other indices, which depend on the whole list.
        rows = "v:whole(scale_grad_by_freq) v:local v:size(num_weights) d:local {0}"
        text = f"_ d, {whole}, {'_ d' if takes_max else '_'}, _ -> v d | {rows}"
        return pattern(text, emit=_for_rows(form), flops=_elements_read)(call)

    return rule


def _weights_backward(local: LocalBuilder, grad: Tensor, table: Tensor, index: Tensor, *rest: Any) -> Tensor:
    """The gradient of a weight is the product of a row and the bag's gradient; 0 if another device has the row."""
    *more, padding = rest
    mine, skipped = locate_index(index, "v", padding)
    grad, table = (
        ReducedDims.over(local, [1]).fill_empty(grad, 0),
        ReducedDims.over(local, [0, 1], 1).fill_empty(table, 0),
    )
    out: Tensor = local.call.target(grad, table, mine, *more, -1).masked_fill(skipped, 0)
    return out


def _renorm(local: LocalBuilder, table: Tensor, index: Tensor, *options: Any) -> Tensor:
    out: Tensor = local.call.target(pad(table, [0, 0, 0, 1]), _spare(index, len(table)), *options)
    return out.narrow(0, 0, len(table))


def _segments(call: Call) -> Rule:
    """Lengths (or offsets) lie along one dim of the data. Dims before it have their own, dims after it share them."""
    backward = is_backward(call)
    data = call.operands[2 if backward else 0]
    at = normalize_dim(arg(call, "axis"), data.rank)
    before, after, tensors = dim_names("n", at), dim_names("d", data.rank - at - 1), 3 if backward else 1
    terms = [f"{before} _ {after}"] * tensors + [f"{before} _"] * (len(call.operands) - tensors)
    notes = " ".join(f"{f}:local" for f in before.split())
    local = nonempty if backward else partial(nonempty, unsafe=True)
    return pattern(f"{', '.join(terms)} -> {terms[0]} | {notes}", emit=local, flops=lambda *_: math.prod(data.shape))(
        call
    )


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], _embedding_bag),
    "_embedding_bag_backward": _bag_backward(6),
    "_embedding_bag_dense_backward": _bag_backward(5),
    "_embedding_bag_per_sample_weights_backward": pattern(
        "_ d, v d, _, _, _ -> _ | d:sum d:local v:sum v:local {0} {1}",
        form=_weights_backward,
        flops=lambda call, points: 2 * _elements_read(call, points),
    ),
    "embedding_renorm": pattern("v _, ... -> v _ | v:local ...:whole", form=_renorm),
    **dict.fromkeys(["segment_reduce", "_segment_reduce_backward"], _segments),
}
