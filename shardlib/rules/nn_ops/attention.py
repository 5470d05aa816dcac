"""Attention: batch, heads and queries may be cut; keys only as the queries are, and then they go round
(`rules/local_forms/ring_attention.py`), or, where a window shows few of them, a device gets those that its queries may
see, and gives their gradients back. Where there are far more keys than queries (a cache), keys are cut alone: who has
some looks at these, and what devices have seen is added up by its log-sum-exp.

q is `[B, H, S, D]`, k and v `[B, KV, T, D]`; query head h reads key head `h // (H // KV)`, so heads are `(kv g)`.
A device that holds a part is told where the part begins: causal masks, windows and ALiBi count places in the whole, and
so does dropout, which draws for the elements of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardlib.ops.attention.variant import Variant, whole_part
from shardlib.primitives.collectives import piece, pmax, psum
from shardlib.rules.iteration_space import arg, is_backward
from shardlib.rules.local_forms import ring_attention
from shardlib.rules.local_forms.halo import Range, fetch, give_back, length, overlap, reframe
from shardlib.rules.local_forms.helpers import positional
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Meta, Reads, Rule, RuleFn

_Q, _O, _LSE = "b (kv g) s d", "b (kv g) s d", "b (kv g) s"
_K = "b kv t d"
_SCORES = ("b", "(kv g)", "s", "keys")  # a mask has all keys, also where k and v are cut
_OTHERS = f"~{' '.join(_SCORES)}, ~{' '.join(_SCORES)}, (kv g), two"  # mask, bias, alibi, key
_SEQUENCE = ring_attention.SEQUENCE
_FEW = 8  # keys for a query, from which on keys are cut without the queries


def _rule(call: Call) -> Rule:
    text = _backward(call) if is_backward(call) else f"{_Q}, {_K}, {_K}, {_OTHERS} -> {_O}, {_LSE} | {_local(call)}"
    return replace(pattern(text, local=_placed, flops=_flops)(call), reads=_reads(call))


def _reads(call: Call) -> dict[str, Reads]:
    """Which keys a window shows a query."""
    q, k, how = _read(call)
    if not how.window or min(q[2], k[2]) < 2 or _alone(call):
        return {}
    return {"t": Reads("s", 1, how.shift - how.window + 1, how.shift + (0 if how.causal else how.window - 1), q[2])}


def _read(call: Call) -> tuple[Sequence[int], Sequence[int], Variant]:
    """The shapes of q and k, and what attention it is."""
    q, k = (arg(call, name).shape for name in "qk")
    return q, k, Variant(*(arg(call, name) for name in Variant._fields))


def _backward(call: Call) -> str:
    """The gradients of k and v add up over the queries and over the query heads that share a key head.

    That of the bias adds up over whatever the bias was broadcast along. All are linear in the gradients of o and lse.
    """
    bias = call.results[3]
    words = () if bias is None else _SCORES[4 - len(bias.shape) :]
    kept = () if bias is None else tuple("1" if n == 1 else w for w, n in zip(words, bias.shape, strict=True))
    sums = "s:sum g:sum" if bias is None else "b:sum kv:sum s:sum g:sum"
    linear = "{0,1}" if isinstance(arg(call, "grad_lse"), Meta) else "{0}"
    return (
        f"{_O}, {_LSE}, {_Q}, {_K}, {_K}, {_O}, {_LSE}, {_OTHERS} -> {_Q}, {_K}, {_K}, {' '.join(kept)} "
        f"| {sums} {_local(call)} d:whole {linear}"
    )


def _local(call: Call) -> str:
    """What changes with the place of a part. Heads that share keys are drawn for together: they must be neighbors.

    A sequence that is cut leaves three ways: the keys go round, or heads are cut instead, or the keys are gathered.
    """
    if _alone(call):
        return "s:local keys:whole t:local " + ("t:sum" if is_backward(call) else "t:none")
    notes, (_, k, how) = "s:local t:round(s) kv:lend(s) g:lend(s) keys:whole", _read(call)
    if not how.dropout:
        return notes
    return f"b:local kv:local {notes} " + ("g:local" if k[1] == 1 else "g:whole")


def _alone(call: Call) -> bool:
    """Whether keys are cut without the queries."""
    q, k, how = _read(call)
    return _FEW * q[2] <= k[2] and not how.dropout and not (is_backward(call) and call.results[3] is not None)


def _placed(local: Local) -> Any:
    """The op on a part of the whole, told where it begins."""

    call, given, begin = local.call, positional(local), local.offset
    (q, k, _), first = _read(call), 7 if is_backward(call) else 3  # where the mask stands
    tensors, how, after = given[:first], Variant(*given[first : first + _MANY]), given[first + _MANY :]
    if how.dropout:
        part = how.part or whole_part(q, k, Variant(q_offset=how.q_offset, k_offset=how.k_offset))
        head = begin("kv") * (q[1] // k[1] if k[1] else 1) + begin("g")
        how = how._replace(part=[part[0] + begin("b"), part[1] + head, *part[2:]])
    near = local.rule.near("t", local.ways("t")) if local.ways("t") > 1 else None
    if local.ways("t") > 1 and near is None and not _alone(call):
        return (ring_attention.backward if is_backward(call) else ring_attention.forward)(local, tensors, how, *after)
    how = how._replace(q_offset=how.q_offset + begin("s"))
    if local.ways("t") > 1:
        return local.run(partial(_among if near is None else _nearby, local), tensors, list(how), after)
    return local.op(call.target, *tensors, *how, *after)


_MANY = len(Variant._fields)


def _among(local: Local, tensors: Sequence[Any], given: Sequence[Any], after: Sequence[Any]) -> Any:
    """The op on some of the keys; the results of all devices are weighted by what of the whole sum each has seen."""
    start, size, whole = piece("t")
    found = local.call.target(*tensors, *_of_keys(Variant(*given), (start, start + size), whole), *after)
    if is_backward(local.call):
        return found
    o, lse = found
    top = pmax(lse, ["t"])
    share = (lse - top.masked_fill(top == -math.inf, 0)).exp()
    seen, total = psum((o * share.unsqueeze(-1), share), ["t"])
    rest = total.clamp(min=torch.finfo(total.dtype).tiny)  # a query may see no key
    return (seen / rest.unsqueeze(-1)).to(o.dtype), top + total.log()


def _nearby(local: Local, tensors: Sequence[Any], given: Sequence[Any], after: Sequence[Any]) -> Any:
    """The op on the keys that a device's queries may see. Gradients of keys go home, and are added up there."""
    back, whole, how = is_backward(local.call), piece("t").whole, Variant(*given)
    at = 2 if back else 0  # where q, k and v stand
    q, *keys = tensors[at : at + 3]
    need = overlap((0, whole), how.keys(slice(0, q.shape[_SEQUENCE]), whole))
    seen = [fetch(x, _SEQUENCE, ("t",), [need], name)[0] for x, name in zip(keys, "kv", strict=True)]
    tensors = *tensors[: at + 1], *seen, *tensors[at + 3 :]
    found = local.call.target(*tensors, *_of_keys(how, need, whole), *after)
    if not back:
        return found
    dq, *grads, dbias = found
    grads = [give_back(x, _SEQUENCE, ("t",), need, whole, name) for x, name in zip(grads, ("dk", "dv"), strict=True)]
    if dbias is not None and how.bias is not None and how.bias.shape[-1] == whole:
        dbias = reframe(dbias, dbias.dim() - 1, need, (0, whole))
    return dq, *grads, dbias


