"""Sharded data parallelism by the names that people know: over which mesh axes batch, parameters, gradients and moments
are cut, beyond what specs say of them.

| strategy | batch | parameters | gradients | moments | known as |
|---|---|---|---|---|---|
| `ddp` | cut | | | | distributed data parallel |
| `zero1` | cut | | | cut | ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054) |
| `zero2` | cut | | cut | cut | ZeRO-2 |
| `fsdp` | cut | cut | cut | cut | ZeRO-3, FSDP (Zhao et al. 2023, arXiv:2304.11277) |
| `hsdp` | over both | over `shard` | over `shard` | over `shard` | MiCS (Zhang et al. 2022, arXiv:2205.00119) |

Moments are what an optimizer keeps of every element; statistics of rows and columns (Adafactor) stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardlib.core.errors import ShardingError
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.placement import Fixed
from shardlib.sharding.spec import Spec

DATA = ("pod", "replica", "data", "batch", "dp", "shard", "fsdp")  # what axes are called that cut the batch,
SEQUENCE = ("seq", "sequence", "context", "cp", "sp")  # the sequence,
TENSOR = ("tensor", "model", "tp")  # and what is inside a layer

Axes = tuple[str, ...] | None


@dataclass(frozen=True)
class Strategy:
    """Mesh axes that cut the batch, parameters, gradients and moments; None stands for the data axes of the mesh.

    `threshold`: parameters of fewer elements, their gradients and moments are as specs say.
    `regather`: what is gathered of a parameter for the forward pass is gathered again for the backward one, rather than
    kept, and gradients that wait for those of the next micro-step are scattered first.
    """

    batch: Axes = None
    parameters: Axes = ()
    gradients: Axes = ()
    moments: Axes = ()
    threshold: int = 0
    regather: bool = False

    def on(self, mesh: Mesh) -> Taken:
        """The same with the axes of a mesh. Raises `ShardingError` for axes that it has not."""
        data = axes_for("batch", DATA, mesh)
        said = (self.batch, self.parameters, self.gradients, self.moments)
        batch, parameters, gradients, moments = (data if axes is None else axes for axes in said)
        cut = dict.fromkeys((*batch, *parameters, *gradients, *moments))
        wrong = [f"it has no axis {axis!r}" for axis in cut if axis not in mesh.axes]
        if not cut and None in said[1:]:
            wrong = [f"none of its axes is called {', '.join(DATA)}, and no rule is for 'batch'"]
        if wrong:
            raise ShardingError(
                f"the strategy does not fit the mesh ({', '.join(f'{a}={n}' for a, n in mesh.axes.items())})",
                wrong,
                rule="a strategy cuts over data axes of the mesh",
                remedy='name them: strategies.fsdp("x"), strategies.hsdp(replica="pod", shard="data")',
            )
        return Taken(batch, parameters, gradients, moments, self.threshold, self.regather)


class Taken(NamedTuple):
    """A strategy on a mesh: the axes that cut each."""

    batch: tuple[str, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    moments: tuple[str, ...]
    threshold: int
    regather: bool


def ddp(*axes: str) -> Strategy:
    """The batch is cut, everything else is whole; gradients are summed over the axes.

    Example:
        >>> ddp("data").on(Mesh.abstract(data=8)).batch
        ('data',)
    """
    return Strategy(axes or None)


def zero1(*axes: str, threshold: int = 0) -> Strategy:
    """As `ddp`, and an optimizer's moments are cut: each device updates its share, and parameters are gathered."""
    return Strategy(axes or None, moments=axes or None, threshold=threshold)


def zero2(*axes: str, threshold: int = 0) -> Strategy:
    """As `zero1`, and gradients are cut, too: each device gets the sum of its share."""
    return Strategy(axes or None, gradients=axes or None, moments=axes or None, threshold=threshold)


def fsdp(*axes: str, threshold: int = 0, regather: bool = True) -> Strategy:
    """Parameters are cut as well, and gathered where they are used; gradients and moments follow them.

    They are gathered for the forward pass and once more for the backward one; with `regather=False` once, which sends a
    third less, and they stay whole in between.

    Example:
        >>> fsdp().on(Mesh.abstract(data=8, tensor=4)).parameters
        ('data',)
    """
    return Strategy(axes or None, axes or None, axes or None, axes or None, threshold, regather)


def hsdp(replica: str = "replica", shard: str = "shard", *, threshold: int = 0, regather: bool = True) -> Strategy:
    """`fsdp` inside groups of devices (`shard`), copies of which (`replica`) add up their pieces of gradients.

    Example:
        >>> taken = hsdp().on(Mesh.abstract(replica=2, shard=4))
        >>> taken.batch, taken.parameters
        (('replica', 'shard'), ('shard',))
    """
    return Strategy((replica, shard), (shard,), (shard,), (shard,), threshold, regather)


def axes_for(name: str, known: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """The axes for a logical name: those of its rule, else those that are called so."""
    if name in mesh.rules:
        said = mesh.rules[name] or ()
        return (said,) if isinstance(said, str) else tuple(said)
    return tuple(axis for axis in mesh.axes if axis in known)


def chosen(strategy: str | Strategy | Callable[[], Strategy] | None) -> Strategy:
    """A strategy in any of its forms: a name, `fsdp` itself, or what it returned. Raises `ShardingError`."""
    known = NAMED.get(strategy) if isinstance(strategy, str) else strategy
    found = known() if callable(known) else known
    if not isinstance(found, Strategy) and strategy is not None:
        raise ShardingError(
            f"strategy={strategy!r} is no strategy", remedy=f"one of {', '.join(NAMED)}, or sl.strategies.fsdp('data')"
        )
    return found or ddp()


def cut_more(at: Fixed, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> Spec:
    """The spec that cuts one dim more over these axes: the largest that they divide, or the largest, of those whole.

    Axes that cut the tensor already are left out; where no dim is large enough, nothing is cut.

    Example:
        >>> from shardlib.sharding.spec import parse
        >>> mesh = Mesh.abstract(data=4, tensor=2)
        >>> str(cut_more(parse("_ ff@tensor").resolve((8, 64), mesh), (8, 64), mesh, ["data"]))
        '_@data ff@tensor'
    """
    spec = Spec.exactly(at.layout, at.names)
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
