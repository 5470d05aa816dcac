"""The recurrence's autograd functions and their vmap rules: vmap's examples are rows of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_internals.batched_grad import loop_over_batches
from shardlib.ops.recurrence.op import LIB, alive_rows, mask_rows, previous_states, reference

_INPUTS = 6  # tensors that have gradients: gates, weight, bias, projection, h0, c0
_HS = _INPUTS + 1  # the position of hs in the saved tensors, after the lengths


class Recurrence(torch.autograd.Function):
    """`shardlib::recurrence`: returns hs and, if the cell has them, cs and activations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return tuple(x for x in torch.ops.shardlib.recurrence(*inputs) if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.cell, ctx.reverse = inputs[-2:]
        rest: list[Any]
        hs, *rest = output
        cs = rest.pop(0) if ctx.cell == "lstm" else None
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)  # else autograd allocates zeros for unused states
        ctx.save_for_backward(*inputs[:-2], hs, cs, *(rest or (None,)))

    @staticmethod
    @functools.partial(loop_over_batches, examples=False)
    def backward(ctx: Any, grad_hs: Tensor | None, *grads: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        grad_hs = torch.zeros_like(tensors[_HS]) if grad_hs is None else grad_hs
        grad_cs = grads[0] if ctx.cell == "lstm" else None
        results = iter(RecurrenceBackward.apply(grad_hs, grad_cs, *tensors, ctx.cell, ctx.reverse))  # type: ignore[no-untyped-call]
        return *(None if x is None else next(results) for x in tensors[:_INPUTS]), None, None, None


class RecurrenceBackward(torch.autograd.Function):
    """The gradients of the tensor inputs of `Recurrence`, from the gradients of hs and cs.

    Its own derivative differentiates the reference, a loop of plain torch ops.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_hs: Tensor, grad_cs: Tensor | None, *inputs: Any) -> tuple[Tensor, ...]:
        _, weight, bias, projection, h0, c0, lengths, hs, cs, activations, cell, reverse = inputs
        read = (weight, projection, h0, c0, lengths, hs, cs, activations, cell, reverse)
        dgates, dhidden, dhs, dh0, dc0 = torch.ops.shardlib.recurrence_backward(grad_hs, grad_cs, *read)
        dhidden = dgates if dhidden is None else dhidden
        before = previous_states(hs, h0, reverse).to(dhidden.dtype)
        grads = [dgates, _sum_products(dhidden, before), None if bias is None else dhidden.sum((0, 1)), None, dh0, dc0]
        if projection is not None:
            alive = None if lengths is None else alive_rows(lengths, len(hs))
            unprojected = activations.chunk(4, -1)[3] * cs.tanh()
            grads[3] = _sum_products(mask_rows(alive, dhs), unprojected.to(dhs.dtype))
        return tuple(x for x in grads if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.cell, ctx.reverse = inputs[-2:]
        ctx.save_for_backward(*inputs[:-2])
        ctx.save_for_forward(*inputs[:-2])

    @staticmethod
    def jvp(ctx: Any, grad_hs: Tensor | None, grad_cs: Tensor | None, *others: Tensor | None) -> Any:
        """Applies the backward to tangents of the cotangents: it is linear in them, and only they have tangents here.

        The reference runs where inputs have tangents.
        """
        hs, cs = ctx.saved_tensors[:2]
        grad_hs = torch.zeros_like(hs) if grad_hs is None else grad_hs
        grad_cs = torch.zeros_like(cs) if grad_cs is None and cs is not None else grad_cs
        return RecurrenceBackward.apply(grad_hs, grad_cs, *ctx.saved_tensors[2:], ctx.cell, ctx.reverse)  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        tensors = ctx.saved_tensors
        differentiable = [i for i, x in enumerate(tensors[: 2 + _INPUTS]) if x is not None]

        def first_derivative(*inputs: Tensor) -> tuple[Tensor, ...]:
            by_position = dict(zip(differentiable, inputs, strict=True))
            grads = tuple(by_position[i] for i in (0, 1) if i in by_position)
            primal_positions = [i for i in differentiable if i > 1]

            def run_steps(*primals: Tensor) -> tuple[Tensor, ...]:
                inputs = dict(zip(primal_positions, primals, strict=True))
                args: list[Any] = [*(inputs.get(i) for i in range(2, 2 + _INPUTS)), tensors[8], ctx.cell, ctx.reverse]
                states: Any = reference(*args)
                return tuple(states[: len(grads)])

            pullback = torch.func.vjp(run_steps, *(by_position[i] for i in primal_positions))[1]
            input_grads: tuple[Tensor, ...] = pullback(grads)
            return input_grads

        second = iter(torch.func.vjp(first_derivative, *(tensors[i] for i in differentiable))[1](cotangents))
        return tuple(next(second) if i in differentiable else None for i in range(len(tensors) + 2))


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """Sums the products `left^T right` over all steps and rows."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


# --- vmap -------------------------------------------------------------------------------------------------------------


def _make_vmap(op: Any, inputs_at: Sequence[int | None], outputs_at: Sequence[int]) -> Callable[..., Any]:
    """Makes an op's vmap rule: examples become rows of the batch, or run one by one if they have different weights.

    `inputs_at` and `outputs_at` hold the batch dims; None for weights and for arguments that are no tensors.
    """

    def run(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        n = info.batch_size
        if any(d is not None and at is None for d, at in zip(in_dims, inputs_at, strict=True)):
            examples = [
                op(*(x if d is None else x.select(d, k) for x, d in zip(inputs, in_dims, strict=True)))
                for k in range(n)
            ]
            columns = [None if column[0] is None else torch.stack(column) for column in zip(*examples, strict=True)]
            return tuple(columns), tuple(None if x is None else 0 for x in columns)
        rows = [
            x if at is None or x is None else _fold_examples(x, d, at, n)
            for x, d, at in zip(inputs, in_dims, inputs_at, strict=True)
        ]
        outputs = zip(op(*rows), outputs_at, strict=True)
        columns = [None if x is None else x.unflatten(at, (n, x.shape[at] // n)) for x, at in outputs]
        return tuple(columns), tuple(None if x is None else at for x, at in zip(columns, outputs_at, strict=True))

    return run


def _fold_examples(x: Tensor, dim: int | None, at: int, n: int) -> Tensor:
    """Flattens the examples into dim `at`, as its major part."""
    x = x.unsqueeze(at).expand(*x.shape[:at], n, *x.shape[at:]) if dim is None else x.movedim(dim, at)
    return x.flatten(at, at + 1)


_register_vmap: Any = torch.library.register_vmap
_register_vmap(
    "shardlib::recurrence",
    _make_vmap(torch.ops.shardlib.recurrence, (1, None, None, None, 0, 0, 0, None, None), (1, 1, 1)),
    lib=LIB,
)
_register_vmap(
    "shardlib::recurrence_backward",
    _make_vmap(
        torch.ops.shardlib.recurrence_backward, (1, 1, None, None, 0, 0, 0, 1, 1, 1, None, None), (1, 1, 1, 0, 0)
    ),
    lib=LIB,
)
