"""Windows that slide along a dim: the inputs that an output reads, and the outputs that read an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.rules.local_forms.halo import Range, length
from shardlib.rules.rule import WindowMap


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
        """The number of inputs from the first to the last one that an output reads."""
        return (self.kernel - 1) * self.dilation + 1

    def window_map(self, by: str, count: int) -> WindowMap:
        """Returns the inputs that the `count` outputs (factor `by`) read."""
        return WindowMap(by, self.stride, -self.padding, self.span - 1 - self.padding, count)

    def reads(self, outputs: Range) -> Range:
        """Returns the inputs that a range of outputs reads, padding included.

        An empty range reads one window in front of the first input.
        """
        low, high = outputs
        if low >= high:
            return -self.span, 0
        return low * self.stride - self.padding, (high - 1) * self.stride - self.padding + self.span

    def covering(self, outputs: Range, inputs: Range) -> Range:
        """Returns the smallest nonempty range of outputs that contains `outputs` and whose windows cover `inputs`."""
        low, high = inputs
        if low >= high:
            return -1, 0
        first, last = (low + self.padding) // self.stride, -(-(high + self.padding - self.span) // self.stride) + 1
        low_output, high_output = outputs if length(outputs) else (first, first + 1)
        return min(low_output, first), max(high_output, last)

    def readers(self, inputs: Range, count: int) -> Range:
        """Returns the outputs, of `count`, that read any of the inputs."""
        low, high = inputs
        if low >= high:
            return 0, 0
        first = -(-(low + self.padding - self.span + 1) // self.stride)
        last = (high - 1 + self.padding) // self.stride
        first = min(max(first, 0), count)
        return first, max(first, min(last + 1, count))


def per_dim(value: Any, dims: int) -> list[int]:
    """Returns an argument that is one number, or one per dim, as a number per dim."""
    values: Sequence[int] = [value] if isinstance(value, int) else list(value)
    return list(values) * dims if len(values) == 1 else list(values)
