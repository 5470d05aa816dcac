"""Small functions of the core and of `distributed`, by example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import SequenceKey

from shardlib.core.aten.functional_forms import single_result_form
from shardlib.core.aten.op_traits import is_composite, is_deterministic, returns_list
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.byte_sizes import nbytes
from shardlib.core.cached import cache_weakly, lazy_property
from shardlib.core.errors import ShardingError
from shardlib.core.name_patterns import star, strip_numbers
from shardlib.core.text_tables import format_si
from shardlib.core.torch_internals.batched_grad import batch_all_outputs
from shardlib.core.torch_internals.numpy_bridge import convert_arrays, share_an_element
from shardlib.core.torch_internals.strided_only import as_bytes, refuse_unstrided
from shardlib.core.tree_paths import children_with_keys
from shardlib.distributed.provenance import checksum_sample, result_origin
from shardlib.distributed.store import format_ranks
from shardlib.distributed.turn_errors import hash_texts

aten = torch.ops.aten
qkv = torch.zeros(2, 6)
q, k, _ = qkv.chunk(3, -1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (format_si(11_421_708, "B"), "11.4 MB"),
        (format_si(96, "B"), "96 B"),
        (strip_numbers("mm_3"), "mm"),
        (strip_numbers("layers[3].w1"), "layers[*].w1"),
        (strip_numbers("block2 (8 heads)"), "block2 (8 heads)"),
        (strip_numbers("sum over 256"), "sum over 256"),
        (format_si(999_999, "B"), "1 MB"),
        (star("opt.state[3.weight].step"), "opt.state[*.weight].step"),
        (star("w1.py:42"), "w1.py:42"),
        (nbytes("25MiB", "bucket"), 26214400),
        (nbytes("1.5 GB", "cap"), 1500000000),
        (nbytes(512, "memory"), 512),
        (children_with_keys([5]), [(SequenceKey(0), 5)]),
        (children_with_keys(5), None),
        (single_result_form(aten.add_.Tensor), aten.add.Tensor),
        (single_result_form(aten.copy_.default), None),
        (returns_list(aten.split.Tensor), True),
        (returns_list(aten.max.dim), False),
        (is_deterministic(aten.add.Tensor), True),
        (is_deterministic(aten.bernoulli.default), False),
        (is_composite(aten.dropout.default), True),
        (is_composite(aten.bernoulli.default), False),
        (as_bytes(torch.arange(10, dtype=torch.int16).view(2, 5)[1:, 3]).tolist(), [8, 0]),
        (share_an_element(q, k), False),
        (share_an_element(qkv, k), True),
        (repr(convert_arrays([np.ones(2), np.float32(3.0)])), "[tensor([1., 1.], dtype=torch.float64), 3.0]"),
        (format_ranks([0, 2, 3]), "ranks 0, 2 and 3"),
    ],
)
def test_values(value: Any, expected: Any) -> None:
    assert value == expected


def test_hashes() -> None:
    assert hash_texts("a", "b") == hash_texts("a", "b") != hash_texts("ab")
    x, y, numbers = SimpleNamespace(_origin=1), SimpleNamespace(_origin=2), torch.arange(8.0)
    assert result_origin(7, [x, y]) == result_origin(7, [x, y]) != result_origin(7, [y, x])
    assert checksum_sample(numbers) == checksum_sample(numbers.clone()) != checksum_sample(numbers + 1)


def test_caches() -> None:
    bounded: BoundedCache[str, int] = BoundedCache(2)
    bounded["a"], bounded["b"], bounded["c"] = 1, 2, 3
    assert list(bounded) == ["b", "c"]

    calls = []

    class Pair:
        @lazy_property
        def total(self) -> int:
            calls.append("total")
            return 3

    @cache_weakly
    def doubled(x: frozenset[int]) -> int:
        calls.append("doubled")
        return 2 * len(x)

    pair, key = Pair(), frozenset({1})
    assert (pair.total + pair.total, doubled(key) + doubled(key), calls) == (6, 4, ["total", "doubled"])


def test_tensors_that_are_not_strided_are_refused() -> None:
    with pytest.raises(ShardingError) as error:
        refuse_unstrided("step(x, y)", [("x", torch.zeros(3)), ("y", torch.eye(2).to_sparse())])
    first, second, *_ = str(error.value).splitlines()
    assert (first, second) == (
        "step(x, y) works on tensors that are not strided:",
        "  * y of shape [2, 2] is sparse_coo",
    )


class _Both(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any, w: Any) -> Any:
        return batch_all_outputs((x * w, 3 * w), (x, w))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        x, w = ctx.saved_tensors
        return a * w, a * x + 3 * b


def test_an_output_that_reads_no_batched_input_counts_once_per_example() -> None:
    w = torch.tensor(1.0, requires_grad=True)
    rows = torch.func.vmap(lambda x: _Both.apply(x, w)[1])(torch.ones(4))
    assert torch.autograd.grad(rows.sum(), w)[0] == 12
