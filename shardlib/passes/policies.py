"""What is given up by name: everything but what layers hand on, what is inside attention, what modules and ops make."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from shardlib.errors import ShardingError
from shardlib.internals import OpOverload, schema_of
from shardlib.passes.crossing import Crossing
from shardlib.passes.layers import boundaries, frontier
from shardlib.passes.split import gives
from shardlib.program.steps import Compute, Start, Step, Var, reads

_NEAR = 3  # names that an error lists


def full(crossing: Crossing) -> set[Var]:
    """All that is made in front of where the last layer ends, but for what one layer hands on to the next."""
    kept, last = set[Var](), dict[int, int]()
    for at in boundaries(crossing):
        kept |= frontier(crossing, at)
        last[crossing.turn[at]] = max(at, last.get(crossing.turn[at], 0))
    makers = crossing.maker
    return {o for o in crossing.droppable if o not in kept and makers[o] < last.get(crossing.turn[makers[o]], 0)}


def attention(crossing: Crossing) -> set[Var]:
    """What attention as one op makes; of attention that is written out, all from the scores to the last of what their
    product with the values reads."""
    found = set[Var]()
    for owner in crossing.droppable:
        name = kind(owner)
        if name.startswith(("attention", "_scaled_dot_product")):
            found.add(owner)
        elif name in ("softmax", "_softmax", "_safe_softmax"):
            found.update(_scores(crossing, owner))
    return found


def named(crossing: Crossing, names: Sequence[str]) -> set[Var]:
    """What modules of these paths or classes make, and ops of these names. Raises `ShardingError` for names of
    nothing."""
    of = {owner: _names(crossing, owner) for owner in crossing.droppable}
    every = sorted({name for known in of.values() for name in known})
    wrong = []
    for name in names:
        if not any(_fits(name, known) for known in every):
            near = ", ".join(map(repr, difflib.get_close_matches(name.replace("*", ""), _short(every), _NEAR, 0.5)))
            wrong.append(f"{name!r} is none" + (f"; near it are {near}" if near else ""))
    if wrong:
        raise ShardingError(
            "remat names what the forward pass does not make",
            wrong,
            rule="a name is a module's path, or the end of one, its class, or an op; `*` stands for any text",
            remedy='remat="h.*.mlp", remat=["LlamaMLP", "gelu"]',
        )
    return {owner for owner, known in of.items() if any(_fits(name, x) for x in known for name in names)}


def _scores(crossing: Crossing, softmax: Var) -> Iterator[Var]:
    """The memory around a softmax that is as large, up to the products before and behind it."""
    todo, seen, size = [softmax], set[Var](), _numel(softmax)
    while todo:
        if (o := todo.pop()) in seen or o not in crossing.droppable or _numel(o) != size:
            continue
        seen.add(o)
        yield o
        makers = [crossing.program.steps[crossing.maker[o]]]
        readers = [crossing.program.steps[i] for i in crossing.readers[o] if not crossing.back[i]]
        beside = [v for step in makers if not _is_product(step) for v in reads(step)]
        beside += [v for step in readers if not _is_product(step) for v in (*gives(step), *reads(step))]
        todo += [crossing.owner.get(v, v) for v in beside]


def _is_product(step: Step) -> bool:
    return isinstance(step, Compute) and _op(step.target) in ("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum")


def _numel(v: Var) -> int:
    return v.nbytes // v.dtype.itemsize


def kind(v: Var) -> str:
    """The op whose result a variable is a piece of."""
    return v.value.op.kind if v.value is not None and v.value.op is not None else ""


@cache
def _op(target: object) -> str:
    return str(schema_of(target).name).rpartition("::")[2] if isinstance(target, OpOverload) else ""


def _names(crossing: Crossing, owner: Var) -> set[str]:
    """All that a value may be called by: its op, and the modules around it."""
    step = crossing.program.steps[crossing.maker[owner]]
    ops = {kind(owner), _op(step.target) if isinstance(step, Compute) else ""}
    found = ops | {op.strip("_") for op in ops}
    if isinstance(step, Start):  # a message belongs to what it brings
        step = next((s for s in _before(crossing, owner) if isinstance(s, Compute)), step)
    for module in step.inside if isinstance(step, Compute) else ():
        found |= {module.path, module.kind}
    return found - {""}


def _before(crossing: Crossing, owner: Var) -> Iterator[Step]:
    """What makes the source of a message, and of that one."""
    while (at := crossing.maker.get(owner)) is not None:
        step = crossing.program.steps[at]
        yield step
        if not reads(step):
            return
        owner = reads(step)[0]


def _fits(pattern: str, name: str) -> bool:
    """Whether a name, or its end behind a dot, is what a pattern says."""
    text = ".*".join(map(re.escape, pattern.split("*")))
    return re.fullmatch(rf"(.*\.)?{text}", name) is not None


def _short(names: Iterable[str]) -> list[str]:
    """Names, and their last words."""
    return list(dict.fromkeys(x for name in names for x in (name, name.rpartition(".")[2])))
