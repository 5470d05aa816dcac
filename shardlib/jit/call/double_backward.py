"""Differentiates the gradient of a call again: its function runs once more, inside a differentiable program of the
gradients.

A call keeps only its arguments, and the former shards of buffers that it both reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardlib.compiler.passes.split_backward import Halves, gives, needs
from shardlib.compiler.program.steps import Compute, Var
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError, WrittenError
from shardlib.core.torch_internals.module_tensors import holding, module_tensors
from shardlib.core.torch_internals.torch_private import preserved_versions, pytree, version_of
from shardlib.eager.placement_autograd import place_tracked
from shardlib.frontend.gradients.autograd_history import read_hooks, without_grads
from shardlib.frontend.guards.flatten_call import Static, wrap_static
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import autocast_dtypes
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.execute import Entry
from shardlib.sharding.placement import FixedLayout
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap

if TYPE_CHECKING:
    from shardlib.jit.jit import Jitted

_INSIDE = (
    "take the inner gradient inside: jit the function that calls the module, and "
    "torch.autograd.grad(..., create_graph=True) or sl.grad, and backward()"
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class How:
    """The positions of results with cotangents, and the autocast (device, dtype) under which the function ran."""

    results: tuple[int, ...]
    autocast: tuple[tuple[str, Any], ...]


def pull_of(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Makes a function that returns the gradients of `fn` with respect to `wanted`."""

    def pull(args: Any, kwargs: Any, wanted: list[Tensor], cotangents: list[Tensor], how: How) -> list[Any]:
        with autocast(how.autocast):
            out = pytree.tree_leaves(fn(*args, **kwargs))
        results = [out[i] for i in how.results]
        return list(torch.autograd.grad(results, wanted, cotangents, create_graph=True, allow_unused=True))

    pull.__name__ = f"gradient_of_{name}"
    return pull


