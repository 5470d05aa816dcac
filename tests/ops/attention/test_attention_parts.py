"""What ring attention rests on: blocks of queries and keys, measured against the whole, and `merge`."""

import pytest
import torch

from shardlib.ops.attention.op import BACKENDS, Variant, attention, merge
from tests.ops.attention.attention_cases import COLUMNS, DTYPES, able

F64 = torch.float64
WHOLES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 1.0, 0.125]), "causal": True},
    "bias": {"bias": torch.randn(4, 12, 12, dtype=F64)},
    "mask": {"mask": torch.rand(2, 1, 12, 12) > 0.6, "causal": True},
    "dropout": {"dropout": 0.4, "key": torch.tensor([5, 6]), "causal": True},
    "some offset": {"dropout": 0.4, "key": torch.tensor([5, 6]), "causal": True, "q_offset": 9, "k_offset": 5},
}


@pytest.mark.parametrize(("column", "name"), [(c, n) for c in COLUMNS for n in WHOLES if able(c, Variant(**WHOLES[n]))])
def test_blocks_of_queries_and_keys_make_the_whole(column, name):
    """Merged results, and gradients that add up, given the whole's o and lse."""
    variant = Variant(scale=0.3, **WHOLES[name])
    torch.manual_seed(1)
    q, grad_o = (torch.randn(2, 4, 12, 8, dtype=F64) for _ in range(2))
    k, v = (torch.randn(2, 2, 12, 8, dtype=F64) for _ in range(2))
    grad_lse = torch.randn(2, 4, 12, dtype=F64)
    explicit = variant.explicit(q, k)
    o, lse = BACKENDS["math"].forward(q, k, v, explicit)
    grad_lse = grad_lse.masked_fill(lse.isneginf(), 0)
    whole = BACKENDS["math"].backward(grad_o, grad_lse, q, k, v, o, lse, explicit, False)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    cuts = [slice(0, 3), slice(3, 8), slice(8, 12)]
    for rows in cuts:
        merged = None
        for keys in (cuts[1], cuts[2], cuts[0]):
            here = explicit.block(rows, keys)
            tensors = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            part = BACKENDS[column].forward(*tensors, here)
            merged = part if merged is None else merge(*merged, *part)
            of_rows = (x[:, :, rows] for x in (grad_o, grad_lse))
            shares = BACKENDS[column].backward(*of_rows, *tensors, o[:, :, rows], lse[:, :, rows], here, False)
            for total, share, at in zip(sums, shares, (rows, keys, keys), strict=False):
                total[:, :, at] += share
        torch.testing.assert_close(merged, (o[:, :, rows], lse[:, :, rows]), rtol=1e-12, atol=1e-12)
    for total, want in zip(sums, whole, strict=False):
        torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)


def test_dropout_does_not_depend_on_the_part():
    """Any heads, batch, queries and keys drop what the whole drops."""
    q, k = torch.randn(4, 6, 10, 8, dtype=F64), torch.randn(4, 3, 11, 8, dtype=F64)
    key = torch.tensor([2**62 + 5, 77])
    whole, _ = attention(q, k, k, dropout=0.5, key=key)
    part, _ = attention(
        q[1:3, 2:4, 5:9], k[1:3, 1:2], k[1:3, 1:2], dropout=0.5, key=key, q_offset=5, part=[1, 2, 6, 10, 11]
    )
    torch.testing.assert_close(part, whole[1:3, 2:4, 5:9], rtol=1e-12, atol=1e-12)
    behind = attention(q, k, k, dropout=0.5, key=key, q_offset=20, k_offset=9)[0]  # what lies before counts too
    part, _ = attention(
        q[:, 2:4], k[:, 1:2], k[:, 1:2], dropout=0.5, key=key, q_offset=20, k_offset=9, part=[0, 2, 6, 30, 20]
    )
    torch.testing.assert_close(part, behind[:, 2:4], rtol=1e-12, atol=1e-12)
    for other in (torch.tensor([2**62 + 5, 78]), torch.tensor([5, 77])):
        assert not torch.allclose(attention(q, k, k, dropout=0.5, key=other)[0], whole)
    with pytest.raises(AssertionError):  # the invalid twin: a part that does not say so
        torch.testing.assert_close(attention(q[1:3], k[1:3], k[1:3], dropout=0.5, key=key)[0], whole[1:3])


def test_dropout_keeps_the_mean():
    q, ones = torch.randn(8, 8, 64, 16, dtype=F64), torch.ones(8, 8, 64, 16, dtype=F64)
    o, lse = attention(q, q, ones, dropout=0.25, key=torch.tensor([1, 1]))
    assert abs(o.mean().item() - 1) < 0.01
    assert o.std() > 0.01
    torch.testing.assert_close(lse, attention(q, q, ones)[1])


# --- merge ------------------------------------------------------------------------------------------------------------


def parts(dtype=F64):
    torch.manual_seed(2)
    o1, o2 = torch.randn(2, 3, 5, 4, dtype=dtype), torch.randn(2, 3, 5, 4, dtype=dtype)
    lse1, lse2 = (torch.randn(2, 3, 5, dtype=dtype if dtype == F64 else torch.float32) for _ in range(2))
    lse1[0], lse2[:, 1] = -torch.inf, -torch.inf
    return o1.masked_fill(lse1.isneginf()[..., None], 0), lse1, o2.masked_fill(lse2.isneginf()[..., None], 0), lse2


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge(dtype):
    o1, lse1, o2, lse2 = parts(dtype)
    o, lse = merge(o1, lse1, o2, lse2)
    assert o.dtype == lse.dtype == (F64 if dtype == F64 else torch.float32)
    weights = torch.stack([lse1, lse2]).double().softmax(0).nan_to_num(0)[..., None]
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype != F64 else {"rtol": 1e-14, "atol": 1e-14}
    torch.testing.assert_close(o.double(), weights[0] * o1.double() + weights[1] * o2.double(), **tolerance)
    torch.testing.assert_close(lse, torch.stack([lse1, lse2]).logsumexp(0))
    assert lse[0, 1].isneginf().all()
    assert o[0, 1].eq(0).all()
    again = (o1.to(o.dtype), lse1.clone(), o2, lse2)
    out = torch.ops.shardlib.attention_merge_(*again)
    assert out[0] is again[0]
    torch.testing.assert_close((again[0], again[1]), (o, lse))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.shardlib.attention_merge.default, (o1, lse1, o2, lse2), test_utils=checks)
    torch.library.opcheck(torch.ops.shardlib.attention_merge_.default, again, test_utils=checks)


def test_the_gradient_of_a_merge():
    o1, lse1, o2, lse2 = (x[1, [0, 2]].clone().requires_grad_() for x in parts())
    assert torch.autograd.gradcheck(lambda *x: merge(*x), (o1, lse1, o2, lse2))
    leaves = [x.requires_grad_() for x in parts()]
    o, lse = merge(*leaves)
    for grad in torch.autograd.grad(o.sum() + lse.masked_fill(lse.isneginf(), 0).sum(), leaves):
        assert grad.isfinite().all()
