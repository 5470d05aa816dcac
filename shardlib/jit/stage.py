"""`stage`: names the stage of a pipeline that a part of the program belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import FragmentTag, tagged
from shardlib.sharding.mesh.mesh import current_mesh


@contextmanager
def stage(i: int) -> Iterator[None]:
    """Runs the code inside on stage `i` of the current mesh, its backward pass too.

    Values flow from lower stages to higher ones. On a mesh without stages, and without a mesh, it does nothing. Raises
    `ShardingError` if the mesh has no such stage. (The programs of stages: Xu et al. 2021, GSPMD, arXiv:2105.04663, cut
    them as a dim of tensors; here each stage is a program of its own, as in JaxPP, arXiv:2412.14374.)

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
    mesh = current_mesh()
    count = None if mesh is None or mesh.stage_axis is None else mesh.stages
    if type(i) is not int or i < 0 or (count is not None and i >= count):
        stages = "a whole number from 0 on" if count is None else f"0 to {count - 1}"
        raise ShardingError(f"sl.stage({i!r}) is no stage of {mesh}", [f"a stage of it is {stages}"])
    with tagged(FragmentTag(stage=i)):
        yield
