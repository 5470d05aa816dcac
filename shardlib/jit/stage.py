"""`stage`: names the stage of a pipeline that a part of the program belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import FragmentTag, tagged


@contextmanager
def stage(i: int) -> Iterator[None]:
    """Runs the code inside on stage `i` of the current mesh, its backward pass too.

    Values flow from lower stages to higher ones. On a mesh without stages, and without a mesh, it does nothing. With a
    schedule of v parts per stage, `i` counts the parts of the model: a mesh of P stages runs v * P of them. Raises
    `ShardingError` if `i` is no whole number from 0 on. (The programs of stages: Xu et al. 2021, GSPMD,
    arXiv:2105.04663, cut them as a dim of tensors; here each stage is a program of its own, as in JaxPP,
    arXiv:2412.14374.)

    Example:
        >>> import torch, shardlib as sl
        >>> def f(x, v, w):
        ...     with sl.stage(0):
        ...         x = torch.relu(x @ v)
        ...     with sl.stage(1):
        ...         return (x @ w).sum()
        >>> with sl.Mesh(stage=2, data=2, stages="stage"):
        ...     sl.jit(f)(torch.ones(4, 2), torch.ones(2, 3), torch.ones(3, 1)).full_tensor()
        tensor(24.)
    """
    if type(i) is not int or i < 0:
        raise ShardingError(f"sl.stage({i!r}) is no stage", rule="a stage is a whole number from 0 on")
    with tagged(FragmentTag(stage=i)):
        yield
