"""A call that runs several times, on one device and sharded: each run finds what the first one found.

On one device there are no ShardedTensors: plain tensors with all of their values stand wherever the function is given
one, or finds one (in a module, an optimizer, a closure).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import single_device
from shardlib.core.torch_private import IS_PARAMETER, pytree
from shardlib.frontend.autograd_history import Autograd
from shardlib.frontend.guards.flatten_call import flatten_call, names_of
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.frontend.side_effects.substitute import Substitution
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.global_random import plain_program
from shardlib.jit.jit import Jitted
from shardlib.tensor.sharded_tensor import ShardedTensor, marks
from shardlib.testing.compare import Compared, compare

Run = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
GRAD = ".grad"
_DRAWS = 4  # runs, each with other numbers rounded up: one may leave those alone on which a small gradient hangs


@dataclass(frozen=True)
class Ran:
    """What a run returns, and what it leaves in each tensor that it is given or finds; those `kept` have got a
    history."""

    out: Any
    left: dict[str, Tensor | None]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Close:
    """How results are compared; a tolerance that nobody said is so many times `looser`."""

    rtol: float | None
    atol: float | None
    looser: float

    def __call__(self, root: str, one: Any, other: Any, names: Sequence[str] | None) -> list[Compared]:
        return compare(root, one, other, names=names, rtol=self.rtol, atol=self.atol, looser=self.looser)


class Reruns:
    """What a call may change beside what it returns; `eps` is of the coarsest numbers that it computes with."""

    def __init__(self, step: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step, self.given = step, (args, kwargs)
        self.eps = 0.0
        self.watch = MutationTracker(Invocation.of(step, step.programs, None, args, kwargs).look)
        self.found = {id(x): x for x in self.watch.before.tensors}
        self.tensors = dict(self._tensors(args, kwargs, self.watch.before))
        self.before = {name: whole(x) for name, x in self.tensors.items()}
        drawn = [x for x in pytree.tree_leaves(self.given) if isinstance(x, torch.Generator)]
        self.generators = [(g, g.get_state()) for g in (*drawn, *self.watch.before.generators)]
        self.histories = [(x, Autograd.of(x)) for x in self.tensors.values() if x is not None]
        self.stays: list[str] = []  # ShardedTensors on one device, too: something holds them that can hold no others
        self.made = {name for name, x in self.tensors.items() if x is not None and x.grad_fn is not None}

    @property
    def ends(self) -> bool:
        """Whether a way back ends at what is found, and does not go on to what others have made."""
        return all(x.grad_fn is None for x in self.found.values())

    def may_require_grad(self, x: Tensor) -> bool:
        """Whether an argument has no `.grad`, and a copy of it can have one; parameters, and what is found, are no
        copies."""
        is_own = id(x) in self.found or isinstance(x, torch.nn.Parameter) or (x.is_leaf and x.requires_grad)
        return (x.is_floating_point() or x.is_complex()) and not is_own

    def sharded(self, run: Run, times: int = 1) -> Ran:
        """What the last of so many runs returns, and what all leave."""
        return self._ran(run, times, lambda: self.given)

    def alone(self, run: Run, times: int = 1) -> Ran:
        """The same on one device."""

        def once(*args: Any, **kwargs: Any) -> Any:
            with single_device(), plain_program():
                return run(*args, **kwargs)

        return self._ran(once, times, self._plain)

    def rounded(self, run: Run, times: int = 1, seed: int = 0) -> Ran:
        """The same on one device, where some of the numbers that it is given are rounded up."""
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, x in self.tensors.items():
                was = self.before[name]
                if was is not None and was.is_floating_point() and not x.is_inference() and not name.endswith(GRAD):
                    up = torch.rand(was.shape, generator=draws).to(was.device) < 0.5
                    eps = max(self.eps, torch.finfo(was.dtype).eps)
                    x.detach().copy_(torch.where(up, was * (1 + eps), was))
        return self.alone(run, times)

    def compared(
        self, close: Close, root: str, names: Sequence[str] | None, alone: Run, one: Ran, run: Run, times: int = 1
    ) -> list[Compared]:
        """A run beside what one device made of it, `one`; where they differ, that runs some more times, rounded."""
        found = self.sharded(run, times)
        changed = [
            n for n in one.left | found.left if not all(_equal(x.left.get(n), self.before.get(n)) for x in (one, found))
        ]

        def beside(other: Ran) -> list[Compared]:
            theirs, ours = ([x.left.get(n) for n in changed] for x in (one, other))
            return close(root, one.out, other.out, names) + close("", theirs, ours, changed)

        seen = beside(found)
        for seed in range(_DRAWS if close.rtol is close.atol is None else 0):
            if not any(leaf.fault for leaf in seen):
                break
            seen = [a.beside(b.error) for a, b in zip(seen, beside(self.rounded(alone, times, seed)), strict=True)]
        return seen

    def _ran(self, run: Run, times: int, given: Callable[[], Call]) -> Ran:
        try:
            args, kwargs = given()
            out = pytree.tree_map_only(Tensor, torch.clone, seeded(run, times, *args, **kwargs))
            left = dict(self._tensors(args, kwargs, self.watch.look()))
            kept = (name for name in self.tensors.keys() & left if left[name] is not None and name not in self.made)
            has = tuple(sorted(name for name in kept if left[name].grad_fn is not None))
            return Ran(out, {name: whole(x) for name, x in left.items()}, has)
        finally:
            self.watch.restore()
            for generator, state in self.generators:
                generator.set_state(state)
            for x, was in self.histories:
                was.restore(x)
            with torch.no_grad():
                for name, x in self.tensors.items():
                    if x is not None and not _equal(whole(x), self.before[name]):
                        x.detach().copy_(self.before[name])
                for name, x in self.tensors.items():
                    if name.endswith(GRAD):
                        self.tensors[name.removesuffix(GRAD)].grad = x

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Snapshot) -> Iterator[tuple[str, Any]]:
        call = flatten_call(self.step.fn, args, kwargs, self.step.static, found)
        for name, x in zip(names_of(self.step.fn, call, range(len(call.leaves))), call.leaves, strict=True):
            if isinstance(x, Tensor) and not name.endswith(GRAD):
                yield name, x
                yield name + GRAD, _grad(x)

    def _plain(self) -> Call:
        """A call's arguments on one device, which finds no ShardedTensor; `_ran` gives back what stands there then."""
        standing, made = Substitution(self.watch.before, keys=True), _Plain()
        names = {id(x): name for name, x in self.tensors.items()}
        self.stays = []
        for i, x in self.found.items():
            if type(x) is ShardedTensor and not standing.put(x, made(x)):
                self.stays += [names[i]] if self.watch.before.places_of(x) else []
                del made.of[i]
        standing.put_keys(made.of)

        def given(x: Tensor) -> Tensor:
            """A copy: the function may write to it. What it finds elsewhere, too, is one with that, and put back."""
            stays = id(x) not in made.of and (id(x) in self.found or type(x) is torch.nn.Parameter)
            return x if stays else made(x)

        call: Call = pytree.tree_map_only(Tensor, given, self.given)
        made.mark()
        return call


