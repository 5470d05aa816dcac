"""Finds the values that a traced function binds outside itself; each call of its program binds its own there.

`self.running = 0.9 * self.running + x` gives an attribute another tensor. While the function is traced, that tensor is
a value of the trace. The tracker takes it away when the function ends, and each call of the program puts its own there.

The contract: a function may bind tensors, numbers, texts, flags, functions, and tuples, lists and dicts of these, to
attributes, closure variables, list items and dict values. It may append to lists and add keys to dicts. It may set
`.grad`, and step optimizers, schedulers and scalers. Every other change raises `SideEffectError` before anything runs,
and is undone (`refused_effects`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.mutable_places import Item, MutablePlaces, Place, enclosing_places
from shardlib.frontend.guards.number_inputs import NumberMode, is_traced_number
from shardlib.frontend.guards.state_walk import LENGTH, LONG, StateWalk
from shardlib.frontend.guards.value_kinds import CONTAINERS, PLAIN, holds_parameters
from shardlib.frontend.side_effects.containers import (
    ALL,
    APPENDED,
    FIXED,
    GONE,
    among,
    can_put,
    is_by_tensor,
    is_reordered,
    put,
    put_back,
    refill,
    tensor_of,
)
from shardlib.frontend.side_effects.leaks import Leak, forgotten
from shardlib.frontend.side_effects.mutation_outputs import MutationOutputs, changed_numbers, is_same
from shardlib.frontend.side_effects.mutation_values import Leaf, Mutation, Part, Rest, itself
from shardlib.frontend.side_effects.refused_effects import Effect, unsupported_effects
from shardlib.frontend.side_effects.snapshot import EMPTY, Snapshot
from shardlib.frontend.side_effects.substitute import Substitution


class MutationTracker:
    """Compares what a function holds before and after it is traced; `look` reads all of it."""

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self.look = look
        self.before = look()
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # what a trace runs the function in
        self.numbers: set[Place] = set()  # numbers that the function changes
        self.holders: dict[int, Any] = {}  # containers and tensors in which it changes something
        self.logs: dict[int, Any] = {}
        self._tuples: dict[Place, tuple[Any, ...]] = {}  # tuples with inputs in them
        self._leaf: dict[Place, int] = {}
        self._unsupported: dict[Place, Any] = {}  # new values that no call can bind again
        self._cut: Mapping[int, Any] = {}  # id of a stand-in -> tensor, or tuple of tensors
        self._substitution = Substitution(self.before)  # puts the stand-ins into their holders
        self._after = self.before  # when the function had returned
        self._returned: set[Place | int] = set()  # places, and containers, that have got back what they had since
        self._late: dict[str, None] = {}
        self.is_still = False  # True if the function left everything unchanged

    def can_be_given(self, places: Iterable[Place]) -> set[Place]:
        """Returns the places, of some that hold numbers, in which another number can be put."""
        owners = self.before.owners
        return {place for place in places if place[0] in owners and can_put(owners[place[0]], place[1])}

    def give(self, numbers: NumberMode, first: int) -> None:
        """Puts inputs of the trace in place of the numbers that the function changes: leaves from `first` on."""
        for i, (place, (value, at)) in enumerate(self.before.numbers.items(), first):
            self._leaf[place] = i
            rate = place in self.before.changing.rates or isinstance(self.before.owners.get(place[0]), LRScheduler)
            number = numbers.wrap_leaf(i, self.before.name(at), value, rate=rate)
            if self.can_be_given([place]):
                self._give(place, number, i)
            elif is_traced_number(number):  # another object has this id now: the program serves this number alone
                number.specialize()

    def _give(self, place: Place, number: Any, leaf: int) -> None:
        owner, key = place
        if not isinstance(key, Item):
            put(self.before.owners[owner], key, number)
            return
        around = owner, key.key
        held = self.before.values[around]
        held = self._tuples.get(around, self._substitution.tuples.get(id(held), (held,))[0])
        if type(held) is list:
            held[key.index] = number
            self._leaf[id(held), key.index] = leaf
        else:
            self._tuples[around] = (*held[: key.index], number, *held[key.index + 1 :])
            self._give(around, self._tuples[around], leaf)

    @contextmanager
    def cut(self, state: StateWalk) -> Iterator[None]:
        """Replaces results of ops outside by leaves without history, wherever they are held, inside the context."""
        for i, x in enumerate(state.tensors):
            if x.is_leaf or x.retains_grad:
                continue
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
            leaf.__dict__.update({k: y for k, y in x.__dict__.items() if k not in leaf.__dict__})
            if self._substitution.put(x, leaf):
                state.tensors[i], state.cut = leaf, {**state.cut, id(leaf): x}
        self._cut = {**state.cut, **{id(stand_in): was for stand_in, was in self._substitution.tuples.values()}}
        try:
            yield
        finally:
            state.tensors[:] = [state.cut.get(id(x), x) for x in state.tensors]
            self._substitution.end(self.look().values if self._substitution.places else {})
            state.cut = {}

    def take_back(self, *, gone_back: bool = False) -> None:
        """Gives the holders of the numbers that are inputs what they had."""
        if gone_back:
            self._note_late()
        before = self.before
        for owner, key in self.can_be_given(before.numbers):
            held: Any = None
            while isinstance(key, Item) and type(held) is not list:
                key, held = key.key, before.values[owner, key.key]
            if type(held) is list:
                refill(held, before.copies[id(held)])
            else:
                put_back(before.owners[owner], (owner, key), before)
        self._tuples.clear()

    def leaves(self, now: Snapshot) -> bool:
        """Returns whether the state `now` needs no undoing, and teaches nothing new."""
        if self.numbers or self.holders or self.logs:
            return False
        if not (self.before.numbers or now.leaks or now.caches):
            return True
        return now.is_like(self.before) and not [*self.changes(now)] and not self.logs

    def undo(self, now: Snapshot) -> list[Leak]:
        """Takes values of the trace away from the objects that hold one `now`; returns those that no cache held."""
        self.take_back()
        return forgotten(self.before, now)

    def restore(self) -> None:
        """Gives every place what it had, as if the function had not run."""
        self._unsupported = {}
        self.undo(self.look())
        before, after = self.before, self.look()
        for number, items in before.copies.items():
            refill(before.owners[number], items)
        for place in before.values | after.values:
            had, has = before.values.get(place, GONE), after.values.get(place, GONE)
            mine = place[0] in before.owners and place[0] not in before.copies and place[0] in after.owners
            if mine and not isinstance(place[1], Item) and not is_same(had, has):
                put_back(before.owners[place[0]], place, before)
        self._substitution.again()  # it is traced again

    def learn(self, changing: MutablePlaces) -> bool:
        """Notes what the function changes; returns whether the program is right.

        A number that the function changes is an input. The function is traced again for each new one.
        """
        if is_new := not self.numbers <= changing.numbers:
            self.restore()
        changing.add(self.numbers, self.holders, self.logs)
        return not is_new

    def unsupported(self, after: Snapshot) -> list[Effect]:
        """Returns the changes that no call can repeat; `after` is read when all others are undone."""
        return unsupported_effects(self.before, after, self._unsupported, self.logs)

    def rebound(
        self,
        own: Mapping[int, int],
        memory: Mapping[int, tuple[int, Any, Tensor]],
        results: list[Any],
        names: list[str],
        is_traced: Callable[[Any], bool],
    ) -> list[Mutation]:
        """Returns the places that hold other values now, and gives them back what they had.

        Numbers that are inputs stay until `take_back`. New tensors join `results`. `own` are the leaves of the call's
        tensors, by id. `memory` are the leaves whose views can be made again, by storage, each with its tensor and the
        stand-in.
        """
        before, after = self.before, self.look()
        self._after, self._returned, self._late = after, set(), {}
        self.numbers, self.holders, self.logs, self._unsupported = set(), {}, {}, {}
        joined = MutationOutputs(before, after, own, memory, results, names, is_traced)
        mutations: list[Mutation] = []
        places: dict[int, int] = {}  # of values that were made
        parts: list[Part | None]
        for place, owner, value, old in self.changes(after):
            if value is GONE or type(value) in PLAIN:
                tree, parts = _LEAF, [Rest(value)]
            else:
                leaves, tree = pytree.tree_flatten(value, is_leaf=self._was_there)
                olds, was = pytree.tree_flatten(old, is_leaf=self._was_there)
                olds = olds if was == tree else [None] * len(leaves)
                named = place if place in after.called else (place[0], LENGTH)
                parameter = tensor_of(owner, place[1]) if is_by_tensor(place[1]) else None
                parts = [
                    Rest(x) if self._was_there(x) else joined.part(x, o, named, parameter)
                    for x, o in zip(leaves, olds, strict=True)
                ]
                # Containers that were there have another place now.
                self.holders.update({id(x): x for x in leaves if self._was_there(x) and id(x) in before.copies})
            key, is_known = place[1], True
            if is_by_tensor(key):
                tensor = tensor_of(owner, key)
                is_known = tensor is not GONE and id(tensor) in own and self._is_state(owner)
                key = key[0], Leaf(own.get(id(tensor), -1))
            if None in parts or not is_known:
                self._unsupported[place] = value
                continue
            if isinstance(owner, CONTAINERS + (Tensor,)) and not _is_global(owner) and key is not APPENDED:
                self.holders[id(owner)] = owner
            self.numbers.update(changed_numbers(place, old, value))
            refer = weakref.ref(owner) if owner is before.own else functools.partial(itself, owner)
            is_of_items = key in (ALL, APPENDED)
            same = places.setdefault(id(value), len(mutations)) if not is_of_items else len(mutations)
            same = same if same < len(mutations) else -1
            mutations.append(Mutation(refer, key, among(owner, place[1]), tree, tuple(filter(None, parts)), same))
            if place not in before.numbers and place not in self._tuples:  # these are read on the way back, too
                put_back(owner, place, before)
                self._returned.add(place[0] if is_of_items else place)
        for number, items in before.copies.items():
            if number not in after.owners:  # a container that another one stands for now: it is there again
                refill(before.owners[number], items)
        self.is_still = not (mutations or self._unsupported or self.logs) and after.is_like(self.before)
        return mutations

    def _was_there(self, x: Any) -> bool:
        """Returns whether an object, but for a tensor, was reached before the function ran."""
        return self.before.owners.get(id(x)) is x and not isinstance(x, Tensor)

    def _is_state(self, owner: Any) -> bool:
        """Returns whether a dict is the state of an optimizer, whose keys are parameters."""
        return any(isinstance(self.before.owners.get(at), Optimizer) for at, _ in self.before.places_of(owner))

    def _note_late(self) -> None:
        """Notes which numbers that are inputs the backward pass through the results has changed."""
        if self.before.numbers:
            now, then = self.look(), self._after
            self._late |= {
                then.text(place): None
                for place in self.before.numbers
                if place in then.called and now.values.get(place) is not then.values[place]
                if self._returned.isdisjoint(enclosing_places(place))  # else its holder is as it was
            }

    def late(self, left: Snapshot) -> list[str]:
        """Returns the names of the places that changed after the function had returned.

        A hook or a custom gradient of the backward pass changed them; or another thread did.
        """
        then, self._after = self._after, self.before  # which holds values of the trace
        for place, now in left.changed(self.before).items():
            if not self._returned.isdisjoint((place, place[0])) or then.found.get(place) != now:
                self._late[left.text(place)] = None
        return [*self._late]

    def changes(self, after: Snapshot) -> Iterator[tuple[Place, Any, Any, Any]]:
        """Yields the supported changes: the place, its holder, the new value, the old one."""
        before, whole = self.before, set()
        for number, items in before.copies.items():
            owner = before.owners[number]
            if type(owner) in EMPTY and not items and not owner:  # modules have many
                continue
            if number not in after.owners:
                continue
            if isinstance(owner, list) and len(owner) > len(items):
                whole.add(number)
                if after.is_log(number) and all(x is y for x, y in zip(owner, items, strict=False)):
                    self.logs[number] = owner
                    yield (number, APPENDED), owner, owner[len(items) :], ()
                else:
                    yield (number, ALL), owner, list(owner), items
            elif not isinstance(owner, list | dict) or (len(items) > LONG and not holds_parameters(items)):
                whole.add(number)  # its items are no places
            elif is_reordered(owner, items) if isinstance(owner, dict) else len(owner) < len(items):
                whole.add(number)
        places = [place for place, old in before.values.items() if after.values.get(place, GONE) is not old]
        for place in (*places, *(place for place in after.values if place not in before.values)):
            number, key = place
            if (number in whole and not isinstance(key, str)) or key is LENGTH or isinstance(key, Item):
                continue
            if number not in before.owners or number not in after.owners:
                continue
            owner, old, value = before.owners[number], before.values.get(place, GONE), after.values.get(place, GONE)
            if is_same(value, old) or isinstance(owner, FIXED):
                continue
            stands = id(value) in self._cut and self._cut[id(value)] is old
            if stands or (place in self._tuples and value is self._tuples[place]):
                continue
            if is_traced_number(value) and value.scalar.op is None and value.scalar.leaf == self._leaf.get(place):
                continue
            if isinstance(owner, dict) and not isinstance(key, tuple | str):
                continue
            yield place, owner, value, old


def _is_global(owner: Any) -> bool:
    return isinstance(owner, dict) and "__builtins__" in owner


_LEAF = pytree.tree_structure(0)
