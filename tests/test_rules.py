"""Every row of the rule tables is proved by brute force on several samples, and planted mistakes are caught."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ops.attention  # noqa: F401  (defines shardlib::attention)
import shardlib.constraint  # noqa: F401  (defines shardlib::constrain)
from shardlib.errors import ShardingError
from shardlib.rules import Call, Meta, Rule, pattern, rule, rule_for
from shardlib.rules.notation import parse
from shardlib.rules.pointwise import is_pointwise
from shardlib.rules.table import FAMILIES, TABLE, row
from tests.prover import call_of, prove

aten = torch.ops.aten
Sample = tuple[str, tuple[Any, ...], dict[str, Any]]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pos(*shape: int) -> torch.Tensor:
    return f(*shape).abs() + 0.5


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def s(name: str, *args: Any, **kwargs: Any) -> Sample:
    return name, args, kwargs


def pointwise() -> Iterator[Sample]:
    for name in ("alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "clone", "contiguous"):
        yield s(name, f(2, 5))
        yield s(name, f())
    for name in ("detach_copy", "alias_copy"):
        yield s(name, f(5, 3))
    for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "rsub.Tensor", "div.Tensor"):
        yield s(name, f(3, 5), pos(3, 5))
        yield s(name, f(2, 3, 4), pos(3, 1))
        yield s(name, f(1, 4), pos(3, 1))
        yield s(name, f(), pos(5))
        yield s(name, f(3, 5), f(3, 5).float().abs() + 1)
        if name != "rsub.Tensor":
            yield s(name, f(4), 2)
    yield s("add.Tensor", f(3, 5), f(5), alpha=3)
    yield s("sub.Tensor", f(5), f(3, 5), alpha=-0.5)
    yield s("div.Tensor_mode", f(3, 5), pos(5), rounding_mode="floor")
    yield s("div.Tensor_mode", f(3, 5), pos(5), rounding_mode=None)
    yield s("neg", f(4, 3))
    yield s("mul.Scalar", f(4, 3), 1.5)
    yield s("div.Scalar", f(4, 3), 1.5)
    yield s("addcmul", f(3, 4), f(4), f(3, 1), value=2)
    yield s("addcdiv", f(3, 4), f(4), pos(3, 1), value=2)
    yield s("lerp.Scalar", f(3, 4), f(4), 0.3)
    yield s("lerp.Tensor", f(3, 4), f(4), f(3, 1))
    yield s("gelu_backward", f(3, 4), f(3, 4), approximate="tanh")
    yield s("silu_backward", f(3, 4), f(3, 4))
    yield s("tanh_backward", f(3, 4), f(3, 4))
    yield s("sigmoid_backward", f(3, 4), f(3, 4))
    yield s("threshold_backward", f(3, 4), f(3, 4), 0)
    yield s("elu_backward", f(3, 4), 1.0, 1.0, 1.0, False, f(3, 4))
    yield s("leaky_relu_backward", f(3, 4), f(3, 4), 0.1, False)
    yield s("hardtanh_backward", f(3, 4), f(3, 4), -1, 1)
    yield s("softplus_backward", f(3, 4), f(3, 4), 1, 20)
    yield s("native_dropout_backward", f(3, 4), f(3, 4) > 0, 2.0)
    yield s("_to_copy", f(3, 4), dtype=torch.float32)
    yield s("_to_copy", f(3, 4), dtype=torch.float64)
    yield s("_to_copy", i(9, 5), dtype=torch.float64)
    yield s("copy", f(3, 4), f(4))
    yield s("copy", f(3, 4).float(), f(3, 1))
    yield s("fill.Scalar", f(3, 4), 2)
    yield s("fill.Tensor", f(3, 4), f())
    yield s("masked_fill.Scalar", f(3, 4), f(4) > 0, 0)
    yield s("masked_fill.Tensor", f(3, 4), f(3, 1) > 0, f())
    yield s("where.self", f(3, 1) > 0, f(3, 4), f(4))
    yield s("shardlib::constrain", f(3, 4), "a b")


def contraction() -> Iterator[Sample]:
    yield s("mm", f(2, 3), f(3, 5))
    yield s("mm", f(4, 1), f(1, 5))
    yield s("bmm", f(2, 3, 5), f(2, 5, 4))
    yield s("mv", f(3, 5), f(5))
    yield s("dot", f(5), f(5))
    for bias in (f(4), f(3, 4), f(1, 4), f(3, 1), f()):
        yield s("addmm", bias, f(3, 5), f(5, 4))
    yield s("addmm", f(4), f(3, 2), f(2, 4), beta=2, alpha=0.5)
    yield s("addmm", f(4), f(3, 5), f(5, 4), beta=0.25)
    yield s("addmv", f(3), f(3, 5), f(5), beta=0.25)
    yield s("baddbmm", f(2, 3, 4), f(2, 3, 5), f(2, 5, 4))
    yield s("baddbmm", f(3, 1), f(2, 3, 5), f(2, 5, 4), beta=0.5, alpha=2)


def reduction() -> Iterator[Sample]:
    x = f(3, 5)
    for name in ("sum", "mean", "max", "min", "prod", "std", "var", "var_mean"):
        yield s(name, x)
        yield s(name, f(2, 1, 5))
    for name in ("sum", "max"):
        yield s(name, i(9, 3, 5))
        yield s(name, f())
    yield s("sum", f(3, 5) > 0)
    yield s("sum", x, dtype=torch.float32)
    yield s("mean", x.bfloat16())
    for name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "linalg_vector_norm"):
        dim = (2,) if name == "linalg_vector_norm" else ()
        yield s(name, x, *dim, [0])
        yield s(name, x, *dim, [-1], True)
        yield s(name, f(2, 3, 4), *dim, [0, -1], False)
        yield s(name, f(2, 3, 4), *dim, [], True)
    yield s("sum.dim_IntList", x, None)
    yield s("sum.dim_IntList", x, [1], dtype=torch.float32)
    yield s("mean.dim", x, None, True)
    yield s("mean.dim", x.half(), [1])
    yield s("mean.dim", x.float(), [1], dtype=torch.float64)
    yield s("amax", i(9, 3, 5) - 20, [1])
    yield s("amin", i(9, 3, 5) + 20, [1])
    yield s("linalg_vector_norm", x)
    yield s("linalg_vector_norm", x.float(), dtype=torch.float64)
    yield s("linalg_vector_norm", x.bfloat16(), 2, [1])
    yield s("linalg_vector_norm", x, 1, [1])
    for name in ("any", "all"):
        yield s(name, f(3, 5) > 0)
        yield s(f"{name}.dim", f(3, 5) > 0, 1)
        yield s(f"{name}.dim", i(2, 3, 5), -2, True)
        yield s(f"{name}.dims", f(2, 3, 4) > 0, [0, 2])
    for name in ("max.dim", "min.dim", "argmax", "argmin", "median.dim"):
        yield s(name, x, 1)
        yield s(name, x, -2, True)
    yield s("argmax", x)
    yield s("argmin", x, None, True)
    yield s("prod.dim_int", x, -1, True)
    for name in ("var.correction", "var_mean.correction", "std.correction"):
        yield s(name, x, [1], correction=1)
        yield s(name, f(2, 3, 4), [0, -1], correction=0, keepdim=True)
        yield s(name, x)
    for name in ("var.dim", "var_mean.dim", "std.dim"):
        yield s(name, x, [0])
        yield s(name, x, [1], False, True)
    yield s("histc", f(7), 4, -1, 1)
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        yield s(name, x, 1)
        yield s(name, f(2, 3, 4), -2)
    yield s("topk", f(3, 5), 2)
    yield s("topk", f(3, 5), 2, 0)
    yield s("sort", f(3, 5))
    yield s("sort", f(3, 5), 0, True)
    yield s("sort.stable", f(3, 5), stable=True)
    yield s("sort.stable", f(3, 5), stable=True, dim=0)


def softmax() -> Iterator[Sample]:
    for name in ("_softmax", "_log_softmax"):
        yield s(name, f(3, 5), 1, False)
        yield s(name, f(2, 3, 4) * 400, -2, False)
        yield s(name, f(3, 5).half(), 1, False)
    yield s("_safe_softmax", f(3, 5), -1)
    yield s("_softmax_backward_data", f(3, 5), f(3, 5).softmax(1), 1, torch.float64)
    yield s("_softmax_backward_data", f(2, 3, 4), f(2, 3, 4).softmax(0), 0, torch.float64)
    yield s("_log_softmax_backward_data", f(3, 5), f(3, 5).log_softmax(-1), -1, torch.float64)
    yield s("_log_softmax_backward_data", f(3, 5).bfloat16(), f(3, 5).bfloat16().log_softmax(0), 0, torch.bfloat16)
    yield s("logsumexp", f(3, 5), [1])
    yield s("logsumexp", f(2, 3, 4) * 400, [0, -1], True)
    yield s("logsumexp", torch.full((3, 5), -torch.inf, dtype=torch.float64), [1])


def norm() -> Iterator[Sample]:
    x, w, b = f(2, 3, 4), f(4), f(4)
    for weights in ((w, b), (w, None), (None, None)):
        out, mean, rstd = aten.native_layer_norm(x, [4], *weights, 1e-5)
        yield s("native_layer_norm", x, [4], *weights, 1e-5)
        yield s("native_layer_norm_backward", f(2, 3, 4), x, [4], mean, rstd, *weights, [True, *(p is not None for p in weights)])
    wide = (f(3, 4), f(3, 4))
    _, mean, rstd = aten.native_layer_norm(x, [3, 4], *wide, 1e-5)
    yield s("native_layer_norm", x, [3, 4], *wide, 1e-5)
    yield s("native_layer_norm_backward", f(2, 3, 4), x, [3, 4], mean, rstd, *wide, [True, True, True])
    yield s("native_layer_norm_backward", f(2, 3, 4), x, [3, 4], mean, rstd, *wide, [True, False, False])
    if hasattr(aten, "_fused_rms_norm"):
        for weight in (w, None):
            _, rstd = aten._fused_rms_norm(x, [4], weight, 1e-5)
            yield s("_fused_rms_norm", x, [4], weight, 1e-5)
            yield s("_fused_rms_norm_backward", f(2, 3, 4), x, [4], rstd, weight, [True, weight is not None])


def view() -> Iterator[Sample]:
    for name in ("view", "reshape", "_unsafe_view"):
        yield s(name, f(6, 4), [2, 12])
        yield s(name, f(2, 3, 4), [6, 4])
        yield s(name, f(24), [2, 3, 4])
        yield s(name, f(2, 12), [6, -1])
        yield s(name, f(6, 4), [4, 6])
        yield s(name, f(6, 4, 2), [4, 12])
        yield s(name, f(1, 5, 1), [5])
        yield s(name, f(1, 1), [])
        yield s(name, f(), [1, 1])
        yield s(name, f(0, 4), [2, 0])
    yield s("permute", f(2, 3, 4), [2, 0, -2])
    yield s("transpose.int", f(2, 3, 4), 0, -1)
    yield s("transpose.int", f(), 0, -1)
    yield s("t", f(2, 3))
    yield s("t", f(5))
    yield s("numpy_T", f(2, 3))
    yield s("unsqueeze", f(2, 3), -1)
    yield s("unsqueeze", f(2, 3), 0)
    yield s("squeeze", f(2, 1, 3, 1))
    yield s("squeeze.dim", f(2, 1, 3), 1)
    yield s("squeeze.dim", f(2, 1, 3), -1)
    yield s("squeeze.dims", f(2, 1, 3), [0, 1])
    yield s("expand", f(3, 1), [2, 3, 4])
    yield s("expand", f(3, 5), [2, -1, 5])
    yield s("expand", f(), [3, 4])
    yield s("repeat", f(3, 5), [2, 1, 3])
    yield s("repeat", f(3, 1), [1, 4])
    yield s("repeat_interleave.self_int", f(3, 5), 2, 1)
    yield s("repeat_interleave.self_int", f(3, 5), 3, 0, output_size=9)
    yield s("repeat_interleave.self_int", f(3, 2), 2)
    yield s("diagonal", f(3, 4))
    yield s("diagonal", f(3, 2, 3), 1, 0, -1)


def slicing() -> Iterator[Sample]:
    yield s("slice.Tensor", f(12, 3), 0, 4, 8)
    yield s("slice.Tensor", f(3, 12), -1, -4)
    yield s("slice.Tensor", f(3, 12), 1, 0, 6)
    yield s("slice.Tensor", f(3, 5), 1, 1, 9223372036854775807)
    yield s("slice.Tensor", f(3, 5), 1, 0, 5)
    yield s("slice.Tensor", f(3, 5), 1, 0, 100)
    yield s("slice.Tensor", f(3, 5), 1, None, None, 2)
    yield s("slice.Tensor", f(3, 4), 1, 2, 2)
    yield s("slice.Tensor", f(5))
    yield s("slice_backward", f(4, 3), [12, 3], 0, 4, 8, 1)
    yield s("slice_backward", f(3, 4), [3, 5], -1, 0, 4, 1)
    yield s("slice_backward", f(3, 5), [3, 5], 1, 0, 9223372036854775807, 1)
    yield s("slice_backward", f(3, 3), [3, 5], 1, 0, 5, 2)
    yield s("slice_scatter", f(12, 3), f(4, 3), 0, 4, 8)
    yield s("slice_scatter", f(3, 5), f(3, 2), 1, 3)
    yield s("select.int", f(3, 5), 1, 2)
    yield s("select.int", f(2, 3, 4), -2, -1)
    yield s("select_backward", f(2, 4), [2, 3, 4], 1, -1)
    yield s("select_backward", f(3), [3, 5], -1, 2)
    yield s("select_scatter", f(3, 5), f(3), 1, -2)
    yield s("unbind.int", f(3, 5))
    yield s("unbind.int", f(2, 3, 4), -2)
    yield s("split.Tensor", f(3, 12), 4, 1)
    yield s("split.Tensor", f(12, 2), 8)
    yield s("split.Tensor", f(5, 2), 2)
    yield s("split.Tensor", f(3, 2), 5, -1)
    yield s("split_with_sizes", f(3, 12), [4, 2, 6], -1)
    yield s("split_with_sizes", f(12), [8, 4])
    yield s("split_with_sizes_copy", f(3, 12), [6, 6], 1)
    yield s("chunk", f(3, 12), 3, 1)
    yield s("chunk", f(10), 3)
    yield s("cat", [f(3, 4), f(3, 4), f(3, 4)], 1)
    yield s("cat", [f(2, 3), f(4, 3)])
    yield s("cat", [f(3, 2), f(3, 3)], -1)
    yield s("cat", [f(3, 5)])
    yield s("cat", [f(0), f(3, 2), f(3, 2)], -1)
    yield s("stack", [f(3, 4), f(3, 4)])
    yield s("stack", [f(3, 4), f(3, 4), f(3, 4)], -1)
    yield s("constant_pad_nd", f(3, 4), [0, 4])
    yield s("constant_pad_nd", f(3, 4), [1, 1, 3, 6])
    yield s("constant_pad_nd", f(3, 4), [0, -2, 0, 0], 1.5)
    yield s("flip", f(3, 5), [0])
    yield s("roll", f(3, 5), [2], [-1])
    yield s("roll", f(3, 5), [2])
    for name in ("tril", "triu"):
        yield s(name, f(5, 4))
        yield s(name, f(2, 3, 5), 1)
        yield s(name, f(4, 4), -2)


def indexing() -> Iterator[Sample]:
    yield s("embedding", f(5, 3), i(5, 2, 4))
    yield s("embedding", f(5, 3), i(5, 4), 2)
    yield s("embedding", f(2, 3), i(2))
    grad, index = f(2, 4, 3), i(5, 2, 4)
    yield s("embedding_dense_backward", grad, index, 5, -1, False)
    yield s("embedding_dense_backward", grad, index, 5, 2, False)
    yield s("embedding_dense_backward", grad, index, 5, 0, False)
    yield s("embedding_dense_backward", grad, index, 5, -1, True)
    yield s("gather", f(3, 5), 1, i(5, 3, 4))
    yield s("gather", f(3, 5), -2, i(3, 2, 5))
    yield s("gather", f(3, 5), 0, i(3, 4, 2))
    yield s("gather", f(2, 3, 4), 1, i(3, 2, 1, 4))
    yield s("gather", i(9, 3, 5), 1, i(5, 3, 1))
    yield s("index_select", f(3, 5), 1, i(5, 4))
    yield s("index_select", f(5, 3), -2, i(5, 2))
    yield s("index_select", f(5, 3), 0, i(5, 1))
    for name in ("index.Tensor", "_unsafe_index.Tensor"):
        yield s(name, f(5, 3), [i(5, 4)])
        yield s(name, f(5, 3), [i(5, 2, 4) - 5])
        yield s(name, f(2, 5, 3), [None, i(5, 2)])
        yield s(name, f(2, 5, 3), [None, i(5, 4), i(3, 4)])
        yield s(name, f(2, 5, 3), [i(2, 4, 1), None, i(3, 2)])
        yield s(name, f(2, 5, 3), [None, i(5, 2), None])
        yield s(name, f(5), [i(5)])
    row = i(5, 1, 4)
    for name in ("scatter.src", "scatter_add"):
        yield s(name, f(5, 4), 0, row, f(1, 4))
        yield s(name, f(5, 4), 0, i(5, 1, 3), f(2, 4))
        yield s(name, f(4, 5), -1, torch.stack([torch.randperm(5)[:3] for _ in range(4)]), f(4, 3))
    yield s("scatter_add", f(2, 5), 1, i(5, 2, 7), f(2, 7))
    yield s("scatter_add", f(2, 5), 1, i(5, 2, 4), f(2, 7))
    yield s("scatter.value", f(5, 4), 0, row, 1.5)
    yield s("scatter.value", f(4, 5), 1, i(5, 4, 3), -1)
    yield s("scatter.value", torch.zeros(4, 5, dtype=torch.int64), 1, i(5, 4, 1), 1)
    yield s("index_add", f(5, 3), 0, i(5, 7), f(7, 3))
    yield s("index_add", f(3, 5), -1, i(5, 4), f(3, 4), alpha=2)
    for name in ("index_put", "_unsafe_index_put"):
        for adds in (False, True):
            unique = torch.randperm(5)[:4]
            yield s(name, f(5, 3), [unique], f(4, 3), adds)
            yield s(name, f(5, 3), [unique - 5], f(3), adds)
            yield s(name, f(2, 5, 3), [None, unique], f(4, 3), adds)
            yield s(name, f(4, 2, 5), [i(4, 4) * 0 + torch.arange(4), None, unique], f(4, 2), adds)
            yield s(name, f(5), [unique], f(), adds)
        yield s(name, f(5, 3), [i(5, 9)], f(9, 3), True)
        yield s(name, f(5, 4), [i(5, 3, 1), i(4, 3)], f(3, 3), True)
    for reduction, weight, ignore in itertools.product((0, 1, 2), (None, pos(5)), (-100, 2)):
        target = torch.tensor([0, 2, 4, 1, 2, 3])
        yield s("nll_loss_forward", f(6, 5), target, weight, reduction, ignore)
        grad = f(6) if reduction == 0 else f()
        yield s("nll_loss_backward", grad, f(6, 5), target, weight, reduction, ignore, pos())
    yield s("nll_loss_forward", f(6, 5), torch.tensor([0, -100, 4, 1, -100, 3]), None, 2, -100)
    yield s("nll_loss_forward", f(5), torch.tensor(3), None, 2, -100)
    yield s("nll_loss_backward", f(), f(5), torch.tensor(3), None, 2, -100, pos())


def creation() -> Iterator[Sample]:
    yield s("zeros", [3, 5], dtype=torch.float64)
    yield s("ones", [4], dtype=torch.int64)
    yield s("full", [3, 1, 4], 1.5)
    yield s("full", [], 1.5)
    yield s("empty.memory_format", [3, 5], dtype=torch.float64)
    yield s("new_zeros", f(2, 3), [3, 5])
    yield s("new_ones", f(), [3], dtype=torch.int64)
    yield s("new_full", f(4), [4], 2)
    yield s("new_empty", f(4), [4, 3])
    yield s("empty_strided", [3, 5], [1, 3])
    yield s("new_empty_strided", f(2), [3, 5], [5, 1])
    for name in ("zeros_like", "ones_like", "empty_like"):
        yield s(name, f(3, 5))
        yield s(name, f(3, 5), dtype=torch.float32)
    yield s("full_like", f(3, 5), 2)
    yield s("arange", 7)
    yield s("arange", 7, dtype=torch.float64)
    yield s("arange", 3.5)
    yield s("arange.start", 2, 7)
    yield s("arange.start_step", 9, 1, -3)
    yield s("arange.start_step", 1, 9, 2, dtype=torch.float32)
    yield s("scalar_tensor", 2.5, dtype=torch.float64)


def attention() -> Iterator[Sample]:
    masks = (None, f(1, 1, 5, 3) > -1, f(2, 4, 1, 3), f(1, 4, 5, 3))
    for mask, causal in itertools.product(masks, (False, True)):
        q, k, v, g = f(2, 4, 5, 4), f(2, 2, 3, 4), f(2, 2, 3, 4), f(2, 4, 5, 4)
        where = (mask, causal, 0.5, 1, 0)
        o, lse = torch.ops.shardlib.attention(q, k, v, *where)
        yield s("shardlib::attention", q, k, v, *where)
        yield s("shardlib::attention_backward", g, q, k, v, o, lse, *where)
    q = f(1, 3, 4, 2)
    yield s("shardlib::attention", q, q, q, None, True, 1.0)
    yield s("shardlib::attention", q, q, q, None, True, 1.0, q_offset=0)


SAMPLES = (
    pointwise, contraction, reduction, softmax, norm, view, slicing, indexing, creation, attention,
)  # fmt: skip


def target_of(name: str) -> Any:
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")


def check(sample: Sample, planted: Callable[[Call], Rule | None] | None = None) -> list[str]:
    name, args, kwargs = sample
    target = target_of(name)
    call, *_ = call_of(target, args, kwargs)
    made_of_nothing = "empty" in name
    return prove(target, args, kwargs, rule=(planted or rule_for)(call), values=not made_of_nothing)


@pytest.mark.parametrize("family", SAMPLES, ids=lambda g: g.__name__)
def test_rules_are_right(family: Callable[[], Iterator[Sample]]) -> None:
    wrong = [w for sample in family() for w in check(sample)]
    assert not wrong, "\n".join(wrong)


def test_every_row_has_a_sample() -> None:
    rows = {name if "::" in name else f"aten::{name}" for family in FAMILIES for name in family.ROWS}
    proved = {target_of(name).name() for samples in SAMPLES for name, *_ in samples()}
    here = {name for name in rows if hasattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1].split(".")[0])}
    assert here - proved == set()
    assert rows - here <= {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}  # torch may be too old for them


# Pointwise by tag -----------------------------------------------------------------------------------------------------


def tagged() -> Iterator[Any]:
    """The ops that are pointwise by tag alone."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            target = getattr(packet, overload)
            if is_pointwise(target) and target.name() not in TABLE:
                yield target


