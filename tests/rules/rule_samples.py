"""Sample calls for every row of the rule tables; `test_rules` proves the rows on them."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.helpers.prover import Sample
from tests.rules.samples import SAMPLES as FAMILIES
from tests.rules.samples.make import f, i, pos, s

aten = torch.ops.aten


def pointwise() -> Iterator[Sample]:
    for name in ("alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "clone"):
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
    for number in (0, 0.0, 2):
        yield from (s(name, f(3, 5), number) for name in ("add.Tensor", "sub.Tensor", "rsub.Scalar"))
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
    for name in ("mish_backward", "hardswish_backward", "hardsigmoid_backward"):
        yield s(name, f(3, 4), f(3, 4))
    yield s("log_sigmoid_forward", f(3, 4))
    yield s("log_sigmoid_backward", f(3, 4), f(3, 4), aten.log_sigmoid_forward(f(3, 4))[1])
    yield s("floor_divide", i(9, 3, 4), i(3, 4) + 1)
    yield s("floor_divide.Scalar", f(3, 4), 2)
    yield s("native_dropout_backward", f(3, 4), f(3, 4) > 0, 2.0)
    yield s("_to_copy", f(3, 4), dtype=torch.float32)
    yield s("_to_copy", f(3, 4), dtype=torch.float64)
    yield s("_to_copy", i(9, 5), dtype=torch.float64)
    yield s("copy", f(3, 4), f(4))
    yield s("copy", f(3, 4).float(), f(3, 1))
    yield s("fill.Scalar", f(3, 4), 2)
    yield s("fill.Tensor", f(3, 4), f())
    yield s("masked_fill.Scalar", f(3, 4), f(4) > 0, 0)
    yield s("masked_fill.Scalar", f(3, 4), f(4) > 0, 2)
    yield s("masked_fill.Tensor", f(3, 4), f(3, 1) > 0, f())
    yield s("where.self", f(3, 1) > 0, f(3, 4), f(4))
    yield s("_to_copy", f(3, 4).bfloat16(), dtype=torch.float32)
    yield s("shardlib::constrain", f(3, 4), "a b")
    yield s("shardlib::within", f(3, 4), -100, 100, "a value is small")
    yield s("shardlib::cast_terms", f(3, 4), dtype=torch.float32)
    for decoupled in (False, True):
        for shape in ((3, 4), ()):
            state = f(*shape), f(*shape), f(*shape), f(*shape).abs()
            yield s("shardlib::adam", *state, torch.tensor(2.0), 0.1, 0.9, 0.99, 1e-3, 0.05, decoupled)


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
    yield s("addmm", *(torch.complex(f(*n), f(*n)) for n in ((4,), (3, 5), (5, 4))), beta=0.5 + 2j, alpha=1j)
    yield s("baddbmm", *(torch.complex(f(*n), f(*n)) for n in ((4,), (2, 3, 5), (2, 5, 4))), beta=2 + 0j)
    yield s("addmv", f(3), f(3, 5), f(5), beta=0.25)
    yield s("addmv", f(1), f(5, 4), f(4))
    yield s("baddbmm", f(2, 3, 4), f(2, 3, 5), f(2, 5, 4))
    yield s("baddbmm", f(3, 1), f(2, 3, 5), f(2, 5, 4), beta=0.5, alpha=2)
    for bias, factors in ((f(3, 4), {}), (f(4), {"beta": 0.25, "alpha": 2}), (f(3, 1), {"beta": 3})):
        yield s("addbmm", bias, f(5, 3, 2), f(5, 2, 4), **factors)
    yield s("addr", f(3, 5), f(3), f(5), beta=0.5, alpha=2)
    yield s("addr", f(5), f(3), f(5))
    yield s("vdot", f(5), f(5))
    yield s("vdot", torch.randn(5, dtype=torch.complex128), torch.randn(5, dtype=torch.complex128))
    yield s("_int_mm", i(9, 17, 8).to(torch.int8), i(9, 8, 8).to(torch.int8))
    yield s("_addmm_activation", f(4), f(3, 5), f(5, 4), use_gelu=True)
    yield s("_addmm_activation", f(3, 4), f(3, 5), f(5, 4))


def grouped() -> Iterator[Sample]:
    for ends in ([2, 2, 5], [0, 5, 5], [1, 4, 5]):
        offs = torch.tensor(ends, dtype=torch.int32)
        yield s("_grouped_mm", f(5, 16).bfloat16(), f(3, 16, 32).bfloat16(), offs)
    for ends in ([4, 4, 16], [0, 5, 16]):
        offs = torch.tensor(ends, dtype=torch.int32)
        yield s("_grouped_mm", f(16, 16).bfloat16().t(), f(16, 8).bfloat16(), offs)
        yield s("_grouped_mm", f(3, 6, 16).bfloat16(), f(16, 16).bfloat16().t(), offs)
    yield s("_grouped_mm", f(3, 5, 32).bfloat16(), f(3, 32, 16).bfloat16())
    if importlib.util.find_spec("transformers") is None:
        return
    importlib.import_module("transformers.integrations.moe")  # defines its ops
    for ends in ([2, 2, 5], [0, 5, 5], [1, 4, 4]):
        x, weight, offs = f(5, 3), f(3, 3, 4), torch.tensor(ends, dtype=torch.int32)
        yield s("transformers::grouped_mm_fallback", x, weight, offs)
        yield s("transformers::grouped_mm_fallback_backward", x, weight, offs, f(5, 4))


def reduction() -> Iterator[Sample]:
    x = f(3, 5)
    for name in ("sum", "mean", "max", "min"):
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
    yield s("mean.dim", torch.zeros(0, 4, dtype=torch.float64), [1])
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
        yield s(f"{name}.dims", f(2, 3, 4) > 0, [])
        yield s(f"{name}.dims", f(2, 3, 4) > 0, None, True)


def softmax() -> Iterator[Sample]:
    for name in ("_softmax", "_log_softmax"):
        yield s(name, f(3, 5), 1, False)
        yield s(name, f(2, 3, 4) * 400, -2, False)
        yield s(name, f(3, 5).half(), 1, False)
    yield s("_safe_softmax", f(3, 5), -1)
    yield s("_safe_softmax", torch.tensor([[float("-inf")] * 5, [1.0, 2.0, float("-inf"), 0.0, 3.0]]), -1)
    yield s("_softmax_backward_data", f(3, 5), f(3, 5).softmax(1), 1, torch.float64)
    yield s("_softmax_backward_data", f(2, 3, 4), f(2, 3, 4).softmax(0), 0, torch.float64)
    yield s("_log_softmax_backward_data", f(3, 5), f(3, 5).log_softmax(-1), -1, torch.float64)
    yield s("_log_softmax_backward_data", f(3, 5).bfloat16(), f(3, 5).bfloat16().log_softmax(0), 0, torch.bfloat16)
    for name in ("softmax.int", "log_softmax.int"):
        yield s(name, f(3, 5), -1)
        yield s(name, f(3, 5).float(), 0, torch.float64)
    heads, keys = f(3, 2, 4, 4), f(3, 4) > 0
    yield s("_masked_softmax", heads, f(4, 4) > 0.5, None, 0)
    yield s("_masked_softmax", heads, keys, None, 1)
    yield s("_masked_softmax", heads, f(3, 2, 4, 4) > 1, -1, 2)
    yield s("_masked_softmax_backward", f(3, 5), f(3, 5).softmax(-1), f(3, 5) > 0.5, 1)
    yield s("logsumexp", f(3, 5), [1])
    yield s("logsumexp", f(2, 3, 4) * 400, [0, -1], True)
    yield s("logsumexp", torch.full((3, 5), -torch.inf, dtype=torch.float64), [1])
    yield s("logsumexp", torch.complex(f(3, 5), f(3, 5)), [1])


def norm() -> Iterator[Sample]:
    x, w, b = f(2, 3, 4), f(4), f(4)
    for weights in ((w, b), (w, None), (None, None)):
        _, mean, rstd = aten.native_layer_norm(x, [4], *weights, 1e-5)
        yield s("native_layer_norm", x, [4], *weights, 1e-5)
        yield s(
            "native_layer_norm_backward",
            f(2, 3, 4),
            x,
            [4],
            mean,
            rstd,
            *weights,
            [True, *(p is not None for p in weights)],
        )
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
    h, hw = f(2, 3, 5).bfloat16(), f(5).bfloat16()
    yield s("native_layer_norm", h, [5], hw, hw, 1e-5)
    yield s("native_layer_norm", h, [5], hw.float(), hw.float(), 1e-5)


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
    for name in ("view_copy", "_reshape_copy"):
        yield s(name, f(6, 4), [2, 12])
        yield s(name, f(5, 1), [5])
    for name in ("permute", "permute_copy"):
        yield s(name, f(2, 3, 4), [2, 0, -2])
    for name in ("transpose.int", "transpose_copy.int"):
        yield s(name, f(2, 3, 4), 0, -1)
    yield s("transpose.int", f(), 0, -1)
    for name in ("t", "t_copy"):
        yield s(name, f(2, 3))
        yield s(name, f(5))
    for copy in ("", "_copy"):
        yield s(f"unsqueeze{copy}", f(2, 3), -1)
        yield s(f"unsqueeze{copy}", f(2, 3), 0)
        yield s(f"unsqueeze{copy}", f(2), 0)
        yield s(f"squeeze{copy}", f(2, 1, 3, 1))
        yield s(f"squeeze{copy}.dim", f(2, 1, 3), 1)
        yield s(f"squeeze{copy}.dim", f(2, 1, 3), -1)
        yield s(f"squeeze{copy}.dims", f(2, 1, 3), [0, 1])
        yield s(f"expand{copy}", f(3, 1), [2, 3, 4])
        yield s(f"expand{copy}", f(3, 5), [2, -1, 5])
        yield s(f"expand{copy}", f(), [3, 4])
    yield s("repeat", f(3, 5), [2, 1, 3])
    yield s("repeat", f(3, 1), [1, 4])
    yield s("repeat_interleave.self_int", f(3, 5), 2, 1)
    yield s("repeat_interleave.self_int", f(3, 5), 3, 0, output_size=9)
    yield s("repeat_interleave.self_int", f(3, 2), 2)
    for name in ("unfold", "unfold_copy"):
        yield s(name, f(3, 5), 1, 2, 1)
        yield s(name, f(6, 5), 0, 2, 2)
        yield s(name, f(3, 7, 2), -2, 2, 2)
        yield s(name, f(3, 4), 1, 3, 5)
        yield s(name, f(), 0, 1, 1)
    yield s("unfold_backward", f(3, 4, 2), [3, 5], 1, 2, 1)
    yield s("unfold_backward", f(5, 3, 2), [10, 3], 0, 2, 2)
    yield s("unfold_backward", f(3, 2, 2, 3), [3, 7, 2], 1, 3, 4)
    for name in ("view.dtype", "view_copy.dtype"):
        yield s(name, f(3, 5), torch.int64)
        yield s(name, f(3, 5), torch.int32)
        yield s(name, f(3, 4).float(), torch.float64)


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
    yield s("slice_copy.Tensor", f(3, 12), 1, 4, 8)
    yield s("slice_backward", f(4, 3), [12, 3], 0, 4, 8, 1)
    yield s("slice_backward", f(3, 4), [3, 5], -1, 0, 4, 1)
    yield s("slice_backward", f(3, 5), [3, 5], 1, 0, 9223372036854775807, 1)
    yield s("slice_backward", f(3, 3), [3, 5], 1, 0, 5, 2)
    yield s("slice_scatter", f(12, 3), f(4, 3), 0, 4, 8)
    yield s("slice_scatter", f(3, 5), f(3, 2), 1, 3)
    yield s("select.int", f(3, 5), 1, 2)
    yield s("select.int", f(2, 3, 4), -2, -1)
    yield s("select_copy.int", f(2, 3, 4), 1, 2)
    yield s("select_backward", f(2, 4), [2, 3, 4], 1, -1)
    yield s("select_backward", f(3), [3, 5], -1, 2)
    yield s("select_scatter", f(3, 5), f(3), 1, -2)
    yield s("unbind.int", f(3, 5))
    yield s("unbind.int", f(2, 3, 4), -2)
    yield s("unbind_copy.int", f(2, 3, 4), 1)
    for name in ("unsafe_split.Tensor", "split_copy.Tensor"):
        yield s(name, f(3, 12), 4, 1)
    yield s("unsafe_split_with_sizes", f(3, 12), [4, 8], 1)
    yield s("split.Tensor", f(3, 12), 4, 1)
    yield s("split.Tensor", f(12, 2), 8)
    yield s("split.Tensor", f(5, 2), 2)
    yield s("split.Tensor", f(3, 2), 5, -1)
    yield s("split_with_sizes", f(3, 12), [4, 2, 6], -1)
    yield s("split_with_sizes", f(12), [8, 4])
    yield s("split_with_sizes_copy", f(3, 12), [6, 6], 1)
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


def loss() -> Iterator[Sample]:
    for name, rest in (("mse_loss", ()), ("smooth_l1_loss", (0.5,)), ("huber_loss", (0.5,))):
        for how in (0, 1, 2):
            grad = f() if how else f(3, 5)
            yield s(name, f(3, 5), f(3, 5), how, *rest)
            yield s(f"{name}_backward", grad, f(3, 5), f(3, 5), how, *rest)
    yield s("mse_loss", f(3, 5), f(3, 5))
    yield s("mse_loss", f(3, 5).half(), f(3, 5).half(), reduction=1)
    yield s("binary_cross_entropy", pos(3, 5).clamp(max=0.9), pos(3, 5).clamp(max=0.9))
    yield s("binary_cross_entropy_backward", f(), pos(3, 5).clamp(max=0.9), pos(3, 5).clamp(max=0.9))
    for weight, how in itertools.product((None, pos(5)), (0, 1, 2)):
        x, y = f(3, 5).sigmoid(), f(3, 5).sigmoid()
        grad = f() if how else f(3, 5)
        yield s("binary_cross_entropy", x, y, weight, how)
        yield s("binary_cross_entropy_backward", grad, x, y, weight, how)


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
    yield s("empty_permuted", [3, 5], [1, 0], dtype=torch.float64)
    for space in ("linspace", "logspace"):
        for name, low, high in (
            ("", -1.0, 2.5),
            (".Tensor_Tensor", f(), f()),
            (".Tensor_Scalar", f(), 2.5),
            (".Scalar_Tensor", 2, f()),
        ):
            yield s(f"{space}{name}", low, high, 7, dtype=torch.float64)
    yield s("linspace", 3, 4, 5)
    yield s("range", 0, 1.5)
    yield s("range.step", 0, 1.5, 0.1)
    for name in ("tril_indices", "triu_indices"):
        yield s(name, 3, 4, 1)
    for name in ("fft_fftfreq", "fft_rfftfreq"):
        yield s(name, 7, 0.3)
    for name in ("bartlett_window", "blackman_window", "hann_window", "hamming_window", "kaiser_window"):
        yield s(name, 7)
        yield s(f"{name}.periodic", 5, False)
    yield s("hamming_window.periodic_alpha", 7, True, 0.5)
    yield s("hamming_window.periodic_alpha_beta", 7, True, 0.5, 0.4)
    yield s("kaiser_window.beta", 7, True, 8.0)


def attention() -> Iterator[Sample]:
    q, k, g, g_lse = f(2, 4, 5, 4), f(2, 2, 3, 4), f(2, 4, 5, 4), f(2, 4, 5)
    key, slopes = torch.tensor([3, 8]), torch.tensor([0.5, 0.25, 1.0, 0.125])
    variants: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": True, "q_offset": 1},
        {"causal": True, "k_offset": 3},
        {"window": 2, "q_offset": 1},
        {"causal": True, "window": 2, "q_offset": 2},
        {"mask": f(1, 1, 5, 3) > -1},
        {"mask": f(2, 1, 1, 3) > -1, "causal": True},
        {"alibi": slopes},
        {"alibi": slopes, "causal": True, "bias": f(5, 1)},
        *({"bias": f(*shape)} for shape in ((2, 4, 1, 3), (1, 4, 5, 3), (2, 1, 5, 3), (5, 3), (1, 1, 1, 1), (4, 1, 3))),
        {"key": key, "dropout": 0.5},
        {"key": key, "dropout": 0.5, "causal": True, "q_offset": 1, "bias": f(4, 5, 3)},
        {"key": key, "dropout": 0.5, "q_offset": 2, "k_offset": 4, "part": [3, 8, 16, 9, 10]},
    ]
    for how in variants:
        yield from _attention(q, k, g, None, how)
        yield from _attention(q, k, g, g_lse, how)
    one_key_head = {"key": key, "dropout": 0.3, "alibi": slopes}
    yield from _attention(q, f(2, 1, 3, 4), g, None, one_key_head)
    yield from _attention(f(1, 4, 2, 4), f(1, 4, 3, 4), f(1, 4, 2, 4), None, one_key_head)
    yield from _attention(f(3, 2, 1, 4), f(3, 2, 6, 4), f(3, 2, 1, 4), None, {"causal": True, "q_offset": 5})
    few, many, back = f(1, 4, 1, 4), f(1, 2, 9, 4), f(1, 4, 1, 4)  # some devices have no key that is seen
    hidden = torch.zeros(1, 4, 1, 9, dtype=torch.bool)
    hidden[:, 1:, :, :2] = True
    for how in ({}, {"causal": True, "q_offset": 3}, {"window": 3, "q_offset": 6}, {"mask": hidden}, {"alibi": slopes},
                {"bias": f(4, 1, 9), "k_offset": 2}, {"bias": f(1, 1, 1)}):  # fmt: skip
        yield from _attention(few, many, back, None, how)
        yield from _attention(few, many, back, f(1, 4, 1), how)
    yield from _attention(f(1, 2, 2, 4), f(1, 2, 16, 4), f(1, 2, 2, 4), None, {"causal": True, "q_offset": 7})
    lse = [f(2, 4, 5) for _ in range(2)]
    lse[0][:, :, :2] = lse[1][:, 0] = -math.inf
    yield s("shardlib::attention_merge", q, lse[0], g, lse[1])
    yield s("shardlib::attention_merge", q.float(), lse[0].float(), g.half(), lse[1].float())


def _attention(q: Tensor, k: Tensor, g: Tensor, g_lse: Tensor | None, how: dict[str, Any]) -> Iterator[Sample]:
    """The op and its backward, with arguments by position as far as a traced graph writes them so, then by name."""
    names = ("mask", "bias", "alibi", "key", "causal", "scale", "window", "dropout")
    how = {"causal": False, "scale": 0.5, "window": 0, "dropout": 0.0} | how
    first = [how.get(n) for n in names]
    rest = {n: x for n, x in how.items() if n not in names}
    v = f(*k.shape)
    o, lse = torch.ops.shardlib.attention(q, k, v, *first, **rest)
    yield s("shardlib::attention", q, k, v, *first, **rest)
    if "part" in rest:
        by_place = (rest["q_offset"], rest["k_offset"], rest["part"], "bias" in how)
        yield s("shardlib::attention_backward", g, g_lse, q, k, v, o, lse, *first, *by_place)
    else:
        yield s("shardlib::attention_backward", g, g_lse, q, k, v, o, lse, *first, **rest, need_bias="bias" in how)


SAMPLES = (
    pointwise, contraction, grouped, reduction, softmax, norm, view, slicing, indexing,
    loss, creation, attention, *FAMILIES,
)  # fmt: skip
