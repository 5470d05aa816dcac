"""Reshards tensors outside `jit`, by programs of reshards alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.errors import ShardingError
from shardlib.distributed.provenance import result_origin
from shardlib.eager.compile_op import CompiledOp, Operand, compile_op
from shardlib.eager.prepare import COMPILE_LOCK
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.placement import FactorNames
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form

_programs: BoundedCache[Any, CompiledOp] = BoundedCache(1 << 10)


def relayout(x: ShardedTensor, layout: Layout, names: FactorNames | None = None) -> ShardedTensor:
    """Returns `x` in another layout, without history. If nothing moves, the result shares the shards."""
    form = x._form
    to = Form.intern(layout, x.mesh, x.dtype, form.device, names)
    if form.layout.canonical == layout.canonical:
        return _keep_origin(wrap(to, x._locals), x)
    if form.layout.pending and not layout.pending:
        return _keep_origin(relayout(_reduce_partial(x), layout, names), x)
    program = _get_program((form,), (to,))
    (shards,) = program([x._locals], lineage=x._origin)
    (result,) = program.results
    assert result is not None, "a reshard has a result"
    return _keep_origin(wrap(Form.intern(result.layout, x.mesh, x.dtype, form.device, result.names), tuple(shards)), x)


def reshard_together(tensors: Sequence[ShardedTensor], forms: Sequence[Form]) -> Sequence[tuple[torch.Tensor, ...]]:
    """Returns the shards of tensors of one mesh in the layouts of other forms of their shapes and dtypes.

    One program reshards all tensors, so that their messages travel together.
    """
    program = _get_program(tuple([x._form for x in tensors]), tuple(forms))
    return program([x._locals for x in tensors], lineage=result_origin(0, tensors) if program.communicates else 0)


def _get_program(forms: tuple[Form, ...], to: tuple[Form, ...]) -> CompiledOp:
    program = _programs.get((forms, to))
    if program is None:
        with COMPILE_LOCK:
            program = _programs.get((forms, to))
            if program is None:
                operands = [Operand(form, shown=shown) for form, shown in zip(forms, to, strict=True)]
                program = _programs[forms, to] = compile_op(None, (), {}, operands, forms[0].mesh)
    return program


def _reduce_partial(x: ShardedTensor) -> ShardedTensor:
    """Reduces a partial sum, max or min by an op over a new dim of addends, sharded over the pending axes."""
    form, layout = x._form, x.sharding
    kinds = {pending.kind for pending in layout.pending}
    if len(kinds) > 1 or not kinds <= _REDUCED_BY.keys():
        raise ShardingError(
            f"{typeof(x)} is partial in {' and '.join(sorted(kinds))}, and is redistributed",
            rule="one value is a partial sum, max or min",
        )
    addends = Factor(math.prod(axis.size for axis in layout.pending_axes), layout.pending_axes)
    stacked = Layout(((addends,), *layout.dims))
    shards = tuple(shard.unsqueeze(0) for shard in x._locals)
    rows = wrap(Form.intern(stacked, x.mesh, x.dtype, form.device, ((None,), *form.names)), shards)
    with torch.no_grad():
        result: Any = _REDUCED_BY[kinds.pop()](rows)
    return result  # type: ignore[no-any-return]


_REDUCED_BY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


def _keep_origin(out: ShardedTensor, x: ShardedTensor) -> ShardedTensor:
    """Gives `out` the origin of `x`, which does not depend on the layout."""
    out._origin = x._origin
    return out
