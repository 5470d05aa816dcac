"""Conversions of a ShardedTensor to Python's numbers, lists and numpy arrays."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.core.context import is_tracing


class PythonValues(torch.Tensor):
    """Converts the gathered tensor. On ranks each conversion is a collective: every rank must call it."""

    def full_tensor(self) -> torch.Tensor:
        """Returns the whole tensor as a plain one."""
        raise NotImplementedError

    def _readable(self) -> torch.Tensor:
        """Returns the gathered tensor; in a traced function the traced value, which raises when Python reads it."""
        return self.clone() if is_tracing() else self.full_tensor()

    def tolist(self) -> Any:
        """Returns the values as nested lists."""
        return self._readable().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only numpy array, since writes to it would not reach the tensor."""
        array = self._readable().numpy(force=force)
        array.flags.writeable = False
        return array

    def __float__(self) -> float:
        return float(self._readable().detach())

    def __int__(self) -> int:
        return int(self._readable().detach())

    def __complex__(self) -> complex:
        return complex(self._readable().detach())

    def __index__(self) -> int:
        return self._readable().__index__()

    def __bool__(self) -> bool:
        return bool(self._readable())

    def item(self) -> Any:
        """Returns the value of a tensor of one element."""
        return self._readable().item()
