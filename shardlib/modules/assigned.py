"""`load_state_dict(assign=True)` of a module on a mesh: a parameter's new tensor lives where the one before it did.

Torch puts what it is given in the parameter's place, which may be a plain tensor, whole on every device, and has none
of what a strategy says of the parameter's gradient and moments.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardlib.internals import LOAD_OWN
from shardlib.placing import shard
from shardlib.specs.spec import Spec
from shardlib.tensors.tensor import HOMES, REGATHER, ShardedTensor, marks

_load = LOAD_OWN.value


@functools.wraps(_load)
def _placing(
    self: nn.Module, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, extra: Any, wrong: Any
) -> None:
    """Fill one module's own tensors; what cannot be placed is told with all else that is `wrong`."""
    before: dict[str, Any] = {name: p for name, p in self._parameters.items() if isinstance(p, ShardedTensor)}
    _load(self, state_dict, prefix, metadata, strict, missing, extra, wrong)
    for name, old in before.items():
        new: Any = self._parameters[name]
        if new is None or new is old:
            continue
        if isinstance(new, ShardedTensor) and new.mesh != old.mesh:
            self._parameters[name] = old
            wrong.append(
                f"{prefix}{name} lives on {old.mesh}, and what is assigned on {new.mesh}: "
                "assign plain tensors, x.full_tensor()"
            )
        else:
            self._parameters[name] = _as(old, new)


def _as(old: ShardedTensor, new: nn.Parameter) -> nn.Parameter:
    """A parameter of the new one's values and dtype, where the old one lives."""
    said = {k: x for k, x in marks(old).items() if k in (*HOMES, REGATHER)}
    is_there = isinstance(new, ShardedTensor) and new.sharding == old.sharding
    if is_there and said == {k: x for k, x in marks(new).items() if k in (*HOMES, REGATHER)}:
        return new  # the parameter of another module, which the two share
    with old.mesh:
        value = shard(new.detach(), Spec.exactly(old.sharding, old._form.names))
    placed = nn.Parameter(value, requires_grad=new.requires_grad)
    placed.__dict__.update(said)
    return placed


LOAD_OWN.value = _placing
