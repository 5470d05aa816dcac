"""Rewrites functions of torch that read values of tensors into forms that do not.

A traced function knows only shapes. These functions check their arguments (`cov`, `gaussian_nll_loss`), or use a mask
(`combinations`, `index_fill`, `index_put`), although the shape of the result does not depend on values. Their checks of
values run with the program. Recurrent layers need all operands on one device, also parameters made on meta.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.core.mode_restore import PersistentFunctionMode
from shardlib.core.torch_internals.torch_private import UPDATES_SCALE, pytree
from shardlib.frontend.hazards.value_inspection import (
    format_traced,
    format_traced_spec,
    refuse_address,
    refuse_dlpack,
    refuse_pickle,
)
from shardlib.frontend.lifted_inputs import LiftedInputs
from shardlib.frontend.torch_rewrites.grad_scaler import update_scale
from shardlib.frontend.torch_rewrites.recurrent import LAYERS, layers_as_ops
from shardlib.frontend.torch_rewrites.tensor_index import mark_as_copy, read_at_tensor, write_at_tensor
from shardlib.ops.checks import WITHIN


class Composites(PersistentFunctionMode):
    """Replaces torch's functions by the forms of this module; a form that returns None leaves the call to torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = _FORMS.get(func)
        result = form(*args, **kwargs) if form is not None else None
        return func(*args, **kwargs) if result is None else result


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor | None:
    if input.dim() > 2 or any(w is not None and w.dim() > 1 for w in (fweights, aweights)):
        return None  # torch says what is wrong
    x = input if input.dim() == 2 else input.reshape(1, -1)
    weights = [WITHIN(w, 0, math.inf, "a weight is not negative") for w in (fweights, aweights) if w is not None]
    w = math.prod(weights[1:], start=weights[0]) if weights else None
    total = x.shape[1] if w is None else w.sum()
    mean = (x if w is None else x * w).sum(1) / total
    norm = total - correction
    if w is not None and aweights is not None and correction:
        norm = total - correction * (w * aweights).sum() / total
    x = x - mean.unsqueeze(1)
    result = x @ (x if w is None else x * w).t().conj()
    return (result / (norm.clamp(min=0) if isinstance(norm, Tensor) else max(norm, 0))).squeeze()


def _corrcoef(input: Tensor) -> Tensor | None:
    result = _cov(input)
    if result is None or result.dim() == 0:
        return result if result is None else result / result
    deviation = torch.real(result.diag()).sqrt()
    result = result / deviation.unsqueeze(1) / deviation
    if result.is_complex():
        return torch.complex(result.real.clip(-1, 1), result.imag.clip(-1, 1))
    return result.clip(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor | None:
    if input.dim() != 1 or r < 1:
        return None
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(itertools.chain.from_iterable(choose(range(len(input)), r)))
    return input.index_select(0, torch.tensor(places, dtype=torch.int64, device=input.device)).reshape(-1, r)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor | None:
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return None
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or var.shape[-1:] != (1,) or var.shape[:-1] != input.shape[:-1]:
            return None
    with torch.no_grad():
        least: Tensor = WITHIN(var, 0, math.inf, "a variance is not negative").clamp(min=eps)
    var = var + (least - var).detach()  # the gradient goes past the bound
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor | None:
    if num_classes <= 0 or tensor.dtype != torch.int64:
        return None
    classes = WITHIN(tensor, 0, num_classes - 1, f"there are {num_classes} classes, from 0 on")
    result: Tensor = classes.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)
    return result.to(torch.int64)


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or value.dim():
        return None
    if input.dim() == 0:
        return torch.where(torch.ones((), dtype=torch.bool), value.to(input.dtype), input) if index.numel() else None
    filled = torch.zeros(input.shape[dim], dtype=torch.bool, device=input.device).index_fill(0, index, True)
    return torch.where(_along(filled, dim, input), value.to(input.dtype), input)


def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor | None:
    if not isinstance(start, Tensor):
        return None
    start = torch.where(start < 0, start + input.shape[dim], start)
    return mark_as_copy(input.index_select(dim, start + torch.arange(length, device=input.device)))


