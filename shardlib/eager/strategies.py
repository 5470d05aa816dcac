"""Chooses how a call of an op outside `jit` runs, by an ordered table of tests and strategies.

The first test that holds decides. A strategy returns a runner of the call and of all others with its key, or raises.
Strategies that call other ops dispatch each of these through the table again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.op_traits import has_trait, is_composite, is_view
from shardlib.core.torch_internals.torch_private import (
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
from shardlib.eager.arg_slots import list_tensors, requested_devices
from shardlib.eager.foreach import fuse_lists, is_optimizer_step, split_by_mesh
from shardlib.eager.inplace import list_out_arguments, list_written, make_out_runner, make_writer
from shardlib.eager.placement_autograd import move
from shardlib.eager.prepare import PreparedCall, run_replicated
from shardlib.eager.special_ops import IMPLEMENTATIONS
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.primitives.random.keys import is_in_call, one_call
from shardlib.rules.table import row
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.eager_cache import Runner
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof


@dataclass(frozen=True)
class EagerCall:
    """A call without a cached runner."""

    op: Any
    args: Any
    kwargs: dict[str, Any]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return list_tensors(self.args) + list_tensors(self.kwargs)

    @cached_property
    def sharded(self) -> list[ShardedTensor]:
        return [x for x in self.tensors if isinstance(x, ShardedTensor)]

    @cached_property
    def devices(self) -> list[torch.device]:
        return requested_devices(self.args, self.kwargs)

    @property
    def mesh(self) -> Mesh:
        return self.sharded[0]._form.mesh

    @cached_property
    def elsewhere(self) -> list[torch.device]:
        """Devices that are not the mesh's; torch moves a scalar tensor from the CPU to a GPU by itself."""
        plain = [x for x in self.tensors if not isinstance(x, ShardedTensor)]
        devices = (*self.devices, *(x.device for x in plain if x.dim() or x.device.type != "cpu"))
        return [d for d in devices if d.type not in (self.mesh.device, "meta")]


def choose_runner(call: EagerCall) -> Runner:
    """Returns a runner of this call, and of all with its key.

    Raises `ShardingError` for tensors of several meshes or on other devices, and for ops that sharded tensors do not
    support.
    """
    return next(strategy for test, strategy in STRATEGIES if test(call))(call)


# --- tests ------------------------------------------------------------------------------------------------------------


def _on_several_meshes(call: EagerCall) -> bool:
    mesh = call.mesh
    return any(x._form.mesh is not mesh and x._form.mesh != mesh for x in call.sharded)


def _on_several_stages(call: EagerCall) -> bool:
    return _on_several_meshes(call) and len({x._form.mesh.whole for x in call.sharded}) == 1


def _has_implementation(call: EagerCall) -> bool:
    return call.op in IMPLEMENTATIONS and IMPLEMENTATIONS[call.op].takes(call.args)


def _runs_on_meta(call: EagerCall) -> bool:
    return any(device.type == "meta" for device in call.devices) and not is_composite(call.op)


def _mixes_meta_and_values(call: EagerCall) -> bool:
    """True for meta tensors with others, except for a write to a meta tensor, which torch ignores."""
    on_meta = [x.is_meta for x in call.tensors]
    mixed = call.op.namespace == "aten" and len(set(on_meta)) > 1
    return mixed and not (on_meta[0] and schema_of(call.op).is_mutable)


@cache
def _is_ordinary(op: Any) -> bool:
    """True for an op that runs as itself and returns new tensors or views."""
    runs_as_others = op in DECOMPOSITIONS or _takes_lists(op) or is_composite(op)
    return not (schema_of(op).is_mutable or has_trait(op, "needs_storage") or runs_as_others or _returns_numbers(op))


def _is_inplace_view(op: Any) -> bool:
    """True for ops that make a tensor a view of itself: `t_`, `squeeze_`."""
    return torch.Tag.inplace_view in op.tags and not has_trait(op, "needs_storage")


def _writes_to_out(op: Any) -> bool:
    outs = list_out_arguments(op)
    return bool(outs) and all(a.kwarg_only for a in outs) and functional_form(op) is not None


