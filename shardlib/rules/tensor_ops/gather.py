"""Reading at indices, also along a cut dim.

Along a cut dim every device looks only at the indices that fall into its shard: a read gives zeros elsewhere, and a
pending sum over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.rules.iteration_space import numel, result_shape
from shardlib.rules.local_forms.helpers import Rows, checked, cut, located, nothing, torch_code
from shardlib.rules.local_forms.index_dims import Places, masks, whole
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Looks, Rule, RuleFn

aten = torch.ops.aten


def _taken(
    table: Tensor, indices: Sequence[Tensor], cuts: Sequence[Sequence[str]], read: Callable[..., Tensor], behind: int
) -> Tensor:
    """`read(table, indices)`, each index into a dim of the table that is cut so, and zeros for what lies elsewhere.

    `behind` is how many dims of the result stand behind those of the indices.
    """
    mine, outside = [], None
    for index, factors in zip(indices, cuts, strict=True):
        for factor in factors:
            index, miss = located(index, factor)
            outside = miss if outside is None else outside | miss
        mine.append(index)
    value = read(table, mine)
    return value if outside is None else value.masked_fill(outside[(..., *[None] * behind)], nothing(value.dtype))


def _embedding(local: Local, table: Tensor, index: Tensor, *_: Any) -> Tensor:
    read = lambda table, mine: aten.embedding.default(table, *mine)
    indices = [checked(index, local.call.operands[0].shape[0])]
    return _taken(Rows.of(local, [0]).held(table, 0), indices, [cut(local, ["v"])], read, 1)


def _reads(call: Call, places: Places) -> Rule:
    """The rule of an op that reads a table at places."""

    def form(local: Local, table: Tensor, *given: Any, **named: Any) -> Tensor:
        cuts, (*_, indices), rest = places.cuts(local), given[: places.until], given[places.until :]
        read = lambda table, mine: call.target(table, *places.arguments(mine), *rest, **named)
        held = Rows.of(local, [d for d, factors in cuts.items() if factors]).held(table, 0)
        return _taken(held, places.ready(indices, cuts), list(cuts.values()), read, places.behind)

    return places.space.rule(
        [places.x, *places.indices],
        [places.out],
        reduce=dict.fromkeys(places.rows, "sum"),
        linear=[{0}],
        local=torch_code(form),
        local_factors=places.rows,
        looks=Looks(places.rows, places.given_as),
        flops=numel(result_shape(call)),
    )


def _gather(call: Call) -> Rule:
    """`gather(x, dim, index)`. Other dims of the index may be shorter than x's; those stay whole."""
    places = Places.beside(call)
    return _reads(call, places) if places else whole(call)


def _index(call: Call) -> Rule | None:
    return None if masks(call) else _reads(call, Places.advanced(call))


ROWS: dict[str, RuleFn | str] = {
    "embedding": pattern(
        "v d, ... -> ... d | v:sum v:local {0}",
        form=_embedding,
        looks=Looks(("v",), (1,)),
        flops=lambda call, _: numel(result_shape(call)),
    ),
    "gather": _gather,
    "index_select": lambda call: _reads(call, Places.along(call)),
    **dict.fromkeys(["index.Tensor", "_unsafe_index.Tensor"], _index),
}
