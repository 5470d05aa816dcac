"""check: it passes where sharded and single-device runs agree, and says exactly what differs where they do not."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh, ShardingError, shard
from shardlib.core.context import is_single_device
from shardlib.jit.call import execute
from shardlib.testing.check import CheckReport, check

MESH = {"data": 2, "tensor": 2}


def loss(params: dict[str, Tensor], x: Tensor, scale: float = 1.0) -> Tensor:
    h = shard(x, "b@data _") @ shard(params["w"], "_ ff@tensor")
    return (torch.nn.functional.gelu(h) @ params["v"]).pow(2).mean() * scale


def _params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"w": torch.randn(6, 8, dtype=dtype), "v": torch.randn(8, 4, dtype=dtype)}


def _paths(report: CheckReport) -> list[str]:
    return [leaf.path for leaf in report.leaves]


def _sharded_only(x: Tensor, change: Tensor) -> Tensor:
    """A bug on purpose: the sharded program adds something that the one for one device does not."""
    return x if is_single_device() else x + change


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss(dtype: torch.dtype) -> None:
    with Mesh(**MESH):
        report = check(loss, _params(dtype), torch.randn(4, 6, dtype=dtype), scale=2.0)
    assert _paths(report) == [
        "result", "result (nothing shared)", "gradient of params['v']", "gradient of params['w']", "gradient of x",
    ] or _paths(report) == [
        "result", "result (nothing shared)", "gradient of params['w']", "gradient of params['v']", "gradient of x",
    ]  # fmt: skip
    assert report.max_error <= {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_pytrees_and_other_leaves() -> None:
    def fn(x: Tensor, n: int, flag: bool = False) -> dict[str, Any]:
        return {"y": x * n, "i": (x > 0).sum(0), "pair": (n, flag), "none": None}

    with Mesh(**MESH):
        report = check(fn, torch.randn(4, 6), 3, flag=True, in_specs=("b@data _", None))
    assert _paths(report)[:5] == [
        "result['y']",
        "result['i']",
        "result['pair'][0]",
        "result['pair'][1]",
        "result['none']",
    ]
    assert [leaf.type for leaf in report.leaves[:5]] == ["f32[4@data, 6]", "i64[6]", "3", "True", "None"]


@pytest.mark.long
def test_jitted_and_sharded_arguments() -> None:
    step = sl.jit(loss, in_specs=({"w": "_ ff@tensor", "v": None}, "b@data _"), static_argnums=2, donate_argnums=0)
    with Mesh(**MESH):
        params = {"w": shard(torch.randn(6, 8), "_ ff@tensor"), "v": torch.randn(8, 4, requires_grad=True)}
        before = params["w"].full_tensor()
        report = check(step, params, torch.randn(4, 6), 2.0)
        assert torch.equal(params["w"].full_tensor(), before), "check donates nothing"
    assert "gradient of x f32[4@data, 6]" in str(report)


def test_large_meshes_are_not_run_without_sharing() -> None:
    assert _paths(check(lambda x: x + 1, torch.ones(32), mesh=Mesh(x=32), in_specs=("_@x",))) == ["result"]


def test_report_prints() -> None:
    with Mesh(**MESH):
        report = check(lambda x: x * 2, torch.ones(4, 2), in_specs=("b@data _",))
    assert str(report) == (
        "<lambda> on Mesh(data=2, tensor=2): the same as on one device, 2 tensors compared\n"
        "  result f32[4@data, 2]: error 0.0e+00 (tolerance 1e-05)\n"
        "  result (nothing shared) f32[4@data, 2]: error 0.0e+00 (tolerance 1e-05)"
    )


def test_random_numbers_are_compared_and_the_random_state_is_kept() -> None:
    before = torch.get_rng_state()
    with Mesh(**MESH):
        assert check(lambda x: x + torch.rand(4, 2), torch.ones(4, 2)).max_error == 0
        with pytest.raises(ShardingError, match=r"aten\.poisson\.default"):
            check(torch.poisson, torch.ones(4, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("given", [False, True])
def test_the_state_of_a_generator_is_kept(given: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    state, x = generator.get_state(), torch.ones(4, 6)
    draw = lambda x, g=None: x + torch.rand(4, 6, generator=g if given else generator)
    with sl.Mesh(data=2):
        report = sl.check(draw, sl.shard(x, "b@data _"), *([generator] if given else ()))
    assert report.max_error == 0
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout2d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_inference_mode_draws_the_same_numbers(fn: Any) -> None:
    """There ops come to modes whole that are written as others."""
    with sl.Mesh(data=2), torch.inference_mode():
        sl.check(fn, sl.shard(torch.randn(4, 2, 6, 8), "b@data _ _ _"))


def test_what_differs_is_listed() -> None:
    change = torch.zeros(4, 3)
    change[2, 1] = 0.5

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 1, _sharded_only(x, change), _sharded_only(x, change).sum(1)

    with Mesh(data=2), pytest.raises(ShardingError) as error:
        check(fn, torch.ones(4, 3), in_specs=("b@data _",))
    assert str(error.value) == (
        "check(fn): 4 of 6 tensors differ between one device and Mesh(data=2):\n"
        "  * result[1] f32[4@data, 3]: error 5.0e-01 (tolerance 1e-05), first at [2, 1]: "
        "1.0 on one device, 1.5 sharded\n"
        "  * result[2] f32[4@data]: error 1.7e-01 (tolerance 1e-05), first at [2]: 3.0 on one device, 3.5 sharded\n"
        "  * result[1] (nothing shared) f32[4@data, 3]: error 5.0e-01 (tolerance 1e-05), first at [2, 1]: "
        "1.0 on one device, 1.5 sharded\n"
        "  * result[2] (nothing shared) f32[4@data]: error 1.7e-01 (tolerance 1e-05), first at [2]: "
        "3.0 on one device, 3.5 sharded\n"
        "Rule: the sharded program computes what the program for one device computes\n"
        "Remedy: if the differences are rounding, give rtol=; if not, it is a bug of shardlib: report the program"
    )


def test_gradients_that_differ() -> None:
    """The value agrees, the gradient does not."""

    def fn(x: Tensor) -> Tensor:
        y = x if is_single_device() else x.detach() * 2 - x
        return (y * y).sum()

    with (
        Mesh(data=2),
        pytest.raises(ShardingError, match=r"1 of 3 tensors.*\n  \* gradient of x f32\[4@data\]: error 2.0e"),
    ):
        check(fn, torch.ones(4), in_specs=("_@data",))


@pytest.mark.parametrize("argument", [torch.arange(4), torch.ones(4)])
def test_gradients_of_a_module_that_differ(argument: Tensor) -> None:
    """Those of its parameters, whether or not the call has an argument with a gradient, too."""
    model = torch.nn.Embedding(4, 3)

    def fn(m: torch.nn.Module, x: Tensor, *, wrong: bool) -> Tensor:
        w = m.weight if is_single_device() or not wrong else m.weight.detach() * 2 - m.weight
        return (w[x.long()] * (1 + x[:, None])).square().sum()

    with Mesh(data=2):
        report = check(fn, model, argument, wrong=False)
        assert "m.weight.grad" in {leaf.path for leaf in report.leaves}
        with pytest.raises(ShardingError, match=r"1 of \d tensors.*\n  \* m.weight.grad f32\[4, 3\]: error 2.0e"):
            check(fn, model, argument, wrong=True)
    assert model.weight.grad is None


def test_a_way_back_that_leads_out_of_the_function() -> None:
    """It is not gone: what others have made keeps its graph, and what it is made of has no gradient."""
    model, w = torch.nn.Linear(4, 4).double(), torch.ones(4, dtype=torch.float64, requires_grad=True)
    made, x = (w * 2).sin(), torch.randn(4, 4, dtype=torch.float64)
    with Mesh(data=2):
        check(lambda x: model(x * made).square().sum(), x, in_specs=("b@data _",))
        check(lambda x: model(x).square().sum(), x * w)
    assert w.grad is model.weight.grad is None
    model(x * made).sum().backward()


@pytest.mark.parametrize("parallelized", [False, True])
def test_a_parameter_that_is_an_argument_too(parallelized: bool) -> None:
    model = torch.nn.Linear(4, 4).double()
    with Mesh(data=2):
        if parallelized:
            sl.parallelize(model, strategy="fsdp")
        report = check(lambda x, w: model(x).square().sum() + (w * x).sum(), torch.randn(4, 4).double(), model.weight)
    assert {"gradient of x", "w.grad", "model.bias.grad"} < {leaf.path for leaf in report.leaves}


def _checkpointed(x: Tensor, w: Tensor, *, reentrant: bool) -> Tensor:
    y: Tensor = checkpoint(lambda x: torch.nn.functional.dropout(x @ w).sin(), x, use_reentrant=reentrant)
    return y.square().sum()


def _penalty(x: Tensor, w: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y @ w).sin().sum(), y, create_graph=True)[0].square().sum() + x.sum()


def _written(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    w[1:] *= x[:3]
    return (x @ w.relu_()).square().sum()


def _normed(norm: torch.nn.Module, x: Tensor) -> Tensor:
    y: Tensor = norm(x)
    return y.sin().sum()


@pytest.mark.parametrize(
    ("fn", "dtype", "gradients"),
    [
        (partial(_checkpointed, reentrant=False), torch.float64, {"gradient of x", "gradient of w"}),
        (partial(_checkpointed, reentrant=True), torch.float64, {"gradient of x", "gradient of w"}),
        (_penalty, torch.float64, {"gradient of x", "gradient of w"}),
        (_written, torch.float64, {"gradient of x", "gradient of w"}),
        (partial(_normed, torch.nn.BatchNorm1d(4).double()), torch.float64, {"gradient of x"}),
        (lambda x, w: (x @ w).abs().square().sum(), torch.complex128, {"gradient of x", "gradient of w"}),
    ],
)
def test_gradients_are_autograds(fn: Any, dtype: torch.dtype, gradients: set[str]) -> None:
    """Of checkpoints, leaves that the function makes, what it writes to, and complex numbers."""
    args = [torch.randn(4, 4, dtype=dtype) for _ in range(1 + (len(gradients) == 2))]
    before = [x.clone() for x in args]
    with Mesh(data=2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # without gradients
        report = check(fn, *args, in_specs=("b@data _", *[None] * (len(args) - 1)))
    assert {path for path in _paths(report) if path.startswith("gradient")} == gradients
    assert all(map(torch.equal, args, before))


def test_gradients_whatever_is_on_around() -> None:
    """Under no_grad, too; they are 0 where nothing depends on an argument; a function that takes none has none."""
    with Mesh(data=2), torch.no_grad():
        report = check(lambda x, y: x.square().sum(), torch.ones(4), torch.ones(2), in_specs=("_@data", None))
        assert {"gradient of x", "gradient of y"} <= {*_paths(report)}
        report = check(torch.no_grad()(lambda x: x.square().sum()), torch.ones(4))
        assert not [path for path in _paths(report) if "gradient" in path]


def test_losses_without_a_way_back_say_so() -> None:
    buffer, x = torch.zeros(4), torch.randn(4)

    def keeps(x: Tensor) -> Tensor:
        return buffer.add_(x).square().sum()

    def overwrites(x: Tensor) -> Tensor:
        y = x.exp()
        return (y.mul_(2) * y).sum()

    w = torch.ones(4, requires_grad=True)

    def goes_back(x: Tensor) -> Tensor:
        loss = (x * w).square().sum()
        (grad,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.sub_(grad)
        return loss

    with Mesh(data=2):
        assert "\n  no gradients: buffer would keep the history of what is written there" in str(check(keeps, x))
        assert "\n  no gradients: on one device, torch says: one of the variables needed" in str(check(overwrites, x))
        assert "no gradients" not in str(check(goes_back, x))
    assert not buffer.requires_grad


def test_what_rounding_does_to_gradients_is_no_difference() -> None:
    """The gradient of a bias in front of a batch norm is 0, and rounding all that is there of it."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(64, track_running_stats=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), norm, torch.nn.Linear(64, 10))
    with Mesh(data=2):
        report = check(lambda m, x: m(x).square().sum(), model, torch.randn(32, 64), in_specs=(None, "b@data _"))
    assert "m.0.bias.grad" in {leaf.path for leaf in report.leaves}


