"""The body of a loop, traced once: a graph of its own, forward and backward, that is written out again for every step.

The body's Python runs once, with plain autograd over it, on stand-ins for whatever it reads: its arguments, and tensors
that it closes over. What depends on the cotangents is the backward part; the rest is the forward part, and what the
backward part reads of it is what one step saves. So custom gradients inside the body count, though its graph is all
that runs later. Nothing else of the trace around it is seen inside: its transforms are set aside, and come back at
every step, where the step is one autograd function for them. Where no transform follows what a step reads, its nodes
are copied, and nothing runs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from shardlib.aten.traits import is_view
from shardlib.errors import ShardingError
from shardlib.internals import (
    TENSOR_HOOKS,
    TransformType,
    allow_saved_hooks,
    forbid_saved_hooks,
    is_wrapped,
    saved_hooks_forbidden,
    transforms,
    without_transforms,
)
from shardlib.lines import Line, LineRecorder, error_line, replayed
from shardlib.tracing.closures import Closures, is_followed, refuse_lost, stand_in
from shardlib.tracing.copying import Copy, alike
from shardlib.tracing.decompositions import DECOMPOSITIONS
from shardlib.tracing.functionalise import body_writes, functionalise
from shardlib.tracing.tracer import recorded


class NotOnceError(Exception):
    """A piece of a program has to be traced wherever it is called."""


@dataclass(frozen=True)
class Body:
    """One traced step: `arguments` leaves, then the tensors it closes over (`captured`), to leaves of its result.

    `forward` are its nodes in order, `backward` those of its gradient, which reads `saved` nodes and `cotangents`;
    `gradients` are by input, None where there is none; `made` are the values of its trace; `strict`: whoever goes back
    through it in a way that it was not traced for, a second time or from some results only, gets `NotOnceError`.
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

    @functools.cached_property
    def kept(self) -> frozenset[fx.Node]:
        """Whose memory is saved."""
        return frozenset(map(owner, self.saved))

    def __call__(self, *leaves: Tensor, captured: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Write one step out: its result's leaves, differentiable once.

        `captured` are other tensors in the place of those that it closes over.
        """
        inputs = *leaves, *(self.captured if captured is None else captured)
        out: tuple[Tensor, ...] = _Step.apply(self, Copy(), *inputs)  # type: ignore[no-untyped-call]
        return list(out[: len(self.outputs)])


def trace_body(
    fn: Callable[..., Any],
    leaves: Sequence[Tensor],
    names: Sequence[str],
    line: Line,
    carried: int = 0,
    *,
    differentiate: bool = True,
    strict: bool = False,
) -> Body:
    """Trace `fn(*leaves)`, a function of tensors that returns a list of them, inside the trace that is running.

    `names` are the leaves' in errors. The first `carried` leaves are what an earlier step returns, which may require a
    gradient; of the others it is known. Raises `ShardingError` for what would be lost: a gradient, a `.grad` that is
    set. Without `differentiate` it runs under no gradients; `strict` is as in `Body`.
    """
    found: list[Any] = []
    made: list[weakref.ref[Tensor]] = []
    with ExitStack() as stack:
        stack.enter_context(without_transforms())
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(torch.set_grad_enabled(differentiate))
        stack.enter_context(_saved_tensors_hooks())
        inputs = [stand_in(x) if i < carried or is_followed(x) else alike(x) for i, x in enumerate(leaves)]

        def joint(*given: Tensor) -> list[Tensor | None]:
            tracer = recorded(LineRecorder(line))
            closures = Closures()
            with closures:
                try:
                    flat = fn(*given)
                except RuntimeError as error:
                    if any(text in str(error) for text in _WRITES):
                        raise body_writes([str(error_line(error))]) from error
                    raise
            closures.refuse_grads(
                [(name, x) for name, x, y in zip(names, given, leaves, strict=True) if is_followed(y)]
            )
            reads = [*given, *closures.stand_ins]
            if strict and any(getattr(x, kind, None) for x in reads for kind in TENSOR_HOOKS):
                raise NotOnceError("it hooks what it is given")
            where = {i: _reached(x, reads) for i, x in enumerate(flat) if x.requires_grad}
            of = [i for i, x in enumerate(reads) if x.requires_grad]
            cts = [alike(flat[i]) for i in where]
            found.extend([closures, len(flat), where, cts])
            made.extend(weakref.ref(x) for x in list(tracer.tensor_tracker))
            gradients: list[Tensor | None] = [None] * len(reads)
            if where:
                with closures.passing(cts):  # a checkpoint runs the body again
                    pulled = torch.autograd.grad(
                        [flat[i] for i in where], [reads[i] for i in of], cts, allow_unused=True
                    )
                for i, x in zip(of, pulled, strict=True):
                    gradients[i] = x
            return [*flat, *gradients]

        gm = make_fx(joint, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        closures, results, where, cts = found
        for node in gm.graph.nodes:
            node.meta.setdefault("line", line)
            if node.op == "get_attr":
                node.meta["val"] = getattr(gm, str(node.target))
        functionalise(gm, names, body=True)
    return replace(_divided(gm, closures, results, where, cts, len(leaves)), made=tuple(made), strict=strict)


# What torch says where a stand-in, which requires a gradient, is written to.
_WRITES = ("leaf Variable that requires grad", "'running_mean'", "'running_var'")


def _divided(
    gm: fx.GraphModule, closures: Closures, results: int, where: dict[int, frozenset[int]], cts: list[Tensor], n: int
) -> Body:
    """The joint graph in its two parts."""
    nodes = list(gm.graph.nodes)
    constants: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "get_attr":
            constants.setdefault(id(getattr(gm, str(node.target))), []).append(node)
    merged = {x: same[0] for same in constants.values() for x in same}

    def known(x: Tensor) -> fx.Node | None:
        return constants.pop(id(x), [None])[0]

    stand_ins = [known(x) for x in closures.stand_ins]
    cotangents = [known(x) for x in cts]
    captured = [*closures.originals]
    for node, *_ in constants.values():  # what was made outside, and never met as an argument of a function
        x = getattr(gm, str(node.target))
        refuse_lost(x)
        stand_ins.append(node)
        captured.append(x)
    returned = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = [merged.get(x, x) for x in returned]
    outputs, gradients = returned[:results], returned[results:]
    gradients += [None] * (n + len(captured) - len(gradients))
    late: set[fx.Node] = {x for x in cotangents if x is not None}
    forward, backward = [], []
    for node in nodes:
        if node.op != "call_function":
            continue
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: merged.get(x, x))
    needed = set(outputs)
    for node in reversed(nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    for node in nodes:
        if node.op != "call_function":
            continue
        # What a checkpoint runs again is part of the backward pass; the gradient of a function inside the body is not.
        again = node.meta.get("backward") and node not in needed
        if not again and late.isdisjoint(node.all_input_nodes):
            forward.append(node)
        else:
            late.add(node)
            backward.append(node)
    asked = dict.fromkeys([*(x for node in backward for x in node.all_input_nodes), *filter(None, gradients)])
    placeholders = [x for x in nodes if x.op == "placeholder"]
    return Body(
        n,
        tuple(captured),
        (*placeholders, *stand_ins),
        tuple(outputs),
        where,
        tuple(cotangents),
        tuple(forward),
        tuple(backward),
        tuple(x for x in asked if x not in late),
        tuple(gradients),
        (),
        strict=False,
    )


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
            x = env[node] if node in env else copy.tensor(node)
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
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if body.strict:  # something was written to: a trace of every call says what
                raise NotOnceError(str(error)) from error
            raise
        if body.strict and (torch.is_grad_enabled() or any(grads[i] is None for i in body.differentiable)):
            raise NotOnceError("its gradient has a gradient, or is one of some of its results")
        saved = saved[: len(saved) - ctx.shown]
        history = [x for x in (*saved, *grads) if x is not None and x.requires_grad]
        here = dict(zip(body.cotangents, (grads[i] for i in body.differentiable), strict=True))
        again = torch.is_grad_enabled() and bool(history)
        with torch.no_grad() if again else nullcontext():
            if copy.nodes and (_only_gradients() or not any(map(is_wrapped, here.values()))):
                copy.begin(here)
                copy.write(body.backward)
                made = [None if x is None else here[x] if x in here else copy.tensor(x) for x in body.gradients]
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
        raise ShardingError(
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


def _only_gradients() -> bool:
    """Whether the transforms around take gradients, and nothing else."""
    return all(level.key() == TransformType.Grad for level in transforms() or ())


@contextmanager
def _saved_tensors_hooks() -> Iterator[None]:
    """torch.func forbids hooks on what autograd saves, which checkpoints are made of; here it is set aside."""
    forbidden = saved_hooks_forbidden()
    allow_saved_hooks()
    try:
        yield
    finally:
        if forbidden is not None:
            forbid_saved_hooks(forbidden)


def _reached(x: Tensor, reads: Sequence[Tensor]) -> frozenset[int]:
    """Which of `reads` the history of `x` leads to."""
    places = {id(y): i for i, y in enumerate(reads)}
    found, seen, todo = {places.get(id(x), -1)}, set[Any](), [x.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(places.get(id(getattr(node, "variable", None)), -1))
            todo += [behind for behind, _ in node.next_functions]
    return frozenset(found - {-1})
