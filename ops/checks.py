"""Checks of values, as ops: a program that knows shapes only, or a shard only, runs the checks of torch's ops by them.

A CPU raises an exception. A GPU stops with an asynchronous assertion, as in torch's kernels: the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardlib.ops import define_op


def check_index(index: Tensor, low: int, high: int, ignore: int | None = None) -> None:
    """Raises IndexError (on CPUs) unless all indices, of any shape, are in `low <= i < high` or equal to `ignore`."""
    fits = (index >= low) & (index < high)
    if ignore is not None:
        fits |= index == ignore
    if index.device.type != "cpu":
        torch.ops.aten._assert_async.msg(fits.all(), f"an index is out of bounds for a dim of size {high}")
    elif not fits.all():
        raise IndexError(f"index {int(index[~fits][0])} is out of bounds for a dim of size {high}")


def within(x: Tensor, low: float, high: float, rule: str) -> Tensor:
    """Returns a copy of `x`, of any shape, whose values must be between `low` and `high`, and not NaN.

    Raises RuntimeError with the text `rule` on CPUs.
    """
    fits = (x >= low) & (x <= high)
    if x.device.type != "cpu":
        torch.ops.aten._assert_async.msg(fits.all(), rule)
    elif not fits.all():
        raise RuntimeError(f"{rule}: this one is {x[~fits][0].item()}")
    return x.clone()


CHECK_INDEX = define_op(
    "check_index(Tensor index, int low, int high, int? ignore=None) -> ()",
    check_index,
    lambda index, low, high, ignore=None: None,
)
WITHIN = define_op(
    "within(Tensor x, Scalar low, Scalar high, str rule) -> Tensor",
    within,
    lambda x, low, high, rule: torch.empty_like(x),
)
torch.library.register_autograd("shardlib::within", lambda ctx, grad: (grad, None, None, None))