def test_rounding_is_that_of_several_draws() -> None:
    """The first one rounds both large numbers up, which changes nothing."""
    x = torch.tensor([1e8, 1, -1e8, 1])
    with Mesh(a=2):
        report = check(lambda x: x.cumsum(0)[-1:], x, in_specs="n@a")
        assert report.max_error == 1
        with pytest.raises(ShardingError, match="2 of 2 tensors differ"):
            check(lambda x: x.cumsum(0)[-1:], x, in_specs="n@a", rtol=1e-5)


@pytest.mark.long
def test_rounding_is_that_of_the_coarsest_numbers() -> None:
    """Gradients of float32 parameters, which add up products of bfloat16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    def loss(m: torch.nn.Module, x: Tensor, *, twice: bool) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x).float().square().mean()
        return y if is_single_device() or not twice else 2 * y - y.detach()

    with Mesh(data=2):
        check(loss, model, torch.randn(24, 8), twice=False, in_specs=(None, "b@data _"))
        with pytest.raises(ShardingError, match=r"m.0.weight.grad f32\[8, 8\]: error 1.0e"):
            check(loss, model, torch.randn(24, 8), twice=True, in_specs=(None, "b@data _"))


def test_bools_are_compared() -> None:
    with Mesh(data=2):
        assert [leaf.error for leaf in check(lambda x: (x > 0, x.sum() > 0), torch.randn(4)).leaves] == [0.0] * 4
        with pytest.raises(ShardingError, match=r"result bool.*, first at \[1\]: True on one device, False"):
            check(lambda x: x > 0 if is_single_device() else x > 1, torch.tensor([0.0, 1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("sharded", "text"),
    [
        (lambda x: x.double(), r"result f64\[2\]: is f32\[2\] on one device"),
        (lambda x: x[:1], r"result f32\[1\]: is f32\[2\] on one device"),
        (lambda x: x / 0, r"error inf"),
        (lambda x: x * torch.nan, r"error inf .*: 1.0 on one device, nan sharded"),
        (lambda x: 3, "1 of 1"),
    ],
)
def test_other_differences(sharded: Any, text: str) -> None:
    with Mesh(x=32), pytest.raises(ShardingError, match=text):
        check(lambda x: x if is_single_device() else sharded(x), torch.ones(2))


def test_structures_that_differ() -> None:
    with Mesh(data=2), pytest.raises(ShardingError, match="one structure on one device and another when it is traced"):
        check(lambda x: x if is_single_device() else (x, x), torch.ones(2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_equal_nans_and_infinities(value: float) -> None:
    with Mesh(data=2):
        assert check(lambda x: x * 2, torch.tensor([1.0, value])).max_error == 0


@pytest.mark.parametrize(
    ("tolerance", "passes"), [({"rtol": 1e-1}, True), ({"atol": 1e-1}, True), ({"rtol": 1e-3}, False)]
)
def test_tolerances(tolerance: dict[str, float], passes: bool) -> None:
    def run() -> CheckReport:
        return check(lambda x: _sharded_only(x, torch.tensor(0.01)), torch.ones(2), **tolerance)

    with Mesh(data=2):
        if passes:
            assert run().max_error == pytest.approx(0.01, rel=1e-4)
        else:
            with pytest.raises(ShardingError, match="2 of 2 tensors differ"):
                run()


def test_outside_any_mesh() -> None:
    x = shard(torch.arange(4.0), "n@data", mesh=Mesh(data=2))
    assert str(check(lambda x: x.square().sum(), x)).startswith("<lambda> on Mesh(data=2): the same as on one device")
    with pytest.raises(ShardingError, match="<lambda> is called outside any mesh"):
        check(lambda x: x, torch.ones(2))


class Running(torch.nn.Module):
    """Changes a buffer, an attribute and a number when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.last, self.calls = torch.zeros(3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0))
        self.last = x.sum(0)
        self.calls += 1
        return x * self.mean


