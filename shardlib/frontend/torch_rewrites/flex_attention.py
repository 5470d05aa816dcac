"""`flex_attention`, written in plain ops, so that the rules of these shard it.

torch runs it as an operator that takes functions, `score_mod` and `mask_mod`, of one score and its place. Here they are
mapped over all places, as in torch's own form for the CPU. What has no `score_mod`, or one that does nothing but hide
scores (`where(i >= j, score, -inf)`), is `shardlib::attention`, with or without a mask, which knows how to cut a
sequence. The blocks of a `BlockMask` only save work: its `mask_mod` says what is seen.

A traced function calls the operator under a mode that catches it; for `ShardedTensor`s it has a kernel
(`eager/composite_hooks.py`). Neither goes through dynamo, which torch asks to look at every other call: see `_Direct`.
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

from shardlib.core.torch_private import (
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
    """What torch's operator of that name returns: o `[B, H, S, Ev]`, and log2-sum-exp2 and maximum `[B, H, S]`.

    query is `[B, H, S, E]`, key `[B or 1, KV, T, E]`, value `[B or 1, KV, T, Ev]`. Statistics that nobody asked for
    (`kernel_options`) are empty. A row that sees no key gives o = 0, lse = -inf and zero gradients. With `fused`,
    `shardlib::attention` runs where there is no `score_mod`.

    Source: FlexAttention (Dong et al., arXiv:2412.05496).

    Example:
        >>> from torch.nn.attention.flex_attention import noop_mask
        >>> q, kv = torch.zeros(2, 4, 3, 8), torch.ones(2, 2, 5, 8)
        >>> o, lse, _ = flex_attention(q, kv, kv, lambda s, b, h, i, j: s + 2 * h, (noop_mask,), 1.0, {})
        >>> o.shape, (lse[0, :, 0] * math.log(2) - math.log(5)).abs().round().tolist()
        (torch.Size([2, 4, 3, 8]), [0.0, 2.0, 4.0, 6.0])
    """
    device = query.device.type
    query, key, value = map(narrowed, (query, key, value))
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
    """Something else happens to a score than that it is hidden."""


def _refused(*_: Any) -> Any:
    raise _OtherError


class _Score(Tensor):
    """Stands for a score: seen where all of `seen` are true. Whatever else is asked of it is an error."""

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
    """The mask that a `score_mod` is that does nothing but hide scores; None if it is another one."""

    def seen(*at: Any) -> Tensor:
        found = score_mod(_Score.that_is(), *at)
        masks: tuple[Tensor, ...] = found.__dict__["seen"] if type(found) is _Score else ()
        return functools.reduce(torch.logical_and, masks) if masks else _refused()

    try:
        return [_unrepeated(_mapped(seen, False, buffers)(*places))]
    except _OtherError:
        return None


def narrowed(x: Tensor) -> Tensor:
    """An operand of attention as autocast has it where it is on."""
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
    # Rows that see nothing are computed as zeros, and left out after: so nothing is infinite on the way back, either.
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
    """Batch, head, query and key indices."""
    return [torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2])]


def _mapped(fn: Callable[..., Tensor], scores: bool, buffers: Sequence[Any]) -> Callable[..., Tensor]:
    """A function of one place as a function of all places, `[B, H, S, T]`."""
    for dim in (3, 2, 1, 0):
        dims = tuple(0 if d == dim else None for d in range(4))
        fn = torch.vmap(fn, in_dims=((0,) if scores else ()) + dims + (None,) * len(buffers))
    mapped = fn
    return lambda *args: mapped(*args, *buffers)


def _unrepeated(mask: Tensor) -> Tensor:
    """A mask without the dims along which it is the same: vmap repeats what does not depend on a place."""
    for d in range(2):
        if mask.shape[d] > 1 and mask.stride(d) == 0:
            mask = mask.narrow(d, 0, 1)
    return mask


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Query head h reads key head `h // (H // KV)`."""
    b, kv, t, e = x.shape
    return x if kv == heads else x.unsqueeze(2).expand(b, kv, heads // kv, t, e).reshape(b, heads, t, e)


def _strided_as(query: Tensor, o: Tensor) -> Tensor:
    """The dims of o in memory in the order of the query's, so that a view that torch can take can be taken."""
    inner = sorted(range(3), key=lambda d: query.stride(d))
    order = [*reversed(inner), 3]
    if order == [0, 1, 2, 3]:
        return o.contiguous()
    return o.permute(order).contiguous().permute([order.index(d) for d in range(4)])


class _ReadByPlace(TorchFunctionMode):
    """While on, `table[h, i - j]` reads a tensor at places that are tensors; Python would want their values."""

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


MODES: set[type] = set()  # while one is on, all calls of the operator come here
TYPES: set[type] = set()  # as do calls with such tensors


def ours(*tensors: Any) -> bool:
    """Whether a call of the operator with these tensors comes here."""
    modes: list[Any] = [*function_modes(), *dispatch_modes()]
    return any(type(mode) in MODES for mode in modes) or any(type(innermost(x)) in TYPES for x in tensors)


class _Direct:
    """torch's switch whether `flex_attention` calls its operator directly, and not through dynamo.

    Dynamo knows neither tensors in pieces nor this package's modes. So the switch is on where these take part, in
    the very call that reads it, whatever other calls do, and for other calls it is what the user set it to.
    """

    def __init__(self, others: Any) -> None:
        self.others = others

    def __bool__(self) -> bool:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not IN_FLEX:  # it passes the switch on, too
            frame = frame.f_back
        call = {} if frame is None else frame.f_locals
        return bool(self.others) or ours(*(call.get(name) for name in ("query", "key", "value")))


def _validating(check: Callable[..., None]) -> Callable[..., None]:
    """torch's check of devices, for calls that are not ours: its kernel for the CPU has no gradients."""

    @functools.wraps(check)
    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if torch.compiler.is_dynamo_compiling() or not ours(query, key, value):
            check(query, key, value)

    validate.ours = True  # type: ignore[attr-defined]
    return validate


def direct() -> None:
    """Make the switch and the check ours, again if somebody set them."""
    if not isinstance(switch := FLEX_DIRECT.value, _Direct):
        FLEX_DIRECT.value = _Direct(switch)
    if not hasattr(check := FLEX_DEVICES.value, "ours"):
        FLEX_DEVICES.value = _validating(check)


direct()
