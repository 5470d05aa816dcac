"""The body of a loop, traced once: a graph of its own, forward and backward, that is written out again for every step.

The body's Python runs once, with plain autograd over it, on stand-ins for whatever it reads: its arguments, and tensors
that it closes over. What depends on the cotangents is the backward part; the rest is the forward part, and what the
backward part reads of it is what one step saves. So custom gradients inside the body count, though its graph is all
that runs later. Nothing else of the trace around it is seen inside: its transforms are set aside, and come back at
every step, where the step is one autograd function for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from shardlib.errors import ShardingError
from shardlib.internals import allow_saved_hooks, forbid_saved_hooks, saved_hooks_forbidden, without_transforms
from shardlib.lines import Line, LineRecorder, error_line, replayed
from shardlib.tracing.closures import Closures, alike, is_followed, refuse_lost, stand_in
from shardlib.tracing.decompositions import DECOMPOSITIONS
from shardlib.tracing.functionalise import body_writes, functionalise
from shardlib.tracing.tracer import recorded


@dataclass(frozen=True)
class Body:
    """One traced step: `arguments` leaves, then the tensors it closes over (`captured`), to leaves of its result.

    `forward` are its nodes in order, `backward` those of its gradient, which reads `saved` nodes and `cotangents`;
    `gradients` are by input, None where there is none.
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

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        """Write one step out: its result's leaves, differentiable once."""
        out: tuple[Tensor, ...] = _Step.apply(self, *leaves, *self.captured)  # type: ignore[no-untyped-call]
        return list(out[: len(self.outputs)])


def trace_body(
    fn: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str], line: Line, carried: int
) -> Body:
    """Trace `fn(*leaves)`, a function of tensors that returns a list of them, inside the trace that is running.

    `names` are the leaves' in errors. The first `carried` leaves are what an earlier step returns, which may require a
    gradient; of the others it is known. Raises `ShardingError` for draws of random numbers, and for what would be lost:
    a gradient, a `.grad` that is set.
    """
    found: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(without_transforms())
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_saved_tensors_hooks())
        inputs = [stand_in(x) if i < carried or is_followed(x) else alike(x) for i, x in enumerate(leaves)]

        def joint(*given: Tensor) -> list[Tensor | None]:
            recorded(LineRecorder(line))
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
            where = {i: _reached(x, reads) for i, x in enumerate(flat) if x.requires_grad}
            of = [i for i, x in enumerate(reads) if x.requires_grad]
            cts = [alike(flat[i]) for i in where]
            found.extend([closures, len(flat), where, cts])
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
    return _divided(gm, closures, results, where, cts, len(leaves))


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
        _refuse_draws(node)
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
    )


class _Step(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(body: Body, *inputs: Tensor) -> Any:
        env = dict(zip(body.inputs, inputs, strict=True))
        _run(body.forward, env)
        taken: set[int] = set(map(id, inputs))
        out = []
        for node in (*body.outputs, *_computed(body)):
            x = env[node]
            out.append(x.clone() if id(x) in taken else x)  # an output is memory of its own
            taken.add(id(out[-1]))
        return tuple(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.body, *given = inputs
        body = ctx.body
        here = dict(zip(body.inputs, given, strict=True)) | dict(
            zip(_computed(body), output[len(body.outputs) :], strict=True)
        )
        ctx.save_for_backward(*(here[x] for x in body.saved))
        _, *needed = ctx.needs_input_grad
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(output) if not any(needed[at] for at in body.differentiable.get(i, ()))),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        body = ctx.body
        history = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        env = dict(zip(body.saved, ctx.saved_tensors, strict=True))
        env |= dict(zip(body.cotangents, (grads[i] for i in body.differentiable), strict=True))
        if not torch.is_grad_enabled() or not history:
            _run(body.backward, env)
            return (None, *(None if x is None else env[x] for x in body.gradients))
        with torch.no_grad():
            _run(body.backward, env)
        made = iter(_Once.apply(len(history), *history, *(env[x] for x in body.gradients if x is not None)))  # type: ignore[no-untyped-call]
        return (None, *(None if x is None else next(made) for x in body.gradients))


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


def _computed(body: Body) -> list[fx.Node]:
    """What is saved that is no input."""
    return [x for x in body.saved if x not in body.inputs]


def _run(nodes: Sequence[fx.Node], env: dict[Any, Any]) -> None:
    """Call the nodes again, each in the name of its own line."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env[x])
        token = replayed.set(node.meta["line"])
        try:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        finally:
            replayed.reset(token)


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


def _refuse_draws(node: fx.Node) -> None:
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "shardlib.draw" in str(node.target):
        raise ShardingError(
            "the body of scan draws random numbers",
            [str(node.meta["line"])],
            rule="a scanned body is traced once: every step would draw the same numbers",
            remedy="draw them outside, with the steps as the first dim, and pass them in as part of xs",
        )
