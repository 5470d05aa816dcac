"""How attention composes: with autograd, torch.func and vmap, with tracing, with sharding; and what it refuses."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib import Mesh
from shardlib.core.errors import ShardingError
from shardlib.frontend.torch_rewrites.attention import DECOMPOSITIONS, AttentionCapture
from shardlib.frontend.trace import trace
from shardlib.ops.attention.op import Variant, attention, reference


def operands(h, kv, s, t, d=8, dtype=torch.float64):
    torch.manual_seed(h + 10 * s + t)
    return tuple(torch.randn(2, n, m, d, dtype=dtype) for n, m in ((h, s), (kv, t), (kv, t), (h, s)))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def score(q, k, v):
    return attention(q, k, v, causal=True)[0].sin().sum()


def test_autograd_torch_func_and_vmap_agree():
    q, k, v, _ = operands(4, 2, 5, 7)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(reference(*leaves, Variant(causal=True, scale=8**-0.5))[0].sin().sum(), leaves)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for got in (torch.autograd.grad(score(*leaves), leaves), grad(score, (0, 1, 2))(q, k, v)):
        for mine, gradient in zip(got, want, strict=True):
            close(mine, gradient)
    batched = [torch.stack([x, 2 * x, -x], dim) for dim, x in enumerate((q, k, v))]
    got = vmap(grad(score, (0, 1, 2)), (0, 1, 2))(*batched)
    each = [grad(score, (0, 1, 2))(*(b.select(d, i) for d, b in enumerate(batched))) for i in range(3)]
    for mine, gradients in zip(got, zip(*each, strict=True), strict=True):
        close(mine, torch.stack(gradients))


BIASES = [(5, 7), (4, 5, 7), (1, 4, 1, 7), (2, 1, 5, 7), (1,)]


def both(q, k, v, bias, mask):
    o, lse = attention(q, k, v, bias=bias, mask=mask)
    return o.sin().sum() + lse.masked_fill(lse.isneginf(), 0).cos().sum()


@pytest.mark.parametrize("shape", BIASES)
def test_a_bias_and_lse_have_gradients(shape):
    q, k, v, _ = operands(4, 2, 5, 7)
    bias, mask = torch.randn(shape, dtype=torch.float64), torch.rand(2, 1, 5, 7) > 0.2
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    o, lse = reference(*leaves[:3], Variant(bias=leaves[3], mask=mask, scale=8**-0.5))
    want = torch.autograd.grad(o.sin().sum() + lse.cos().sum(), leaves)
    for mine, gradient in zip(grad(both, (0, 1, 2, 3))(q, k, v, bias, mask), want, strict=True):
        assert mine.shape == gradient.shape
        close(mine, gradient)
    only_lse = grad(lambda q: attention(q, k, v)[1].sum())(q)
    q.requires_grad_()
    close(only_lse, torch.autograd.grad(reference(q, k, v, Variant(scale=8**-0.5))[1].sum(), q)[0])


MAPPED = [dims for dims in itertools.product((None, 0), (None, 0, 1), (None, 0)) if dims != (None, None, None)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dims", MAPPED, ids=str)
@pytest.mark.parametrize("shape", BIASES)
def test_vmap_of_biases_and_masks(shape, dims):
    """Whatever of q, bias and mask is mapped over: results and gradients of each sample are its own."""
    q_dim, bias_dim, mask_dim = dims
    bias_dim = bias_dim if len(shape) > 1 or bias_dim is None else 0
    q, k, v, _ = operands(4, 2, 5, 7)
    values = {"q": q, "bias": torch.randn(shape, dtype=torch.float64), "mask": torch.rand(shape) > 0.3}
    where = {"q": q_dim, "bias": bias_dim, "mask": mask_dim}
    many = lambda x: [x, ~x, x] if x.dtype == torch.bool else [x, x * 2, -x]
    stacked = {n: x if where[n] is None else torch.stack(many(x), where[n]) for n, x in values.items()}
    gradients = grad(lambda q, bias, mask: both(q, k, v, bias, mask), (0, 1))
    got = vmap(gradients, tuple(where.values()))(*stacked.values())
    for i in range(3):
        sample = [x if where[n] is None else many(x)[i] for n, x in values.items()]
        for mine, want in zip(got, gradients(*sample), strict=True):
            close(mine[i], want)


def test_vmap_keeps_slopes_and_drops_out_every_sample_by_itself():
    q, k, v, _ = operands(4, 2, 5, 7)
    slopes, key = torch.tensor([0.5, 0.25, 0.1, 1.0]), torch.tensor([1, 2])
    qs = torch.stack([q, q])
    got = vmap(lambda q: attention(q, k, v, alibi=slopes)[0])(qs)
    close(got[1], attention(q, k, v, alibi=slopes)[0])
    dropped = vmap(lambda q: attention(q, k, v, dropout=0.5, key=key)[0])(qs)
    close(dropped[0], attention(q, k, v, dropout=0.5, key=key)[0])
    assert not torch.allclose(dropped[0], dropped[1])
    with pytest.raises(ShardingError) as caught:
        vmap(lambda s, n: attention(q, k, v, alibi=s, key=n))(torch.stack([slopes] * 2), torch.stack([key] * 2))
    assert str(caught.value).splitlines() == [
        "vmap over attention's alibi and key",
        "Rule: ALiBi slopes and the dropout key are the same for the whole batch",
        "Remedy: leave them out of vmap's in_dims (None), or call attention once for each",
    ]


def test_a_graph_has_one_node_forward_and_one_backward():
    q, k, v, _ = operands(4, 2, 5, 7)
    names = [str(n.target) for n in make_fx(grad(score, (0, 1, 2)))(q, k, v).graph.nodes]
    assert [n for n in names if "attention" in n or "scaled" in n] == [
        "shardlib.attention.default",
        "shardlib.attention_backward.default",
    ]
    assert not [n for n in names if "zeros" in n]  # nothing is made for the gradient of lse


# --- capture ----------------------------------------------------------------------------------------------------------


def captured(fn, *args):
    with AttentionCapture():
        return make_fx(fn)(*args)


def names_of(graph):
    names = [str(n.target) for n in graph.nodes]
    return [n.removeprefix("shardlib.").removesuffix(".default") for n in names if "attention" in n]


BIAS = torch.randn(2, 1, 1, 7, dtype=torch.float64)
SDPA = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    "causal-rectangle": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, scale=1.0),
    "keep": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], k.new_ones(5, 7).tril() > 0),
    "bias": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v, attn_mask=BIAS),
    "three-dims": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]),
    "five-dims": lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None, :, :1], v[None, :, :1], k.new_ones(7)),
    "broadcast": lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k[:1], v[:1]),
    "aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q[:, :2], k, v, BIAS, scale=0.5),
    "aten-default": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, enable_gqa=True),
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention_is_captured(name):
    q, k, v, _ = operands(4, 2, 5, 7)
    gm = captured(SDPA[name], q, k, v)
    assert names_of(gm.graph) == ["attention"]
    torch.testing.assert_close(gm(q, k, v), SDPA[name](q, k, v))


def test_attention_inside_torch_modules_is_captured():
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    params, x = dict(layer.named_parameters()), torch.randn(2, 5, 16)
    run = lambda p, x: functional_call(layer, p, (x, x, x), {"need_weights": False})[0]
    gm = captured(run, params, x)
    assert names_of(gm.graph) == ["attention"]
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_learned_bias_is_captured_with_its_gradient():
    q, k, v, _ = operands(2, 2, 5, 7)
    loss = lambda bias: F.scaled_dot_product_attention(q, k, v, bias).sin().sum()
    bias = torch.randn(2, 5, 7, dtype=torch.float64)
    gm = captured(grad(loss), bias)
    assert names_of(gm.graph) == ["attention", "attention_backward"]
    torch.testing.assert_close(gm(bias), grad(loss)(bias))


KERNELS = {  # a call of every kernel of torch, and the same by the public function
    "flash_attention_for_cpu": (lambda op, q, k, m: op(q, k, k, 0.0, False, attn_mask=m, scale=0.5), 0.5, False),
    "flash_attention": (lambda op, q, k, m: op(q, k, k, 0.0, True), None, True),
    "efficient_attention": (lambda op, q, k, m: op(q, k, k, m, True, 0.0, scale=0.5), 0.5, False),
    "cudnn_attention": (lambda op, q, k, m: op(q, k, k, m, True), None, False),
    "fused_attention_overrideable": (lambda op, q, k, m: op(q, k, k, attn_bias=m), None, False),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_called_by_name_are_captured(name):
    """Also those that do not run on this device, forward and backward."""
    call, scale, causal = KERNELS[name]
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
    q, k, _, grad_o = operands(4, 4, 5, 7, dtype=torch.float32)
    mask = None if name == "flash_attention" else torch.randn(2, 4, 5, 7)
    by_name = lambda q, k: (call(op, q, k, mask)[0] * grad_o).sum()
    traced = trace(grad(by_name, (0, 1)), (q, k))
    assert names_of(traced.graph.graph) == ["attention", "attention_backward"]
    public = lambda q, k: F.scaled_dot_product_attention(q, k, k, mask, is_causal=causal, scale=scale)
    want = grad(lambda q, k: (public(q, k) * grad_o).sum(), (0, 1))(q, k)
    torch.testing.assert_close(traced(q, k), want)
    results = trace(lambda q, k: call(op, q, k, mask), (q, k))
    torch.testing.assert_close(results(q, k)[0], public(q, k))
    lse = attention(q, k, k, scale=scale, bias=mask, causal=causal)[1]
    torch.testing.assert_close(results(q, k)[1].flatten(2)[:, :, :5], lse)
    assert {
        op.default,
        getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward").default,
    } <= DECOMPOSITIONS.keys()


def test_the_bias_of_a_kernel_called_by_name_has_its_gradient():
    q, k, _, grad_o = operands(4, 4, 5, 7, dtype=torch.float32)
    bias = torch.randn(2, 4, 5, 7)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    traced = trace(grad(lambda b: (efficient(q, k, k, b, True)[0] * grad_o).sum()), (bias,))
    want = grad(lambda b: (F.scaled_dot_product_attention(q, k, k, b) * grad_o).sum())(bias)
    torch.testing.assert_close(traced(bias), want)


def test_a_backward_traced_elsewhere_is_captured():
    """A joint graph by aten's names, its log-sum-exp an input: as exported programs have it."""
    q, k, v, grad_o = operands(4, 4, 5, 7)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    o, lse = flash(q, k, v)
    traced = trace(lambda o, lse: back(grad_o, q, k, v, o, lse, 0.0, False), (o, lse))
    assert names_of(traced.graph.graph) == ["attention_backward"]
    torch.testing.assert_close(traced(o, lse), back(grad_o, q, k, v, o, lse, 0.0, False))


