"""Padding by what is beside the border, or mirrored there: ranges of the dim itself, put together; and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shardlib.ops.splice import SPLICE


def _sides(x: Tensor, padding: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The dims that are padded, and how far in front and behind: negative numbers crop."""
    for k, pair in enumerate(zip(padding[::2], padding[1::2], strict=True)):
        yield (x.dim() - 1 - k, *pair)


def _spliced(x: Tensor, dim: int, ranges: Sequence[tuple[int, int]], *, turned: Sequence[int] = ()) -> Tensor:
    """Ranges of a dim side by side, some turned round; (-n, 0) are n zeros."""
    kept = [(i, r) for i, r in enumerate(ranges) if r[0] < r[1]]
    sources = [0 if start >= 0 else -1 for _, (start, _) in kept]
    starts, stops = (
        [max(start, 0) for _, (start, _) in kept],
        [stop if start >= 0 else -start for _, (start, stop) in kept],
    )
    return SPLICE([x], dim, sources, starts, stops, [0] * len(kept), [], [i in turned for i, _ in kept])  # type: ignore[no-any-return]


def _reflected(x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        n = x.shape[dim]
        front, behind = (1, 1 + before), (n - 1 - after, n - 1)
        x = _spliced(x, dim, [front, (max(-before, 0), n - max(-after, 0)), behind], turned=(0, 2))
    return x


def _reflected_back(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        n, total = x.shape[dim], grad.shape[dim]
        found = _middle(grad, dim, before, after)
        if before > 0:
            found = found + _spliced(grad, dim, [(-1, 0), (0, before), (1 + before - n, 0)], turned=(1,))
        if after > 0:
            found = found + _spliced(grad, dim, [(1 + after - n, 0), (total - after, total), (-1, 0)], turned=(1,))
        grad = found
    return grad


def _repeated(x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        n = x.shape[dim]
        x = _spliced(x, dim, [*[(0, 1)] * before, (max(-before, 0), n - max(-after, 0)), *[(n - 1, n)] * after])
    return x


def _repeated_back(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    for dim, before, after in _sides(x, padding):
        n, total = x.shape[dim], grad.shape[dim]
        found = _middle(grad, dim, before, after)
        for i in range(before):
            found = found + _spliced(grad, dim, [(i, i + 1), (1 - n, 0)])
        for i in range(after):
            found = found + _spliced(grad, dim, [(1 - n, 0), (total - 1 - i, total - i)])
        grad = found
    return grad


def _middle(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    """What there is for elements at their own places."""
    kept = max(before, 0), grad.shape[dim] - max(after, 0)
    return _spliced(grad, dim, [(min(before, 0), 0), kept, (min(after, 0), 0)])


_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "reflection": (_reflected, _reflected_back),
    "replication": (_repeated, _repeated_back),
}
ROWS: dict[str, Any] = {}
DECOMPOSED: dict[str, Callable[..., Any]] = {
    f"{name}_pad{dims}d{way}": form
    for name, forms in _FORMS.items()
    for dims in (1, 2, 3)
    for way, form in zip(("", "_backward"), forms, strict=True)
}
