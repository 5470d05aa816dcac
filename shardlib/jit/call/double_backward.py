"""A call whose gradient is differentiated again: its function runs once more, inside a program that gives the
gradients, and has gradients itself.

So nothing is kept of a call that it does not hold anyway: its arguments as they were, and of buffers that it writes to
and computes with, the pieces that they had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardlib.compiler.passes.split_backward import Halves, gives, needs
from shardlib.compiler.program.steps import Compute, Var
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError, WrittenError
from shardlib.core.torch_private import MODULE_DICTS, preserved_versions, pytree, version_of
from shardlib.eager.placement_autograd import place_tracked
from shardlib.frontend.autograd_history import hooks_of
from shardlib.frontend.guards.flatten_call import Static, wrapped
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import autocast_of
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.execute import Entry
from shardlib.sharding.placement import FixedLayout
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap

_INSIDE = (
    "take the inner gradient inside: jit the function that calls the module, and "
    "torch.autograd.grad(..., create_graph=True) or sl.grad, and backward()"
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class How:
    """Which results have cotangents, by position, and under which autocast (device, dtype) the function ran."""

    results: tuple[int, ...]
    autocast: tuple[tuple[str, Any], ...]


def pull_of(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The gradients of `fn` by what is `wanted`, as a function."""

    def pull(args: Any, kwargs: Any, wanted: list[Tensor], cotangents: list[Tensor], how: How) -> list[Any]:
        with autocast(how.autocast):
            out = pytree.tree_leaves(fn(*args, **kwargs))
        results = [out[i] for i in how.results]
        return list(torch.autograd.grad(results, wanted, cotangents, create_graph=True, allow_unused=True))

    pull.__name__ = f"gradient_of_{name}"
    return pull


