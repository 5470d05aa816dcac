"""Every row of the rule tables is proved by brute force on several samples, and planted mistakes are caught."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardlib.rules import Call, Rule, rule_for
from shardlib.rules.dtype_sums import can_hold_sum
from shardlib.rules.rule import LocalBuilder
from shardlib.rules.table import FAMILIES, TABLE
from shardlib.rules.tensor_ops.pointwise import is_pointwise
from tests.helpers.prover import Sample, call_of, check, rule_of, takes_turned, target_of
from tests.rules.rule_samples import SAMPLES, f, i, pos, s

aten = torch.ops.aten


PARTS = 12
SOME = 4  # every such cut is tried where a proof is not in full; it finds all mistakes below


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("family", SAMPLES, ids=lambda g: g.__name__)
def test_every_row_in_some_cuts(family: Callable[[], Iterator[Sample]]) -> None:
    first = {sample[0]: sample for sample in reversed([*family()])}
    wrong = [fault for sample in first.values() for fault in check(sample, each=SOME)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", SAMPLES, ids=lambda g: g.__name__)
def test_rules_are_right(family: Callable[[], Iterator[Sample]], part: int) -> None:
    wrong = [fault for sample in itertools.islice(family(), part, None, PARTS) for fault in check(sample)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_every_op_takes_memory_in_any_order(most: int | None) -> None:
    """But for those whose kernels want rows or columns in order, on one device too."""
    calls = collections.defaultdict(list)
    for sample in itertools.chain.from_iterable(family() for family in SAMPLES):
        calls[sample[0]].append(sample)
    assert {name for name, of in calls.items() if not all(map(takes_turned, of[:most]))} == {"_grouped_mm"}


def test_every_row_has_a_sample() -> None:
    rows = {name if "::" in name else f"aten::{name}" for family in FAMILIES for name in family.ROWS}
    proved = {target_of(name).name() for samples in SAMPLES for name, *_ in samples()}
    here = {
        name for name in rows if hasattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1].split(".")[0])
    }
    assert here - proved == set()
    new = {"aten::_upsample_lanczos2d_aa", "aten::_upsample_lanczos2d_aa_backward"}
    new |= {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}  # torch may be too old for them
    assert {name for name in rows - here if not name.startswith("transformers::")} <= new


# Pointwise by tag -----------------------------------------------------------------------------------------------------


def tagged() -> Iterator[Any]:
    """The ops that are pointwise by tag alone."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and name not in TABLE:
            target = target_of(name)
            if is_pointwise(target):
                yield target


GIVEN = {
    "aten::clamp": ((f(3, 4), -0.5, 0.5), {}),
    "aten::clamp.Tensor": ((f(3, 4), f(4)), {}),
    "aten::clip": ((f(3, 4), -0.5), {}),
    "aten::clip.Tensor": ((f(3, 4), f(4)), {}),
    "aten::div.Scalar_mode": ((f(3, 4), 2), {"rounding_mode": "floor"}),
    "aten::round.decimals": ((f(3, 4),), {"decimals": 2}),
}
SCALARS = {
    "number": 2,
    "int": 2,
    "float": 0.5,
    "bool": False,
    "str": "none",
    "Optional[float]": 0.5,
    "Optional[number]": 1,
}


def guesses(target: Any) -> Iterator[Sample]:
    """Calls of an op of which only the schema is known: floats, ints or bools, in shapes that must be broadcast."""
    if target.name() in GIVEN:
        yield target.name(), *GIVEN[target.name()]
    for make in (lambda *n: pos(*n).clamp(max=0.9), lambda *n: i(3, *n) + 1, lambda *n: f(*n) > 0):
        shapes = itertools.cycle([(3, 4), (3, 1), (4,)])
        needed = itertools.takewhile(lambda a: not a.kwarg_only and not a.has_default_value(), target._schema.arguments)
        kinds = [str(a.type) for a in needed]
        yield s(target.name(), *(make(*next(shapes)) if kind == "Tensor" else SCALARS.get(kind) for kind in kinds))


@pytest.mark.long
@pytest.mark.parametrize(
    ("third", "each"), [(0, SOME), *(pytest.param(i, 1, marks=pytest.mark.slow) for i in range(3))]
)
def test_ops_that_are_pointwise_by_tag(third: int, each: int) -> None:
    wrong, proved = [], 0
    for target in itertools.islice(tagged(), third, None, 3):
        for name, args, kwargs in guesses(target):
            try:
                target(*args, **kwargs)
            except (RuntimeError, TypeError):
                continue  # not for this dtype: the next guess
            wrong += check((name, args, kwargs), each=each)
            proved += 1
            break
        else:
            wrong.append(f"{target}: no guess fits, give it a sample")
    assert not wrong, "\n".join(wrong)
    assert proved > 50


