"""Nodes of a trace, written out again for other values, without running anything.

What a piece of Python wrote into the graph is what it would write for other tensors of the same shapes. A copy costs
one node; running the piece again costs every op a way through torch's dispatcher. A copy stands in the name of the line
that the first one has; what is drawn in it is drawn anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
)

from shardlib.core.fake_tensors import make_fake_like
from shardlib.core.source_lines import modules
from shardlib.core.torch_private import (
    SLOT,
    FakeTensor,
    innermost,
    running_node,
    set_slot,
    without_transforms,
)
from shardlib.frontend.lifted_inputs import Lifted
from shardlib.primitives.random.keys import CopiedDraws
from shardlib.tensor.sharded_tensor import ShardedTensor


class Copy:
    """One copy: `nodes` are what stands for each node that it is of. What it does not know is the same for all.

    `made` are tensors that are there already, which nothing has computed, by the nodes that they become.
    """

    def __init__(self, made: Mapping[fx.Node, Tensor] | None = None) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.is_followed = made is not None
        self._made = dict(made or {})
        self._redrawn = CopiedDraws()

    def begin(self, env: Mapping[fx.Node | None, Tensor | None]) -> None:
        """These nodes are these tensors."""
        for node, x in env.items():
            if node is not None and x is not None:
                self.nodes[node] = node_of(innermost(x))

    def write(self, nodes: Iterable[fx.Node], same: Mapping[fx.Node, fx.Node] | None = None) -> None:
        """Write nodes again into the graph that is being traced, but for those that are the `same` as another one."""
        graph: fx.Graph = _tracer().graph
        env, late = self.nodes, running_node() is not None
        for node in nodes:
            if node.op != "call_function":
                continue
            if same and node in same:
                env[node] = env[same[node]]
                continue
            if (key := self._redrawn.key(node)) is not None:
                env[node] = node_of(key)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env.get(x, x))
            name = _NUMBER.sub("", node.name)
            new = env[node] = graph.create_node("call_function", node.target, (), {}, name)
            _assign(new, "args", args)  # given to it, fx would look through them once more
            if kwargs:
                _assign(new, "kwargs", kwargs)
            self._redrawn.renumber(new)
            new.meta.update({k: node.meta[k] for k in _KEPT if k in node.meta})
            new.meta["modules"] = modules.get().around(node.meta.get("modules", ()))
            if late:
                new.meta["backward"] = True

    def tensor(self, node: fx.Node) -> Tensor:
        """A tensor that is the copy of a node: a new one, or the one that waits for it."""
        x = self._made.pop(node) if node in self._made else alike(node.meta["val"])
        shows(x, self.nodes.get(node, node))
        return x


_assign = object.__setattr__  # fx's own files the node anew in its table of targets, which stay
_NUMBER = re.compile(r"_\d+$")
_KEPT = ("val", "line", "default", "backward")


def node_of(x: Tensor) -> fx.Node:
    """The node that is a tensor in the graph that is being traced."""
    tracer, lifted = _tracer(), Lifted.current()
    known = lifted.seen(x) if lifted is not None and isinstance(x, ShardedTensor) else x
    if has_proxy_slot(known, tracer):
        found: fx.Node = get_proxy_slot(known, tracer).proxy.node
        return found
    made: fx.Node = tracer.create_arg(known)
    return made


def shows(x: Tensor, node: fx.Node) -> None:
    """From now on, a tensor is this node."""
    tracer, lifted = _tracer(), Lifted.current()
    known = lifted.seen(x) if lifted is not None and isinstance(x, ShardedTensor) else x
    set_slot(known, tracer, SLOT(fx.Proxy(node, tracer), None))


def alike(x: Tensor) -> Tensor:
    """A tensor like x that nobody has traced."""
    if type(x) is FakeTensor:
        with without_transforms():
            return make_fake_like(x)  # type: ignore[no-any-return]
    with without_transforms(), disable_proxy_modes_tracing() if get_proxy_mode() is not None else ExitStack():
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "a function is being traced"
    return mode.tracer


class Region:
    """What Python writes from here to `end`, without gradients, reading and writing `inputs`, and reading `shared`.

    A tensor that was found has two nodes, its own and that of what stands for it, which the last write to it moves.
    """

    def __init__(self, inputs: Sequence[Any], shared: Sequence[Any]) -> None:
        self._graph: fx.Graph = _tracer().graph
        self._shared = {node for x in shared for node in map(node_of, _handles(x))}
        self.before = [list(map(node_of, _handles(x))) for x in inputs]
        self._last = next(iter(reversed(self._graph.nodes)))

    def end(self, inputs: Sequence[Any], results: Sequence[Any]) -> bool:
        """All is written; `results` are what stands in the places of the inputs now. Whether it can be copied."""
        node, self.nodes = self._last.next, list[fx.Node]()
        while node.op != "root":
            self.nodes.append(node)
            node = node.next
        self.after = [list(map(node_of, _handles(x))) for x in results]
        self.is_same = [x is y for x, y in zip(inputs, results, strict=True)]
        known = {*self.nodes, *self._shared, *(node for nodes in self.before for node in nodes)}
        read = (x for node in self.nodes for x in node.all_input_nodes)
        return all(x in known or x.op == "get_attr" or "scalar" in x.meta for x in read)

    def again(self, inputs: Sequence[Any]) -> list[Any]:
        """Write it for other inputs; returns what stands in their places then."""
        copy, handles = Copy(), list(map(_handles, inputs))
        for nodes, xs in zip(self.before, handles, strict=True):
            copy.begin(dict(zip(nodes, xs, strict=True)))
        copy.write(self.nodes)
        results = []
        for was, now, x, xs, same in zip(self.before, self.after, inputs, handles, self.is_same, strict=True):
            if not same:
                x = copy.tensor(now[0]) if now else None
            for old, new, y in zip(was, now, xs, strict=True) if same else ():
                if new is not old:
                    shows(y, copy.nodes[new])
            results.append(x)
        return results


def _handles(x: Any) -> list[Tensor]:
    """The tensors by which ops of the trace know this one."""
    lifted = Lifted.current()
    if not isinstance(x, Tensor) or lifted is None:
        return [x] if isinstance(x, Tensor) else []
    seen, stands = lifted.seen(x), lifted.stand_in(x)
    return [seen] if seen is stands else [seen, stands]
