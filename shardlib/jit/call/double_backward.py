"""Differentiates the gradient of a call again: its function runs once more, inside a differentiable program of the
gradients.

A call keeps only its arguments, and the former shards of buffers that it both reads and writes. The second run writes
into copies of tensors, which modules hold meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.passes.split_backward import Halves, gives, needs
from shardlib.compiler.program.steps import Compute, Var
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError, WrittenError
from shardlib.core.torch_internals.torch_private import pytree, version_of
from shardlib.frontend.gradients.autograd_history import read_hooks
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.execute import Entry
from shardlib.jit.call.pure_call import PureCall, autocast
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof, wrap

_INSIDE = (
    "take the inner gradient inside: jit the function that calls the module, and "
    "torch.autograd.grad(..., create_graph=True) or sl.grad, and backward()"
)


@dataclass(frozen=True)
class SavedCall:
    """The leaves of one call, their versions, values from before it, and the state of torch's generator."""

    leaves: list[Any]
    versions: Mapping[int, int]
    before: Mapping[int, Tensor]
    generator: Tensor | None


@dataclass(frozen=True)
class Again:
    """Runs calls of one program of `fn` again, in a program of their gradients that `jit` makes.

    `read` returns the key and the leaves of the call with these arguments now, and `key` is the program's. The results
    depend on the leaves `counted`, and on `computed` ones, which the call also writes. `draws` are the numbers
    of its generators. Calls without a `pure` form cannot run again.
    """

    jit: Callable[..., Any]
    fn: Callable[..., Any]
    entry: Entry
    pure: PureCall | None
    read: Callable[..., tuple[Any, list[Any]]] | None
    key: Any
    counted: tuple[int, ...]
    computed: tuple[int, ...]
    draws: frozenset[int]

    @staticmethod
    def for_calls(
        jit: Callable[..., Any], fn: Callable[..., Any], call: Invocation | None, entry: Entry, halves: Halves
    ) -> Again:
        """Makes it for the calls like `call`."""
        facts = (*depended_on(entry, halves), generators_of(halves))
        if call is None or call.key is None:
            return Again(jit, fn, entry, None, None, None, *facts)
        function, mesh, programs, is_method = call.function, call.mesh, call.programs, call.state.own is not None

        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
            state = StateWalk(args[0] if is_method else None, programs.changing)
            return function.read_call(mesh, programs, state, args, kwargs)

        pure = PureCall.read(function, call.state, call.state.tensors, call.key[1], call.args, call.kwargs)
        return Again(jit, fn, entry, pure, read, call.key, *facts)

    @functools.cached_property
    def pullback(self) -> Any:
        """The program of a call's gradients, which has gradients of its own."""
        assert self.pure is not None, "the call is not refused"
        run = self.pure.as_function(self.fn)

        def pull(
            inputs: list[Any],
            held: list[Tensor],
            cotangents: list[Tensor],
            results: Sequence[int],
            wanted: Sequence[int],
        ) -> list[Any]:
            out, tensors = pytree.tree_leaves(run(inputs, held)), [*inputs, *held]
            roots, leaves = [out[i] for i in results], [tensors[i] for i in wanted]
            return list(torch.autograd.grad(roots, leaves, cotangents, create_graph=True, allow_unused=True))

        pull.__name__ = f"gradient_of_{self.pure.name}"
        return self.jit(pull, static_argnames=("results", "wanted"))

    def save(self, leaves: list[Any]) -> SavedCall:
        """Saves the data of a call that is about to run."""
        tensors = ((i, x) for i in self.counted if isinstance(x := leaves[i], Tensor))
        versions = {i: version_of(x) for i, x in tensors if not x.is_inference()}
        before = {i: _copied(leaves[i]) for i in self.computed}
        return SavedCall(leaves, versions, before, torch.get_rng_state() if self.draws else None)

    def gradients(
        self, saved: SavedCall, wanted: Sequence[int], cotangents: Mapping[int, Any], names: Sequence[str]
    ) -> list[Any]:
        """Returns the gradients of the leaves `wanted`, with a history; `names` are the gradients' names."""
        event = f"the gradient of {self.entry.name} is differentiated again (create_graph=True)"
        pure, after = self.pure, self.entry.after
        written = [leaf for leaf, _ in after.written]
        if pure is None or after.rebound or after.grads or after.data or after.takes or self.draws - {0}:
            why = (
                "draws from generators of its own" if self.draws - {0} else "changes more than tensors that it is given"
            )
            raise ShardingError(event, [*names], rule=f"it runs again for that, and it {why}", remedy=_INSIDE)
        self._refuse_written(event, saved)
        leaves = [*saved.leaves]
        for i in written:
            leaves[i] = saved.before[i] if i in saved.before else _copied(leaves[i])
        first = pure.tree.num_leaves
        inputs, held = [leaves[i] for i in pure.inputs], leaves[first : first + len(pure.places)]
        positions = [*pure.inputs, *range(first, first + len(held))]
        with pure.with_held(held):
            if not self._is_same(leaves, inputs):
                raise ShardingError(
                    f"{event}, but it would be another call now",
                    [*names],
                    rule="a call runs again for its second derivative: flags, modes and modules are as they were, and "
                    "only arguments and modules hold tensors that it writes",
                    remedy=f"change train(), eval() and requires_grad after it; or {_INSIDE}",
                )
            with _without_hooks([leaves[i] for i in wanted]), torch.random.fork_rng(devices=()):
                if saved.generator is not None:
                    torch.set_rng_state(saved.generator)
                results, at = tuple(cotangents), tuple(map(positions.index, wanted))
                gradients = self.pullback(inputs, held, list(cotangents.values()), results, at)
        return [
            x.full_tensor() if isinstance(x, ShardedTensor) and type(leaves[i]) is not ShardedTensor else x
            for x, i in zip(gradients, wanted, strict=True)
        ]

    def _refuse_written(self, event: str, saved: SavedCall) -> None:
        names = {x.leaf: x.name for x in self.entry.inputs}
        wrong = [
            f"{names[i]}, {typeof(x)}, is at version {version_of(x)}; expected version {version} instead"
            for i, version in saved.versions.items()
            if version_of(x := saved.leaves[i]) != version
        ]
        if wrong:
            raise WrittenError(
                f"{event}, and what it was called with has been modified by an inplace operation",
                wrong,
                rule="a call runs again for its second derivative, with what it was given",
                remedy="write to it after backward(), as optimizer.step() does; or call again",
            )

    def _is_same(self, leaves: list[Any], inputs: list[Any]) -> bool:
        """True if a call with these leaves, whose tensors modules hold now, would run the same program on them."""
        assert self.pure is not None, "the call is not refused"
        assert self.read is not None, "the call is not refused"
        with autocast(self.pure.autocasts):
            key, now = self.read(*self.pure.arguments(inputs))
        read = {*self.counted, *self.computed, *(leaf for leaf, _ in self.entry.after.written)}
        return bool(key == self.key) and all(
            now[i] is leaves[i] if isinstance(leaves[i], Tensor) else now[i] == leaves[i] for i in read if i < len(now)
        )


def _copied(x: Tensor) -> Tensor:
    """Returns a tensor whose values stay if `x` is written to; shards are copied when one of both is."""
    return wrap(x._form, x._locals) if type(x) is ShardedTensor else x.detach().clone().as_subclass(type(x))


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
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Removes hooks meanwhile: they run outside, on the final gradients."""
    hooks = [pair for x in tensors for pair in read_hooks(x).values()]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, held in hooks:
            own.update(held)
