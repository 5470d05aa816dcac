"""Between which dtypes a pending sum may pass an op: where all terms of it, made the other dtype, add up to the sum."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardlib.core.aten.op_traits import has_trait
from shardlib.rules.rule import Call, Rule


def holds(new: torch.dtype, old: torch.dtype) -> bool:
    """Whether a sum of numbers of dtype `old` is that of the same numbers in `new`.

    Floating-point numbers need one as wide, by its range and its digits. Whole numbers wrap at their own width, and
    truth values add up to an "or": these sums are nothing else.

    Example:
        >>> holds(torch.float32, torch.bfloat16), holds(torch.float32, torch.float64), holds(torch.float64, torch.int64)
        (True, False, False)
    """
    if new == old or not adds(old) or not adds(new):
        return new == old
    a, b = old.to_real(), new.to_real()
    return a == b or (min(a.itemsize, b.itemsize) > 1 and torch.promote_types(a, b) == b)


def adds(dtype: torch.dtype) -> bool:
    """Whether a dtype's numbers are floating-point ones, real or complex."""
    return dtype.is_floating_point or dtype.is_complex


def fitted(rule: Rule, call: Call) -> Rule:
    """The rule without the linear sets whose sums a result cannot hold, and without sums onto terms in float16, which
    may be larger than their sum; what it would have to add up, or to choose from, in a dtype without arithmetic stays
    whole."""
    if not rule.linear and not rule.reduce:
        return rule
    made = [m.dtype for i, m in enumerate(call.results) if m is not None and i not in rule.complete]
    if any(dtype in MUTE for dtype in made):
        return replace(rule, whole=rule.whole | {f for f, kind in rule.reduce.items() if kind != "none"}, linear=())
    if has_trait(call.target, "casts_addends"):
        return rule
    linear = tuple(s for s in rule.linear if all(holds(new, call.operands[i].dtype) for i in s for new in made))
    onto = None if torch.float16 in made else rule.onto
    return rule if (linear, onto) == (rule.linear, rule.onto) else replace(rule, linear=linear, onto=onto)


# Dtypes without arithmetic.
MUTE = {torch.uint16, torch.uint32, torch.uint64}
MUTE |= {x for name, x in vars(torch).items() if name.startswith("float8_")}