def _index_put(
    input: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor | None:
    """Writes one value wherever a mask is true, without counting the places."""
    if len(indices) != 1 or not isinstance(mask := indices[0], Tensor) or mask.dtype is not torch.bool:
        return None
    rest = input.dim() - mask.dim()
    if values.dim() > rest:
        if values.dim() != rest + 1 or values.shape[0] != 1:
            return None
        values = values.squeeze(0)
    mask = mask.reshape(*mask.shape, *(1,) * rest)
    return torch.where(mask, input + values if accumulate else values, input)


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor | None:
    """Pads circularly by concatenation; torch would write into an empty tensor."""
    dims = [*reversed(range(input.dim()))][: len(pad) // 2]
    ends = list(zip(dims, pad[::2], pad[1::2], strict=False))
    if mode != "circular" or len(pad) != 2 * (input.dim() - 2):
        return None
    if any(not 0 <= n <= input.shape[dim] for dim, *both in ends for n in both):
        return None  # torch cuts off, or says what is wrong
    for dim, before, after in ends:
        n = input.shape[dim]
        parts = input.narrow(dim, n - before, before), input, input.narrow(dim, 0, after)
        input = torch.cat([x for x in parts if x.shape[dim]], dim) if before or after else input
    return input


def _stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor | None:
    """Returns the spectra of windows of a dim, unfolded; torch would use strides."""
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    around = n_fft // 2 if center else 0
    fits = input.dim() in (1, 2) and 0 < n_fft <= input.shape[-1] + 2 * around and 0 < size <= n_fft and hop > 0
    plain = return_complex and align_to_window is None and input.is_floating_point()
    if not (fits and plain) or (window is not None and (window.is_complex() or window.shape != (size,))):
        return None  # torch does it, or says what is wrong
    x = input if input.dim() == 2 else input[None]
    if center:
        x = F.pad(x[:, None], (around, around), pad_mode)[:, 0]
    frames = x.unfold(-1, n_fft, hop)
    if window is not None or size < n_fft:
        before = (n_fft - size) // 2
        window = input.new_ones(size) if window is None else window
        frames = frames * F.pad(window, (before, n_fft - size - before))
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    result: Tensor = transform(frames, norm="ortho" if normalized else None).mT
    return result if input.dim() == 2 else result[0]


def _in_place(form: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def write(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        value = form(input, *args, **kwargs)
        return value if value is None else input.copy_(value)

    return write


def _along(x: Tensor, dim: int, like: Tensor) -> Tensor:
    return x.reshape([-1 if d == dim % like.dim() else 1 for d in range(like.dim())])


def _deep_copy(input: Tensor, memo: dict[int, Any]) -> Tensor | None:
    """Returns a leaf of its own, with the same value."""
    if not input.is_leaf or id(input) in memo:
        return memo.get(id(input))
    memo[id(input)] = out = input.detach().clone().requires_grad_(input.requires_grad)
    return out


def _matrix_rank(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Writes to `out`, which torch omits in a trace."""
    return None if out is None else out.copy_(torch.linalg.matrix_rank(*args, **kwargs))


def _of_cells(layers: Callable[..., Any], cell: str) -> Callable[..., Any]:
    """Runs recurrent layers as ops. Where torch's steps run, views of meta parameters are on the program's device."""
    as_ops = layers_as_ops(cell)

    def form(*args: Any, **kwargs: Any) -> Any:
        if (result := as_ops(*args, **kwargs)) is not None:
            return result
        if not any(isinstance(x, Tensor) and x.is_meta for x in pytree.tree_leaves((args, kwargs))):
            return None
        views = pytree.tree_map_only(Tensor, lambda x: x.view_as(x) if x.is_meta else x, (args, kwargs))
        return layers(*views[0], **views[1])

    return form


def _made_by(
    make: Callable[..., Tensor], data: Any, dtype: Any = None, device: Any = None, **more: Any
) -> Tensor | None:
    """Makes a tensor of numbers on the device of stand-ins, for a call that names meta."""
    lifted = LiftedInputs.current()
    if device is None or torch.device(device).type != "meta" or lifted is None or lifted.not_meta is None:
        return None
    return make(data, dtype=dtype, device=lifted.not_meta, **more)


def _new_tensor(x: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor | None:
    return _made_by(torch.tensor, data, dtype or x.dtype, device or x.device, **more)


_FORMS: dict[Any, Callable[..., Any]] = {
    **{make: functools.partial(_made_by, make) for make in (torch.tensor, torch.as_tensor)},
    Tensor.new_tensor: _new_tensor,
    Tensor.__repr__: format_traced,
    Tensor.__format__: format_traced_spec,
    Tensor.__reduce_ex__: refuse_pickle,
    Tensor.__deepcopy__: _deep_copy,
    Tensor.data_ptr: refuse_address,
    Tensor.__dlpack__: refuse_dlpack,
    Tensor.__getitem__: read_at_tensor,
    Tensor.__setitem__: write_at_tensor,
    torch.linalg.matrix_rank: _matrix_rank,
    UPDATES_SCALE: update_scale,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
    F.one_hot: _one_hot,
    F.pad: _pad,
    torch.stft: _stft,
    Tensor.stft: _stft,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
    Tensor.index_fill_: _in_place(_index_fill),
    torch.narrow: _narrow,
    Tensor.narrow: _narrow,
    torch.index_put: _index_put,
    torch.index_put_: _in_place(_index_put),
    Tensor.index_put: _index_put,
    Tensor.index_put_: _in_place(_index_put),
    **{layers: _of_cells(layers, cell) for layers, cell in LAYERS.items()},
}
