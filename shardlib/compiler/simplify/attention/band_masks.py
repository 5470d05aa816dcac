"""Masks that say how far a query sees, and nothing else: attention is told so, by its causal order and its window.

Models make them of counted places (`k <= q`, `k > q - window`, `tril(ones)`), of packed sequences where there is one,
of -inf where a key is hidden. Kernels that know leave out what is hidden, a cut sequence needs no part of such a mask,
and nobody holds a square of numbers. What else hides keys, some of a batch's or single pairs, stays a mask. (What is
hidden is not looked at: where -inf is added to NaN or inf, torch makes NaN. Where that is known, all stays as it is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.attention.mask_terms import Apart, Mask
from shardlib.compiler.simplify.attention.toeplitz import Values
from shardlib.compiler.simplify.attention.toeplitz_eval import Constants
from shardlib.core.aten.schemas import get_arguments
from shardlib.ops.attention.op import OPS as ATTENTION

aten = torch.ops.aten
_HOPELESS = -1e30  # -inf, or the least float32 or bfloat16: where something else is seen, exp of it is 0


class Band(NamedTuple):
    """A query sees the keys with distances from `low` to `high`; None where there is no such end."""

    low: int | None
    high: int | None


def know_bands(gm: fx.GraphModule) -> None:
    """Masks of attention that are bands become its causal order and its window."""
    calls = [node for target in ATTENTION for node in gm.graph.find_nodes(op="call_function", target=target)]
    constants = Constants(gm)
    told: dict[Any, dict[str, Any] | None] = {}
    for node in sorted(calls):
        how = get_arguments(node)
        mask, bias, s, t = how["mask"], how["bias"], how["q"].meta["val"].shape[2], how["k"].meta["val"].shape[2]
        fixed = how["alibi"] is not None or how["causal"] or how["window"] or how["q_offset"] or how["k_offset"]
        if (mask is None and bias is None) or fixed or how.get("need_bias"):
            continue
        key = mask, bias, s, t, bool(how["dropout"])
        if key not in told:
            told[key] = _told(gm, constants, *key)
        if (new := told[key]) is not None:
            node.args, node.kwargs = tuple((how | new).values()), {}


# --- what attention is told -------------------------------------------------------------------------------------------


def _told(
    gm: fx.GraphModule, constants: Constants, mask: Any, bias: Any, s: int, t: int, drops: bool
) -> dict[str, Any] | None:
    """Arguments in place of a mask and a bias; None if none are known that say the same."""

    def band(x: Mask) -> Band | None:
        values = constants.of(x.node)
        if values is not None and x.node.meta["val"].dtype != torch.bool:
            return _band(_seen(values, alone=False), s, t)
        return _band(values and values._replace(numbers=values.numbers ^ x.hides), s, t)

    apart = Apart(gm, constants, lambda x: band(x) is not None)
    masks, (terms, hiding) = apart.masks(mask), apart.terms(bias)
    masks += hiding
    bands = {x: band(x) for x in (*masks, *map(Mask, terms))}
    if len(terms) == 1 and None not in [bands[x] for x in masks]:
        bands[Mask(terms[0])] = _band(_seen(constants.of(terms[0]), alone=True), s, t)
    known = [x for x in bands.values() if x is not None]
    said = _said(_all_of(known)) if known else None
    if said is None or (drops and (said["q_offset"] or said["k_offset"])):  # draws go by places
        return None
    masks, terms = [x for x in masks if bands[x] is None], [x for x in terms if bands[Mask(x)] is None]
    if len(terms) > 2:  # which add up to other bits in another order
        return None
    if any(_is_undefined(constants.of(x)) for x in terms):
        return None
    return said | {"mask": apart.joined(masks), "bias": apart.together(terms, aten.add.Tensor)}


def _is_undefined(values: Values | None) -> bool:
    """Returns whether some sums with -inf are NaN."""
    return values is not None and bool((values.numbers.isnan() | values.numbers.isposinf()).any())


def _seen(values: Values | None, *, alone: bool) -> Values | None:
    """The mask that a bias is, of 0 and -inf; or, where nothing else hides a key, of what no score makes up for."""
    if values is None:
        return None
    hides = values.numbers < _HOPELESS if alone else values.numbers.isneginf()
    return values._replace(numbers=~hides) if bool((hides | (values.numbers == 0)).all()) else None


def _band(values: Values | None, s: int, t: int) -> Band | None:
    """The band that a mask is; None where it is another one, or some query sees nothing by it."""
    if values is None:
        return None
    if values.numbers.numel() == 1:
        return Band(None, None) if bool(values.numbers) else None
    if not values.by_distance or values.numbers.numel() != s + t - 1:
        return None
    seen = values.numbers.flatten().nonzero().flatten()
    if not len(seen) or len(seen) != seen[-1] - seen[0] + 1:
        return None
    low, high = int(seen[0]) - (s - 1), int(seen[-1]) - (s - 1)
    if high < 0 or low > t - s:
        return None
    return Band(None if low == 1 - s else low, None if high == t - 1 else high)


def _all_of(bands: Sequence[Band]) -> Band:
    lows, highs = [x.low for x in bands if x.low is not None], [x.high for x in bands if x.high is not None]
    return Band(max(lows, default=None), min(highs, default=None))


def _said(band: Band) -> dict[str, Any] | None:
    """Causal, window and offsets that leave a band to see; None for one that is empty, or open above and not below."""
    low, high = band
    said = {"causal": False, "window": 0, "q_offset": 0, "k_offset": 0}
    if high is None:
        return said if low is None else None
    if low is None:
        return said | {"causal": True, "q_offset": max(high, 0), "k_offset": max(-high, 0)}
    if low > high:
        return None
    if low == -high:
        return said | {"window": high + 1}
    return said | {"causal": True, "window": high - low + 1, "q_offset": max(high, 0), "k_offset": max(-high, 0)}
