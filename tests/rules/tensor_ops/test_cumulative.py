"""Running sums and their like along a dim that is cut, from the front and from behind, and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl


def _behind(scan: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A scan of what is turned round, turned back."""

    def run(x: Tensor) -> Any:
        found = scan(x.flip(1))
        return found.flip(1) if isinstance(found, Tensor) else tuple(part.flip(1) for part in found)

    return run


def _advantages(x: Tensor) -> Tensor:
    """Of rewards, discounted."""
    discount = (0.9 ** torch.arange(x.shape[1], dtype=x.dtype))[:, None]
    return (x * discount).flip(1).cumsum(1).flip(1) / discount


SCANS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.cumsum(1),
    "product": lambda x: x.cumprod(1),
    "product with zeros": lambda x: (x * (x > -1)).cumprod(1),
    "exponentials": lambda x: x.logcumsumexp(1),
    "maximum": lambda x: tuple(x.cummax(1)),
    "minimum": lambda x: tuple(x.cummin(1)),
    "narrow": lambda x: x.cumsum(1, dtype=torch.float32),
}
PROGRAMS = SCANS | {f"{name} from behind": _behind(scan) for name, scan in SCANS.items()} | {"advantages": _advantages}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("spec", ["a b@x c", "a@x b@y c", "a b@(y x) c"])
@pytest.mark.parametrize("size", [10, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name: str, size: int, spec: str) -> None:
    program = PROGRAMS[name]

    def loss(x: Tensor) -> Tensor:
        found = program(x)
        return (found if isinstance(found, Tensor) else found[0]).sin().sum()

    x = torch.randn(3, size, 2, dtype=torch.float64)
    tolerance = 1e-5 if "narrow" in name else 1e-10
    again = [sl.grad(lambda x: sl.grad(loss)(x).cos().sum())] if name.startswith("sum") else []
    for fn in (program, sl.grad(loss), *again):
        with sl.no_mesh():
            want = fn(x)
        with sl.Mesh(x=2, y=2):
            found = sl.jit(fn)(sl.shard(x, spec))
            for a, b in zip(*((y,) if isinstance(y, Tensor) else y for y in (found, want)), strict=True):
                torch.testing.assert_close(a.full_tensor(), b, rtol=tolerance, atol=tolerance)
