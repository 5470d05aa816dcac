"""A traced body, and how it is written out again for every step: one autograd function for the trace around it.

Where no transform follows what a step reads, its nodes are copied, and nothing runs.
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
from shardlib.core.batched_grad import batch_all_outputs
from shardlib.core.errors import NoDerivativeError, WrittenError
from shardlib.core.source_lines import replayed
from shardlib.core.torch_private import TransformType, depth_of_batches, is_wrapped, transforms, version_of
from shardlib.frontend.copy_nodes import Copy
from shardlib.frontend.hazards.escaped_values import HeldByHistory


class NotOnceError(Exception):
    """A piece of a program has to be traced wherever it is called."""


# Why somebody went back through a strict body in a way that it was not traced for, though the user may catch the error.
other_ways: ContextVar[list[str] | None] = ContextVar("other_ways", default=None)


def _other_way(why: str) -> NotOnceError:
    if (noted := other_ways.get()) is not None:
        noted.append(why)
    return NotOnceError(why)


@dataclass(frozen=True)
class Body:
    """One traced step: `arguments` leaves, then the tensors it closes over (`captured`), to leaves of its result.

    `forward` are its nodes in order, `backward` those of its gradient, which reads `saved` nodes and `cotangents`;
    `gradients` are by input, None where there is none; `made` are the values of its trace; `strict`: whoever goes back
    through it in a way that it was not traced for, a second time, or from results that say nothing of some input, gets
    `NotOnceError`; `refused` is what whoever goes back gets, where something inside has no derivative. The
    `derivative` is the body of its gradient: of leaves, captured tensors and cotangents, to the gradients that exist.
    """

    arguments: int
    captured: tuple[Tensor, ...]
    inputs: tuple[fx.Node | None, ...]  # None: what nothing reads
    outputs: tuple[fx.Node, ...]
    differentiable: dict[int, frozenset[int]]  # which outputs have cotangents, and the inputs that they depend on
    cotangents: tuple[fx.Node | None, ...]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    saved: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    made: tuple[weakref.ref[Tensor], ...]
    strict: bool
    refused: NoDerivativeError | None = None
    trace_derivative: Callable[[Body], Body] | None = None
    _ways: dict[frozenset[int], Way] = field(default_factory=dict)

    @functools.cached_property
    def kept(self) -> frozenset[fx.Node]:
        """Whose memory is saved."""
        return frozenset(map(owner, self.saved))

    @functools.cached_property
    def derivative(self) -> Body:
        """Traces the gradient, when somebody differentiates it: its arguments are the leaves and the cotangents."""
        assert self.trace_derivative is not None, "a strict body has no second derivative"
        return self.trace_derivative(self)

    def __call__(
        self,
        *leaves: Tensor,
        captured: Sequence[Tensor] | None = None,
        made: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Write one step out: its result's leaves, with a history.

        `captured` are other tensors in the place of those that it closes over; `made` are tensors that become its
        results, None where a new one does: then a result may be what is given.
        """
        inputs = *leaves, *(self.captured if captured is None else captured)
        ready = None if made is None else zip(self.outputs, made, strict=True)
        copy = Copy(None if ready is None else {node: x for node, x in ready if x is not None})
        out: tuple[Tensor, ...] = _Step.apply(self, copy, *inputs)  # type: ignore[no-untyped-call]
        return list(out[: len(self.outputs)])

    def back(self, gone: frozenset[int]) -> Way:
        """The way back from all results but these, which nobody has made anything of."""
        if not gone:
            return Way(self.backward, {}, self.gradients)
        if gone not in self._ways:
            self._ways[gone] = _without(
                self, {x for i, x in zip(self.differentiable, self.cotangents, strict=True) if i in gone}
            )
        return self._ways[gone]


@dataclass(frozen=True)
class Way:
    """Nodes of a backward part, those of them that are the `same` as another one, and the gradients, by input."""

    nodes: tuple[fx.Node, ...]
    same: Mapping[fx.Node, fx.Node]
    gradients: tuple[fx.Node | None, ...]


def _without(body: Body, missing: set[fx.Node | None]) -> Way:
    """The backward part without some cotangents: what is made of these alone is nothing, and so is adding it.

    So torch does it: it does not get to what leads to such results alone, and has zeros for those beside others.
    """
    if any(has_trait(node.target, "takes_strides") for node in body.backward):  # which are others without an addition
        raise _other_way("its gradient is one of some of its results, and asks for strides")
    follows, gone = {x for x in body.cotangents if x is not None}, {x for x in missing if x is not None}
    same: dict[fx.Node, fx.Node] = {}
    for node in body.backward:
        reads = [x for x in node.all_input_nodes if x in follows]
        if reads:
            follows.add(node)
        if reads and gone.issuperset(reads):
            gone.add(node)
        elif not gone.isdisjoint(reads):
            rest = [x for x in node.all_input_nodes if x not in gone]
            if (
                node.target is not torch.ops.aten.add.Tensor
                or node.kwargs
                or len(rest) != 1
                or not _is_like(rest[0], node)
            ):
                raise _other_way("its gradient is one of some of its results")
            same[node] = rest[0]
    if any(x in gone for x in body.gradients):
        raise _other_way("its gradient is one of some of its results")
    needed = {x for x in body.gradients if x is not None}
    for node in reversed(body.backward):
        if node in needed:
            needed.update([same[node]] if node in same else node.all_input_nodes)
    spared = {
        node for node in body.backward if node not in needed and (node in gone or any(x in gone for x in node.users))
    }
    return Way(tuple(x for x in body.backward if x not in spared), same, body.gradients)