DROPS = {
    "function": lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
    "kernel": lambda q: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.1)[0],
}


@pytest.mark.parametrize("name", DROPS)
def test_dropout_is_drawn_from_a_key_of_its_own(name):
    q = operands(4, 4, 5, 5)[0]
    traced = trace(grad(lambda q: (DROPS[name](q) + DROPS[name](q)).sum()), (q,))
    calls = [n for n in traced.graph.graph.nodes if "shardlib.attention" in str(n.target)]
    keys = [n.args[6 if len(n.args) < 15 else 10] for n in calls]
    assert len(calls) == 4
    assert len(set(keys)) == 2  # one for each, forward and backward
    assert len({k.args[1] for k in keys}) == 2
    assert {str(k.args[0].target) for k in keys} == {"shardlib.call_key.default"}


# --- sharded is the same as single ------------------------------------------------------------------------------------

KEY, SLOPES = torch.tensor([7, 9]), torch.tensor([0.5, 0.25, 1.0, 0.125])
PADDING = torch.arange(12) < torch.tensor([[[[7]]], [[[12]]], [[[1]]], [[[5]]]])
STEPS = {  # (q, k, v, bias) -> o; q [4, 4, 12, 8], bias [1, 4, 12, 12]
    "full": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "padding": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, PADDING),
    "float bias": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias),
    "bias of keys": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias[:, :, 3:4]),
    "bias of the batch": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias.expand(4, -1, -1, -1)),
    "alibi": lambda q, k, v, bias: attention(q, k, v, alibi=SLOPES, causal=True)[0],
    "window": lambda q, k, v, bias: attention(q, k, v, window=4, causal=True)[0],
    "grouped": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True),
    "cross": lambda q, k, v, bias: F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5]),
    "dropout": lambda q, k, v, bias: attention(q, k, v, dropout=0.3, key=KEY, causal=True)[0],
    "dropout, grouped": lambda q, k, v, bias: attention(q, k[:, ::2], v[:, ::2], dropout=0.3, key=KEY)[0],
    "lse": lambda q, k, v, bias: attention(q, k, v, bias=bias, causal=True)[1],
    "everything": lambda q, k, v, bias: attention(
        q, k[:, ::2], v[:, ::2], bias=bias, mask=PADDING, alibi=SLOPES, window=9, causal=True, dropout=0.2, key=KEY
    )[0],
}
MESHES = {
    "batch@8": ({"data": 8}, "batch@data _ _ _", "_ _ _ _"),
    "heads@8": ({"tensor": 8}, "_ heads@tensor _ _", "_ heads@tensor _ _"),
    "batch@2 heads@4": ({"data": 2, "tensor": 4}, "batch@data heads@tensor _ _", "_ heads@tensor _ _"),
    "queries@4 heads@2": ({"seq": 4, "tensor": 2}, "_ heads@tensor seq@seq _", "_ heads@tensor _ _"),
}


