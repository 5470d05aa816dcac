"""The shards of every dim of a layout, for pictures: who holds which elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from shardlib.compiler.plan.names import Naming
from shardlib.compiler.program.steps import Var
from shardlib.sharding.chunks import shard_range
from shardlib.sharding.layout import Dim
from shardlib.sharding.mesh.axis import group_size
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.visualize import contiguous_runs

MOST = 16  # shards of a dim that a picture shows, and runs of one shard

Span = tuple[int, int]


def layout_picture(naming: Naming, var: Var, mesh: Mesh) -> dict[str, Any]:
    """Returns a layout as plain data: its dims, the axes along which it is copied, and those of partial sums.

    A dim has its `size`, a `name` ("" without one), the number of its distinct shards (`count`), and up to 16 of
    `shards`: the devices, and the runs of elements that they hold. Shards may be uneven or empty.
    """
    layout = var.layout
    assert layout is not None
    used = {a.name for a in (*layout.axes, *layout.pending_axes)}
    names = [" ".join(filter(None, (name for name, _ in dim))) for dim in naming.dims(var)]
    copies = [axis for axis in mesh.axes if axis not in used and mesh.axes[axis] > 1]
    return {
        "text": naming.typed(var),
        "dims": [{"size": size, "name": name, **_shards(dim, mesh)}
                 for size, name, dim in zip(map(int, layout.shape), names, layout.dims, strict=True)],
        "copies": copies,
        "alike": group_size(tuple(mesh.axis(axis) for axis in copies)),
        "sums": [str(p) for p in layout.pending],
    }  # fmt: skip


def _shards(dim: Dim, mesh: Mesh) -> dict[str, Any]:
    names = list(dict.fromkeys(a.name for f in dim for a in f.axes))
    holders: dict[tuple[Span, ...], list[tuple[int, ...]]] = {}
    for place in itertools.product(*(range(mesh.axes[name]) for name in names)):
        coords = dict(zip(names, place, strict=True))
        holders.setdefault(tuple(shard_range(f.size, f.axes, coords) for f in dim), []).append(place)
    shown = list(holders.items())
    kept = shown if len(shown) <= MOST else [*shown[: MOST - 1], shown[-1]]
    return {
        "count": len(shown),
        "shards": [
            {"devices": _devices(names, places), "runs": list(itertools.islice(contiguous_runs(dim, spans), MOST))}
            for spans, places in kept
        ],
    }


def _devices(names: Sequence[str], places: Sequence[tuple[int, ...]]) -> str:
    """Formats coordinates: `data=0, tensor=2-3`, or several of these: `a=0, b=1; a=1, b=0-3`."""
    products = _products(places)
    return "; ".join(", ".join(map(_coordinates, names, product)) for product in products)


def _coordinates(name: str, values: Sequence[int]) -> str:
    is_run = len(values) > 2 and values[-1] - values[0] == len(values) - 1
    return f"{name}={f'{values[0]}-{values[-1]}' if is_run else ','.join(map(str, values))}"


def _products(places: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Splits places, in order, into products: for each axis the coordinates that go with all of the other axes.

    Example:
        >>> _products([(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
        [((0,), (1,)), ((1, 2), (0, 1))]
    """
    if not places[0]:
        return [()]
    behind: dict[int, list[tuple[int, ...]]] = {}
    for first, *others in places:
        behind.setdefault(first, []).append(tuple(others))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, rest in behind.items():
        alike.setdefault(tuple(rest), []).append(first)
    return [(tuple(firsts), *product) for rest, firsts in alike.items() for product in _products(rest)]
