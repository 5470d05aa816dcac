"""Holds a traced body and writes a copy of it for every step, as one autograd function of the surrounding trace.

Where no transform applies to the inputs of a step, its nodes are copied, and no op runs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.errors import NoDerivativeError, WrittenError
from shardlib.core.source_lines import replayed
from shardlib.core.torch_internals.batched_grad import batch_all_outputs
from shardlib.core.torch_internals.torch_private import (
    TransformType,
    depth_of_batches,
    is_wrapped,
    transforms,
    version_of,
)
from shardlib.frontend.copy_nodes import Copy
from shardlib.frontend.hazards.escaped_values import HeldByHistory


class NotReusableError(Exception):
    """A part of a program cannot be copied: each of its calls has to be traced."""


# Reasons why a backward pass through a strict body did not match its trace; the user may catch the error itself.
backward_mismatches: ContextVar[list[str] | None] = ContextVar("backward_mismatches", default=None)


def _backward_mismatch(why: str) -> NotReusableError:
    if (noted := backward_mismatches.get()) is not None:
        noted.append(why)
    return NotReusableError(why)


@dataclass(frozen=True)
class Body:
    """One traced step: from `arguments` leaves and the tensors it closes over (`captured`) to the leaves of its result.

    `forward` are its nodes in order. `backward` are the nodes of its gradient, which read `saved` nodes and
    `cotangents`. `gradients` has one entry per input, None where there is no gradient. `trace_values` are the tensors
    of its trace. A `strict` body raises `NotReusableError` for a backward pass that its trace did not cover: a second
    derivative, or a gradient of some results only. `refused` is the error that a backward pass raises where an op has
    no derivative. The `derivative` is the body of the gradient: from leaves, captured tensors and cotangents to the
    gradients that exist.
    """

    arguments: int
    captured: tuple[Tensor, ...]
    inputs: tuple[fx.Node | None, ...]  # None for an input that no node reads
    outputs: tuple[fx.Node, ...]
    differentiable: dict[int, frozenset[int]]  # outputs with cotangents, and the inputs that they depend on
    cotangents: tuple[fx.Node | None, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    trace_values: tuple[weakref.ref[Tensor], ...]
    strict: bool
    refused: NoDerivativeError | None = None
    trace_derivative: Callable[[Body], Body] | None = None
    _plans: dict[frozenset[int], BackwardPlan] = field(default_factory=dict)

    @functools.cached_property
    def saved_owners(self) -> frozenset[fx.Node]:
        """The nodes whose memory is saved."""
        return frozenset(map(memory_owner, self.saved))

    @functools.cached_property
    def derivative(self) -> Body:
        """The body of the gradient, traced at the first read; its arguments are the leaves and the cotangents."""
        assert self.trace_derivative is not None, "a strict body has no second derivative"
        return self.trace_derivative(self)

    def __call__(
        self,
        *leaves: Tensor,
        captured: Sequence[Tensor] | None = None,
        results: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Writes one step into the trace; returns the leaves of its result, with a history.

        `captured` replaces the tensors that the body closes over. `results` are existing tensors that become its
        results, None where the step creates one.
        """
        inputs = *leaves, *(self.captured if captured is None else captured)
        ready = None if results is None else zip(self.outputs, results, strict=True)
        copy = Copy(None if ready is None else {node: x for node, x in ready if x is not None})
        out: tuple[Tensor, ...] = _Step.apply(self, copy, *inputs)  # type: ignore[no-untyped-call]
        return list(out[: len(self.outputs)])

    def plan_backward(self, unused: frozenset[int]) -> BackwardPlan:
        """Returns the backward pass from all results but the `unused` ones, which have no cotangent."""
        if not unused:
            return BackwardPlan(self.backward, {})
        if unused not in self._plans:
            missing = {x for i, x in zip(self.differentiable, self.cotangents, strict=True) if i in unused}
            self._plans[unused] = _plan_without(self, missing)
        return self._plans[unused]


@dataclass(frozen=True)
class BackwardPlan:
    """The nodes of a backward pass; `same` maps additions of a missing gradient to their other operand."""

    nodes: tuple[fx.Node, ...]
    same: Mapping[fx.Node, fx.Node]


