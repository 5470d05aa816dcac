"""Rules for custom ops, one line each, proved as `docs/rules.md` says; and rules that are wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import ShardingError
from shardlib.rules.trial_shardings import trial_shardings
from tests.helpers.prover import rule_of, target_of
from tests.rules.rule_samples import SAMPLES

aten = torch.ops.aten


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def op(fn: Callable[..., Tensor]) -> Any:
    """A custom op of a function."""
    made = torch.library.custom_op(f"proving::{fn.__name__}", fn, mutates_args=())
    made.register_fake(fn)
    return made


@op
def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).square().sum(-1)


@op
def max_plus(x: Tensor, y: Tensor) -> Tensor:
    """Of no numbers, as a piece may have them, the maximum is -inf."""
    return (x[:, :, None] + y).amax(1) if len(y) else x.new_full((len(x), y.shape[1]), -math.inf)


@op
def form(x: Tensor, a: Tensor, y: Tensor) -> Tensor:
    return ((x @ a) * y).sum(-1)


@op
def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(x @ w) * (x @ v)


@op
def spread(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim) - x.amin(dim) if x.shape[dim] else x.sum(dim)


@op
def energy(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    return x.square().sum(dims, keepdim=keepdim)


@op
def maxout(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(dim, (2, -1)).amax(dim % x.dim())


@op
def scaled(x: Tensor, scale: Tensor | None, shape: list[int]) -> Tensor:
    """`shape` has the sizes of the last dims, as in a layer_norm."""
    assert list(x.shape[x.dim() - len(shape) :]) == shape
    return x.clone() if scale is None else x * scale


@op
def levels(x: Tensor, count: int) -> Tensor:
    """What no operand has, and no device makes a piece of: which levels these are depends on where it begins."""
    return x[..., None] * torch.arange(1, count + 1, dtype=x.dtype, device=x.device)


@op
def copies(x: Tensor, count: int) -> Tensor:
    return x.repeat(count, 1)


@op
def blend(x: Tensor, w: Tensor, bias: Tensor | None, squash: bool) -> Tensor:
    y = x @ w if bias is None else x @ w + bias
    return y.tanh() if squash else y


@op
def head_means(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).mean(-1)


@op
def average(x: Tensor, dim: int, width: int) -> Tensor:
    """Of `width` elements in front of each and behind it; beyond the ends there is nothing."""
    kernel = x.new_ones(1, 1, 2 * width + 1)
    rows = x.movedim(dim, -1)
    sums, counts = (F.conv1d(v.flatten(0, -2)[:, None], kernel, padding=width) for v in (rows, torch.ones_like(rows)))
    return (sums / counts).reshape(rows.shape).movedim(-1, dim).contiguous()


@op
def diffused(x: Tensor, reach: int) -> Tensor:
    """Every element pulled to those around it, on a ring."""
    around = sum((torch.roll(x, k, 1) for k in range(-reach, reach + 1)), torch.zeros_like(x))
    return x + 0.1 * around


@op
def powers(x: Tensor, size: int, hop: int) -> Tensor:
    """Of every frame; half a frame is padded at both ends."""
    frames = F.pad(x, (size // 2, size // 2)).unfold(1, size, hop)
    return torch.stack([frames.square().sum(-1), frames.abs().sum(-1)], -1)


@op
def overlap_added(frames: Tensor, n: int, hop: int) -> Tensor:
    """Frames of 4 that begin every `hop` of n elements, added up where they lie."""
    return torch.ops.aten.unfold_backward(frames, [len(frames), n], 1, 4, hop)


@op
def largest(x: Tensor, n: int, dim: int) -> Tensor:
    return x.sort(dim).values.narrow(dim, x.shape[dim] - n, n)


@op
def short_conv(x: Tensor, taps: Tensor) -> Tensor:
    if not len(taps):
        return torch.empty_like(x)  # torch has no convolution of nothing
    return F.conv1d(F.pad(x, (taps.shape[1] - 1, 0)), taps[:, None], groups=len(taps))


@op
def blur(image: Tensor, kernel: Tensor, mask: Tensor | None = None) -> Tensor:
    """Over two dims at once, of which both sides are read; and a sum over channels."""
    rows, columns = (n // 2 for n in kernel.shape[1:])
    windows = F.pad(image, (columns, columns, rows, rows)).unfold(2, 2 * rows + 1, 1).unfold(3, 2 * columns + 1, 1)
    out = torch.einsum("nchwij,cij->nhw", windows, kernel)
    return out if mask is None else out * mask


@op
def unit_heads(x: Tensor, heads: int) -> Tensor:
    """Each head's vector scaled to length 1; of no heads there are none."""
    split = x.unflatten(-1, (heads, -1)) if heads else x.unsqueeze(-1)
    return F.normalize(split, dim=-1).flatten(-2) if x.numel() else x.clone()


