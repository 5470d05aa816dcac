"""Which rows of a value are not of the groups that a device owns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardlib.aten.calls import ADD, ARANGE, FLATTEN, GE, LT, MUL, OR, PAD, SLICE, UNSQUEEZE
from shardlib.lower.local import LocalForm
from shardlib.program.steps import Var
from shardlib.program.sym import Sym, local_size, offset, product
from shardlib.reshard import Axes

Leaves = Sequence[tuple[int, Axes]]  # sizes, major first, and what cuts each


def others(form: LocalForm, ends: Var, rows: Leaves, groups: Leaves, *, own: bool = False) -> Var:
    """Write a mask of a device's rows: True where one is not of the groups that the device owns, which `ends` says, of
    all rows or of its `own`.

    What is behind the last group goes with it.
    """
    count, place = product([local_size(size, axes) for size, axes in rows]), None
    if own:
        place = form.op(ARANGE, 0, count, dtype=torch.int64, device=form.device)
    for size, axes in rows if not own else ():
        here, first = local_size(size, axes), offset(size, axes)
        mine: Var = form.op(ARANGE, first, first + here, dtype=torch.int64, device=form.device)
        if place is not None:
            place = form.op(MUL, form.op(UNSQUEEZE, place, 1), int(size))
            mine = form.op(FLATTEN, form.op(ADD, place, mine), 0, 1)
        place = mine
    (size, axes), *inner = groups
    first, held, each = offset(size, axes), local_size(size, axes), math.prod(n for n, _ in inner)
    edges = form.op(PAD, form.op(SLICE, ends, 0, 0, each * int(size) - 1), [1, 0], 0)
    edges = form.op(PAD, edges, [0, 1], math.prod(n for n, _ in rows))

    def edge(group: Sym | int) -> Var:
        found: Var = form.op(SLICE, edges, 0, group, group + 1)
        return found

    before = form.op(LT, place, edge(first * each))
    behind = form.op(GE, place, edge((first + held) * each))
    mask: Var = form.op(OR, before, behind)
    return mask
