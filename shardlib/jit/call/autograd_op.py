"""A jitted call as an op of autograd: the two halves of one joint program are its forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.codegen.profiler_ranges import Runner
from shardlib.compiler.passes.split_backward import Halves
from shardlib.compiler.plan.plan import Plan
from shardlib.core.errors import ShardingError, WrittenError
from shardlib.core.torch_internals.batched_grad import loop_over_batches
from shardlib.core.torch_internals.torch_private import keeps_graph, memory_of, version_of
from shardlib.distributed.provenance import record_origin, result_origin
from shardlib.distributed.turns import current
from shardlib.eager.redistribute import relayout
from shardlib.eager.stage_moves import move_to_stage
from shardlib.jit.call.double_backward import Again
from shardlib.jit.call.execute import Entry, finished, forms, results
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.local_shards import split_into_shards
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap
from shardlib.tensor.tensor_meta import Form

_FEW = 8  # most gradients that an error lists


@dataclass(frozen=True)
class Backward:
    """The second half of a program: which leaves have gradients, which results have cotangents, and how to run."""

    name: str
    runner: Runner
    leaves: tuple[int, ...]
    forms: tuple[Form | None, ...]
    cotangents: tuple[int, ...]
    needs: tuple[frozenset[int], ...]
    layouts: tuple[Layout, ...]
    gradients: tuple[str, ...]  # their names
    read: tuple[tuple[int, str], ...]  # leaves that the backward program reads, with their names
    again: Again


def backward(plan: Plan, halves: Halves, mesh: Mesh, runner: Runner, again: Again) -> Backward:
    """Makes the second half of a plan's program callable."""
    after = plan.compiled.traced.after
    program = halves.backward
    last = program.inputs[len(halves.saved) :]
    layouts = tuple(v.layout for v in last if v.layout is not None)
    assert len(layouts) == len(after.cotangents), "a cotangent is a value of the program"
    count = len(program.outputs)
    results, strides = plan.compiled.program.outputs[-count:], plan.compiled.traced.strides[-count:]
    gradient_forms = tuple(forms(results, mesh, plan.output_names[-count:], strides, plan.stages[-count:]))
    leaves = tuple(leaf for leaf, _ in after.gradients)
    needs = tuple(a | b for a, b in zip(halves.needs, after.reached, strict=True))
    names = plan.compiled.traced.result_names
    gradients = tuple(names[at] for _, at in after.gradients)
    input_names = dict(zip(plan.compiled.traced.input_leaves, plan.compiled.traced.input_names, strict=True))
    read = tuple((leaf, input_names[leaf]) for leaf in after.read)
    rest = after.cotangents, needs, layouts, gradients, read, again
    return Backward(plan.name, runner, leaves, gradient_forms, *rest)


def run(entry: Entry, then: Backward, leaves: list[Any]) -> Any:
    """Calls the forward program; its results have a history that leads through the backward program."""
    call = _Call(entry, then, leaves)
    with torch.enable_grad():  # the trace knows which results have a history
        tensors = iter(_Apply.apply(call, *(leaves[i] for i in then.leaves)))  # type: ignore[no-untyped-call]
    out = [next(tensors) if isinstance(x, Tensor) else x for x in call.out]
    for i in entry.after.within:
        vars(out[i])["_within"] = entry.name
    return finished(entry, leaves, out)


class _Call:
    """One call, on its way through autograd."""

    def __init__(self, entry: Entry, then: Backward, leaves: list[Any]) -> None:
        self.entry, self.then = entry, then
        self.leaves = leaves
        self.out: list[Any] = []


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Tensor) -> Any:
        then = call.then
        ctx.saved_call = then.again.save(call.leaves)
        call.out, saved = results(call.entry, call.leaves)
        ctx.read = _versions(then, call.leaves)
        ctx.origin = call.entry.made_of(call.leaves) if call.entry.made_of is not None else 0
        ctx.then, ctx.mesh = then, call.entry.mesh
        ctx.forms = [call.entry.outputs[i] for i in then.cotangents]
        ctx.after = (current().moment(),) if ctx.mesh.kind == "distributed" else ()
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in call.leaves]
        ctx.plain = [isinstance(call.leaves[i], ShardedTensor) for i in then.leaves]
        ctx.present = [[p is not None for p in pieces] for pieces in saved]
        # Autograd frees saved tensors after the first backward pass, and refuses writes in between.
        plain = {memory_of(x.untyped_storage()): x for x in call.leaves if type(x) in (Tensor, torch.nn.Parameter)}
        pieces = [p for value in saved for p in value if p is not None]
        held = {memory_of(p.untyped_storage()) for p in pieces}
        ctx.save_for_backward(*pieces, *(x.detach() for at, x in plain.items() if at in held))
        ctx.set_materialize_grads(False)
        tensors = [x for x in call.out if isinstance(x, Tensor)]
        diff = {id(call.out[i]) for i in then.cotangents}
        ctx.mark_non_differentiable(*(x for x in tensors if id(x) not in diff))
        places = {id(x): k for k, x in enumerate(tensors)}
        ctx.where = [places[id(call.out[i])] for i in then.cotangents]
        call.leaves = []
        return tuple(tensors)

    @staticmethod
    @loop_over_batches
    def backward(ctx: Any, *grads: Any) -> Any:
        then = ctx.then
        present = {i for i, at in enumerate(ctx.where) if grads[at] is not None}
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx, present, grads)
        _refuse_written(then, ctx.read)
        rest = iter(ctx.saved_tensors)
        pieces: list[Sequence[Any]] = [[next(rest) if saved else None for saved in value] for value in ctx.present]
        for at, layout, form in zip(ctx.where, then.layouts, ctx.forms, strict=True):
            pieces.append(_cotangent(grads[at], layout, form))
        origin = result_origin(ctx.origin, (grads[at] for at in ctx.where)) if ctx.origin else 0
        raw = then.runner(pieces, ctx.numbers, *ctx.after, *([origin] if origin else ()))
        gradients = list(_gradients(then.forms, raw, ctx.plain))
        record_origin(origin, (x for x, sharded in zip(gradients, ctx.plain, strict=True) if sharded))
        if not keeps_graph():
            ctx.saved_call = None
        return None, *(x if needs & present else None for x, needs in zip(gradients, then.needs, strict=True))