@op
def frames(x: Tensor, size: int, hop: int) -> Tensor:
    return x.unfold(-1, size, hop).square().sum(-1)


OPS: dict[str, tuple[Any, tuple[Any, ...], str, list[tuple[str, str]]]] = {
    "distances": (
        distances,
        (r(5, 6), r(7, 6)),
        "n d, m d -> n m | d:sum",
        [
            ("n d, m d -> n m | d:sum {0}", r"it is not linear in the operands \{0\}"),
            ("n d, m d -> n m | d:max", "d@a on a=2: result 0 is wrong: it is off by"),
            ("n d, m d -> m n | d:sum", "does not fit the call"),
        ],
    ),
    "max_plus": (
        max_plus,
        (r(5, 6), r(6, 7)),
        "m k, k n -> m n | k:max",
        [("m k, k n -> m n | k:sum", "k@a on a=2: result 0 is wrong")],
    ),
    "form": (
        form,
        (r(5, 6), r(6, 7), r(5, 7)),
        "b i, i j, b j -> b | i:sum j:sum {0} {1} {2}",
        [("b i, i j, b j -> b | i:sum j:sum {0,1}", r"it is not linear in the operands \{0,1\}")],
    ),
    "gated": (
        gated,
        (r(5, 6), r(6, 7), r(6, 7)),
        "... m k, k n, k n -> ... m n | k:whole {2}",
        [
            ("... m k, k n, k n -> ... m n | k:sum", "k@a on a=2: result 0 is wrong"),
            ("... m k, k n, k n -> ... m n | {1}", r"it is not linear in the operands \{1\}"),
        ],
    ),
    "spread": (
        spread,
        (r(2, 5, 6), -2),
        "[dim] -> ... | dim:whole",
        [
            ("[dim] -> ... | dim:sum", "dim@a on a=2: result 0 is wrong"),
            ("[dim] -> [dim] | dim:whole", "does not fit the call"),
        ],
    ),
    "energy": (
        energy,
        (r(2, 5, 6), [0, 2], True),
        "[dims] -> ... | dims:sum",
        [("[dims] -> ... | dims:max", "dims@a on a=2: result 0 is wrong")],
    ),
    "average": (
        average,
        (r(5, 7), -1, 2),
        "[dim] -> [dim] | dim:halo(width) {0}",
        [
            ("[dim] -> [dim] | {0}", "dim@a on a=2: result 0 is wrong"),
            ("[dim] -> [dim] | dim:halo(1) {0}", "dim@a on a=2: result 0 is wrong"),
            ("[dim] -> [dim] | dim:halo(0, width) {0}", "dim@a on a=2: result 0 is wrong"),
            ("[dim] -> [dim] | dim:halo(dim) {0}", r"`halo\(dim, dim\)` in the rule of [\s\S]*dim is -1"),
        ],
    ),
    "diffused": (
        diffused,
        (r(3, 17), 2),
        "b x -> b x | x:ring(reach) {0}",
        [
            ("b x -> b x | x:halo(reach) {0}", "x@a on a=2: result 0 is wrong"),
            ("b x -> b x | x:ring(1) {0}", "x@a on a=2: result 0 is wrong"),
            ("b x -> b x | x:ring(reach, 1) {0}", "x@a on a=2: result 0 is wrong"),
            (
                "b x -> b x | x:ring(18) {0}",
                r"`ring\(18, 18\)` in the rule[\s\S]*18 is 18[\s\S]*at most once round",
            ),
        ],
    ),
    "powers": (
        powers,
        (r(3, 17), 4, 3),
        "b t -> b o _ | o:windows(t, size, hop, 2)",
        [
            ("b t -> b o _ | o:windows(t, 3, hop, 2)", "`t` of 17 elements has 7 such windows, and there are 6"),
            ("b t -> b o _ | o:windows(t, size, 2, 2)", "has 9 such windows, and there are 6"),
            ("b t -> b o _ | o:windows(t, size, hop)", "has 5 such windows, and there are 6"),
            ("b t -> b o _ | o:windows(t, size, 0)", r"`windows\(t, size, 0, 0\)` in the rule of [\s\S]*0 is 0"),
        ],
    ),
    "powers once": (powers, (r(5, 8), 8, 20), "b t -> b o _ | o:windows(t, size, hop, 4)", []),
    "overlap_added": (
        overlap_added,
        (r(3, 6, 4), 15, 2),
        "b o _ -> b t | o:windows(t, 4, hop) t:size(n) {0}",
        [
            ("b o _ -> b t | o:windows(t, 2, hop) t:size(n) {0}", "15 elements has 7 such windows, and there are 6"),
            ("b o _ -> b t | o:windows(t, 4, 1) t:size(n) {0}", "15 elements has 12 such windows, and there are 6"),
        ],
    ),
    "largest": (
        largest,
        (r(5, 6), 2, -1),
        "[dim] -> [_] | dim:whole",
        [("[dim] -> [_] | dim:none", "dim@a on a=2: result 0 differs between devices")],
    ),
    "short_conv": (
        short_conv,
        (r(2, 3, 9), r(3, 4)),
        "b d t, d w -> b d t | t:halo(3, 0) {0} {1}",
        [("b d t, d w -> b d t | t:halo(2, 0) {0} {1}", "t@a on a=2: result 0 is wrong")],
    ),
    "blur": (
        blur,
        (r(2, 3, 6, 7), r(3, 3, 5), r(2, 6, 7)),
        "n c h w, c _ _, n h w -> n h w | h:halo(1) w:halo(2) c:sum {0} {1} {2}",
        [("n c h w, c _ _, n h w -> n h w | h:halo(1) w:halo(2) c:sum {0,2}", r"it is not linear")],
    ),
    "maxout": (
        maxout,
        (r(3, 8, 5), -2),
        "[two dim] -> [dim] | two:whole",
        [
            ("[dim] -> [dim] | dim:whole", "does not fit the call"),
            ("[two dim] -> [dim] | two:sum", r"two@a on a=2: result 0 is \[3, 2, 5\]"),
        ],
    ),
    "scaled": (
        scaled,
        (r(2, 5, 6), r(5, 6), [5, 6]),
        "[shape], shape -> [shape] | shape:size(shape) {0} {1}",
        [
            ("[shape], shape -> [shape] | {0} {1}", "."),
            ("[shape], ... -> [shape] | shape:size(shape) {0} {1}", "."),
        ],
    ),
    "copies": (copies, (r(6), 5), "d -> n d | n:size(count) {0}", []),
    "copies whole": (copies, (r(6), 5), "d -> n d | {0}", []),
    "levels": (
        levels,
        (r(6, 5), 4),
        "a b -> a b n",
        [("a b -> a b n | n:size(count)", "n@a on a=2: result 0 is wrong")],
    ),
    "blend": (
        blend,
        (r(5, 6), r(6, 7), None, True),
        "n k, k m, m -> n m | k:sum k:whole(squash)",
        [("n k, k m, m -> n m | k:sum", "k@a on a=2: result 0 is wrong")],
    ),
    "blend without a bend": (
        blend,
        (r(5, 6), r(6, 7), r(7), False),
        "n k, k m, m -> n m | k:whole",
        [("n k, k m, m -> n m | k:sum k:whole(squash)", "k@a on a=2: result 0 is wrong")],
    ),
    "unit_heads": (
        unit_heads,
        (r(3, 12), 4),
        "b (h d) -> b (h d) | h:size(heads) d:whole",
        [
            ("b (h d) -> b (h d) | h:size(heads)", "d@a on a=2: result 0 is wrong"),
            ("b (d h) -> b (d h) | h:size(heads) d:whole", "result 0 is wrong|RuntimeError"),
            ("b (h d) -> b (h d) | d:whole", "the size of `h` does not follow"),
        ],
    ),
    "frames": (
        frames,
        (r(2, 11), 3, 2),
        "b t -> b o | o:windows(t, size, hop)",
        [
            ("b t -> b o | o:windows(t, size, 1)", "`t` of 11 elements has 9 such windows, and there are 5"),
            ("b t -> b o | o:windows(t, 2, hop)", "o@a on a=2: of what it reads there, RuntimeError: start"),
        ],
    ),
    "head_means": (
        head_means,
        (r(5, 6), 3),
        "b _ -> b _ | {0}",
        [("b d -> b d | {0}", "does not fit the call|spelled|result 0")],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPS)
def test_an_op_has_a_rule_in_one_line_and_a_proof_in_one_call(name: str) -> None:
    made, args, text, _ = OPS[name]
    sl.rule(text)(made)
    assert sl.rule(made) == text
    proof = sl.prove(made, *args)
    assert re.fullmatch(rf"proving::{name.split()[0]} \({re.escape(text)}\) of .*: right in all \d+ cuts", str(proof))
    assert proof.cuts >= 5


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "text", "words"), [(n, *w) for n, (*_, wrong) in OPS.items() for w in wrong])
def test_a_rule_that_is_wrong_is_told_with_the_cut(name: str, text: str, words: str) -> None:
    made, args, right, _ = OPS[name]
    try:
        sl.rule(text)(made)
        with pytest.raises(ShardingError, match=words):
            sl.prove(made, *args)
    finally:
        sl.rule(right)(made)


