"""One piece of a program as it was traced apart, and one call of such a piece: what is known of them, and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardlib.core.torch_private import FakeTensor, pytree, transforms
from shardlib.frontend.guards.closure import follow as follow_code
from shardlib.frontend.guards.code_refs import Reached
from shardlib.frontend.guards.flatten_call import read
from shardlib.frontend.guards.mappings import opened
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.guards.value_kinds import PLAIN, is_object
from shardlib.frontend.reuse.loop_replay import Body, NotOnceError, owner
from shardlib.frontend.reuse.module_equality import Alike, Read
from shardlib.frontend.reuse.replay_python import Following, Recording
from shardlib.frontend.side_effects.mutation_outputs import is_value
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.primitives.random.keys import is_key

REACHED = Reached()


@dataclass
class Piece:
    """One piece as it was traced: `reads` are the attributes of modules that its code looked at, `known` what they, and
    all else, were; `places` the tensors that it closes over, by their place in the walk."""

    known: Any
    reads: set[Read]
    body: Body
    places: list[int | None]
    tree: Any
    leaves: list[Any]  # of the result; a tensor stands as its position among the outputs
    record: Recording | None  # of one whose code runs in every call


@dataclass
class At:
    """Where a result stands among the outputs, or among the leaves of what is given."""

    position: int
    given: bool = False


@dataclass
class Call:
    """One call of a piece: its leaves, each with the first that is the same, and the positions of its tensors.

    `shown` is what it is given as the key knows it: of `objects`, which calls may change, what they are.
    """

    key: Any
    walk: Alike
    leaves: list[Any]
    same: list[int]
    where: list[int]
    tree: Any
    given: Any
    shown: Any
    objects: bool
    follows: bool  # whether gradients are on

    @staticmethod
    def of(of: Any, args: Any, kwargs: Any) -> Call | None:
        """None where something among the arguments is none of what a trace can name."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        others = {i for i, x in enumerate(leaves) if not isinstance(x, Tensor | nn.Module) and not is_value(x)}
        if any(map(is_given, leaves)) or not all(is_object(leaves[i]) for i in others):
            return None
        given = shown = args, kwargs
        if others:
            if transforms():
                return None
            shown = pytree.tree_unflatten([type(x) if i in others else x for i, x in enumerate(leaves)], tree)
        walk = Alike(frozenset())
        facts = walk.read(of, shown, REACHED)
        if walk.opaque:
            return None
        known: list[Any] = [(type(x), repr(x)) for x in leaves if type(x) in PLAIN]
        first: dict[int, int] = {}
        same = [first.setdefault(id(x), i) if isinstance(x, Tensor) else -1 for i, x in enumerate(leaves)]
        own = {id(x): i for i, x in enumerate(walk.tensors)}
        known.append(tuple(same))
        known += [own.get(id(x)) for x in leaves]
        where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and same[i] == i]
        key = (facts, tuple(known), tree, tuple(others), ambient(State()))
        try:
            hash(key)
        except TypeError:
            return None
        return Call(key, walk, leaves, same, where, tree, given, shown, bool(others), torch.is_grad_enabled())

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.where]


def again(piece: Piece, call: Call) -> Any:
    """Write a piece out for another call."""
    walk = call.walk
    captured = [x if at is None else walk.tensors[at] for x, at in zip(piece.body.captured, piece.places, strict=True)]
    out = piece.body(*call.tensors, captured=captured)
    results = [(call.leaves if x.given else out)[x.position] if isinstance(x, At) else x for x in piece.leaves]
    return pytree.tree_unflatten(results, piece.tree)


def follow(piece: Piece, call: Call, run: Callable[..., Any]) -> Any:
    """Run the code of another call, and write a piece out for what that asks of torch."""
    record, (args, kwargs) = piece.record, call.given
    assert record is not None
    with Following(record, call.tensors) as following:
        out = run(*args, **kwargs)
    if torch.is_grad_enabled() is not call.follows:
        raise NotOnceError("it leaves another gradient mode")
    with torch.DisableTorchFunction():
        left = following.end()
        captured = [
            x if at is None else following.met[at]() for x, at in zip(piece.body.captured, piece.places, strict=True)
        ]
    piece.body(*call.tensors, captured=captured, made=[left.get(at) for at in record.outputs])
    return out


def place(x: Tensor, at: dict[int, int]) -> int | None:
    """Where the walk has a tensor; None for one that is the same in every call."""
    if id(x) in at:
        return at[id(x)]
    if is_key(x) or not (isinstance(x, FakeTensor) or x.requires_grad):
        return None
    raise NotOnceError("it closes over a value of the trace around it")


def surroundings(of: Any, given: Any, reached: Reached) -> tuple[list[Any], Alike]:
    """All that a piece finds: facts, and which tensors; and the walk that found it."""
    walk = Alike(None)
    known = [*walk.read(of, given, reached), *map(id, walk.tensors)]
    for x in walk.held:
        known += [(k, id(y), list(map(id, y.values())) if isinstance(y, dict) else ()) for k, y in vars(x).items()]
    return known, walk


def shows_all(given: Any) -> bool:
    """Whether nothing in what a piece is given changes unseen."""
    walk = Alike(None)
    read(given, [], [], walk)
    return not walk.unread


def looked(of: Any, given: Any, reached: Reached) -> Snapshot:
    """All that a piece finds, with its places."""
    found = Snapshot()
    known: list[Any] = []
    found.named("self", of, known)
    read(given, [], known, found)
    follow_code(reached, None, found, known)
    return found


def left_behind(record: Recording, of: Any, given: Any, out: Any, reached: Reached) -> list[Tensor]:
    """The tensors that a piece has made, and that are there when it has run: its results, and those in objects."""
    walk = Alike(None)
    leaves = pytree.tree_leaves(opened(out))
    walk.read(of, (given, leaves), reached)
    found = {id(x): x for x in (*leaves, *walk.tensors) if isinstance(x, Tensor)}
    made = {at: x for x in found.values() if (at := record.number(x)) in record.made}
    record.outputs = list(made)
    return list(made.values())


def containers_in(tree: Any) -> set[int]:
    """The ids of lists and dicts, which somebody may write to."""
    if isinstance(tree, dict):
        return {id(tree)}.union(*map(containers_in, tree.values()))
    inner: set[int] = set().union(*map(containers_in, tree)) if isinstance(tree, list | tuple) else set()
    return inner | {id(tree)} if isinstance(tree, list) else inner


def refuse_shared(body: Body, *, copied: bool) -> None:
    """A result has memory of its own: what is written to it later is written to nothing else that has a history.

    Where a piece is always `copied`, it may show what is saved, as a write to it is found; and, without a gradient,
    what is given.
    """
    owners: set[fx.Node] = set()
    for i, node in enumerate(body.outputs):
        base = owner(node)
        if copied and base in body.inputs and i not in body.differentiable:
            base = node
        elif base.op != "call_function" or (base is not node and base in body.kept and not copied):
            raise NotOnceError("a result shares its memory")
        if base in owners:
            raise NotOnceError("two results share their memory")
        owners.add(base)
    if any(_is_of_others(node) for node in (*body.forward, *body.backward)):
        raise NotOnceError("it reads numbers of the call, or draws from a generator of its own")


def _is_of_others(node: fx.Node) -> bool:
    inside = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))
    numbers = any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in inside)
    own = node.target is torch.ops.shardlib.call_key.default and bool(node.args and node.args[0])
    return numbers or own or any("scalar" in x.meta for x in node.all_input_nodes)
