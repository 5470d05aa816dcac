"""Single elements of a cut dim, one after the other: what is sent, and the values of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shardlib as sl


def _layers(x: Tensor, w: Tensor) -> Tensor:
    for k in range(w.shape[0]):
        x = torch.tanh(x @ w[k])
    return x


def _unbound(x: Tensor, w: Tensor) -> Tensor:
    return sum(torch.sin(x @ layer) * (i + 1) for i, layer in enumerate(w.unbind()))


def _states(x: Tensor, w: Tensor) -> Tensor:
    """Chunks of `w` one after the other, and what goes from each to the next."""
    state, before = torch.zeros_like(w[0]), []
    for k in range(w.shape[0]):
        before.append(state)
        state = state * x[0, 0] + w[k]
    return torch.stack(before) * w


PROGRAMS = [_layers, _unbound, _states]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__[1:])
@pytest.mark.parametrize("count", [1, 3, 4, 7])
@pytest.mark.parametrize("specs", [("n@a d", "l@a d e"), ("n d", "l@a d e"), ("n@b d", "l@a d e@b")], ids=str)
def test_values_and_gradients(program: Callable[[Tensor, Tensor], Tensor], count: int, specs: tuple[str, str]) -> None:
    made = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, generator=made) for s in ((5, 6), (count, 6, 6)))

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return program(x, w), *sl.grad(lambda x, w: program(x, w).sin().sum(), (0, 1))(x, w)

    with sl.no_mesh():
        want = both(x, w)
    with sl.Mesh(a=4, b=2):
        for got, there in zip(sl.jit(both, in_specs=specs)(x, w), want, strict=True):
            torch.testing.assert_close(got.full_tensor(), there)


def _sent(program: Callable[..., Tensor], count: int, specs: tuple[str, str]) -> dict[str, float]:
    with sl.Mesh.abstract(a=8):
        shapes = (4096, 256), (count, 256, 256)
        plan = sl.jit(program, in_specs=specs).plan(*(torch.empty(s, device="meta") for s in shapes))
    found: dict[str, float] = {}
    for c in plan.collectives:
        found[c.kind] = found.get(c.kind, 0) + c.bytes
    return found


def test_of_a_stack_all_is_gathered_and_of_one_the_sum_is_owed() -> None:
    layer = 256 * 256 * 4
    sent = _sent(_layers, 8, ("n@a d", "l@a d e"))
    assert "all_reduce" not in sent
    assert sum(sent.values()) <= (1 + 1 / 8) * 8 * layer * 7 / 8  # it may be cut elsewhere first
    assert _sent(lambda x, w: x @ w[3], 8, ("n@a d", "l@a d e")) == {"all_reduce": 2 * layer * 7 / 8}


def test_what_goes_from_chunk_to_chunk_is_cut_elsewhere() -> None:
    assert _sent(_states, 8, ("n d", "l@a d e")) == {"all_to_all": 256 * 256 * 4 * 7 / 8}
