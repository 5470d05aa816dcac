"""Traces the backward pass from a function's results to its inputs, behind the forward pass in the same graph.

Cotangents of the results become inputs of the graph, and the gradients of inputs become results. The compiler decides
the joint graph as a whole, and splits it into two programs when it lowers it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.errors import ShardingError
from shardlib.frontend.gradients.autograd_history import (
    compute_gradients,
    find_origins,
    history_end,
    mark_intermediates,
    read_hooks,
)
from shardlib.frontend.hazards.unsupported import explain_refusal
from shardlib.frontend.lifted_inputs import LiftedInputs, Placeholder
from shardlib.tensor.sharded_tensor import typeof

FREED = "backward through the graph a second time"  # part of torch's error; a loss is returned after its backward()


@dataclass(frozen=True)
class BackwardOutputs:
    """Describes a traced backward pass as `ExtraOutputs` does; `gradients` are the leaves that have one."""

    gradients: tuple[int, ...] = ()
    cotangents: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    refused: tuple[int, ...] = ()
    root: int = -1
    why: str = ""


def trace_backward(
    results: Sequence[Any],
    inputs: Mapping[int, Tensor],
    names: Mapping[int, str],
    lifted: LiftedInputs,
    tracer: Any,
    *,
    first_state: int,
    skip: Collection[int],
    strict: bool,
) -> tuple[BackwardOutputs, list[Tensor]]:
    """Traces the backward pass from `results` to `inputs`, by leaf; returns its description and its gradients.

    Leaves from `first_state` on are state. The results at the positions `skip` have no cotangent. If `strict`, a result
    that has no derivative raises at once; else the error waits until a caller goes back.
    """
    outs = [i for i, x in enumerate(results) if isinstance(x, Tensor) and x.requires_grad and i not in skip]
    targets = {leaf: x for leaf, x in inputs.items() if x.requires_grad}
    if not outs or not targets:
        return BackwardOutputs(), []
    _refuse_shared_history(targets, names, first_state)
    for x in inputs.values():  # hooks run outside, where the gradients go on
        for hooks, _ in read_hooks(x).values():
            hooks.clear()  # in place: the history of a result refers to the dict, too
    sources = [results[i] for i in outs]
    nodes_before = set(tracer.graph.nodes)
    cotangents = [Placeholder(tracer, lifted.mode, x, snapshot=True) for x in sources]
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            gradients = compute_gradients(sources, list(targets.values()), [c.value for c in cotangents])
    except (RuntimeError, ShardingError) as error:
        if strict and FREED not in str(error):
            raise
        for node in reversed(tracer.graph.nodes):
            if node not in nodes_before:
                tracer.graph.erase_node(node)
        refused = explain_refusal(error, tracer, {})
        why = f"{refused.what}, at {refused.offenders[0]}" if refused else str(error).partition("\n")[0]
        error.__traceback__ = None  # its frames, once they are read, hold values of the trace
        return BackwardOutputs(refused=tuple(outs), root=next(iter(targets)), why=why), []
    within = tuple(itertools.compress(outs, mark_intermediates(sources)))
    _refuse_retained([x for x in sources if x.retains_grad])
    with_gradient = [leaf for leaf, x in zip(targets, gradients, strict=True) if x is not None]
    if not with_gradient:  # the results have a history nevertheless: one zero that no cotangent reaches
        leaf, x = next(iter(targets.items()))
        return BackwardOutputs((leaf,), tuple(outs), within, (frozenset(),)), [torch.zeros_like(lifted.seen(x))]
    # A Function may have a gradient that depends on no cotangent, such as an auxiliary loss's.
    near, far = (find_origins(sources, through=through) for through in (False, True))
    ends = [history_end(targets[leaf]) for leaf in with_gradient]
    reached = tuple(near.get(end) or far.get(end, frozenset()) for end in ends)
    backward = BackwardOutputs(tuple(with_gradient), tuple(outs), within, reached)
    return backward, [lifted.seen(x) for x in gradients if x is not None]


def _refuse_shared_history(targets: Mapping[int, Tensor], names: Mapping[int, str], first_state: int) -> None:
    """Refuses closed-over results of other ops that still depend on another input: no cut separates them."""
    ends = {history_end(x): leaf for leaf, x in targets.items()}
    for leaf, x in targets.items():
        if x.grad_fn is None or leaf < first_state:
            continue
        others = {end for end in find_origins([x]) if end in ends and ends[end] != leaf}
        if others:
            raise ShardingError(
                f"{names[leaf]} comes from {names[ends[others.pop()]]}, and the traced function reads both",
                rule="an input has no history inside; this one is held by something that cannot hold another for "
                "the time of the trace (a tuple, a default argument, or it is an argument, too)",
                remedy="keep it without its history (self.h = tuple(x.detach() for x in h)), compute it inside, or "
                "pass it as an argument",
            )


def _refuse_retained(results: Sequence[Tensor]) -> None:
    """Refuses results that retain their gradient: outside, one result of a program gives no gradient to another."""
    if results:
        raise ShardingError(
            "the traced function returns tensors that retain their gradient",
            [typeof(x) for x in results],
            rule="going back from one result of a program gives gradients to its inputs, not to its other results",
            remedy="call backward() inside and return h.grad; or add a zero that is an argument, h = h + zero, with "
            "requires_grad=True: its gradient is that of h",
        )
