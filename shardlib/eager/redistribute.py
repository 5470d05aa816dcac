"""From one layout to another, outside `jit`: a program of nothing but the reshard."""

from __future__ import annotations

from typing import Any

from shardlib.core.bounded_cache import Bounded
from shardlib.eager.compile_op import Operand, Single, single
from shardlib.eager.prepare import LOCK
from shardlib.sharding.layout import Layout
from shardlib.sharding.placement import Names
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
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
    ready = _programs.get((form, to))
    if ready is None:
        with LOCK:
            ready = _programs.get((form, to))
            if ready is None:
                ready = _programs[form, to] = single(None, (), {}, [Operand(form, shown=to)], x.mesh)
    (pieces,) = ready([x._locals], x._origin)
    (made,) = ready.results
    assert made is not None, "a move has a result"
    return _same(wrap(Form.of(made.layout, x.mesh, x.dtype, form.device, made.names), tuple(pieces)), x)


def _same(out: ShardedTensor, x: ShardedTensor) -> ShardedTensor:
    """Where a value lives is none of its origin."""
    out._origin = x._origin
    return out
