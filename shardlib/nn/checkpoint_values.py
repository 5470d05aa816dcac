"""Writes the values of a checkpoint, except its tensors, as bytes that `torch.load` reads back.

Files are read by `weights_only=True`, so they hold data and no code. Numpy's numbers and arrays are data, too.
"""

from __future__ import annotations

import io
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from pickle import PickleError
from typing import Any

import numpy as np
import torch

from shardlib.core.errors import ShardingError


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Returns the entries of a checkpoint as the bytes of a file.

    Raises `ShardingError` that names each value that could not be read back, by the keys that lead to it.
    """
    try:
        return _encode(values)
    except _UNSAVABLE as error:
        wrong = [fault for name, x in values.items() for fault in _faults(name, x, frozenset())]
        raise ShardingError(
            "a checkpoint cannot hold some of its values",
            wrong or [str(error)],
            rule="values are None, text, bytes, numbers, tensors, numpy's numbers and arrays, and dicts, lists, tuples "
            "and sets of these",
            remedy="save float(x), str(path), date.isoformat(), member.value, dataclasses.asdict(x), tuple(x), and "
            "make the object again; or allow its type in each process: torch.serialization.add_safe_globals([Type])",
        ) from error


def read_values(path: Path) -> dict[str, Any]:
    """Returns the entries in a file of `encode_values`."""
    with _with_numpy():
        values: dict[str, Any] = torch.load(path)
    return values


def _encode(values: Any) -> bytes:
    """Returns the bytes of a file; raises one of `_UNSAVABLE` if they could not be read back."""
    out = io.BytesIO()
    torch.save(values, out)
    with _with_numpy():
        torch.load(io.BytesIO(out.getvalue()))
    return out.getvalue()


# Errors of torch.save for objects that it cannot write, and of torch.load for unknown types.
_UNSAVABLE = (PickleError, TypeError, AttributeError, ValueError, RuntimeError)


def _faults(path: str, x: Any, around: frozenset[int]) -> Iterator[str]:
    """Yields the innermost values that cannot be written, with their keys; `around` are ids of outer values."""
    try:
        _encode(x)
        return
    except _UNSAVABLE:
        inner: list[tuple[str, Any]] = []
    if isinstance(x, Mapping):
        inner = [*((f"{path}.{k}", y) for k, y in x.items()), *((f"a key of {path}", k) for k in x)]
    elif isinstance(x, list | tuple | set | frozenset):
        inner = [(f"{path}.{i}", y) for i, y in enumerate(x)]
    deeper = [fault for at, y in inner if id(y) not in around for fault in _faults(at, y, around | {id(x)})]
    yield from deeper or [f"{path} is a {type(x).__name__}: {reprlib.repr(x)}"]


def _with_numpy() -> AbstractContextManager[Any]:
    """Returns a context in which `torch.load` accepts numpy's numbers and arrays."""
    return torch.serialization.safe_globals(_numpy_types())


@cache
def _numpy_types() -> list[Any]:
    makers: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
    named = [(make, f"numpy.{core}.multiarray.{make.__name__}") for make in makers for core in ("core", "_core")]
    dtypes = [x for x in vars(np.dtypes).values() if isinstance(x, type) and issubclass(x, np.dtype)]
    return [*named, np.ndarray, np.dtype, *dtypes, bytes]  # a file stores empty bytes as a call of `bytes`
