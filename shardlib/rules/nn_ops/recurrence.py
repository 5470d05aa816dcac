"""The recurrence of RNN, GRU and LSTM layers: the batch may be sharded.

A step reads all hidden units of the one before, so steps and units stay whole. Products over all steps (the input's
share of the gates, the gradients of weights) are ops of their own.
"""

from __future__ import annotations

import math

import shardlib.ops.recurrence.op  # noqa: F401  (it defines ops)
from shardlib.rules.iteration_space import arg
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Meta, Rule, RuleFn

_STATES = "t b _, t b _, t b _"
_FIRST = "b _, b _, b"  # h0, c0, lengths
_FORWARD = f"t b _, _ _, _, _ _, {_FIRST} -> {_STATES} | t:whole"
_BACKWARD = f"t b _, t b _, _ _, _ _, {_FIRST}, {_STATES} -> {_STATES}, b _, b _ | t:whole"


def _flops(call: Call, _: int) -> int:
    """Two operations for each weight, step and row; pointwise work is negligible."""
    weights = (arg(call, name) for name in ("weight", "projection"))
    points = sum(math.prod(w.shape) for w in weights if isinstance(w, Meta))
    return 2 * math.prod(call.operands[0].shape[:2]) * points


def _backward(call: Call) -> Rule:
    linear = "{0,1}" if isinstance(arg(call, "grad_cs"), Meta) else "{0}"
    return pattern(f"{_BACKWARD} {linear}", flops=_flops)(call)


ROWS: dict[str, RuleFn | str] = {
    "shardlib::recurrence": pattern(_FORWARD, flops=_flops),
    "shardlib::recurrence_backward": _backward,
}
