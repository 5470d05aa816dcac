"""Traces the body of a loop once, as a graph with a forward and a backward part; each step writes a copy of it.

The body's Python runs once under plain autograd, on stand-ins for its arguments and for the tensors that it closes
over. Nodes that depend on the cotangents form the backward part, all others the forward part. A step saves the forward
values that the backward part reads. Custom gradients inside the body count, though only the graph runs later. The
second derivative is a body, too: of the function's gradient, traced when it is needed. Transforms of the surrounding
trace are suspended during the body's trace, and apply to each step.
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
from shardlib.core.fragment_tag import untagged
from shardlib.core.source_lines import Line, LineRecorder, error_line, modules
from shardlib.core.torch_internals.autograd_graph import history_nodes
from shardlib.core.torch_internals.torch_private import (
    FakeTensor,
    allow_saved_hooks,
    forbid_saved_hooks,
    saved_hooks_forbidden,
    without_transforms,
)
from shardlib.frontend.copy_nodes import make_like
from shardlib.frontend.functionalize import COPIED_VIEWS, body_writes, functionalize
from shardlib.frontend.reuse.loop_captures import CaptureMode, is_followed, refuse_lost, stand_in
from shardlib.frontend.reuse.loop_replay import Body, NotReusableError
from shardlib.frontend.reuse.pure_calls import has_hooks
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.frontend.tracer import instrument_tracer, release_constants


class _JointFunction:
    """Runs a body and its gradient as one function, and keeps the facts of this run that `trace_body` needs.

    `dependencies` maps each differentiable result to the inputs that it depends on; `cotangents` are stand-ins for
    the gradients of these results. `refused` is the error of an op inside that has no derivative.
    """

    tracer: Any
    captures: CaptureMode
    results: int
    dependencies: dict[int, frozenset[int]]
    cotangents: list[Tensor]
    trace_values: tuple[weakref.ref[Tensor], ...]

    def __init__(
        self, fn: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str], line: Line, *, strict: bool
    ) -> None:
        self.fn, self.leaves, self.names, self.line, self.strict = fn, leaves, names, line, strict
        self.refused: NoDerivativeError | None = None

    def run(self, *inputs: Tensor) -> list[Tensor | None]:
        """Returns the results of the body, then the gradients of its inputs and captured tensors."""
        self.tracer = instrument_tracer(LineRecorder(self.line))
        self.captures = CaptureMode()
        with self.captures, untagged():
            try:
                flat = self.fn(*inputs)
            except RuntimeError as error:
                if any(text in str(error) for text in _WRITES):
                    raise body_writes([str(error_line(error))]) from error
                raise
        named = zip(self.names, inputs, self.leaves, strict=True)
        self.captures.refuse_grads([(name, x) for name, x, leaf in named if is_followed(leaf)])
        reads = [*inputs, *self.captures.stand_ins]
        if self.strict and has_hooks(reads):
            raise NotReusableError("it hooks a tensor that it reads")
        self.results = len(flat)
        self.dependencies = {i: _reached_inputs(x, reads) for i, x in enumerate(flat) if x.requires_grad}
        self.cotangents = [make_like(flat[i]) for i in self.dependencies]
        self.trace_values = tuple(weakref.ref(x) for x in list(self.tracer.tensor_tracker))
        return [*flat, *self._differentiate(flat, reads)]

    def _differentiate(self, flat: Sequence[Tensor], reads: Sequence[Tensor]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * len(reads)
        if not self.dependencies:
            return gradients
        sources = [i for i, x in enumerate(reads) if x.requires_grad]
        try:
            with self.captures.passing(self.cotangents):  # a checkpoint runs the body again
                results = [flat[i] for i in self.dependencies]
                inputs = [reads[i] for i in sources]
                pulled = torch.autograd.grad(results, inputs, self.cotangents, allow_unused=True)
            for i, x in zip(sources, pulled, strict=True):
                gradients[i] = x
        except NoDerivativeError as error:  # raised only if the step is differentiated
            if self.strict:
                raise
            self.refused = error.with_traceback(None)
        return gradients


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
    """Traces `fn(*leaves)`, a function of tensors that returns a list of them, inside the running trace.

    `names` are the leaves' names in errors. The first `carried` leaves are results of an earlier step, which may
    require a gradient although the leaves do not. Without `differentiate` the body runs under no gradients. `strict` is
    as in `Body`. Raises `ShardingError` for effects that steps would lose: gradients of captured tensors, a `.grad`
    that the body sets. An op without a derivative raises when a step is differentiated.
    """
    with ExitStack() as stack:
        stack.callback(modules.reset, modules.set(modules.get().apart()))
        stack.enter_context(without_transforms())
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(torch.set_grad_enabled(differentiate))
        stack.enter_context(_saved_tensors_hooks())
        inputs = [stand_in(x) if i < carried or is_followed(x) else make_like(x) for i, x in enumerate(leaves)]
        joint = _JointFunction(fn, leaves, names, line, strict=strict)
        gm = make_fx(joint.run, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        for node in gm.graph.nodes:
            node.meta.setdefault("line", line)
            if node.op == "get_attr":
                node.meta["val"] = getattr(gm, str(node.target))
        outputs: Any = gm.graph.output_node().args[0]
        if strict and any(map(_is_copied_view, outputs[: joint.results])):
            raise NotReusableError("a result shares its memory")
        functionalize(gm, names, body=True)
    body = _split_graph(gm, joint)
    if joint.refused is not None:
        body = replace(body, backward=(), saved=(), refused=joint.refused)
    if not strict:
        like = [make_like(x) for x in leaves]
        body = replace(body, trace_derivative=lambda body: _derivative(body, fn, like, names, line))
    release_constants(joint.tracer)
    for node in gm.graph.find_nodes(op="get_attr"):  # a copy reads only the form of these
        if isinstance(node.meta["val"], FakeTensor):
            node.meta["val"] = make_like(node.meta["val"])
            setattr(gm, str(node.target), node.meta["val"])
    return body


def _is_copied_view(node: Any) -> bool:
    """Returns whether a value is a view of an op whose views programs replace by copies."""
    while isinstance(node, fx.Node) and node.op == "call_function" and node.target not in COPIED_VIEWS:
        if node.target is not operator.getitem and not is_view(node.target):
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in COPIED_VIEWS


def _derivative(body: Body, fn: Callable[..., Any], leaves: Sequence[Tensor], names: Sequence[str], line: Line) -> Body:
    """Traces the gradient of `fn` as a body: from the leaves and the cotangents to the gradients that exist."""
    differentiated = [i for i, x in enumerate(body.gradients) if x is not None]
    cotangents = [make_like(body.outputs[i].meta["val"]) for i in body.differentiable]

    def gradient(*tensors: Tensor) -> list[Tensor]:
        out = fn(*tensors[: len(leaves)])
        reads = [*tensors[: len(leaves)], *body.captured]
        sources = [reads[i] for i in differentiated]
        return list(
            torch.autograd.grad(
                [out[i] for i in body.differentiable], sources, tensors[len(leaves) :], create_graph=True
            )
        )

    all_names = [*names, *(f"cotangent {i}" for i in range(len(cotangents)))]
    result = trace_body(gradient, [*leaves, *cotangents], all_names, line, len(all_names))
    outside = {id(x) for x in body.captured}
    for x in result.captured:
        if id(x) not in outside:
            refuse_lost(x)
    return result


# Texts of torch's errors for a write to a stand-in, which requires a gradient.
_WRITES = ("leaf Variable that requires grad", "'running_mean'", "'running_var'")


def _split_graph(gm: fx.GraphModule, joint: _JointFunction) -> Body:
    """Splits the joint graph into its forward and its backward part."""
    nodes = list(gm.graph.nodes)
    constants: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "get_attr":
            constants.setdefault(id(getattr(gm, str(node.target))), []).append(node)
    merged = {x: same[0] for same in constants.values() for x in same}

    def take_constant(x: Tensor) -> fx.Node | None:
        return constants.pop(id(x), [None])[0]

    stand_ins = [take_constant(x) for x in joint.captures.stand_ins]
    cotangents = [take_constant(x) for x in joint.cotangents]
    captured = [*joint.captures.originals]
    for node, *_ in constants.values():  # tensors from outside that no torch function took as an argument
        x = getattr(gm, str(node.target))
        refuse_lost(x)
        stand_ins.append(node)
        captured.append(x)
    returned = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = [merged.get(x, x) for x in returned]
    outputs, gradients = returned[: joint.results], returned[joint.results :]
    gradients += [None] * (len(joint.leaves) + len(captured) - len(gradients))
    for node in nodes:
        if node.op == "call_function":
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda x: merged.get(x, x))
    forward, backward = _split_nodes(nodes, outputs, {x for x in cotangents if x is not None})
    reads = dict.fromkeys([*(x for node in backward for x in node.all_input_nodes), *filter(None, gradients)])
    late = {*cotangents, *backward}
    placeholders = [x for x in nodes if x.op == "placeholder"]
    return Body(
        arguments=len(joint.leaves),
        captured=tuple(captured),
        inputs=(*placeholders, *stand_ins),
        outputs=tuple(outputs),
        differentiable=joint.dependencies,
        cotangents=tuple(cotangents),
        forward=tuple(forward),
        backward=tuple(backward),
        saved=tuple(x for x in reads if x not in late),
        gradients=tuple(gradients),
        trace_values=joint.trace_values,
        strict=joint.strict,
    )


def _split_nodes(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], cotangents: set[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the nodes of the forward part, and those of the backward part, which depend on the cotangents."""
    needed = set(outputs)
    for node in reversed(nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    late = set(cotangents)
    forward, backward = [], []
    for node in nodes:
        if node.op != "call_function":
            continue
        # What a checkpoint recomputes belongs to the backward part; the gradient of a function in the body does not.
        is_recomputed = node.meta.get("backward") and node not in needed
        if not is_recomputed and late.isdisjoint(node.all_input_nodes):
            forward.append(node)
        else:
            late.add(node)
            backward.append(node)
    return forward, backward


@contextmanager
def _saved_tensors_hooks() -> Iterator[None]:
    """Allows saved-tensor hooks, which checkpoints use, where torch.func forbids them."""
    forbidden = saved_hooks_forbidden()
    allow_saved_hooks()
    try:
        yield
    finally:
        if forbidden is not None:
            forbid_saved_hooks(forbidden)


def _reached_inputs(x: Tensor, reads: Sequence[Tensor]) -> frozenset[int]:
    """Returns the positions in `reads` of the tensors that the history of `x` leads to."""
    places = {id(y): i for i, y in enumerate(reads)}
    ends = [x, *(getattr(node, "variable", None) for node in history_nodes([x]))]
    return frozenset(places[id(end)] for end in ends if id(end) in places)
