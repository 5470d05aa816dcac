"""How a call of an op outside `jit` runs: one ordered table of tests and makers; the first test that holds decides.

A maker gives what runs the call and all others with its key, or raises. Calls that stand for other ops are written so
that each of these comes back to the table by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.op_traits import has, is_composite, is_view
from shardlib.core.torch_private import (
    ASKS_IS_VIEW,
    PER_RANK,
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    kernel_of,
    pytree,
    schema_of,
)
from shardlib.eager import unsupported
from shardlib.eager.arg_slots import devices_of, tensors_of
from shardlib.eager.foreach import is_step, together
from shardlib.eager.inplace import outs_of, through_copies, writer, written_by
from shardlib.eager.prepare import Prepared, whole
from shardlib.eager.special_ops import FORMS
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.primitives.random.keys import in_call, one_call
from shardlib.rules.table import row
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.eager_cache import Run
from shardlib.tensor.hooks import above
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


@dataclass(frozen=True)
class EagerCall:
    """A call that is not ready to run."""

    op: Any
    args: Any
    kwargs: dict[str, Any]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_of(self.args) + tensors_of(self.kwargs)

    @cached_property
    def sharded(self) -> list[ShardedTensor]:
        return [x for x in self.tensors if isinstance(x, ShardedTensor)]

    @cached_property
    def devices(self) -> list[torch.device]:
        """Those that are asked for."""
        return devices_of(self.args, self.kwargs)

    @property
    def mesh(self) -> Mesh:
        return self.sharded[0]._form.mesh

    @cached_property
    def elsewhere(self) -> list[torch.device]:
        """The devices that are not the mesh's; a number in a tensor on the CPU goes to a GPU by itself."""
        plain = [x for x in self.tensors if not isinstance(x, ShardedTensor)]
        found = (*self.devices, *(x.device for x in plain if x.dim() or x.device.type != "cpu"))
        return [d for d in found if d.type not in (self.mesh.device, "meta")]


def run_of(call: EagerCall) -> Run:
    """What runs this call, and all that have its key.

    Raises `ShardingError` for tensors of several meshes or on other devices, and for ops that make no sense for a
    tensor in pieces.
    """
    return next(make for test, make in WAYS if test(call))(call)


# --- tests ------------------------------------------------------------------------------------------------------------


def _on_several_meshes(call: EagerCall) -> bool:
    mesh = call.mesh
    return any(x._form.mesh is not mesh and x._form.mesh != mesh for x in call.sharded)


def _has_own_form(call: EagerCall) -> bool:
    return call.op in FORMS and FORMS[call.op].takes(call.args)


def _asks_for_shapes(call: EagerCall) -> bool:
    return any(device.type == "meta" for device in call.devices) and not is_composite(call.op)


def _mixes_values_and_none(call: EagerCall) -> bool:
    """Torch takes one such, a write to a meta tensor, which changes nothing."""
    on_meta = [x.is_meta for x in call.tensors]
    mixed = call.op.namespace == "aten" and len(set(on_meta)) > 1
    return mixed and not (on_meta[0] and schema_of(call.op).is_mutable)


@cache
def _is_ordinary(op: Any) -> bool:
    """Whether an op is sure to run as it is, and to make new tensors or views."""
    written_otherwise = op in DECOMPOSITIONS or _takes_lists(op) or is_composite(op)
    return not (schema_of(op).is_mutable or has(op, "storage") or written_otherwise or _gives_values(op))


def _turns(op: Any) -> bool:
    """Whether it makes a tensor a view of what it was: `t_`, `squeeze_`."""
    return torch.Tag.inplace_view in op.tags and not has(op, "storage")


def _writes_to_out(op: Any) -> bool:
    outs = outs_of(op)
    return bool(outs) and all(a.kwarg_only for a in outs) and functional_form(op) is not None


def _takes_lists(op: Any) -> bool:
    return bool(schema_of(op).name.startswith("aten::_foreach_")) or (is_step(op) and op in DECOMPOSITIONS)


def _gives_values(op: Any) -> bool:
    """Whether it returns what Python reads: numbers, truth values."""
    return not any("Tensor" in str(r.type) for r in schema_of(op).returns)


# --- makers -----------------------------------------------------------------------------------------------------------


def _own_form(call: EagerCall) -> Run:
    op, run = call.op, FORMS[call.op].run
    return lambda args, kwargs: run(op, args, kwargs or {})


def _on_one_mesh(call: EagerCall) -> Run:
    """A tensor without dims is a number, which its devices have whole: on another mesh it counts as a plain one.

    The op runs on the mesh of the tensor that has dims, or that is written to; otherwise on that of the first.
    """
    op, changed = call.op, {id(x) for x in written_by(call.op, call.args, call.kwargs)}
    at = next((x._form.mesh for x in call.sharded if x.dim() or id(x) in changed), call.mesh)
    guests = [x for x in call.sharded if x._form.mesh != at]
    if any(x.dim() or id(x) in changed for x in guests):
        unsupported.meshes(op, call.sharded)

    def number(x: ShardedTensor) -> torch.Tensor:
        return x if x._form.mesh == at else above.whole(x.detach())  # type: ignore[arg-type]

    def run(args: Any, kwargs: Any) -> Any:
        sharded = [x for x in tensors_of((args, kwargs or {})) if isinstance(x, ShardedTensor)]
        if torch.is_grad_enabled() and any(x.requires_grad and x._form.mesh != at for x in sharded):
            unsupported.meshes(op, sharded)  # a gradient would live on the mesh of the op
        args, kwargs = pytree.tree_map_only(ShardedTensor, number, (args, kwargs or {}))
        return op(*args, **kwargs)

    return run


