"""A traced body, and how it is written out again for every step: one autograd function for the trace around it.

Where no transform follows what a step reads, its nodes are copied, and nothing runs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.core.aten.op_traits import has, is_view
from shardlib.core.errors import NoDerivativeError
from shardlib.core.source_lines import replayed
from shardlib.core.torch_private import TransformType, is_wrapped, transforms
from shardlib.frontend.reuse.copy_nodes import Copy


class NotOnceError(Exception):
    """A piece of a program has to be traced wherever it is called."""


@dataclass(frozen=True)
class Body:
    """One traced step: `arguments` leaves, then the tensors it closes over (`captured`), to leaves of its result.

    `forward` are its nodes in order, `backward` those of its gradient, which reads `saved` nodes and `cotangents`;
    `gradients` are by input, None where there is none; `made` are the values of its trace; `strict`: whoever goes back
    through it in a way that it was not traced for, a second time, or from results that say nothing of some input, gets
    `NotOnceError`; `refused` is what whoever goes back gets, where something inside has no derivative.
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
    _ways: dict[frozenset[int], Way] = field(default_factory=dict)

    @functools.cached_property
    def kept(self) -> frozenset[fx.Node]:
        """Whose memory is saved."""
        return frozenset(map(owner, self.saved))

    def __call__(
        self,
        *leaves: Tensor,
        captured: Sequence[Tensor] | None = None,
        made: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Write one step out: its result's leaves, differentiable once.

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
    if any(has(node.target, "strides") for node in body.backward):  # which are others without an addition
        raise NotOnceError("its gradient is one of some of its results, and asks for strides")
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
                raise NotOnceError("its gradient is one of some of its results")
            same[node] = rest[0]
    if any(x in gone for x in body.gradients):
        raise NotOnceError("its gradient is one of some of its results")
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
        return tuple(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, ctx.copy, *given = inputs
        body, own = ctx.body, output[: len(ctx.body.outputs)]
        ctx.set_materialize_grads(not body.strict)
        here = dict(zip(body.inputs, given, strict=True))
        here |= dict(zip(_computed(body) if not ctx.copy.nodes else (), output[len(own) :], strict=True))
        # A result shows no memory of what is saved: one that is itself saved is, so that a write to it is found.
        shown = [x for node, x in zip(body.outputs, own, strict=True) if owner(node) in body.kept]
        ctx.shown = len(shown)
        ctx.save_for_backward(*(here[x] for x in body.saved if x in here), *shown)
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
                raise NotOnceError(str(error)) from error
            raise
        if body.strict and torch.is_grad_enabled():
            raise NotOnceError("its gradient has a gradient")
        way = body.back(frozenset(i for i in body.differentiable if body.strict and grads[i] is None))
        saved = saved[: len(saved) - ctx.shown]
        history = [x for x in (*saved, *grads) if x is not None and x.requires_grad]
        here = dict(zip(body.cotangents, (grads[i] for i in body.differentiable), strict=True))
        here = {node: x for node, x in here.items() if x is not None}
        again = torch.is_grad_enabled() and bool(history)
        with torch.no_grad() if again else nullcontext():
            if copy.nodes and (only_gradients() or not any(map(is_wrapped, here.values()))):
                copy.begin(here)
                copy.write(way.nodes, way.same)
                made = [None if x is None else here[x] if x in here else copy.tensor(x) for x in way.gradients]
            elif way.nodes is not body.backward:
                raise NotOnceError("its gradient is one of some of its results, in a transform")
            else:
                env = here | dict(zip(body.saved, saved, strict=True))
                _run(body.backward, env)
                made = [None if x is None else env[x] for x in body.gradients]
        if again:
            once = iter(_Once.apply(len(history), *history, *(x for x in made if x is not None)))  # type: ignore[no-untyped-call]
            made = [None if x is None else next(once) for x in made]
        return (None, None, *made)


class _Once(torch.autograd.Function):
    """Gradients of a body, which have a history that nobody can go back through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *given: Tensor) -> Any:
        return tuple(x.clone() for x in given[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NoDerivativeError(
            "a gradient is taken through the gradient of scan",
            rule="a scanned body is traced with its first derivative",
            remedy="detach() gradients that are only looked at; write the loop in Python, for layer in layers: ..., "
            "where second derivatives are wanted",
        )


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
