"""Messages of one value to the same neighbors are one: what arrives is what each of them brought."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.compiler.passes.comm.merge_halos import share_borders
from shardlib.compiler.program.text import parse


def _fourth(x: Tensor) -> Tensor:
    return x.roll(2, 0) - 8 * x.roll(1, 0) + 8 * x.roll(-1, 0) - x.roll(-2, 0)


def _mixed(x: Tensor) -> Tensor:
    return x.roll(1, 0) * torch.cat([x[:1], x[:-1]]) + x.roll(3, 0) - x.roll((1, 1), (0, 1))


def _around(x: Tensor) -> Tensor:
    image = F.pad(x[None, None], (1, 1, 1, 1), mode="circular")
    return F.conv2d(image, torch.arange(9.0, dtype=x.dtype).view(1, 1, 3, 3))[0, 0]


def _periodic(x: Tensor) -> Tensor:
    for _ in range(2):
        p = F.pad(x[None, None], (1, 1, 1, 1), mode="circular")[0, 0]
        x = (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] - p[1:-1, 2:]) / 4
    return x


def _uneven(x: Tensor) -> Tensor:
    image = F.pad(x[None], (2, 0), mode="circular")
    return F.conv1d(image, torch.arange(3.0, dtype=x.dtype).expand(len(x), 1, 3), groups=len(x))[0]


def _products(x: Tensor) -> Tensor:
    """Squares and products of two values, and windows of each."""
    y = x.cos()
    kernel = torch.arange(1.0, 4.0, dtype=x.dtype).view(1, 1, 3, 1)
    blurred = [F.conv2d(z[None, None], kernel)[0, 0] for z in (x, y, x * x, y * y, x * y)]
    return blurred[0] * blurred[1] - blurred[2] / blurred[3].abs().add(1) + blurred[4]


def _flux(x: Tensor) -> Tensor:
    h, u = x, x.sin()
    for _ in range(2):
        centered = [(z.roll(-1, 0) - z.roll(1, 0)) / 2 for z in (h * u, h, u)]
        h, u = h - centered[0], u - u * centered[2] - centered[1]
    return h


def _back_and_forth(x: Tensor) -> Tensor:
    """Multiples of one value, of which others are made in between."""
    y = -(3 * x)
    return (y * 2).roll(1, 0) + (y + 1).roll(2, 0) * (x / 3).roll(3, 0) - y.roll(-1, 0) * (x - y).roll(-2, 0)


def _enlarged(x: Tensor) -> Tensor:
    """Of each row of a border, two are made; of three that are read, two are sent."""
    kernels = [torch.arange(float(n * n), dtype=x.dtype).view(1, 1, n, n) for n in (3, 7)]
    return sum(
        F.conv2d(F.interpolate(x[None, None], scale_factor=2, mode=mode), kernel, padding=len(kernel[0, 0]) // 2)
        for mode, kernel in zip(("nearest", "nearest-exact"), kernels, strict=True)
    )[0, 0]


def _enlarged_again(x: Tensor) -> Tensor:
    """By three, and by two of what is made of it; rows alone, that are read from one side."""
    large = F.interpolate(F.relu(F.interpolate(x.mT[None], scale_factor=3)) * 2, scale_factor=2)
    return F.conv1d(F.pad(large, (2, 0)), torch.arange(3.0, dtype=x.dtype).expand(x.shape[1], 1, 3), groups=x.shape[1])[
        0
    ]


PROGRAMS = [_fourth, _mixed, _around, _periodic, _uneven, _products, _flux, _back_and_forth, _enlarged, _enlarged_again]
MESHES = [({"x": 4}, "n@x d"), ({"x": 3, "y": 2}, "n@x d@y"), ({"x": 2, "y": 3}, "n@(y x) d"), ({"x": 4}, "n d@x")]


@pytest.mark.long
@pytest.mark.sampled(13)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("mesh", "spec"), MESHES)
@pytest.mark.parametrize("n", [24, 13, 5])
def test_values_and_gradients(program: Callable[[Tensor], Tensor], mesh: dict[str, int], spec: str, n: int) -> None:
    x = torch.randn(n, n, dtype=torch.float64)
    with sl.Mesh(mesh):
        sl.check(program, x, in_specs=(spec,))
        sl.check(sl.grad(lambda x: program(x).sin().sum()), x, in_specs=(spec,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("program", "rows", "messages"),
    [
        *((_fourth, 4, 2), (_mixed, 3, 1), (_around, 2, 2), (_periodic, 4, 4)),
        *((_products, 4, 2), (_flux, 6, 6), (_back_and_forth, 5, 2), (_enlarged, 4, 2), (_enlarged_again, 1, 1)),
    ],
)
def test_as_few_messages_as_there_are_ways_to_go(program: Callable[[Tensor], Tensor], rows: int, messages: int) -> None:
    with sl.Mesh.abstract(x=8):
        plan = sl.jit(program, in_specs=("n@x d",)).plan(torch.empty(512, 512, device="meta"))
    assert len(plan.collectives) == messages
    assert plan.comm_bytes <= rows * 514 * 4


@pytest.mark.parametrize(
    ("program", "messages", "columns"), [(_fourth, 2, 512), (_products, 2, 512), (_uneven, 1, 512), (_uneven, 1, 510)]
)
def test_axes_along_which_nothing_is_sent_change_nothing(
    program: Callable[[Tensor], Tensor], messages: int, columns: int
) -> None:
    with sl.Mesh.abstract(x=8, y=4):
        plan = sl.jit(program, in_specs=("n@x d@y",)).plan(torch.empty(512, columns, device="meta"))
    assert len(plan.collectives) == messages


def test_what_goes_back_is_of_one_value() -> None:
    """Scaled before it moves, in four ways."""
    with sl.Mesh.abstract(x=8):
        gradient = sl.grad(lambda x: _fourth(x).sin().sum())
        plan = sl.jit(gradient, in_specs=("n@x d",)).plan(torch.empty(512, 512, device="meta"))
    assert len(plan.collectives) == 4
    assert plan.comm_bytes == 8 * 512 * 4


def test_borders_of_different_values_stay_apart() -> None:
    """Of sines, too, which kernels may round in another way at the end of a row."""
    with sl.Mesh.abstract(x=8):
        plan = sl.jit(lambda x: (x.roll(1, 0), x.sin().roll(1, 0)), in_specs=("n@x d",)).plan(
            torch.empty(512, 8, device="meta")
        )
    assert plan.comm_bytes == 2 * 8 * 4


Pairs = list[list[int]]
RING: Pairs = [[0, 1], [1, 2], [2, 3], [3, 0]]


def _two(*borders: tuple[int, Pairs]) -> str:
    """A program that sends two rows of each device: from where on, and who to whom."""
    lines = ["mesh x=4", "input x: f32[16@x, 2]"]
    for name, (low, pairs) in zip("ab", borders, strict=True):
        count = [int(i in {to for _, to in pairs}) for i in range(4)]
        mine = "1" if all(count) else f"[{' '.join(map(str, count))}]@x"
        lines += [
            f"{name}.sent: f32<1, 2> = aten.narrow.default(x, 0, {low}, 1)",
            f"start ppermute[x] {name}: f32<1, 2> = {name}.sent {{pairs: {pairs}}} 8 B",
            f"wait {name}",
            f"{name}.read: f32<1, 2> = aten.narrow.default({name}, 0, 0, {mine})",
        ]
    return "\n".join([*lines, "return a.read, b.read"])


def _messages(*borders: tuple[int, Pairs]) -> int:
    return len(share_borders(parse(_two(*borders))).collectives)


def test_ranges_with_a_gap_between_them_stay_apart() -> None:
    """What is in the gap would be sent, too."""
    assert _messages((1, RING), (2, RING)) == 1
    assert _messages((1, RING), (3, RING)) == 2


def test_nobody_gets_two_pieces_of_one_message() -> None:
    """Where somebody in between has nothing, some send to the next but one: others may send there, too."""
    skips = [[0, 1], [1, 3]]
    assert _messages((0, skips), (1, skips)) == 1
    assert _messages((0, skips), (1, [[2, 3], [3, 1]])) == 2
