"""Attention with the sequence cut: keys passed round, heads exchanged, or keys gathered; the same as on one device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib import Mesh, P, shard
from shardlib.compiler.program.steps import Start
from shardlib.core.context import single_device
from shardlib.core.errors import ShardingError
from shardlib.ops.attention.op import attention
from shardlib.rules.local_forms import ring_attention
from tests.helpers.prover import check
from tests.helpers.ranks import run_ranks

D = 8


def tensors(
    heads: int, s: int, *, kv: int | None = None, t: int | None = None, dtype: Any = torch.float64
) -> list[Any]:
    torch.manual_seed(heads + s)
    shapes = ((heads, s), (kv or heads, t or s), (kv or heads, t or s))
    return [torch.randn(2, h, n, D, dtype=dtype) for h, n in shapes]


def attend(seq: str = "b h s@seq d", **how: Any) -> Any:
    """A function that returns the attention of q, k and v, and the gradients of a sum of it."""

    def fn(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        def total(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            o, lse = attention(q, k, v, **{**how, **({"bias": bias[0]} if bias else {})})
            return (o * o).sum() + lse.sum(), o

        q, k, v = (shard(x, seq) for x in (q, k, v))
        grads, o = torch.func.grad(total, argnums=tuple(range(3 + len(bias))), has_aux=True)(q, k, v, *bias)
        return o, *grads

    return fn


def error(fn: Any, args: Any, n: int) -> float:
    with Mesh(seq=n):
        found = [x.full_tensor() for x in sl.jit(fn)(*args)]
    with single_device():
        expected = fn(*args)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def planned(fn: Any, args: Any, n: int) -> Any:
    with Mesh(seq=n):
        return sl.jit(fn).plan(*args)


def kinds(plan: Any) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives)


VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "both ways": {"window": 4},
    "alibi": {"causal": True, "alibi": torch.tensor([0.5, 0.25, 0.125])},
    "offsets": {"causal": True, "q_offset": 3, "k_offset": 1},
    "mask": {"mask": torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.3},
    "padding": {"mask": torch.arange(12) < torch.tensor([9, 12])[:, None, None, None]},
    "dropout": {"dropout": 0.3, "key": torch.tensor([5, 7]), "causal": True},
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("way", ["ring", "gather"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, way: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", f"sequence={way}")
    fn, args = attend(**VARIANTS[variant]), tensors(3, 12)
    assert ("ppermute" in kinds(planned(fn, args, n))) == (way == "ring")
    assert error(fn, args, n) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 1, 12, 12), (12, 12), (2, 1, 1, 12), (1, 3, 12, 1)])
def test_a_bias_gets_its_gradient(shape: tuple[int, ...]) -> None:
    args = [*tensors(3, 12), torch.randn(shape, dtype=torch.float64)]
    assert "ppermute" in kinds(planned(attend(causal=True), args, 4))
    assert error(attend(causal=True), args, 4) < 1e-12


def test_a_bias_without_a_gradient() -> None:
    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attend(bias=bias, causal=True)(q, k, v)

    args = [*tensors(1, 12), torch.randn(12, 12, dtype=torch.float64)]
    assert "ppermute" in kinds(planned(fn, args, 4))
    assert error(fn, args, 4) < 1e-12


@pytest.mark.sampled(11)
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [16, 19, 5])
def test_rings_of_every_size(s: int, causal: bool, n: int) -> None:
    assert error(attend(causal=causal), tensors(1, s), n) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("n", "s"), [(2, 8), (3, 12), (4, 16), (8, 32)])
@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.4, "key": torch.tensor([1, 2])}])
def test_a_zigzag(n: int, s: int, dropout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", "sequence=zigzag")
    fn, args = attend(causal=True, **dropout), tensors(1, s)
    sent = planned(fn, args, n)
    monkeypatch.setenv("SHARDLIB_OPS", "sequence=ring")
    assert sent.comm_bytes > planned(fn, args, n).comm_bytes
    monkeypatch.setenv("SHARDLIB_OPS", "sequence=zigzag")
    assert error(fn, args, n) < 1e-12


def test_a_zigzag_gives_every_device_the_same_work() -> None:
    for n in range(2, 9):
        chunks = [[0, 0] for _ in range(n)]
        made = ring_attention.Ring(None, None, (), n, 2)  # type: ignore[arg-type]
        for which, pairs in enumerate(made._pairs()):
            for source, device in pairs:
                chunks[device][which] = 2 * source + which
        assert [sum(pair) for pair in chunks] == [2 * n - 1] * n
        assert sorted(c for pair in chunks for c in pair) == list(range(2 * n))


def test_long_causal_sequences_are_balanced_and_short_ones_are_not() -> None:
    def sent(s: int) -> float:
        q, k, v = (torch.empty(1, 1, s, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
        plan = planned(
            lambda *x: F.scaled_dot_product_attention(*(shard(y, "b h s@seq d") for y in x), is_causal=True),
            (q, k, v),
            4,
        )
        return plan.comm_bytes / (2 * k.nbytes * 3 / 4)

    assert sent(1024) == 1
    assert sent(1 << 17) > 1


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_sends_every_piece_once_to_every_other_device(causal: bool, n: int) -> None:
    """(n - 1) / n of k and v forward; of k, v, dk and dv backward."""
    args = tensors(1, 8 * n)
    forward = planned(lambda q, k, v: attend(causal=causal)(q, k, v)[0], args, n)
    both = args[1].nbytes + args[2].nbytes
    assert forward.comm_bytes * n == both * (n - 1)
    assert kinds(forward) == {"ppermute": 2 * (n - 1)}
    step = planned(attend(causal=causal), args, n)
    assert step.comm_bytes * n == 3 * both * (n - 1)
    assert kinds(step) == {"ppermute": 6 * (n - 1)}


@pytest.mark.parametrize(
    ("how", "messages", "rows"),
    [
        ({"causal": True, "window": 9}, 1, 8),
        ({"window": 9}, 2, 16),
        ({"causal": True, "window": 9, "q_offset": 4}, 2, 8),  # of four keys that come later
        ({"causal": True, "window": 191}, 2, 190),  # of two neighbors
        ({"causal": True, "window": 257}, 4.5, 3 * 128 * 1.5),  # of more than half of the others: they go round
    ],
    ids=str,
)
def test_keys_that_a_window_shows_come_and_their_gradients_go_back(how: Any, messages: float, rows: float) -> None:
    """k and v forward, dk and dv backward; where keys go round, they do so twice."""
    fn, args = attend(**how), tensors(1, 512)
    plan = planned(fn, args, 4)
    assert kinds(plan) == {"ppermute": 4 * messages}
    assert plan.comm_bytes == 4 * rows * args[1].nbytes / 512
    assert error(fn, args, 4) < 1e-12


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(("s", "t", "kv"), [(16, 16, 1), (19, 19, 2), (12, 29, 2), (24, 11, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_uneven_pieces(
    causal: bool, s: int, t: int, kv: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", "sequence=ring")
    args = [*tensors(2, s, t=t, kv=kv), torch.randn(s, t, dtype=torch.float64)]
    fn = attend(causal=causal, window=2, q_offset=1, mask=torch.arange(t) % 5 > 0)
    assert "borders" in str(planned(fn, args, n).collectives)
    assert error(fn, args, n) < 1e-12


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_are_exchanged_where_that_is_less(causal: bool, n: int) -> None:
    args = tensors(8, 512)
    fn = attend(causal=causal)
    plan = planned(lambda *x: tuple(shard(y, "b h s@seq d") for y in fn(*x)), args, n)
    # q, k, v and the gradient of o go to heads; o, dq, dk and dv come back.
    assert kinds(plan) == {"all_to_all": 8}
    assert plan.comm_bytes * n * n == 8 * args[0].nbytes * (n - 1)
    assert error(fn, tensors(8, 16), n) < 1e-12


def test_few_key_heads_go_round_instead() -> None:
    """Passing two key heads round among four devices costs less than exchanging sixteen query heads."""
    assert set(kinds(planned(attend(), tensors(16, 512, kv=2), 4))) == {"ppermute"}


def test_some_of_an_axis_cuts_heads_and_the_rest_passes_keys_round() -> None:
    """Two heads on eight devices: two cut the heads, four pass keys round."""
    fn, args = attend(), tensors(2, 512)
    plan = planned(fn, args, 8)
    assert {"all_to_all", "ppermute"} <= set(kinds(plan))
    assert {c.axes for c in plan.collectives if c.kind == "ppermute"} == {("seq:(1)4",)}
    assert error(fn, tensors(2, 32), 8) < 1e-12


class Shapes(TorchDispatchMode):
    """Collects the size of every tensor that an op makes."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if type(x) is torch.Tensor:  # not the ShardedTensors, whose shapes are global
                self.largest = max(self.largest, min(x.nbytes, x.untyped_storage().nbytes()))
        return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "kind"), [(1, "ppermute"), (8, "all_to_all")])