@functools.cache
def single(name):
    torch.manual_seed(3)
    leaves = [torch.randn(4, 4, 12, 8, dtype=torch.float64) for _ in range(3)]
    leaves.append(torch.randn(1, 4, 12, 12, dtype=torch.float64))
    step = _step(name)
    return step, leaves, step(*leaves)


def _step(name):
    def loss(*leaves):
        out = STEPS[name](*leaves)
        return out.masked_fill(out.isinf(), 0).sin().sum(), out

    def step(*leaves):
        grads, out = torch.func.grad(loss, (0, 1, 2, 3), has_aux=True)(*leaves)
        return out, *grads

    return step


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", STEPS)
def test_sharded_is_single_device(name, mesh):
    axes, spec, bias_spec = MESHES[mesh]
    step, leaves, want = single(name)
    specs = (spec, spec.replace("seq@seq", "_"), spec.replace("seq@seq", "_"), bias_spec)
    with Mesh(**axes):
        sharded = sl.jit(step, in_specs=specs)
        for mine, x in zip(sharded(*leaves), want, strict=True):
            torch.testing.assert_close(mine.full_tensor(), x, rtol=1e-12, atol=1e-12)


# --- errors -----------------------------------------------------------------------------------------------------------

Z = torch.zeros
OFFENDERS = {
    "shapes": (
        {"k": Z(2, 3, 7, 4), "v": Z(2, 3, 7, 4), "mask": Z(5, 6) > 0, "bias": Z(1, 2, 1, 1, 7)}
        | {"alibi": Z(3), "key": Z(3).long()},
        [
            "q has head size 8, k has 4",
            "4 query heads are no multiple of 3 key heads",
            "a mask [5, 6] does not broadcast to [2, 4, 5, 7]",
            "a bias [1, 2, 1, 1, 7] does not broadcast to [2, 4, 5, 7]",
            "alibi [3] must be one slope for each of 4 heads",
            "key [3] must be [2], seed and counter",
        ],
    ),
    "k and v": ({"v": Z(2, 2, 6, 8)}, ["q must be [B, H, S, D], k and v [B, KV, T, D]"]),
    "batch": ({"q": Z(3, 4, 5, 8)}, ["q must be [B, H, S, D], k and v [B, KV, T, D]"]),
    "dtypes": (
        {"k": Z(2, 2, 7, 8).half(), "mask": Z(5, 7), "bias": Z(5, 7).bool(), "alibi": Z(4).double(), "key": Z(2).int()},
        [
            "q is float32, k float16, v float32: they must be of one dtype",
            "a mask is bool, not float32; what is added to the logits is a bias",
            "a bias is floating, not bool; what hides keys is a mask",
            "alibi is float32, not float64",
            "key is int64, not int32",
        ],
    ),
    "ints": ({"q": Z(2, 4, 5, 8).int(), "k": Z(2, 2, 7, 8).int(), "v": Z(2, 2, 7, 8).int()}, [
        "q, k and v are int32, which is no floating dtype",
    ]),
    "devices": ({"k": Z(2, 2, 7, 8, device="meta"), "mask": Z(7, device="meta") > 0}, [
        "q is on cpu, k is on meta, v is on cpu, mask is on meta: they must be on one device",
    ]),
    "numbers": (
        {"dropout": 1.0, "window": -1, "part": [0, 0, 4], "q_offset": -1},
        [
            "dropout is 1.0, not in [0, 1)",
            "dropout needs a key: an int64 tensor of seed and counter",
            "window is -1; 0 is none, w sees keys less than w away",
            "part [0, 0, 4] is not [first batch, first head, H, S, T]",
            "with dropout offsets are places in the whole, not -1 and 0",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFENDERS)
def test_errors_name_all_offenders(name):
    valid = {"q": Z(2, 4, 5, 8), "k": Z(2, 2, 7, 8), "v": Z(2, 2, 7, 8)}
    attention(**valid, mask=Z(5, 7) > 0, bias=Z(4, 1, 7), alibi=Z(4), key=Z(2).long(), dropout=0.5, window=3)
    how, offenders = OFFENDERS[name]
    given = valid | how
    with pytest.raises(ShardingError) as caught:
        attention(**given)
    shapes = ", ".join(f"{n} {list(given[n].shape)}" for n in "qkv")
    lines = str(caught.value).splitlines()
    assert lines == [f"attention({shapes}) does not fit:", *(f"  * {x}" for x in offenders)]


def test_what_cannot_be_differentiated():
    q, k, v, _ = operands(4, 2, 5, 7)
    with pytest.raises(ShardingError, match="attention was differentiated twice"):
        grad(lambda q: grad(score)(q, k, v).sum())(q)
    with pytest.raises(ShardingError) as caught:
        grad(lambda slopes: attention(q, k, v, alibi=slopes)[0].sum())(torch.ones(4))
    assert str(caught.value).splitlines() == [
        "attention was asked for the gradient of its ALiBi slopes",
        "Rule: attention is differentiable in q, k, v and bias",
        "Remedy: pass -slope * |qpos - kpos| as a bias where slopes are learned, or detach them",
    ]
    attention(q, k, v, alibi=torch.ones(4, requires_grad=True))  # nothing is asked for yet


@pytest.mark.parametrize("which", range(3))
def test_rows_that_overlap_in_memory(which: int) -> None:
    """torch's kernel for CPUs takes few rows of `unfold`, whose stride is 1, for columns: pieces have few rows."""
    flat = torch.randn(2, 2, 10, dtype=torch.float64)
    others = [torch.randn(2, 2, 6, 5, dtype=torch.float64) for _ in range(2)]

    def loss(flat: Tensor, a: Tensor, b: Tensor, *, dense: bool) -> Tensor:
        rows = flat.unfold(-1, 5, 1)
        operands = [a, b]
        operands.insert(which, rows.contiguous() if dense else sl.shard(rows, "b h s@a e"))
        return F.scaled_dot_product_attention(*operands, is_causal=True).square()

    def gradients(*args: Tensor, dense: bool) -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_() for x in args]
        out = loss(*given, dense=dense)
        return out, *torch.autograd.grad(out.sum(), given)

    expected = gradients(flat, *others, dense=True)
    with sl.Mesh(a=3):
        step = sl.jit(lambda *args: gradients(*args, dense=False), in_specs=None)
        for found, right in zip(step(flat, *others), expected, strict=True):
            torch.testing.assert_close(found.full_tensor(), right)