@contextmanager
def autocast(said: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in said:
            stack.enter_context(torch.autocast(device, dtype))
        yield


class Function(Protocol):
    """A jitted function whose calls run again: `pull` is the jitted `pull_of` it."""

    name: str
    static: frozenset[int | str]

    @property
    def pull(self) -> Any: ...

    def read_call(self, mesh: Any, programs: Any, state: State, args: Any, kwargs: Any) -> tuple[Any, list[Any]]: ...


@dataclass(frozen=True)
class Again:
    """How the calls of one program, under a `key`, run again; `tree` is the structure of their arguments, the first of
    which may be the `method`'s own object.

    `counted` are the leaves on which its results depend; of those that it writes to, `computed` are. `draws` are the
    numbers of the generators that it draws from. `names` are those of the tensors that it found beside its arguments.
    """

    function: Function
    programs: Any
    key: Any
    tree: Any
    method: bool
    entry: Entry
    counted: tuple[int, ...]
    computed: tuple[int, ...]
    draws: frozenset[int]
    names: tuple[str, ...] = ()

    @staticmethod
    def of(function: Function, call: Invocation | None, entry: Entry, halves: Halves) -> Again:
        """Those of a call, which is read by now; of none, no call runs again."""
        known = (*depended_on(entry, halves), generators_of(halves))
        if call is None:
            return Again(function, None, None, None, False, entry, *known)
        tree = pytree.tree_structure(wrapped(call.args, call.kwargs, function.static))
        found = call.state.own is not None, entry, *known, tuple(call.state.names)
        return Again(function, call.programs, call.key, tree, *found)

    def note(self, leaves: list[Any]) -> Noted:
        """What of a call will be needed, before it runs."""
        before = {}
        for leaf in self.computed:
            x = leaves[leaf]
            before[leaf] = wrap(x._form, x._locals) if type(x) is ShardedTensor else x.detach().clone()
        return Noted(leaves, before, torch.get_rng_state() if self.draws else None)

    def gradients(
        self, noted: Noted, wanted: Sequence[int], cotangents: Mapping[int, Any], called: Sequence[str]
    ) -> list[Any]:
        """The gradients by the leaves that are `wanted`, with a history; `called` is what they are called."""
        what = f"the gradient of {self.function.name} is differentiated again (create_graph=True)"
        leaves = noted.leaves
        with self._as_found(leaves):
            self._refuse(what, leaves, noted, called)
            return self._differentiated(noted, wanted, cotangents)

    def _differentiated(self, noted: Noted, wanted: Sequence[int], cotangents: Mapping[int, Any]) -> list[Any]:
        leaves = noted.leaves
        args: list[Any] = list(leaves[: self.tree.num_leaves])
        for given in self.entry.inputs:
            if given.leaf < len(args) and type(x := args[given.leaf]) is not ShardedTensor:
                alias = x.view_as(x) if x.requires_grad else x
                args[given.leaf] = place_tracked(alias, FixedLayout.at(given.layout), self.entry.mesh)
        by = [args[i] if i < len(args) else leaves[i] for i in wanted]
        how = How(tuple(cotangents), autocast_of(self.key[1]))
        with self._as_then(noted, leaves), _without_hooks(leaves[i] for i in wanted):
            found = self.function.pull(*self._arguments(args), by, list(cotangents.values()), how)
        return [
            x.full_tensor() if isinstance(x, ShardedTensor) and type(leaves[i]) is not ShardedTensor else x
            for x, i in zip(found, wanted, strict=True)
        ]

    def _arguments(self, leaves: Sequence[Any]) -> Arguments:
        args, kwargs = pytree.tree_unflatten(list(leaves), self.tree)
        args = tuple(x.value if isinstance(x, Static) else x for x in args)
        return args, {k: x.value if isinstance(x, Static) else x for k, x in kwargs.items()}

    def _refuse(self, what: str, leaves: list[Any], noted: Noted, called: Sequence[str]) -> None:
        after = self.entry.after
        if self.key is None or after.rebound or after.grads or after.data or after.takes or self.draws - {0}:
            why = (
                "draws from generators of its own" if self.draws - {0} else "changes more than tensors that it is given"
            )
            raise ShardingError(what, [*called], rule=f"it runs again for that, and it {why}", remedy=_INSIDE)
        names = {given.leaf: given.name for given in self.entry.inputs}
        wrong = [
            f"{names[i]}, {typeof(x)}, is at version {version_of(x)}; expected version {version} instead"
            for i, version in noted.versions.items()
            if version_of(x := leaves[i]) != version
        ]
        if wrong:
            raise WrittenError(
                f"{what}, and what it was called with has been modified by an inplace operation",
                wrong,
                rule="a call runs again for its second derivative, with what it was given",
                remedy="write to it after backward(), as optimizer.step() does; or call again",
            )
        if not self._is_same(leaves):
            raise ShardingError(
                f"{what}, but it would be another call now",
                [*called],
                rule="a call runs again for its second derivative: flags, modes and modules are as they were",
                remedy=f"change train(), eval() and requires_grad, and call zero_grad(), after it; or {_INSIDE}",
            )

    @contextmanager
    def _as_then(self, noted: Noted, leaves: list[Any]) -> Iterator[None]:
        """What the call wrote to, and what it drew from, is as it was before it, and then as it is now again."""
        written = {leaf: leaves[leaf] for leaf, _ in self.entry.after.written}
        now = {leaf: x.detach().clone() for leaf, x in written.items()}
        generator = torch.get_rng_state()
        with preserved_versions(tuple(written.values())):
            _write(written, noted.before)
            if noted.generator is not None:
                torch.set_rng_state(noted.generator)
            try:
                yield
            finally:
                _write(written, now)
                torch.set_rng_state(generator)

    @contextmanager
    def _as_found(self, leaves: list[Any]) -> Iterator[None]:
        """Modules hold the parameters and buffers that the call found: `functional_call` has given theirs back."""
        if self.key is None or self._is_same(leaves):
            yield
            return
        state = self._read(leaves)[0]
        then = dict(zip(self.names, leaves[self.tree.num_leaves :], strict=False))
        others = {id(x): then[name] for name, x in zip(state.names, state.tensors, strict=True) if name in then}
        modules = [x for x in (*state.kept, state.own) if isinstance(x, nn.Module)]
        dicts: list[dict[str, Any]] = [found for x in modules for found in (getattr(x, k) for k in MODULE_DICTS[:2])]
        before = [(held, k, x) for held in dicts for k, x in held.items() if others.get(id(x), x) is not x]
        try:
            for held, k, x in before:
                held[k] = others[id(x)]
            yield
        finally:
            for held, k, x in before:
                held[k] = x

    def _read(self, leaves: list[Any]) -> tuple[State, Any, list[Any]]:
        """What a call with these arguments would find now; its key, and its leaves."""
        given = self._arguments(list(leaves[: self.tree.num_leaves]))
        state = State(given[0][0] if self.method else None, self.programs.changing)
        return state, *self.function.read_call(self.entry.mesh, self.programs, state, *given)

    def _is_same(self, leaves: list[Any]) -> bool:
        """Whether a call with these arguments is the same one still; `.grad` may have come since, or gone."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        for around in (None, tensors):
            with _without_grads(around or ()), autocast(autocast_of(self.key[1])):
                _, key, found = self._read(leaves)
            if key == self.key and len(found) <= len(leaves):
                return all(
                    found[i] is leaves[i] if isinstance(leaves[i], Tensor) else found[i] == leaves[i]
                    for i in self.counted
                    if i < len(found)
                )
        return False


class Noted:
    """One call: its leaves, values from `before` it, and the state of the generator."""

    def __init__(self, leaves: list[Any], before: dict[int, Tensor], generator: Tensor | None) -> None:
        self.leaves, self.before, self.generator = leaves, before, generator
        self.versions: dict[int, int] = {}

    def finish(self, counted: Sequence[int]) -> None:
        """After it ran."""
        tensors = ((i, x) for i in counted if isinstance(x := self.leaves[i], Tensor))
        self.versions = {i: version_of(x) for i, x in tensors if not x.is_inference()}


def _write(tensors: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
    with torch.no_grad():
        for leaf, value in values.items():
            tensors[leaf].copy_(value)


def depended_on(entry: Entry, halves: Halves) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leaves that a program reads, but those that only become values of what it writes; and of all that it writes
    to, those among them."""
    program = halves.joint
    first = entry.own if not entry.after.written else min(at for _, at in entry.after.written)
    last = len(entry.outputs)
    wanted = {v for i, v in enumerate(program.outputs) if isinstance(v, Var) and not first <= i < last}
    for step in reversed(program.steps):
        if not wanted.isdisjoint(gives(step)):
            wanted |= {*needs(step)}
    counted = tuple(
        x.leaf for x, var in zip(entry.inputs, program.inputs, strict=False) if var in wanted and x.leaf >= 0
    )
    written = {leaf for leaf, _ in entry.after.written}
    return tuple(i for i in counted if i not in written), tuple(i for i in counted if i in written)


def generators_of(halves: Halves) -> frozenset[int]:
    """The numbers of the generators from which a program draws its keys; 0 is torch's own."""
    calls = (s for s in halves.joint.steps if isinstance(s, Compute) and has_trait(s.target, "draws_key"))
    return frozenset(int(s.args[0]) if s.args else 0 for s in calls)


@contextmanager
def _without_grads(tensors: Sequence[Tensor]) -> Iterator[None]:
    grads = [(x, x.grad) for x in tensors if x.is_leaf and x.grad is not None]
    for x, _ in grads:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in grads:
            x.grad = grad


@contextmanager
def _without_hooks(tensors: Iterator[Tensor]) -> Iterator[None]:
    """Hooks run where gradients go on: outside."""
    hooks = [pair for x in tensors for pair in hooks_of(x).values()]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, held in hooks:
            own.update(held)
