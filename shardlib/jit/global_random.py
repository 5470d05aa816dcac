"""Lets plain programs draw the numbers of sharded ones: the oracle's runs on one device, and users' own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardlib.frontend.torch_rewrites.attention import AttentionCapture
from shardlib.primitives.random.keys import PlainDraws, one_program
from shardlib.rules.table import DECOMPOSITIONS

_FORMS = {op: form for op, form in DECOMPOSITIONS.items() if torch.Tag.nondeterministic_seeded in op.tags}


@contextmanager
def plain_program() -> Iterator[None]:
    """Inside, code draws the numbers of one call of a jitted function, from the same random state."""
    with one_program(), AttentionCapture(only_dropout=True), PlainDraws(_FORMS):
        yield


@contextmanager
def global_random() -> Iterator[None]:
    """Plain torch code draws the numbers that operations on `ShardedTensor`s draw.

    From the same random state (`torch.manual_seed`), `torch.randn(8, 4)` inside gives the values that
    `x.normal_()` gives on a `ShardedTensor` of shape `[8, 4]`, on any mesh; inside a mesh of ranks all of them get
    the numbers of rank 0. Outside, plain code draws torch's own numbers.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2):
        ...     x = sl.shard(torch.empty(4, 3), "batch@data _")
        >>> _ = torch.manual_seed(0)
        >>> sharded = x.normal_().full_tensor()
        >>> _ = torch.manual_seed(0)
        >>> with global_random():
        ...     torch.equal(torch.empty(4, 3).normal_(), sharded)
        True
    """
    with PlainDraws(_FORMS):
        yield
