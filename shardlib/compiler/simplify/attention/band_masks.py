"""Recognizes masks that are bands, and passes attention a causal order, a window and offsets instead.

Models compute such masks of positions (`k <= q`, `k > q - window`, `tril(ones)`), perhaps with -inf for hidden keys.
Kernels skip the keys outside of a band, a sharded sequence needs no part of a mask, and no device stores a square of
numbers. Other masks, of a batch's keys or of single pairs, stay masks.

Hidden scores are not read, but torch makes NaN of -inf added to NaN or inf. A bias with such constants stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.compiler.simplify.attention.mask_terms import Mask, MaskSplitter
from shardlib.compiler.simplify.constants.evaluate import Constants
from shardlib.compiler.simplify.constants.lookup import Lookup
from shardlib.core.aten.schemas import get_arguments
from shardlib.ops.attention.op import OPS as ATTENTION

aten = torch.ops.aten
_HIDDEN = -1e30  # exp of a score below it is 0 beside any other score: -inf, or the least float32 or bfloat16


class Band(NamedTuple):
    """A query sees the keys at distances from `low` to `high`; None is an open end."""

    low: int | None
    high: int | None


def recognize_band_masks(gm: fx.GraphModule) -> None:
    """Replaces masks of attention that are bands by its causal order and its window."""
    calls = [node for target in ATTENTION for node in gm.graph.find_nodes(op="call_function", target=target)]
    constants = Constants(gm)
    replacements: dict[Any, dict[str, Any] | None] = {}
    for node in sorted(calls):
        arguments = get_arguments(node)
        mask, bias = arguments["mask"], arguments["bias"]
        s, t = (arguments[name].meta["val"].shape[2] for name in ("q", "k"))
        has_band = any(arguments[name] for name in ("causal", "window", "q_offset", "k_offset"))
        if (mask is None and bias is None) or arguments["alibi"] is not None or has_band or arguments.get("need_bias"):
            continue
        key = mask, bias, s, t, bool(arguments["dropout"])
        if key not in replacements:
            replacements[key] = _replace_mask(gm, constants, *key)
        if (replacement := replacements[key]) is not None:
            node.args, node.kwargs = tuple((arguments | replacement).values()), {}


# --- arguments of attention -------------------------------------------------------------------------------------------


def _replace_mask(
    gm: fx.GraphModule, constants: Constants, mask: Any, bias: Any, s: int, t: int, drops: bool
) -> dict[str, Any] | None:
    """Returns arguments in place of a mask and a bias; None if they contain no band."""

    def find_band(x: Mask) -> Band | None:
        values = constants.find(x.node)
        if values is not None and x.node.meta["val"].dtype != torch.bool:
            return _match_band(_get_shown(values, is_only_mask=False), s, t)
        return _match_band(values and values._replace(table=values.table ^ x.hides), s, t)

    splitter = MaskSplitter(gm, constants, lambda x: find_band(x) is not None)
    masks, (terms, hiding) = splitter.split_mask(mask), splitter.split_bias(bias)
    masks += hiding
    bands = {x: find_band(x) for x in (*masks, *map(Mask, terms))}
    if len(terms) == 1 and None not in [bands[x] for x in masks]:
        bands[Mask(terms[0])] = _match_band(_get_shown(constants.find(terms[0]), is_only_mask=True), s, t)
    matched = [x for x in bands.values() if x is not None]
    arguments = _describe_band(_intersect(matched)) if matched else None
    if arguments is None or (drops and (arguments["q_offset"] or arguments["k_offset"])):  # draws depend on positions
        return None
    masks, terms = [x for x in masks if bands[x] is None], [x for x in terms if bands[Mask(x)] is None]
    if len(terms) > 2:  # another order of additions would round otherwise
        return None
    if any(_is_undefined(constants.find(x)) for x in terms):
        return None
    return arguments | {"mask": splitter.join_masks(masks), "bias": splitter.join(terms, aten.add.Tensor)}


def _is_undefined(values: Lookup | None) -> bool:
    """Returns whether some sum of a value and -inf is NaN."""
    return values is not None and bool((values.table.isnan() | values.table.isposinf()).any())


def _get_shown(values: Lookup | None, *, is_only_mask: bool) -> Lookup | None:
    """Returns the mask that a bias of 0 and -inf is, or None.

    If no other mask hides keys, numbers below `_HIDDEN` count as -inf: no score makes up for them.
    """
    if values is None:
        return None
    hides = values.table < _HIDDEN if is_only_mask else values.table.isneginf()
    return values._replace(table=~hides) if bool((hides | (values.table == 0)).all()) else None


def _match_band(values: Lookup | None, s: int, t: int) -> Band | None:
    """Returns the band that a mask is; None for another mask, or if some query sees no key."""
    if values is None:
        return None
    if values.table.numel() == 1:
        return Band(None, None) if bool(values.table) else None
    line = values.find_line() if values.shape[-2:] == (s, t) else None
    if line is None:
        return None
    shown = line.nonzero().flatten()
    if not len(shown) or len(shown) != shown[-1] - shown[0] + 1:
        return None
    low, high = int(shown[0]) - (s - 1), int(shown[-1]) - (s - 1)
    if high < 0 or low > t - s:
        return None
    return Band(None if low == 1 - s else low, None if high == t - 1 else high)


def _intersect(bands: Sequence[Band]) -> Band:
    lows, highs = [x.low for x in bands if x.low is not None], [x.high for x in bands if x.high is not None]
    return Band(max(lows, default=None), min(highs, default=None))


def _describe_band(band: Band) -> dict[str, Any] | None:
    """Returns arguments of attention that show a band; None if it is empty, or open above and not below."""
    low, high = band
    everything = {"causal": False, "window": 0, "q_offset": 0, "k_offset": 0}
    if high is None:
        return everything if low is None else None
    if low is None:
        return everything | {"causal": True, "q_offset": max(high, 0), "k_offset": max(-high, 0)}
    if low > high:
        return None
    if low == -high:
        return everything | {"window": high + 1}
    return everything | {"causal": True, "window": high - low + 1, "q_offset": max(high, 0), "k_offset": max(-high, 0)}
