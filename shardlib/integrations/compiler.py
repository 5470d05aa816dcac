"""`torch.compile` around jitted functions and ShardedTensors: a graph break, as for C++.

A jitted function is compiled already, and an op on a ShardedTensor looks up its program. There is nothing in between
for another compiler to see, so its files are skipped, as torch's own are; `fullgraph=True` says so. Parameters that are
no tensors to it have no address that stays, either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlib.core.torch_private import COMPILED_VALUES, SKIP_RULES, SKIPPED_FILES, STATIC_INPUT, late
from shardlib.tensor.sharded_tensor import ShardedTensor


def _skip(module: Any) -> None:
    module.add("shardlib")
    module.SKIP_DIRS.append("<shardlib ")  # code that shardlib has written
    late(SKIP_RULES)()


def _unmarked(_: Any) -> None:
    mark = STATIC_INPUT.value

    @functools.wraps(mark)
    def marked(builder: Any, value: Any, guard: bool) -> None:
        if not isinstance(value, ShardedTensor):
            mark(builder, value, guard)

    STATIC_INPUT.value = marked


TAUGHT: dict[str, Callable[[Any], None]] = {SKIPPED_FILES: _skip, COMPILED_VALUES: _unmarked}
