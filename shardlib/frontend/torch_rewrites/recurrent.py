"""RNN, GRU and LSTM (`torch.rnn_tanh`, `rnn_relu`, `gru`, `lstm`): an op per layer and direction, not one per step.

The input's share of the gates is one matmul over all steps, outside the recurrence, so that it shards like any other.
A packed sequence is padded around the recurrence: its op takes the length of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.ops.recurrence.autograd import Recurrence
from shardlib.ops.recurrence.op import GATES

_NAMES = {"rnn_tanh": "tanh", "rnn_relu": "relu", "gru": "gru", "lstm": "lstm"}
_ATEN = {name: getattr(torch.ops.aten, name) for name in _NAMES}
# Every function of torch that computes such layers, and the cell that it runs.
LAYERS: dict[Any, str] = {
    fn: cell
    for name, cell in _NAMES.items()
    for fn in (getattr(torch, name), _ATEN[name], _ATEN[name].input, _ATEN[name].data)
}


def layers_as_ops(cell: str) -> Callable[..., Any]:
    """Returns a form of `torch.gru` and the like, for padded and packed sequences, in ops with rules.

    The form returns None where torch's own steps have to run: they support tangents, and raise errors of shapes.
    """

    def form(*args: Any, **kwargs: Any) -> Any:
        is_packed = "batch_sizes" in kwargs or any(isinstance(x, list | tuple) for x in args[3:4])
        return (_packed if is_packed else _padded)(cell, *args, **kwargs)

    return form


def _padded(
    cell: str, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    if input.dim() != 3:
        return None
    x = input.transpose(0, 1) if batch_first else input
    layers = _layers(cell, x, hx, params, has_biases, num_layers, bidirectional)
    if layers is None:
        return None
    out, *last = _run(cell, x, layers, dropout if train else 0.0, None)
    return out.transpose(0, 1) if batch_first else out, *last


def _packed(
    cell: str, data: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> Any:  # fmt: skip
    """Runs packed layers: the rows of all sequences, step by step, the longest sequence first."""
    sizes = batch_sizes.to(data.device)
    row = torch.arange((hx if isinstance(hx, Tensor) else hx[0]).shape[1], device=data.device)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    x = data[(starts.unsqueeze(1) + row).clamp(max=len(data) - 1)]  # past its end a sequence may read any row
    layers = _layers(cell, x, hx, params, has_biases, num_layers, bidirectional) if data.dim() == 2 else None
    if layers is None:
        return None
    out, *last = _run(cell, x, layers, dropout if train else 0.0, (sizes.unsqueeze(1) > row).sum(0))
    place = torch.arange(len(data), device=data.device)
    step = torch.searchsorted(ends, place, right=True)
    return out.flatten(0, 1)[step * len(row) + place - starts[step]], *last


class _Direction(NamedTuple):
    """A layer in one direction: parameters (with a projection, or None), and first states."""

    input_weight: Tensor
    weight: Tensor
    input_bias: Tensor | None
    bias: Tensor | None
    projection: Tensor | None
    h0: Tensor
    c0: Tensor | None

    def fits(self, cell: str) -> bool:
        units = (self.h0 if self.c0 is None else self.c0).shape[-1]
        gates = GATES[cell] * units
        shapes = (
            (self.input_weight, (gates, self.input_weight.shape[-1])),
            (self.weight, (gates, self.h0.shape[-1])),
            (self.input_bias, (gates,)),
            (self.bias, (gates,)),
            (self.projection, (self.h0.shape[-1], units)),
        )
        return all(x is None or x.shape == shape for x, shape in shapes)


def _layers(
    cell: str, x: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, layers: int, bidirectional: bool
) -> list[list[_Direction]] | None:
    """Returns layers, each of one or two directions; None if a shape or dtype does not fit."""
    states = [hx] if isinstance(hx, Tensor) else [*hx]
    ways = 2 if bidirectional else 1
    projects = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    each = 2 + 2 * bool(has_biases) + projects
    alike = _is_autocast(x) or len({t.dtype for t in (x, *states, *params)}) == 1
    if is_forward_mode() or not alike or len(x) == 0 or len(params) != each * layers * ways:
        return None
    if len(states) != 1 + (cell == "lstm") or any(h.shape[:-1] != (layers * ways, x.shape[1]) for h in states):
        return None
    firsts = zip(*(h.unbind() for h in states), strict=True)
    directions = []
    for at, (h0, *c0) in zip(range(0, len(params), each), firsts, strict=True):
        weights = params[at : at + each]
        bias, hidden_bias = weights[2:4] if has_biases else (None, None)
        projection = weights[-1] if projects else None
        directions.append(_Direction(weights[0], weights[1], bias, hidden_bias, projection, h0, c0[0] if c0 else None))
    if not all(direction.fits(cell) for direction in directions):
        return None
    return [directions[i : i + ways] for i in range(0, len(directions), ways)]


def _run(
    cell: str, x: Tensor, layers: Sequence[Sequence[_Direction]], dropout: float, lengths: Tensor | None
) -> tuple[Tensor, ...]:
    """Runs layers on x `[T, B, F]`; returns the last layer's output, and the last states of all layers, stacked."""
    last: list[tuple[Tensor, ...]] = []
    lower = torch.get_autocast_dtype(x.device.type) if _is_autocast(x) and x.dtype != torch.float64 else None
    for i, layer in enumerate(layers):
        outputs = []
        for way, direction in enumerate(layer):
            gates = F.linear(x, direction.input_weight, direction.input_bias)
            inner = (direction.weight, direction.bias, direction.projection)
            weights = (w if w is None or lower is None else w.to(lower) for w in inner)  # autocast skips the op
            states = Recurrence.apply(gates, *weights, direction.h0, direction.c0, lengths, cell, way == 1)  # type: ignore[no-untyped-call]
            outputs.append(states[0])
            last.append(tuple(x[0 if way else -1] for x in states[: 2 if cell == "lstm" else 1]))
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        if dropout and i < len(layers) - 1:
            x = F.dropout(x, dropout)
    return x, *(torch.stack(column) for column in zip(*last, strict=True))


def _is_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
