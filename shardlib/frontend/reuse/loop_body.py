"""The body of a loop, traced once: a graph of its own, forward and backward, that is written out again for every step.

The body's Python runs once, with plain autograd over it, on stand-ins for whatever it reads: its arguments, and tensors
that it closes over. What depends on the cotangents is the backward part; the rest is the forward part, and what the
backward part reads of it is what one step saves. So custom gradients inside the body count, though its graph is all
that runs later (`replay`). A second derivative is a body, too: of the function's gradient, traced when it is needed.
Nothing else of the trace around it is seen inside: its transforms are set aside, and come back at every step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from shardlib.core.aten.op_traits import is_view
from shardlib.core.errors import NoDerivativeError
from shardlib.core.source_lines import Line, LineRecorder, error_line, modules
from shardlib.core.torch_private import (
    TENSOR_HOOKS,
    FakeTensor,
    allow_saved_hooks,
    forbid_saved_hooks,
    saved_hooks_forbidden,
    without_transforms,
)
from shardlib.frontend.copy_nodes import alike
from shardlib.frontend.functionalize import COPIED_VIEWS, body_writes, functionalize
from shardlib.frontend.reuse.loop_captures import Closures, is_followed, refuse_lost, stand_in
from shardlib.frontend.reuse.loop_replay import Body, NotOnceError
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.frontend.tracer import forget, recorded


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
    set. What has no derivative is refused where somebody goes back through it. Without `differentiate` it runs under no
    gradients; `strict` is as in `Body`.
    """
    found: list[Any] = []
    made: list[weakref.ref[Tensor]] = []
    with ExitStack() as stack:
        stack.callback(modules.reset, modules.set(modules.get().apart()))
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
            refused = None
            where = {i: _reached(x, reads) for i, x in enumerate(flat) if x.requires_grad}
            of = [i for i, x in enumerate(reads) if x.requires_grad]
            cts = [alike(flat[i]) for i in where]
            made.extend(weakref.ref(x) for x in list(tracer.tensor_tracker))
            gradients: list[Tensor | None] = [None] * len(reads)
            if where:
                try:
                    with closures.passing(cts):  # a checkpoint runs the body again
                        pulled = torch.autograd.grad(
                            [flat[i] for i in where], [reads[i] for i in of], cts, allow_unused=True
                        )
                    for i, x in zip(of, pulled, strict=True):
                        gradients[i] = x
                except NoDerivativeError as error:  # it is nobody's matter until somebody goes back
                    if strict:
                        raise
                    refused = error.with_traceback(None)
            found.extend([tracer, closures, len(flat), where, cts, refused])
            return [*flat, *gradients]

        gm = make_fx(joint, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        tracer, closures, results, where, cts, refused = found
        for node in gm.graph.nodes:
            node.meta.setdefault("line", line)
            if node.op == "get_attr":
                node.meta["val"] = getattr(gm, str(node.target))
        outputs: Any = gm.graph.output_node().args[0]
        if strict and any(map(_shows_by_copy, outputs[:results])):
            raise NotOnceError("a result shares its memory")
        functionalize(gm, names, body=True)
    body = replace(_divided(gm, closures, results, where, cts, len(leaves)), made=tuple(made), strict=strict)
    if refused is not None:
        body = replace(body, backward=(), saved=(), refused=refused)
    if not strict:
        like = [alike(x) for x in leaves]
        body = replace(body, trace_derivative=lambda body: _derivative(body, fn, like, names, line))
    forget(tracer)
    for node in gm.graph.find_nodes(op="get_attr"):  # of these a copy asks the form alone
        if isinstance(node.meta["val"], FakeTensor):
            node.meta["val"] = alike(node.meta["val"])
            setattr(gm, str(node.target), node.meta["val"])
    return body


def _shows_by_copy(node: Any) -> bool:
    """Returns whether a value shows the memory of another by a view for which programs have a copy."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target not in COPIED_VIEWS:
        if node.target is not operator.getitem and not is_view(node.target):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in COPIED_VIEWS


def _derivative(body: Body, fn: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str], line: Line) -> Body:
    """Trace `fn` once more, with its gradient: a body of the leaves and the cotangents, to the gradients that exist."""
    wanted = [i for i, x in enumerate(body.gradients) if x is not None]
    cotangents = [alike(body.outputs[i].meta["val"]) for i in body.differentiable]

    def gradient(*tensors: Tensor) -> list[Tensor]:
        out = fn(*tensors[: len(leaves)])
        reads = [*tensors[: len(leaves)], *body.captured]
        sources = [reads[i] for i in wanted]
        return list(
            torch.autograd.grad(
                [out[i] for i in body.differentiable], sources, tensors[len(leaves) :], create_graph=True
            )
        )

    called = [*names, *(f"cotangent {i}" for i in range(len(cotangents)))]
    result = trace_body(gradient, [*leaves, *cotangents], called, line, len(called))
    outside = {id(x) for x in body.captured}
    for x in result.captured:
        if id(x) not in outside:
            refuse_lost(x)
    return result


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