def _plan_without(body: Body, missing: set[fx.Node | None]) -> BackwardPlan:
    """Returns the backward pass without some cotangents: values of these alone vanish, and so does adding them.

    This matches torch, which skips such values. Raises `NotReusableError` where torch would compute with zeros.
    """
    if any(has_trait(node.target, "takes_strides") for node in body.backward):  # without an addition, strides differ
        raise _backward_mismatch("its gradient is one of some of its results, and reads strides")
    dependent, vanishing = {x for x in body.cotangents if x is not None}, {x for x in missing if x is not None}
    same: dict[fx.Node, fx.Node] = {}
    for node in body.backward:
        reads = [x for x in node.all_input_nodes if x in dependent]
        if reads:
            dependent.add(node)
        if reads and vanishing.issuperset(reads):
            vanishing.add(node)
        elif not vanishing.isdisjoint(reads):
            rest = [x for x in node.all_input_nodes if x not in vanishing]
            if (
                node.target is not torch.ops.aten.add.Tensor
                or node.kwargs
                or len(rest) != 1
                or not _has_same_form(rest[0], node)
            ):
                raise _backward_mismatch("its gradient is one of some of its results")
            same[node] = rest[0]
    if any(x in vanishing for x in body.gradients):
        raise _backward_mismatch("its gradient is one of some of its results")
    needed = {x for x in body.gradients if x is not None}
    for node in reversed(body.backward):
        if node in needed:
            needed.update([same[node]] if node in same else node.all_input_nodes)
    unneeded = [x for x in body.backward if x not in needed]
    skipped = {x for x in unneeded if x in vanishing or not vanishing.isdisjoint(x.users)}
    return BackwardPlan(tuple(x for x in body.backward if x not in skipped), same)


def _has_same_form(x: Any, node: fx.Node) -> bool:
    """Returns whether two values agree in shape and dtype, the only facts that ops of a gradient read."""
    a, b = (y.meta.get("val") if isinstance(y, fx.Node) else None for y in (x, node))
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