@contextmanager
def autocast(dtypes: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in dtypes:
            stack.enter_context(torch.autocast(device, dtype))
        yield


@dataclass(frozen=True)
class Again:
    """Runs calls of one program, under a `key`, again.

    `tree` is the structure of the arguments; for a `method` the first is its object. The results depend on the leaves
    `counted`, and on `computed` ones, which the call also writes. `draws` are the numbers of its generators. `names`
    are the names of tensors that it found beside its arguments.
    """

    function: Jitted
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
    def for_calls(function: Jitted, call: Invocation | None, entry: Entry, halves: Halves) -> Again:
        """Makes it for the calls like `call`; for None, calls cannot run again."""
        facts = (*depended_on(entry, halves), generators_of(halves))
        if call is None:
            return Again(function, None, None, None, False, entry, *facts)
        tree = pytree.tree_structure(wrap_static(call.args, call.kwargs, function.static))
        is_method, names = call.state.own is not None, tuple(call.state.names)
        return Again(function, call.programs, call.key, tree, is_method, entry, *facts, names)

    def note(self, leaves: list[Any]) -> Noted:
        """Saves the data of a call that is about to run."""
        before = {}
        for leaf in self.computed:
            x = leaves[leaf]
            before[leaf] = wrap(x._form, x._locals) if type(x) is ShardedTensor else x.detach().clone()
        return Noted(leaves, before, torch.get_rng_state() if self.draws else None)

    def gradients(
        self, noted: Noted, wanted: Sequence[int], cotangents: Mapping[int, Any], names: Sequence[str]
    ) -> list[Any]:
        """Returns the gradients of the leaves `wanted`, with a history; `names` are the gradients' names."""
        event = f"the gradient of {self.function.name} is differentiated again (create_graph=True)"
        leaves = noted.leaves
        with self._as_found(leaves):
            self._refuse(event, leaves, noted, names)
            return self._differentiated(noted, wanted, cotangents)

    def _differentiated(self, noted: Noted, wanted: Sequence[int], cotangents: Mapping[int, Any]) -> list[Any]:
        leaves = noted.leaves
        args: list[Any] = list(leaves[: self.tree.num_leaves])
        for entry_input in self.entry.inputs:
            leaf = entry_input.leaf
            if leaf < len(args) and type(x := args[leaf]) is not ShardedTensor:
                alias = x.view_as(x) if x.requires_grad else x
                args[leaf] = place_tracked(alias, FixedLayout.at(entry_input.layout), self.entry.mesh)
        by = [args[i] if i < len(args) else leaves[i] for i in wanted]
        how = How(tuple(cotangents), autocast_dtypes(self.key[1]))
        with self._as_then(noted, leaves), _without_hooks(leaves[i] for i in wanted):
            gradients = self.function.pull(*self._arguments(args), by, list(cotangents.values()), how)
        return [
            x.full_tensor() if isinstance(x, ShardedTensor) and type(leaves[i]) is not ShardedTensor else x
            for x, i in zip(gradients, wanted, strict=True)
        ]

    def _arguments(self, leaves: Sequence[Any]) -> Arguments:
        args, kwargs = pytree.tree_unflatten(list(leaves), self.tree)
        args = tuple(x.value if isinstance(x, Static) else x for x in args)
        return args, {k: x.value if isinstance(x, Static) else x for k, x in kwargs.items()}

    def _refuse(self, event: str, leaves: list[Any], noted: Noted, gradients: Sequence[str]) -> None:
        after = self.entry.after
        if self.key is None or after.rebound or after.grads or after.data or after.takes or self.draws - {0}:
            why = (
                "draws from generators of its own" if self.draws - {0} else "changes more than tensors that it is given"
            )
            raise ShardingError(event, [*gradients], rule=f"it runs again for that, and it {why}", remedy=_INSIDE)
        names = {x.leaf: x.name for x in self.entry.inputs}
        wrong = [
            f"{names[i]}, {typeof(x)}, is at version {version_of(x)}; expected version {version} instead"
            for i, version in noted.versions.items()
            if version_of(x := leaves[i]) != version
        ]
        if wrong:
            raise WrittenError(
                f"{event}, and what it was called with has been modified by an inplace operation",
                wrong,
                rule="a call runs again for its second derivative, with what it was given",
                remedy="write to it after backward(), as optimizer.step() does; or call again",
            )
        if not self._is_same(leaves):
            raise ShardingError(
                f"{event}, but it would be another call now",
                [*gradients],
                rule="a call runs again for its second derivative: flags, modes and modules are as they were",
                remedy=f"change train(), eval() and requires_grad, and call zero_grad(), after it; or {_INSIDE}",
            )

    @contextmanager
    def _as_then(self, noted: Noted, leaves: list[Any]) -> Iterator[None]:
        """Restores written tensors and the generator to their state before the call, and back afterwards."""
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
        """Puts the parameters and buffers that the call found into modules: `functional_call` has restored others."""
        if self.key is None or self._is_same(leaves):
            yield
            return
        state = self._read(leaves)[0]
        then = dict(zip(self.names, leaves[self.tree.num_leaves :], strict=False))
        others = {id(x): then[name] for name, x in zip(state.names, state.tensors, strict=True) if name in then}
        held = module_tensors((*state.kept, state.own))
        with holding((space, name, others[id(x)]) for space, name, x in held if id(x) in others):
            yield

    def _read(self, leaves: list[Any]) -> tuple[State, Any, list[Any]]:
        """Returns the state, the key and the leaves that a call with these arguments would have now."""
        args, kwargs = self._arguments(list(leaves[: self.tree.num_leaves]))
        state = State(args[0] if self.method else None, self.programs.changing)
        return state, *self.function.read_call(self.entry.mesh, self.programs, state, args, kwargs)

    def _is_same(self, leaves: list[Any]) -> bool:
        """True if a call with these arguments would be the same; `.grad` may have been set or cleared since."""
        with_grad = [x for x in leaves if isinstance(x, Tensor) and x.is_leaf and x.grad is not None]
        for hidden in ([], with_grad):
            with without_grads(hidden), autocast(autocast_dtypes(self.key[1])):
                _, key, now = self._read(leaves)
            if key == self.key and len(now) <= len(leaves):
                return all(
                    now[i] is leaves[i] if isinstance(leaves[i], Tensor) else now[i] == leaves[i]
                    for i in self.counted
                    if i < len(now)
                )
        return False


class Noted:
    """One call: its leaves, values from `before` it, and the state of the generator."""

    def __init__(self, leaves: list[Any], before: dict[int, Tensor], generator: Tensor | None) -> None:
        self.leaves, self.before, self.generator = leaves, before, generator
        self.versions: dict[int, int] = {}

    def finish(self, counted: Sequence[int]) -> None:
        """Notes versions after the call."""
        tensors = ((i, x) for i in counted if isinstance(x := self.leaves[i], Tensor))
        self.versions = {i: version_of(x) for i, x in tensors if not x.is_inference()}


def _write(tensors: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
    with torch.no_grad():
        for leaf, value in values.items():
            tensors[leaf].copy_(value)


def depended_on(entry: Entry, halves: Halves) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the leaves that a program's results depend on, without and with those that it also writes.

    A leaf whose value only goes into a written tensor does not count.
    """
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
    """Returns the numbers of the generators from which a program draws keys; 0 is torch's own."""
    calls = (s for s in halves.joint.steps if isinstance(s, Compute) and has_trait(s.target, "draws_key"))
    return frozenset(int(s.args[0]) if s.args else 0 for s in calls)


@contextmanager
def _without_hooks(tensors: Iterator[Tensor]) -> Iterator[None]:
    """Removes hooks meanwhile: they run outside, on the final gradients."""
    hooks = [pair for x in tensors for pair in read_hooks(x).values()]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, held in hooks:
            own.update(held)