def _differentiable(ctx: Any, present: set[int], grads: Sequence[Any]) -> list[Any]:
    """Returns the gradients with a history, from a program that runs the function again."""
    then = ctx.then
    _ = ctx.saved_tensors  # torch raises its error if an earlier pass has freed them
    if ctx.saved_call is None:
        raise RuntimeError(
            f"Trying to backward through {then.name} a second time, whose arguments are freed: "
            "say retain_graph=True in the first pass"
        )
    _refuse_written(then, ctx.read)
    reached = [k for k, needs in enumerate(then.needs) if needs & present and ctx.needs_input_grad[k + 1]]
    cotangents = {then.cotangents[i]: grads[ctx.where[i]] for i in sorted(present)}
    names = [then.gradients[k] for k in reached][:_FEW]
    out: list[Any] = [None] * len(then.leaves)
    if reached:
        with ctx.mesh:
            gradients = then.again.gradients(ctx.saved_call, [then.leaves[k] for k in reached], cotangents, names)
        for k, x in zip(reached, gradients, strict=True):
            out[k] = x
    return out


Versions = list[tuple[weakref.ref[Tensor], int] | None]


def _versions(then: Backward, leaves: list[Any]) -> Versions:
    """Returns the versions of leaves that the backward pass reads; None for tensors of inference mode, without one."""
    ref = weakref.ref  # a dead leaf is not written to
    return [None if (x := leaves[leaf]).is_inference() else (ref(x), version_of(x)) for leaf, _ in then.read]


def _refuse_written(then: Backward, versions: Versions) -> None:
    """Raises torch's error for tensors that were written to since, as one device would."""
    wrong = [
        f"{name}, {typeof(x)}, is at version {version_of(x)}; expected version {saved[1]} instead"
        for (_, name), saved in zip(then.read, versions, strict=True)
        if saved is not None and (x := saved[0]()) is not None and version_of(x) != saved[1]
    ]
    if wrong:
        raise WrittenError(
            f"variables needed for the gradient of {then.name} have been modified by an inplace operation",
            wrong,
            rule="what the backward pass reads stays as it is between the call and backward()",
            remedy="write to it after backward(), as optimizer.step() does; or call again",
        )


def refused(entry: Entry, leaves: list[Any]) -> Any:
    """Calls a program whose results have no gradient; `backward()` through them raises torch's reason."""
    after = entry.after
    out = results(entry, leaves)[0]
    marked = _Refused.apply(entry.name, after.why, leaves[after.root], *(out[i] for i in after.refused))  # type: ignore[no-untyped-call]
    for i, x in zip(after.refused, marked, strict=True):
        out[i] = x
    return finished(entry, leaves, out)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, why: str, root: Tensor, *out: Tensor) -> Any:
        ctx.name, ctx.why = name, why
        return tuple(x.detach() for x in out)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ShardingError(
            f"the results of {ctx.name} have no gradient",
            [ctx.why],
            rule="a function whose result goes back through its inputs is differentiated when it is compiled",
            remedy="detach() what needs no gradient; a function that calls backward() itself sets .grad, and its loss "
            "is a value: return loss.detach()",
        )


def _cotangent(grad: Any, layout: Layout, form: Form) -> Sequence[Tensor]:
    """Returns the shards of the gradient of a result of this form, on the result's stage, in another layout."""
    mesh = form.mesh
    if grad is None:
        device = "meta" if mesh.is_elsewhere else mesh.device
        return [torch.zeros(layout.local_shape(c), dtype=form.dtype, device=device) for c in mesh.own_coords()]
    if not isinstance(grad, ShardedTensor):
        return split_into_shards(grad.detach(), layout, mesh)
    grad = grad.detach()
    return relayout(grad if grad.mesh == mesh else move_to_stage(grad, mesh), layout)._locals


def _gradients(forms: Sequence[Form | None], raw: Sequence[Any], sharded: Sequence[bool]) -> Iterator[Any]:
    for form, pieces, stays in zip(forms, raw, sharded, strict=True):
        assert form is not None, "a gradient is a tensor"
        yield wrap(form, pieces) if stays else pieces[0]
