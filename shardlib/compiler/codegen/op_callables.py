"""Chooses the callable for an op on shards: the fastest that is right for any strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.torch_internals.torch_private import OpOverload, c_functions, schema_of
from shardlib.ops import matmul

_OWN = ("prims", "shardlib", "shardlib_cuda", "shardlib_emulated", "torchvision")
_FAST: Mapping[str, Any] = {
    name: getattr(torch.Tensor, name)
    for name in ("expand", "permute", "t", "transpose", "unsqueeze", "reshape", "new_zeros", "new_ones", "new_full")
}


def _resolved(target: Any) -> Callable[..., Any]:
    """Returns the op with lazy conjugation resolved: bytes that are sent do not carry the bit."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = target(*args, **kwargs)
        return tuple(x.resolve_conj() for x in out) if isinstance(out, tuple) else out.resolve_conj()

    return call


def _trimmed(target: Any) -> Callable[..., Any]:
    """Returns the op with its result in memory of just its size, as plans count it."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = target(*args, **kwargs)
        return out.clone() if out.untyped_storage().nbytes() > out.nbytes else out

    return call


def _as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Views a local shard as another dtype; its strides may differ from those of the traced tensor."""
    return _packed(x).view(dtype)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Returns x contiguous; strides of an empty tensor count, too."""
    last = x.dim() == 0 or x.stride(-1) == 1
    return x if last and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _copied_as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as_dtype(x, dtype).clone()


def _as_complex(x: torch.Tensor) -> torch.Tensor:
    """Views pairs as complex numbers; a shard may have any strides."""
    return torch.view_as_complex(_packed(x))


def _as_real(x: torch.Tensor) -> torch.Tensor:
    """Views complex numbers as pairs, after resolving a lazy conjugation."""
    return torch.view_as_real(x.resolve_conj())


_PAIRS = {"view_as_complex": _as_complex, "view_as_real": _as_real}


def _dense(target: Any) -> Callable[..., Any]:
    """Makes operands contiguous for an op whose kernel may ignore strides: a shard may be a slice."""

    def dense(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(dense, x))
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    return lambda *args, **kwargs: target(*map(dense, args), **{k: dense(x) for k, x in kwargs.items()})


def callable_of(target: Any) -> Any:
    """Returns the cheapest callable for an op: torch's C functions parse arguments faster than `torch.ops` does.

    Both take the same arguments, with equal defaults but for `reduction`. If torch has no function of that name, the op
    itself is called.
    """
    return _callable_of(target) if isinstance(target, OpOverload) else target


@cache
def _callable_of(target: OpOverload) -> Any:
    if (own := matmul.FORMS.get(target)) is not None:
        return own
    schema = schema_of(target)
    if not schema.name.startswith("aten::"):
        return target if target.namespace in _OWN or schema.is_mutable else _dense(target)  # a copy takes no write
    if has_trait(target, "needs_contiguous"):
        return _dense(target)
    if any(str(a.type) == "List[Optional[Tensor]]" for a in schema.arguments):
        return target  # torch's own functions do not take the None of x[:, i]
    if has_trait(target, "overallocates"):
        return _trimmed(target)
    if any(a.name == "reduction" for a in schema.arguments):
        return target  # the default is no reduction in torch's own function, and a mean in the op
    name = schema.name.removeprefix("aten::")
    if has_trait(target, "may_set_lazy_bit"):
        return _resolved(target)
    if has_trait(target, "complex_pairs"):
        return _PAIRS[name]
    if has_trait(target, "bitcasts"):
        return _as_dtype if is_view(target) else _copied_as_dtype
    if has_trait(target, "reshapes"):
        return torch.Tensor.reshape  # a local shard may have other strides than the whole tensor that was traced
    if name.endswith("_") and hasattr(torch.Tensor, name):
        return getattr(torch.Tensor, name)
    return _FAST.get(name) or getattr(c_functions, name, target)
