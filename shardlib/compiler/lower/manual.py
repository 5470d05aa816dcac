"""Emits the collectives of a shard_map body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import place_in
from shardlib.core.aten.op_names import FILLED
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Axis, group_size


def collective(builder: Builder, op: Op, source: Var, name: str) -> Var:
    """Emits one `shardlib::manual_<kind>` op; returns its result."""
    result, args = op.results[0], op.call.args
    assert result is not None
    out = Var(name, Layout.replicated(result.shape), result.dtype, result, ((), None))
    axes = _axes(builder, args[1])
    kind, n, shape = op.kind.removeprefix("manual_"), group_size(axes), op.operands[0].shape
    if kind == "axis_index":
        builder.compute(FILLED, (source, [], place_in(axes)), {"dtype": torch.int64}, [out])
        return out
    params, reduce, sent = collective_arguments(kind, args[2:], [[size] * n for size in shape], n, result.nbytes)
    reason = "the transpose of a collective in a shard_map body" if op.backward else "written in a shard_map body"
    return builder.communicate(kind, axes, source, out, params, sent, reduce, reason)


def collective_arguments(
    kind: str, args: Sequence[Any], members: Sequence[Sequence[Any]], n: int, nbytes: float
) -> tuple[dict[str, Any], str, float]:
    """Returns a collective's parameters, its reduction, and the bytes that each device sends.

    `args` are those of the manual op. `members` has, per dim, the sizes of the `n` members' operands. `nbytes` are the
    bytes of the result.
    """
    match kind:
        case "all_reduce":
            return {}, args[0], 2 * nbytes * (n - 1) / n
        case "all_gather":
            return {"dim": args[0], "sizes": list(members[args[0]])}, "sum", nbytes * (n - 1) / n
        case "reduce_scatter":
            return {"dim": args[0], "sizes": [size // n for size in members[args[0]]]}, "sum", nbytes * (n - 1)
        case "all_to_all":
            split, concat = args[:2]
            params = {
                "split_dim": split,
                "split_sizes": [size // n for size in members[split]],
                "concat_dim": concat,
                "concat_sizes": list(members[concat]),
            }
            return params, "sum", nbytes * (n - 1) / n
    return {"pairs": list(zip(args[0][::2], args[0][1::2], strict=True))}, "sum", nbytes


def _axes(builder: Builder, names: list[str]) -> tuple[Axis, ...]:
    return tuple(builder.mesh.axis(name) for name in names)
