"""Runs a call several times, on one device and sharded, each time from the same state.

The run on one device has no ShardedTensors. Plain tensors with the same values replace them in the arguments and
wherever the function reaches one (in a module, an optimizer, a closure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import single_device
from shardlib.core.torch_internals.torch_private import IS_PARAMETER, pytree
from shardlib.frontend.gradients.autograd_history import AutogradState
from shardlib.frontend.guards.flatten_call import flatten_call, leaf_names
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.frontend.side_effects.substitute import Substitution
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.global_random import plain_program
from shardlib.jit.jit import Jitted
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes
from shardlib.testing.compare import Compared, compare

Run = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
GRAD = ".grad"
_ROUNDED_RUNS = 4  # each rounds other numbers up; a single run may miss those that matter for a small gradient


@dataclass(frozen=True)
class RunResult:
    """A run's return value, and the values of all tensors after it; tensors in `kept` got a history."""

    out: Any
    state: dict[str, Tensor | None]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Tolerance:
    """Tolerances of a comparison; `looser` multiplies default ones."""

    rtol: float | None
    atol: float | None
    looser: float

    def compare(self, root: str, expected: Any, actual: Any, names: Sequence[str] | None) -> list[Compared]:
        return compare(root, expected, actual, names=names, rtol=self.rtol, atol=self.atol, looser=self.looser)


