"""What Python reads of a tensor on a mesh: numbers, lists and arrays of its values."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.core.context import is_tracing


class PythonValues(torch.Tensor):
    """Reads the whole tensor. On ranks each of these is a collective: every rank must call it."""

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor as a plain one."""
        raise NotImplementedError

    def _readable(self) -> torch.Tensor:
        """Returns the whole; while a function is traced, the value of the trace, which says that it has no numbers."""
        return self.clone() if is_tracing() else self.full_tensor()

    def tolist(self) -> Any:
        """The values as nested lists. On ranks this is a collective, as is all that reads values."""
        return self._readable().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as a numpy array that cannot be written to: it would have memory of its own."""
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
        """The value of a tensor of one element."""
        return self._readable().item()
