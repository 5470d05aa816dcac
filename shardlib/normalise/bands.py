"""Masks that say how far a query sees, and nothing else: attention is told so, by its causal order and its window.

Models make them of counted places (`k <= q`, `k > q - window`, `tril(ones)`), of packed sequences where there is one,
of -inf where a key is hidden. Kernels that know leave out what is hidden, a cut sequence needs no part of such a mask,
and nobody holds a square of numbers. What else hides keys, some of a batch's or single pairs, stays a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.aten.traits import has
from shardlib.aten.views import argument, arguments
from shardlib.normalise.constants import Constants, Values
from shardlib.normalise.passes import call
from shardlib.ops.attention import OPS as ATTENTION

aten = torch.ops.aten
_HOPELESS = -1e30  # -inf, or the least float32 or bfloat16: where something else is seen, exp of it is 0
_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)


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
        how = arguments(node)
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
    found, rest = list[Band](), list[fx.Node]()
    for factor in _factors(gm, mask):
        if (band := _band(constants.of(factor), factor, s, t)) is None:
            rest.append(factor)
        else:
            found.append(band)
    if bias is not None and not rest and (band := _band(_hidden(constants.of(bias)), bias, s, t)) is not None:
        found.append(band)
        bias = None
    if not found:
        return None
    said = _said(_all_of(found))
    if said is None or (drops and (said["q_offset"] or said["k_offset"])):  # draws go by places
        return None
    return said | {"mask": _all(gm, rest), "bias": bias}


def _factors(gm: fx.GraphModule, mask: Any) -> list[fx.Node]:
    """The masks of which one is made by `and`, as they broadcast; what moves leading dims moves those of each."""
    if not isinstance(mask, fx.Node):
        return []
    target, shape, inner = mask.target, mask.meta["val"].shape, mask.all_input_nodes[:1]
    if target in _ANDS and all(isinstance(x, fx.Node) and x.meta["val"].dtype == torch.bool for x in mask.args):
        return [factor for x in mask.all_input_nodes for factor in _factors(gm, x)]
    if target in (aten.expand.default, aten.clone.default):
        return _factors(gm, *inner)
    if target is aten.slice.Tensor or has(target, "regroups"):
        (whole,) = inner
        factors = _factors(gm, whole)
        if len(factors) > 1 and whole.meta["val"].shape[-2:] == shape[-2:]:
            with gm.graph.inserting_before(mask):
                moved = [_moved(gm, mask, x, whole.meta["val"].shape) for x in factors]
            return [mask] if None in moved else [x for x in moved if x is not None]
    return [mask]


def _moved(gm: fx.GraphModule, mask: fx.Node, factor: fx.Node, whole: torch.Size) -> fx.Node | None:
    """What becomes of a factor where leading dims of the mask are sliced, or dims of 1 come and go among them."""
    sizes = [1] * (len(whole) - factor.meta["val"].dim()) + list(factor.meta["val"].shape)
    if mask.target is aten.slice.Tensor:
        dim = argument(mask, "dim") % len(whole)
        if sizes[dim] == 1:
            return factor
        at = dim - len(whole)  # from behind
        return call(gm, mask, aten.slice.Tensor, factor, at, *(argument(mask, n) for n in ("start", "end", "step")))
    new, rest = list[int](), [(n, size) for n, size in zip(whole[:-2], sizes[:-2], strict=True) if n != 1]
    for n in mask.meta["val"].shape[:-2]:
        if n != 1 and (not rest or rest[0][0] != n):
            return None
        new.append(rest.pop(0)[1] if n != 1 else 1)
    return None if rest else call(gm, mask, aten.reshape.default, factor, [*new, *sizes[-2:]])


def _all(gm: fx.GraphModule, masks: list[fx.Node]) -> fx.Node | None:
    """`and` of what is left, behind the last of them."""
    masks = list(dict.fromkeys(masks))
    if not masks:
        return None
    whole, *others = sorted(masks)
    for mask in others:
        with gm.graph.inserting_after(max(whole, mask)):
            whole = call(gm, mask, aten.bitwise_and.Tensor, whole, mask)
    return whole


def _hidden(values: Values | None) -> Values | None:
    """The mask that a bias is, of 0 and of what no score makes up for."""
    if values is None:
        return None
    hides = values.numbers < _HOPELESS
    return values._replace(numbers=~hides) if bool((hides | (values.numbers == 0)).all()) else None


def _band(values: Values | None, node: fx.Node, s: int, t: int) -> Band | None:
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