GIVEN = {
    "aten::clamp": ((f(3, 4), -0.5, 0.5), {}),
    "aten::clamp.Tensor": ((f(3, 4), f(4)), {}),
    "aten::clip": ((f(3, 4), -0.5), {}),
    "aten::clip.Tensor": ((f(3, 4), f(4)), {}),
    "aten::div.Scalar_mode": ((f(3, 4), 2), {"rounding_mode": "floor"}),
    "aten::round.decimals": ((f(3, 4),), {"decimals": 2}),
}
SCALARS = {"number": 2, "int": 2, "float": 0.5, "bool": False, "str": "none", "Optional[float]": 0.5, "Optional[number]": 1}


def guesses(target: Any) -> Iterator[Sample]:
    """Calls of an op of which only the schema is known: floats, ints or bools, in shapes that must be broadcast."""
    if target.name() in GIVEN:
        yield target.name(), *GIVEN[target.name()]
    for make in (lambda *n: pos(*n).clamp(max=0.9), lambda *n: i(3, *n) + 1, lambda *n: f(*n) > 0):
        shapes = itertools.cycle([(3, 4), (3, 1), (4,)])
        needed = itertools.takewhile(lambda a: not a.kwarg_only and not a.has_default_value(), target._schema.arguments)
        kinds = [str(a.type) for a in needed]
        yield s(target.name(), *(make(*next(shapes)) if kind == "Tensor" else SCALARS.get(kind) for kind in kinds))


