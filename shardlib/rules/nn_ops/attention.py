"""Attention: batch, heads and queries may be sharded, and keys in one of three ways.

* As the queries are: the keys travel around the ring (`rules/local_forms/ring_attention.py`).
* As the queries are, in a window: each device fetches the keys that its queries see, and returns their gradients.
* Alone, where there are far more keys than queries (a cache): each device attends to its own keys, and the results are
  merged by their log-sum-exp.

q is `[B, H, S, D]`, k and v are `[B, KV, T, D]`. Query head h reads key head `h // (H // KV)`, so heads are `(kv g)`.
The op takes the offset of a shard: causal masks, windows, ALiBi and dropout depend on positions in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardlib.ops.attention.variant import Variant, whole_part
from shardlib.primitives.collectives import piece, pmax, psum
from shardlib.rules.iteration_space import arg, is_backward
from shardlib.rules.local_forms import ring_attention
from shardlib.rules.local_forms.halo import Range, add_to_owners, crop_or_pad, fetch, intersect, length
from shardlib.rules.local_forms.helpers import positional_args
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, LocalBuilder, Meta, Rule, RuleFn, WindowMap

_Q, _O, _LSE = "b (kv g) s d", "b (kv g) s d", "b (kv g) s"
_K = "b kv t d"
_SCORES = ("b", "(kv g)", "s", "keys")  # a mask has all keys, also where k and v are sharded
_OTHERS = f"~{' '.join(_SCORES)}, ~{' '.join(_SCORES)}, (kv g), two"  # mask, bias, alibi, key
_SEQUENCE = ring_attention.SEQUENCE
_CACHE_RATIO = 8  # keys per query from which on keys are sharded without the queries


def _rule(call: Call) -> Rule:
    forward = f"{_Q}, {_K}, {_K}, {_OTHERS} -> {_O}, {_LSE} | {_notes(call)}"
    text = _backward_text(call) if is_backward(call) else forward
    return pattern(text, emit=_attend, flops=_flops, windows=_key_windows(call))(call)


def _key_windows(call: Call) -> dict[str, WindowMap]:
    """Returns the keys that the window shows to each query."""
    q, k, variant = _read_call(call)
    if not variant.window or min(q[2], k[2]) < 2 or _shards_keys_alone(call):
        return {}
    last = variant.shift + (0 if variant.causal else variant.window - 1)
    return {"t": WindowMap("s", 1, variant.shift - variant.window + 1, last, q[2])}


def _read_call(call: Call) -> tuple[Sequence[int], Sequence[int], Variant]:
    """Returns the shapes of q and k, and the variant of attention."""
    q, k = (arg(call, name).shape for name in "qk")
    return q, k, Variant(*(arg(call, name) for name in Variant._fields))


def _backward_text(call: Call) -> str:
    """The gradients of k and v are sums over the queries and over the query heads that share a key head.

    The gradient of the bias is a sum over the dims along which the bias broadcasts. All are linear in the gradients of
    o and lse.
    """
    bias = call.results[3]
    words = () if bias is None else _SCORES[4 - len(bias.shape) :]
    dims = () if bias is None else tuple("1" if n == 1 else w for w, n in zip(words, bias.shape, strict=True))
    sums = "s:sum g:sum" if bias is None else "b:sum kv:sum s:sum g:sum"
    linear = "{0,1}" if isinstance(arg(call, "grad_lse"), Meta) else "{0}"
    return (
        f"{_O}, {_LSE}, {_Q}, {_K}, {_K}, {_O}, {_LSE}, {_OTHERS} -> {_Q}, {_K}, {_K}, {' '.join(dims)} "
        f"| {sums} {_notes(call)} d:whole {linear}"
    )


def _notes(call: Call) -> str:
    """Returns the notes on factors whose offset matters.

    For a sharded sequence there are three ways: a ring, heads that take over the axes, or gathered keys. Dropout draws
    for all heads that share keys at once, so these heads must be adjacent.
    """
    if _shards_keys_alone(call):
        return "s:local keys:whole t:local " + ("t:sum" if is_backward(call) else "t:none")
    notes, (_, k, variant) = "s:local t:round(s) kv:lend(s) g:lend(s) keys:whole", _read_call(call)
    if not variant.dropout:
        return notes
    return f"b:local kv:local {notes} " + ("g:local" if k[1] == 1 else "g:whole")


def _shards_keys_alone(call: Call) -> bool:
    q, k, variant = _read_call(call)
    return (
        _CACHE_RATIO * q[2] <= k[2] and not variant.dropout and not (is_backward(call) and call.results[3] is not None)
    )


def _attend(local: LocalBuilder) -> Any:
    """Returns the op on a shard, with the offsets of the shard."""
    call, args, offset = local.call, positional_args(local), local.offset
    (q, k, _), first = _read_call(call), 7 if is_backward(call) else 3  # the position of the mask
    last = first + len(Variant._fields)
    tensors, variant, after = args[:first], Variant(*args[first:last]), args[last:]
    if variant.dropout:
        part = variant.part or whole_part(q, k, Variant(q_offset=variant.q_offset, k_offset=variant.k_offset))
        head = offset("kv") * (q[1] // k[1] if k[1] else 1) + offset("g")
        variant = variant._replace(part=[part[0] + offset("b"), part[1] + head, *part[2:]])
    ways = local.ways("t")
    window = local.rule.window_length("t", ways) if ways > 1 else None
    if ways > 1 and window is None and not _shards_keys_alone(call):
        ring = ring_attention.backward if is_backward(call) else ring_attention.forward
        return ring(local, tensors, variant, *after)
    variant = variant._replace(q_offset=variant.q_offset + offset("s"))
    if ways > 1:
        return local.run(partial(_own_keys if window is None else _window_keys, local), tensors, list(variant), after)
    return local.op(call.target, *tensors, *variant, *after)


def _own_keys(local: LocalBuilder, tensors: Sequence[Any], variant: Sequence[Any], after: Sequence[Any]) -> Any:
    """Returns the op on the device's own keys; weights the devices' results by their shares of the softmax sum."""
    start, size, whole = piece("t")
    results = local.call.target(*tensors, *_for_keys(Variant(*variant), (start, start + size), whole), *after)
    if is_backward(local.call):
        return results
    o, lse = results
    top = pmax(lse, ["t"])
    share = (lse - top.masked_fill(top == -math.inf, 0)).exp()
    weighted, total = psum((o * share.unsqueeze(-1), share), ["t"])
    divisor = total.clamp(min=torch.finfo(total.dtype).tiny)  # a query may see no key
    return (weighted / divisor.unsqueeze(-1)).to(o.dtype), top + total.log()


def _window_keys(local: LocalBuilder, tensors: Sequence[Any], fields: Sequence[Any], after: Sequence[Any]) -> Any:
    """Returns the op on the keys that the device's queries may see; sums the gradients of keys on their owners."""
    back, whole, variant = is_backward(local.call), piece("t").whole, Variant(*fields)
    at = 2 if back else 0  # the position of q, k and v
    q, *keys = tensors[at : at + 3]
    need = intersect((0, whole), variant.keys(slice(0, q.shape[_SEQUENCE]), whole))
    visible = [fetch(x, _SEQUENCE, ("t",), [need], name)[0] for x, name in zip(keys, "kv", strict=True)]
    tensors = *tensors[: at + 1], *visible, *tensors[at + 3 :]
    results = local.call.target(*tensors, *_for_keys(variant, need, whole), *after)
    if not back:
        return results
    dq, *grads, dbias = results
    grads = [
        add_to_owners(x, _SEQUENCE, ("t",), need, whole, name) for x, name in zip(grads, ("dk", "dv"), strict=True)
    ]
    if dbias is not None and variant.bias is not None and variant.bias.shape[-1] == whole:
        dbias = crop_or_pad(dbias, dbias.dim() - 1, need, (0, whole))
    return dq, *grads, dbias


