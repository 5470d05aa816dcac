"""The ops of per-device code: the boundary of a `shard_map` body, and its collectives. The compiler lowers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIB = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, fake: Callable[..., Tensor]) -> None:
    # The result depends on the device, so constant folding must not compute it: hence this tag, and no kernel.
    _LIB.define(schema, tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"shardlib::{schema.partition('(')[0]}", fake, lib=_LIB)


def new_resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Returns an uninitialized tensor like x, but of `size` along a dim."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def _fake_all_to_all(x: Tensor, axes: Any, split_dim: int, concat_dim: int, n: int) -> Tensor:
    shape = list(x.shape)
    shape[split_dim] //= n
    shape[concat_dim] *= n
    return x.new_empty(shape)


_define("to_local(Tensor x, str spec, int[] local_shape) -> Tensor", lambda x, spec, shape: x.new_empty(shape))
# `claim` names a result that must be equal along the axes which the spec does not mention.
_define(
    'from_local(Tensor x, str spec, int[] global_shape, str claim="") -> Tensor',
    lambda x, spec, shape, claim="": x.new_empty(shape),
)
_define("manual_all_reduce(Tensor x, str[] axes, str reduce) -> Tensor", lambda x, axes, reduce: x.new_empty(x.shape))
_define(
    "manual_all_gather(Tensor x, str[] axes, int dim, int n) -> Tensor",
    lambda x, axes, dim, n: new_resized(x, dim, x.shape[dim] * n),
)
_define(
    "manual_reduce_scatter(Tensor x, str[] axes, int dim, int n) -> Tensor",
    lambda x, axes, dim, n: new_resized(x, dim, x.shape[dim] // n),
)
_define("manual_all_to_all(Tensor x, str[] axes, int split_dim, int concat_dim, int n) -> Tensor", _fake_all_to_all)
_define("manual_ppermute(Tensor x, str[] axes, int[] pairs) -> Tensor", lambda x, axes, pairs: x.new_empty(x.shape))
# In local forms: concatenate shards of different sizes; fetch ranges of a sharded dim from other devices, and add them
# back. `name` is the plan's name of x.
_define(
    "manual_gather(Tensor x, str[] axes, int dim, int total) -> Tensor",
    lambda x, axes, dim, total: new_resized(x, dim, total),
)
_define(
    "manual_fetch(Tensor x, str[] axes, int dim, int[] have, int[] needs, str name) -> Tensor",
    lambda x, axes, dim, have, needs, name: new_resized(x, dim, sum(needs[1::2]) - sum(needs[::2])),
)
_define(
    "manual_give_back(Tensor x, str[] axes, int dim, int[] have, int[] want, str name) -> Tensor",
    lambda x, axes, dim, have, want, name: new_resized(x, dim, want[1] - want[0]),
)
# `like` is any value of the body: it provides the device, and makes the result a value of the body.
_define(
    "manual_axis_index(Tensor like, str[] axes) -> Tensor", lambda like, axes: like.new_empty((), dtype=torch.int64)
)
