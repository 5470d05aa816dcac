"""One trace for meshes that differ in their sizes alone: most functions do the same on all of them.

Who asks for the current mesh may do something else on another one; its trace serves one mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from shardlib.core.context import mesh_queries
from shardlib.frontend.trace import trace
from shardlib.frontend.traced_graph import Traced
from shardlib.jit.call.program_cache import PLANS, Kept
from shardlib.sharding.mesh.mesh import Mesh

_traces: ContextVar[Kept[tuple[Mesh, Traced]] | None] = ContextVar("shardlib_traces", default=None)


@contextmanager
def one_trace() -> Iterator[None]:
    """Inside, a call that is planned on several meshes is traced once, if it can be."""
    token = _traces.set(Kept(PLANS))
    try:
        yield
    finally:
        _traces.reset(token)


def is_one_trace() -> bool:
    """Whether calls are planned for one mesh after the other on purpose."""
    return _traces.get() is not None


def tracer(key: Any, leaves: list[Any]) -> Callable[..., Traced]:
    """What traces the call with this key and these leaves: `trace`, or what gives what that gave on another mesh."""
    traces = _traces.get()
    return trace if traces is None or key is None else partial(_traced, traces, key, leaves)


def _traced(traces: Kept[tuple[Mesh, Traced]], key: Any, leaves: list[Any], *args: Any, **how: Any) -> Traced:
    mesh, *rest = key
    known = tuple(mesh.axes), frozenset(mesh.rules.items()), mesh.kind, mesh.device, mesh.strict, *rest
    found = traces.find(known, leaves)
    if found is not None and found[0][0] != mesh:  # one of this mesh was not right, so it is traced again
        return replace(found[0][1], graph=_copied(found[0][1].graph))
    asked = mesh_queries.value
    traced: Traced = trace(*args, **how)
    if asked == mesh_queries.value:
        traces.keep(known, (mesh, replace(traced, graph=_copied(traced.graph), outlived=())), traced.served)
    return traced


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, of nodes of its own: later stages write to it."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, nodes))
    for node, copy in [*nodes.items(), (gm.graph.output_node(), graph.output_node())]:
        copy.name = node.name
        copy.meta = {k: nodes.get(x, x) if isinstance(x, fx.Node) else x for k, x in node.meta.items()}
    (kind,) = type(gm).__bases__  # each graph module has a class of its own
    made: fx.GraphModule = kind(gm, graph)
    return made
