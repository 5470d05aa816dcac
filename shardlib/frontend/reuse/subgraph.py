"""Subgraphs that are traced once, their calls, and the copies that calls write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardlib.core.torch_internals.torch_private import FakeTensor, pytree, transforms
from shardlib.core.tree_paths import walk_tree
from shardlib.frontend.guards.closure import read_reached_code
from shardlib.frontend.guards.code_refs import CodeReadsCache
from shardlib.frontend.guards.flatten_call import read_arguments
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.guards.value_kinds import PLAIN, is_user_object
from shardlib.frontend.reuse.loop_replay import Body, NotReusableError, memory_owner
from shardlib.frontend.reuse.module_equality import AttributeRead, EqualityWalk
from shardlib.frontend.reuse.replay_python import CallRecording, CallReplay
from shardlib.frontend.side_effects.mutation_outputs import is_value
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.primitives.random.keys import is_key

REACHED = CodeReadsCache()


@dataclass
class Subgraph:
    """A traced module or function.

    `reads` are the attributes of modules that its code read, `facts` those of the walk with these attributes. `places`
    are the positions in the walk of the tensors that it closes over; None for one that is the same in every call.
    """

    facts: Any
    reads: set[AttributeRead]
    body: Body
    places: list[int | None]
    tree: Any
    leaves: list[Any]  # of the result; a `ResultPosition` stands for a tensor
    record: CallRecording | None  # for code that runs in every call


@dataclass
class ResultPosition:
    """The position of a result among the outputs, or among the leaves of the arguments."""

    index: int
    is_argument: bool = False


@dataclass
class SubgraphCall:
    """One call of a module or function.

    `first_same` has, for each leaf, the first leaf that is the same tensor. `positions` are those of the distinct
    tensors. `key_arguments` are the arguments as the key sees them, with classes in place of objects that calls may
    change. `has_objects` is true if there are such objects.
    """

    key: Any
    walk: EqualityWalk
    leaves: list[Any]
    first_same: list[int]
    positions: list[int]
    tree: Any
    arguments: Any
    key_arguments: Any
    has_objects: bool
    gradients_on: bool

    @staticmethod
    def create(owner: Any, args: Any, kwargs: Any) -> SubgraphCall | None:
        """Reads a call of `owner`; returns None if its arguments cannot be part of a key."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        others = {i for i, x in enumerate(leaves) if not isinstance(x, Tensor | nn.Module) and not is_value(x)}
        if any(map(is_traced_number, leaves)) or not all(is_user_object(leaves[i]) for i in others):
            return None
        arguments = key_arguments = args, kwargs
        if others:
            if transforms():
                return None
            key_arguments = pytree.tree_unflatten([type(x) if i in others else x for i, x in enumerate(leaves)], tree)
        walk = EqualityWalk(frozenset())
        facts = walk.read(owner, key_arguments, REACHED)
        if walk.opaque:
            return None
        leaf_facts: list[Any] = [(type(x), repr(x)) for x in leaves if type(x) in PLAIN]
        first: dict[int, int] = {}
        first_same = [first.setdefault(id(x), i) if isinstance(x, Tensor) else -1 for i, x in enumerate(leaves)]
        numbers = {id(x): i for i, x in enumerate(walk.tensors)}
        leaf_facts.append(tuple(first_same))
        leaf_facts += [numbers.get(id(x)) for x in leaves]
        positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and first_same[i] == i]
        key = (facts, tuple(leaf_facts), tree, tuple(others), ambient(StateWalk()))
        try:
            hash(key)
        except TypeError:
            return None
        has_objects, gradients_on = bool(others), torch.is_grad_enabled()
        return SubgraphCall(
            key, walk, leaves, first_same, positions, tree, arguments, key_arguments, has_objects, gradients_on
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.positions]


def emit_copy(subgraph: Subgraph, call: SubgraphCall) -> Any:
    """Writes a copy of a subgraph for a call; returns the result."""
    body = subgraph.body
    captured = [x if i is None else call.walk.tensors[i] for x, i in zip(body.captured, subgraph.places, strict=True)]
    out = body(*call.tensors, captured=captured)
    results = [
        (call.leaves if x.is_argument else out)[x.index] if isinstance(x, ResultPosition) else x
        for x in subgraph.leaves
    ]
    return pytree.tree_unflatten(results, subgraph.tree)


