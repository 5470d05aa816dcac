"""Peak memory of a program on the fullest device, by the lifetimes of its local tensors.

Views cost nothing and keep what they view alive; inputs live all the time. What an op allocates inside, and the buffers
of collectives, are not counted.
"""

from __future__ import annotations

from shardlib.aten.traits import is_view
from shardlib.lower.program import Instr, Program, Var, reads


def local_bytes(var: Var) -> int:
    """Bytes of a variable on the fullest device."""
    return (var.numel if var.layout is None else var.layout.max_local_numel()) * var.dtype.itemsize


def peak_bytes(program: Program) -> int:
    """The most bytes that are alive at once."""
    root: dict[Var, Var] = {}

    def owner(var: Var) -> Var:
        return root.get(var, var)

    for step in program.steps:
        if isinstance(step, Instr) and is_view(step.target):
            source = next(iter(reads(step)))
            for out in step.outs:
                if out is not None:
                    root[out] = owner(source)
    always = {owner(v) for v in program.inputs} | {owner(v) for v, _ in program.captured}
    last: dict[Var, int] = {}
    for i, step in enumerate(program.steps):
        for var in (*reads(step), *(o for o in step.outs if o is not None)):
            last[owner(var)] = i
    ends: dict[int, list[Var]] = {}
    returned = {owner(v) for v in program.outputs if isinstance(v, Var)}
    for var, i in last.items():
        if var not in always and var not in returned:
            ends.setdefault(i, []).append(var)
    size = {v: local_bytes(v) for v in always}
    alive = peak = sum(size.values())
    seen = set(always)
    for i, step in enumerate(program.steps):
        for out in step.outs:
            if out is not None and owner(out) not in seen:
                seen.add(owner(out))
                size[owner(out)] = local_bytes(owner(out))
                alive += size[owner(out)]
        peak = max(peak, alive)
        alive -= sum(size.get(v, 0) for v in ends.get(i, ()))
    return peak