# Planted mistakes -----------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Rule], Rule]:
    """The rule with one field at its default."""
    empty: dict[str, Any] = {"local": None, "reduce": {}, "ints": {}, "whole": frozenset()}
    return lambda r: dataclasses.replace(r, **{name: empty[name]})


def change(**fields: Any) -> Callable[[Rule], Rule]:
    return lambda r: dataclasses.replace(r, **fields)


def linear(*sets: set[int]) -> Callable[[Rule], Rule]:
    return change(linear=tuple(map(frozenset, sets)))


def no_reduction_of(factor: str) -> Callable[[Rule], Rule]:
    return lambda r: dataclasses.replace(r, reduce={k: v for k, v in r.reduce.items() if k != factor})


def swapped(r: Rule) -> Rule:
    """The first result's last two dims, interchanged."""
    *rest, a, b = r.results[0]
    return dataclasses.replace(r, results=((*rest, b, a), *r.results[1:]))


def minor_first(r: Rule) -> Rule:
    """Every dim of several factors, in the wrong order."""
    flip = lambda tensors: tuple(tuple(d[::-1] for d in labels) for labels in tensors)
    return dataclasses.replace(r, operands=flip(r.operands))


def attention_sample(name: str = "shardlib::attention", *, causal: bool = True) -> Sample:
    q, k = f(2, 4, 5, 4), f(2, 2, 5, 4)
    where = (None, None, None, None, causal, 0.5, 0, 0.0)
    if name == "shardlib::attention":
        return s(name, q, k, k, *where)
    o, lse = torch.ops.shardlib.attention(q, k, k, *where)
    return s(name, f(2, 4, 5, 4), None, q, k, k, o, lse, *where)


NORM = (f(2, 3, 4), f(2, 3, 4), [4], f(2, 3, 1), pos(2, 3, 1), f(4), f(4), [True, True, True])


def draw_sample() -> Sample:
    how = {"dtype": torch.float64, "device": torch.device("cpu")}
    return s("shardlib::draw", torch.tensor(7), None, 9, "normal", [5, 7], [0, 0], [5, 7], **how)