def test_ops_that_are_pointwise_by_tag() -> None:
    wrong, proved = [], 0
    for target in tagged():
        for name, args, kwargs in guesses(target):
            try:
                target(*args, **kwargs)
            except (RuntimeError, TypeError):
                continue  # not for this dtype: the next guess
            wrong += check((name, args, kwargs))
            proved += 1
            break
        else:
            wrong.append(f"{target}: no guess fits, give it a sample")
    assert not wrong, "\n".join(wrong)
    assert proved > 150


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
    where = (None, causal, 0.5, 0, 0)
    if name == "shardlib::attention":
        return s(name, q, k, k, *where)
    o, lse = torch.ops.shardlib.attention(q, k, k, *where)
    return s(name, f(2, 4, 5, 4), q, k, k, o, lse, *where)


NORM = (f(2, 3, 4), f(2, 3, 4), [4], f(2, 3, 1), pos(2, 3, 1), f(4), f(4), [True, True, True])

MISTAKES: dict[str, tuple[Sample, Callable[[Rule], Rule]]] = {
    "a factor in the wrong place": (s("mm", f(4, 4), f(4, 4)), swapped),
    "a reduction forgotten": (s("mm", f(2, 3), f(3, 4)), without("reduce")),
    "a maximum for a sum": (s("sum.dim_IntList", f(3, 5), [1]), change(reduce={"d3": "max"})),
    "a sum for a maximum": (s("amax", f(3, 5), [0]), change(reduce={"d": "sum"})),
    "a reduction that the gradient of k lacks": (attention_sample("shardlib::attention_backward"), no_reduction_of("g")),
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
    "a running sum cut": (s("cumsum", f(3, 5), 1), without("whole")),
    "a slice cut across": (s("slice.Tensor", f(3, 12), 1, 4, 8), without("whole")),
    "heads minor first": (s("reshape", f(3, 8), [3, 2, 4]), minor_first),
    "a pointwise op declared linear": (s("exp", f(3, 4)), linear({0})),
    "a product declared jointly linear": (s("mul.Tensor", f(3, 4), f(3, 4)), linear({0, 1})),
    "a sum declared linear in one addend": (s("add.Tensor", f(3, 4), f(3, 4)), linear({0})),
    "adding a number declared linear": (s("add.Tensor", f(3, 4), 2), linear({0})),
    "a filled value declared linear": (s("ones_like", f(3, 4)), linear({0})),
    "labels that spell another shape": (s("t", f(3, 4)), swapped),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_prover_catches(mistake: str) -> None:
    sample, plant = MISTAKES[mistake]

    def planted(call: Call) -> Rule:
        right = rule_for(call)
        assert right is not None
        wrong = plant(right)
        assert wrong != right
        return wrong

    assert check(sample, planted)
    assert not check(sample)


# What the rules say ---------------------------------------------------------------------------------------------------


def rule_of(name: str, *args: Any, **kwargs: Any) -> Rule:
    found = rule_for(call_of(target_of(name), args, kwargs)[0])
    assert found is not None
    return found


def test_fused_projection_keeps_its_inner_factor() -> None:
    r = rule_of("split.Tensor", f(4, 3 * 8), 8, -1)
    (n, inner) = r.operands[0][1]
    assert r.sizes[inner] == 8 and n in r.whole and inner not in r.whole
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
    assert rule_of("shardlib::attention_backward", *attention_sample("shardlib::attention_backward", causal=False)[1]).flops == full // 4 * 10


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nonzero_static", (f(4), ), ),
        ("index.Tensor", (f(4), [f(4) > 0])),
        ("bernoulli", (pos(4).clamp(max=1),)),
        ("eye", (3,)),
    ],
)  # fmt: skip
def test_no_rule(name: str, args: tuple[Any, ...]) -> None:
    kwargs = {"size": 4} if name == "nonzero_static" else {}
    assert rule_for(call_of(target_of(name), args, kwargs)[0]) is None