@pytest.mark.parametrize("causal", [False, True])
def test_no_device_holds_the_whole_of_anything(causal: bool, heads: int, kind: str) -> None:
    n, s = 4, 512
    args = tensors(heads, s, dtype=torch.float32)
    fn = attend(causal=causal)
    with Mesh(seq=n):
        step = sl.jit(lambda *x: tuple(shard(y, "b h s@seq d") for y in fn(*x)))
        assert set(kinds(step.plan(*args))) == {kind}
        placed = [shard(x, "b h s@seq d") for x in args]
        step(*placed)
        with Shapes() as seen:
            step(*placed)
    assert seen.largest * n == args[1].nbytes


@pytest.mark.parametrize("heads", [1, 8])
def test_memory_is_linear_in_the_local_sequence(heads: int) -> None:
    def peak(s: int, n: int) -> int:
        fn = attend(causal=True)
        return planned(lambda *x: tuple(shard(y, "b h s@seq d") for y in fn(*x)), tensors(heads, s), n).peak_memory

    assert peak(2048, 8) == peak(1024, 4)


# How it composes ------------------------------------------------------------------------------------------------------


def test_beside_tensor_parallel_heads() -> None:
    fn, args = attend("b h@tensor s@seq d", causal=True), tensors(4, 16, kv=2)
    with Mesh(seq=4, tensor=2):
        step = sl.jit(fn)
        assert {c.axes for c in step.plan(*args).collectives} == {("seq",)}
        found = [x.full_tensor() for x in step(*args)]
    with single_device():
        expected = fn(*args)
    torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-12)


