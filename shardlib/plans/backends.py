"""Which backend runs each collective and each attention of a program, and why: what the ops' `choose` say.

Nothing is communicated to find out: what the ranks have not settled yet is said to be open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardlib.graph import Op
from shardlib.meshes.mesh import Mesh
from shardlib.ops import _groups, all_gather, all_reduce, all_to_all, attention, ppermute, reduce_scatter
from shardlib.ops._attention_variant import Variant
from shardlib.ops._choice import Choice
from shardlib.program.steps import Collective
from shardlib.rules.rule import Meta

_COLLECTIVES: dict[str, Callable[..., Choice]] = {
    "all_gather": all_gather.choose,
    "all_reduce": all_reduce.choose,
    "all_to_all": all_to_all.choose,
    "ppermute": ppermute.choose,
    "reduce_scatter": reduce_scatter.choose,
}
_QUERIES = {"attention": 0, "attention_backward": 2}  # where q stands; k and v follow


def of_collective(c: Collective, mesh: Mesh) -> Choice | None:
    """What runs a collective; None on an abstract mesh, which has no devices to choose for."""
    if mesh.kind == "abstract":
        return None
    transport, why = ("virtual", "") if mesh.kind == "virtual" else _groups.transport(mesh, c.axes)
    sizes = [c.params[key] for key in ("sizes", "split_sizes", "concat_sizes", "shapes") if key in c.params]
    even = all(len(set(map(repr, s))) <= 1 for s in sizes)
    n = math.prod(a.size for a in c.axes)
    whole = c.source if c.kind == "reduce_scatter" else c.out
    return _COLLECTIVES[c.kind](whole.nbytes, even, c.source.dtype, c.reduce, transport, n, why)


def of_attention(op: Op, mesh: Mesh) -> Choice | None:
    """What computes an attention; None for other ops, and on an abstract mesh."""
    if op.kind not in _QUERIES or not str(op.target).startswith("shardlib.") or mesh.kind == "abstract":
        return None
    first = _QUERIES[op.kind]
    with FakeTensorMode():

        def tensor(x: Any) -> Any:
            return torch.empty(x.shape, dtype=x.dtype, device=mesh.device) if isinstance(x, Meta) else x

        args = [tensor(x) for x in op.call.args]
        behind = 3 if op.kind == "attention" else 7
        names = {**dict(zip(Variant._fields, args[behind:], strict=False)), **op.call.kwargs}
        need_bias = bool(names.pop("need_bias", args[-1] if len(args) > behind + len(Variant._fields) else False))
        variant = Variant(**names).explicit(args[first], args[first + 1])
        return attention.choose(args[first], args[first + 1], variant, need_bias)
