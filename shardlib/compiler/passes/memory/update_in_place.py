"""State that a call replaces is written over where it is, by the last steps of the program.

A parameter, a moment or a buffer that the function writes to is overwritten anyway (`Program.replaced`). Where steps in
place lead from its old value to its new one, they have its memory. They stand behind all others, so they come after
whoever reads the old value, and what fails before (bad data, lost ranks) has changed nothing. Only what follows from
them comes along, if no value makes it fail: arithmetic element by element, views, reductions; not what looks up, nor
what waits for other ranks. What would keep more for the end than it saves stays where it is: a sum of gradients over
many micro-batches.
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
from shardlib.core.torch_private import OpOverload

_NUMBER = 16  # bytes of one number: a norm, a rate
_BLOCK = 512  # bytes that allocators round up to: to keep less costs nothing


def settle(program: Program) -> Program:
    """The program with such steps last; `replaced` are the inputs that are written over then."""
    if not program.replaced:
        return program
    found = _State.of(program)
    chains = {i: chain for i in program.replaced if (chain := found.chain(i))}
    while chains:
        late = found.behind(j for chain in chains.values() for j, _, _ in chain)
        order = [*(j for j in range(len(program.steps)) if j not in late), *sorted(late)]
        place = {j: k for k, j in enumerate(order)}
        if not (wrong := [i for i, chain in chains.items() if not found.is_good(i, chain, late, place)]):
            return found.settled(chains, order)
        for i in wrong:
            del chains[i]
    return replace(program, replaced={})


Chain = Sequence[tuple[int, int, int]]  # steps, each with the number of a result and of the operand whose memory it has


@dataclass
class _State:
    """Where the values of a program are made and read, by whom, and whose memory they show."""

    program: Program
    owner: Mapping[Var, Var]
    maker: Mapping[Var, int]
    readers: Mapping[Var, Sequence[int]]  # of a value, what is in flight included
    touched: Mapping[Var, Sequence[int]]  # of a memory: who reads it, and who waits for messages that do
    movable: frozenset[int]  # steps that may stand last, with all that follows from them
    shown: frozenset[Var]  # memory that results show
    homes: Mapping[Any, int]  # how many inputs a value replaces
    unclear: frozenset[Var]  # memory of which nobody knows who shows it, here or on other devices

    @staticmethod
    def of(program: Program) -> _State:
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
            after = (j for v in gives(steps[i]) for j in readers.get(v, ()) if j > i)  # a wait is for what it brings
            if _is_safe(steps[i]) and movable.issuperset(after):
                movable.add(i)
        shown = frozenset(owner.get(v, v) for v in program.results)
        homes = Counter(program.outputs[at] for at in program.replaced.values())
        unclear = frozenset(blurred(steps, owner) | handed_on(steps, owner))
        return _State(program, owner, maker, readers, touched, frozenset(movable), shown, homes, unclear)

    def chain(self, i: int) -> Chain:
        """The steps that lead from input `i` to what replaces it, one in place of the other; empty if none do."""
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
        """Steps, and all that follows from them."""
        found: set[int] = set()
        todo = list(first)
        while todo:
            if (i := todo.pop()) not in found:
                found.add(i)
                todo += [j for v in gives(self.program.steps[i]) for j in self.readers.get(v, ())]
        return found

    def is_good(self, i: int, chain: Chain, late: set[int], place: Mapping[int, int]) -> bool:
        """Returns whether nobody reads memory that is written over by then, and the end keeps no more than is written
        there."""
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
    """Returns whether a step cannot fail because of values or of other ranks, and does nothing but to compute some."""
    tags = getattr(getattr(step, "target", None), "tags", ())
    if not isinstance(step, Compute) or not step.made or torch.Tag.nondeterministic_seeded in tags:
        return False
    if has_trait(step.target, "raises_on_values"):
        return False
    plain = isinstance(step.target, OpOverload) and (torch.Tag.pointwise in tags or torch.Tag.reduction in tags)
    return plain or is_view(step.target) or bool(takes(step)) or step.note == "reshard"
