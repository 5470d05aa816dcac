"""Normalized graphs compute what the traced ones do, to the last bit, in fewer nodes; every pass on a small program."""

import copy
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.fft import fftn, ifftn
from torch.func import functional_call, grad, grad_and_value
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.compiler.simplify import PASSES, normalize, verify
from shardlib.frontend.trace import trace
from shardlib.ops.attention.op import attention

torch.manual_seed(0)
X, W = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)


def ops(traced):
    names = (
        str(n.target).removeprefix("aten.").removeprefix("shardlib.")
        for n in traced.graph.graph.nodes
        if n.op == "call_function"
    )
    return [name.split(".")[0] if "getitem" not in name else "getitem" for name in names]


def check(fn, *args, tolerance=0.0):
    """Trace, then run every pass with the verifier and the interpreter behind it; returns the normalized trace."""
    traced = trace(fn, args)
    want, tree = pytree.tree_flatten(fn(*args))
    for run in (verify, *PASSES):
        run(traced.graph)
        verify(traced.graph)
        with torch.no_grad():
            got, got_tree = pytree.tree_flatten(traced(*args))
        assert got_tree == tree
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return traced


# --- passes -----------------------------------------------------------------------------------------------------------


def _around(x):
    y = torch.empty(x.shape[0] + 2, x.shape[1], dtype=x.dtype)
    y[1:-1], y[0], y[-1] = x, x[-1], x[0]
    return y