class _Plain:
    """Plain tensors with the values of others, by the ids `of` these: one tensor in two places stays one."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        if id(x) not in self.of:
            made: Any = whole(x)
            if x.__dict__.get(IS_PARAMETER):
                made = torch.nn.Parameter(made, x.requires_grad)
            made.requires_grad_(x.requires_grad)
            if x.is_leaf:
                Autograd.of(x).lend_hooks(made)
            if (grad := _grad(x)) is not None:
                made.grad = self(grad)
            self.of[id(x)] = made
            self._pairs.append((x, made))
        return self.of[id(x)]

    def mark(self) -> None:
        """Give them the attributes that somebody gave the others."""
        for x, made in self._pairs:
            made.__dict__.update(marks(x))


def seeded(run: Run, times: int, /, *args: Any, **kwargs: Any) -> Any:
    """What the last of so many calls returns, from the same random state."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [run(*args, **kwargs) for _ in range(times)][-1]


def whole(x: Tensor | None) -> Tensor | None:
    """A copy of all of a tensor."""
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, ShardedTensor) else x).detach().clone()


def _grad(x: Tensor) -> Tensor | None:
    """The gradient of a tensor that has one; torch warns of the question where it has none."""
    return x.grad if x.is_leaf or x.retains_grad else None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two values are one to the bit, but for NaN."""
    return a is b if a is None or b is None else a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())
