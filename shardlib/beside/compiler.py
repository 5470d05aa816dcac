"""`torch.compile` around jitted functions and ShardedTensors: a graph break, as for C++.

A jitted function is compiled already, and an op on a ShardedTensor looks up its program. There is nothing in between
for another compiler to see, so its files are skipped, as torch's own are; `fullgraph=True` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.internals import SKIP_RULES, SKIPPED_FILES, late


def _skip(module: Any) -> None:
    module.add("shardlib")
    module.SKIP_DIRS.append("<shardlib ")  # code that shardlib has written
    late(SKIP_RULES)()


TAUGHT: dict[str, Callable[[Any], None]] = {SKIPPED_FILES: _skip}
