"""What a reshard may take, from what happens to every axis alone: without looking for its steps."""

from __future__ import annotations

from functools import lru_cache

from shardlib.meshes.axis import ways
from shardlib.reshard.prices import Prices
from shardlib.reshard.step import Axes, Cut, local_numel


@lru_cache(maxsize=1 << 16)
def rough_seconds(sizes: tuple[int, ...], itemsize: int, src: Cut, dst: Cut, pending: Axes, prices: Prices) -> float:
    """Estimated seconds of the direct way, where all cuts are even and no axis has to leave from under another one."""
    have, wanted = ({a: i for i, axes in enumerate(cut) for a in axes} for cut in (src, dst))

    local = local_numel(sizes, src) * itemsize / ways(a for a in wanted if a not in have and a not in pending)
    seconds = 0.0
    if (n := ways(scattered := [a for a in pending if a in wanted])) > 1:
        local /= n
        seconds += prices.sent(tuple(scattered), local * (n - 1))
    if (n := ways(exchanged := [a for a, i in have.items() if wanted.get(a, i) != i])) > 1:
        seconds += prices.sent(tuple(exchanged), local * (n - 1) / n, "all_to_all")
    if (n := ways(summed := [a for a in pending if a not in wanted])) > 1:
        seconds += prices.sent(tuple(summed), 2 * local * (n - 1) / n)
    if (n := ways(gathered := [a for a in have if a not in wanted])) > 1:
        seconds += prices.sent(tuple(gathered), local * (n - 1))
    return seconds
