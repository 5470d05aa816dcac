"""Compares the replicas of a module and of its optimizers' state, every so many calls of its forward."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlib.core.context import is_tracing
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.replicas import Verifier


class ModuleVerifier:
    """Counts the calls of a module's forward, and notes the optimizers that step outside of traces."""

    def __init__(self, every: int) -> None:
        self._verifier = Verifier(every)
        self._optimizers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # in the order of their first steps
        optimizers = weakref.ref(self._optimizers)

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_tracing() and (noted := optimizers()) is not None:
                noted[optimizer] = None

        weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    def count_call(self, module: nn.Module, mesh: Mesh) -> None:
        """Counts a call, and compares replicas if it is due; raises `ShardingError` if some drifted apart."""
        if self._verifier.is_due():
            self._verifier.compare(mesh, type(module).__name__, self._named(module))

    def _named(self, module: nn.Module) -> dict[str, Tensor]:
        named = dict([*module.named_parameters(), *module.named_buffers()])
        for name, parameter in module.named_parameters():
            for optimizer in [*self._optimizers]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        named[f"{key} of {name}"] = value
        return named
