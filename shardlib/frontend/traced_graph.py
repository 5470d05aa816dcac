"""The result of a trace: a graph, and how its values map to the function's arguments and results."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.flatten_call import wrap_static
from shardlib.frontend.guards.number_guards import NumberGuards
from shardlib.frontend.side_effects.mutation_values import Mutation


@dataclass(frozen=True)
class ExtraOutputs:
    """The outputs of a graph behind the function's results, in this order; leaves are those of the call.

    `grads`: (leaf, position of its new `.grad`, or None if the call drops it).
    `written`: (leaf, position of its new value).
    `data`: (leaf, position of the tensor whose memory it gets).
    `takes`: (leaf, `grad` or `data`, the leaf that becomes its gradient, or whose memory it gets).
    `gradients`: (leaf, position of its gradient).
    `cotangents`: the results that have gradients, by position.
    `within`: those of `cotangents` from which another one is computed.
    `rebound`: places that hold other values after a call; new tensors among these follow the function's results.
    `reached`: for each gradient, the cotangents from which autograd's history leads to it. (Zeros are gradients, too.)
    `read`: leaves whose memory the backward pass reads.
    `leaves`: results at which the caller's history begins, each with True for a parameter. The function made it a leaf.
    `refused`: results that have no backward pass, though they depend on the leaf `root`, which requires a gradient;
    `why` is torch's reason.
    """

    grads: tuple[tuple[int, int | None], ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    data: tuple[tuple[int, int], ...] = ()
    takes: tuple[tuple[int, str, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    cotangents: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    rebound: tuple[Mutation, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    read: tuple[int, ...] = ()
    leaves: tuple[tuple[int, bool], ...] = ()
    refused: tuple[int, ...] = ()
    root: int = -1
    why: str = ""

    @property
    def writes(self) -> bool:
        """True if a call changes its inputs."""
        return bool(self.written or self.data or self.takes or self.grads)


@dataclass(frozen=True)
class TracedFunction:
    """One traced function: a functional graph, and how its values map to the function's arguments and results.

    `graph` takes the input tensors in order, named `input_names`: those of the arguments, then those of the call's
    state. It returns the leaves of the result, which need not be tensors, and then the outputs that `after` lists.
    """

    graph: fx.GraphModule
    name: str
    input_names: tuple[str, ...]
    input_leaves: tuple[int, ...]  # for every placeholder, which leaf of the call it is; -1 for a cotangent
    input_paths: tuple[Any, ...]  # and its pytree path in `(args, kwargs)`; None for state
    output_names: tuple[str, ...]
    out_tree: pytree.TreeSpec
    static: Collection[int | str] = ()
    after: ExtraOutputs = field(default_factory=ExtraOutputs)
    served: NumberGuards = field(default_factory=NumberGuards)  # calls, by their numbers
    asks_memory: bool = False  # where its arguments lie in memory
    looked: bool = False  # at a `.grad` from before the call
    twins: Mapping[str, str] = field(default_factory=dict)  # argument -> input that is the same tensor
    strides: tuple[tuple[int, ...] | None, ...] = ()  # of every output, on one device; None: dense, dims in order
    same: Mapping[int, int] = field(default_factory=dict)  # leaf of the result -> earlier leaf that is the same tensor
    outlived: tuple[weakref.ref[Any], ...] = ()  # stand-ins of the trace

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.graph.graph.nodes if n.op == "placeholder")

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The graph's outputs: nodes of tensors, and other leaves themselves."""
        return tuple(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The name of every output: `result['loss']`, `w.grad`, `gradient of w`, `w (written)`."""
        named = dict(zip(self.input_leaves, self.input_names, strict=True))
        after = {at: f"{named.get(leaf, 'an argument')}.grad" for leaf, at in self.after.grads}
        after |= {at: f"gradient of {named[leaf]}" for leaf, at in self.after.gradients}
        after |= {at: f"{named[leaf]} (written)" for leaf, at in self.after.written}
        after |= {at: f"{named[leaf]}.data" for leaf, at in self.after.data}
        own = self.output_names
        return (*own, *(after[at] for at in range(len(own), len(self.outputs))))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph op by op on real tensors: the oracle for every later stage."""
        leaves = pytree.tree_leaves(wrap_static(args, kwargs, self.static))
        inputs = (leaves[i] for i in self.input_leaves)
        flat = _Interpreter(self.graph, leaves).run(*inputs, enable_io_processing=False)
        return pytree.tree_unflatten(list(flat)[: self.out_tree.num_leaves], self.out_tree)


class _Interpreter(fx.Interpreter):
    """Runs a graph with the numbers of one call."""

    def __init__(self, graph: fx.GraphModule, leaves: Sequence[Any]) -> None:
        super().__init__(graph)
        self.leaves = leaves

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return pytree.tree_map_only(Scalar, lambda x: x.value(self.leaves), super().fetch_args_kwargs_from_env(n))