def test_what_a_function_changes_is_compared_and_given_back():
    net, x = Running(), torch.arange(12.0).reshape(4, 3)
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.full((3,), 2.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (net(x) * w).sum()
        loss.backward()
        return loss.detach()

    with sl.Mesh(data=2):
        report = sl.check(step, x, in_specs=("b@data _",))
    assert {"w.grad", "net.mean"} <= {leaf.path for leaf in report.leaves}
    assert net.mean.tolist() == net.last.tolist() == [0.0] * 3
    assert net.calls == 0
    assert w.grad.tolist() == [2.0] * 3


def test_writes_to_arguments_are_compared_and_given_back():
    cache, x = torch.zeros(4, 3), torch.ones(4, 3)
    with sl.Mesh(data=2):
        report = sl.check(lambda cache, x: cache.add_(x).sum(), cache, x, in_specs=("b@data _", None))
    assert any(leaf.path == "cache" for leaf in report.leaves)
    assert not cache.any()


def test_a_wrong_write_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execute, "_apply", lambda *_: None)
    net, x = Running(), torch.ones(4, 3)
    with sl.Mesh(data=2), pytest.raises(ShardingError, match=r"net\.mean \(nothing shared\) f32\[3\]: error"):
        sl.check(lambda x: net(x), x)