def _is_like(x: Any, node: fx.Node) -> bool:
    """Whether a value has the shape and the dtype of another one: ops of a gradient read nothing else."""
    a, b = (y.meta.get("val") if isinstance(y, fx.Node) else None for y in (x, node))
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


class _Step(torch.autograd.Function):
    """One step. What its backward part reads is saved as tensors where it runs again, as nodes where it is copied."""

    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, copy: Copy, *inputs: Tensor) -> Any:
        env = dict(zip(body.inputs, inputs, strict=True))
        if not any(map(is_wrapped, inputs)):
            copy.begin(env)
            copy.write(body.forward)
        else:
            _run(body.forward, env)
        wanted = body.outputs if copy.nodes else (*body.outputs, *_computed(body))
        taken: set[int] = set(map(id, inputs))
        out = []
        for node in wanted:
            x = env[node] if node in env and not copy.is_followed else copy.tensor(node)
            out.append(x.clone() if id(x) in taken else x)  # an output is memory of its own
            taken.add(id(out[-1]))
        return (*batch_all_outputs(out[: len(body.outputs)], inputs), *out[len(body.outputs) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, ctx.copy, *given = inputs
        body, own = ctx.body, output[: len(ctx.body.outputs)]
        ctx.set_materialize_grads(not body.strict)
        here = dict(zip(body.inputs, given, strict=True))
        here |= dict(zip(_computed(body) if not ctx.copy.nodes else (), output[len(own) :], strict=True))
        # A result shows no memory of what is saved: one that is itself saved is, so that a write to it is found.
        shown = [x for node, x in zip(body.outputs, own, strict=True) if owner(node) in body.kept]
        saved = [here[x] for x in body.saved if x in here]
        # The derivative reads all inputs. A copy does not save them: until then, a write to them is no error.
        ctx.count, ctx.inputs = len(saved), _versions(given) if ctx.copy.nodes else None
        ctx.save_for_backward(*saved, *shown, *(() if ctx.copy.nodes else given))
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
            if body.strict:  # something was written to: a trace of every call says what
                raise _other_way(str(error)) from error
            raise
        if body.strict and torch.is_grad_enabled():
            raise _other_way("its gradient has a gradient")
        if body.strict and depth_of_batches():
            raise _other_way("its gradients are batched")
        way = body.back(frozenset(i for i in body.differentiable if body.strict and grads[i] is None))
        here = dict(zip(body.cotangents, (grads[i] for i in body.differentiable), strict=True))
        here = {node: x for node, x in here.items() if x is not None}
        again = torch.is_grad_enabled()
        with torch.no_grad() if again else nullcontext():
            if copy.nodes and (only_gradients() or not any(map(is_wrapped, here.values()))):
                copy.begin(here)
                copy.write(way.nodes, way.same)
                made = [None if x is None else here[x] if x in here else copy.tensor(x) for x in way.gradients]
            elif way.nodes is not body.backward:
                raise _other_way("its gradient is one of some of its results, in a transform")
            else:
                kept = iter(saved[: ctx.count])
                env = here | {
                    x: copy.tensor(x) if copy.nodes and x not in body.inputs else next(kept) for x in body.saved
                }
                _run(body.backward, env)
                made = [None if x is None else env[x] for x in body.gradients]
        if again:
            inputs = _unwritten(ctx.inputs) if ctx.inputs is not None else saved[len(saved) - len(body.inputs) :]
            made = _Gradient.of(body, inputs, [grads[i] for i in body.differentiable], made)
        return (None, None, *made)


def _versions(inputs: Sequence[Tensor]) -> list[HeldByHistory]:
    """Each with the number of writes to it, which tensors of inference mode do not count: they have no gradient."""
    with torch.DisableTorchFunction():  # the user's modes see no question of ours
        return [HeldByHistory(x, 0 if x.is_inference() else version_of(x)) for x in inputs]


def _unwritten(inputs: Sequence[HeldByHistory]) -> list[Tensor]:
    now = _versions([held.tensor for held in inputs])
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
    """The gradients of a body, by inputs and cotangents; their gradient is that of the body's derivative."""

    generate_vmap_rule = True

    @staticmethod
    def of(
        body: Body, inputs: Sequence[Tensor], cotangents: Sequence[Tensor], gradients: Sequence[Tensor | None] = ()
    ) -> list[Tensor | None]:
        """The gradients with a history, None where there is none; computed unless they are given."""
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
        results = _Gradient.of(derivative, inputs, [grads[i] for i in derivative.differentiable])
        for at, x in zip(places, results, strict=True):
            if at is not None:
                out[1 + at] = x
        return tuple(out)


def owner(node: fx.Node) -> fx.Node:
    """The node that made the memory which a node shows."""
    while True:
        view = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(view, fx.Node) and view.op == "call_function" and is_view(view.target)):
            return node
        shown = view.args[0]
        assert isinstance(shown, fx.Node)
        node = shown


def _computed(body: Body) -> list[fx.Node]:
    """What is saved that is no input."""
    return [x for x in body.saved if x not in body.inputs]


def _run(nodes: Sequence[fx.Node], env: dict[Any, Any]) -> None:
    """Call the nodes again, each in the name of its own line, as transforms around would have them."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
        token = replayed.set(node.meta["line"])
        try:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        finally:
            replayed.reset(token)


def only_gradients() -> bool:
    """Whether the transforms around take gradients, and nothing else."""
    return all(level.key() == TransformType.Grad for level in transforms() or ())
