"""Places the parameters of a module: on their stage, in the layouts of their specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardlib.core.context import is_single_device, is_tracing
from shardlib.core.torch_internals.strided_only import refuse_unstrided
from shardlib.core.torch_internals.torch_private import settle_rnn
from shardlib.jit.shard import shard, shard_known
from shardlib.nn.parameters import NamedTensor, refuse_losses, replace_tensor
from shardlib.nn.strategies import StrategyAxes, shard_one_dim
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import P, Spec, resolve_many
from shardlib.tensor.rank_checks import require_equal_values
from shardlib.tensor.sharded_tensor import PLACEMENT_ATTRIBUTES, REGATHER, ShardedTensor


@dataclass
class Placer:
    """Places the parameters of a module. With `keeps_earlier`, a parameter that does not move keeps its attributes."""

    module: nn.Module
    tensors: Sequence[NamedTensor]
    mesh: Mesh
    strategy_axes: StrategyAxes
    keeps_earlier: bool
    stages: Mapping[str, int] = field(default_factory=dict)  # of parameters that live on one

    def place(self, table: Mapping[str, str | P | Spec], dtypes: Mapping[str, torch.dtype | None]) -> None:
        """Replaces parameters that get another layout or dtype; sets the specs of their gradients and moments."""
        module, mesh, name = self.module, self.mesh, f"parallelize({type(self.module).__name__})"
        specs = self._resolve(table)
        moving = {
            x.name: x
            for x in self.tensors
            if not _is_placed_at(x.tensor, specs[x.name][0], self._mesh_of(x.name))
            or (dtypes.get(x.name) or x.tensor.dtype) != x.tensor.dtype
        }
        refuse_losses(name, [*moving.values()])
        placements = {at: specs[at][0].resolve(x.tensor.shape, mesh, name=at) for at, x in moving.items()}
        digests = _compare_ranks(name, moving, placements, mesh)
        for x in self.tensors:
            with self._mesh_of(x.name) as at:
                own, *others = specs[x.name]
                if x.name not in moving and self.keeps_earlier:
                    continue
                value = x.tensor.detach().to(dtypes.get(x.name) or x.tensor.dtype)
                new = x.tensor
                if x.name in digests:
                    new = replace_tensor(module, x, shard_known(x.name, value, placements[x.name], at, digests[x.name]))
                elif x.name in moving:
                    new = replace_tensor(module, x, shard(value, own))
                for attribute, spec in zip(PLACEMENT_ATTRIBUTES, others, strict=True):
                    new.__dict__.pop(attribute, None)
                    if str(spec) != str(own):
                        setattr(new, attribute, str(spec))
                new.__dict__.pop(REGATHER, None)
                if self.strategy_axes.regather and x.tensor.numel() >= self.strategy_axes.threshold:
                    setattr(new, REGATHER, True)
        for inner in module.modules():
            if isinstance(inner, nn.RNNBase):  # otherwise its first call changes its state, and later ones recompile
                settle_rnn(inner)

    def _mesh_of(self, name: str) -> Mesh:
        """Returns the part of the mesh that a parameter lives on."""
        return self.mesh.on_stage(self.stages.get(name))

    def _resolve(self, table: Mapping[str, str | P | Spec]) -> dict[str, tuple[Spec, Spec, Spec]]:
        """Returns the specs of every parameter, its gradient and its moments."""
        axes, mesh = self.strategy_axes, self.mesh
        shapes = {x.name: x.tensor.shape for x in self.tensors}
        items = [(at, shapes[at], spec, None) for at, spec in table.items()]
        fixed = dict(zip(table, resolve_many(items, mesh, call="parallelize"), strict=True))
        specs = {}
        for x in self.tensors:
            current = x.tensor.spec if isinstance(x.tensor, ShardedTensor) else "..."
            spec, shape = Spec.convert(table.get(x.name, current)), x.tensor.shape
            placement = fixed.get(x.name) or spec.resolve(shape, mesh)
            is_small = x.tensor.numel() < axes.threshold
            more = ((),) * 3 if is_small else (axes.parameters, axes.gradients, axes.moments)
            first, second, third = (shard_one_dim(placement, shape, mesh, a) if a else spec for a in more)
            specs[x.name] = first, second, third
        return specs


def _compare_ranks(
    caller: str, moving: Mapping[str, NamedTensor], placements: Mapping[str, FixedLayout], mesh: Mesh
) -> dict[str, int]:
    """Returns digests of the plain parameters, equal on all ranks; raises `ShardingError` if they differ."""
    if is_tracing() or is_single_device():
        return {}
    plain = {
        at: x.tensor for at, x in moving.items() if not isinstance(x.tensor, ShardedTensor) and not x.tensor.is_meta
    }
    refuse_unstrided(caller, [*plain.items()])
    layouts = [placements[at].layout for at in plain]
    return dict(zip(plain, require_equal_values(mesh, caller, [*plain.items()], layouts, _SEEDS), strict=False))


_SEEDS = (
    "the same torch.manual_seed(...) on every rank before the module is made; or make it under torch.device('meta'), "
    "and sl.materialize(module) then; or load the same checkpoint on every rank before"
)


def _is_placed_at(x: Tensor, spec: Spec, mesh: Mesh) -> bool:
    """Returns whether a tensor is placed so, on this mesh or a stage of it."""
    if not isinstance(x, ShardedTensor) or mesh.stage not in (None, x.mesh.stage):
        return False
    return spec.resolve(x.shape, x.mesh).layout == x.sharding
