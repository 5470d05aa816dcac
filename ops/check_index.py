"""Whether indices lie in a dim: what an op on the whole dim would refuse, one that looks at a piece cannot see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("check_index(Tensor index, int low, int high, int? ignore=None) -> ()")


def check_index(index: Tensor, low: int, high: int, ignore: int | None = None) -> None:
    """Refuse indices, of any shape, outside of `low <= i < high` that are not `ignore`.

    Raises IndexError on CPUs. A GPU stops with an assertion when it gets there, as torch's kernels do: nobody waits.

    Example:
        >>> check_index(torch.tensor([0, -100, 3]), 0, 4, -100)
        >>> check_index(torch.tensor([0, 4]), 0, 4)
        Traceback (most recent call last):
        IndexError: index 4 is out of bounds for a dim of size 4
    """
    fits = (index >= low) & (index < high)
    if ignore is not None:
        fits |= index == ignore
    if index.device.type != "cpu":
        torch._assert_async(fits.all(), f"an index is out of bounds for a dim of size {high}")
    elif not fits.all():
        raise IndexError(f"index {int(index[~fits][0])} is out of bounds for a dim of size {high}")


_LIB.impl("check_index", check_index, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::check_index", lambda index, low, high, ignore=None: None, lib=_LIB)

OP: Any = torch.ops.shardlib.check_index.default