def _takes_lists(op: Any) -> bool:
    return bool(schema_of(op).name.startswith("aten::_foreach_")) or (is_optimizer_step(op) and op in DECOMPOSITIONS)


def _returns_numbers(op: Any) -> bool:
    return not any("Tensor" in str(r.type) for r in schema_of(op).returns)


# --- strategies -------------------------------------------------------------------------------------------------------


def _call_implementation(call: EagerCall) -> Runner:
    op, run = call.op, IMPLEMENTATIONS[call.op].run
    return lambda args, kwargs: run(op, args, kwargs or {})


def _meet_on_stage(call: EagerCall) -> Runner:
    """Runs an op on tensors of several stages: where it writes, else on their one stage, else on all stages."""
    op, written = call.op, list_written(call.op, call.args, call.kwargs)
    targets = {x._form.mesh for x in written if isinstance(x, ShardedTensor)}
    stages = {x._form.mesh for x in call.sharded if x._form.mesh.stage is not None}
    if len(targets) > 1:
        unsupported.refuse_meshes(op, call.sharded)
    mesh = (*targets, call.mesh.whole if len(stages) > 1 else stages.pop())[0]

    def run(args: Any, kwargs: Any) -> Any:
        moved = partial(move, mesh=mesh)
        args, kwargs = pytree.tree_map_only(ShardedTensor, moved, (args, kwargs or {}))
        return op(*args, **kwargs)

    return run


def _gather_scalars(call: EagerCall) -> Runner:
    """Runs an op on several meshes: scalar tensors of other meshes count as plain ones.

    The op runs on the mesh of the tensors that have dims or are written to, or else on the first tensor's mesh.
    """
    op, written = call.op, {id(x) for x in list_written(call.op, call.args, call.kwargs)}
    mesh = next((x._form.mesh for x in call.sharded if x.dim() or id(x) in written), call.mesh)
    others = [x for x in call.sharded if x._form.mesh != mesh]
    if any(x.dim() or id(x) in written for x in others):
        unsupported.refuse_meshes(op, call.sharded)

    def gather_other(x: ShardedTensor) -> torch.Tensor:
        return x if x._form.mesh == mesh else tensor_hooks.gather_full(x.detach())  # type: ignore[arg-type]

    def run(args: Any, kwargs: Any) -> Any:
        sharded = [x for x in list_tensors((args, kwargs or {})) if isinstance(x, ShardedTensor)]
        if torch.is_grad_enabled() and any(x.requires_grad and x._form.mesh != mesh for x in sharded):
            unsupported.refuse_meshes(op, sharded)  # the gradient would be on the op's mesh
        args, kwargs = pytree.tree_map_only(ShardedTensor, gather_other, (args, kwargs or {}))
        return op(*args, **kwargs)

    return run


def _infer_on_meta(call: EagerCall) -> Runner:
    op, mesh = call.op, call.mesh
    return lambda args, kwargs: PreparedCall(op, args, kwargs or {}, mesh).meta()


def _set_view(call: EagerCall) -> Runner:
    view = functional_form(call.op)
    assert view is not None, f"{call.op} is the form in place of a view"

    def run(args: Any, kwargs: Any) -> Any:
        x, *rest = args
        if x.requires_grad and ASKS_IS_VIEW(x):
            unsupported.refuse_inplace_view(call.op, x)
        x.data = view(x, *rest, **(kwargs or {}))
        return x

    return run


