"""What the outputs of a traced function are as tensors of one device: their strides, and which of them are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import FakeTensor
from shardlib.frontend.epilogue import ExtraOutputs
from shardlib.tensor.sharded_tensor import user_attributes


def strides_of(
    returned: Sequence[Any], after: ExtraOutputs, leaves: Sequence[Any]
) -> tuple[tuple[int, ...] | None, ...]:
    """The strides of all outputs; a gradient has those of its tensor, as autograd would keep it."""
    own = [x.stride() if isinstance(x, torch.Tensor) else None for x in returned]
    at = len(own) - len(after.gradients)
    of = [leaves[leaf] for leaf, _ in after.gradients]
    kept = [torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride() for x in of]
    return (*own[:at], *(None for _ in (*after.written, *after.data)), *kept)


def refuse_attributes(named: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse other attributes on what stands for tensors: they are nobody's when the trace is over.

    Each is given by its name, the caller's tensor, None for a result, and what stands for it.
    """
    wrong = []
    for name, own, x in named:
        if type(x).__module__.partition(".")[0] == "torch" and (own is None or isinstance(own, torch.Tensor)):
            had, has = {} if own is None else user_attributes(own), user_attributes(x)
            changed = [k for k, y in had.items() if has.get(k, _GONE) is not y]
            changed += [k for k in has if k not in had and not k.startswith("_")]
            wrong += [f"{name}.{k}" for k in changed if k not in _FAKES]
    if wrong:
        raise ShardingError(
            "the traced function changes attributes of tensors",
            wrong,
            rule="only the values of arguments and results come back: a program runs without their attributes",
            remedy="return what the attribute says beside the tensor, and set it outside",
        )


_GONE = object()
_FAKES = frozenset(FakeTensor.__annotations__)  # torch's own, of fake tensors


def repeated(results: Sequence[Any]) -> dict[int, int]:
    """The tensors among these that are an earlier one, with its place."""
    first: dict[int, int] = {}
    places = {i: first.setdefault(id(x), i) for i, x in enumerate(results) if isinstance(x, torch.Tensor)}
    return {i: at for i, at in places.items() if i != at}
