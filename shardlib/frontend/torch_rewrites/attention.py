"""Captures attention as one op while a function is traced, before torch picks a kernel for a device.

A function mode captures calls of `scaled_dot_product_attention` and `flex_attention`. Decompositions capture kernels,
forward and backward, that code calls by name or that are in a graph traced elsewhere. Dropout is drawn from a key, so
that it does not depend on the sharding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import PersistentFunctionMode
from shardlib.core.source_lines import user_line
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import (
    HigherOrderOperator,
    TransformType,
    VmapInterpreter,
    schema_of,
    transforms,
)
from shardlib.frontend.torch_rewrites import flex_attention
from shardlib.ops.attention.op import attention
from shardlib.primitives.random.keys import fresh_key
from shardlib.rules.nn_ops.loss import ctc_loss

_aten = torch.ops.aten
_SDPA = F.scaled_dot_product_attention


class AttentionCapture(PersistentFunctionMode):
    """Replaces torch's `scaled_dot_product_attention` by an op that is the same on every device.

    `flex_attention` is written in plain ops. With `only_dropout`, calls without dropout run torch's code.
    """

    def __init__(self, *, only_dropout: bool = False) -> None:
        super().__init__()
        flex_attention.install_switches()
        self.traces = not only_dropout
        self.attention = _where_dropped if only_dropout else _captured

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA or func in (_aten.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default):
            return self.attention(*args, **kwargs)
        if func is F.ctc_loss or func is torch.ctc_loss:  # torch's code makes tensors that the tracer does not see
            return ctc_loss(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # its Python code calls attention, where this mode is off
            with _replaced(self.attention):
                return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator) and not torch.compiler.is_dynamo_compiling():  # it will call again
            if func is flex_attention.OPERATOR:
                return flex_attention.flex_attention(*args, **kwargs, fused=self.traces)
            if self.traces:
                _refuse_nodes(func)
        return func(*args, **kwargs)


flex_attention.MODES.add(AttentionCapture)
_DYNAMO = "<eval_with_key>"  # the file name of compiled code


def _refuse_nodes(op: HigherOrderOperator) -> None:
    """Refuses an operator that would enter the graph with its functions; other operators call theirs at once."""
    if ProxyTorchDispatchMode in op.python_key_table:
        frame = sys._getframe(1)
        while frame.f_back is not None and (line := user_line(frame)) and line.file.startswith(_DYNAMO):
            frame = frame.f_back
        raise ShardingError(
            f"the traced function calls torch.ops.higher_order.{op}",
            [str(line)],
            rule="a program is a list of ops on tensors; operators that take functions have no sharding rule",
            remedy="write it in ops: torch.where for cond, a Python loop for while_loop and scan, torch.vmap for map",
        )


@contextmanager
def _replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SDPA


def _where_dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
    **how: Any,
) -> Tensor:
    attention = _captured if dropout_p or is_forward_mode() else _SDPA  # torch's kernels have no tangents
    return attention(query, key, value, attn_mask, dropout_p, *rest, **how)


def _captured(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    odd = query.shape[-1] != value.shape[-1] or min(query.dim(), key.dim(), value.dim()) < 3
    if odd or not query.is_floating_point() or not 0 <= dropout_p < 1:
        return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    query, key, value = map(flex_attention.cast_for_autocast, (query, key, value))
    mask = attn_mask if attn_mask is None else flex_attention.cast_for_autocast(attn_mask)
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
    q, k, v = (x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    heads = q.shape[1] if enable_gqa else max(q.shape[1], k.shape[1])
    if not enable_gqa:  # heads broadcast like any other leading dim
        q, k, v = (x.expand(-1, heads, -1, -1) for x in (q, k, v))
    if mask is not None and len(lead) != 1 and mask.dim() > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    keep, bias = _sorted(mask)
    seed = _key(query.device) if dropout_p else None
    o, _ = attention(q, k, v, mask=keep, bias=bias, causal=is_causal, scale=scale, dropout=dropout_p, key=seed)
    return o.reshape(*lead, heads, *o.shape[-2:])


def _sorted(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns torch's mask as (mask, None) if it is bool, else as (None, bias)."""
    return (mask, None) if mask is None or mask.dtype == torch.bool else (None, mask)