class Reruns:
    """The state that a call may change, with its values before; `eps` belongs to the coarsest dtype in the program."""

    def __init__(self, step: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step, self.call = step, (args, kwargs)
        self.eps = 0.0
        self.tracker = MutationTracker(Invocation.read_new(step, step.programs, None, args, kwargs).look)
        self.reached = {id(x): x for x in self.tracker.before.tensors}  # tensors besides the arguments
        self.tensors = dict(self._named_tensors(args, kwargs, self.tracker.before))
        self.before = {name: copy_full(x) for name, x in self.tensors.items()}
        generators = [x for x in pytree.tree_leaves(self.call) if isinstance(x, torch.Generator)]
        self.generators = [(g, g.get_state()) for g in (*generators, *self.tracker.before.generators)]
        self.histories = [(x, AutogradState.read(x)) for x in self.tensors.values() if x is not None]
        self.stays: list[str] = []  # ShardedTensors in places that cannot hold plain tensors
        self.computed = {name for name, x in self.tensors.items() if x is not None and x.grad_fn is not None}

    @property
    def reaches_only_leaves(self) -> bool:
        """True if no reached tensor has a history, so that a backward pass stays inside the call."""
        return all(x.grad_fn is None for x in self.reached.values())

    def may_require_grad(self, x: Tensor) -> bool:
        """True if a copy of this argument can get the gradient; parameters and reached tensors keep their own."""
        is_own = id(x) in self.reached or isinstance(x, torch.nn.Parameter) or (x.is_leaf and x.requires_grad)
        return (x.is_floating_point() or x.is_complex()) and not is_own

    def run_sharded(self, run: Run, times: int = 1) -> RunResult:
        """Runs the call so many times; returns the last result."""
        return self._run(run, times, lambda: self.call)

    def run_on_one_device(self, run: Run, times: int = 1) -> RunResult:
        """Runs the call so many times on one device; returns the last result."""

        def run_plain(*args: Any, **kwargs: Any) -> Any:
            with single_device(), plain_program():
                return run(*args, **kwargs)

        return self._run(run_plain, times, self._plain_call)

    def run_rounded(self, run: Run, times: int = 1, seed: int = 0) -> RunResult:
        """Runs the call on one device with some input numbers rounded up; returns the last result."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, x in self.tensors.items():
                was = self.before[name]
                if was is not None and was.is_floating_point() and not x.is_inference() and not name.endswith(GRAD):
                    up = torch.rand(was.shape, generator=generator).to(was.device) < 0.5
                    eps = max(self.eps, torch.finfo(was.dtype).eps)
                    x.detach().copy_(torch.where(up, was * (1 + eps), was))
        return self.run_on_one_device(run, times)

    def compare(
        self,
        tolerance: Tolerance,
        root: str,
        names: Sequence[str] | None,
        plain_run: Run,
        expected: RunResult,
        run: Run,
        times: int = 1,
    ) -> list[Compared]:
        """Compares a sharded run with the `expected` result of `plain_run`.

        If they differ and no tolerance is given, `plain_run` runs again with rounded inputs.
        """
        actual = self.run_sharded(run, times)
        results = expected, actual
        changed = [
            name
            for name in expected.state | actual.state
            if not all(_equal(x.state.get(name), self.before.get(name)) for x in results)
        ]

        def compare_with(other: RunResult) -> list[Compared]:
            before, after = ([x.state.get(name) for name in changed] for x in (expected, other))
            outputs = tolerance.compare(root, expected.out, other.out, names)
            return outputs + tolerance.compare("", before, after, changed)

        compared = compare_with(actual)
        for seed in range(_ROUNDED_RUNS if tolerance.rtol is tolerance.atol is None else 0):
            if not any(leaf.fault for leaf in compared):
                break
            rounded = compare_with(self.run_rounded(plain_run, times, seed))
            compared = [leaf.allow_rounding(other.error) for leaf, other in zip(compared, rounded, strict=True)]
        return compared

    def _run(self, run: Run, times: int, make_call: Callable[[], Call]) -> RunResult:
        """Runs a call and restores the state from before."""
        try:
            args, kwargs = make_call()
            out = pytree.tree_map_only(Tensor, torch.clone, run_seeded(run, times, *args, **kwargs))
            values = dict(self._named_tensors(args, kwargs, self.tracker.look()))
            own = (x for x in self.tensors.keys() & values if values[x] is not None and x not in self.computed)
            kept = tuple(sorted(name for name in own if values[name].grad_fn is not None))
            return RunResult(out, {name: copy_full(x) for name, x in values.items()}, kept)
        finally:
            self.tracker.restore()
            for generator, state in self.generators:
                generator.set_state(state)
            for x, history in self.histories:
                history.restore(x)
            with torch.no_grad():
                for name, x in self.tensors.items():
                    if x is not None and not _equal(copy_full(x), self.before[name]):
                        x.detach().copy_(self.before[name])
                for name, x in self.tensors.items():
                    if name.endswith(GRAD):
                        self.tensors[name.removesuffix(GRAD)].grad = x

    def _named_tensors(self, args: Any, kwargs: Any, snapshot: Snapshot) -> Iterator[tuple[str, Any]]:
        call = flatten_call(self.step.fn, args, kwargs, self.step.static, snapshot)
        for name, x in zip(leaf_names(self.step.fn, call, range(len(call.leaves))), call.leaves, strict=True):
            if isinstance(x, Tensor) and not name.endswith(GRAD):
                yield name, x
                yield name + GRAD, _grad(x)

    def _plain_call(self) -> Call:
        """Returns plain arguments, and puts plain tensors in the place of ShardedTensors until `_run` restores them."""
        substitution, copies = Substitution(self.tracker.before, keys=True), _PlainCopies()
        names = {id(x): name for name, x in self.tensors.items()}
        self.stays = []
        for i, x in self.reached.items():
            if type(x) is ShardedTensor and not substitution.put(x, copies.copy(x)):
                self.stays += [names[i]] if self.tracker.before.places_of(x) else []
                del copies.by_id[i]
        substitution.put_keys(copies.by_id)

        def copy_argument(x: Tensor) -> Tensor:
            """Copies an argument, to which the function may write; a reached tensor stays, and is restored later."""
            stays = id(x) not in copies.by_id and (id(x) in self.reached or type(x) is torch.nn.Parameter)
            return x if stays else copies.copy(x)

        call: Call = pytree.tree_map_only(Tensor, copy_argument, self.call)
        copies.copy_attributes()
        return call


class _PlainCopies:
    """Plain copies of tensors, `by_id` of the originals: a tensor in two places has one copy."""

    def __init__(self) -> None:
        self.by_id: dict[int, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def copy(self, x: Tensor) -> Tensor:
        """Returns the plain copy of a tensor, with its hooks and gradient."""
        if id(x) not in self.by_id:
            plain: Any = copy_full(x)
            if x.__dict__.get(IS_PARAMETER):
                plain = torch.nn.Parameter(plain, x.requires_grad)
            plain.requires_grad_(x.requires_grad)
            if x.is_leaf:
                AutogradState.read(x).lend_hooks(plain)
            if (grad := _grad(x)) is not None:
                plain.grad = self.copy(grad)
            self.by_id[id(x)] = plain
            self._pairs.append((x, plain))
        return self.by_id[id(x)]

    def copy_attributes(self) -> None:
        """Gives the copies the attributes that users set on the originals."""
        for x, plain in self._pairs:
            plain.__dict__.update(user_attributes(x))


def run_seeded(run: Run, times: int, /, *args: Any, **kwargs: Any) -> Any:
    """Calls `run` so many times from a fixed random state; returns the last result."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [run(*args, **kwargs) for _ in range(times)][-1]


def copy_full(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, ShardedTensor) else x).detach().clone()


def _grad(x: Tensor) -> Tensor | None:
    return x.grad if x.is_leaf or x.retains_grad else None  # torch warns if it has none


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """True if two values are equal bit for bit, except for NaN."""
    return a is b if a is None or b is None else a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