def _shapes(call: EagerCall) -> Run:
    """Shapes alone are nowhere."""
    op, mesh = call.op, call.mesh
    return lambda args, kwargs: Prepared(op, args, kwargs or {}, mesh).meta()


def _turner(call: EagerCall) -> Run:
    view = functional_form(call.op)
    assert view is not None, f"{call.op} is the form in place of a view"

    def turn(args: Any, kwargs: Any) -> Any:
        x, *rest = args
        if x.requires_grad and ASKS_IS_VIEW(x):
            unsupported.turn(call.op, x)
        x.data = view(x, *rest, **(kwargs or {}))
        return x

    return turn


def _others(call: EagerCall) -> Run:
    op, mesh, form = call.op, call.mesh, DECOMPOSITIONS[call.op]
    draws = torch.Tag.nondeterministic_seeded in op.tags

    def run(args: Any, kwargs: Any) -> Any:
        with mesh, one_call() if draws and not in_call() else nullcontext():
            out = form(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        if schema_of(op).is_mutable:  # what was written to copies would be lost
            return writer(op, args, kwargs or {}, mesh)(args, kwargs or {})
        return whole(op, args, kwargs or {})

    return run


def _lists(call: EagerCall) -> Run:
    """On the pieces of all at once, or the ops one by one."""
    otherwise = _others(call) if is_step(call.op) else _one_by_one(call)
    return together(call.op, call.args, call.kwargs, call.mesh, otherwise) or otherwise


def _one_by_one(call: EagerCall) -> Run:
    """The ops one by one; they come below autograd, so that nobody else notes that their tensors were written to."""
    op, key, writes = call.op, torch.DispatchKey.CompositeExplicitAutograd, bool(schema_of(call.op).is_mutable)

    def run(args: Any, kwargs: Any) -> Any:
        out = kernel_of(op)(key, *args, **(kwargs or {}))
        if writes:
            torch.autograd.graph.increment_version(
                [x for x in written_by(op, args, kwargs or {}) if not x.is_inference()]
            )
        return out

    return run


def _parts(call: EagerCall) -> Run:
    op = call.op
    return lambda args, kwargs: op.decompose(*args, **(kwargs or {}))


def _whole(call: EagerCall) -> Run:
    op = call.op
    return lambda args, kwargs: whole(op, args, kwargs or {})


def _ready(call: EagerCall) -> Run:
    """The op itself: on the pieces as they are, or in a program; on whole tensors where values decide on shapes.

    Some of torch's forms for tensors without values divide by how many elements there are, which may be none.
    """
    prepared = Prepared(call.op, call.args, call.kwargs, call.mesh)
    if (alike := prepared.as_before()) is not None:
        return alike
    try:
        meta = prepared.meta()
    except (NotImplementedError, DynamicOutputShapeException, DataDependentOutputException, ZeroDivisionError):
        return _whole(call)
    except RuntimeError as error:
        if not _VALUES.search(str(error)):
            raise
        return _whole(call)
    return prepared.viewing(prepared.direct(meta) or prepared.program())


# What torch says of meta tensors whose values an op looks at, where it has no exception of its own for it. (An op that
# fails for another reason does so on whole tensors, too.)
_VALUES = re.compile(r"\bmeta\b|no fake impl registered")

WAYS: Sequence[tuple[Callable[[EagerCall], bool], Callable[[EagerCall], Run]]] = (
    (lambda c: not isinstance(c.op, OpOverload), lambda c: unsupported.operator(c.op, c.tensors)),
    (_has_own_form, _own_form),
    (lambda c: c.op.namespace in PER_RANK, lambda c: unsupported.collective(str(c.op), [typeof(x) for x in c.sharded])),
    (lambda c: _takes_lists(c.op), _lists),
    (_on_several_meshes, _on_one_mesh),
    (_asks_for_shapes, _shapes),
    (lambda c: bool(c.elsewhere), lambda c: unsupported.devices(c.op, c.sharded, c.elsewhere)),
    (_mixes_values_and_none, lambda c: unsupported.meta(c.op, c.tensors)),
    (lambda c: _is_ordinary(c.op), _ready),
    (lambda c: _turns(c.op), _turner),
    (lambda c: has(c.op, "storage"), lambda c: unsupported.storage(c.op, c.tensors)),
    (lambda c: _writes_to_out(c.op), lambda c: through_copies(c.op)),
    (lambda c: c.op in DECOMPOSITIONS, _others),
    (lambda c: is_composite(c.op) and (row(c.op) is None or is_view(c.op)), _parts),
    (lambda c: bool(schema_of(c.op).is_mutable), lambda c: writer(c.op, c.args, c.kwargs, c.mesh)),
    (lambda c: _gives_values(c.op), _whole),
    (lambda c: True, _ready),
)
