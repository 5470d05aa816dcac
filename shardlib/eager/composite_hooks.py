"""Catches composite ops whose C++ code is wrong for ShardedTensors, above that code, and `flex_attention`.

The C++ code of these ops reads memory that a ShardedTensor does not have, or returns a new tensor instead of writing to
`out`. The hooks use the dispatch key of tensor subclasses and modes: plain tensors never reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from shardlib.core.torch_internals.torch_private import TransformType, keys_below, keys_of, schema_of
from shardlib.eager.arg_slots import list_tensors
from shardlib.eager.inplace import make_out_runner
from shardlib.frontend.torch_rewrites import flex_attention
from shardlib.frontend.torch_rewrites.recurrent import LAYERS, layers_as_ops
from shardlib.primitives.random.keys import PlainDraws
from shardlib.tensor import view_aliases
from shardlib.tensor.sharded_tensor import ShardedTensor

aten = torch.ops.aten
_ABOVE = Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch has no types for it
_KEY = torch.DispatchKey.PythonTLSSnapshot
_BELOW = keys_below(_KEY)


def _catch(op: Any, implementation: Callable[..., Any], at: str | None = None) -> None:
    """Runs `op` as `implementation(op, *args, **kwargs)` if an argument, or the one called `at`, is a ShardedTensor.

    If the implementation returns NotImplemented, the op runs as usual.
    """
    place = [a.name for a in schema_of(op).arguments].index(at) if at is not None else 0

    def caught(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        checked = (args, kwargs) if at is None else (kwargs.get(at), *args[place : place + 1])
        if any(isinstance(x, ShardedTensor) for x in list_tensors(checked)):
            result = implementation(op, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return op.redispatch(keys & _BELOW, *args, **kwargs)

    _ABOVE.impl(op.name(), caught, "PythonTLSSnapshot", with_keyset=True)  # type: ignore[no-untyped-call]


def _write_to_out(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an `out=` form: the op, then a write."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in list_tensors((args, kwargs))):
        raise RuntimeError(
            f"{schema_of(op).name.removeprefix('aten::')}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    return make_out_runner(op)(args, kwargs)


def _tensor_split(op: Any, x: Tensor, where: Tensor, dim: int = 0) -> Any:
    """Reads the split points from the whole tensor."""
    at = (where.full_tensor() if isinstance(where, ShardedTensor) else where).tolist()
    return torch.tensor_split(x, at, dim=dim)


def _batch_sizes(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Gathers `batch_sizes` of a `PackedSequence`, which the C++ code reads from memory."""
    names = [a.name for a in schema_of(op).arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    sizes = arguments.get("batch_sizes")
    if not isinstance(sizes, ShardedTensor):
        return NotImplemented
    return op(**{**arguments, "batch_sizes": sizes.full_tensor()})


def _recurrent(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs recurrent layers as one op each."""
    result = layers_as_ops(LAYERS[op])(*args, **kwargs)
    return _batch_sizes(op, *args, **kwargs) if result is None else result


def _pad_packed(op: Any, data: Tensor, batch_sizes: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Pads a packed sequence: torch's op computes the positions of row numbers, which then index the rows."""
    batch_first, value, *total = options
    sizes = batch_sizes.full_tensor() if isinstance(batch_sizes, ShardedTensor) else batch_sizes
    rows, lengths = op(torch.arange(len(data)), sizes, batch_first, -1, *total)
    is_row = (rows >= 0)[(..., *[None] * (data.dim() - 1))]
    return torch.where(is_row, data[rows.clamp(min=0)], value), lengths


def _one_hot(op: Any, x: Tensor, num_classes: int = -1) -> Tensor:
    """Reads the number of classes from the whole tensor; torch checks the smallest and largest class."""
    edges = [x.min().item(), x.max().item()] if x.numel() else []
    count = F.one_hot(torch.tensor(edges, dtype=x.dtype), num_classes).shape[-1]
    return (x.unsqueeze(-1) == torch.arange(count, device=x.device)).long()


def _resolve_conj(op: Any, x: Tensor) -> Tensor:
    """Copies a conjugate: a ShardedTensor records it in its view path, not in a bit."""
    return x.clone() if aten._conj.default in view_aliases.pending_marks(x) else x


def _resolve_neg(op: Any, x: Tensor) -> Tensor:
    return x.clone() if aten._neg_view.default in view_aliases.pending_marks(x) else x


def _part(op: Any, x: Tensor) -> Tensor:
    """Returns the real or the imaginary part; of a conjugate, the latter is a negated view."""
    if not x.is_complex():
        if op is aten.real.default:
            return x
        raise RuntimeError("imag is not implemented for tensors with non-complex dtypes.")
    conjugate = aten._conj.default in view_aliases.pending_marks(x)
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
    _catch(_op, _write_to_out)
_catch(aten.tensor_split.tensor_indices_or_sections, _tensor_split)
_catch(aten.resolve_conj.default, _resolve_conj)
_catch(aten.resolve_neg.default, _resolve_neg)
_catch(aten.real.default, _part)
_catch(aten.imag.default, _part)
_catch(aten.one_hot.default, _one_hot)
_catch(aten._pad_packed_sequence.default, _pad_packed)
_catch(aten._pack_padded_sequence_backward.default, _batch_sizes, "batch_sizes")
for _layers in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
    _catch(_layers.input, _recurrent)
    _catch(_layers.data, _recurrent)


@flex_attention.OPERATOR.py_impl(_KEY)  # type: ignore[untyped-decorator]
def _flex_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Runs `flex_attention` above autograd as ops, which autograd then records as usual."""
    if flex_attention.is_handled(query, key, value):
        sharded = any(isinstance(x, ShardedTensor) for x in (query, key, value))
        return flex_attention.flex_attention(query, key, value, *rest, **options, fused=sharded)
    keys = keys_of((query, key, value, *rest), options, flex_attention.OPERATOR.non_fallthrough_keys.remove(_KEY))
    return flex_attention.OPERATOR.dispatch(keys.highestPriorityTypeId(), query, key, value, *rest, **options)


def _flex_attention_under_transform(_: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `flex_attention` as ops under torch.func, which has rules for the ops but not for torch's operator."""
    return flex_attention.flex_attention(*args, **kwargs)


for _kind in (TransformType.Grad, TransformType.Jvp, TransformType.Vmap):
    flex_attention.OPERATOR.py_impl(_kind)(_flex_attention_under_transform)
flex_attention.TYPES.add(ShardedTensor)
flex_attention.MODES.add(PlainDraws)  # dynamo supports no other modes than torch's
