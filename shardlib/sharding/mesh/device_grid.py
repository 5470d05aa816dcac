"""The grid of a mesh: its axes, the coordinates of its devices, the ranks of its groups, and its stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardlib.core.errors import ShardingError
from shardlib.distributed import world
from shardlib.sharding.mesh.axis import Axis, Coords, group_size, member_coords
from shardlib.sharding.mesh.mesh_format import Kind, did_you_mean


@dataclass(frozen=True, init=False, repr=False, eq=False)
class DeviceGrid:
    """Devices at integer coordinates along named axes, the right-most varying fastest over the ranks.

    `axes` shard tensors; `shape` also has the axis of stages. With a `stage`, the grid is the part at that stage.
    """

    axes: Mapping[str, int]
    shape: Mapping[str, int]
    stage_axis: str | None
    stage: int | None
    kind: Kind

    @cached_property
    def size(self) -> int:
        """The number of devices, of all stages."""
        return math.prod(self.shape.values())

    @property
    def stages(self) -> int:
        """The number of stages; 1 without an axis of stages."""
        return 1 if self.stage_axis is None else self.shape[self.stage_axis]

    @property
    def stage_size(self) -> int:
        """The number of devices of one stage: all of them without an axis of stages."""
        return self.size // self.stages

    @property
    def is_elsewhere(self) -> bool:
        """True if this process is a rank of another stage than the mesh's."""
        return self.kind == "distributed" and self.stage is not None and self.stage_of(self.rank) != self.stage

    @property
    def member_ranks(self) -> list[int]:
        """The ranks that hold tensors of this grid: those of its stage, else all."""
        return [rank for rank in range(self.size) if self.stage in (None, self.stage_of(rank))]

    def stage_of(self, rank: int) -> int:
        """Returns the stage of one rank; 0 without an axis of stages."""
        return 0 if self.stage_axis is None else self.all_axes_coords(rank)[self.stage_axis]

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.axes)

    def __getitem__(self, name: str) -> int:
        return self.stages if name == self.stage_axis else self.axis(name).size

    def __contains__(self, name: object) -> bool:
        return name in self.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.shape)

    def __len__(self) -> int:
        return len(self.shape)

    def keys(self) -> KeysView[str]:
        """The names of axes: `dict(mesh)` and `**mesh` read them."""
        return self.shape.keys()

    @property
    def rank(self) -> int:
        """This process's rank; 0 in a plain process."""
        return world.rank() if self.kind == "distributed" else 0

    def axis(self, name: str) -> Axis:
        """Returns the whole axis of this name."""
        if name == self.stage_axis:
            raise ShardingError(
                f"{self} cannot shard a tensor over {name!r}",
                rule=f"{name!r} is the axis of stages: each stage runs another part of the model",
                remedy="with sl.stage(i): around the code of a stage, and shard over another axis",
            )
        if name not in self.axes:
            raise ShardingError(f"{self} has no axis {name!r}{did_you_mean(str(name), self.axes)}")
        return Axis(name, self.axes[name])

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of one rank along the axes that shard."""
        coords = self.all_axes_coords(rank)
        return {name: coords[name] for name in self.axes}

    def all_axes_coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of one rank along all axes, that of stages included."""
        if not 0 <= rank < self.size:
            raise ShardingError(f"{self} has no rank {rank}", [f"its ranks are 0 to {self.size - 1}"])
        coords: dict[str, int] = {}
        for name, size in reversed(list(self.shape.items())):
            rank, coords[name] = divmod(rank, size)
        return coords

    def all_coords(self) -> list[dict[str, int]]:
        """Returns the coordinates of all devices of one stage, in the order of their ranks."""
        return [dict(zip(self.axes, step, strict=True)) for step in itertools.product(*map(range, self.axes.values()))]

    def own_coords(self) -> list[dict[str, int]]:
        """Returns the coordinates of this process's devices: all of a virtual mesh, else its rank's."""
        return self.all_coords() if self.kind == "virtual" else [self.coords(self.rank)]

    def rank_of(self, coords: Coords) -> int:
        """Returns the rank at these coordinates; without a stage, of this mesh's stage, else of this process's.

        Example:
            >>> from shardlib import Mesh
            >>> Mesh(data=2, tensor=4).rank_of({"data": 1, "tensor": 2})
            6
        """
        rank, stage = 0, None
        if self.stage_axis is not None and self.stage_axis not in coords:
            stage = self.stage_of(self.rank) if self.stage is None else self.stage
        for name, size in self.shape.items():
            rank = rank * size + (coords.get(name, stage or 0) if name == self.stage_axis else coords[name])
        return rank

    def group_ranks(self, axes: tuple[Axis, ...], coords: Coords) -> list[int]:
        """Returns the ranks of the group of `coords` along `axes` (or parts of axes), major first (see `rank_of`).

        Example:
            >>> from shardlib import Mesh
            >>> mesh = Mesh(data=2, tensor=4)
            >>> mesh.group_ranks((mesh.axis("data"),), mesh.coords(6))
            [2, 6]
            >>> mesh.group_ranks((Axis("tensor", 2, pre=2, axis_size=4),), mesh.coords(6))
            [6, 7]
        """
        return [self.rank_of(member_coords(coords, axes, i)) for i in range(group_size(axes))]
