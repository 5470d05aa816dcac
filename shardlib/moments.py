"""What an optimizer keeps of its parameters: where it lives, and that it is there before the first step is traced.

An optimizer makes its moments in its first step, so that this is another function than all later ones. Those whose
moments begin as constants make them here, by torch's own code, in front of the call: one program serves all steps.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from shardlib.internals import init_group, mark_stepped, unmark_stepped
from shardlib.jitted.planning import Invocation
from shardlib.placing import shard
from shardlib.plans.plan import Plan
from shardlib.specs.spec import parse
from shardlib.state import unseen
from shardlib.tensors.tensor import ShardedTensor


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def place(optimizer: torch.optim.Optimizer, known: Collection[int] = ()) -> None:
    """Bring what an optimizer keeps of a parameter, element by element, to where its strategy says, but what is there,
    and tensors that are `known` by their `id`."""
    for p in parameters(optimizer):
        at = getattr(p, "moments_at", None)
        if isinstance(p, ShardedTensor) and at is not None:
            home = parse(at).resolve(p.shape, p.mesh).layout
            for k, x in list(optimizer.state.get(p, {}).items()):
                if not isinstance(x, Tensor) or x.shape != p.shape or id(x) in known:
                    continue
                if not isinstance(x, ShardedTensor) or x.sharding != home:
                    with p.mesh:
                        optimizer.state[p][k] = shard(x, at)


def plan(call: Invocation, *, runs: bool = True) -> tuple[Plan, list[Any]]:
    """The plan of a call, of whose optimizers none is at its first step, and what it knows by identity.

    What was made in front of it, and the function does not touch, goes again; so does all of it where the call does not
    run. Learning rates are inputs from the start: what changes a number between steps is a schedule, mostly.
    """
    untouched: set[int] = set()
    last = call.programs.last
    while True:
        optimizers = [x for x in call.state.kept if isinstance(x, torch.optim.Optimizer)]
        if not optimizers:
            return call.plan(runs=runs)
        rates = {(id(group), (str, "lr")) for x in optimizers for group in x.param_groups}
        call.programs.changing.numbers |= rates
        call.programs.changing.rates |= rates
        with ExitStack() as undo:
            made = [of for x in optimizers for of in _begun(x, untouched, undo)]
            call.read()
            found = call.plan(runs=runs)
            idle = _idle(found[0], call.leaves)
            wrong = {
                id(p) for p, entries in made if all(id(x) in idle for x in entries.values() if isinstance(x, Tensor))
            }
            if runs and not wrong:
                undo.pop_all()
        if not wrong:
            return found
        untouched |= wrong
        call.programs.last = last  # nothing changed that the caller changed
        call.read()


def _begun(optimizer: torch.optim.Optimizer, untouched: Collection[int], undo: ExitStack) -> list[tuple[Any, Any]]:
    """Give an optimizer what it makes at its first step; returns that, with the parameters that it is kept of."""
    place(optimizer)
    if mark_stepped(optimizer):
        undo.callback(unmark_stepped, optimizer)
    fresh = [p for p in parameters(optimizer) if p.requires_grad and p.is_leaf and not optimizer.state.get(p)]
    fresh = [p for p in fresh if id(p) not in untouched]
    if not fresh or not type(optimizer).__module__.startswith("torch."):
        return []
    for p in fresh:
        undo.callback(optimizer.state.pop, p, None)
    _begin(optimizer, set(map(id, fresh)))
    place(optimizer)
    return [(p, optimizer.state[p]) for p in fresh if optimizer.state.get(p)]


@unseen
def _begin(optimizer: torch.optim.Optimizer, fresh: Collection[int]) -> None:
    """As the first lines of `step` do, which look at parameters that have a gradient."""
    before = [(p, p.grad) for p in parameters(optimizer)]
    try:
        with torch.no_grad():
            for p, _ in before:
                p.grad = p.detach() if id(p) in fresh else None
            for group in optimizer.param_groups:
                init_group(optimizer, group)
                if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                    for p in group["params"]:  # momentum that begins with the gradient is one that begins with zeros
                        if id(p) in fresh:
                            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    finally:
        for p, grad in before:
            p.grad = grad
            if not optimizer.state.get(p):
                optimizer.state.pop(p, None)


def _idle(found: Plan, leaves: list[Any]) -> set[int]:
    """The tensors among the leaves of a call that its program neither reads nor writes."""
    traced = found.compiled.traced
    used = {leaf for node, leaf in zip(traced.inputs, traced.input_leaves, strict=True) if node.users}
    return {id(x) for i, x in enumerate(leaves) if i not in used}
