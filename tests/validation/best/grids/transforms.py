"""Fourier transforms there and back of what is cut: a cut moves once for each, to a dim that is not its turn."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fft import fftn, ifftn, irfftn, rfftn

import shardlib as sl
from tests.validation.best import Row, exchanged, f32

N = 64
CUBE = f32(N, N, N)
WHOLE = N**3 * 8  # bytes of a cube of complex numbers
HALF = N * N * (N // 2 + 1) * 8
SLABS = "a@x b c"


def _row(name: str, program: object, nbytes: float, collectives: int = 2, **more: object) -> Row:
    """A program of a cube cut in slabs, and of a factor for each frequency."""
    return Row(name, program, (CUBE, CUBE), (SLABS, "..."), {"x": 8}, nbytes, collectives, **more)


def poisson(x: Tensor, k: Tensor) -> Tensor:
    """Solved in frequencies."""
    return ifftn(fftn(x) * k).real


def split_steps(x: Tensor, k: Tensor) -> Tensor:
    """Steps in space and in frequencies, in turn."""
    for _ in range(3):
        x = ifftn(fftn(x) * k).real * x.sin()
    return x


def mixing(x: Tensor, k: Tensor) -> Tensor:
    """Channels mixed for each frequency, as a Fourier neural operator does."""
    dims = (-3, -2, -1)
    return ifftn(torch.einsum("bixyz,ioxyz->boxyz", fftn(x, dim=dims), k.to(k.dtype.to_complex())), dim=dims).real


ONCE = exchanged(WHOLE, 8)
ROWS = [
    _row("frequencies there and back, slabs", poisson, 2 * ONCE, out_specs=SLABS),
    _row("frequencies back and there", lambda x, k: fftn(ifftn(x) * k), 2 * ONCE, out_specs=SLABS),
    _row("gradient of frequencies there and back", sl.grad(lambda x, k: (poisson(x, k) ** 2).sum()), 4 * ONCE, 4),
    _row("split steps", split_steps, 6 * ONCE, 6),
    Row("frequencies there and back, cut in the middle", poisson, (CUBE, CUBE), ("a b@x c", "..."), {"x": 8},
        2 * ONCE, 2, out_specs="a b@x c"),
    Row("frequencies there and back, pencils", poisson, (CUBE, CUBE), ("a@x b@y c", "..."), {"x": 4, "y": 2},
        2 * ONCE, 2, out_specs="a@x b@y c"),
    Row("frequencies of a product", lambda x, k: ifftn(fftn(x) * fftn(k)).real, (CUBE, CUBE), (SLABS, SLABS),
        {"x": 8}, 3 * ONCE, 3, out_specs=SLABS),
    Row("real frequencies there and back", lambda x, k: irfftn(rfftn(x) * k, s=x.shape),
        (CUBE, f32(N, N, N // 2 + 1)), (SLABS, "..."), {"x": 8}, 2 * exchanged(HALF, 8), 2, out_specs=SLABS),
    Row("image there and back", lambda x, k: torch.fft.ifft2(torch.fft.fft2(x) * k).real,
        (f32(4, 3, 256, 256), f32(256, 256)), ("b@d c h@x w", "..."), {"d": 2, "x": 4},
        2 * exchanged(4 * 3 * 256 * 256 * 8 / 2, 4), 2, out_specs="b@d c h@x w"),
    Row("channels mixed by frequency", mixing, (f32(2, 8, 32, 32, 32), f32(8, 8, 32, 32, 32)),
        ("b c h@x w z", "..."), {"x": 8}, 2 * exchanged(2 * 8 * 32**3 * 8, 8), 2, out_specs="b c h@x w z"),
    Row("last dim cut, there and back", poisson, (CUBE, CUBE), ("a b c@x", "..."), {"x": 8}, 2 * ONCE, 2,
        out_specs="a b c@x", short={"bytes": 1.51, "collectives": 2},
        why="in which order dims are transformed is said before it is known what is cut: the last dim comes first"),
    Row("gradient of real frequencies there and back",
        sl.grad(lambda x, k: irfftn(rfftn(x) * k, s=x.shape).sin().sum()), (f32(256, 256, 256), f32(256, 256, 129)),
        (SLABS, "..."), {"x": 8}, 4 * exchanged(256 * 256 * 129 * 8, 8), 4, short={"bytes": 1.25},
        why="torch writes the gradient of a real transform as one back from all frequencies"),
    Row("gradient of an image's real frequencies there and back",
        sl.grad(lambda x, k: torch.fft.irfft2(torch.fft.rfft2(x) * k, s=x.shape).sin().sum()),
        (f32(1024, 1024), f32(1024, 513)), ("a@x b", "..."), {"x": 8}, 4 * exchanged(1024 * 513 * 8, 8), 4,
        short={"work": 2.1, "bytes": 3.1, "collectives": 1.25},
        why="as above; and all frequencies are another dim than half of them, but only one is offered the axis"),
]  # fmt: skip
