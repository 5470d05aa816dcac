"""Lets transforms of `torch.func` go through a jitted program: its gradients, tangents and batches are programs, too.

Each rule is a function of its own, jitted on first use, and can be transformed again by the same rules. So every
composition of transforms ends in programs on plain or sharded tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.batched_grad import loop_over_batches
from shardlib.core.torch_internals.torch_private import is_wrapped, pytree
from shardlib.eager.placement_autograd import gather_full
from shardlib.sharding.mesh.mesh import current_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor


class Differentiable:
    """`fn` under `jit`, of positional arguments; can be differentiated any number of times, and batched.

    The backward pass repeats the forward pass: only the arguments are kept.
    """

    def __init__(self, fn: Callable[..., Any], jit: Callable[..., Any], *, pulls: bool = False) -> None:
        self.fn, self.jit, self.pulls = fn, jit, pulls
        self.program = jit(fn)
        self._batched: dict[Any, Differentiable] = {}

    def derived(self, fn: Callable[..., Any], *, pulls: bool = False) -> Differentiable:
        """Wraps a function that is derived from this one; `pulls`: it returns gradients of its first argument."""
        return Differentiable(functools.wraps(self.fn)(fn), self.jit, pulls=pulls)

    @functools.cached_property
    def pullback(self) -> Differentiable:
        """(arguments, cotangents by leaf of the result) -> the gradients of the arguments' floating-point leaves."""

        fn = self.fn  # not self, which calls change: a program's key has everything that its function closes over

        def pull(args: tuple[Any, ...], cotangents: dict[int, Tensor]) -> list[Tensor]:
            of_floats, primals = _of_floats(fn, args, tuple(cotangents))
            return list(torch.func.vjp(of_floats, *primals)[1](tuple(cotangents.values())))

        return self.derived(pull, pulls=True)

    @functools.cached_property
    def pushforward(self) -> Differentiable:
        """(arguments, tangents of their floating-point leaves) -> the tangents of the result's, by leaf."""

        fn = self.fn

        def push(args: tuple[Any, ...], tangents: list[Tensor]) -> dict[int, Tensor]:
            results: list[int] = []
            of_floats, primals = _of_floats(fn, args, results)
            return dict(zip(results, torch.func.jvp(of_floats, primals, tuple(tangents))[1], strict=True))

        return self.derived(push)

    def batched(self, dims: Sequence[int | None], args: pytree.TreeSpec, randomness: str) -> Differentiable:
        """Returns the function over a batch, along a dim of each leaf (None: shared); results have it in front."""
        key = tuple(dims), args, randomness
        if key not in self._batched:
            fn, moving = self.fn, [i for i, dim in enumerate(dims) if dim is not None]

            def each(*args: Any) -> Any:
                leaves, tree = pytree.tree_flatten(args)
                results: list[Any] = []

                def one(*examples: Tensor) -> tuple[Tensor, ...]:
                    full = [*leaves]
                    for i, x in zip(moving, examples, strict=True):
                        full[i] = x
                    flat, shape = pytree.tree_flatten(fn(*pytree.tree_unflatten(full, tree)))
                    results[:] = flat, shape
                    return tuple(x for x in flat if isinstance(x, Tensor))

                batch = [leaves[i] for i in moving]
                out = iter(torch.vmap(one, tuple(dims[i] for i in moving), randomness=randomness)(*batch))
                flat, shape = results
                return pytree.tree_unflatten([next(out) if isinstance(x, Tensor) else x for x in flat], shape)

            self._batched[key] = self.derived(each, pulls=self.pulls)
        return self._batched[key]

    def __call__(self, *args: Any) -> Any:
        leaves, tree = pytree.tree_flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not any(is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()) for x in tensors):
            return self.run(args)
        shape = _Shape(tree)
        flat = _Apply.apply(self, shape, *leaves)  # type: ignore[no-untyped-call]
        assert shape.out is not None, "the forward pass has run"
        return pytree.tree_unflatten(list(flat), shape.out)

    def run(self, args: tuple[Any, ...]) -> Any:
        """Calls the program, on tensors that no transform follows. Gradients of plain tensors are plain."""
        out = self.program(*args)
        if not self.pulls:
            return out
        leaves = [x for x in pytree.tree_leaves(args[0]) if _differentiable(x)]
        return [g if isinstance(x, ShardedTensor) else gather_full(g) for x, g in zip(leaves, out, strict=True)]


class _Shape:
    """The structure of a call's arguments and, once it has run, of its result; the mesh on which it ran."""

    def __init__(self, args: pytree.TreeSpec) -> None:
        self.args, self.out, self.mesh = args, None, current_mesh()


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(function: Differentiable, shape: Any, *leaves: Any) -> Any:
        plain = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        flat, shape.out = pytree.tree_flatten(function.run(pytree.tree_unflatten(plain, shape.args)))
        shape.mesh = next((x.mesh for x in flat if isinstance(x, ShardedTensor)), shape.mesh)
        return tuple(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.function, ctx.shape, *leaves = inputs
        ctx.static = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        ctx.results = [i for i, x in enumerate(output) if _differentiable(x)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.tensors))
        ctx.save_for_forward(*(leaves[i] for i in ctx.tensors))
        ctx.mark_non_differentiable(*(x for x in output if isinstance(x, Tensor) and not _differentiable(x)))

    @staticmethod
    @functools.partial(loop_over_batches, examples=False)
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves, args = _saved(ctx)
        with ctx.shape.mesh:
            gradients = iter(ctx.function.pullback(args, {i: grads[i] for i in ctx.results}))
        return (None, None, *(next(gradients) if _differentiable(x) else None for x in leaves))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        leaves, args = _saved(ctx)
        pairs = [(x, t) for x, t in zip(leaves, tangents[2:], strict=True) if _differentiable(x)]
        with ctx.shape.mesh:
            out = ctx.function.pushforward(args, [torch.zeros_like(x) if t is None else t for x, t in pairs])
        return tuple(out.get(i) for i in range(ctx.shape.out.num_leaves))

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Differentiable, shape: Any, *leaves: Any) -> Any:
        own = _Shape(shape.args)
        batched = function.batched(in_dims[2:], shape.args, info.randomness)
        flat = _Apply.apply(batched, own, *leaves)  # type: ignore[no-untyped-call]
        shape.out, shape.mesh = own.out, own.mesh
        return flat, tuple(0 if isinstance(x, Tensor) else None for x in flat)


def _of_floats(
    fn: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Any, ...]]:
    """Returns `fn` as a function of its floating-point leaves, and these leaves.

    It returns the results at positions `results`; a list is filled with the positions of all floating-point results.
    """
    leaves, tree = pytree.tree_flatten(args)
    wanted = [i for i, x in enumerate(leaves) if _differentiable(x)]

    def of_floats(*some: Tensor) -> tuple[Tensor, ...]:
        full = [*leaves]
        for i, x in zip(wanted, some, strict=True):
            full[i] = x
        out = pytree.tree_leaves(fn(*pytree.tree_unflatten(full, tree)))
        if isinstance(results, list):
            results[:] = [i for i, x in enumerate(out) if _differentiable(x)]
        return tuple(out[i] for i in results)

    return of_floats, tuple(leaves[i] for i in wanted)


def _saved(ctx: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a call, and its arguments."""
    leaves = list(ctx.static)
    for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
        leaves[i] = x
    return leaves, pytree.tree_unflatten(leaves, ctx.shape.args)


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