def _of_keys(how: Variant, some: Range, whole: int) -> Variant:
    """The variant for some of all keys."""
    masks = ((n, getattr(how, n)) for n in ("mask", "bias"))
    cut = {n: x.narrow(-1, some[0], length(some)) for n, x in masks if x is not None and x.shape[-1] == whole}
    return how._replace(**cut, k_offset=how.k_offset + some[0])


def _flops(call: Call, _: int) -> int:
    """Two operations a point for each of the products (2, and 5 for gradients), for the points that places leave to
    see."""
    q, k, how = _read(call)
    return (5 if is_backward(call) else 2) * q[0] * q[1] * q[3] * _twice_area(q[2], k[2], how)


def _twice_area(s: int, t: int, variant: Variant) -> int:
    """Twice the area of the plane of queries and keys that is seen, its edges taken as straight lines.

    Example:
        >>> _twice_area(8, 8, Variant()), _twice_area(8, 8, Variant(causal=True))
        (128, 64)
        >>> _twice_area(8, 8, Variant(causal=True, window=2)), _twice_area(8, 8, Variant(window=2))
        (28, 56)
    """
    upto = variant.shift if variant.causal else variant.shift + variant.window if variant.window else t
    since = variant.shift - variant.window if variant.window else -s
    return _under(s, t, upto) - _under(s, t, since)


def _under(s: int, t: int, start: int) -> int:
    """Twice the area under the line `start + x`, held between 0 and t, for x from 0 to s."""
    first, last = min(max(-start, 0), s), min(max(t - start, 0), s)  # where the line leaves 0 and where it reaches t
    return (last - first) * (first + last + 2 * start) + 2 * t * (s - last)


ROWS: dict[str, RuleFn | str] = {
    "shardlib::attention": _rule,
    "shardlib::attention_backward": _rule,
    "shardlib::attention_merge": "b h s d, b h s, b h s d, b h s -> b h s d, b h s | d:none",
}
