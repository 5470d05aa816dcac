"""Finds the mesh axes along which local values differ between devices; along others they are computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from shardlib.compiler.program.nested_args import leaves
from shardlib.compiler.program.steps import Compute, Program, Start, Step, Var, Wait, makes, reads, syms
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_traits import has_trait
from shardlib.sharding.mesh.axis import Axis

Primes = tuple[Axis, ...]


def varying(program: Program, everything: Primes | None = None) -> dict[Var, Primes]:
    """Maps each variable to the prime parts of axes along which it may differ; `everything` overrides them all."""
    varies: dict[Var, Primes] = {}
    for var in program.inputs:
        if everything is not None:
            varies[var] = everything
        elif var in program.varies:
            varies[var] = program.varies[var]
        else:
            assert var.layout is not None, f"{var} is an input without a layout"
            varies[var] = primes((*var.layout.axes, *var.layout.pending_axes))
    for var, _ in program.captured:
        varies[var] = everything or ()
    for step in program.steps:
        for c in step.moves if isinstance(step, Start) else ():
            group = set(primes(c.axes))
            axes = {*varies[c.source], *primes(a for s in leaves(c.params, Sym) for a in s.axes)}
            axes = axes - group if c.kind in ("all_reduce", "all_gather") else axes | group
            varies[c.out] = primes(axes) if everything is None else everything
        if not isinstance(step, Start | Wait):
            axes = {a for v in _values(step) for a in varies[v]} | set(primes(a for s in syms(step) for a in s.axes))
            axes |= set(primes(_received_axes(step)))
            varies |= dict.fromkeys(makes(step), primes(axes) if everything is None else everything)
    return varies


def _values(step: Step) -> Iterable[Var]:
    """Returns the operands whose values matter: none of an op that fills a tensor with a number."""
    filled = isinstance(step, Compute) and has_trait(step.target, "creates") and has_trait(step.target, "fills")
    return () if filled else reads(step)


def _received_axes(step: Step) -> Iterator[Axis]:
    """Yields the axes along which a value of another stage may differ."""
    if isinstance(step, Compute) and has_trait(step.target, "receives"):
        for v in step.out_vars:
            assert v.layout is not None, f"{v} travels, and has no layout"
            yield from (*v.layout.axes, *v.layout.pending_axes)


def primes(axes: Iterable[Axis]) -> Primes:
    """Returns the prime parts of axes, each once, in order."""
    return _sorted_primes(frozenset(axes))


@lru_cache(1 << 12)
def _sorted_primes(axes: frozenset[Axis]) -> Primes:
    return tuple(sorted({p for a in axes for p in a.primes()}, key=lambda a: (a.name, a.pre)))