@sl.rule("m k, k n -> m n | k:none")
@torch.library.custom_op("test_check::unsummed", mutates_args=())
def unsummed(a: Tensor, b: Tensor) -> Tensor:
    """A product whose rule is wrong: it does not say that pieces of k are to be added up."""
    return a @ b


unsummed.register_fake(lambda a, b: a @ b)
unsummed.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@sl.rule("m k, k n -> m n")
@torch.library.custom_op("test_check::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """A product whose gradient for `b` adds up nothing."""
    return a @ b


product.register_fake(lambda a, b: a @ b)
product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), unsummed(ctx.saved_tensors[0].t(), grad)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("op", [unsummed, product])
@pytest.mark.parametrize("parallelized", [False, True])
def test_a_wrong_rule_is_told(op: Any, parallelized: bool) -> None:
    """Of values, and of gradients alone; where parameters live on the mesh, too: one device has whole ones."""
    torch.manual_seed(0)
    cut = {"up": "f@tensor _", "down": "_ f@tensor"} if op is unsummed else {"up": "f _"}
    with Mesh(data=2, tensor=2):
        model = Halves(op)
        if parallelized:
            sl.parallelize(model, cut)
        else:
            model.product = lambda x, up: op(shard(x, "b@data f@tensor" if op is unsummed else "b@data f"), up)
        with pytest.raises(ShardingError) as error:
            check(lambda m, x: m(x).square().mean(), model, torch.randn(4, 4), in_specs=(None, "b@data _"))
    wrong = {text.partition(" f32")[0] for text in error.value.offenders}
    assert {"m.up.grad"} <= wrong
    assert ("result" in wrong) == (op is unsummed)
    assert "test_check::unsummed" in error.value.remedy


def test_one_device_has_no_sharded_tensors() -> None:
    """Wherever they are found: in modules, optimizers, closures, dicts by them; and all is put back."""
    with Mesh(data=2):
        model = sl.parallelize(torch.nn.Linear(4, 4).double(), strategy="fsdp")
        opt, x = torch.optim.Adam(model.parameters()), torch.randn(4, 4).double()
        average, held = {p: p.detach().clone() for p in model.parameters()}, (model.weight, [model.bias])
        some = {model.bias}

        def step(model: Any, opt: Any, x: Tensor) -> Tensor:
            loss = model(x).square().sum() + held[0].sum() + held[1][0].sum() + sum(map(torch.sum, some))
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for p, mean in average.items():
                    mean.lerp_(p, 0.1)
            if is_single_device():
                moments = [y for p in model.parameters() for y in opt.state[p].values()]
                found = [*opt.state, *moments, *average, *average.values(), held[0], *held[1], *some]
                found += model.parameters()
                assert {type(y) for y in found} == {Tensor, torch.nn.Parameter}
            return loss

        sl.jit(step)(model, opt, x)
        before = [p.full_tensor() for p in (*average, *average.values())]
        report = check(step, model, opt, x)
        assert "average[model.weight]" in _paths(report)
        assert [*map(id, average)] == [*map(id, opt.state)] == [*map(id, model.parameters())]
        assert held[0] is model.weight
        assert held[1] == [*some] == [model.bias]
        assert all(map(torch.equal, before, [p.full_tensor() for p in (*average, *average.values())]))
        assert all(isinstance(p.grad, sl.ShardedTensor) for p in model.parameters())


def test_what_stays_on_the_mesh_is_told() -> None:
    """A default argument is the function's for good."""
    with Mesh(data=2):
        w = shard(torch.ones(4), "f@data")

        def fn(x: Tensor, w: Tensor = w) -> Tensor:
            return x * w

        text = str(check(fn, torch.ones(4)))
    assert "\n  on one device, too, on the mesh, since something holds them for good: " in text


class Halves(torch.nn.Module):
    def __init__(self, product: Any) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(n, 12 - n)) for n in (8, 4))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(torch.tanh(x @ self.down), self.up)


