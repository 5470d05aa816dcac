"""Masks that say how far a query sees, and nothing else: attention is told so, by its causal order and its window.

Models make them of counted places (`k <= q`, `k > q - window`, `tril(ones)`), of packed sequences where there is one,
of -inf where a key is hidden. Kernels that know leave out what is hidden, a cut sequence needs no part of such a mask,
and nobody holds a square of numbers. What else hides keys, some of a batch's or single pairs, stays a mask. (What is
hidden is not looked at: where -inf is added to NaN or inf, torch makes NaN.)
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
_SUMS = (aten.add.Tensor,)


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
    factors, terms = _parts(gm, mask, _ANDS), _parts(gm, bias, _SUMS)
    found = {x: _band(constants.of(x), s, t) for x in factors}
    alone = not any(band is None for band in found.values()) and len(terms) == 1
    found |= {x: _band(_seen(constants.of(x), alone), s, t) for x in terms}
    bands = [band for band in found.values() if band is not None]
    said = _said(_all_of(bands)) if bands else None
    if said is None or (drops and (said["q_offset"] or said["k_offset"])):  # draws go by places
        return None
    factors, terms = ([x for x in parts if found[x] is None] for parts in (factors, terms))
    if len(terms) > 2:  # which add up to other bits in another order
        return None
    return said | {"mask": _joined(gm, factors, _ANDS[0]), "bias": _joined(gm, terms, _SUMS[0])}


def _parts(gm: fx.GraphModule, mask: Any, joins: Sequence[Any]) -> list[fx.Node]:
    """The masks of which one is made, as they broadcast; what moves leading dims moves those of each."""
    if not isinstance(mask, fx.Node):
        return []
    target = mask.target
    if target in joins and not mask.kwargs and _are_alike(mask, *mask.args):
        return [part for x in mask.args for part in _parts(gm, x, joins)]
    if target in (aten.expand.default, aten.clone.default):
        return _parts(gm, mask.args[0], joins)
    if target is aten.slice.Tensor or has(target, "regroups"):
        whole = mask.all_input_nodes[0].meta["val"].shape
        parts = _parts(gm, mask.args[0], joins)
        if len(parts) > 1 and whole[-2:] == mask.meta["val"].shape[-2:]:
            with gm.graph.inserting_before(mask):
                moved = [_moved(gm, mask, x, whole) for x in parts]
            return [mask] if None in moved else [x for x in moved if x is not None]
    return [mask]


def _are_alike(mask: fx.Node, *parts: Any) -> bool:
    """Whether all are tensors of one dtype: what is left of others would add up in another one."""
    return all(isinstance(x, fx.Node) and x.meta["val"].dtype == mask.meta["val"].dtype for x in parts)


def _moved(gm: fx.GraphModule, mask: fx.Node, part: fx.Node, whole: torch.Size) -> fx.Node | None:
    """What becomes of a part where leading dims of the mask are sliced, or regrouped; None of what nobody can say."""
    sizes = [1] * (len(whole) - part.meta["val"].dim()) + list(part.meta["val"].shape)
    if mask.target is aten.slice.Tensor:
        dim = argument(mask, "dim") % len(whole)
        if sizes[dim] == 1:
            return part
        at = dim - len(whole)  # from behind
        return call(gm, mask, aten.slice.Tensor, part, at, *(argument(mask, n) for n in ("start", "end", "step")))
    lead = _regrouped(list(whole[:-2]), sizes[:-2], list(mask.meta["val"].shape[:-2]))
    return None if lead is None else call(gm, mask, aten.reshape.default, part, [*lead, *sizes[-2:]])


def _regrouped(whole: list[int], sizes: list[int], new: list[int]) -> list[int] | None:
    """Sizes that broadcast to `new`, of those that broadcast to `whole`, which has become `new`."""
    if all(size == 1 for size in sizes):
        return [1] * len(new)
    if sizes == whole:
        return new
    kept = [(n, size) for n, size in zip(whole, sizes, strict=True) if n != 1]
    if [n for n, _ in kept] != [n for n in new if n != 1]:
        return None
    return [1 if n == 1 else kept.pop(0)[1] for n in new]


def _joined(gm: fx.GraphModule, parts: Sequence[fx.Node], join: Any) -> fx.Node | None:
    """What is left, behind the last of it."""
    if not parts:
        return None
    whole, *others = sorted(parts)
    for part in others:
        with gm.graph.inserting_after(max(whole, part)):
            whole = call(gm, part, join, whole, part)
    return whole


def _seen(values: Values | None, alone: bool) -> Values | None:
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
