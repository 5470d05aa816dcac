"""Collectives that a user wrote in a shard_map body, as steps of the program."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardlib.aten.calls import FILLED
from shardlib.graph import Op
from shardlib.lower.builder import Builder
from shardlib.meshes.axis import Axis
from shardlib.program.steps import Var
from shardlib.program.sym import place_in
from shardlib.specs.layout import Layout


def collective(builder: Builder, op: Op, source: Var, name: str) -> Var:
    """Append one `shardlib::manual_<kind>` op; returns its result."""
    result, args = op.results[0], op.call.args
    assert result is not None
    out = Var(name, Layout.replicated(result.shape), result.dtype, result, ((), None))
    axes = _axes(builder, args[1])
    kind, n, shape = op.kind.removeprefix("manual_"), math.prod(a.size for a in axes), op.operands[0].shape
    if kind == "axis_index":
        builder.compute(FILLED, (source, [], place_in(axes)), {"dtype": torch.int64}, [out])
        return out
    params: dict[str, Any] = {}
    reduce, sent = "sum", float(result.nbytes)
    if kind == "all_reduce":
        reduce, sent = args[2], 2 * result.nbytes * (n - 1) / n
    elif kind == "all_gather":
        params, sent = {"dim": args[2], "sizes": [shape[args[2]]] * n}, result.nbytes * (n - 1) / n
    elif kind == "reduce_scatter":
        params, sent = {"dim": args[2], "sizes": [shape[args[2]] // n] * n}, result.nbytes * (n - 1)
    elif kind == "all_to_all":
        split, concat = args[2], args[3]
        params = {
            "split_dim": split,
            "split_sizes": [shape[split] // n] * n,
            "concat_dim": concat,
            "concat_sizes": [shape[concat]] * n,
        }
        sent = result.nbytes * (n - 1) / n
    else:
        params = {"pairs": list(zip(args[2][::2], args[2][1::2], strict=True))}
    said = "the transpose of a collective in a shard_map body" if op.backward else "written in a shard_map body"
    return builder.communicate(kind, axes, source, out, params, sent, reduce, said)


def _axes(builder: Builder, names: list[str]) -> tuple[Axis, ...]:
    return tuple(builder.mesh.axis(name) for name in names)
