"""Chooses the values to recompute by name: all inside layers, all in attention, those of named modules and ops."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import nn

from shardlib.compiler.memory_options import WORDS
from shardlib.compiler.passes.memory.layer_bounds import boundaries, frontier
from shardlib.compiler.passes.memory.saved_values import Crossing
from shardlib.compiler.passes.split_backward import gives
from shardlib.compiler.program.steps import Compute, Start, Step, Var, reads
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import Module
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

_NEAR = 3  # similar names that an error lists
_LISTED = 12  # known names that an error lists


def full(crossing: Crossing) -> set[Var]:
    """Returns all values of layers except those that the next layer reads.

    Values of a turn's last layer are kept if the next turn, which runs backward, reads them at once.
    """
    kept, last = set[Var](), dict[int, int]()
    for at in boundaries(crossing):
        kept |= frontier(crossing, at)
        last[crossing.turn[at]] = max(at, last.get(crossing.turn[at], 0))
    turn = {o: crossing.turn[crossing.maker[o]] for o in crossing.droppable}
    later = {o: min(crossing.turn[i] for i in crossing.readers[o] if crossing.back[i]) for o in crossing.held}
    waiting = {turn[o] for o, backward in later.items() if backward > turn[o] + 1}

    def is_dropped(o: Var) -> bool:
        is_inside = crossing.maker[o] < last.get(turn[o], 0)
        return is_inside or (turn[o] in waiting and later.get(o, math.inf) > turn[o] + 1)

    return {o for o in crossing.droppable if o not in kept and is_dropped(o)}


def attention(crossing: Crossing) -> set[Var]:
    """Returns the results of attention ops, and the values between the products of attention written out."""
    chosen = set[Var]()
    for owner in crossing.droppable:
        name = kind(owner)
        if name.startswith(("attention", "_scaled_dot_product")):
            chosen.add(owner)
        elif name in ("softmax", "_softmax", "_safe_softmax"):
            chosen.update(_scores(crossing, owner))
    return chosen


def refuse_unknown(crossing: Crossing, names: Sequence[str], absent: Callable[[str], bool]) -> None:
    """Raises `ShardingError` for names of no op and no module of the forward pass, except those that are `absent`."""
    if not any(crossing.back):
        return
    ops, scopes, every = _all_names(crossing)
    wrong = []
    for name in names:
        if not any(_fits(name, known_name) for known_name in every) and not absent(name):
            words = list(dict.fromkeys((*WORDS, *_short(sorted(every)))))
            near = difflib.get_close_matches(name.replace("*", "").lower(), words, _NEAR, 0.5)
            wrong.append(f"{name!r} is none" + (f"; near it are {', '.join(map(repr, near))}" if near else ""))
    if wrong:
        raise ShardingError(
            "remat names what the forward pass does not make, or does not keep",
            wrong,
            rule="a name is a module's path, or the end of one, its class, or an op whose result the backward pass may "
            'read; `*` stands for any text; "full" and "attention" may stand beside names',
            remedy=f"here these are {_listed(ops[owner] | {module.kind for module in scopes[owner]} for owner in ops)}",
        )


def named(crossing: Crossing, names: Sequence[str]) -> set[Var]:
    """Returns the results of ops with these names, and the inner values of modules with these paths or classes.

    Values that other modules read are kept, as `torch.utils.checkpoint` keeps inputs and outputs.
    """
    ops, scopes, every = _all_names(crossing)
    meant = {x for x in every if any(_fits(name, x) for name in names)}
    chosen = {owner for owner, op_names in ops.items() if not meant.isdisjoint(op_names)}
    for owner, modules in scopes.items():
        around = {module for module in modules if not meant.isdisjoint((module.path, module.kind))}
        if any(all(module in _around(crossing, i) for i in _readers(crossing, owner)) for module in around):
            chosen.add(owner)
    return chosen


def _all_names(crossing: Crossing) -> tuple[dict[Var, set[str]], dict[Var, frozenset[Module]], set[str]]:
    """Returns the names of the op that makes each value, the modules that it is made in, and all these names."""
    ops = {owner: _ops(crossing, owner) for owner in crossing.droppable}
    scopes = {owner: _made_in(crossing, owner) for owner in crossing.droppable}
    every = {name for op_names in ops.values() for name in op_names}
    return ops, scopes, every | {x for modules in scopes.values() for m in modules for x in (m.path, m.kind)}


def is_absent(objects: Iterable[object], name: str) -> bool:
    """True if a name belongs to a module or an op that a program may lack, because a module is in eval mode."""
    modules = [x for x in objects if isinstance(x, nn.Module)]
    if all(m.training for m in modules):
        return False
    paths = {path for m in modules for path, _ in m.named_modules()} | {type(m).__name__ for m in modules}
    ops = torch.ops.aten, torch.ops.shardlib
    return any(_fits(name, path) for path in paths) or any(hasattr(namespace, name) for namespace in ops)


def _scores(crossing: Crossing, softmax: Var) -> Iterator[Var]:
    """Yields the memory around a softmax of its size, up to the products before and behind it."""
    todo, seen, size = [softmax], set[Var](), softmax.numel
    while todo:
        if (o := todo.pop()) in seen or o not in crossing.droppable or o.numel != size:
            continue
        seen.add(o)
        yield o
        makers = [crossing.program.steps[crossing.maker[o]]]
        readers = [crossing.program.steps[i] for i in crossing.readers[o] if not crossing.back[i]]
        neighbors = [v for step in makers if not _is_product(step) for v in reads(step)]
        neighbors += [v for step in readers if not _is_product(step) for v in (*gives(step), *reads(step))]
        todo += [crossing.owner.get(v, v) for v in neighbors]


def _is_product(step: Step) -> bool:
    return isinstance(step, Compute) and _op(step.target) in ("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum")


def kind(v: Var) -> str:
    """Returns the kind of the op whose result a variable is a shard of."""
    return v.value.op.kind if v.value is not None and v.value.op is not None else ""


@cache
def _op(target: object) -> str:
    return str(schema_of(target).name).rpartition("::")[2] if isinstance(target, OpOverload) else ""


def _ops(crossing: Crossing, owner: Var) -> set[str]:
    """Returns the names of the op that makes a value."""
    step = crossing.program.steps[crossing.maker[owner]]
    names = {kind(owner), _op(step.target) if isinstance(step, Compute) else ""}
    return (names | {op.strip("_") for op in names}) - {""}


def _made_in(crossing: Crossing, owner: Var) -> frozenset[Module]:
    """Returns the modules in which a value is computed; a message belongs to the modules of its source."""
    step = crossing.program.steps[crossing.maker[owner]]
    if isinstance(step, Start):
        step = next((s for s in _before(crossing, owner) if isinstance(s, Compute)), step)
    return frozenset(step.inside) if isinstance(step, Compute) else frozenset()


def _readers(crossing: Crossing, owner: Var) -> Iterator[int]:
    """Returns the forward steps that read a memory."""
    return (i for i in crossing.readers.get(owner, ()) if not crossing.back[i])


def _around(crossing: Crossing, i: int) -> frozenset[Module]:
    """Returns the modules of a step; of a message, the common modules of its readers."""
    step = crossing.program.steps[i]
    if isinstance(step, Compute):
        return frozenset(step.inside)
    readers = [j for v in gives(step) for j in _readers(crossing, crossing.owner.get(v, v)) if j > i]
    return frozenset.intersection(*(_around(crossing, j) for j in readers)) if readers else frozenset()


def _before(crossing: Crossing, owner: Var) -> Iterator[Step]:
    """Yields the steps behind a message, from its source backward."""
    while (at := crossing.maker.get(owner)) is not None:
        step = crossing.program.steps[at]
        yield step
        if not reads(step):
            return
        owner = reads(step)[0]


def _fits(pattern: str, name: str) -> bool:
    """Returns whether a name, or its end behind a dot, matches a pattern."""
    text = ".*".join(map(re.escape, pattern.split("*")))
    return re.fullmatch(rf"(.*\.)?{text}", name) is not None


def _listed(names: Iterable[Iterable[str]]) -> str:
    """Formats names, the most frequent first."""
    often = [name for name, _ in Counter(name for some in names for name in some).most_common(_LISTED + 1)]
    return ", ".join(often[:_LISTED]) + (", ..." if len(often) > _LISTED else "") if often else "none"


def _short(names: Iterable[str]) -> list[str]:
    """Returns names, and their last words."""
    return list(dict.fromkeys(x for name in names for x in (name, name.rpartition(".")[2])))
