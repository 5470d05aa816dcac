"""`torch.compile` around jitted functions and ShardedTensors: a graph break, as for C++.

A jitted function is compiled already, and an op on a ShardedTensor looks up its program. Another compiler has nothing
to see in between, so it skips shardlib's files as it does torch's own; `fullgraph=True` reports that. It must not treat
parameters that are ShardedTensors as inputs with a static address, which they lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.core.torch_internals.torch_private import COMPILED_VALUES, SKIP_RULES, SKIPPED_FILES, STATIC_INPUT, late
from shardlib.integrations.on_import import replaces, when_imported
from shardlib.tensor.sharded_tensor import ShardedTensor


@when_imported(SKIPPED_FILES)
def _skip_files(module: Any) -> None:
    module.add("shardlib")
    module.SKIP_DIRS.append("<shardlib ")  # generated code
    late(SKIP_RULES)()


@when_imported(COMPILED_VALUES)
def _patch_static_inputs(_: Any) -> None:
    @replaces(STATIC_INPUT)
    def mark(original: Callable[..., None], builder: Any, value: Any, guard: bool) -> None:
        if not isinstance(value, ShardedTensor):
            original(builder, value, guard)
