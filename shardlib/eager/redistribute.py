"""From one layout to another, outside `jit`: a program of nothing but the reshard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.bounded_cache import Bounded
from shardlib.core.errors import ShardingError
from shardlib.distributed.provenance import made
from shardlib.eager.compile_op import Operand, Single, single
from shardlib.eager.prepare import LOCK
from shardlib.sharding.layout import Factor, Layout
from shardlib.sharding.placement import Names
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form

_programs: Bounded[Any, Single] = Bounded(1 << 10)


def relayout(x: ShardedTensor, layout: Layout, names: Names | None = None) -> ShardedTensor:
    """`x` in another layout, without history.

    Where nothing moves the result shares the pieces, which nobody writes to.
    """
    form = x._form
    to = Form.of(layout, x.mesh, x.dtype, form.device, names)
    if form.layout.canonical == layout.canonical:
        return _same(wrap(to, x._locals), x)
    if form.layout.pending and not layout.pending:
        return _same(relayout(_added_up(x), layout, names), x)
    ready = _ready((form,), (to,))
    (pieces,) = ready([x._locals], lineage=x._origin)
    (result,) = ready.results
    assert result is not None, "a move has a result"
    return _same(wrap(Form.of(result.layout, x.mesh, x.dtype, form.device, result.names), tuple(pieces)), x)


def resharded(tensors: Sequence[ShardedTensor], forms: Sequence[Form]) -> Sequence[tuple[torch.Tensor, ...]]:
    """Returns the pieces of tensors of one mesh in the layouts of other forms of their shapes and dtypes.

    One program moves all, so that their messages travel together.
    """
    ready = _ready(tuple([x._form for x in tensors]), tuple(forms))
    return ready([x._locals for x in tensors], lineage=made(0, tensors) if ready.meets else 0)


def _ready(forms: tuple[Form, ...], to: tuple[Form, ...]) -> Single:
    ready = _programs.get((forms, to))
    if ready is None:
        with LOCK:
            ready = _programs.get((forms, to))
            if ready is None:
                operands = [Operand(form, shown=shown) for form, shown in zip(forms, to, strict=True)]
                ready = _programs[forms, to] = single(None, (), {}, operands, forms[0].mesh)
    return ready


def _added_up(x: ShardedTensor) -> ShardedTensor:
    """Returns the value of a partial sum: its addends are a dim that is sharded over the pending axes."""
    form, layout = x._form, x.sharding
    kinds = {pending.kind for pending in layout.pending}
    if len(kinds) > 1 or not kinds <= _REDUCED_BY.keys():
        raise ShardingError(
            f"{typeof(x)} is partial in {' and '.join(sorted(kinds))}, and is redistributed",
            rule="one value is a partial sum, max or min",
        )
    addends = Factor(math.prod(axis.size for axis in layout.pending_axes), layout.pending_axes)
    stacked = Layout(((addends,), *layout.dims))
    pieces = tuple(piece.unsqueeze(0) for piece in x._locals)
    rows = wrap(Form.of(stacked, x.mesh, x.dtype, form.device, ((None,), *form.names)), pieces)
    with torch.no_grad():
        result: Any = _REDUCED_BY[kinds.pop()](rows)
    return result  # type: ignore[no-any-return]


_REDUCED_BY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


def _same(out: ShardedTensor, x: ShardedTensor) -> ShardedTensor:
    """Where a value lives is none of its origin."""
    out._origin = x._origin
    return out