def test_rules_are_looked_up_once() -> None:
    calls = [call_of(aten.reshape.default, (f(6, 4), [2, 12]), {})[0] for _ in range(2)]
    assert rule_for(calls[0]) is rule_for(calls[1])


# The notation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("... m k,k n->... m n", "... m k, k n -> ... m n"),
        ("m k, k n -> m n|{0}{1} k:sum", "m k, k n -> m n | k:sum {0} {1}"),
        ("~m n, 1 (a  b) -> (a b) m | ...:sum"[:-10], "~m n, 1 (a b) -> (a b) m"),
        ("... d, ... -> v d | ...:sum v:local {0,1}", "... d, ... -> v d | ...:sum v:local {0,1}"),
        ("k, k -> | k:sum", "k, k -> | k:sum"),
        ("->", "->"),
        ("c, -> , | c:sum", "c, -> , | c:sum"),
    ],
)
def test_pattern_text(text: str, plain: str) -> None:
    assert str(parse(text)) == plain
    assert parse(plain) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "it has no `->` between operands and results"),
        ("m k, k n -> m n | q:sum", "`q:sum` names a factor that no tensor has"),
        ("m k, k n -> m n | {2}", "{2} names an operand, but there are 2"),
        ("m k, k n -> m n | k sum", "'k sum' behind the bar is neither `factor:kind` nor a set of operands like `{0,1}`"),
        ("m [k, k n -> m n", "'[' in the term 'm [k' is not a name, `1`, `...` or `(a b)`"),
        ("... m ..., k -> m", "the term '... m ...' has more than one `...`"),
        ("m m -> m", "the term 'm m' has 'm' twice"),
        ("m -> ~m", "`~` marks operands, not results"),
    ],
)
def test_bad_pattern(text: str, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        parse(text)
    assert error.value.offenders == (message,)


def call(pattern_text: str, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> Rule | None:
    metas = tuple(Meta(x, torch.float32) for x in shapes)
    return pattern(pattern_text)(Call(aten.mm.default, metas, {}, metas, (Meta(out, torch.float32),)))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k, k n -> m n", [(2, 3), (4, 5)], "`k` is 4 in [4, 5] and 3 before"),
        ("m k, k n -> m n", [(2, 3), (3, 5, 1)], "[3, 5, 1] does not have the dims of `k n`"),
        ("m (a b), a n -> m n", [(2, 8), (3, 5)], "a dim of size 8 is no `(a b)` with 3 for the sizes that are known"),
        ("m (a b), k n -> m n", [(2, 8), (3, 5)], "the size of `a` does not follow"),
        ("m 1, k n -> m n", [(2, 8), (3, 5)], "[2, 8] has size 8 where `m 1` says 1"),
    ],
)
def test_pattern_that_does_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ShardingError, match="does not fit the call aten.mm.default") as error:
        call(text, shapes, (2, 5))
    assert message in error.value.offenders


