"""Attention: batch, heads and queries may be cut, keys and the head's size stay whole.

q is `[B, H, S, D]`, k and v `[B, KV, T, D]`; query head h reads key head `h // (H // KV)`, so heads are `(kv g)`.
"""

from __future__ import annotations

from typing import Any

from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, RuleFn
from shardlib.rules.space import arg

_MASK = "~b (kv g) s t"
_FORWARD = f"b (kv g) s d, b kv t d, b kv t d, {_MASK} -> b (kv g) s d, b (kv g) s | s:local"
# The gradients of k and v add up over the queries, and over the query heads that share a key head.
_BACKWARD = (
    f"b (kv g) s d, b (kv g) s d, b kv t d, b kv t d, b (kv g) s d, b (kv g) s, {_MASK} "
    "-> b (kv g) s d, b kv t d, b kv t d | s:sum g:sum s:local t:whole d:whole {0}"
)


def _shifted(first: int) -> Any:
    """The op on a part of the queries, told where it begins; `causal, scale, q_offset, k_offset` start at `first`."""

    def local(local: Local) -> Any:
        args, rest = local.args[: first + 2], local.args[first + 3 :]
        offset = local.offset("s") + arg(local, first + 2, "q_offset", 0)
        kwargs = {k: v for k, v in local.kwargs.items() if k != "q_offset"}
        if len(local.args) > first + 2:
            return local.op(local.call.target, *args, offset, *rest, **kwargs)
        return local.op(local.call.target, *args, q_offset=offset, **kwargs)

    return local


def _flops(first: int, products: int) -> Any:
    """Two operations a point for each of the `products`; half of the points are masked when causal."""

    def flops(call: Call, points: int) -> int:
        return 2 * products * points // (2 if arg(call, first, "causal") else 1)

    return flops


ROWS: dict[str, RuleFn | str] = {
    "shardlib::attention": pattern(_FORWARD, local=_shifted(4), flops=_flops(4, 2)),
    "shardlib::attention_backward": pattern(_BACKWARD, local=_shifted(7), flops=_flops(7, 5)),
}
