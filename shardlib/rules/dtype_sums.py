"""Dtypes between which a partial sum may pass an op: the converted addends must add up to the converted sum."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardlib.core.aten.op_traits import has_trait
from shardlib.rules.rule import Call, Rule


def can_hold_sum(new: torch.dtype, old: torch.dtype) -> bool:
    """Returns whether a sum of numbers of dtype `old` equals the sum of the same numbers in `new`.

    A floating-point dtype needs one with at least its range and digits. Integers wrap at their own width, and booleans
    add up to an "or", so their sums exist in no other dtype.
    """
    if new == old or not is_inexact(old) or not is_inexact(new):
        return new == old
    a, b = old.to_real(), new.to_real()
    return a == b or (min(a.itemsize, b.itemsize) > 1 and torch.promote_types(a, b) == b)


def is_inexact(dtype: torch.dtype) -> bool:
    """Returns whether a dtype is floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def drop_inexact_sums(rule: Rule, call: Call) -> Rule:
    """Removes from a rule the partial sums that the dtypes of its results cannot hold.

    Sums onto terms in float16 go too, since an addend may overflow where the sum does not. A factor whose reduction
    would need arithmetic that the dtype lacks stays whole.
    """
    if not rule.linear and not rule.reduce:
        return rule
    dtypes = [m.dtype for i, m in enumerate(call.results) if m is not None and i not in rule.complete]
    if any(dtype in NO_ARITHMETIC for dtype in dtypes):
        return replace(rule, whole=rule.whole | {f for f, kind in rule.reduce.items() if kind != "none"}, linear=())
    if has_trait(call.target, "casts_addends"):
        return rule
    linear = tuple(
        s for s in rule.linear if all(can_hold_sum(new, call.operands[i].dtype) for i in s for new in dtypes)
    )
    onto = None if torch.float16 in dtypes else rule.onto
    return rule if (linear, onto) == (rule.linear, rule.onto) else replace(rule, linear=linear, onto=onto)


# Torch has no sums and comparisons in these dtypes.
NO_ARITHMETIC = {torch.uint16, torch.uint32, torch.uint64}
NO_ARITHMETIC |= {x for name, x in vars(torch).items() if name.startswith("float8_")}
