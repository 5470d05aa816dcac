"""Windows that slide along a dim: which inputs an output reads, and which outputs read an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.rules.local_forms.halo import Range, length
from shardlib.rules.rule import Reads


@dataclass(frozen=True)
class Window:
    """Output i reads inputs `i * stride - padding + j * dilation`, for j below `kernel`.

    Example:
        >>> w = Window(3, stride=2, padding=1)
        >>> w.reads((0, 4)), w.readers((0, 4), 4)
        ((-1, 8), (0, 3))
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """From the first input that an output reads to the last one."""
        return (self.kernel - 1) * self.dilation + 1

    def laid(self, by: str, count: int) -> Reads:
        """Where the `count` outputs, factor `by`, lie among the inputs."""
        return Reads(by, self.stride, -self.padding, self.span - 1 - self.padding, count)

    def reads(self, outputs: Range) -> Range:
        """What some outputs read, padding included; no outputs read one window in front of the first input."""
        low, high = outputs
        if low >= high:
            return -self.span, 0
        return low * self.stride - self.padding, (high - 1) * self.stride - self.padding + self.span

    def over(self, outputs: Range, inputs: Range) -> Range:
        """Outputs, those that are given among them, whose windows lie over all of the inputs, and one at least."""
        low, high = inputs
        if low >= high:
            return -1, 0
        first, last = (low + self.padding) // self.stride, -(-(high + self.padding - self.span) // self.stride) + 1
        least, most = outputs if length(outputs) else (first, first + 1)
        return min(least, first), max(most, last)

    def readers(self, inputs: Range, count: int) -> Range:
        """Those of `count` outputs that read some of the inputs."""
        low, high = inputs
        if low >= high:
            return 0, 0
        first = -(-(low + self.padding - self.span + 1) // self.stride)
        last = (high - 1 + self.padding) // self.stride
        first = min(max(first, 0), count)
        return first, max(first, min(last + 1, count))


def each(value: Any, dims: int) -> list[int]:
    """An argument that is a number per dim, or one for all."""
    values: Sequence[int] = [value] if isinstance(value, int) else list(value)
    return list(values) * dims if len(values) == 1 else list(values)
