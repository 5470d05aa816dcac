"""The recurrence of RNN, GRU and LSTM layers: one layer in one direction, over all steps in one op.

Shapes: gates `[T, B, G]` (`x W_ih^T + b_ih`, the input's share); weight `[G, P]`, bias `[G]`, projection `[P, H]`;
h0 `[B, P]`, c0 `[B, H]`, lengths `[B]`; hs `[T, B, P]`, cs `[T, B, H]`. G is H times the gates of the cell: 1 for
"tanh" and "relu", 3 for "gru" (r, z, n), 4 for "lstm" (i, f, g, o). P is H without a projection. Rows of the batch are
independent. A row keeps its state past its length, so the last state of every row is `hs[-1]`, or `hs[0]` with
`reverse`.

The autograd function computes gradients of weight, bias and projection outside the backward op, as products over all
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}

# --- schema -----------------------------------------------------------------------------------------------------------

LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
LIB.define(
    "recurrence(Tensor gates, Tensor weight, Tensor? bias, Tensor? projection, Tensor h0, Tensor? c0, "
    "Tensor? lengths, str cell, bool reverse) -> (Tensor hs, Tensor cs, Tensor activations)"
)
LIB.define(
    "recurrence_backward(Tensor grad_hs, Tensor? grad_cs, Tensor weight, Tensor? projection, Tensor h0, Tensor? c0, "
    "Tensor? lengths, Tensor hs, Tensor? cs, Tensor? activations, str cell, bool reverse) "
    "-> (Tensor dgates, Tensor dhidden, Tensor dhs, Tensor dh0, Tensor dc0)"
)

# --- fake -------------------------------------------------------------------------------------------------------------


def _fake(
    gates: Tensor, weight: Tensor, bias: Tensor | None, projection: Tensor | None, h0: Tensor, c0: Tensor | None,
    lengths: Tensor | None, cell: str, reverse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    steps, batch, units = *gates.shape[:2], gates.shape[2] // GATES[cell]
    wide = gates.dtype if cell in _SIMPLE else torch.promote_types(gates.dtype, (h0 if c0 is None else c0).dtype)
    hs = gates.new_empty(steps, batch, weight.shape[1], dtype=wide if projection is None else projection.dtype)
    cs = None if c0 is None else gates.new_empty(steps, batch, units, dtype=wide)
    return hs, cs, None if cell in _SIMPLE else gates.new_empty(steps, batch, 4 * units)


def _fake_backward(
    grad_hs: Tensor, grad_cs: Tensor | None, weight: Tensor, projection: Tensor | None, h0: Tensor, c0: Tensor | None,
    lengths: Tensor | None, hs: Tensor, cs: Tensor | None, activations: Tensor | None, cell: str, reverse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dtype = hs.dtype if activations is None else activations.dtype
    dgates = hs.new_empty(*hs.shape[:2], weight.shape[0], dtype=dtype)
    return (
        dgates,
        torch.empty_like(dgates) if cell == "gru" else None,
        None if projection is None else hs.new_empty(hs.shape),
        h0.new_empty(h0.shape),
        None if c0 is None else c0.new_empty(c0.shape),
    )


torch.library.register_fake("shardlib::recurrence", _fake, lib=LIB)
torch.library.register_fake("shardlib::recurrence_backward", _fake_backward, lib=LIB)

# --- reference --------------------------------------------------------------------------------------------------------

_State = tuple[Tensor, Tensor | None, Tensor | None]  # h, c, and the activations that the backward reads


def _gru(gates: Tensor, hidden: Tensor, h: Tensor, c: Tensor | None) -> _State:
    units = h.shape[-1]
    both = torch.sigmoid(gates[:, : 2 * units] + hidden[:, : 2 * units])
    reset, update = both.chunk(2, -1)
    new = torch.tanh(torch.addcmul(gates[:, 2 * units :], reset, hidden[:, 2 * units :]))
    return (h - new) * update + new, c, torch.cat([both, new, hidden[:, 2 * units :]], -1)


def _lstm(gates: Tensor, hidden: Tensor, h: Tensor, c: Tensor | None) -> _State:
    assert c is not None
    i, f, g, o = (gates + hidden).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], -1)


_CELLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], _State]] = {
    "tanh": lambda gates, hidden, h, c: (torch.tanh(gates + hidden), c, None),
    "relu": lambda gates, hidden, h, c: (torch.relu(gates + hidden), c, None),
    "gru": _gru,
    "lstm": _lstm,
}
_SIMPLE = ("tanh", "relu")


def reference(
    gates: Tensor, weight: Tensor, bias: Tensor | None, projection: Tensor | None, h0: Tensor, c0: Tensor | None,
    lengths: Tensor | None, cell: str, reverse: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes h and (for "lstm") c after every step, and the activations for the backward, in plain torch ops."""
    h, c = h0.to(_fake(gates, weight, bias, projection, h0, c0, lengths, cell, reverse)[0].dtype), c0
    steps: list[_State] = [(h, c, None)] * len(gates)
    for t in _step_order(len(gates), reverse):
        new, new_c, activations = _CELLS[cell](gates[t], F.linear(h.to(weight.dtype), weight, bias), h, c)
        if projection is not None:
            new = F.linear(new.to(projection.dtype), projection)
        if lengths is not None:
            alive = (lengths > t).unsqueeze(-1)
            new = torch.where(alive, new, h)
            new_c = None if c is None or new_c is None else torch.where(alive, new_c, c)
        steps[t] = h, c, _ = new, new_c, activations
    hs, cs, saved = zip(*steps, strict=True)
    return torch.stack(hs), _stack(cs), _stack(saved)