def _decompose(call: EagerCall) -> Runner:
    op, mesh, form = call.op, call.mesh, DECOMPOSITIONS[call.op]
    draws = torch.Tag.nondeterministic_seeded in op.tags

    def run(args: Any, kwargs: Any) -> Any:
        with mesh, one_call() if draws and not is_in_call() else nullcontext():
            out = form(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        if schema_of(op).is_mutable:  # `run_replicated` would write to copies
            return make_writer(op, args, kwargs or {}, mesh)(args, kwargs or {})
        return run_replicated(op, args, kwargs or {})

    return run


def _fuse_lists_or_split(call: EagerCall) -> Runner:
    """Runs an op over lists on all shards at once, or its ops one by one; tensors of each stage by themselves."""
    if (split := split_by_mesh(call.op, call.args)) is not None:
        return split
    otherwise = _decompose(call) if is_optimizer_step(call.op) else _one_by_one(call)
    return fuse_lists(call.op, call.args, call.kwargs, call.mesh, otherwise) or otherwise


def _one_by_one(call: EagerCall) -> Runner:
    """Runs torch's kernel, which calls the ops one by one below autograd; so it counts the writes itself."""
    op, key, writes = call.op, torch.DispatchKey.CompositeExplicitAutograd, bool(schema_of(call.op).is_mutable)

    def run(args: Any, kwargs: Any) -> Any:
        out = kernel_of(op)(key, *args, **(kwargs or {}))
        if writes:
            torch.autograd.graph.increment_version(
                [x for x in list_written(op, args, kwargs or {}) if not x.is_inference()]
            )
        return out

    return run


def _decompose_by_torch(call: EagerCall) -> Runner:
    op = call.op
    return lambda args, kwargs: op.decompose(*args, **(kwargs or {}))


def _run_whole(call: EagerCall) -> Runner:
    op = call.op
    return lambda args, kwargs: run_replicated(op, args, kwargs or {})


def _run_op(call: EagerCall) -> Runner:
    """Runs the op on local shards, or in a program; on whole tensors if shapes depend on values.

    Some of torch's meta kernels divide by the number of elements, which may be 0.
    """
    prepared = PreparedCall(call.op, call.args, call.kwargs, call.mesh)
    if (similar := prepared.run_like_similar()) is not None:
        return similar
    try:
        meta = prepared.meta()
    except (NotImplementedError, DynamicOutputShapeException, DataDependentOutputException, ZeroDivisionError):
        return _run_whole(call)
    except RuntimeError as error:
        if not _VALUES.search(str(error)):
            raise
        return _run_whole(call)
    return prepared.record_views(prepared.run_locally(meta) or prepared.run_program())


# Messages of torch for meta tensors whose values an op reads. (An op that fails for another reason fails on whole
# tensors, too.)
_VALUES = re.compile(r"\bmeta\b|no fake impl registered")

STRATEGIES: Sequence[tuple[Callable[[EagerCall], bool], Callable[[EagerCall], Runner]]] = (
    (lambda c: not isinstance(c.op, OpOverload), lambda c: unsupported.refuse_operator(c.op, c.tensors)),
    (_has_implementation, _call_implementation),
    (
        lambda c: c.op.namespace in PER_RANK,
        lambda c: unsupported.refuse_collective(str(c.op), [typeof(x) for x in c.sharded]),
    ),
    (lambda c: _takes_lists(c.op), _fuse_lists_or_split),
    (_on_several_stages, _meet_on_stage),
    (_on_several_meshes, _gather_scalars),
    (_runs_on_meta, _infer_on_meta),
    (lambda c: bool(c.elsewhere), lambda c: unsupported.refuse_devices(c.op, c.sharded, c.elsewhere)),
    (_mixes_meta_and_values, lambda c: unsupported.refuse_meta(c.op, c.tensors)),
    (lambda c: _is_ordinary(c.op), _run_op),
    (lambda c: _is_inplace_view(c.op), _set_view),
    (lambda c: has_trait(c.op, "needs_storage"), lambda c: unsupported.refuse_storage(c.op, c.tensors)),
    (lambda c: _writes_to_out(c.op), lambda c: make_out_runner(c.op)),
    (lambda c: c.op in DECOMPOSITIONS, _decompose),
    (lambda c: is_composite(c.op) and (row(c.op) is None or is_view(c.op)), _decompose_by_torch),
    (lambda c: bool(schema_of(c.op).is_mutable), lambda c: make_writer(c.op, c.args, c.kwargs, c.mesh)),
    (lambda c: _returns_numbers(c.op), _run_whole),
    (lambda c: True, _run_op),
)
