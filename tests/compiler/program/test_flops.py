"""FLOPs: what rules say of every op, family by family, and that no device counts more than its share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib import Mesh
from shardlib.compiler.program.text import parse, show
from shardlib.rules import rule_for
from shardlib.rules.rule import Call
from shardlib.rules.table import FAMILIES
from tests.helpers.prover import Sample, call_of, target_of
from tests.rules.rule_samples import SAMPLES
from tests.validation.best import f32, ints


def _numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _largest(call: Call) -> int:
    return max(_numel(m.shape) for m in (*call.operands, *call.results) if m is not None)


def _all(call: Call) -> int:
    return sum(_numel(m.shape) for m in call.operands)


def _result(call: Call) -> int:
    return _numel(call.results[0].shape)  # type: ignore[union-attr]


def _looked_up(call: Call) -> int:
    return max(_all(call), _result(call))


def _matrices(call: Call) -> int:
    """n for each element of matrices of n rows, or fewer."""
    sides = [min(m.shape[-2:]) for m in call.operands if len(m.shape) > 1]
    return max(sides, default=1) * _all(call)


Bounds = tuple[float, float, Callable[[Call], int]]  # least and most operations for each of so many

# Nothing is said twice: where both bounds are one, that is the formula.
FAMILY: dict[str, Bounds] = {
    "activation": (1, 1, _largest), "pointwise": (0, 14, _largest), "reduction": (0, 1, _largest),
    "cumulative": (1, 1, _largest), "sort_topk": (1, 1, _largest),
    "loss": (1, 2, _largest), "random": (0, 1, _largest), "norm": (5, 8, _largest), "batchnorm": (5, 8, _largest),
    "softmax": (4, 4, _largest), "fft": (5, 30, _largest), "counting": (0, 2, _all), "gather": (0, 1, _looked_up),
    "scatter": (0, 1, _all), "embedding_bag": (0, 3, _all), "pooling": (0, 9, _largest),
    "interpolate": (1, 72, _largest), "matrix": (0, 6, _largest), "linalg": (0, 1, _matrices), "view": (0, 0, _largest),
    **dict.fromkeys(["rearrange", "slice_shift", "splice", "unfold"], (0, 0, _largest)), "creation": (0, 1, _largest),
    "foreach": (0, 8, _all), "fused_loss": (0, 0, _all), "padding": (0, 0, _largest), "diagonals": (0, 1, _largest),
}  # fmt: skip
PRODUCTS = {
    "matmul",
    "convolution",
    "attention",
    "grouped_matmul",
    "recurrence",
}  # counted below, against torch's counter or by hand
OTHERS: dict[str, Bounds] = {
    "aten::linalg_cross": (3, 3, _result), "aten::linalg__powsum": (1, 1, _largest),
    "aten::lu_unpack": (1, 1, _largest), "aten::_linalg_check_errors": (1, 1, _largest),
    "shardlib::scores_backward": (4, 4, _largest),
    **{f"aten::{name}": (2, 2, lambda call: _numel(call.operands[1].shape))  # a logit for each target
       for name in ("nll_loss_forward", "nll_loss2d_forward")},
    **{f"aten::grid_sampler_{d}d": (2 * 2**d, 2 * 2**d, _result) for d in (2, 3)},
    **{f"aten::upsample_{name}": (2 * n, 2 * n, _largest)
       for name, n in (("linear1d", 2), ("bilinear2d", 4), ("trilinear3d", 8), ("bicubic2d", 16))},
}  # fmt: skip


def _family() -> dict[str, str]:
    named = {name: family.__name__.rpartition(".")[2] for family in FAMILIES for name in family.ROWS}
    return {name if "::" in name else f"aten::{name}": family for name, family in named.items()}


def test_every_family_has_a_formula() -> None:
    assert {*FAMILY, *PRODUCTS} == {family.__name__.rpartition(".")[2] for family in FAMILIES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("samples", SAMPLES, ids=lambda g: g.__name__)
def test_of_every_op(samples: Callable[[], list[Sample]]) -> None:
    families, wrong = _family(), []
    for name, args, kwargs in samples():
        target = target_of(name)
        key = target._schema.name
        family = families.get(f"{key}.{target._overloadname}", families.get(key, "pointwise"))
        call = call_of(target, args, kwargs)[0]
        rule = rule_for(call)
        if rule is None or family in PRODUCTS or not call.operands:
            continue
        low, high, of = OTHERS.get(key, FAMILY[family])
        if not low * of(call) <= rule.flops <= high * of(call):
            wrong.append(f"{name}: {rule.flops} operations, {of(call)} elements")
    assert not wrong, wrong


COUNTED = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}


def test_products_are_counted_as_by_torch() -> None:
    seen = set()
    for samples in SAMPLES:
        for name, args, kwargs in samples():
            if name in COUNTED and not (name == "convolution_backward" and not all(args[-1][:2])):
                with FlopCounterMode(display=False) as counter:
                    target_of(name)(*args, **kwargs)
                rule = rule_for(call_of(target_of(name), args, kwargs)[0])
                assert rule is not None
                if "k" in rule.local.ones or (name == "convolution_backward" and (args[7] or args[9] > 1)):
                    continue  # nothing is added up; gradients that torch counts as if there were no groups
                assert rule.flops == counter.get_total_flops(), (name, [getattr(a, "shape", a) for a in args])
                seen.add(name)
    assert seen == COUNTED


CUT = {
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (256,)), (f32(64, 256),), "_ d@a"),
    "softmax": (lambda x: x.softmax(-1), (f32(64, 256),), "_ d@a"),
    "logsumexp": (lambda x: x.logsumexp(-1), (f32(64, 256),), "_ d@a"),
    "batch norm": (
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True), (f32(64, 256),), "n@a _"
    ),
    "group norm": (lambda x: torch.nn.functional.group_norm(x, 4), (f32(8, 32, 16),), "_ c@a _"),
    "convolution": (
        lambda x: torch.nn.functional.conv1d(x, torch.ones(4, 4, 3), padding=1), (f32(2, 4, 64),), "_ _ s@a"
    ),
    "pool": (lambda x: torch.nn.functional.avg_pool1d(x, 3, 1, 1), (f32(2, 4, 64),), "_ _ s@a"),
    "cumulative": (lambda x: x.cumsum(-1), (f32(64, 256),), "_ d@a"),
    "norm of rows": (lambda x: torch.linalg.vector_norm(x, dim=-1), (f32(64, 256),), "_ d@a"),
    "variance": (lambda x: x.var(-1), (f32(64, 256),), "_ d@a"),
    "cross entropy": (
        lambda x, i: torch.nn.functional.cross_entropy(x, i), (f32(64, 256), ints(64)), "_ d@a"
    ),
    "maximum": (lambda x: x.max(-1), (f32(64, 256),), "_ d@a"),
    "FFT": (lambda x: torch.fft.fft(x, dim=0).real, (f32(64, 256),), "_ d@a"),
    "attention": (
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), (f32(2, 8, 16, 32),), "_ h@a _ _"
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CUT)
def test_all_devices_do_what_one_does(name: str) -> None:
    """The arithmetic of a whole op is shared out, and what is made of statistics, on all devices alike, is little."""
    program, args, spec = CUT[name]
    with Mesh.abstract(a=8):
        plan = sl.jit(program, in_specs=(spec, "...")[: len(args)]).plan(*args)
    with Mesh.abstract(a=1):
        alone = sl.jit(program).plan(*args).flops
    assert alone <= plan.flops * 8 * (1 + 1e-9) <= 1.03 * alone
    assert sum(r.flops for r in plan.redundant) <= 0.005 * plan.flops


def _per_device(fn: Callable[..., object], pieces: list[list[torch.Tensor]]) -> list[int]:
    """What torch's counter says of each device's own call."""
    found = []
    for args in pieces:
        with FlopCounterMode(display=False) as counter:
            fn(*args)
        found.append(counter.get_total_flops())
    return found


UNEVEN = {
    "chunks": ("b@d k", "k n@t", 10, 7, [3, 3, 3, 1], [4, 3]),
    "chosen pieces": ("b@d=[1 2 6 1] k", "k n@t=[2 5]", 10, 7, [1, 2, 6, 1], [2, 5]),
    "nothing on some": ("b@d k", "k n@t", 5, 7, [2, 2, 1, 0], [4, 3]),
    "one of two": ("b@d k", "k n", 10, 7, [3, 3, 3, 1], [7, 7]),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_of_uneven_pieces_by_the_device_that_does_most(name: str) -> None:
    first, second, b, n, rows, columns = UNEVEN[name]
    with Mesh.abstract(d=4, t=2):
        plan = sl.jit(torch.mm, in_specs=(first, second)).plan(f32(b, 16), f32(16, n))
    assert not plan.collectives
    most = max(_per_device(torch.mm, [[f32(i, 16), f32(16, j)] for i in rows for j in columns]))
    assert plan.flops == most
    assert parse(str(show(plan.compiled.program))).steps[0].work == plan.compiled.program.steps[0].work


def test_no_device_does_most_of_every_step() -> None:
    """One does most of the first product, another of the second."""

    def fn(x, v, y, w):
        return x @ v, y @ w

    specs = ("a@d=[6 2] k", "k n", "b@d=[2 4] k", "k n")
    with Mesh.abstract(d=2):
        plan = sl.jit(fn, in_specs=specs).plan(f32(8, 16), f32(16, 4), f32(6, 16), f32(16, 4))
    assert plan.flops == 2 * 16 * 4 * max(6 + 2, 2 + 4)
