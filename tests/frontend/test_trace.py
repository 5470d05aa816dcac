"""Tracing: names, constants, source lines, in-place writes, and what is refused. The oracle is the function itself."""

import contextlib
import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from shardlib.compiler.simplify import verify
from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals import torch_private
from shardlib.frontend import op_meta_cache
from shardlib.frontend.trace import trace
from shardlib.jit.global_random import plain_program
from shardlib.ops.constraint import constrain
from tests.helpers.prover import target_of
from tests.rules.rule_samples import SAMPLES

torch.manual_seed(0)
X = torch.randn(6, 6, dtype=torch.float64)
LINEAR = nn.Linear(6, 6, bias=False).double()


def same(got, want, tolerance=0.0):
    """Equal trees; to the last bit unless a tolerance is given."""
    got, got_tree = pytree.tree_flatten(got)
    want, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree
    for a, b in zip(got, want, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a is b or a == b


def ops(traced):
    return [str(n.target) for n in traced.graph.graph.nodes if n.op == "call_function"]


# --- arguments and results --------------------------------------------------------------------------------------------


def test_inputs_are_named_as_the_user_names_them():
    def step(params, x, *rest, scale=1.0, **named):
        return x

    x = X.to("meta")
    traced = trace(step, ({"wq": x, "layers": [x, x]}, x, x, [x]), {"scale": x, "extra": {"a": x}})
    assert traced.name == "step"
    assert traced.input_names == (
        "params['wq']", "params['layers'][0]", "params['layers'][1]",
        "x", "rest[0]", "rest[1][0]", "scale", "extra['a']",
    )  # fmt: skip
    assert [n.name for n in traced.inputs][:3] == ["params_wq", "params_layers_0", "params_layers_1"]
    assert trace(nn.Linear(6, 2), (X.float(),)).input_names == ("input",)
    assert trace(torch.sin, (X,)).input_names == ("args[0]",)


def test_results_keep_their_tree_and_their_constants():
    class Opaque:
        pass

    opaque = Opaque()

    def f(x, n):
        return {"y": x * n, "same": x, "none": None, "n": (n, "text", opaque)}, [torch.tensor([1.0, 2.0])]

    traced = trace(f, (X, 3))
    assert traced.output_names == (
        *("result[0]['y']", "result[0]['same']", "result[0]['none']"),
        *("result[0]['n'][0]", "result[0]['n'][1]", "result[0]['n'][2]", "result[1][0]"),
    )
    assert traced.outputs[1] is traced.inputs[0]
    assert replace_by_hints(traced.outputs[2:6]) == (None, 3, "text", opaque)
    same(traced(X, 3), f(X, 3))


def test_only_shapes_of_arguments_are_read():
    class Sharded:  # what is no tensor, but has its shape, dtype and device
        shape, dtype, device, requires_grad = torch.Size([2, 3]), torch.float32, torch.device("cpu"), True

    meta = torch.empty(3, 4, device="meta")
    traced = trace(lambda a, b: (a @ b).relu(), (Sharded(), meta))
    assert [tuple(n.meta["val"].shape) for n in traced.inputs] == [(2, 3), (3, 4)]
    assert traced.inputs[0].meta["val"].device.type == "cpu"
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    same(traced(a, b), (a @ b).relu())
    on_gpu = trace(lambda x: x.sin(), (meta,), device="cuda")
    assert on_gpu.outputs[0].meta["val"].device.type == "cuda"


def test_static_arguments_are_not_looked_into():
    config = {"scale": torch.tensor(2.0, dtype=torch.float64)}
    traced = trace(lambda x, config: x * config["scale"], (X, config), static=(1,))
    assert traced.input_names == ("x",)
    same(traced(X, config), X * 2)
    assert trace(lambda x, *, config: x, (X,), {"config": config}, static=("config",)).input_names == ("x",)


def test_captured_tensors_are_constants():
    layer = nn.Linear(6, 6).double()
    traced = trace(lambda x: layer(x) + torch.tensor(2.0) + torch.tensor(3.0).item(), (X,))
    assert traced.input_names == ("x",)
    same(traced(X), layer(X) + 5.0, 1e-15)
    verify(traced.graph)


def test_flags_are_restored():
    def fails(x):
        assert torch.compiler.is_compiling()
        raise KeyError("mine")

    sdpa = F.scaled_dot_product_attention
    with pytest.raises(KeyError, match="mine"):
        trace(fails, (X,))
    assert not torch.compiler.is_compiling()
    assert F.scaled_dot_product_attention is sdpa
    assert torch.sin(X).equal(X.sin())


def test_what_a_library_checks_of_values_is_checked_where_the_program_runs():
    def checked(x):
        torch._check_tensor_all(x < 9.0, lambda: f"{len(x)} rows below 9")
        return x * 2

    traced = trace(checked, (X,))
    same(traced(X), X * 2)
    for run in traced, checked:
        with pytest.raises(RuntimeError, match="6 rows below 9"):
            run(X + 9.0)


def test_a_check_of_what_depends_on_no_argument_is_checked_while_tracing():
    def checked(x):
        torch._check_tensor_all(torch.arange(4) < 9, lambda: pytest.fail("nobody asks for these words"))
        try:
            torch._check_tensor_all_with(ValueError, torch.arange(4) < 3)
        except ValueError:
            return x * 2
        return x

    same(trace(checked, (X,))(X), X * 2)


def test_a_check_that_raises_another_error_needs_the_value():
    with pytest.raises(ShardingError, match="needs the value of"):
        trace(lambda x: torch._check_tensor_all_with(ValueError, x < 9.0), (X,))


def test_threads_may_trace_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(trace(grad(_mlp), (X, X)))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    assert {tuple(ops(t)) for t in results} == {tuple(ops(results[0]))}
    assert not torch.compiler.is_compiling()


# --- transforms -------------------------------------------------------------------------------------------------------


def _mlp(w, x):
    return (F.silu(x @ w) @ w).pow(2).sum()


def _autograd(w, x):
    return torch.autograd.grad(_mlp(w, x), w)[0]


def _own_leaf(w, x):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(_mlp(w, x), w)[0]


def _checkpointed(w, x):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(checkpoint(_mlp, w, x, use_reentrant=False), w)[0]


def _module(w, x):
    return functional_call(LINEAR, {"weight": w}, (x,))


W = torch.randn(6, 6, dtype=torch.float64)
TRANSFORMS = {
    "forward": _mlp,
    "grad": grad(_mlp),
    "grad_and_value": grad_and_value(_mlp, (0, 1)),
    "vmap of grad": vmap(grad(_mlp), (None, 0)),
    "grad of vmap": grad(lambda w, x: vmap(_mlp, (None, 0))(w, x).sum()),
    "grad of grad": grad(lambda w, x: grad(_mlp)(w, x).sin().sum()),
    "jacrev": jacrev(lambda w, x: F.silu(w[0] * x[0])),
    "hessian": hessian(lambda w, x: F.silu(w[0] * x[0]).pow(2).sum()),
    "own leaf": _own_leaf,
    "checkpoint": _checkpointed,
    "module": _module,
    "constraint": grad(lambda w, x: _mlp(constrain(w, "a b"), x)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's forward mode scripts its formulas
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    traced = trace(TRANSFORMS[name], (W, X))
    verify(traced.graph)
    same(traced(W, X), TRANSFORMS[name](W, X), 1e-13)


def test_autograd_over_inputs_that_require_gradients():
    w = W.clone().requires_grad_()
    traced = trace(_autograd, (w, X))
    same(traced(W, X), _autograd(w, X))
    with pytest.raises(RuntimeError, match="does not require grad"):
        trace(_autograd, (W, X))
    over = lambda w, x: torch.autograd.grad(grad(_mlp)(w, x).sum(), w)[0]
    same(trace(over, (w, X))(W, X), over(w, X), 1e-13)


def test_gradients_that_are_not_differentiated_again_keep_fused_ops():
    assert "aten.silu_backward.default" in ops(trace(grad(_mlp), (W, X)))
    assert "aten.silu_backward.default" in ops(trace(vmap(grad(_mlp), (None, 0)), (W, X)))


def test_constraints_on_values_and_cotangents():
    def f(w):
        return constrain(w, "embed ff").sin().sum()

    def specs(traced):
        return [n.args[1] for n in traced.graph.graph.nodes if "constrain" in str(n.target)]

    traced = trace(grad(f), (W,))
    assert specs(traced) == ["embed ff", "embed ff"]
    batched = trace(vmap(grad(f), 1), (torch.stack([W, W], 1),))
    assert specs(batched) == ["_? embed ff", "_? embed ff"]
    torch.library.opcheck(torch.ops.shardlib.constrain.default, (W, "embed ff"))


def test_random_ops_are_drawn_from_places():
    def f(x):
        return grad(lambda x: F.dropout(x, 0.3).pow(2).sum())(x), torch.rand_like(x), x.new_empty(3).uniform_()

    traced = trace(f, (X,))
    torch.manual_seed(1)
    with plain_program():
        want = f(X)
    torch.manual_seed(1)
    same(traced(X), want)


# --- source lines -----------------------------------------------------------------------------------------------------


def _layer(x, w):
    y = x @ w
    y = F.layer_norm(y, y.shape[-1:])
    return F.silu(y)


def _loss(w, x):
    for _ in range(2):
        x = _layer(x, w)
    return x.sum()


def _step(w, x):
    g = grad(_loss)(w, x)
    return w - 0.1 * g


def _step_autograd(w, x):
    (g,) = torch.autograd.grad(_loss(w, x), w)
    return w - 0.1 * g


@pytest.mark.parametrize("step", [_step, _step_autograd])
def test_every_node_has_its_line(step):
    traced = trace(step, (W.clone().requires_grad_(step is _step_autograd), X))
    verify(traced.graph)
    found = {}
    for node in traced.graph.graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removeprefix("aten.").split(".")[0]
            found.setdefault((name, bool(node.meta.get("backward"))), set()).add(node.meta["line"].text)
    assert found["mm", False] == found["mm", True] == {"y = x @ w"}
    assert found["native_layer_norm", False] == found["native_layer_norm_backward", True]
    assert found["native_layer_norm", False] == {"y = F.layer_norm(y, y.shape[-1:])"}
    assert found["silu", False] == found["silu_backward", True] == {"return F.silu(y)"}
    assert found["expand", True] == {"return x.sum()"}
    assert found["sub", False] == {"return w - 0.1 * g"}
    line = next(n for n in traced.graph.graph.nodes if str(n.target) == "aten.silu.default").meta["line"]
    source, start = inspect.getsourcelines(_layer)
    assert line[:4] == (__file__, start + len(source) - 1, "_layer", "return F.silu(y)")
    assert str(line) == f"{__file__}:{line.lineno} in _layer: return F.silu(y)"


def test_a_gradient_of_a_gradient_keeps_the_forward_line():
    def inner(w):
        return w.sin().sum()

    traced = trace(grad(lambda w: grad(inner)(w).pow(2).sum()), (W,))
    lines = {n.meta["line"].text for n in traced.graph.graph.nodes if "cos" in str(n.target) or "sin" in str(n.target)}
    assert lines == {"return w.sin().sum()"}


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(fn, *args):
    with pytest.raises(ShardingError) as caught:
        trace(fn, args)
    return str(caught.value).splitlines()


def branches(x):
    if x.sum() > 0:
        return x
    return -x


def test_control_flow_on_values():
    what, where, rule, remedy = refusal(branches, X)
    assert what == "the traced function needs the value of gt (bool[]):"
    assert where.startswith(f"  * {__file__}:")
    assert where.endswith(" in branches: if x.sum() > 0:")
    assert rule == ("Rule: Python runs once, on shapes; the values of tensors are known only when the program runs")
    assert remedy.startswith("Remedy: torch.where(condition, a, b) for an if; for an assert or a stop, return")
    assert trace(lambda x: torch.where(x.sum() > 0, x, -x), (X,))(X).equal(branches(X))


VALUES = {
    "item": (lambda x: x * x[0, 0].item(), "needs the value of select_1 (float64[])"),
    "float": (lambda x: x * float(x.sum()), "needs the value of sum_1 (float64[])"),
    "int": (lambda x: x[: int(x[0, 0])], "needs the value of select_1 (float64[])"),
    "tolist": (lambda x: x.tolist(), "needs the value of "),
    "range": (lambda x: list(range(x.sum().long())), "needs the value of "),
    "numpy": (lambda x: x.numpy(), "turns a tensor into a numpy array"),
    "format": (lambda x: f"{x.sum():.2f}", "prints the value of a tensor"),
    "nonzero": (lambda x: x.nonzero(), "makes a shape that depends on values, by nonzero"),
    "unique": (lambda x: x.unique(), "makes a shape that depends on values, by unique"),
    "mask": (lambda x: x[x > 0], "makes a shape that depends on values, by x[mask]"),
    "in a gradient": (grad(lambda x: (x * x[0, 0].item()).sum()), "needs the value of select_1 (float64[])"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_and_shapes_that_are_not_known(name):
    fn, what = VALUES[name]
    message = refusal(fn, X)
    assert message[0].startswith(f"the traced function {what}")
    assert __file__ in message[1]
    assert message[2].startswith("Rule: ")
    assert message[3].startswith("Remedy: ")


def _filled(x):
    m = torch.zeros(4)
    m.view(2, 2)[0].fill_(3.0)
    return x * m.sum().item()


def _counted(x):
    m = torch.zeros(3)
    for i in range(3):
        m[i] = i
        x = x + m.sum().item()
    return x


def _copied_before(x):
    m = torch.arange(4.0)
    copy = m.clone()
    torch._foreach_add_([m], 1.0)
    return x * copy.max().item() + m.max().item()


def _halves(x):
    a, b = torch.arange(4.0).split(2)
    a.fill_(9.0)
    return x * a.sum().item() + b.sum().item()


KNOWN = {
    "causal": lambda x: x * 2 if (torch.ones(3, 3).triu(1) == torch.ones(3, 3).tril(-1).T).all() else x,
    "equal": lambda x: x * 2 if torch.equal(torch.arange(3), torch.arange(3)) else x,
    "list": lambda x: x * torch.linspace(0, 1, 5).tolist()[1],
    "size": lambda x: x[: torch.tensor([1, 1]).sum()],
    "in a gradient": grad(lambda x: (x * x if torch.ones(2).sum() > 1 else x).sum()),
    "in a batch": torch.vmap(lambda x: x * 2 if torch.ones(2).sum() > 1 else x),
    "of a leaf": lambda x: x * 2 if torch.zeros(2, requires_grad=True).sum() == 0 else x,
    "filled through a view": _filled,
    "in a loop": _counted,
    "of a copy": _copied_before,
    "of halves": _halves,
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_that_depend_on_no_input(name):
    assert trace(KNOWN[name], (X,))(X).equal(KNOWN[name](X))


def _written(x):
    m = torch.zeros(4)
    m.view(2, 2)[0, 0] = x.sum()
    return x * m.sum().item()


def _given_data(x):
    m = torch.zeros(x.shape, dtype=x.dtype)
    m.data = x * 2
    return x * m.sum().item()


OUTSIDE = torch.zeros(2)
UNKNOWN = {
    "written to": _written,
    "other data": _given_data,
    "drawn": lambda x: x * 2 if torch.rand(()) > 0.5 else x,
    "of no value": lambda x: x * torch.empty(3).sum().item(),
    "of the outside": lambda x: x * 2 if OUTSIDE.sum() > 0 else x,
    "large": lambda x: x * torch.zeros(1 << 14, 1 << 14).sum().item(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_a_call_may_change(name):
    assert refusal(UNKNOWN[name], X)[0].startswith("the traced function needs the value of ")


def writes(x, state):
    x.add_(1)
    state["m"][1:].t()[0] = 0.0
    return x


def test_writes_to_inputs_are_results():
    state = {"m": X.clone(), "n": X}
    traced = trace(writes, (X, state))
    assert [(traced.input_names[leaf], traced.result_names[at]) for leaf, at in traced.after.written] == [
        ("x", "x (written)"),
        ("state['m']", "state['m'] (written)"),
    ]
    flat = _outputs(traced, X, state["m"], X)
    expected = state["m"].clone()
    expected[1:].t()[0] = 0.0
    assert [x.equal(y) for x, y in zip(flat, (X + 1, X + 1, expected), strict=True)] == [True] * 3
    assert trace(lambda x: x.clone().add_(1), (X,))(X).equal(X + 1)


def _outputs(traced, *inputs):
    return torch.fx.Interpreter(traced.graph).run(*inputs, enable_io_processing=False)


def test_other_writes_that_are_refused():
    leaf = X.clone().requires_grad_()
    assert (
        refusal(lambda x: x.add_(1), leaf)[0]
        == "the traced function writes in place to a leaf that requires a gradient:"
    )
    captured = torch.zeros(6)
    assert "a tensor that the function closes over is written to at" in refusal(lambda x: captured.add_(1), X)[1]
    norm = nn.BatchNorm1d(6).double()
    traced = trace(lambda s, x: functional_call(norm, s, (x,)), (dict(norm.state_dict()), X))
    assert sorted(traced.input_names[leaf] for leaf, _ in traced.after.written) == [
        "s['num_batches_tracked']",
        "s['running_mean']",
        "s['running_var']",
    ]
    assert "aten.expand.default" in refusal(lambda x: (x * 1)[:1].expand(3, -1).add_(1), X)[0]
    assert "input x is written to at" in refusal(lambda x: x.unsqueeze_(0), X)[1]
    assert refusal(lambda x: (x * 1).resize_(99), X)[0] == "aten.resize_.default cannot be traced:"
    overlapping = refusal(lambda x: (x * 1).as_strided((2, 2), (1, 1)).add_(1), X)[0]
    assert overlapping == "a write through overlapping strides cannot be traced:"


def test_a_pointwise_op_that_is_called_again_is_not_asked_again():
    x, y, wide, turned = torch.rand(3, 3), torch.rand(3, 3), torch.rand(3, 3).double(), torch.rand(3, 3).t()

    def fn(x, y, wide, turned):
        alike = [x * 2.0, y * 3.5, torch.mul(y, x), torch.mul(x, y)]
        other = [x * 2, wide * 2.0, turned * 2.0, (x > 0) * 2.0, x[0] * 2.0]
        named = [torch.add(x, y, alpha=2.5), torch.add(y, x, alpha=3.5), torch.add(x, y), torch.clamp(x, max=0.5)]
        named += [torch.clamp(y, max=0.25), torch.clamp(x, min=0.5), torch.div(x, y, rounding_mode="floor"), x / y]
        return [*alike, *other, *named]

    traced = trace(fn, (x, y, wide, turned))
    seen = {}
    said = [seen.setdefault(id(n.meta["val"]), len(seen)) for n in traced.graph.graph.output_node().args[0]]
    assert said == [0, 0, 1, 1, *range(2, 7), 7, 7, *range(8, 14)]
    for found, expected in zip(traced.graph(x, y, wide, turned), fn(x, y, wide, turned), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


def test_what_is_no_tensor_is_told_from_a_list_of_numbers():
    weight = torch.ones(6)
    for x, text in (
        (None, r"layer_norm\(\): .* must be Tensor, not NoneType(.|\n)*mend the line"),
        ([1.0] * 6, r"layer_norm\(\): .* must be Tensor, not list(.|\n)*pass torch.tensor\(x\)"),
    ):
        with pytest.raises(ShardingError, match=text):
            trace(lambda w, x=x: F.layer_norm(x, (6,), w), (weight,))


def test_what_a_number_makes_of_an_op_is_asked_of_each():
    with pytest.raises(ShardingError, match="torch refuses polygamma"):
        trace(lambda x: torch.polygamma(1, x) + torch.polygamma(-1, x), (X,))


@pytest.mark.parametrize(
    "off", [torch.DisableTorchFunctionSubclass, torch.DisableTorchFunction, contextlib.nullcontext]
)
def test_functions_are_heard_as_the_caller_hears_them(off):
    heard = []

    def fn(x):
        heard.append((torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()))
        return x * 1

    with off():
        fn(X)
        trace(fn, (X,))
    assert heard[0] == heard[1]


# --- ops that were called before --------------------------------------------------------------------------------------


def written(fn, args):
    """A graph node by node, and what every node is; or why there is none."""
    try:
        graph = trace(fn, args).graph.graph
    except (ShardingError, RuntimeError) as error:
        return str(error)
    form = lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else x
    meta = [pytree.tree_map(form, node.meta.get("val")) for node in graph.nodes]
    return [(node.name, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes], meta


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # some ops are deprecated
@pytest.mark.sampled(17, first=1)
@pytest.mark.parametrize("family", SAMPLES, ids=lambda family: family.__name__)
def test_an_op_that_was_called_before_is_traced_as_the_first_time(family, monkeypatch):
    first = {name: (name, args, kwargs) for name, args, kwargs in reversed(list(family()))}
    for name, args, kwargs in first.values():
        leaves, tree = pytree.tree_flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def call(*tensors, name=name, leaves=leaves, tree=tree, where=where):
            filled = dict(zip(where, tensors, strict=True))
            a, k = pytree.tree_unflatten([filled.get(i, x) for i, x in enumerate(leaves)], tree)
            return target_of(name)(*a, **k), target_of(name)(*a, **k)

        monkeypatch.setattr(op_meta_cache, "_FORMS", {})
        given = [leaves[i] for i in where]
        other = [x.mT.contiguous().mT if x.dim() > 1 and not x.is_sparse else x for x in given]  # other strides
        with monkeypatch.context() as plain:
            plain.setattr(op_meta_cache.OpMetaCache, "_key", lambda *_: None)
            expected = [written(call, xs) for xs in (given, other)]
        assert [written(call, xs) for xs in (given, other, given, other)] == expected * 2, name


def attend(x, w):
    q, k, v = (x[None, None] @ y for y in (w, w.sin(), w.cos()))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0]


REPEATED = {
    "products": lambda x, w: torch.tanh(x @ w).sum(0).softmax(-1),
    "concatenation": lambda x, w: torch.cat([x, w, x.sin()], 1),
    "stack of one tensor twice": lambda x, w: torch.stack([x, x, w], 1),
    "maximum and its place": lambda x, w: (x @ w).max(1),
    "running maximum and its place": lambda x, w: (x * w).cummax(0),
    "sort": lambda x, w: x.sort(1)[0] + w.sort(0)[1],
    "layer norm": lambda x, w: torch.nn.functional.layer_norm(x * w, x.shape[1:]),
    "chunks": lambda x, w: [y * z for y, z in zip(x.chunk(2, 1), w.chunk(2), strict=True)],
    "chunks of other sizes": lambda x, w: x.split([1, x.shape[0] - 1])[1] * w[1:],
    "rows": lambda x, w: sum(x.unbind(0)) + w[-1],
    "batched product": lambda x, w: x[None] @ w,
    "attention": attend,
    "gradients of attention": lambda x, w: torch.func.grad(lambda *a: attend(*a).sum(), (0, 1))(x, w),
    "gradients of chunks": torch.func.grad(lambda x, w: torch.cat([y.sin() for y in (x @ w).chunk(2, 1)]).sum()),
}


@pytest.mark.parametrize("f", REPEATED.values(), ids=REPEATED)
def test_what_was_traced_before_is_asked_of_nobody(f, monkeypatch):
    args = torch.ones(4, 4), torch.ones(4, 4)
    twice = lambda *args: (f(*args), f(*args))
    monkeypatch.setattr(op_meta_cache, "_FORMS", {})
    with monkeypatch.context() as plain:
        plain.setattr(op_meta_cache.OpMetaCache, "_key", lambda *_: None)
        expected = written(twice, args)
    assert written(twice, args) == expected
    for name in ("_alone", "_call_any_number"):  # called for an op that is new, and for one that is never repeated
        monkeypatch.setattr(op_meta_cache.OpMetaCache, name, None)
    assert written(twice, args) == expected
    assert None not in op_meta_cache._FORMS.values()  # each of these ops is its own nodes, and is known from now on


VIEWS = {
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(6, 2),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x[:, None].expand(3, 1, 4),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "slice": lambda x: x[1:, ::2],
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x, [6, 2]),
    "select": lambda x: x[1],
    "squeeze": lambda x: x[:, 1:2].squeeze(1),
    "second chunk": lambda x: x.split(2)[1],
    "second part": lambda x: x.split([1, 2])[1],
    "second row": lambda x: x.unbind(0)[1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_that_was_taken_before_is_in_the_memory_of_its_operand(view, monkeypatch):
    def where(x):
        with torch.DisableTorchFunction():  # nobody may ask in a trace
            return torch_private.memory_of(x.untyped_storage()), x.storage_offset()

    offset, seen = where(view(torch.zeros(3, 4)))[1], []

    def f(x, y):
        twice = torch.cat([y, y])
        for z in (x, y, y.sin(), twice[:3], twice[3:]):
            memory, first = where(z)
            seen.append(where(view(z)) == (memory, first + offset))
        view(twice[3:]).add_(1)
        return view(x), twice

    monkeypatch.setattr(op_meta_cache, "_FORMS", {})
    args = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    with monkeypatch.context() as plain:
        plain.setattr(op_meta_cache.OpMetaCache, "_key", lambda *_: None)
        expected = written(f, args)
    assert [written(f, args) for _ in range(3)] == [expected] * 3
    assert len(seen) == 20
    assert all(seen)


def test_what_is_not_strided_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ShardingError, match="strided"):
            trace(lambda x: (x.to_sparse() * 2).to_dense(), (X,))
