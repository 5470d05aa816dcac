"""A jitted program that autograd can differentiate from outside: its gradient is a jitted program as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardlib.core.batched_grad import one_by_one
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import is_wrapped, pytree
from shardlib.jit.jit import jit
from shardlib.sharding.mesh.mesh import current_mesh


class Differentiable:
    """`fn` jitted, as a function of its positional arguments; differentiable any number of times.

    The forward pass is computed again in the backward pass: nothing but the arguments is kept.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.program = jit(fn)

    @functools.cached_property
    def pullback(self) -> Differentiable:
        """(arguments, cotangents by leaf of the result) -> the gradients of the arguments' floating-point leaves."""
        fn = self.fn

        @functools.wraps(fn)
        def pull(args: tuple[Any, ...], cotangents: dict[int, Tensor]) -> list[Tensor]:
            leaves, tree = pytree.tree_flatten(args)
            wanted = [i for i, x in enumerate(leaves) if _differentiable(x)]

            def of(*some: Tensor) -> tuple[Tensor, ...]:
                full = list(leaves)
                for i, x in zip(wanted, some, strict=True):
                    full[i] = x
                out = pytree.tree_leaves(fn(*pytree.tree_unflatten(full, tree)))
                return tuple(out[i] for i in cotangents)

            vjp = torch.func.vjp(of, *(leaves[i] for i in wanted))[1]
            return list(vjp(tuple(cotangents.values())))

        return Differentiable(pull)

    def __call__(self, *args: Any) -> Any:
        leaves, tree = pytree.tree_flatten(args)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not any(is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()) for x in tensors):
            return self.program(*args)
        shape = _Shape(tree)
        flat = _Apply.apply(self, shape, *leaves)  # type: ignore[no-untyped-call]
        assert shape.out is not None, "the forward pass has run"
        return pytree.tree_unflatten(list(flat), shape.out)


class _Shape:
    """The structure of a call's arguments and, once it has run, of its result."""

    def __init__(self, args: pytree.TreeSpec) -> None:
        self.args, self.out = args, None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(of: Differentiable, shape: Any, *leaves: Any) -> Any:
        plain = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        flat, shape.out = pytree.tree_flatten(of.program(*pytree.tree_unflatten(plain, shape.args)))
        return tuple(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.of, ctx.shape, *leaves = inputs
        ctx.mesh = current_mesh()
        ctx.static = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        ctx.results = [i for i, x in enumerate(output) if _differentiable(x)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.tensors))
        ctx.mark_non_differentiable(*(x for x in output if isinstance(x, Tensor) and not _differentiable(x)))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = list(ctx.static)
        for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            leaves[i] = x
        args = pytree.tree_unflatten(leaves, ctx.shape.args)
        with ctx.mesh:
            found = iter(ctx.of.pullback(args, {i: grads[i] for i in ctx.results}))
        return (None, None, *(next(found) if _differentiable(x) else None for x in leaves))

    @staticmethod
    def vmap(info: Any, in_dims: Any, of: Differentiable, *rest: Any) -> Any:
        raise ShardingError(
            f"vmap of {getattr(of.fn, '__name__', 'a shard_map')} outside jit",
            rule="a program on a mesh is compiled for the shapes that it is called with",
            remedy="jit the whole: sl.jit(sl.vmap(f))(x)",
        )


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