def _for_keys(variant: Variant, keys: Range, whole: int) -> Variant:
    """Returns the variant for a range of all keys."""
    masks = ((name, getattr(variant, name)) for name in ("mask", "bias"))
    narrow = {name: x.narrow(-1, keys[0], length(keys)) for name, x in masks if x is not None and x.shape[-1] == whole}
    return variant._replace(**narrow, k_offset=variant.k_offset + keys[0])


def _flops(call: Call, _: int) -> int:
    """Two operations for each visible pair of query and key, in each product (2, and 5 for gradients)."""
    q, k, variant = _read_call(call)
    return (5 if is_backward(call) else 2) * q[0] * q[1] * q[3] * _twice_area(q[2], k[2], variant)


def _twice_area(s: int, t: int, variant: Variant) -> int:
    """Twice the visible area of the plane of queries and keys, whose edges are straight lines."""
    upto = variant.shift if variant.causal else variant.shift + variant.window if variant.window else t
    since = variant.shift - variant.window if variant.window else -s
    return _under(s, t, upto) - _under(s, t, since)


def _under(s: int, t: int, start: int) -> int:
    """Twice the area under the line `start + x`, clamped to [0, t], for x from 0 to s."""
    first, last = min(max(-start, 0), s), min(max(t - start, 0), s)  # the line passes 0, and t
    return (last - first) * (first + last + 2 * start) + 2 * t * (s - last)


ROWS: dict[str, RuleFn | str] = {
    "shardlib::attention": _rule,
    "shardlib::attention_backward": _rule,
    "shardlib::attention_merge": "b h s d, b h s, b h s d, b h s -> b h s d, b h s | d:none",
}
