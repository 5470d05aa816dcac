"""Copies nodes of a trace for other operands, without running Python again.

Python that ran for some tensors would write the same nodes for other tensors of the same shapes. A copy costs one node;
running the code costs each op a way through torch's dispatcher. A copy has the line of its original, and draws random
numbers of its own.
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

from shardlib.core.fragment_tag import current_tag
from shardlib.core.source_lines import modules, tag_line
from shardlib.core.torch_internals.fake_tensors import make_fake_like
from shardlib.core.torch_internals.torch_private import (
    SLOT,
    FakeTensor,
    innermost,
    running_node,
    set_slot,
    without_transforms,
)
from shardlib.frontend.lifted_inputs import LiftedInputs
from shardlib.primitives.random.keys import CopiedDraws
from shardlib.tensor.sharded_tensor import ShardedTensor


class Copy:
    """One copy: `nodes` maps each original to its copy. Nodes outside of the map are common to all copies.

    `results` are tensors that exist already and become copies, by their original nodes.
    """

    def __init__(self, results: Mapping[fx.Node, Tensor] | None = None) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.is_followed = results is not None
        self._results = dict(results or {})
        self._redrawn = CopiedDraws()
        self._tag, self._modules = current_tag(), modules.get()  # of the backward nodes, too, which are copied later

    def begin(self, env: Mapping[fx.Node | None, Tensor | None]) -> None:
        """Maps inputs of the original to tensors of the copy."""
        for node, x in env.items():
            if node is not None and x is not None:
                self.nodes[node] = find_node(innermost(x))

    def write(self, nodes: Iterable[fx.Node], same: Mapping[fx.Node, fx.Node] | None = None) -> None:
        """Copies nodes into the graph that is being traced. A node in `same` has the copy of another node."""
        graph: fx.Graph = _tracer().graph
        env, late = self.nodes, running_node() is not None
        for node in nodes:
            if node.op != "call_function":
                continue
            if same and node in same:
                env[node] = env[same[node]]
                continue
            if (key := self._redrawn.key(node)) is not None:
                env[node] = find_node(key)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: env.get(x, x))
            name = _NUMBER.sub("", node.name)
            new = env[node] = graph.create_node("call_function", node.target, (), {}, name)
            _assign(new, "args", args)  # `create_node` would look through them again
            if kwargs:
                _assign(new, "kwargs", kwargs)
            self._redrawn.renumber(new)
            new.meta.update({k: node.meta[k] for k in _KEPT if k in node.meta})
            new.meta["line"] = tag_line(node.meta["line"], self._tag)
            new.meta["modules"] = self._modules.around(node.meta.get("modules", ()))
            if late:
                new.meta["backward"] = True

    def tensor(self, node: fx.Node) -> Tensor:
        """Returns the tensor of a node's copy: a new one, or the one in `results`."""
        x = self._results.pop(node) if node in self._results else make_like(node.meta["val"])
        set_node(x, self.nodes.get(node, node))
        return x


_assign = object.__setattr__  # fx's own would file the node again under its target, which stays
_NUMBER = re.compile(r"_\d+$")
_KEPT = ("val", "line", "default", "backward")


def find_node(x: Tensor) -> fx.Node:
    """Returns the node of a tensor in the graph that is being traced."""
    tracer, x = _tracer(), _in_trace(x)
    if has_proxy_slot(x, tracer):
        node: fx.Node = get_proxy_slot(x, tracer).proxy.node
    else:
        node = tracer.create_arg(x)
    return node


def set_node(x: Tensor, node: fx.Node) -> None:
    """Makes a tensor the value of this node, from now on."""
    tracer = _tracer()
    set_slot(_in_trace(x), tracer, SLOT(fx.Proxy(node, tracer), None))


def _in_trace(x: Tensor) -> Tensor:
    lifted = LiftedInputs.current()
    return lifted.seen(x) if lifted is not None and isinstance(x, ShardedTensor) else x


def make_like(x: Tensor) -> Tensor:
    """Returns a new tensor like x, which has no node yet."""
    if type(x) is FakeTensor:
        with without_transforms():
            return make_fake_like(x)  # type: ignore[no-any-return]
    with without_transforms(), disable_proxy_modes_tracing() if get_proxy_mode() is not None else ExitStack():
        return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "a function is being traced"
    return mode.tracer


class RecordedNodes:
    """The nodes that Python writes until `end`, without gradients; they read and write `inputs`, and read `shared`.

    A closed-over tensor has two nodes: its own, and its stand-in's. The last write to it moves both.
    """

    def __init__(self, inputs: Sequence[Any], shared: Sequence[Any]) -> None:
        self._graph: fx.Graph = _tracer().graph
        self._shared = {node for x in shared for node in map(find_node, _handles(x))}
        self.before = [list(map(find_node, _handles(x))) for x in inputs]
        self._last = next(iter(reversed(self._graph.nodes)))

    def end(self, inputs: Sequence[Any], results: Sequence[Any]) -> bool:
        """Ends the recording with `results` in the places of the inputs; returns whether the nodes can be copied."""
        node, self.nodes = self._last.next, list[fx.Node]()
        while node.op != "root":
            self.nodes.append(node)
            node = node.next
        self.after = [list(map(find_node, _handles(x))) for x in results]
        self.is_same = [x is y for x, y in zip(inputs, results, strict=True)]
        own = {*self.nodes, *self._shared, *(node for nodes in self.before for node in nodes)}
        read = (x for node in self.nodes for x in node.all_input_nodes)
        return all(x in own or x.op == "get_attr" or "scalar" in x.meta for x in read)

    def again(self, inputs: Sequence[Any]) -> list[Any]:
        """Copies the nodes for other inputs; returns the tensors in their places then."""
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
                    set_node(y, copy.nodes[new])
            results.append(x)
        return results


def _handles(x: Any) -> list[Tensor]:
    """Returns the tensors that ops of the trace read in place of this one."""
    lifted = LiftedInputs.current()
    if not isinstance(x, Tensor) or lifted is None:
        return [x] if isinstance(x, Tensor) else []
    seen, stand_in = lifted.seen(x), lifted.stand_in(x)
    return [seen] if seen is stand_in else [seen, stand_in]