def _step_order(steps: int, reverse: bool) -> Sequence[int]:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def _stack(column: Sequence[Tensor | None]) -> Tensor | None:
    return torch.stack([x for x in column if x is not None]) if column[0] is not None else None


# --- backward ---------------------------------------------------------------------------------------------------------


def backward(
    grad_hs: Tensor, grad_cs: Tensor | None, weight: Tensor, projection: Tensor | None, h0: Tensor, c0: Tensor | None,
    lengths: Tensor | None, hs: Tensor, cs: Tensor | None, activations: Tensor | None, cell: str, reverse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Computes gradients of the gates, of their hidden share ("gru"), of every state (with a projection), h0 and c0.

    A step is linear in its gradients. The factors are computed for all steps at once; each step multiplies by them.
    """
    alive = None if lengths is None else alive_rows(lengths, len(hs))
    run: Any = _backward_lstm if cell == "lstm" else _backward_simple if cell in _SIMPLE else _backward_gru
    args = (grad_hs, grad_cs, weight, projection, h0, c0, alive, hs, cs, activations, cell, reverse)
    grads: tuple[Tensor | None, ...] = run(*args)
    return grads


def _backward_simple(
    grad_hs: Tensor, grad_cs: Any, weight: Tensor, projection: Any, h0: Tensor, c0: Any, alive: Tensor | None,
    hs: Tensor, cs: Any, activations: Any, cell: str, reverse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    slope = (hs > 0).to(hs.dtype) if cell == "relu" else 1 - hs * hs
    kept = None if alive is None else (~alive).to(hs.dtype)
    dgates, _, dh0 = _linear_steps(grad_hs, mask_rows(alive, slope).unsqueeze(2), kept, weight, reverse)
    return dgates, None, None, dh0.to(h0.dtype), None


def _backward_gru(
    grad_hs: Tensor, grad_cs: Any, weight: Tensor, projection: Any, h0: Tensor, c0: Any, alive: Tensor | None,
    hs: Tensor, cs: Any, activations: Tensor, cell: str, reverse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    r, z, n, hidden = activations.chunk(4, -1)
    new = mask_rows(alive, (1 - z) * (1 - n * n))
    update = mask_rows(alive, (previous_states(hs, h0, reverse).to(z.dtype) - n) * z * (1 - z))
    slopes = torch.stack([new * hidden * r * (1 - r), update, new * r], 2)
    kept = z if alive is None else torch.where(alive, z, 1)
    dhidden, dhs, dh0 = _linear_steps(grad_hs, slopes, kept, weight, reverse)
    dgates = torch.cat([dhidden[:, :, : 2 * n.shape[2]], new * dhs.to(new.dtype)], -1)
    return dgates, dhidden, None, dh0.to(h0.dtype), None


def _linear_steps(
    grad_hs: Tensor, slopes: Tensor, kept: Tensor | None, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients of gates, of every state, and of the first one.

    `slopes` `[T, B, gates, H]` are derivatives of a state by its gates, and are overwritten. `kept` is the derivative
    of a state by the previous one, besides the gates; None: 0.
    """
    dh, dhs = torch.zeros_like(grad_hs[0]), torch.empty_like(grad_hs, memory_format=torch.contiguous_format)
    for t in _step_order(len(grad_hs), not reverse):
        dstate = torch.add(grad_hs[t], dh, out=dhs[t])
        dgates = slopes[t].mul_(dstate.unsqueeze(1)).flatten(1)
        dh = (dgates.to(weight.dtype) @ weight).to(dstate.dtype)
        dh = dh if kept is None else dh.addcmul_(kept[t].to(dh.dtype), dstate)
    return slopes.flatten(2), dhs, dh


def _backward_lstm(
    grad_hs: Tensor, grad_cs: Tensor | None, weight: Tensor, projection: Tensor | None, h0: Tensor, c0: Tensor,
    alive: Tensor | None, hs: Tensor, cs: Tensor, activations: Tensor, cell: str, reverse: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    i, f, g, o = activations.chunk(4, -1)
    top, before = cs.tanh(), previous_states(cs, c0, reverse)
    inner = (g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), top * o * (1 - o))
    dgates = torch.stack([mask_rows(alive, x.to(o.dtype)) for x in inner], 2)
    through, kept = mask_rows(alive, o * (1 - top * top)), f if alive is None else torch.where(alive, f, 1)
    dh, dc = torch.zeros_like(grad_hs[0]), torch.zeros_like(c0)
    dhs = torch.empty_like(grad_hs, memory_format=torch.contiguous_format)
    for t in _step_order(len(hs), not reverse):
        dstate = torch.add(grad_hs[t], dh, out=dhs[t])
        dout = dstate if projection is None else dstate @ projection
        dc = dc if grad_cs is None else dc + grad_cs[t]
        dc = torch.addcmul(dc, through[t].to(dc.dtype), dout.to(dc.dtype))
        dgates[t, :, :3].mul_(dc.unsqueeze(1))
        dgates[t, :, 3].mul_(dout)
        dc = dc * kept[t]
        dh = (dgates[t].flatten(1).to(weight.dtype) @ weight).to(dstate.dtype)
        dh = dh if alive is None else torch.where(alive[t], dh, dstate)
    return dgates.flatten(2), None, None if projection is None else dhs, dh.to(h0.dtype), dc.to(c0.dtype)


def alive_rows(lengths: Tensor, steps: int) -> Tensor:
    """Returns bool `[T, B, 1]`, true at steps within a row's length."""
    return (torch.arange(steps, device=lengths.device).unsqueeze(1) < lengths).unsqueeze(2)


def mask_rows(alive: Tensor | None, x: Tensor) -> Tensor:
    """Replaces `x` by zeros past the rows' lengths."""
    return x if alive is None else torch.where(alive, x, 0)


def previous_states(states: Tensor, first: Tensor, reverse: bool) -> Tensor:
    first = first.to(states.dtype).unsqueeze(0)
    return torch.cat([states[1:], first] if reverse else [first, states[:-1]])


# --- backends ---------------------------------------------------------------------------------------------------------

LIB.impl("recurrence", reference, "CompositeExplicitAutograd")
LIB.impl("recurrence_backward", backward, "CompositeExplicitAutograd")
