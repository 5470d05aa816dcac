"""The form of a ShardedTensor: shape, strides, dtype, layout, mesh and names, as one shared object.

Equal forms are one object, so that they are compared and hashed by identity. This makes it cheap to look up the program
of an eager op, or of a call of a jitted function.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FactorNames

_forms: dict[Any, weakref.ref[Form]] = {}  # live forms
_lock = threading.Lock()


class Form:
    """All of a ShardedTensor but its values; made by `Form.intern`.

    Strides and offset are those of one device. They relate views to each other; shards may have others.
    """

    __slots__ = ("__weakref__", "device", "dtype", "layout", "mesh", "names", "offset", "shape", "strides")

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    mesh: Mesh
    names: FactorNames

    @staticmethod
    def intern(
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        names: FactorNames | None = None,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Form:
        """Returns the form with these properties, contiguous by default."""
        shape = layout.shape
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        names = names or tuple((None,) * len(dim) for dim in layout.dims)
        key = (layout, mesh, dtype, device, names, strides, offset)
        form = _live_form(key)
        if form is None:
            with _lock:  # two equal forms would be two keys
                form = _live_form(key)
                if form is None:
                    form = Form()
                    form.shape, form.strides, form.offset = torch.Size(shape), strides, offset
                    form.dtype, form.device = dtype, device
                    form.layout, form.mesh, form.names = layout, mesh, names
                    _forms[key] = weakref.ref(form, functools.partial(_forget, key))
        return form

    def abstract(self, device: str | torch.device = "meta") -> torch.Tensor:
        """Returns a tensor with this shape, dtype, strides and offset."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)
        memory = torch.empty(last + 1, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides, self.offset)

    def __repr__(self) -> str:
        return f"Form({self.dtype}[{self.layout}] on {self.mesh})"


def _live_form(key: Any) -> Form | None:
    reference = _forms.get(key)
    return None if reference is None else reference()


def _forget(key: Any, _: object) -> None:
    weakref._remove_dead_weakref(_forms, key)  # type: ignore[attr-defined]  # keeps an equal newer form


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor; as in torch, an empty dim counts as one."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype in types: f32, bf16, i64."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
