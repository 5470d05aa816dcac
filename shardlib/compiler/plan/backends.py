"""Names the backend of each collective and attention, and the reason, as the ops' `choose` give it; and the form in
which collectives cross machines.

Nothing is communicated for that: if ranks have not agreed on a backend yet, the reason says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.program.steps import Collective, Program, Start
from shardlib.core.torch_internals.torch_private import FakeTensorMode, schema_of
from shardlib.ops.attention import op as attention
from shardlib.ops.attention.variant import Variant
from shardlib.ops.backend_choice import Choice
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.transport import forms, groups
from shardlib.ops.collectives.transport.forms import Form
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.rules.rule import Meta
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.mesh.mesh import Mesh

_COLLECTIVES: dict[str, Callable[[CollectiveRequest], Choice]] = {
    "all_gather": all_gather.choose,
    "all_reduce": all_reduce.choose,
    "all_to_all": all_to_all.choose,
    "ppermute": ppermute.choose,
    "reduce_scatter": reduce_scatter.choose,
}


def of_collective(c: Collective, mesh: Mesh) -> Choice | None:
    """Returns the backend of a collective; None on an abstract mesh, which has no devices."""
    if mesh.kind == "abstract":
        return None
    transport, fault = ("virtual", "") if mesh.kind == "virtual" else groups.predict_transport(mesh, c.axes)
    span = groups.predict_span(mesh, c.axes) if mesh.kind == "distributed" else None
    members = group_size(c.axes)
    return _COLLECTIVES[c.kind](
        CollectiveRequest(_whole_bytes(c), _is_even(c), c.source.dtype, c.reduce, transport, members, fault, span)
    )


def crossings(program: Program) -> dict[Collective, Form]:
    """Returns the forms of the collectives that cross machines, by the machine model of the mesh.

    Tensors of one dtype that start together are one message, and share its bytes.
    """
    by_collective: dict[Collective, Form] = {}
    for start in (step for step in program.steps if isinstance(step, Start) and step.first.kind in forms.OPS):
        if (span := groups.predict_span(program.mesh, start.first.axes)) is None:
            continue
        for dtype in dict.fromkeys(c.source.dtype for c in start.moves):
            message = [c for c in start.moves if c.source.dtype == dtype]
            nbytes, even = sum(map(_whole_bytes, message)), all(map(_is_even, message))
            form = forms.choose_form(start.first.kind, nbytes, even, dtype, start.first.reduce, span)
            by_collective |= {c: form.share(_whole_bytes(c) / max(nbytes, 1)) for c in message}
    return by_collective


def _whole_bytes(c: Collective) -> int:
    return (c.source if c.kind == "reduce_scatter" else c.out).nbytes


def _is_even(c: Collective) -> bool:
    """True if all shards have one size."""
    sizes = [c.params[key] for key in ("sizes", "split_sizes", "concat_sizes", "shapes") if key in c.params]
    return all(len(set(map(repr, s))) <= 1 for s in sizes)


def of_attention(op: Op, mesh: Mesh) -> Choice | None:
    """Returns the backend of an attention; None for other ops, and on an abstract mesh."""
    if op.target not in attention.OPS or mesh.kind == "abstract":
        return None
    with FakeTensorMode():

        def tensor(x: Any) -> Any:
            return torch.empty(x.shape, dtype=x.dtype, device=mesh.device) if isinstance(x, Meta) else x

        names = (a.name for a in schema_of(op.target).arguments)
        arguments = {**dict(zip(names, map(tensor, op.call.args), strict=False)), **op.call.kwargs}
        variant = Variant(**{name: x for name, x in arguments.items() if name in Variant._fields})
        q, k = arguments["q"], arguments["k"]
        return attention.choose(q, k, variant.explicit(q, k), bool(arguments.get("need_bias", False)))
