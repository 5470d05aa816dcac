"""What a traced function leaves where it was found: other values become results of the program, and are put there.

`self.running = 0.9 * self.running + x` gives an attribute another tensor. While it is traced, that is a value of the
trace: it is taken away again when the function ends, and each call of the program puts its own there. The same holds
for numbers, flags, functions and whatever else is a value, for tuples, lists and dicts of such, for items of dicts and
lists, and for what is appended. An effect of another kind (a new object, a write to a numpy array) is that of the trace
alone: no program can repeat it, so none is kept, and each such call is traced.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.frontend.guards.number_inputs import Numbers, is_given
from shardlib.frontend.guards.object_state import LENGTH, LONG, State
from shardlib.frontend.guards.value_kinds import CONTAINERS, PLAIN
from shardlib.frontend.side_effects.compare_values import changed_numbers, is_reordered, is_same
from shardlib.frontend.side_effects.containers import (
    ALL,
    FIXED,
    GONE,
    among,
    can_put,
    is_by_tensor,
    is_refilled,
    put,
    put_back,
    refill,
    tensor_of,
)
from shardlib.frontend.side_effects.leaks import Leak, forgotten
from shardlib.frontend.side_effects.mutable_places import Changing, Item, Place, containing
from shardlib.frontend.side_effects.mutation_outputs import MutationOutputs
from shardlib.frontend.side_effects.mutation_values import Leaf, Mutation, Part, Rest, itself
from shardlib.frontend.side_effects.snapshot import EMPTY, Snapshot
from shardlib.frontend.side_effects.substitute import Substitution


class MutationTracker:
    """Compares what a function holds before and after it is traced; `look` reads all of it."""

    def __init__(self, look: Callable[[], Snapshot]) -> None:
        self.look = look
        self.before = look()
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # what a trace runs the function in
        self.numbers: set[Place] = set()  # that the function changes; and the holders in which it changes something
        self.holders: dict[int, Any] = {}
        self.logs: dict[int, Any] = {}
        self._leaf: dict[Place, int] = {}
        self._tuples: dict[Place, tuple[Any, ...]] = {}  # with such numbers in them
        self._left: set[Place] = set()  # whose new values stay as the trace leaves them
        self._cut: Mapping[int, Any] = {}  # what stands for tensors, and for tuples of them, by ids
        self._standing = Substitution(self.before)  # where such a tensor, or tuple, is held
        self._after = self.before  # when the function had returned
        self._returned: set[Place | int] = set()  # places, and containers, that have got back what they had since
        self._late: dict[str, None] = {}
        self.is_still = False  # whether nothing was another when the function had returned

    def can_be_given(self, places: Iterable[Place]) -> set[Place]:
        """Those of some places of numbers in which another one can be put."""
        owners = self.before.owners
        return {place for place in places if place[0] in owners and can_put(owners[place[0]], place[1])}

    def give(self, numbers: Numbers, first: int) -> None:
        """While the function is traced, the numbers that it changes are inputs: leaves from `first` on."""
        for i, (place, (value, at)) in enumerate(self.before.numbers.items(), first):
            self._leaf[place] = i
            rate = place in self.before.changing.rates or isinstance(self.before.owners.get(place[0]), LRScheduler)
            given = numbers.give(i, self.before.name(at), value, rate=rate)
            if self.can_be_given([place]):
                self._give(place, given, i)
            elif is_given(given):  # something else has this id by now: the program is for its number
                given.look()

    def _give(self, place: Place, given: Any, leaf: int) -> None:
        owner, key = place
        if not isinstance(key, Item):
            put(self.before.owners[owner], key, given)
            return
        around = owner, key.key
        held = self.before.values[around]
        held = self._tuples.get(around, self._standing.tuples.get(id(held), (held,))[0])
        if type(held) is list:
            held[key.index] = given
            self._leaf[id(held), key.index] = leaf
        else:
            self._tuples[around] = (*held[: key.index], given, *held[key.index + 1 :])
            self._give(around, self._tuples[around], leaf)

    @contextmanager
    def cut(self, state: State) -> Iterator[None]:
        """Tensors that come from ops outside are leaves inside, in all places: their history is none of the trace's."""
        for i, x in enumerate(state.tensors):
            if x.is_leaf or x.retains_grad:
                continue
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
            leaf.__dict__.update({k: y for k, y in x.__dict__.items() if k not in leaf.__dict__})
            if self._standing.put(x, leaf):
                state.tensors[i], state.cut = leaf, {**state.cut, id(leaf): x}
        self._cut = {**state.cut, **{id(made): was for made, was in self._standing.tuples.values()}}
        try:
            yield
        finally:
            state.tensors[:] = [state.cut.get(id(x), x) for x in state.tensors]
            self._standing.end(self.look().values if self._standing.places else {})
            state.cut = {}

    def take_back(self, *, gone_back: bool = False) -> None:
        """Give the holders of such numbers what they had, but what no program can repeat stays."""
        if gone_back:
            self._note_late()
        before = self.before
        for owner, key in self.can_be_given(before.numbers.keys() - self._left):
            held: Any = None
            while isinstance(key, Item) and type(held) is not list:
                key, held = key.key, before.values[owner, key.key]
            if type(held) is list:
                refill(held, before.copies[id(held)])
            elif (owner, key) not in self._left:
                put_back(before.owners[owner], (owner, key), before)
        self._tuples.clear()

    def leaves(self, now: Snapshot) -> bool:
        """Whether what is there `now` stays, to be read as before: nothing is undone, and nothing new is learnt."""
        if self.numbers or self.holders or self.logs:
            return False
        if not (self.before.numbers or now.leaks or now.caches):
            return True
        return now.is_like(self.before) and not [*self.changes(now)] and not self.logs

    def undo(self, now: Snapshot) -> list[Leak]:
        """Take values of the trace away from whoever holds one `now`; returns those that nobody may have kept."""
        self.take_back()
        return forgotten(self.before, now)

    def restore(self) -> None:
        """Give every place back what it had, as if the function had not run."""
        self._left = set()
        self.undo(self.look())
        before, after = self.before, self.look()
        for number, items in before.copies.items():
            refill(before.owners[number], items)
        for place in before.values | after.values:
            had, has = before.values.get(place, GONE), after.values.get(place, GONE)
            mine = place[0] in before.owners and place[0] not in before.copies and place[0] in after.owners
            if mine and not isinstance(place[1], Item) and not is_same(had, has):
                put_back(before.owners[place[0]], place, before)
        self._standing.again()  # it is traced again

    def learn(self, changing: Changing) -> bool:
        """Note what the function changes; whether the program is right: a number that it changes is an input, so with
        a new one it is to be traced again."""
        if is_new := not self.numbers <= changing.numbers:
            self.restore()
        changing.add(self.numbers, self.holders, self.logs)
        return not is_new

    def unrepeated(self, after: Snapshot) -> list[str]:
        """What the trace itself has changed, and no program can; `after` is what is there now."""
        return list(dict.fromkeys(after.text(place) for place in after.changed(self.before)))

    def is_moved(self, name: str, before: State, after: State) -> bool:
        """Whether the function leaves the tensors that a call finds in another order.

        Refuses one that takes some of them away, or adds some, in a way that no call can repeat.
        """
        if [*map(id, before.tensors)] == [*map(id, after.tensors)]:
            return False
        was, now = ({id(x): at for x, at in zip(s.tensors, s.names, strict=True)} for s in (before, after))
        if was.keys() != now.keys():
            self.restore()
            raise ShardingError(
                f"{name} moves tensors that it finds in objects or containers",
                [f"{at} is gone" for i, at in was.items() if i not in now]
                + [f"{at} is new" for i, at in now.items() if i not in was],
                rule="a jitted function runs once, and is then a program of the tensors that it found",
                remedy="hold them in attributes, lists and dicts, which each call changes; or pass them as arguments",
            )
        return True

    def rebound(
        self,
        own: Mapping[int, int],
        memory: Mapping[int, tuple[int, Any, Tensor]],
        results: list[Any],
        names: list[str],
        is_traced: Callable[[Any], bool],
    ) -> list[Mutation]:
        """The places that hold other values now; they get back what they had.

        Numbers that are inputs stay until `take_back`. New tensors join `results`; `own` are the leaves of the call's
        tensors by their ids, and `memory` those whose views can be made again, by their storages, each with the tensor
        and what stands for it.
        """
        before, after = self.before, self.look()
        self._after, self._returned, self._late = after, set(), {}
        self.numbers, self.holders, self.logs = set(), {}, {}
        joined = MutationOutputs(before, after, own, memory, results, names, is_traced)
        found: list[Mutation] = []
        places: dict[int, int] = {}  # of values that were made
        parts: list[Part | None]
        for place, owner, value, old in self.changes(after):
            is_there = before.owners.get(id(value)) is value and not isinstance(value, Tensor)
            if value is GONE or type(value) in PLAIN or is_there:
                tree, parts = _LEAF, [Rest(value)]
                if id(value) in before.copies:  # one that was there has another place now
                    self.holders[id(value)] = value
            else:
                leaves, tree = pytree.tree_flatten(value)
                olds, was = pytree.tree_flatten(old)
                olds = olds if was == tree else [None] * len(leaves)
                named = place if place in after.called else (place[0], LENGTH)
                of = tensor_of(owner, place[1]) if is_by_tensor(place[1]) else None
                parts = [joined.part(x, o, named, of) for x, o in zip(leaves, olds, strict=True)]
            key, is_known = place[1], True
            if is_by_tensor(key):
                is_known = (of := tensor_of(owner, key)) is not GONE and id(of) in own
                key = key[0], Leaf(own.get(id(of), -1))
            if None in parts or not is_known:  # it stays as the trace leaves it
                self._left.add(place)
                continue
            if isinstance(owner, CONTAINERS + (Tensor,)) and not _is_global(owner):
                self.holders[id(owner)] = owner
            self.numbers.update(changed_numbers(place, old, value))
            refer = weakref.ref(owner) if owner is before.own else functools.partial(itself, owner)
            same = places.setdefault(id(value), len(found)) if place[1] is not ALL else len(found)
            same = same if same < len(found) else -1
            found.append(Mutation(refer, key, among(owner, place[1]), tree, tuple(filter(None, parts)), same))
            if place not in before.numbers and place not in self._tuples:  # these are read on the way back, too
                put_back(owner, place, before)
                self._returned.add(place[0] if place[1] is ALL else place)
        for number, items in before.copies.items():
            if number not in after.owners:  # a container that another one stands for now: it is there again
                refill(before.owners[number], items)
        self.is_still = not (found or self._left or self.logs) and after.is_like(self.before)
        return found

    def _note_late(self) -> None:
        """Note which numbers that are inputs the way back through the results has changed."""
        if self.before.numbers:
            now, then = self.look(), self._after
            self._late |= {
                then.text(place): None
                for place in self.before.numbers
                if place in then.called and now.values.get(place) is not then.values[place]
                if self._returned.isdisjoint(containing(place))  # else all that holds it is there again
            }

    def late(self, left: Snapshot) -> list[str]:
        """What is other now, in what the trace has `left`, than when the function returned: the way back through its
        results changed it, in a hook or a custom gradient."""
        then, self._after = self._after, self.before  # which holds values of the trace
        for place, now in left.changed(self.before).items():
            if not self._returned.isdisjoint((place, place[0])) or then.found.get(place) != now:
                self._late[left.text(place)] = None
        return [*self._late]

    def changes(self, after: Snapshot) -> Iterator[tuple[Place, Any, Any, Any]]:
        """The places that hold something else now: who holds it, what it is, and what was there."""
        before, whole = self.before, set()
        for number, items in before.copies.items():
            owner = before.owners[number]
            if type(owner) in EMPTY and not items and not owner:  # modules have many
                continue
            if number not in after.owners or not isinstance(owner, list | set | deque | dict):
                continue
            long = len(items) > LONG or len(owner) > LONG  # then its items are no places
            in_place = isinstance(owner, dict) or (isinstance(owner, list) and len(owner) == len(items))
            if long or not in_place or is_reordered(owner, items):
                whole.add(number)
                if after.is_log(number):
                    self.logs[number] = owner
                elif is_refilled(owner, items):
                    kind = dict if isinstance(owner, dict) else list
                    yield (number, ALL), owner, kind(owner), kind(items)
        places = [place for place, old in before.values.items() if after.values.get(place, GONE) is not old]
        for place in (*places, *(place for place in after.values if place not in before.values)):
            number, key = place
            if number in whole or key is LENGTH or isinstance(key, Item):
                continue
            if number not in before.owners or number not in after.owners:
                continue
            owner, old, value = before.owners[number], before.values.get(place, GONE), after.values.get(place, GONE)
            if is_same(value, old) or isinstance(owner, FIXED):
                continue
            stands = id(value) in self._cut and self._cut[id(value)] is old
            if stands or (place in self._tuples and value is self._tuples[place]):
                continue
            if is_given(value) and value.scalar.op is None and value.scalar.leaf == self._leaf.get(place):
                continue
            if isinstance(owner, dict) and not isinstance(key, tuple | str):
                continue
            yield place, owner, value, old


def _is_global(owner: Any) -> bool:
    return isinstance(owner, dict) and "__builtins__" in owner


_LEAF = pytree.tree_structure(0)
