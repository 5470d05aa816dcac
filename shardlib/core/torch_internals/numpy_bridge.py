"""Converts numpy arrays and numbers to tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree

ArrayTensors = dict[int, tuple[Any, torch.Tensor]]  # id of an array -> the array, a tensor that shares its memory


def convert_arrays(x: Any, name: str = "an argument", shown: ArrayTensors | None = None) -> Any:
    """Replaces numpy arrays in `x` by tensors, and numpy numbers by Python numbers.

    Tensors get memory of their own. With `shown`, the tensors of this call so far, a tensor shares the memory of a
    writable array, so that writes reach the array, and numpy numbers stay. Raises `ShardingError` for a dtype that
    torch lacks; errors call `x` by `name`.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return x
    leaves, tree = pytree.tree_flatten(x)
    if not any(isinstance(leaf, numpy.ndarray | numpy.generic) for leaf in leaves):
        return x
    return pytree.tree_unflatten([_convert_leaf(leaf, numpy, name, shown) for leaf in leaves], tree)


def _convert_leaf(leaf: Any, numpy: Any, name: str, shown: ArrayTensors | None) -> Any:
    if isinstance(leaf, numpy.generic):
        return leaf.item() if shown is None else leaf
    if not isinstance(leaf, numpy.ndarray):
        return leaf
    if shown is not None and type(leaf) not in (numpy.ndarray, numpy.memmap):
        raise ShardingError(
            f"{name} is a {type(leaf).__qualname__} of shape {list(leaf.shape)}",
            rule="arrays become tensors, which know nothing of masks and of what other classes of arrays add",
            remedy="pass numpy.asarray(a), and a mask as another array",
        )
    if shown is not None and leaf.ndim == 0:
        raise ShardingError(
            f"{name} is a numpy array of no dims, of dtype {leaf.dtype}",
            rule="arrays become tensors; beside a tensor, numpy has other dtypes than torch for one of no dims",
            remedy="pass a.item(), a number, or torch.as_tensor(a)",
        )
    try:
        if shown is None or not _can_share_memory(leaf):
            return torch.from_numpy(numpy.array(leaf))
        return shown.setdefault(id(leaf), (leaf, torch.from_numpy(leaf)))[1]
    except TypeError as error:
        raise ShardingError(
            f"{name} is a numpy array of dtype {leaf.dtype} and shape {list(leaf.shape)}",
            rule="arrays become tensors, as by torch.from_numpy",
            remedy="convert it to numbers first, or name the argument in static_argnames",
        ) from error


def _can_share_memory(x: Any) -> bool:
    return x.flags.writeable and x.dtype.isnative and all(s >= 0 and s % x.itemsize == 0 for s in x.strides)


def find_arrays(held: Iterable[Any]) -> list[Any]:
    """Returns the numpy arrays among these objects."""
    numpy: Any = sys.modules.get("numpy")
    return [] if numpy is None else [x for x in held if isinstance(x, numpy.ndarray)]


def array_bounds(x: Any) -> tuple[int, int]:
    """Returns the first and last address of a numpy array."""
    start: int = x.__array_interface__["data"][0]
    if not x.size:
        return start, start
    steps = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return start + sum(s for s in steps if s < 0), start + sum(s for s in steps if s > 0) + int(x.itemsize)


def to_tensor(x: Any, name: str) -> torch.Tensor:
    """Converts `x` to a tensor; raises `ShardingError` unless it is a tensor or a numpy array."""
    x = convert_arrays(x, name)
    if isinstance(x, torch.Tensor):
        return x
    is_numbers = isinstance(x, int | float) or (isinstance(x, list) and not any(map(torch.is_tensor, x)))
    text = f"{x!r:.60}, a {type(x).__name__}" if is_numbers else f"a {type(x).__name__}"
    raise ShardingError(
        f"{name} is {text}",
        rule="what is placed is a tensor, or a numpy array",
        remedy="shard(torch.tensor(x), spec)"
        if is_numbers
        else "sl.parallelize(module, specs) places a module"
        if isinstance(x, torch.nn.Module)
        else "shard each of its tensors, or torch.stack(x)",
    )


def share_an_element(
    a: torch.Tensor, b: torch.Tensor, start: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
) -> bool:
    """Returns whether two strided tensors have an address in common; True if that is too expensive to decide.

    `start` returns the first address of a tensor.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return True
    try:
        return bool(numpy.shares_memory(*(numpy.asarray(_Addresses(x, start(x))) for x in (a, b)), max_work=1 << 16))
    except numpy.exceptions.TooHardError:
        return True


class _Addresses:
    """The addresses of a tensor on any device, as a numpy array that must not be read."""

    def __init__(self, x: torch.Tensor, start: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{x.itemsize}",
            "shape": tuple(x.shape),
            "strides": tuple(step * x.itemsize for step in x.stride()),
            "data": (start, True),
        }