def test_a_lost_factor_stays_whole_unless_the_rule_says_more() -> None:
    plain = call("m k, k n -> m n", [(2, 3), (3, 4)], (2, 4))
    summed = call("m k, k n -> m n | k:sum", [(2, 3), (3, 4)], (2, 4))
    assert plain is not None and summed is not None
    assert (plain.whole, plain.reduce) == ({"k"}, {})
    assert (summed.whole, summed.reduce) == (set(), {"k": "sum"})


# Rules for custom ops -------------------------------------------------------------------------------------------------


@torch.library.custom_op("shardlib_tests::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a @ b if bias is None else a @ b + bias


def test_rule_of_a_custom_op() -> None:
    assert rule_for(call_of(torch.ops.shardlib_tests.product.default, (f(2, 3), f(3, 4)), {})[0]) is None
    assert rule("... m k, k n, n -> ... m n | {0}")(product) is product
    wrong = check(s("shardlib_tests::product", f(2, 3, 5), f(5, 4)))
    wrong += check(s("shardlib_tests::product", f(3, 5), f(5, 4)))
    assert not wrong
    with_bias = call_of(torch.ops.shardlib_tests.product.default, (f(3, 5), f(5, 4), f(4)), {})
    assert prove(with_bias[0].target, (f(3, 5), f(5, 4), f(4)), rule=rule_for(with_bias[0]))  # not linear beside a bias
    rule("... m k, k n, n -> ... m n")(torch.ops.shardlib_tests.product.default)
    assert not check(s("shardlib_tests::product", f(3, 5), f(5, 4), f(4)))


@pytest.mark.parametrize(
    ("text", "op", "message"),
    [
        ("m k, k n -> m n", product, "it takes 3 tensors, the rule has 2 operands"),
        ("m k, k n, n -> m n, m", product, "it returns 1 values, the rule has 2 results"),
        ("m, n -> m", aten.cat.default, "it takes a list of tensors"),
        ("m, m -> m", aten.add_.Tensor, "it writes to an argument"),
    ],
)
def test_rule_that_does_not_fit_the_op(text: str, op: Any, message: str) -> None:
    with pytest.raises(ShardingError, match="does not fit") as error:
        rule(text)(op)
    assert message in error.value.offenders


def test_rule_for_something_else() -> None:
    with pytest.raises(ShardingError, match="rules belong to ops of torch.library"):
        rule("m -> m")(torch.sin)