MISTAKES: dict[str, tuple[Sample, Callable[[Rule], Rule]]] = {
    "a factor in the wrong place": (s("mm", f(4, 4), f(4, 4)), swapped),
    "a reduction forgotten": (s("mm", f(2, 3), f(3, 4)), without("reduce")),
    "a maximum for a sum": (s("sum.dim_IntList", f(3, 5), [1]), change(reduce={"d3": "max"})),
    "a sum for a maximum": (s("amax", f(3, 5), [0]), change(reduce={"d": "sum"})),
    "a reduction that the gradient of k lacks": (
        attention_sample("shardlib::attention_backward"),
        no_reduction_of("g"),
    ),
    "the average of averages": (s("mean.dim", f(3, 5), [1]), without("local")),
    "a bias added by every device": (s("addmm", f(4), f(2, 3), f(3, 4)), without("local")),
    "an index beyond the shard": (s("embedding", f(5, 3), i(5, 4)), without("local")),
    "targets beyond the shard": (s("nll_loss_forward", f(6, 5), i(5, 6), None, 2, -100), without("local")),
    "a softmax of every shard": (s("_softmax", f(3, 5), 1, False), without("local")),
    "a causal mask that starts at 0": (attention_sample(), without("local")),
    "a diagonal that starts at 0": (s("tril", f(5, 5)), without("local")),
    "a maximum of nothing": (s("amax", f(3, 5), [1]), without("local")),
    "parts of an empty shard": (s("split.Tensor", f(3, 6), 2, 1), without("local")),
    "squeezing a shard of size 1": (s("squeeze", f(2, 1)), without("local")),
    "statistics that are not contiguous": (s("native_layer_norm_backward", *NORM), without("local")),
    "sizes of the whole": (s("expand", f(3, 1), [2, 3, 4]), without("ints")),
    "slice bounds of the whole": (s("slice.Tensor", f(3, 12), 1, 4, 8), without("ints")),
    "a running sum that starts over": (s("cumsum", f(3, 5), 1), without("local")),
    "a record that starts over": (s("cummax", f(3, 5), 1), without("local")),
    "the order of a piece": (s("median.dim", f(3, 5), 1), change(whole=frozenset(), reduce={"dim": "none"})),
    "candidates numbered in their piece": (s("topk", f(3, 8), 2), without("local")),
    "the largest of every piece": (s("max.dim", f(3, 5), 1), without("local")),
    "a product that nobody completes": (s("prod", f(3, 5)), without("local")),
    "means of shared out entries": (
        s("index_reduce", f(5), 0, i(5, 7), f(7), "mean"),
        change(whole=frozenset(), reduce={"j": "sum"}),
    ),
    "old values that every device adds": (s("scatter_add", f(5), 0, i(5, 7), f(7)), without("local")),
    "bins between bounds of a piece": (s("histc", f(7), 4), change(whole=frozenset({"o"}), reduce={"d": "sum"})),
    "a root of a piece": (s("linalg_vector_norm", f(3, 5), 3, [1]), change(local=None, reduce={"d3": "sum"})),
    "a split cut across": (s("split.Tensor", f(3, 12), 4, 1), without("whole")),
    "heads minor first": (s("reshape", f(3, 8), [3, 2, 4]), minor_first),
    "a pointwise op declared linear": (s("exp", f(3, 4)), linear({0})),
    "a product declared jointly linear": (s("mul.Tensor", f(3, 4), f(3, 4)), linear({0, 1})),
    "a sum declared linear in one addend": (s("add.Tensor", f(3, 4), f(3, 4)), linear({0})),
    "adding a number declared linear": (s("add.Tensor", f(3, 4), 2), linear({0})),
    "a filled value declared linear": (s("ones_like", f(3, 4)), linear({0})),
    "labels that spell another shape": (s("t", f(3, 4)), swapped),
    "every part drawn as the first": (draw_sample(), without("local")),
    "a convolution that ends with its piece": (
        s("convolution", f(1, 1, 8), f(1, 1, 3), None, [1], [1], [1], False, [0], 1),
        without("local"),
    ),
    "places in a piece of the plane": (s("max_pool2d_with_indices", f(1, 1, 8, 2), [2, 1]), without("local")),
    "gradients that do not go home": (
        s("avg_pool2d_backward", f(1, 1, 8, 1), f(1, 1, 8, 1), [3, 1], [1, 1], [1, 0], False, True, None),
        without("local"),
    ),
    "a slice of every piece": (s("slice.Tensor", f(3, 9), 1, 1, 9), without("local")),
    "statistics of a part of the batch": (
        s("_native_batch_norm_legit.no_stats", f(5, 3, 2), None, None, True, 0.1, 1e-5),
        without("local"),
    ),
    "statistics of a part of a row": (s("native_layer_norm", f(3, 5), [5], None, None, 1e-5), without("local")),
    "groups of the whole": (s("native_group_norm", f(3, 6, 5), None, None, 3, 6, 5, 3, 1e-5), without("ints")),
    "a mean over the targets of one device": (
        s("nll_loss_forward", f(6, 5), torch.tensor([0, 2, 4, 1, 2, 3]), pos(5), 1, 2),
        without("local"),
    ),
    "the mean of a shard's rows": (s("multi_margin_loss", f(5, 4), i(4, 5)), without("local")),
    "rows of bags that lie elsewhere": (
        s("_embedding_bag", f(5, 4), i(5, 7), torch.tensor([0, 2, 5])),
        without("local"),
    ),
    "an interpolation cut in space": (s("upsample_linear1d", f(2, 2, 4), [7], False), without("whole")),
    "sizes of a gradient's input": (s("upsample_nearest1d_backward", f(3, 2, 4), [4], [3, 2, 2]), without("ints")),
    "a matrix cut before it is inverted": (s("linalg_inv_ex", f(2, 3, 3) + 4 * torch.eye(3)), without("whole")),
    "half a signal transformed": (s("_fft_r2c", f(3, 4), [1], 0, True), without("whole")),
    "a transform of no signals": (s("_fft_r2c", f(3, 4), [1], 0, True), without("local")),
    "a line that every piece draws anew": (s("linspace", 0.0, 1.0, 5), without("local")),
    "columns counted as rows of a solution": (s("linalg_solve_triangular", f(3, 3), f(3, 3), upper=True), swapped),
    "a distance declared linear": (s("_cdist_forward", f(3, 4), f(3, 4), 1.0, None), linear({0})),
    "windows that overlap, cut": (s("unfold", f(6, 2), 0, 3, 1), without("whole")),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_prover_catches(mistake: str) -> None:
    sample, plant = MISTAKES[mistake]

    def planted(call: Call) -> Rule:
        right = rule_for(call)
        assert right is not None
        wrong = plant(right)
        assert wrong != right
        return wrong

    assert check(sample, planted, each=SOME)
    assert not check(sample)


@pytest.mark.usefixtures("strict")
def test_prover_catches_bytes_that_are_not_told() -> None:
    """A local form that says other labels than its value has: the plan's bytes would be wrong."""

    def planted(call: Call) -> Rule:
        right = rule_for(call)
        assert right is not None
        (row,) = right.operands[0][1]

        def local(local: LocalBuilder) -> Any:
            passed = local.ppermute(local.args[0], row, [(0, 1), (1, 0)], ((), ()), name="passed")
            return local.op(aten.prod.dim_int, passed, 1)

        return dataclasses.replace(right, local=dataclasses.replace(right.local, emit=local))

    wrong = check(s("prod.dim_int", f(3, 5), 1), planted)
    assert any("%passed = ppermute makes [3, 3] on a=0, %passed is [1, 1]: [1, 1]" in w for w in wrong)


# What the rules say ---------------------------------------------------------------------------------------------------


def test_fused_projection_keeps_its_inner_factor() -> None:
    r = rule_of("split.Tensor", f(4, 3 * 8), 8, -1)
    (n, inner) = r.operands[0][1]
    assert r.sizes[inner] == 8
    assert n in r.whole
    assert inner not in r.whole
    assert all(labels[1] == (inner,) for labels in r.results)
    back = rule_of("cat", [f(4, 8), f(4, 8), f(4, 8)], -1)
    assert [len(d) for d in back.results[0]] == [1, 2]


@pytest.mark.parametrize(
    ("old", "new", "free"),
    [
        ((2, 3, 4), (6, 4), [2, 3, 4]),
        ((2, 12), (2, 3, 4), [2, 3, 4]),
        ((6, 4), (2, 12), [2, 3, 4]),
        ((8, 5), (8, 5), [5, 8]),
        ((6, 4), (4, 6), []),
        ((5, 6, 4, 7), (5, 4, 6, 7), [5, 7]),
        ((2, 3, 5), (3, 2, 5), [5]),
        ((1, 4), (4, 1, 1), [4]),
        ((0, 4), (4, 0), []),
    ],
)  # fmt: skip
def test_reshape_shares_what_it_can(old: tuple[int, ...], new: tuple[int, ...], free: list[int]) -> None:
    r = rule_of("reshape", f(*old), list(new))
    assert sorted(n for x, n in r.sizes.items() if x not in r.whole) == free
    flat = [{x for d in labels for x in d} for labels in (*r.operands, *r.results)]
    assert not flat[0] & flat[1] & r.whole


def test_sizes_of_a_reshape_are_all_explicit() -> None:
    r = rule_of("reshape", f(6, 4), [2, -1])
    assert [r.ints[1, k][0] * r.sizes[r.ints[1, k][1][0]] for k in range(2)] == [2, 3]
    assert r.ints[1, 1] == (1, r.results[0][1])


def test_arithmetic() -> None:
    assert rule_of("mm", f(2, 3), f(3, 4)).flops == 2 * 2 * 3 * 4
    assert rule_of("bmm", f(5, 2, 3), f(5, 3, 4)).flops == 2 * 5 * 2 * 3 * 4
    assert rule_of("mul.Tensor", f(3, 4), f(4)).flops == 12
    assert rule_of("reshape", f(3, 4), [12]).flops == 0
    full = 4 * 2 * 4 * 5 * 5 * 4
    assert [rule_of(*attention_sample(causal=c)[:1], *attention_sample(causal=c)[1]).flops for c in (False, True)] == [
        full,
        full // 2,
    ]
    assert (
        rule_of(
            "shardlib::attention_backward", *attention_sample("shardlib::attention_backward", causal=False)[1]
        ).flops
        == full // 4 * 10
    )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nonzero", (f(4),)),
        ("index.Tensor", (f(4), [f(4) > 0])),
        ("bernoulli", (pos(4).clamp(max=1),)),
        ("equal", (f(3), f(3))),
    ],
)  # fmt: skip
def test_no_rule(name: str, args: tuple[Any, ...]) -> None:
    assert rule_for(call_of(target_of(name), args, {})[0]) is None


def test_rules_are_looked_up_once() -> None:
    calls = [call_of(aten.reshape.default, (f(6, 4), [2, 12]), {})[0] for _ in range(2)]
    assert rule_for(calls[0]) is rule_for(calls[1])


def test_sums_that_another_dtype_can_hold() -> None:
    assert can_hold_sum(torch.float32, torch.bfloat16)
    assert not can_hold_sum(torch.float32, torch.float64)
