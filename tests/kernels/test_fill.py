"""fill.cu fills what it is given and not one byte more, wherever that begins."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import emulate

SIZES = [0, 1, 15, 16, 17, 33, 5000]


@pytest.mark.parametrize("begin", [0, 1, 15])
@pytest.mark.parametrize("size", SIZES)
def test_fill(begin: int, size: int) -> None:
    library = emulate.library("fill.cu")
    memory = emulate.Memory()
    whole = memory.tensor(torch.zeros(begin + size + 20, dtype=torch.uint8), "out")
    emulate.call(library, "shardlib_fill", whole[begin : begin + size], size, 0xA5, None)
    expected = torch.zeros_like(whole)
    expected[begin : begin + size] = 0xA5
    assert torch.equal(whole, expected)
    memory.check()


def test_more_than_a_byte_is_refused() -> None:
    x = torch.zeros(4, dtype=torch.uint8)
    for byte in (-1, 256):
        with pytest.raises(emulate.EmulationError, match=f"fill: {byte} is no byte"):
            emulate.call(emulate.library("fill.cu"), "shardlib_fill", x, 4, byte, None)
    assert x.tolist() == [0] * 4
