"""Diagonals of matrices, and matrices made from diagonals.

The elements of a diagonal that crosses all rows share the factor of the rows, and so for columns. A device computes the
elements that cross its block of rows and columns. When a diagonal is read, zeros stand for the rest, and the devices'
results are a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.iteration_space import Space, arg, normalize_dim, result_shape, size_arguments
from shardlib.rules.local_forms.halo import length, shard_range
from shardlib.rules.local_forms.helpers import can_add, from_torch_code, pad_constant
from shardlib.rules.rule import Call, LocalBuilder, Rule, RuleFn
from shardlib.rules.tensor_ops.view import view_labels

aten = torch.ops.aten


def _diagonal(call: Call) -> Rule:
    """Reads a diagonal, or writes it among zeros (`diag_embed`, `_backward`) or into another value (`_scatter`)."""
    reads = schema_of(call.target).name.endswith(("diagonal", "diagonal_copy"))
    shape = call.operands[0].shape if reads or len(call.operands) == 2 else result_shape(call)
    offset, *dims = (arg(call, name) for name in ("offset", "dim1", "dim2"))
    at = [normalize_dim(d, len(shape)) for d in dims]
    sizes = [shape[d] for d in at]
    count = min(sizes[0] + min(offset, 0), sizes[1] - max(offset, 0))
    crossed = [i for i, n in enumerate(sizes) if n == count > 1]
    along = crossed[0] if crossed else 0
    space = Space()
    if crossed:
        x = space.dims(shape)
        part = [*(dim for d, dim in enumerate(x) if d not in at), x[at[along]]]
        labels = [x[d] for d in at]
    else:
        x, (part,) = view_labels(space, aten.diagonal.default, shape, offset, *at)
        labels = [(), ()]
    other = labels[1 - along]
    if reads and not can_add(call.operands[0].dtype):
        space.whole |= {*other}

    def form(_: LocalBuilder, *args: Any) -> Tensor:
        tensors = args[: len(call.operands)]
        rows, columns = (shard_range(label, n) for label, n in zip(labels, sizes, strict=True))
        lower = offset + rows[0] - columns[0]
        inside = max(0, min(length(rows) + min(lower, 0), length(columns) - max(lower, 0)))
        before = max(0, lower if along else -lower) if inside else 0
        if reads:
            part = aten.diagonal.default(tensors[0], lower, *at)
            after = length((rows, columns)[along]) - inside - before
            return pad_constant(part, [before, after]) if other else part
        part = tensors[-1].narrow(-1, before, inside)
        base = tensors[0] if len(tensors) == 2 else _zeros(part, at, (length(rows), length(columns)))
        matrix: Tensor = aten.diagonal_scatter.default(base, part, lower, *at)
        return matrix

    sized = call.target is aten.diagonal_backward.default
    operands, result = ([x], part) if reads else ([x, part] if len(call.operands) == 2 else [part], x)
    return space.rule(
        operands,
        [result],
        reduce=dict.fromkeys(other, "sum") if reads else {},
        linear=[range(len(call.operands))],
        ints=size_arguments(call, "input_sizes", x) if sized else {},
        emit=from_torch_code(form),
        local_factors=[f for label in labels for f in label],
    )


def _zeros(part: Tensor, at: Sequence[int], sizes: tuple[int, int]) -> Tensor:
    """Zeros with the shape of the matrices around a diagonal."""
    shape = list(part.shape[:-1])
    for d, n in sorted(zip(at, sizes, strict=True)):
        shape.insert(d, n)
    return part.new_zeros(shape)


ROWS: dict[str, RuleFn | str] = {
    **dict.fromkeys(["diagonal", "diagonal_copy", "diag_embed", "diagonal_backward", "diagonal_scatter"], _diagonal),
}

DECOMPOSED: dict[str, Any] = {"trace": lambda x: x.diagonal().sum()}
