"""Selections, scans and moments over cut dims: what they send, that all runtimes agree, and ops written as others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P, ShardingError
from shardlib.rules.tensor_ops import creation, diagonals, reduction, scatter
from tests.helpers.prover import same, target_of
from tests.helpers.ranks import run_ranks

aten = torch.ops.aten


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# What is sent ---------------------------------------------------------------------------------------------------------

# Of a float64 [6@y, 10@x] on x=4, y=2: rows of 3, pieces of 3, 3, 3 and 1; a gather sends 3/4 of what it makes.
SENT: dict[str, tuple[Callable[[Tensor], Any], list[tuple[str, float]]]] = {
    "topk": (lambda x: x.topk(2, 1), [("all_gather[x]", 3 * 7 * 8 * 3 / 4)] * 2),
    "topk of nearly all": (lambda x: x.topk(3, 1), [("all_gather[x]", 3 * 10 * 8 * 3 / 4)]),
    "max": (lambda x: x.max(1), [("all_reduce[x]", 2 * 3 * 8 * 3 / 4)] * 2),
    "aminmax": (lambda x: x.aminmax(dim=1), [("all_reduce[x]", 2 * 3 * 8 * 3 / 4)] * 2),
    "argmax of float32": (
        lambda x: x.float().argmax(1),
        [("all_reduce[x]", 2 * 3 * 4 * 3 / 4), ("all_reduce[x]", 2 * 3 * 8 * 3 / 4)],
    ),
    "cumsum": (lambda x: x.cumsum(1), [("all_gather[x]", 3 * 4 * 8 * 3 / 4)]),
    "cummax": (lambda x: x.cummax(1), [("all_gather[x]", 3 * 4 * 8 * 3 / 4)] * 2),
    "prod": (lambda x: x.prod(1), [("all_gather[x]", 3 * 4 * 8 * 3 / 4)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), [("all_reduce[x]", 2 * 3 * 8 * 3 / 4)]),
    "var": (lambda x: x.var(1), [("all_reduce[x]", 2 * 3 * 8 * 3 / 4)] * 2),
    "sort": (lambda x: x.sort(1), [("all_gather[x]", 3 * 10 * 8 * 3 / 4)]),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(name: str) -> None:
    function, sent = SENT[name]
    with Mesh(x=4, y=2):
        plan = sl.jit(function, in_specs=P("y", "x")).plan(f(6, 10))
    found = [(f"{c.kind}[{' '.join(map(str, c.axes))}]", c.bytes) for c in plan.compiled.program.collectives]
    assert found == sent
    assert plan.comm_bytes == sum(nbytes for _, nbytes in sent)


def with_gradient(function: Callable[[Tensor], Any]) -> Callable[[Tensor], list[Tensor]]:
    """What it returns, and the gradient of the sum of squares of all that has one."""

    def run(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = function(x)
        outs = list(out) if isinstance(out, tuple) else [out]
        floats = [o for o in outs if o.requires_grad]
        grads = torch.autograd.grad([(o * o).sum() for o in floats], [x]) if floats else ()
        return [*(o.detach() for o in outs), *grads]

    return run


def on_ranks() -> list[str]:
    """Those of the programs above that are wrong, in value or gradient, on processes with pieces of 2, 2, 1 and 0."""
    runs = {name: with_gradient(SENT[name][0]) for name in ("topk", "max", "cumsum", "cummax", "prod")}
    x = f(3, 5)
    x[1, 2] = x[0, 4] = math.nan
    with Mesh(x=4):
        found = sl.jit(lambda x: {name: run(x) for name, run in runs.items()}, in_specs=P(None, "x"))(x)
        whole = {name: [y.full_tensor() for y in ys] for name, ys in found.items()}
    pairs_of = {name: zip(whole[name], run(x), strict=True) for name, run in runs.items()}
    return [name for name, pairs in pairs_of.items() if not all(same(a, b, 1e-12) for a, b in pairs)]


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_agree_with_one_device() -> None:
    assert run_ranks(on_ranks, 4) == [[]] * 4


# Answers --------------------------------------------------------------------------------------------------------------


def test_comparisons_of_whole_tensors_answer_eagerly() -> None:
    x = f(5, 3)
    with Mesh(x=4):
        a, b = sl.shard(x, P("x")), sl.shard(x + 1e-12, P(None, "x"))
        answers = [
            torch.equal(a, a),
            torch.equal(a, b),
            torch.allclose(a, b),
            torch.allclose(a, b + 1),
            torch.equal(a, x),
        ]
    assert answers == [True, False, True, False, True]


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_comparisons_of_whole_tensors_are_refused_in_jit(compare: Callable[..., bool]) -> None:
    with Mesh(x=4), pytest.raises(ShardingError, match="needs the value of") as error:
        sl.jit(lambda x: compare(x, x), in_specs=P("x"))(f(5, 3))
    assert "Remedy: torch.where(condition, a, b) for an if" in str(error.value)


_MASK = "keep the full shape and mask it"
_REMEDIES = {
    "index by a mask": "x.where(mask, 0)",
    "repeat_interleave": "output_size=total",
    "bincount": "one_hot(x, n).sum(0)",
    **dict.fromkeys(("unique", "unique_consecutive", "unique_dim"), "x.sort() and compare neighbors"),
}
COUNTED: dict[str, Callable[[Tensor], Any]] = {
    "bincount": lambda x: (x > 0).long().flatten().bincount(),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "unique_dim": lambda x: x.unique(dim=0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "repeat_interleave": lambda x: torch.repeat_interleave((x[0] > 0).long()),
}


@pytest.mark.parametrize("name", COUNTED)
def test_shapes_that_depend_on_values_are_refused(name: str) -> None:
    with Mesh(x=4), pytest.raises(ShardingError, match="makes a shape that depends on values") as error:
        sl.jit(COUNTED[name])(sl.shard(f(5, 3), P("x")))
    assert _REMEDIES.get(name, _MASK) in str(error.value)


# Ops written as others ------------------------------------------------------------------------------------------------

MASKED = (f(3, 4) > 0, [torch.tensor([[0, 1, 99, 4], [2, -1, 1, -99], [0, 0, 3, 3]]), None])
WRITTEN: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    **{
        name: [
            ((f(5, 3), [1]), {}),
            ((f(5, 3).float(), [0]), {"correction": 0, "keepdim": True}),
            ((f(2, 3, 4), [0, -1]), {"correction": 2.5}),
            ((f(2, 3),), {}),
            ((f(4, 3).bfloat16(), [1]), {}),
            ((torch.complex(f(4, 3), f(3, 4).t()), [1]), {}),
            ((f(0, 3), [1]), {}),
        ]
        for name in ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
    },
    "norm.Scalar": [((f(3, 5),), {}), ((f(3, 5), 3), {})],
    "norm.ScalarOpt_dim": [((f(3, 5), None, [1], True), {}), ((f(3, 5), math.inf, [0]), {}), ((f(3, 5), 1, []), {})],
    "norm.ScalarOpt_dtype": [((f(3, 5).float(), None), {"dtype": torch.float64})],
    "norm.ScalarOpt_dim_dtype": [((f(3, 5).float(), 2, [1], False), {"dtype": torch.float64})],
    "renorm": [((f(3, 5), 2, 1, 1.0), {}), ((f(2, 3, 4), 1, -2, 0.5), {}), ((f(3, 5).half(), 3, 0, 1.5), {})],
    "_unsafe_masked_index": [
        ((f(5, 2), torch.tensor([[True], [False], [True]]), [torch.tensor([4, 99, -5])], 7.0), {}),
        ((f(5), *MASKED[:1], MASKED[1][:1], 0.0), {}),
        ((f(0), torch.zeros(3, dtype=torch.bool), [torch.tensor([4, 99, -5])], 7.0), {}),
    ],
    "_unsafe_masked_index_put_accumulate": [
        ((f(5), *MASKED[:1], MASKED[1][:1], f(3, 4)), {}),
        ((f(0), torch.zeros(3, dtype=torch.bool), [torch.tensor([4, 99, -5])], f(3)), {}),
    ],
    "take": [
        *(((f(*shape), torch.tensor([[3, 0, -1], [-5, 4, 4]])), {}) for shape in ((5,), (4, 3), (2, 3, 2), (1, 5))),
        ((f(), torch.tensor([0, 0])), {}),
    ],
    "put": [
        *(((f(*shape), torch.tensor([3, 0, -1]), f(3)), {}) for shape in ((5,), (4, 3), (2, 3, 2), (1, 5))),
        ((f(4, 3), torch.tensor([[3, 0, -1], [3, 4, 4]]), f(2, 3), True), {}),
        ((f(4, 3), torch.tensor([[3, 0, -1], [3, 4, 4]]), f(6), True), {}),
        (
            (
                torch.tensor([math.inf, 1, math.nan, -math.inf], dtype=torch.float64),
                torch.tensor([3, 1, 1]),
                f(3),
                True,
            ),
            {},
        ),
        ((f(), torch.tensor(0), f()), {}),
    ],
    "aminmax": [
        ((x,), how)
        for x in (f(3, 5), torch.arange(15).view(3, 5), f(3, 5) > 0, torch.tensor([[1.0, math.nan], [2.0, 0.5]]))
        for how in ({}, {"dim": 1}, {"dim": -2, "keepdim": True})
    ],
    "_aminmax": [((f(3, 5),), {})],
    "_aminmax.dim": [((f(3, 5), 1, True), {})],
    "trace": [((f(*shape),), {}) for shape in ((5, 5), (2, 7), (4, 3), (1, 5))]
    + [((torch.arange(20).view(5, 4),), {})],
    "_efficientzerotensor": [(([2, 3],), {"dtype": torch.float64})],
    "eye": [((5,), {"dtype": torch.float64}), ((1,), {}), ((0,), {})],
    "eye.m": [((3, 5), {}), ((5, 2), {"dtype": torch.int64})],
}
FORMS = reduction.DECOMPOSED | scatter.DECOMPOSED | creation.DECOMPOSED | diagonals.DECOMPOSED


def test_all_forms_are_tried() -> None:
    assert WRITTEN.keys() == FORMS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_forms_are_the_ops(name: str) -> None:
    for args, kwargs in WRITTEN[name]:
        found, want = FORMS[name](*args, **kwargs), target_of(name)(*args, **kwargs)
        pairs = zip(found, want, strict=True) if isinstance(want, tuple) else [(found, want)]
        assert all(same(a, b, 1e-12) for a, b in pairs), (args, kwargs)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "renorm_": lambda x: (x * 1).renorm_(2, 0, 1.0),
    "std out=": lambda x: torch.std(x, 1, out=torch.zeros_like(x[:, 0])),
    "norm out=": lambda x: torch.norm(x, 3, [1], out=torch.zeros_like(x[:, 0])),
}


@pytest.mark.parametrize("name", WRITES)
def test_forms_write_where_the_ops_do(name: str) -> None:
    function, x = WRITES[name], f(5, 6)
    with Mesh(x=4):
        jitted = sl.jit(function, in_specs=P(None, "x"))
        assert not jitted.plan(x).replicated_ops
        for found in (jitted(x), function(sl.shard(x, P(None, "x")))):
            assert same(found.full_tensor(), function(x), 1e-12)


def test_a_norm_that_torch_does_not_scale_to_is_refused() -> None:
    with Mesh(x=2), pytest.raises(RuntimeError, match="non-positive norm"):
        sl.shard(torch.ones(4, 3), P("x")).renorm(-1, 0, 1.0)


def test_few_degrees_of_freedom_are_as_in_torch() -> None:
    for correction in (1, 2):
        with warnings.catch_warnings(action="ignore"):
            want = aten.var.correction(f(1, 3), [0], correction=correction)
        assert same(reduction.DECOMPOSED["var.correction"](f(1, 3), [0], correction=correction), want, 0)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_variance_of_empty_shards_does_not_warn(spec: P) -> None:
    x = f(5, 2)
    with Mesh(x=4):
        for run in (torch.var, sl.jit(lambda x, dim: x.var(dim))):
            for dim in (0, 1):
                assert same(run(sl.shard(x, spec), dim).full_tensor(), x.var(dim), 1e-12)


def test_zeros_that_entries_add_keep_their_signs() -> None:
    """Entries are shared out, and the old values count once: what others hold of these changes no zero."""
    x, entries, rows = torch.full((8, 2), -0.0), torch.full((64, 2), -0.0), torch.zeros(64, 2, dtype=torch.int64)
    fns: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
        "index_add": lambda x, i, s: x.index_add(0, i[:, 0], s),
        "put": lambda x, i, s: x.put(i[:, 0], s[:, 0], accumulate=True),
    }
    with Mesh(data=2):
        for fn in fns.values():
            got = sl.jit(fn, in_specs=(None, "j@data _", "j@data _"))(x, rows, entries).full_tensor()
            assert torch.equal(got.signbit(), fn(x, rows, entries).signbit())
