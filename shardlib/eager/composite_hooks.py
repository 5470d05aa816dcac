"""Composite ops whose C++ decides above our dispatch, and wrongly for tensors in pieces: they are caught further above.

Of these, torch reads memory that is elsewhere, or hands a new tensor back instead of writing to `out`. The key at which
they are caught is that of tensor subclasses alone: plain tensors never come by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from shardlib.core.torch_private import keys_below, schema_of
from shardlib.eager.arg_slots import tensors_of
from shardlib.eager.inplace import through_copies
from shardlib.frontend.torch_rewrites.recurrent import LAYERS, written_as_ops
from shardlib.tensor import view_aliases
from shardlib.tensor.sharded_tensor import ShardedTensor

aten = torch.ops.aten
_ABOVE = Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch has no types for it
_BELOW = keys_below(torch.DispatchKey.PythonTLSSnapshot)


def _catch(op: Any, form: Callable[..., Any], at: str | None = None) -> None:
    """Run `op` as `form(op, *args, **kwargs)` where a ShardedTensor takes part, or is its argument called `at`.

    Where the form returns NotImplemented, the op runs as usual.
    """
    place = [a.name for a in schema_of(op).arguments].index(at) if at is not None else 0

    def caught(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        looked = (args, kwargs) if at is None else (kwargs.get(at), *args[place : place + 1])
        if any(isinstance(x, ShardedTensor) for x in tensors_of(looked)):
            result = form(op, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return op.redispatch(keys & _BELOW, *args, **kwargs)

    _ABOVE.impl(op.name(), caught, "PythonTLSSnapshot", with_keyset=True)  # type: ignore[no-untyped-call]


def _written(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An `out=` form: the op, then a write."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of((args, kwargs))):
        raise RuntimeError(
            f"{schema_of(op).name.removeprefix('aten::')}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    return through_copies(op)(args, kwargs)


def _tensor_split(op: Any, x: Tensor, where: Tensor, dim: int = 0) -> Any:
    """Where to split is read from the whole tensor."""
    at = (where.full_tensor() if isinstance(where, ShardedTensor) else where).tolist()
    return torch.tensor_split(x, at, dim=dim)


def _batch_sizes(op: Any, *args: Any, **kwargs: Any) -> Any:
    """How many sequences are how long is read from memory: `batch_sizes`, as `PackedSequence` has it."""
    names = [a.name for a in schema_of(op).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    sizes = arguments.get("batch_sizes")
    if not isinstance(sizes, ShardedTensor):
        return NotImplemented
    return op(**{**arguments, "batch_sizes": sizes.full_tensor()})


def _recurrent(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers of cells are an op each, not one per step."""
    result = written_as_ops(LAYERS[op])(*args, **kwargs)
    return _batch_sizes(op, *args, **kwargs) if result is None else result


def _padded(op: Any, data: Tensor, batch_sizes: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """Where which row goes is read from memory, too; torch says it, given their numbers."""
    batch_first, value, *total = how
    sizes = batch_sizes.full_tensor() if isinstance(batch_sizes, ShardedTensor) else batch_sizes
    rows, lengths = op(torch.arange(len(data)), sizes, batch_first, -1, *total)
    is_row = (rows >= 0)[(..., *[None] * (data.dim() - 1))]
    return torch.where(is_row, data[rows.clamp(min=0)], value), lengths


def _one_hot(op: Any, x: Tensor, num_classes: int = -1) -> Tensor:
    """Which classes there are is read from the whole tensor; torch says what is wrong with them."""
    edges = [x.min().item(), x.max().item()] if x.numel() else []
    count = F.one_hot(torch.tensor(edges, dtype=x.dtype), num_classes).shape[-1]
    return (x.unsqueeze(-1) == torch.arange(count, device=x.device)).long()


def _resolve_conj(op: Any, x: Tensor) -> Tensor:
    """A conjugate is marked as one by the way that leads to it, not by a bit."""
    return x.clone() if aten._conj.default in view_aliases.bits(x) else x


def _resolve_neg(op: Any, x: Tensor) -> Tensor:
    """So is a negated view."""
    return x.clone() if aten._neg_view.default in view_aliases.bits(x) else x


def _part(op: Any, x: Tensor) -> Tensor:
    """The real or the imaginary part; of a conjugate, the latter is a negated view."""
    if not x.is_complex():
        if op is aten.real.default:
            return x
        raise RuntimeError("imag is not implemented for tensors with non-complex dtypes.")
    conjugate = aten._conj.default in view_aliases.bits(x)
    index = int(op is aten.imag.default)
    part = torch.view_as_real(x.conj() if conjugate else x).select(-1, index)
    return aten._neg_view(part) if conjugate and index else part


for _op in (
    aten.matmul.out,
    aten.linalg_matrix_rank.out,
    aten.linalg_matrix_rank.out_tol_tensor,
    aten.linalg_matrix_rank.atol_rtol_float_out,
    aten.linalg_matrix_rank.atol_rtol_tensor_out,
):
    _catch(_op, _written)
_catch(aten.tensor_split.tensor_indices_or_sections, _tensor_split)
_catch(aten.resolve_conj.default, _resolve_conj)
_catch(aten.resolve_neg.default, _resolve_neg)
_catch(aten.real.default, _part)
_catch(aten.imag.default, _part)
_catch(aten.one_hot.default, _one_hot)
_catch(aten._pad_packed_sequence.default, _padded)
_catch(aten._pack_padded_sequence_backward.default, _batch_sizes, "batch_sizes")
for _layers in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
    _catch(_layers.input, _recurrent)
    _catch(_layers.data, _recurrent)
