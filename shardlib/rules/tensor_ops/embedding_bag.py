"""Bags and segments: rows of a table added up in groups.

Bags that are given by where they start need whole indices; those of one length are cut as any batch. Along a cut
vocabulary every device adds up the rows that it has: what lies on the others is looked up in one row of zeros behind
its last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from shardlib.ops.bags import MAX, MEAN, SUM
from shardlib.rules.iteration_space import arg, axis, is_backward, numel, result_shape, words
from shardlib.rules.local_forms.helpers import Rows, checked, cut, located, torch_code
from shardlib.rules.local_forms.stencil import nonempty
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn


def _spare(index: Tensor, rows: int, padding: int = -1) -> Tensor:
    """Indices as this shard counts; those on other devices, and the padding, are one behind the shard's last."""
    mine, skipped = located(index, "v", padding)
    return mine.masked_fill(skipped, rows)


def _where_cut(form: Callable[..., Any]) -> Callable[[Local], Any]:
    """`form` where the rows of the table are cut; all else is the op itself."""
    return lambda local: torch_code(form)(local) if cut(local, ["v"]) else nonempty(local)


def _found(local: Local, table: Tensor, index: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """A piece of the table, which may be empty, with a row of zeros behind it, and the indices as it counts."""
    mine = _spare(checked(index, local.call.operands[0].shape[0]), len(table), padding)
    return pad(Rows.of(local, [1]).held(table, 0), [0, 0, 0, 1]), mine


def _bag(
    local: Local, table: Tensor, index: Tensor, offsets: Tensor, by_count: bool = False, mode: int = SUM,
    sparse: bool = False, weights: Tensor | None = None, last: bool = False, padding: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    target = local.call.target
    # Where bags begin and what they count has nothing to do with the table: 1 is the padding, 0 what is none.
    kinds = (index == padding).to(index.dtype)
    how = (by_count, mode, sparse, weights, last, 1 if padding >= 0 else -1)
    _, *counts = target(table.new_zeros(2, 1), kinds, offsets, *how)
    wide, mine = _found(local, table, index, padding)
    out = target(wide, mine, offsets, False, SUM, False, weights, last, -1)[0].narrow(1, 0, table.shape[1])
    if mode == MEAN:
        bags = result_shape(local.call)[0]  # a GPU counts one more behind the last
        out = out / counts[1].narrow(0, 0, bags).clamp_min(1).unsqueeze(1)
    return out, *counts


def _looked_up(call: Call, _: int) -> int:
    """The elements of the rows that are read: a row of the first operand's length for each index."""
    index = next(m for m in call.operands if not (m.dtype.is_floating_point or m.dtype.is_complex))
    return numel(index.shape) * call.operands[0].shape[1]


def _embedding_bag(call: Call) -> Rule:
    """The other results hold integers about the bags, and for a maximum where it was found, which asks for all rows."""
    most = arg(call, "mode") == MAX
    kinds = "v:whole d:local d:none" if most else "v:sum v:local d:local d:none"
    weights = ", _" if len(call.operands) == 4 else ""
    text = f"v d, _, _{weights} -> _ d, _, _, {'_ d' if most else '_'} | {kinds}"
    return pattern(text, local=_where_cut(_bag), complete=frozenset({1, 2, 3}), flops=_looked_up)(call)


def _even_bag(
    local: Local, table: Tensor, index: Tensor, weights: Tensor | None, mode: int, padding: int
) -> tuple[Tensor, ...]:
    out, _, none = local.call.target(*_found(local, table, index, padding), weights, SUM, -1)
    counts = index.ne(padding).sum(1).to(index.dtype) if mode == MEAN else none
    out = out / counts.clamp_min(1).unsqueeze(1) if mode == MEAN else out
    return out.narrow(1, 0, table.shape[1]), counts, none


def _even_bags(call: Call) -> Rule:
    mode = arg(call, "mode")
    kinds = f"{'v:whole' if mode == MAX else 'v:sum v:local'} d:local d:none b:none"
    text = f"v d, b t, b t -> b d, {'_' if mode == SUM else 'b'}, {'b d' if mode == MAX else '_'} | {kinds}"
    return pattern(text, local=_where_cut(_even_bag), complete=frozenset({1, 2}), flops=_looked_up)(call)


def _bag_backward(first: int, bag: str, between: str) -> RuleFn:
    """`(grad, indices, ..., bag sizes, maxima, size of the vocabulary, ...)`, the size at position `first`; `between`
    are the terms from the indices to the bag sizes, `bag` is what bags are in them."""

    def form(local: Local, grad: Tensor, index: Tensor, *rest: Any) -> Tensor:
        *before, counted, maxima = rest[: first - 2]
        n, by_count, mode, *others, padding = rest[first - 2 :]
        maxima = _spare(maxima, n) if mode == MAX else maxima
        given = *before, counted, maxima, n + 1, by_count, mode, *others, -1
        out: Tensor = local.call.target(grad, _spare(index, n, padding), *given).narrow(0, 0, n)
        return out

    def rule(call: Call) -> Rule:
        most, every = arg(call, "mode") == MAX, between.split(",")
        # Torch's kernel on CPU scales by the counts of other indices than the row's: which, only the whole list tells.
        rows = "v:whole(scale_grad_by_freq) v:local v:size(num_weights) d:local {0}"
        rows += "" if bag == "_" else f" {bag}:sum {bag}:gather {bag}:whole(scale_grad_by_freq)"
        text = f"{bag} d, {between}, {f'{bag} d' if most else '_'}, {every[0]} -> v d | {rows}"
        return pattern(text, local=_where_cut(form), flops=_looked_up)(call)

    return rule


def _weights_backward(local: Local, grad: Tensor, table: Tensor, index: Tensor, *rest: Any) -> Tensor:
    """The gradient of a weight is the product of a row and the bag's gradient: 0 where the row is elsewhere."""
    *more, padding = rest
    mine, skipped = located(index, "v", padding)
    grad, table = Rows.of(local, [1]).held(grad, 0), Rows.of(local, [0, 1], 1).held(table, 0)
    out: Tensor = local.call.target(grad, table, mine, *more, -1).masked_fill(skipped, 0)
    return out


def _weights(terms: str) -> RuleFn:
    flops = lambda call, points: 2 * _looked_up(call, points)
    return pattern(f"{terms} | d:sum d:local v:sum v:local {{0}} {{1}}", form=_weights_backward, flops=flops)


def _renorm(local: Local, table: Tensor, index: Tensor, *how: Any) -> Tensor:
    """The row of zeros has no norm to speak of."""
    out: Tensor = local.call.target(pad(table, [0, 0, 0, 1]), _spare(index, len(table)), *how)
    return out.narrow(0, 0, len(table))


def _segments(call: Call) -> Rule:
    """Lengths (or offsets) lie along one dim of the data: dims before it have their own, dims behind share them."""
    backward = is_backward(call)
    data = call.operands[2 if backward else 0]
    at = axis(arg(call, "axis"), data.rank)
    before, behind, tensors = words("n", at), words("d", data.rank - at - 1), 3 if backward else 1
    terms = [f"{before} _ {behind}"] * tensors + [f"{before} _"] * (len(call.operands) - tensors)
    notes = " ".join(f"{f}:local" for f in before.split())
    local = nonempty if backward else partial(nonempty, unsafe=True)
    return pattern(f"{', '.join(terms)} -> {terms[0]} | {notes}", local=local, flops=lambda *_: numel(data.shape))(call)


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["_embedding_bag", "_embedding_bag_forward_only"], _embedding_bag),
    "_embedding_bag_backward": _bag_backward(6, "_", "_, _, _, _"),
    "_embedding_bag_dense_backward": _bag_backward(5, "_", "_, _, _"),
    "_embedding_bag_per_sample_weights_backward": _weights("_ d, v d, _, _, _ -> _"),
    "shardlib::bags": _even_bags,
    "shardlib::bags_backward": _bag_backward(4, "b", "b t, b"),
    "shardlib::bags_weights_backward": _weights("b d, v d, b t -> b t"),
    "embedding_renorm": pattern("v _, ... -> v _ | v:local ...:whole", form=_renorm),
    **dict.fromkeys(["segment_reduce", "_segment_reduce_backward"], _segments),
}