def run_and_emit(subgraph: Subgraph, call: SubgraphCall, run: Callable[..., Any]) -> Any:
    """Runs the code of a call without its torch calls, and writes a copy of the subgraph for these."""
    body, record, (args, kwargs) = subgraph.body, subgraph.record, call.arguments
    assert record is not None
    with CallReplay(record, call.tensors) as replay:
        out = run(*args, **kwargs)
    if torch.is_grad_enabled() is not call.gradients_on:
        raise NotReusableError("it leaves another gradient mode")
    with torch.DisableTorchFunction():
        remaining = replay.end()
        captured = [x if i is None else replay.met[i]() for x, i in zip(body.captured, subgraph.places, strict=True)]
    body(*call.tensors, captured=captured, results=[remaining.get(i) for i in record.outputs])
    return out


def captured_position(x: Tensor, positions: dict[int, int]) -> int | None:
    """Returns the position of a captured tensor in the walk; None for one that is the same in every call."""
    if id(x) in positions:
        return positions[id(x)]
    if is_key(x) or not (isinstance(x, FakeTensor) or x.requires_grad):
        return None
    raise NotReusableError("it closes over a value of the surrounding trace")


def read_surroundings(owner: Any, arguments: Any, reached: CodeReadsCache) -> tuple[list[Any], EqualityWalk]:
    """Returns the facts and ids of everything that a call of `owner` can read, and the walk over it."""
    walk = EqualityWalk(None)
    facts = [*walk.read(owner, arguments, reached), *map(id, walk.tensors)]
    for x in walk.held:
        facts += [(k, id(y), list(map(id, y.values())) if isinstance(y, dict) else ()) for k, y in vars(x).items()]
    return facts, walk


def shows_all_changes(arguments: Any) -> bool:
    """Returns whether no argument has hidden state."""
    walk = EqualityWalk(None)
    read_arguments(arguments, [], [], walk)
    return not walk.unread


def take_snapshot(owner: Any, arguments: Any, reached: CodeReadsCache) -> Snapshot:
    """Records everything that a call of `owner` can read, by place."""
    snapshot = Snapshot()
    facts: list[Any] = []
    snapshot.visit_variable("self", owner, facts)
    read_arguments(arguments, [], facts, snapshot)
    read_reached_code(reached, None, snapshot, facts)
    return snapshot


def find_remaining_tensors(
    record: CallRecording, owner: Any, arguments: Any, out: Any, reached: CodeReadsCache
) -> list[Tensor]:
    """Returns the tensors that a call created and that outlive it, in its result and in objects."""
    walk = EqualityWalk(None)
    leaves = pytree.tree_leaves(register_mappings(out))
    walk.read(owner, (arguments, leaves), reached)
    tensors = {id(x): x for x in (*leaves, *walk.tensors) if isinstance(x, Tensor)}
    remaining = {i: x for x in tensors.values() if (i := record.number(x)) in record.created}
    record.outputs = list(remaining)
    return list(remaining.values())


def container_ids(tree: Any) -> set[int]:
    """Returns the ids of the lists and dicts in a tree."""
    return {id(x) for _, x, _ in walk_tree(tree) if isinstance(x, list | dict)}


def refuse_shared_memory(body: Body, *, copied: bool) -> None:
    """Raises `NotReusableError` if a later write to a result could change another value with a history.

    A body that is always `copied` may return views of saved values, since a write to these is detected. A result
    without a gradient may then be a view of an input.
    """
    owners: set[fx.Node] = set()
    for i, node in enumerate(body.outputs):
        base = memory_owner(node)
        if copied and base in body.inputs and i not in body.differentiable:
            base = node
        elif base.op != "call_function" or (base is not node and base in body.saved_owners and not copied):
            raise NotReusableError("a result shares its memory")
        if base in owners:
            raise NotReusableError("two results share their memory")
        owners.add(base)
    if any(_depends_on_call(node) for node in (*body.forward, *body.backward)):
        raise NotReusableError("it reads numbers of the call, or draws from a generator of its own")


def _depends_on_call(node: fx.Node) -> bool:
    """Returns whether a node reads a number of the call, or a generator of the user's."""
    inside = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))
    numbers = any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in inside)
    own = node.target is torch.ops.shardlib.call_key.default and bool(node.args and node.args[0])
    return numbers or own or any("scalar" in x.meta for x in node.all_input_nodes)