def test_what_has_no_rule_is_told_what_to_write() -> None:
    bare = op(_bare)
    assert sl.rule(bare).startswith('@sl.rule("<dims of x>, <dims of scale> -> <dims of result 0>")')
    with pytest.raises(ShardingError, match=r"_bare has no sharding rule[\s\S]*sl\.rule\(op\) says what to write"):
        sl.prove(bare, r(5), r(5))
    with pytest.raises(ShardingError, match="3 cannot be proved"):
        sl.prove(3)


def _bare(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def test_a_halo_of_all_shows_nothing() -> None:
    made = op(_summed_up)
    sl.rule("b t -> b t | t:halo(6, 0)")(made)
    with pytest.raises(
        ShardingError, match=r"is not put to the test:\n.*t has 7 elements, and two devices fetch them all"
    ):
        sl.prove(made, r(2, 7))
    with pytest.raises(ShardingError, match="t@a on a=2: result 0 is wrong"):
        sl.prove(made, r(2, 20))


def _summed_up(x: Tensor) -> Tensor:
    return x.cumsum(1)


LIBRARY = [sample for samples in SAMPLES for sample in samples() if "empty" not in sample[0]]  # which mean nothing


@pytest.mark.sampled(9)
@pytest.mark.parametrize("i", range(0, len(LIBRARY), 29))
def test_it_proves_the_library_s_own_rules(i: int) -> None:
    name, args, kwargs = LIBRARY[i]
    if len(list(trial_shardings(rule_of(name, *args, **kwargs)))) > 1:
        assert sl.prove(target_of(name), *args, **kwargs).cuts > 1
        return
    with pytest.raises(ShardingError, match="no dim of this call may be sharded"):
        sl.prove(target_of(name), *args, **kwargs)


def test_what_is_no_proof_is_none() -> None:
    with pytest.raises(ShardingError, match="is not put to the test"):
        sl.prove(aten.mm.default, r(1, 1), r(1, 1))
    with pytest.raises(ShardingError, match="shows the ops that it is made of: prove these"):
        sl.prove(aten.var.correction, r(5, 6), [0])
    with pytest.raises(ShardingError, match=r"OpOverloadPacket.* cannot be proved"):
        sl.prove(aten.mm, r(5, 6), r(6, 7))
    product = op(_product)
    sl.rule("m k, k n -> m n | k:sum {0} {1}")(product)
    assert sl.prove(product, torch.randn(50, 600), torch.randn(600, 7)).cuts, "float32 rounds"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [(torch.zeros, "the same number everywhere"), (lambda *n: torch.full(n, torch.nan), "result 0 is NaN everywhere")],
)
def test_numbers_that_tell_nothing_apart_prove_nothing(numbers: Any, words: str) -> None:
    made = op(_summed_up)
    sl.rule("b t -> b t")(made)
    with pytest.raises(ShardingError, match=rf"is not put to the test:\n.*{words}"):
        sl.prove(made, numbers(2, 7))


