"""Writes new values of state over the old ones, in the last steps of the program.

A call replaces parameters, moments and buffers that the function updates (`Program.replaced`). If a chain of in-place
steps leads from the old value to the new one, the chain runs in the old value's memory. The chain runs behind all other
steps, so every reader of the old value runs before it, and a failure (bad data, lost ranks) leaves the state unchanged.
Only steps that depend on the chain follow it, and none of them may fail on values: pointwise arithmetic, views,
reductions; no gathers, no messages. A chain stays in place if it would hold more memory until the end than it saves,
such as a sum of gradients over many microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardlib.compiler.passes.memory.reuse_buffers import alike
from shardlib.compiler.passes.split_backward import gives, needs
from shardlib.compiler.program.buffers import blurred, handed_on, owners_in
from shardlib.compiler.program.inplace_ops import takes
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.torch_internals.torch_private import OpOverload

_NUMBER = 16  # bytes of one number: a norm, a rate
_BLOCK = 512  # bytes that allocators round up to: to keep less costs nothing


def settle(program: Program) -> Program:
    """Moves such chains to the end; `replaced` keeps the inputs that are overwritten."""
    if not program.replaced:
        return program
    state = _State.analyze(program)
    chains = {i: chain for i in program.replaced if (chain := state.chain(i))}
    while chains:
        late = state.behind(j for chain in chains.values() for j, _, _ in chain)
        order = [*(j for j in range(len(program.steps)) if j not in late), *sorted(late)]
        place = {j: k for k, j in enumerate(order)}
        if not (wrong := [i for i, chain in chains.items() if not state.is_good(i, chain, late, place)]):
            return state.settled(chains, order)
        for i in wrong:
            del chains[i]
    return replace(program, replaced={})


Chain = Sequence[tuple[int, int, int]]  # steps, each with the numbers of a result and of the operand that it overwrites


@dataclass
class _State:
    """The producers and readers of a program's values, and the owners of their memory.

    `homes` counts the inputs that a value replaces. `shown` is memory that results view. Viewers of `unclear` memory
    are unknown, here or on other devices.
    """

    program: Program
    owner: Mapping[Var, Var]
    maker: Mapping[Var, int]
    readers: Mapping[Var, Sequence[int]]  # steps that read a value, or wait for it
    touched: Mapping[Var, Sequence[int]]  # steps that read a memory, or wait for messages that do
    movable: frozenset[int]  # steps that may run last, with all that depends on them
    shown: frozenset[Var]
    homes: Mapping[Any, int]
    unclear: frozenset[Var]

    @staticmethod
    def analyze(program: Program) -> _State:
        steps, owner = program.steps, owners_in(program)
        maker: dict[Var, int] = {}
        readers: dict[Var, list[int]] = {}
        touched: dict[Var, list[int]] = {}
        sent: dict[Var, tuple[Var, ...]] = {}
        for i, step in enumerate(steps):
            maker |= dict.fromkeys(makes(step), i)
            for v in needs(step):
                readers.setdefault(v, []).append(i)
            if isinstance(step, Start):
                sent |= dict.fromkeys(step.outs, reads(step))
            carried = [v for out in step.outs for v in sent[out]] if isinstance(step, Wait) else []
            for v in (*reads(step), *carried):
                touched.setdefault(owner.get(v, v), []).append(i)
        movable: set[int] = set()
        for i in reversed(range(len(steps))):
            after = (
                j for v in gives(steps[i]) for j in readers.get(v, ()) if j > i
            )  # a wait precedes the readers of its results
            if _is_safe(steps[i]) and movable.issuperset(after):
                movable.add(i)
        shown = frozenset(owner.get(v, v) for v in program.results)
        homes = Counter(program.outputs[at] for at in program.replaced.values())
        unclear = frozenset(blurred(steps, owner) | handed_on(steps, owner))
        return _State(program, owner, maker, readers, touched, frozenset(movable), shown, homes, unclear)

    def chain(self, i: int) -> Chain:
        """Returns the in-place steps that lead from input `i` to its replacement; empty if there are none."""
        x, new = self.program.inputs[i], self.program.outputs[self.program.replaced[i]]
        if not isinstance(new, Var) or new is x or self.homes[new] > 1:
            return ()
        ways: list[tuple[Var, Chain]] = [(new, ())]
        seen = {new}
        while ways:
            at, chain = ways.pop()
            j = self.maker.get(at, -1)  # -1: it is an input itself
            step = self.program.steps[j] if j in self.movable else None
            if not isinstance(step, Compute) or self.owner.get(at, at) is not at:
                continue
            r = step.outs.index(at)
            for k in reversed((takes(step) or ((),) * len(step.outs))[r]):
                v = step.args[k] if k < len(step.args) else None
                if not isinstance(v, Var) or not alike(v, at) or v in seen:
                    continue
                longer = ((j, r, k), *chain)
                if v is x:
                    return longer
                seen.add(v)
                ways.append((v, longer))
        return ()

    def behind(self, first: Iterable[int]) -> set[int]:
        """Returns steps, and all steps that depend on them."""
        dependents: set[int] = set()
        todo = list(first)
        while todo:
            if (i := todo.pop()) not in dependents:
                dependents.add(i)
                todo += [j for v in gives(self.program.steps[i]) for j in self.readers.get(v, ())]
        return dependents

    def is_good(self, i: int, chain: Chain, late: set[int], place: Mapping[int, int]) -> bool:
        """Returns whether no step reads overwritten memory, and the chain holds no more memory than it saves."""
        steps = self.program.steps
        for j, _, k in chain:
            step = steps[j]
            assert isinstance(step, Compute)
            x = step.args[k]
            if x in self.unclear or x in self.shown or sum(self.owner.get(v, v) is x for v in reads(step)) > 1:
                return False
            if any(place[t] > place[j] for t in self.touched.get(x, ())):
                return False
        kept = {self.owner.get(v, v) for j in self.behind(j for j, _, _ in chain) for v in reads(steps[j])}
        early = (v for v in kept - self.shown if v in self.maker and self.maker[v] not in late)
        return sum(v.nbytes for v in early if v.nbytes > _NUMBER) <= max(self.program.inputs[i].nbytes, _BLOCK)

    def settled(self, chains: Mapping[int, Chain], order: Sequence[int]) -> Program:
        steps = list(self.program.steps)
        for j, r, k in (link for chain in chains.values() for link in chain):
            step = steps[j]
            assert isinstance(step, Compute)
            over = [*(step.over or (None,) * len(step.outs))]
            over[r] = k
            steps[j] = replace(step, over=tuple(over))
        replaced = {i: self.program.replaced[i] for i in chains}
        return replace(self.program, steps=tuple(steps[j] for j in order), replaced=replaced)


def _is_safe(step: Step) -> bool:
    """Returns whether a step is free of side effects, and cannot fail because of values or other ranks."""
    tags = getattr(getattr(step, "target", None), "tags", ())
    if not isinstance(step, Compute) or not step.out_vars or torch.Tag.nondeterministic_seeded in tags:
        return False
    if has_trait(step.target, "raises_on_values"):
        return False
    plain = isinstance(step.target, OpOverload) and (torch.Tag.pointwise in tags or torch.Tag.reduction in tags)
    return plain or is_view(step.target) or bool(takes(step)) or step.note == "reshard"
