"""Attention: batch, heads and queries may be cut; keys only as the queries are, and then they go round (`ring.py`).
Where there are far more keys than queries (a cache), keys are cut alone: who has some looks at these, and what devices
have seen is added up by its log-sum-exp.

q is `[B, H, S, D]`, k and v `[B, KV, T, D]`; query head h reads key head `h // (H // KV)`, so heads are `(kv g)`.
A device that holds a part is told where the part begins: causal masks, windows and ALiBi count places in the whole, and
so does dropout, which draws for the elements of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.manual.collectives import piece, pmax, psum
from shardlib.ops._attention_variant import Variant, whole_part
from shardlib.rules import ring
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Meta, Rule, RuleFn
from shardlib.rules.space import arg

_Q, _O, _LSE = "b (kv g) s d", "b (kv g) s d", "b (kv g) s"
_K = "b kv t d"
_SCORES = ("b", "(kv g)", "s", "keys")  # a mask has all keys, also where k and v are cut
_OTHERS = f"~{' '.join(_SCORES)}, ~{' '.join(_SCORES)}, (kv g), two"  # mask, bias, alibi, key
_FIRST = {"attention": 3, "attention_backward": 7}  # where the mask stands; the rest of a variant follows
_QUERIES = {3: 0, 7: 2}  # and where q does, before k and v
_AT = {name: i for i, name in enumerate(Variant._fields)}


def _rule(name: str) -> RuleFn:
    first = _FIRST[name]

    def rule(call: Call) -> Rule | None:
        text = _forward(call) if name == "attention" else _backward(call, first)
        return pattern(text, local=_placed(first), flops=_flops(first, 2 if name == "attention" else 5))(call)

    return rule


def _forward(call: Call) -> str:
    return f"{_Q}, {_K}, {_K}, {_OTHERS} -> {_O}, {_LSE} | {_local(call, 3)}"


def _backward(call: Call, first: int) -> str:
    """The gradients of k and v add up over the queries and over the query heads that share a key head.

    That of the bias adds up over whatever the bias was broadcast along. All are linear in the gradients of o and lse.
    """
    bias = call.results[3]
    words = () if bias is None else _SCORES[4 - len(bias.shape) :]
    kept = () if bias is None else tuple("1" if n == 1 else w for w, n in zip(words, bias.shape, strict=True))
    sums = "s:sum g:sum" if bias is None else "b:sum kv:sum s:sum g:sum"
    linear = "{0,1}" if isinstance(arg(call, 1, "grad_lse"), Meta) else "{0}"
    return (
        f"{_O}, {_LSE}, {_Q}, {_K}, {_K}, {_O}, {_LSE}, {_OTHERS} -> {_Q}, {_K}, {_K}, {' '.join(kept)} "
        f"| {sums} {_local(call, first)} d:whole {linear}"
    )


def _local(call: Call, first: int) -> str:
    """What changes with the place of a part. Heads that share keys are drawn for together: they must be neighbours.

    A sequence that is cut leaves three ways: the keys go round, or heads are cut instead, or the keys are gathered.
    """
    if _alone(call, first):
        return "s:local keys:whole t:local " + ("t:none" if first == _FIRST["attention"] else "t:sum")
    notes = "s:local t:round(s) kv:lend(s) g:lend(s) keys:whole"
    if not _of(call, first, "dropout"):
        return notes
    k = call.args[_QUERIES[first] + 1]
    return f"b:local kv:local {notes} " + ("g:local" if k.shape[1] == 1 else "g:whole")


def _alone(call: Call, first: int) -> bool:
    """Whether keys are cut without the queries."""
    at = _QUERIES[first]
    (*_, s, _), (*_, t, _) = (x.shape for x in call.args[at : at + 2])
    backward = first == _FIRST["attention_backward"]
    return _FEW * s <= t and not _of(call, first, "dropout") and not (backward and call.results[3] is not None)


_FEW = 8  # keys for a query, from which on


def _placed(first: int) -> Callable[[Local], Any]:
    """The op on a part of the whole, told where it begins."""

    def local(local: Local) -> Any:
        def begin(factor: str) -> Any:
            return local.offset(factor) if factor in local.rule.sizes else 0

        call = local.call
        how = {n: _of(local, first, n) for n in _AT}
        if how["dropout"]:
            q, k = (x.shape for x in call.args[_QUERIES[first] : _QUERIES[first] + 2])
            given = how["part"] or whole_part(q, k, Variant(q_offset=how["q_offset"], k_offset=how["k_offset"]))
            group = q[1] // k[1] if k[1] else 1
            head = begin("kv") * group + begin("g")
            how["part"] = [given[0] + begin("b"), given[1] + head, *given[2:]]
        rest = {n: x for n, x in local.kwargs.items() if n not in how}
        after = (*local.args[first + len(how) :], *rest.values())
        if local.ways("t") > 1:
            variant = Variant(**how)
            if _alone(call, first):
                variant = variant._replace(q_offset=variant.q_offset + begin("s"))
                return local.run(_among(local, first), local.args[:first], list(variant), after)
            if first == _FIRST["attention"]:
                return ring.forward(local, local.args[:first], variant)
            return ring.backward(local, local.args[:first], variant, *after)
        how["q_offset"] = how["q_offset"] + begin("s")
        return local.op(call.target, *local.args[:first], *how.values(), *after)

    return local


def _among(local: Local, first: int) -> Callable[..., Any]:
    """The op on some of the keys; the results of all devices are weighted by what of the whole sum each has seen."""

    def form(tensors: Sequence[Any], given: Sequence[Any], after: Sequence[Any]) -> Any:
        start, size, whole = piece("t")
        how = Variant(*given)
        masks = ((n, getattr(how, n)) for n in ("mask", "bias"))
        some = {n: x.narrow(-1, start, size) for n, x in masks if x is not None and x.shape[-1] == whole}
        how = how._replace(**some, k_offset=how.k_offset + start)
        found = local.call.target(*tensors, *how, *after)
        if first != _FIRST["attention"]:
            return found
        o, lse = found
        top = pmax(lse, ["t"])
        share = (lse - top.masked_fill(top == -math.inf, 0)).exp()
        seen, total = psum((o * share.unsqueeze(-1), share), ["t"])
        rest = total.clamp(min=torch.finfo(total.dtype).tiny)  # a query may see no key
        return (seen / rest.unsqueeze(-1)).to(o.dtype), top + total.log()

    return form


def _flops(first: int, products: int) -> Callable[[Call, int], int]:
    """Two operations a point for each of the `products`, for the points that places leave to see."""

    def flops(call: Call, points: int) -> int:
        q, k = (x.shape for x in call.args[_QUERIES[first] : _QUERIES[first] + 2])
        how = {n: _of(call, first, n) for n in ("causal", "window", "q_offset", "k_offset")}
        heads = int(q[0] * q[1] * q[3])
        return products * heads * _twice_area(q[2], k[2], Variant(**how))

    return flops


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


def _of(call: Call | Local, first: int, name: str) -> Any:
    """One argument of the variant."""
    return arg(call, first + _AT[name], name, Variant._field_defaults[name])


ROWS: dict[str, RuleFn | str] = {
    "shardlib::attention": _rule("attention"),
    "shardlib::attention_backward": _rule("attention_backward"),
    "shardlib::attention_merge": "b h s d, b h s, b h s d, b h s -> b h s d, b h s | d:none",
}