@pytest.mark.parametrize(
    "numbers", [r(5, 6).abs(), r(5, 6), torch.arange(30).view(5, 6), torch.arange(-9, 21).view(5, 6)]
)
@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_maximum_is_tried_below_zero_and_a_minimum_above(kind: str, numbers: Tensor) -> None:
    """There 0 is none of nothing."""
    made = op(_highest if kind == "max" else _lowest)
    sl.rule(f"n d -> n | d:{kind}")(made)
    with pytest.raises(ShardingError, match="d@a on a=4: result 0 is wrong"):
        sl.prove(made, numbers)


def _lowest(x: Tensor) -> Tensor:
    return x.amin(1) if x.shape[1] else x.sum(1)


def _highest(x: Tensor) -> Tensor:
    return x.amax(1) if x.shape[1] else x.sum(1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def test_a_rule_reduces_in_one_way() -> None:
    """What a result owes is one sum, or one maximum: of two kinds, a program once knew the last."""
    with pytest.raises(ShardingError, match="it reduces by max and sum: a result has one kind of partial sum"):
        sl.rule("m k, m j -> m | k:sum j:max")(op(_two_ways))


@pytest.mark.parametrize(
    ("text", "local", "words"),
    [
        ("m k, m j -> m | m:sum", None, "`m:sum` is of a dim that every result has"),
        ("m k, m j -> m | k:local", lambda x, y: x.sum(1), "`k:local` is never sharded: a result lacks it"),
    ],
)
def test_what_a_rule_says_in_vain_is_told(text: str, local: Any, words: str) -> None:
    with pytest.raises(ShardingError, match=words):
        sl.rule(text, local=local)(op(_two_ways))


def _two_ways(x: Tensor, y: Tensor) -> Tensor:
    return x.abs().sum(1) * y.amax(1)


def test_an_op_that_refuses_empty_pieces_is_told() -> None:
    best = op(_best)
    sl.rule("n d -> n | d:max")(best)
    with pytest.raises(ShardingError, match=r"d@a on a=4: IndexError: amax\(\)") as error:
        sl.prove(best, r(5, 6))
    assert "(a device has an empty shard of d)" in str(error.value)
    assert "a local form that pads an empty shard" in str(error.value)


def _best(x: Tensor) -> Tensor:
    return x.amax(-1)


# --- what a proof sees ------------------------------------------------------------------------------------------------


@op
def halved(x: Tensor) -> Tensor:
    return x // 2


@op
def clipped(x: Tensor) -> Tensor:
    return x.clamp(-10, 10)


@op
def positive(x: Tensor) -> Tensor:
    return x > 0


@pytest.mark.parametrize(
    ("made", "x", "words"),
    [
        (halved, torch.arange(7), r"not linear in the operands \{0\}"),
        (clipped, r(7), r"not linear in the operands \{0\}"),
        (positive, r(7), r"\{0\} says that sums may be pending, and a sum of float64 is none in bool"),
    ],
)
def test_linear_is_linear_in_all_numbers(made: Any, x: Tensor, words: str) -> None:
    sl.rule("n -> n | {0}")(made)
    with pytest.raises(ShardingError, match=words):
        sl.prove(made, x)
    sl.rule("n -> n")(made)
    assert sl.prove(made, x)


def test_an_op_makes_what_its_fake_says() -> None:
    narrow = torch.library.custom_op(
        "proving::narrow", lambda x: x * 1.0, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    sl.rule("n m -> n m")(narrow)
    with pytest.raises(ShardingError, match=r"no form for tensors without values \(register_fake\)"):
        sl.prove(narrow, r(5, 6))
    narrow.register_fake(lambda x: torch.empty_like(x, dtype=torch.float32))
    with pytest.raises(
        ShardingError, match=r"result 0 is \[5, 6\] of torch.float64, and its register_fake says \[5, 6\] of"
    ):
        sl.prove(narrow, r(5, 6))


def test_an_argument_that_has_its_default_is_a_size() -> None:
    @op
    def square(x: Tensor, n: int = 6) -> Tensor:
        return x[:, None].repeat(1, n)

    sl.rule("m -> m n | n:size(n)")(square)
    assert sl.prove(square, r(5)).cuts == sl.prove(square, r(5), n=6).cuts > 5
    with sl.Mesh(a=2):
        out = sl.jit(lambda x: square(x, n=6), out_specs="m n@a")(sl.shard(r(4), "m"))
    assert sl.typeof(out) == "f64[4, 6@a]"


def test_a_rule_that_is_mended_is_used() -> None:
    """By calls that ran before, eagerly and jitted."""

    @op
    def shares(x: Tensor) -> Tensor:
        return x / x.sum(0)

    x = r(6, 5).abs()
    with sl.Mesh(a=3):
        xs, step = sl.shard(x, "n@a m"), sl.jit(lambda x: shares(x))
        for text, right in (("n m -> n m", False), ("n m -> n m | n:whole", True)):
            sl.rule(text)(shares)
            assert [torch.allclose(f(xs).full_tensor(), x / x.sum(0)) for f in (shares, step)] == [right, right]


def test_a_rule_does_not_outlive_its_op() -> None:
    def cell(fn: Callable[[Tensor], Tensor]) -> Any:
        made = torch.library.custom_op("proving::cell", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
        made.register_fake(torch.empty_like)
        return made

    sl.rule("n m -> n m")(cell(lambda x: x * 2))
    again, x = cell(lambda x: x / x.sum(0)), r(6, 5).abs()
    with sl.Mesh(a=3):
        assert torch.allclose(again(sl.shard(x, "n@a m")).full_tensor(), x / x.sum(0))
    assert sl.rule(again).startswith("@sl.rule(")


def test_a_kernel_may_read_memory_in_order() -> None:
    """`contiguous()` is no step of a program; an op of a user gets what lies in order all the same."""

    def read(x: Tensor) -> Tensor:
        return torch.as_strided(x, (x.numel(),), (1,)).clone().reshape(x.shape)

    made = torch.library.custom_op("proving::read", read, mutates_args=())
    made.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
    sl.rule("n m -> n m")(made)
    x = r(6, 5)
    for fn in (lambda x: made(x.T.contiguous()), lambda x: made(x[:, 1:3].contiguous())):
        with sl.Mesh(a=2):
            assert torch.equal(sl.jit(fn)(sl.shard(x, "n@a m")).full_tensor(), fn(x))
            assert torch.equal(fn(sl.shard(x, "n m@a")).full_tensor(), fn(x))
    sl.rule("n c h w -> n c h w")(made)
    image = r(2, 4, 5, 3)
    with sl.Mesh(a=2):  # from channels last, which is an order of its own
        turned = sl.jit(lambda x: made(x.permute(0, 3, 1, 2).contiguous()))(sl.shard(image, "n@a h w c"))
    assert torch.equal(turned.full_tensor(), image.permute(0, 3, 1, 2))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_what_a_users_op_writes_to_is_no_copy(jitted: bool) -> None:
    @torch.library.custom_op("proving::doubled_", mutates_args={"x"})
    def doubled(x: Tensor) -> None:
        x.mul_(2)

    def step(x: Tensor) -> Tensor:
        y = (x * 1).T
        doubled(y)
        return y + 0

    x = r(4, 6)
    with sl.Mesh(a=2):
        found = (sl.jit(step) if jitted else step)(sl.shard(x, "n@a m")).full_tensor()
    assert torch.equal(found, 2 * x.T)


@torch.library.custom_op("proving::centered", mutates_args=())
def centered(x: Tensor, wants: bool) -> tuple[Tensor, Tensor]:
    mean = x.mean(0)
    return x - mean, mean.clone() if wants else x.new_empty(0)


centered.register_fake(lambda x, wants: (torch.empty_like(x), x.new_empty(x.shape[1] if wants else 0)))


@pytest.mark.parametrize("wants", [True, False])
def test_what_a_result_lacks_is_whole_whether_or_not_it_is_empty(wants: bool) -> None:
    """Its rows mix, and the rule says nothing of them."""
    sl.rule("b d -> b d, s")(centered)
    x = r(8, 4)
    with sl.Mesh(data=2):
        out = sl.jit(lambda x: centered(x, wants)[0])(sl.shard(x, "b@data d"))
    torch.testing.assert_close(out.full_tensor(), x - x.mean(0))