def test_cross_attention_goes_round_where_both_are_cut() -> None:
    fn, args = attend(), tensors(1, 12, t=20)
    assert set(kinds(planned(fn, args, 4))) == {"ppermute"}
    assert error(fn, args, 4) < 1e-12


def test_a_single_key_stays_where_it_is() -> None:
    assert error(attend(), tensors(2, 12, t=1), 4) < 1e-12


def test_keys_that_no_annotation_cuts_stay_whole() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(shard(q, "b h s@seq d"), shard(k, P()), shard(v, P()))

    assert not planned(fn, tensors(1, 12, t=20), 4).collectives


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_merged_in_float32(dtype: torch.dtype) -> None:
    fn = attend(causal=True)
    args = tensors(2, 64, dtype=dtype)
    with Mesh(seq=4):
        found = [x.full_tensor().double() for x in sl.jit(fn)(*args)]
    with single_device():
        plain = [x.double() for x in fn(*args)]
        exact = fn(*(x.double() for x in args))
    for a, b, c in zip(found, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm()


def test_the_plan_says_what_goes_round() -> None:
    plan = planned(attend(), tensors(1, 12), 3)
    first = plan.collectives[0]
    assert (first.kind, first.value) == ("ppermute", "k")
    assert "s passed round, inside attention(q, k, ...)" in first.reason
    assert "s, with s passed round: " in plan.explain(0)


def test_the_next_piece_travels_under_the_arithmetic() -> None:
    """Every rank starts to send a piece, then works on the one before, then waits."""
    plan = planned(lambda *x: attend(causal=True)(*x)[0], tensors(1, 16), 4)
    steps = plan.compiled.program.steps
    events = [s.first.kind if isinstance(s, Start) else str(getattr(s, "target", "")) for s in steps]
    told = [e for e in events if e in ("ppermute", "shardlib.attention.default")]
    assert told == ["ppermute", "ppermute", "shardlib.attention.default"] * 3 + ["shardlib.attention.default"]


@pytest.mark.long
def test_the_user_decides() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_OPS", "sequence=heads")
        assert "ppermute" not in kinds(planned(attend(), tensors(4, 12), 2))
        assert "ppermute" in kinds(planned(attend(), tensors(2, 512), 8)), "two heads are too few for eight devices"
        assert error(attend(), tensors(2, 32), 8) < 1e-12
        patch.setenv("SHARDLIB_OPS", "sequence=ring")
        assert set(kinds(planned(attend(), tensors(4, 12), 2))) == {"ppermute"}
        patch.setenv("SHARDLIB_OPS", "sequence=gather")
        assert "all_gather" in kinds(planned(attend(), tensors(4, 12), 2))
        patch.setenv("SHARDLIB_OPS", "sequence=sideways")
        with pytest.raises(
            ShardingError, match="sequence has no backend 'sideways'; it has ring, zigzag, heads, gather"
        ):
            planned(attend(), tensors(4, 12), 2)


@pytest.mark.long
@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("s", [12, 8])
def test_the_balanced_ring_is_proved_by_brute_force(s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's own samples are too small to be balanced."""
    monkeypatch.setenv("SHARDLIB_OPS", "sequence=zigzag")
    q, k, v = tensors(2, s)
    how = (None, None, None, None, True, 0.3, 0, 0.0)
    forward, backward = torch.ops.shardlib.attention.default, torch.ops.shardlib.attention_backward.default
    o, lse = forward(q, k, v, *how)
    for target, args in ((forward, (q, k, v)), (backward, (v, None, q, k, v, o, lse))):
        assert not check((target.name(), (*args, *how), {}))


# Real processes -------------------------------------------------------------------------------------------------------


def on_ranks(heads: int, s: int, how: dict[str, Any]) -> float:
    return error(attend(**how), tensors(heads, s), 4)


@pytest.mark.sampled(3)
@pytest.mark.ranks
@pytest.mark.parametrize(("heads", "s"), [(1, 16), (1, 19), (4, 16), (2, 512)])
def test_on_four_ranks(heads: int, s: int) -> None:
    assert max(run_ranks(on_ranks, 4, heads, s, {"causal": True})) < 1e-12
