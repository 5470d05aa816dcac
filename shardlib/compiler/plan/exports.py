"""A plan's layouts in the terms of other libraries."""

from __future__ import annotations

from typing import Any

from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.plan.module_tensors import dtensor_placements
from shardlib.compiler.plan.tp_plan import tp_plan


class Exports:
    """The methods of a plan that return its layouts for transformers and for DTensor."""

    compiled: Compiled

    def to_tp_plan(self, axis: str = "tensor") -> dict[str, str]:
        """Returns the parameters' layouts along one mesh axis as a `tp_plan` of transformers, by names in the module.

        Sharding over other axes is not part of it. Raises `ShardingError` with all layouts that no style of
        transformers expresses.

        Example:
            >>> from collections import OrderedDict
            >>> import torch, shardlib as sl
            >>> mlp = torch.nn.Sequential(OrderedDict(up=torch.nn.Linear(4, 8), down=torch.nn.Linear(8, 4)))
            >>> with sl.Mesh(tensor=2):
            ...     mlp = sl.parallelize(mlp, {"up.*": "ff@tensor ...", "down.weight": "_ ff@tensor"})
            ...     plan = mlp.forward.plan(torch.ones(2, 4))
            >>> plan.to_tp_plan()
            {'up': 'colwise', 'down': 'rowwise'}
        """
        return tp_plan(self.compiled, axis)

    def to_dtensor_placements(self) -> dict[str, tuple[Any, ...]]:
        """Returns for every input one DTensor placement per mesh axis; parameters have their names in the module.

        `torch.distributed.tensor.distribute_tensor(x, device_mesh, placements[name])` gives the same shards on a
        DeviceMesh with the same axes. Raises `ShardingError` with all layouts that DTensor does not have.

        Example:
            >>> import torch, shardlib as sl
            >>> with sl.Mesh(data=2, tensor=2):
            ...     layer = sl.parallelize(torch.nn.Linear(4, 8), {"weight": "out@tensor _"})
            ...     placements = layer.forward.plan(torch.ones(2, 4)).to_dtensor_placements()
            >>> placements["weight"]
            (Replicate(), Shard(dim=0))
        """
        return dtensor_placements(self.compiled)