def _key(device: torch.device) -> Tensor:
    """Draws a key for this call.

    Under vmap, examples are further rows of the batch, and each has its own random numbers. With tangents, attention is
    written in plain ops, and examples share the numbers.
    """
    shares = is_forward_mode()
    supported = "same" if shares else "different"
    if wrong := [mode for mode in _vmap_modes() if mode != supported]:
        raise ShardingError(
            f"attention with dropout under vmap(..., randomness={wrong[0]!r})",
            rule="in forward-mode AD the examples of a vmap share their random numbers"
            if shares
            else "the examples of a vmap are rows of one batch, and every row has numbers of its own",
            remedy=f'randomness="{supported}" in vmap{", jacfwd or hessian" if shares else ""}, or a dropout of 0',
        )
    key: Tensor = torch.ops.shardlib.fresh_key(device=device)
    return key


def _vmap_modes() -> Iterator[str]:
    for level in transforms() or []:
        if level.key() == TransformType.Vmap:
            yield VmapInterpreter(level).randomness().name.lower()


# --- kernels called by name -------------------------------------------------------------------------------------------

_NAMES = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_KERNELS = tuple(f"_scaled_dot_product_{name}" for name in (*_NAMES, "fused_attention_overrideable"))
_LSE_ROWS = 32  # the memory-efficient kernel pads lse to a multiple of these rows


def _forward_of(op: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = _bound(op, args, kwargs)
        q, k, v = call["query"], call["key"], call["value"]
        if q.shape[-1] != v.shape[-1] or q.dim() != 4 or not _may_drop(op, call["dropout_p"]):
            return NotImplemented
        key = fresh_key(device=q.device) if call["dropout_p"] else None
        o, lse = torch.ops.shardlib.attention(q, k, v, *_variant(call, key))
        return tuple(_result(op, r.name, q, k, o, lse, key) for r in schema_of(op).returns)

    return forward


def _backward_of(op: Any) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        call = _bound(op, args, kwargs)
        q, k, v = call["query"], call["key"], call["value"]
        if q.shape[-1] != v.shape[-1] or q.dim() != 4 or not _may_drop(op, call["dropout_p"]):
            return NotImplemented
        grad_o = call["grad_out_"] if "grad_out_" in call else call["grad_out"]
        lse = call["logsumexp"].flatten(2)[:, :, : q.shape[2]]
        variant = _variant(call, call["philox_seed"] if call["dropout_p"] else None)
        wants_bias = variant[1] is not None and bool(call.get("grad_input_mask", (False,))[-1])
        grads = torch.ops.shardlib.attention_backward(
            grad_o, None, q, k, v, call["out"], lse, *variant, need_bias=wants_bias
        )
        return tuple(grads[: len(schema_of(op).returns)])

    return backward


def _bound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by name, with defaults."""
    schema = schema_of(op).arguments
    call = {a.name: a.default_value for a in schema if a.has_default_value()}
    return call | {a.name: x for a, x in zip(schema, args, strict=False)} | kwargs


def _may_drop(op: Any, p: float) -> bool:
    """Returns whether dropout `p` is supported: the kernel must pass its random state, our key, to its backward."""
    return p == 0 or (0 < p < 1 and "for_cpu" not in str(op))


def _variant(call: dict[str, Any], key: Tensor | None) -> tuple[Any, ...]:
    """Returns the arguments of `shardlib::attention` behind q, k and v."""
    mask, bias = _sorted(call.get("attn_mask", call.get("attn_bias")))
    scale = call["query"].shape[-1] ** -0.5 if call["scale"] is None else call["scale"]
    return mask, bias, None, key, call["is_causal"], scale, 0, call["dropout_p"]


def _result(op: Any, name: str, q: Tensor, k: Tensor, o: Tensor, lse: Tensor, key: Tensor | None) -> Any:
    """Returns one result of torch's kernel by name; the state of its generator is the key."""
    if name == "output":
        return o
    if name in ("logsumexp", "log_sumexp"):
        if "efficient" in str(op):
            return F.pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=float("inf"))
        return lse[..., None] if "cudnn" in str(op) else lse
    sizes = {"max_q": q.shape[2], "max_k": k.shape[2]}
    if name in sizes:
        return sizes[name]
    if key is not None and name in ("rng_state", "philox_seed"):
        return key
    return None if name.startswith("cum_seq") else q.new_zeros((), dtype=torch.int64)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {}
    for name in filter(lambda name: hasattr(_aten, name), _KERNELS):
        forward, backward = getattr(_aten, name).default, getattr(_aten, f"{name}_backward").default
        table |= {forward: _forward_of(forward), backward: _backward_of(backward)}
    return table


# For `make_fx`: torch's attention kernels as `shardlib::attention` and `shardlib::attention_backward`.
DECOMPOSITIONS = _decompositions()
