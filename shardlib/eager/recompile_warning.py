"""Warns if one eager op is compiled again and again because one size or number of its calls changes.

A first pass over layers of many shapes compiles many programs, too, and needs no warning. So a call counts only if it
differs from the call before it, at the same line, in one quantity, and the warning needs more calls than layers have
shapes. Under torch's function transforms numbers do not count: these loop over the columns of a Jacobian, which users
cannot change.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.source_lines import caller_at
from shardlib.core.torch_internals.torch_private import TRANSFORMS, schema_of
from shardlib.frontend.guards.recompile_reasons import RetraceWarning
from shardlib.tensor.eager_cache import OPS_KEYED_BY_NUMBER_TYPE

_OFTEN = 32  # compiled programs before the warning

Place = tuple[str, ...]  # the argument, the number of its item, and "size" for a tensor


@dataclass
class _Line:
    """The compiled calls of one op at one line; `last` holds the quantities of the last call."""

    last: dict[Place, Any] = field(default_factory=dict)
    times: int = 0


_lines: BoundedCache[tuple[str, int, Any], _Line] = BoundedCache(1 << 12)
_warned: BoundedCache[tuple[str, int], None] = BoundedCache(1 << 12)  # by line: one warning for all of its ops


def note_compiled(op: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Records a compiled call; warns `RetraceWarning`, once per line, if one quantity has changed often."""
    file, number = caller_at(sys._getframe(1))
    numbers = not _is_transformed(sys._getframe(1))
    line = _lines.get((file, number, op))
    if line is None:
        line = _lines[file, number, op] = _Line()
    last, line.last = line.last, dict(_quantities(op, args, kwargs, numbers=numbers))
    changes = _changes(last, line.last)
    if len({b - a if type(a) is type(b) is int else (a, b) for a, b, _ in changes}) != 1:  # a window slides by one step
        return
    line.times += 1
    if line.times != _OFTEN or (file, number) in _warned:
        return
    _warned[file, number] = None
    old, new, where = changes[0]
    remedy = _SIZE if where.startswith("the size") else _NUMBER
    warnings.warn_explicit(
        f"{schema_of(op).name.removeprefix('aten::')} has been compiled {_OFTEN + 1} times outside jit, the last time "
        f"because of {where}: {old} -> {new}.\nRemedy: {remedy}",
        RetraceWarning,
        file,
        number,
    )


def _is_transformed(frame: FrameType | None) -> bool:
    """True if a transform of torch (jacobian, vmap) runs the code of `frame`."""
    while frame is not None and not frame.f_code.co_filename.startswith(TRANSFORMS):
        frame = frame.f_back
    return frame is not None


def _quantities(op: Any, args: Any, kwargs: Mapping[str, Any], *, numbers: bool) -> Iterator[tuple[Place, Any]]:
    """Yields the shapes, and with `numbers` the numbers, in a call's key, by their places."""
    names = [a.name for a in schema_of(op).arguments]
    loose = id(op) in OPS_KEYED_BY_NUMBER_TYPE
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        items = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
        for i, x in items:
            place = (name, f"[{i}]") if i != "" else (name, "")
            if isinstance(x, torch.Tensor):
                yield (*place, "size"), tuple(x.shape)
            elif numbers and isinstance(x, int | float | complex) and not (loose and type(x) is not bool):
                yield place, x


def _changes(last: Mapping[Place, Any], now: Mapping[Place, Any]) -> list[tuple[Any, Any, str]]:
    """Returns the changed values, old, new and description; an empty list if calls differ in more than values."""
    if last.keys() != now.keys():
        return []
    changes = []
    for place, new in now.items():
        old = last[place]
        if place[-1] != "size":
            if old != new and type(old) is type(new):
                changes.append((old, new, f"the argument {''.join(place)}"))
        elif len(old) != len(new):
            return []
        else:
            changes += [
                (a, b, f"the size of dim {d} of {''.join(place[:-1])}")
                for d, (a, b) in enumerate(zip(old, new, strict=True))
                if a != b
            ]
    return sorted(changes, key=lambda change: change[2].startswith("the size"))  # a size often follows a number


_SIZE = (
    "pad to a few shapes: a program is for the shapes of its operands; or jit the function around it, which is then "
    "compiled as a whole"
)
_NUMBER = (
    "keep to a few values: a program is for the indices, sizes and flags of its call. Pass an index as a tensor, "
    "x.index_select(dim, i), or select by a mask, x.masked_fill(mask, 0): values of tensors are inputs"
)
