"""Writes `flex_attention` in plain ops, whose rules shard it.

Torch runs it as an operator that takes functions, `score_mod` and `mask_mod`, of one score and its place. Here they are
mapped over all places, as in torch's form for the CPU. Without `score_mod`, or with one that only hides scores
(`where(i >= j, score, -inf)`), the call is `shardlib::attention`, which can shard a sequence. The blocks of a
`BlockMask` only save work: its `mask_mod` is the mask.

In a traced function, a mode captures the operator; for `ShardedTensor`s it has a kernel (`eager/composite_hooks.py`).
Neither goes through dynamo, which torch uses for every other call: see `_Direct`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as _torch
from torch.overrides import TorchFunctionMode

from shardlib.core.torch_internals.torch_private import (
    FLEX_DEVICES,
    FLEX_DIRECT,
    FLEX_IDENTITY,
    IN_FLEX,
    dispatch_modes,
    function_modes,
    innermost,
    make_wrapper,
)
from shardlib.ops.attention.op import attention

Stats = tuple[Tensor, Tensor, Tensor]

OPERATOR: Any = torch.ops.higher_order.flex_attention


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: Mapping[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
    *,
    fused: bool = True,
) -> Stats:
    """Returns the results of torch's operator: o `[B, H, S, Ev]`, and log2-sum-exp2 and maximum `[B, H, S]`.

    query is `[B, H, S, E]`, key `[B or 1, KV, T, E]`, value `[B or 1, KV, T, Ev]`. Statistics that
    `kernel_options` do not request are empty. A row that sees no key gives o = 0, lse = -inf and zero gradients. With
    `fused`, `shardlib::attention` runs where there is no `score_mod`.

    Source: FlexAttention (Dong et al., arXiv:2412.05496).
    """
    device = query.device.type
    query, key, value = map(cast_for_autocast, (query, key, value))
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    score = None if score_mod is FLEX_IDENTITY else _mapped(score_mod, True, score_mod_other_buffers)
    mask_mod = block_mask[-1]
    keep = None if mask_mod is _torch.noop_mask else _mapped(mask_mod, False, mask_mod_other_buffers)
    wants_max = bool(kernel_options.get("OUTPUT_MAX", True))
    with torch.autocast(device, enabled=False), _ReadByPlace():
        alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
        places = _places(query, key)
        if fused and alike and not wants_max:
            masks = [] if score is None else _seen_by(score_mod, score_mod_other_buffers, places)
            if masks is not None:
                masks += [] if keep is None else [_unrepeated(keep(*places))]
                mask = functools.reduce(torch.logical_and, masks) if masks else None
                o, lse = attention(query, key, value, mask=mask, scale=scale)
                return _strided_as(query, o), lse / math.log(2), query.new_empty(0)
        wants_lse = bool(kernel_options.get("OUTPUT_LOGSUMEXP", True))
        return _dense(query, key, value, score, keep, scale, wants_lse, wants_max)


class _OtherError(Exception):
    """A `score_mod` does more than hide scores."""


def _refused(*_: Any) -> Any:
    raise _OtherError


class _Score(Tensor):
    """Stands for a score that is visible where all of `seen` are true; any op but a mask is an error."""

    @staticmethod
    def that_is(*seen: Tensor) -> _Score:
        score: _Score = make_wrapper(_Score, (), dtype=torch.float32)
        score.__dict__["seen"] = seen
        return score

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        condition, a, b = args if func is torch.where and len(args) == 3 and not kwargs else (None,) * 3
        if not isinstance(condition, Tensor) or isinstance(condition, _Score):
            raise _OtherError
        for score, other, hidden in ((a, b, False), (b, a, True)):
            if isinstance(score, _Score) and isinstance(other, float) and other == -math.inf:
                return _Score.that_is(*score.__dict__["seen"], ~condition if hidden else condition)
        raise _OtherError

    __torch_dispatch__: Any = _refused


def _seen_by(score_mod: Callable[..., Any], buffers: Sequence[Any], places: Sequence[Tensor]) -> list[Tensor] | None:
    """Returns the mask of a `score_mod` that only hides scores; None for any other."""

    def seen(*at: Any) -> Tensor:
        score = score_mod(_Score.that_is(), *at)
        masks: tuple[Tensor, ...] = score.__dict__["seen"] if type(score) is _Score else ()
        return functools.reduce(torch.logical_and, masks) if masks else _refused()

    try:
        return [_unrepeated(_mapped(seen, False, buffers)(*places))]
    except _OtherError:
        return None


def cast_for_autocast(x: Tensor) -> Tensor:
    """Casts an operand of attention as autocast does if it is on."""
    device = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Callable[..., Tensor] | None,
    keep: Callable[..., Tensor] | None,
    scale: float,
    wants_lse: bool,
    wants_max: bool,
) -> Stats:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    k, v = (_for_all_heads(x, query.shape[1]) for x in (key, value))
    scores = query.to(wide) @ k.to(wide).transpose(-2, -1) * scale
    places = _places(query, key)
    if score is not None:
        scores = score(scores, *places)
    if keep is not None:
        scores = torch.where(keep(*places), scores, -math.inf)
    # Rows that see no key are computed as zeros and masked later, so the backward pass has no infinities either.
    seen = (scores != -math.inf).any(-1, keepdim=True)
    finite = torch.where(seen, scores, 0.0)
    weights = torch.where(seen, torch.softmax(finite, -1), 0.0)
    o = weights.to(query.dtype) @ v.to(query.dtype)
    lse = most = query.new_empty(0)
    if wants_lse:
        lse = torch.where(seen.squeeze(-1), torch.logsumexp(finite, -1), -math.inf) / math.log(2)
    if wants_max:
        most = scores.detach().amax(-1) / math.log(2)
    return _strided_as(query, o), lse, most


def _places(query: Tensor, key: Tensor) -> list[Tensor]:
    """Returns batch, head, query and key indices."""
    return [torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2])]


def _mapped(fn: Callable[..., Tensor], scores: bool, buffers: Sequence[Any]) -> Callable[..., Tensor]:
    """Maps a function of one place over all places, `[B, H, S, T]`."""
    for dim in (3, 2, 1, 0):
        dims = tuple(0 if d == dim else None for d in range(4))
        fn = torch.vmap(fn, in_dims=((0,) if scores else ()) + dims + (None,) * len(buffers))
    mapped = fn
    return lambda *args: mapped(*args, *buffers)


def _unrepeated(mask: Tensor) -> Tensor:
    """Removes the dims along which a mask is constant: vmap repeats them with stride 0."""
    for d in range(2):
        if mask.shape[d] > 1 and mask.stride(d) == 0:
            mask = mask.narrow(d, 0, 1)
    return mask


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Repeats heads: query head h reads key head `h // (H // KV)`."""
    b, kv, t, e = x.shape
    return x if kv == heads else x.unsqueeze(2).expand(b, kv, heads // kv, t, e).reshape(b, heads, t, e)


def _strided_as(query: Tensor, o: Tensor) -> Tensor:
    """Lays out o in memory like the query, so that the same views are possible as in torch."""
    inner = sorted(range(3), key=lambda d: query.stride(d))
    order = [*reversed(inner), 3]
    if order == [0, 1, 2, 3]:
        return o.contiguous()
    return o.permute(order).contiguous().permute([order.index(d) for d in range(4)])


class _ReadByPlace(TorchFunctionMode):
    """Makes `table[h, i - j]` read at places that are tensors; Python would need their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, at = args
            at = at if isinstance(at, tuple) else (at,)
            places = [i for i in at if isinstance(i, Tensor) and i.dtype is not torch.bool]
            numbers = [(d, i) for d, i in enumerate(at) if type(i) is int]
            if places and len(places) + len(numbers) == len(at):
                for d, i in reversed(numbers):
                    x = x.select(d, i)
                return torch.ops.aten.index.Tensor(x, places)
        return func(*args, **(kwargs or {}))


# --- how calls come here ----------------------------------------------------------------------------------------------


MODES: set[type] = set()  # while one is on, this module handles all calls of the operator
TYPES: set[type] = set()  # it also handles calls with such tensors


def is_handled(*tensors: Any) -> bool:
    """Returns whether this module handles a call of the operator with these tensors."""
    modes: list[Any] = [*function_modes(), *dispatch_modes()]
    return any(type(mode) in MODES for mode in modes) or any(type(innermost(x)) in TYPES for x in tensors)


class _Direct:
    """Torch's switch that makes `flex_attention` call its operator directly, and not through dynamo.

    Dynamo supports neither sharded tensors nor this package's modes. So the switch is on for the calls that this module
    handles; for other calls it has the user's value.
    """

    def __init__(self, others: Any) -> None:
        self.others = others

    def __bool__(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not IN_FLEX:  # the frame of a caller reads the switch
            frame = frame.f_back
        call = {} if frame is None else frame.f_locals
        return bool(self.others) or is_handled(*(call.get(name) for name in ("query", "key", "value")))


def _validating(check: Callable[..., None]) -> Callable[..., None]:
    """Wraps torch's check of devices to skip our calls: torch's kernel for the CPU has no gradients, ours has."""

    @functools.wraps(check)
    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if torch.compiler.is_dynamo_compiling() or not is_handled(query, key, value):
            check(query, key, value)

    validate.ours = True  # type: ignore[attr-defined]
    return validate


def install_switches() -> None:
    """Installs the switch and the check, again if other code replaced them."""
    if not isinstance(switch := FLEX_DIRECT.value, _Direct):
        FLEX_DIRECT.value = _Direct(switch)
    if not hasattr(check := FLEX_DEVICES.value, "ours"):
        FLEX_DEVICES.value = _validating(check)


install_switches()