def train(model: Halves, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss


@pytest.mark.long
@pytest.mark.parametrize("product", [torch.mm, unsummed])
def test_a_step_is_compared_after_three_with_moments_and_the_first_value_that_differs(product: Any) -> None:
    torch.manual_seed(0)
    with Mesh(data=2, tensor=2):
        model = sl.parallelize(Halves(product), {"down": "_ f@tensor", "up": "f@tensor _"})
        opt, x, before = torch.optim.Adam(model.parameters()), torch.randn(4, 4), model.up.full_tensor()
        if product is torch.mm:
            report = check(train, model, opt, x)
            assert "after 3 steps\n" in str(report)
            assert {"model.up", "model.up.grad", "opt.state[model.down]['exp_avg']"} <= {*_paths(report)}
        else:
            first = r"\n  \* the first value that differs: unsummed = test_check\.unsummed\.default, at .*check\.py"
            with pytest.raises(ShardingError, match=first + r":\d+  return self\.product\(.*\): error"):
                check(train, model, opt, x)
        assert not opt.state
        assert model.up.grad is None
        assert torch.equal(model.up.full_tensor(), before)


def test_it_says_where_nothing_is_cut() -> None:
    with Mesh(data=2):
        assert "; but all devices do all of it: nothing says where" in str(check(lambda x: x + 1, torch.ones(2)))
        assert "all devices do" not in str(check(lambda x: x + 1, torch.ones(2), in_specs=("b@data",)))


class Attention(torch.nn.Module):
    """The bias of its keys cancels out: its gradient is what rounding leaves, and Adam makes steps of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0])
        return out


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_alone_does_is_no_difference(dtype: torch.dtype) -> None:
    def step(model: Any, opt: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    with sl.Mesh(data=4):
        model = sl.parallelize(Attention().to(dtype), strategy="fsdp")
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        opt, x = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-12), torch.randn(8, 6, 16, dtype=dtype)
        report = sl.check(step, model, opt, x)
        rounded = {leaf.path.removesuffix(" (nothing shared)") for leaf in report.leaves if leaf.rounding}
        assert "model.attention.in_proj_bias" in rounded
        assert "rounding alone changes it by" in str(report)
        assert not rounded & {"result", "model.head.weight", "opt.state[model.head.weight]['exp_avg_sq']"}
        assert all(torch.equal(p.full_tensor(), was) for p, was in zip(model.parameters(), before, strict=True))
        with pytest.raises(sl.ShardingError, match="in_proj_bias"):  # who says a tolerance has it
            sl.check(step, model, opt, x, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_what_is_kept_by_parameter_has_one_name_on_one_device_and_on_many(make: Any) -> None:
    """Moments that the first step makes, and what the user keeps in a dict of his own."""
    with sl.Mesh(data=2):
        m = sl.parallelize(torch.nn.Linear(8, 8), {"weight": "f@data _", "bias": "..."})
        by_hand, kept = make(m.parameters()), {m.weight: torch.zeros(4)}

        def step(x: Tensor) -> Tensor:
            loss = m(x).square().mean()
            loss.backward()
            by_hand.step()
            by_hand.zero_grad()
            kept[m.weight] += loss.detach()
            return loss

        report = str(sl.check(step, torch.randn(8, 8), in_specs=("b@data _",)))
    assert "by_hand.state[tensor 0]" in report
