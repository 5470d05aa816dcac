"""What a trace leaves behind, as results of its program: a value joins them once, or is a view of what the call has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardlib.core.torch_private import FakeTensor, memory_of, pytree
from shardlib.frontend.guards.attributes import content
from shardlib.frontend.guards.number_inputs import is_given
from shardlib.frontend.side_effects.compare_values import is_value
from shardlib.frontend.side_effects.mutable_places import Place
from shardlib.frontend.side_effects.mutation_values import Computed, Own, Part, Rest, Result, Shown
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form


class MutationOutputs:
    """The results of a trace, and what joins them; `own`, `memory` and `is_traced` are as in `Watch.rebound`."""

    def __init__(
        self,
        before: Snapshot,
        after: Snapshot,
        own: Mapping[int, int],
        memory: Mapping[int, tuple[int, Any, Tensor]],
        results: list[Any],
        names: list[str],
        is_traced: Callable[[Any], bool],
    ) -> None:
        self._after, self._own, self._memory, self._is_traced = after, own, memory, is_traced
        self._results, self._names = results, names
        self._known: dict[tuple[int, bool], int] = {(id(x), False): i for i, x in enumerate(results)}
        self._mine = {id(x) for x in before.kept} | before.owners.keys()

    def part(self, x: Any, old: Any, place: Place, of: Tensor | None) -> Part | None:
        """What a call puts where x is now and `old` was; None for what no program can repeat."""
        if is_given(x):
            return Computed(x.scalar)
        if not isinstance(x, Tensor):
            return Rest(x) if id(x) in self._mine or (is_value(x) and not _holds_trace(x)) else None
        if id(x) in self._own:
            return Own(self._own[id(x)])
        if not self._is_traced(x) or (x.requires_grad and x.is_leaf):  # whoever it is put to expects a leaf of its own
            return None
        held = self._memory.get(memory_of(x.untyped_storage()))
        if held is not None and _is_plain_view(x, held[2]):
            return self._shown(x, place, *held)
        device, home = _home(x, old if isinstance(old, Tensor) else of)
        if not isinstance(old, Tensor) and of is not None and not x.shape:
            device, home = x.device, None  # a counter, as an optimizer makes it
        at, is_new = self._join(x, place, is_plain=device is not None)
        return Result(at, device, home if is_new else None, self._own.get(id(old)))

    def _shown(self, x: Tensor, place: Place, leaf: int, tensor: Any, of: Tensor) -> Shown:
        where = tuple(x.shape), x.stride(), int(x.storage_offset())
        is_piece = type(tensor) is ShardedTensor and where != (tuple(of.shape), of.stride(), 0)
        return Shown(leaf, *where, self._join(x, place)[0] if is_piece else None)

    def _join(self, x: Tensor, place: Place, *, is_plain: bool = False) -> tuple[int, bool]:
        """Where x stands among the results, and whether it is new there."""
        count = len(self._results)
        at = self._known.setdefault((id(x), is_plain), count)
        if at == count:
            self._results.append(x)
            self._names.append(f"{self._after.text(place)} (kept)")
        return at, at == count


def _is_plain_view(x: Tensor, of: Tensor) -> bool:
    """Whether a view without history is a matter of sizes and strides."""
    return x.dtype == of.dtype and not (x.requires_grad or x.is_conj() or x.is_neg())


def _home(x: Tensor, like: Any) -> tuple[torch.device | None, Form | None]:
    """Where a result is to live: plain, on a device, or in the form of a ShardedTensor, as another tensor does."""
    if isinstance(like, ShardedTensor):
        return None, like._form if like.shape == x.shape else None
    return (like.device if isinstance(like, Tensor) and not x.requires_grad else None), None


def _holds_trace(fn: Any) -> bool:
    """Whether a function that was made in the trace closes over values of it."""
    cells = [content(cell) for cell in getattr(fn, "__closure__", None) or ()]
    inside = pytree.tree_leaves([cells, getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)])
    return any(isinstance(x, FakeTensor) or is_given(x) for x in inside)