SMALL = {
    "a cache that is empty": (lambda x: torch.cat([x.new_empty(0), x], -2).sin(), ["sin"]),
    "nothing beside two": (lambda x: torch.cat([x, x[:0], x.sin()]), ["sin", "cat"]),
    "nothing of another dtype": (lambda x: torch.cat([x.float(), x.new_empty(0)]), ["_to_copy", "empty", "cat"]),
    "a shift": (lambda x: F.pad(x, (1, 0))[:, :-1], ["splice"]),
    "slots": (lambda x: torch.cat([torch.zeros(1, 6, dtype=x.dtype), x[:-1]]), ["splice"]),
    "pad and back": (lambda x: F.pad(x, (2, 1), value=3.0)[:, 2:-1], ["splice"]),
    "round and on": (lambda x: x.roll(2, 1).roll(-3, 1), ["splice"]),
    "halves changed": (lambda x: torch.cat([-x[:, 3:], x[:, :3]], 1), ["splice"]),
    "signs back and forth": (lambda x: -torch.cat([-x[:, 3:], x[:, :3]], 1).roll(1, 1), ["splice", "neg"]),
    "mirrored at the border": (lambda x: torch.cat([x[:, 1:3].flip(1), x], 1), ["splice"]),
    "turned round and back": (lambda x: x.roll(1, 1).flip(1)[:, 1:].flip(1), ["splice"]),
    "a row that stands elsewhere": (lambda x: x[1].unsqueeze(1) + 1, ["select", "unsqueeze", "add"]),
    "written all over": (lambda x: torch.zeros_like(x).slice_scatter(x, 1, 0, 6) + 1, ["add"]),
    "along two dims": (lambda x: F.pad(x, (1, 0))[:-1], ["constant_pad_nd", "slice"]),
    "less than half": (lambda x: torch.cat([x[:, :1], x[:, 5:]], 1), ["slice", "slice", "cat"]),
    "slices of slices": (lambda x: x[:, 1:][:, 1:] + 1, ["slice", "slice", "add"]),
    "what others read": (
        lambda x: (F.pad(x, (1, 0))[:, :-1], F.pad(x, (1, 0)) * 2),
        ["constant_pad_nd", "slice", "mul"],
    ),
    "identities": (lambda x: x.detach().clone().to(torch.float64).expand(4, 6)[:].view(4, 6).sin() * 1, ["sin"]),
    "a result is not an input": (lambda x: x.detach() * 1, ["mul"]),
    "dtypes stay": (lambda x: x.float().double().clone(), ["_to_copy", "_to_copy"]),
    "powers of one": (lambda x: (x + 1).pow(1.0) / 1, ["add"]),
    "not at an int": (lambda x: (x > 0).long() / 1, ["gt", "_to_copy", "div"]),
    "permutes": (lambda x: x.t().transpose(0, 1).permute(1, 0) + 1, ["permute", "add"]),
    "no permute": (lambda x: x.t().permute(1, 0) + 1, ["add"]),
    "three dims": (lambda x: x.view(2, 2, 6).permute(2, 0, 1).transpose(0, 2), ["reshape", "permute"]),
    "negative dims": (lambda x: x.view(2, 2, 6).transpose(-1, -2).permute(0, -1, 1) + 1, ["reshape", "add"]),
    "reshapes": (lambda x: x.view(24).reshape(2, 12).unsqueeze(0).squeeze(0).view(3, 8), ["reshape"]),
    "reshape and back": (lambda x: x.view(24).view(4, 6) + 1, ["add"]),
    "one unsqueeze": (lambda x: x.unsqueeze(1), ["unsqueeze"]),
    "a copy that two read": (
        lambda x: ((y := x.t().reshape(24)).view(2, 12) + 1, y.view(12, 2) + 1),
        ["permute", "reshape", "reshape", "add", "reshape", "add"],
    ),
    "a copy that one reads": (lambda x: x.t().reshape(24).view(2, 12) + 1, ["permute", "reshape", "add"]),
    "repeats": (lambda x: (x.sin() + 1) * (x.sin() + 1), ["sin", "add", "mul"]),
    "ints and floats differ": (lambda x: ((x > 0).long() + 1, (x > 0).long() + 1.0), ["gt", "_to_copy", "add", "add"]),
    "zeros differ": (lambda x: (x * 0.0) + (x * -0.0), ["mul", "mul", "add"]),
    "repeated constants": (lambda x: x + torch.arange(6) + torch.arange(6), ["arange", "add", "add"]),
    "dead": (lambda x: (x.sin(), x.cos())[0], ["sin"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_programs(name):
    fn, want = SMALL[name]
    assert ops(check(fn, X)) == want


def test_gradients_of_slices_are_put_side_by_side():
    parts = check(grad(lambda x: x[:2].sin().sum() + x[3:].exp().sum() + x[:2].exp().sum()), X)
    assert Counter(ops(parts))["cat"] == 1
    assert not {"slice_backward", "zeros"} & {*ops(parts)}
    overlap = check(grad(lambda x: x[:2].sin().sum() + x[1:].exp().sum()), X)
    assert Counter(ops(overlap))["slice_backward"] == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(30))
def test_chains_of_moves(seed):
    """To the last bit, signs of zeros and NaN included; some of what is in between is a result, too."""
    draw = random.Random(seed)
    start = torch.tensor([[-0.0, 1.0, float("nan"), -2.0, 0.0, 5.0], [1.0, -0.0, -1.0, 2.0, 3.0, float("inf")]] * 2)

    def moved(x):
        d, n = draw.randrange(2), draw.randrange(-3, 4)
        size = x.shape[d]
        low, high = sorted(draw.choices(range(size + 1), k=2))
        return {
            "roll": lambda: x.roll(n, d),
            "slice": lambda: x.narrow(d, low, high - low) if high - low > 1 else x,
            "pad": lambda: (
                F.pad(x, [n, 1] if d else [0, 0, n, 1], value=draw.choice([0.0, -0.0, 2.5])) if size > 3 else x
            ),
            "cat": lambda: torch.cat([x.narrow(d, low, size - low), torch.zeros_like(x), x.narrow(d, 0, low)], d),
            "neg": lambda: -x,
            "flip": lambda: x.flip(d),
        }[draw.choice(["roll", "slice", "pad", "cat", "neg", "flip"])]()

    def chain(x):
        draw.seed(seed)
        kept = []
        for _ in range(6):
            x = moved(x)
            kept += [x] if draw.random() < 0.3 else []
        return *kept, x

    traced = check(chain, start)
    for a, b in zip(traced(start), chain(start), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


TRANSFORMS = {
    "complex": (lambda x: torch.fft.fft2(x), [2, 1]),
    "back": (lambda x: torch.fft.ifftn(torch.complex(x, x), norm="ortho"), [2, 1, 0]),
    "real": (lambda x: torch.fft.rfftn(x, norm="forward"), [2, 1, 0]),
    "real, and back": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(5, 8)), [2, 1, 1, 2]),
    "of an odd size": (lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 0, 1)), s=(8, 6, 5), dim=(2, 0, 1)), None),
    "there and back": (lambda x: torch.fft.ifftn(torch.fft.fftn(x) * 2).real, [2, 1, 0, 0, 1, 2]),
    "and there again": (lambda x: fftn(ifftn(fftn(x)).sin()), [2, 1, 0, 0, 1, 2, 2, 1, 0]),
    "back and there": (lambda x: fftn(ifftn(x)), [2, 1, 0, 0, 1, 2]),
    "there and back in other dims": (lambda x: ifftn(fftn(x).flatten(1).unflatten(1, (4, 10))), [2, 1, 0, 0, 1, 2]),
    "one dim, then all": (lambda x: fftn(torch.fft.fft(x, dim=0)), [0, 0, 2, 1]),
    "two that meet": (lambda x: ifftn(fftn(x) * fftn(x.sin(), dim=(1, 2))), [2, 1, 0, 2, 1, 1, 2, 0]),
    "Hermitian": (lambda x: torch.fft.hfft2(torch.complex(x, -x)), [1, 2]),
    "one dim": (lambda x: torch.fft.fft(x, dim=1), [1]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_dim_by_dim(name):
    fn, dims = TRANSFORMS[name]
    traced = check(fn, torch.randn(6, 5, 8, dtype=torch.float64), tolerance=1e-12)
    found = [node.args[1] for node in traced.graph.graph.nodes if "fft" in str(node.target)]
    assert all(len(of) == 1 for of in found)
    assert dims is None or [dim for (dim,) in found] == dims


BEHIND = {
    "a sum": (lambda x: x.flip(1).cumsum(1).flip(1), ["cumsum_behind"]),
    "counted from the end": (lambda x: x.flip(-1).cumsum(1).flip(-1), ["cumsum_behind"]),
    "its gradient": (grad(lambda x: x.flip(1).cumsum(1).flip(1).sin().sum()), ["cumsum_behind", "cos", "cumsum"]),
    "a gradient": (grad(lambda x: x.cumsum(1).sin().sum()), ["cumsum", "cos", "cumsum_behind"]),
    "a maximum": (lambda x: x.flip(1).cummax(1).values.flip(1), ["cummax_behind", "getitem"]),
    "a maximum, and where": (
        lambda x: [y.flip(1) for y in x.flip(1).cummax(1)],
        ["cummax_behind", "getitem", "getitem"],
    ),
    "turned round three times": (lambda x: x.flip(1).flip(1).cumsum(1).flip(1).flip(1), ["cumsum"]),
    "turned along another dim": (lambda x: x.flip(0).cumsum(1).flip(0), ["flip", "cumsum", "flip"]),
    "turned along two dims": (lambda x: x.flip(0, 1).cumsum(1).flip(0, 1), ["flip", "cumsum", "flip"]),
    "turned once": (lambda x: x.flip(1).cumsum(1), ["flip", "cumsum"]),
    "read elsewhere": (lambda x: [y := x.flip(1).cumsum(1), y.flip(1)], ["flip", "cumsum", "flip"]),
    "where alone is turned back": (
        lambda x: [(found := x.flip(1).cummax(1)).values, found.indices.flip(1)],
        ["flip", "cummax", "getitem", "getitem", "flip"],
    ),
}


@pytest.mark.parametrize("name", BEHIND)
def test_scans_from_behind(name):
    program, want = BEHIND[name]
    traced = check(program, torch.randn(4, 6, dtype=torch.float64))
    assert [op for op in ops(traced) if op not in ("full", "expand", "mul")] == want


LIKES = {
    "zeros": (lambda x: x + torch.zeros_like(x), ["full", "add"]),
    "in another dtype": (lambda x: x * torch.ones_like(x, dtype=torch.int32), ["full", "mul"]),
    "of a turned tensor": (lambda x: x + torch.full_like(x.t(), 2).view(6, 4).t(), ["full", "permute", "add"]),
    "new": (lambda x: x.new_zeros(3, 4, 6) + x.new_full((4, 1), 2) + x, ["full", "full", "add", "add"]),
    "of what is like": (lambda x: x + torch.zeros_like(torch.empty_like(x.sin())).fill_(3), ["full", "add"]),
    "written to": (lambda x: torch.empty_like(x).copy_(x[0]).mul_(2), ["select", "expand", "mul"]),
    "returned": (lambda x: torch.zeros_like(x), ["zeros_like"]),
    "made into what is returned": (lambda x: torch.zeros_like(x) + 1, ["zeros_like", "add"]),
    "returned, and read": (lambda x: [y := torch.zeros_like(x), y + x], ["zeros_like", "full", "add"]),
    "placed": (lambda x: sl.shard(torch.zeros_like(x), "a b") + x, ["zeros_like", "constrain", "add"]),
}


@pytest.mark.parametrize("name", LIKES)
def test_what_is_like_a_tensor_reads_none(name):
    program, want = LIKES[name]
    with sl.Mesh(x=1):
        traced = check(program, torch.randn(4, 6, dtype=torch.float64))
    assert sorted(ops(traced)) == sorted(want)
    assert not any(n.all_input_nodes for n in traced.graph.graph.nodes if "full" in str(n.target))


def test_results_that_are_apart_stay_apart():
    def f(x):
        return torch.zeros(3), torch.zeros(3), x.sin(), x.sin(), x.clone(), torch.zeros(6).view(2, 3)

    traced = check(f, X)
    results = traced(X)
    assert len({r.untyped_storage().data_ptr() for r in (*results, X)}) == len(results) + 1
    same = normalize(trace(lambda x: (y := x.sin(), y), (X,)))
    assert same.outputs[0] is same.outputs[1]


def test_draws_have_numbers_of_their_own():
    traced = normalize(trace(lambda x: (torch.rand(3), x.sin(), torch.rand(3)), (X,)))
    assert ops(traced).count("draw") == 2
    assert normalize(trace(lambda x: torch.rand(3) - torch.rand(3), (X,)))(X).all()
    traced = normalize(trace(lambda x: (torch.rand(3), torch.rand(3))[1], (X,)))
    assert ops(traced) == ["call_key", "draw"]
    nothing = normalize(trace(lambda x: (torch.rand(3), x.sin())[1], (X,)))
    assert ops(nothing) == ["call_key", "sin"]  # the call takes a number from the generator all the same


def test_draws_lie_beside_inputs():
    """What is made on the way to a draw, only for its shape, is not kept."""
    traced = normalize(trace(lambda x: (torch.rand_like(x), torch.rand_like(x.sin()), x.clone().normal_()), (X,)))
    likes = [n.args[1] and n.args[1].name for n in traced.graph.graph.nodes if "draw" in str(n.target)]
    assert likes == ["x", None, "x"]
    assert "sin" not in ops(traced)


def test_checkpointing_survives():
    def body(w, x):
        return (x @ w).sin() @ w

    def step(run):
        def f(w, x):
            w = w.detach().requires_grad_()
            loss = run(body, w, x).sum()
            return torch.autograd.grad(loss, w)[0], loss.detach()

        return f

    plain = check(step(lambda f, *a: f(*a)), W, X)
    again = check(step(lambda f, *a: checkpoint(f, *a, use_reentrant=False)), W, X)
    assert ops(plain).count("sin") == 1
    assert ops(again).count("sin") == 2


TARGETS = torch.tensor([1, 2, -100, 3])
LOSSES = {
    "mean": lambda x: F.cross_entropy(x, TARGETS),
    "all ignored": lambda x: F.cross_entropy(x, torch.full((4,), -100)),
    "weights": lambda x: F.cross_entropy(x, TARGETS, weight=torch.arange(1.0, 7.0, dtype=torch.float64)),
    "one row": lambda x: F.cross_entropy(x[0], torch.tensor(2)),
    "images": lambda x: F.cross_entropy(x.view(2, 3, 2, 2), torch.tensor([[[0, 1], [2, -100]]] * 2)),
    "sum": lambda x: F.cross_entropy(x, TARGETS, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_divided_last(name):
    traced = check(grad_and_value(LOSSES[name]), X)
    losses = [n for n in traced.graph.graph.nodes if "nll_loss" in str(n.target)]
    assert [n.args[4 if "backward" in n.name else 3] for n in losses] == [2, 2]
    assert ops(traced).count("div") == (0 if name == "sum" else 2)


def test_half_precision_sums_must_not_overflow():
    x = torch.randn(4, 6)
    assert "div" in ops(check(LOSSES["mean"], x.bfloat16(), tolerance=1e-2))
    assert "div" not in ops(check(LOSSES["mean"], x.half()))


def test_lines_survive():
    def f(w, x):
        y = x @ w
        return F.cross_entropy(y, TARGETS)

    traced = normalize(trace(grad(f), (W, X)))
    divisions = [n for n in traced.graph.graph.nodes if "div" in str(n.target)]
    assert [n.meta["line"].text for n in divisions] == ["return F.cross_entropy(y, TARGETS)"]
    assert divisions[0].meta["backward"]


def test_the_verifier_sees_broken_graphs():
    def broken(breaking):
        traced = trace(lambda x: x.sin().cos(), (X,))
        sin, cos = (n for n in traced.graph.graph.nodes if n.op == "call_function")
        breaking(sin, cos)
        with pytest.raises(AssertionError) as caught:
            verify(traced.graph)
        return str(caught.value).splitlines()[0]

    assert broken(lambda sin, cos: cos.append(sin)) == "cos reads ['sin'], defined later"
    assert broken(lambda sin, cos: sin.meta.pop("line")) == "sin has no line"
    assert broken(lambda sin, cos: cos.meta.pop("val")) == "cos has no value"
    assert broken(lambda sin, cos: setattr(cos, "target", torch.ops.aten.cos_.default)) == (
        "cos writes to memory: aten.cos_.default"
    )


# --- models -----------------------------------------------------------------------------------------------------------


def decoder(layers=2, d=16, heads=4, kv=2, ff=24, vocab=20):
    """A Llama-like decoder: parameters, and a loss of them."""
    r = lambda *shape: torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5
    ones = torch.ones(d, dtype=torch.float64)
    layer = lambda: {
        "n1": ones, "n2": ones, "q": r(d, d), "k": r(d * kv // heads, d), "v": r(d * kv // heads, d), "o": r(d, d),
        "gate": r(ff, d), "up": r(ff, d), "down": r(d, ff),
    }  # fmt: skip
    params = {"emb": r(vocab, d), "norm": ones, "head": r(vocab, d), "layers": [layer() for _ in range(layers)]}

    def rms(x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    def rope(x):
        s, hd = x.shape[-2:]
        angle = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(0, hd, 2) / hd)
        cos, sin = angle.cos().to(x), angle.sin().to(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def loss(p, x, y):
        b, s = x.shape
        h = F.embedding(x, p["emb"])
        for w in p["layers"]:
            n = rms(h, w["n1"])
            split = lambda t: t.view(b, s, -1, d // heads).transpose(1, 2)
            q, k, v = (split(n @ w[name].T) for name in "qkv")
            o, _ = attention(rope(q), rope(k), v, causal=True)
            h = h + o.transpose(1, 2).reshape(b, s, d) @ w["o"].T
            n = rms(h, w["n2"])
            h = h + (F.silu(n @ w["gate"].T) * (n @ w["up"].T)) @ w["down"].T
        logits = rms(h, p["norm"]) @ p["head"].T
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return params, loss


@pytest.mark.long
def test_a_decoder_and_its_update():
    params, loss = decoder()
    x, y = torch.randint(0, 20, (2, 2, 5))

    def step(params, x, y, lr):
        gradients, value = grad_and_value(loss)(params, x, y)
        return pytree.tree_map(lambda p, g: p - lr * g, params, gradients), value

    # torch.func's own backward uses differentiable formulas, the traced one the fused ones: they round differently.
    traced = check(step, params, x, y, 0.1, tolerance=1e-14)
    names = ops(traced)
    assert names.count("silu_backward") == names.count("silu") == 2
    assert names.count("cos") == 1
    assert not {"clone", "detach", "t", "transpose", "view", "_unsafe_view", "fill_"} & set(names)


@pytest.mark.long
def test_modules_with_adamw_in_the_step():
    model = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=True).double()
    params = {k: v.detach() for k, v in model.named_parameters()}
    state = {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in params.items()}

    def step(params, state, x, t):
        def loss(p):
            return functional_call(model, p, (x,)).pow(2).mean()

        gradients, value = grad_and_value(loss)(params)
        new, moments = {}, {}
        for k, g in gradients.items():
            m, v = state[k][0].lerp(g, 0.1), state[k][1].clone().mul_(0.99).addcmul_(g, g, value=0.01)
            update = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
            new[k], moments[k] = params[k] * 0.999 - 0.01 * update, (m, v)
        return new, moments, value

    x = torch.randn(2, 5, 16, dtype=torch.float64)
    check(step, params, state, x, torch.tensor(3.0, dtype=torch.float64), tolerance=1e-12)


@pytest.mark.peer
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ),
        "llama": lambda: transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        ),
    }[name]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).double()
    params, ids = dict(model.named_parameters()), torch.randint(0, 64, (2, 16))

    def step(params, ids):
        out = functional_call(model, params, (), {"input_ids": ids, "labels": ids})
        gradients = torch.autograd.grad(out.loss, list(params.values()))
        return out.loss.detach(), dict(zip(params, gradients, strict=True))

    traced = check(step, params, ids)
    names = [str(n.target) for n in traced.graph.graph.nodes]
    assert names.count("shardlib.attention.default") == names.count("shardlib.attention_backward.default") == 2
    files = {n.meta["line"].file for n in traced.graph.graph.nodes if n.op == "call_function"}
    assert all("transformers" in f or f == __file__ for f in files)
