"""Strategies of data parallelism: mesh axes that shard batch, parameters, gradients and moments, in addition to specs.

| strategy | batch | parameters | gradients | moments | known as |
|---|---|---|---|---|---|
| `ddp` | sharded | | | | distributed data parallel |
| `zero1` | sharded | | | sharded | ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) |
| `zero2` | sharded | | sharded | sharded | ZeRO-2 |
| `fsdp` | sharded | sharded | sharded | sharded | ZeRO-3, FSDP (Zhao et al. 2023, arXiv:2304.11277) |
| `hsdp` | over both | over `shard` | over `shard` | over `shard` | MiCS (Zhang et al. 2022, arXiv:2205.00119) |

Moments are optimizer state with the shape of the parameter; statistics of rows and columns (Adafactor) are replicated.

Example:
    >>> import torch, shardlib as sl
    >>> with sl.Mesh(x=4):  # no axis has a usual name, so the strategy names it
    ...     model = sl.parallelize(torch.nn.Linear(8, 4), strategy=sl.strategies.fsdp("x", threshold=8))
    >>> sl.typeof(model.weight), sl.typeof(model.bias)
    ('f32[4, 8@x]', 'f32[4]')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardlib.core.errors import ShardingError
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.sharding.spec import Spec

DATA = ("pod", "replica", "data", "batch", "dp", "shard", "fsdp")  # names of axes that shard the batch,
SEQUENCE = ("seq", "sequence", "context", "cp", "sp")  # the sequence,
TENSOR = ("tensor", "model", "tp")  # and weights inside a layer

Axes = tuple[str, ...] | None


@dataclass(frozen=True)
class Strategy:
    """Mesh axes that shard the batch, parameters, gradients and moments; None stands for the data axes of the mesh.

    `threshold`: parameters of fewer elements, their gradients and moments keep to their specs.
    `regather`: a parameter is gathered again for the backward pass instead of kept, and gradients that accumulate over
    micro-steps are scattered first.
    """

    batch: Axes = None
    parameters: Axes = ()
    gradients: Axes = ()
    moments: Axes = ()
    threshold: int = 0
    regather: bool = False

    def on(self, mesh: Mesh) -> StrategyAxes:
        """Returns the axes on a mesh. Raises `ShardingError` for axes that the mesh does not have."""
        data = axes_for("batch", DATA, mesh)
        fields = (self.batch, self.parameters, self.gradients, self.moments)
        batch, parameters, gradients, moments = (data if axes is None else axes for axes in fields)
        used = dict.fromkeys((*batch, *parameters, *gradients, *moments))
        wrong = [
            f"{axis!r} is its axis of stages, which shards no tensor"
            if axis == mesh.stage_axis
            else f"it has no axis {axis!r}"
            for axis in used
            if axis not in mesh.axes
        ]
        if not used and None in fields[1:]:
            wrong = [f"none of its axes is called {', '.join(DATA)}, and no rule is for 'batch'"]
        if wrong:
            raise ShardingError(
                f"the strategy does not fit the mesh ({', '.join(f'{a}={n}' for a, n in mesh.axes.items())})",
                wrong,
                rule="a strategy shards over data axes of the mesh",
                remedy='name them: strategies.fsdp("x"), strategies.hsdp(replica="pod", shard="data")',
            )
        return StrategyAxes(batch, parameters, gradients, moments, self.threshold, self.regather)


class StrategyAxes(NamedTuple):
    """A strategy on one mesh."""

    batch: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    moments: tuple[str, ...]
    threshold: int
    regather: bool


def ddp(*axes: str) -> Strategy:
    """Shards the batch and replicates everything else; gradients are summed over the axes.

    Example:
        >>> ddp("data").on(Mesh.abstract(data=8)).batch
        ('data',)
    """
    return Strategy(axes or None)


def zero1(*axes: str, threshold: int = 0) -> Strategy:
    """As `ddp`, with sharded moments: each device updates its shard, and parameters are gathered.

    Example:
        >>> zero1().on(Mesh.abstract(data=8)).moments
        ('data',)
    """
    return Strategy(axes or None, moments=axes or None, threshold=threshold)


def zero2(*axes: str, threshold: int = 0) -> Strategy:
    """As `zero1`, with sharded gradients: each device gets the sum of its shard.

    Example:
        >>> zero2("data").on(Mesh.abstract(data=8)).gradients
        ('data',)
    """
    return Strategy(axes or None, gradients=axes or None, moments=axes or None, threshold=threshold)


def fsdp(*axes: str, threshold: int = 0, regather: bool = True) -> Strategy:
    """Shards parameters, gradients and moments; parameters are gathered for use.

    They are gathered for the forward pass and again for the backward pass. With `regather=False` they are gathered once
    and kept whole in between, which sends a third less.

    Example:
        >>> fsdp().on(Mesh.abstract(data=8, tensor=4)).parameters
        ('data',)
    """
    return Strategy(axes or None, axes or None, axes or None, axes or None, threshold, regather)


def hsdp(replica: str = "replica", shard: str = "shard", *, threshold: int = 0, regather: bool = True) -> Strategy:
    """Applies `fsdp` inside groups of devices (`shard`); replicas of a group (`replica`) add up their gradients.

    Example:
        >>> axes = hsdp().on(Mesh.abstract(replica=2, shard=4))
        >>> axes.batch, axes.parameters
        (('replica', 'shard'), ('shard',))
    """
    return Strategy((replica, shard), (shard,), (shard,), (shard,), threshold, regather)


def axes_for(name: str, usual_names: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes for a logical name: those of its rule, else those with a usual name."""
    if name in mesh.rules:
        axes = mesh.rules[name] or ()
        return (axes,) if isinstance(axes, str) else tuple(axes)
    return tuple(axis for axis in mesh.axes if axis in usual_names)


def resolve_strategy(strategy: str | Strategy | Callable[[], Strategy] | None) -> Strategy:
    """Returns the strategy for a name, a function such as `fsdp`, or a `Strategy`; None means `ddp`."""
    named = NAMED.get(strategy) if isinstance(strategy, str) else strategy
    resolved = named() if callable(named) else named
    if not isinstance(resolved, Strategy) and strategy is not None:
        raise ShardingError(
            f"strategy={strategy!r} is no strategy",
            remedy=f"one of {', '.join(NAMED)} (fsdp is ZeRO-3), or sl.strategies.fsdp('data')",
        )
    return resolved or ddp()


def shard_one_dim(at: FixedLayout, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> Spec:
    """Returns the spec with one more dim sharded over `axes`: the largest divisible one, or the largest.

    Axes that shard the tensor already are left out. If no unsharded dim is large enough, the spec stays.
    """
    spec = Spec.from_layout(at.layout, at.names)
    axes = [axis for axis in axes if axis not in {a.name for a in at.layout.axes}]
    ways = math.prod(mesh.axes[axis] for axis in axes)
    free = [d for d, dim in enumerate(at.layout.dims) if len(dim) <= 1 and not any(f.axes for f in dim)]
    best = max(free, key=lambda d: (shape[d] % ways == 0, shape[d], -d), default=None)
    if not axes or best is None or shape[best] < 2:
        return spec
    dim = spec.dims[best]
    assert isinstance(dim, SpecDim), "an exact spec says every dim"
    one = replace(dim, factors=(replace(dim.factors[0], axes=tuple(axes)),))
    return Spec((*spec.dims[:best], one, *spec.dims[best + 1 :]))


NAMED: dict[str, Callable[[], Strategy]] = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "fsdp": fsdp, "hsdp": hsdp}
