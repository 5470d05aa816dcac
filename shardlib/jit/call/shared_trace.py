"""Shares one trace between meshes that differ only in their sizes.

The trace of a function that reads the current mesh serves that mesh only.
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
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.jit.call.program_cache import PLANS, Kept
from shardlib.sharding.mesh.mesh import Mesh

_traces: ContextVar[Kept[tuple[Mesh, TracedFunction]] | None] = ContextVar("shardlib_traces", default=None)


@contextmanager
def one_trace() -> Iterator[None]:
    """Inside, a call that is planned on several meshes is traced once, if possible."""
    token = _traces.set(Kept(PLANS))
    try:
        yield
    finally:
        _traces.reset(token)


def is_one_trace() -> bool:
    """True inside `one_trace`: calls are planned for one mesh after the other on purpose."""
    return _traces.get() is not None


def tracer(key: Any, leaves: list[Any]) -> Callable[..., TracedFunction]:
    """Returns the tracer of a call: `trace`, or one that reuses the trace of another mesh."""
    traces = _traces.get()
    return trace if traces is None or key is None else partial(_traced, traces, key, leaves)


def _traced(
    traces: Kept[tuple[Mesh, TracedFunction]], key: Any, leaves: list[Any], *args: Any, **how: Any
) -> TracedFunction:
    mesh, *rest = key
    mesh_key = tuple(mesh.axes), frozenset(mesh.rules.items()), mesh.kind, mesh.device, mesh.strict, *rest
    match = traces.find(mesh_key, leaves)
    if match is not None and match[0][0] != mesh:  # a second trace on one mesh means that the first was wrong
        return replace(match[0][1], graph=_copied(match[0][1].graph))
    count = mesh_queries.value
    traced: TracedFunction = trace(*args, **how)
    if count == mesh_queries.value:
        traces.keep(mesh_key, (mesh, replace(traced, graph=_copied(traced.graph), outlived=())), traced.served)
    return traced


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph with its nodes, which later stages change."""
    graph, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, nodes))
    for node, copy in [*nodes.items(), (gm.graph.output_node(), graph.output_node())]:
        copy.name = node.name
        copy.meta = {k: nodes.get(x, x) if isinstance(x, fx.Node) else x for k, x in node.meta.items()}
    (kind,) = type(gm).__bases__  # each graph module has a class of its own
    copy_module: fx.GraphModule = kind(gm, graph)
    return copy_module