class _Step(torch.autograd.Function):
    """One step; it saves tensors if its backward part runs again, and nodes if they are copied."""

    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, copy: Copy, *inputs: Tensor) -> Any:
        env = dict(zip(body.inputs, inputs, strict=True))
        if not any(map(is_wrapped, inputs)):
            copy.begin(env)
            copy.write(body.forward)
        else:
            _run(body.forward, env)
        returned = body.outputs if copy.nodes else (*body.outputs, *_saved_nodes(body))
        used: set[int] = set(map(id, inputs))
        out = []
        for node in returned:
            x = env[node] if node in env and not copy.is_followed else copy.tensor(node)
            out.append(x.clone() if id(x) in used else x)  # each output has memory of its own
            used.add(id(out[-1]))
        return (*batch_all_outputs(out[: len(body.outputs)], inputs), *out[len(body.outputs) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, ctx.copy, *tensors = inputs
        body, results = ctx.body, output[: len(ctx.body.outputs)]
        ctx.set_materialize_grads(not body.strict)
        env = dict(zip(body.inputs, tensors, strict=True))
        env |= dict(zip(_saved_nodes(body) if not ctx.copy.nodes else (), output[len(results) :], strict=True))
        # A result that shares memory with a saved value is saved, too, so that autograd detects a write to it.
        shared = [x for node, x in zip(body.outputs, results, strict=True) if memory_owner(node) in body.saved_owners]
        saved = [env[x] for x in body.saved if x in env]
        # The derivative reads all inputs. A copy does not save them: a write to them is an error only then.
        ctx.count, ctx.inputs = len(saved), _with_versions(tensors) if ctx.copy.nodes else None
        ctx.save_for_backward(*saved, *shared, *(() if ctx.copy.nodes else tensors))
        _, _, *needed = ctx.needs_input_grad
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(output) if not any(needed[at] for at in body.differentiable.get(i, ()))),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        body, copy = ctx.body, ctx.copy
        if body.refused is not None:
            raise body.refused
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if body.strict:  # a saved tensor was written to; a trace of every call names the tensor
                raise _backward_mismatch(str(error)) from error
            raise
        if body.strict and torch.is_grad_enabled():
            raise _backward_mismatch("its gradient has a gradient")
        if body.strict and depth_of_batches():
            raise _backward_mismatch("its gradients are batched")
        plan = body.plan_backward(frozenset(i for i in body.differentiable if body.strict and grads[i] is None))
        cotangents = dict(zip(body.cotangents, (grads[i] for i in body.differentiable), strict=True))
        cotangents = {node: x for node, x in cotangents.items() if x is not None}
        is_differentiated = torch.is_grad_enabled()
        with torch.no_grad() if is_differentiated else nullcontext():
            if copy.nodes and (only_gradients() or not any(map(is_wrapped, cotangents.values()))):
                copy.begin(cotangents)
                copy.write(plan.nodes, plan.same)
                gradients = [
                    None if x is None else cotangents[x] if x in cotangents else copy.tensor(x) for x in body.gradients
                ]
            elif plan.nodes is not body.backward:
                raise _backward_mismatch("its gradient is one of some of its results, in a transform")
            else:
                tensors = iter(saved[: ctx.count])
                env = cotangents | {
                    x: copy.tensor(x) if copy.nodes and x not in body.inputs else next(tensors) for x in body.saved
                }
                _run(body.backward, env)
                gradients = [None if x is None else env[x] for x in body.gradients]
        if is_differentiated:
            inputs = _unwritten(ctx.inputs) if ctx.inputs is not None else saved[len(saved) - len(body.inputs) :]
            gradients = _Gradient.add_history(body, inputs, [grads[i] for i in body.differentiable], gradients)
        return (None, None, *gradients)


def _with_versions(inputs: Sequence[Tensor]) -> list[HeldByHistory]:
    """Pairs each tensor with its count of writes; a tensor of inference mode, without a gradient, has none."""
    with torch.DisableTorchFunction():  # the user's modes must not see these reads
        return [HeldByHistory(x, 0 if x.is_inference() else version_of(x)) for x in inputs]


def _unwritten(inputs: Sequence[HeldByHistory]) -> list[Tensor]:
    """Returns the tensors; raises `WrittenError` if one was written to since."""
    now = _with_versions([held.tensor for held in inputs])
    wrong = [old.tensor for old, new in zip(inputs, now, strict=True) if old.version != new.version]
    if wrong:
        raise WrittenError(
            "the gradient of scan is differentiated, and what the scan read has been modified by an inplace operation",
            [f"a tensor of shape {list(x.shape)}" for x in wrong],
            rule="a second derivative reads all inputs of a step",
            remedy="write to it after the last backward pass",
        )
    return [held.tensor for held in inputs]


class _Gradient(torch.autograd.Function):
    """The gradients of a body as a function of inputs and cotangents, differentiated by the body's derivative."""

    generate_vmap_rule = True

    @staticmethod
    def add_history(
        body: Body, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], gradients: Sequence[Tensor | None] = ()
    ) -> list[Tensor | None]:
        """Returns the gradients with a history, None where there is none; computes them unless they are passed."""
        present = [x for x in gradients if x is not None]
        out = iter(_Gradient.apply(body, *inputs, *cotangents, *present))  # type: ignore[no-untyped-call]
        return [None if x is None else next(out) for x in body.gradients]

    @staticmethod
    def forward(body: Body, *tensors: Tensor) -> Any:
        if body.refused is not None:
            raise body.refused
        nodes = (*body.inputs, *body.cotangents)
        gradients = [x.clone() for x in tensors[len(nodes) :]]
        if not gradients:
            env = dict(zip(nodes, tensors, strict=True))
            _run((*body.forward, *body.backward), env)
            gradients = [env[x].clone() for x in body.gradients if x is not None]
        return batch_all_outputs(gradients, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, *tensors = inputs
        ctx.arguments = len(inputs)
        ctx.save_for_backward(*tensors[: len(ctx.body.inputs) + len(ctx.body.cotangents)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        body: Body = ctx.body
        derivative = body.derivative
        tensors, count = ctx.saved_tensors, len(body.inputs)
        where = {id(x): i for i, x in enumerate(body.captured, body.arguments)}
        places: list[int | None] = [*range(body.arguments), *range(count, len(tensors))]
        places += [where.get(id(x)) for x in derivative.captured]
        constants = [*tensors[:1] * derivative.arguments, *derivative.captured]
        inputs = [x if at is None else tensors[at] for at, x in zip(places, constants, strict=True)]
        out: list[Tensor | None] = [None] * ctx.arguments
        results = _Gradient.add_history(derivative, inputs, [grads[i] for i in derivative.differentiable])
        for at, x in zip(places, results, strict=True):
            if at is not None:
                out[1 + at] = x
        return tuple(out)


def memory_owner(node: fx.Node) -> fx.Node:
    """Returns the node that allocated the memory of a node, following views."""
    while True:
        view = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(view, fx.Node) and view.op == "call_function" and is_view(view.target)):
            return node
        base = view.args[0]
        assert isinstance(base, fx.Node)
        node = base


def _saved_nodes(body: Body) -> list[fx.Node]:
    """Returns the saved values that are no inputs."""
    return [x for x in body.saved if x not in body.inputs]


def _run(nodes: Sequence[fx.Node], env: dict[Any, Any]) -> None:
    """Calls the ops of the nodes, each under its own source line, so that surrounding transforms apply."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
        token = replayed.set(node.meta["line"])
        try:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        finally:
            replayed.reset(token)


def only_gradients() -> bool:
    """Returns whether all surrounding transforms are gradients."""
    return all(level.key() == TransformType.Grad for level in transforms() or ())
