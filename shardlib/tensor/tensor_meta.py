"""What a ShardedTensor is apart from its values: shape, strides, dtype, layout, mesh and names, as one shared object.

Equal forms are one object, so that they are compared and hashed by identity: that is what makes looking up the program
of an eager op, or of a call of a jitted function, cheap.
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
from shardlib.sharding.placement import Names

_forms: dict[Any, weakref.ref[Form]] = {}  # those that somebody has
_lock = threading.Lock()


class Form:
    """Made by `Form.of`. Strides and offset are those that the tensor would have on one device: they say what is a view
    of what, and no piece has to have them."""

    __slots__ = ("__weakref__", "device", "dtype", "layout", "mesh", "names", "offset", "shape", "strides")

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    mesh: Mesh
    names: Names

    @staticmethod
    def of(
        layout: Layout,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        names: Names | None = None,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Form:
        """The form with these properties; contiguous where `strides` is None."""
        shape = layout.shape
        strides = contiguous(shape) if strides is None else tuple(strides)
        names = names or tuple((None,) * len(dim) for dim in layout.dims)
        key = (layout, mesh, dtype, device, names, strides, offset)
        known = _forms.get(key)
        form = None if known is None else known()
        if form is None:
            with _lock:  # two equal forms would be two keys
                known = _forms.get(key)
                form = None if known is None else known()
                if form is None:
                    form = Form()
                    form.shape, form.strides, form.offset = torch.Size(shape), strides, offset
                    form.dtype, form.device = dtype, device
                    form.layout, form.mesh, form.names = layout, mesh, names
                    _forms[key] = weakref.ref(form, functools.partial(_forget, key))
        return form

    def abstract(self, device: str | torch.device = "meta") -> torch.Tensor:
        """A tensor with this shape, dtype, strides and offset, so that its views begin where those of the tensor do."""
        if not self.offset:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)
        memory = torch.empty(last + 1, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.strides, self.offset)

    def __repr__(self) -> str:
        return f"Form({self.dtype}[{self.layout}] on {self.mesh})"


def _forget(key: Any, _: object) -> None:
    weakref._remove_dead_weakref(_forms, key)  # type: ignore[attr-defined]  # not that of an equal form made since


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, as torch gives them: an empty dim counts as one."""
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
    """A dtype as types print it: f32, bf16, i64."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
