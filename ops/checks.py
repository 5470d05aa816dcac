"""What an op refuses by its values: a program that only knows shapes, or looks at a piece, asks for it here.

On a CPU it is an exception. A GPU stops with an assertion when it gets there, as torch's kernels do: nobody waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define("check_index(Tensor index, int low, int high, int? ignore=None) -> ()")
_LIB.define("within(Tensor x, Scalar low, Scalar high, str rule) -> Tensor")


def check_index(index: Tensor, low: int, high: int, ignore: int | None = None) -> None:
    """Refuse indices, of any shape, outside of `low <= i < high` that are not `ignore`.

    Raises IndexError on CPUs.

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
        torch.ops.aten._assert_async.msg(fits.all(), f"an index is out of bounds for a dim of size {high}")
    elif not fits.all():
        raise IndexError(f"index {int(index[~fits][0])} is out of bounds for a dim of size {high}")


def within(x: Tensor, low: float, high: float, rule: str) -> Tensor:
    """A copy of `x`, of any shape, whose values lie from `low` to `high`; NaN does not. `rule` says so in words.

    Raises RuntimeError on CPUs.

    Example:
        >>> within(torch.tensor([0.5]), 0, 1, "a probability lies between 0 and 1")
        tensor([0.5000])
        >>> within(torch.tensor([1.5]), 0, 1, "a probability lies between 0 and 1")
        Traceback (most recent call last):
        RuntimeError: a probability lies between 0 and 1: this one is 1.5
    """
    fits = (x >= low) & (x <= high)
    if x.device.type != "cpu":
        torch.ops.aten._assert_async.msg(fits.all(), rule)
    elif not fits.all():
        raise RuntimeError(f"{rule}: this one is {x[~fits][0].item()}")
    return x.clone()


_LIB.impl("check_index", check_index, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::check_index", lambda index, low, high, ignore=None: None, lib=_LIB)
_LIB.impl("within", within, "CompositeExplicitAutograd")
torch.library.register_fake("shardlib::within", lambda x, low, high, rule: torch.empty_like(x), lib=_LIB)
torch.library.register_autograd("shardlib::within", lambda ctx, grad: (grad, None, None, None), lib=_LIB)

CHECK_INDEX: Any = torch.ops.shardlib.check_index.default
WITHIN: Any = torch.ops.shardlib.within.default
