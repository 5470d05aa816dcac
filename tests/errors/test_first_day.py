"""What people get wrong on their first day: the error names their line, their names and the remedy, or it works."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib import Mesh, P, ShardingError, shard
from shardlib.nn.forward import EagerWarning

X, W = torch.arange(24.0).view(4, 6), torch.arange(48.0).view(6, 8) / 48
GRID = Mesh(data=2, tensor=2, rules={"batch": "data", "ff": "tensor"})
OTHER = Mesh(data=4)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def masked(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x if mask is None else x * mask


def keyword(x: Tensor, *, scale: Tensor) -> Tensor:
    return x * scale


# --- the mesh as an argument ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [None, GRID, OTHER])
def test_shard_takes_a_mesh(current: Mesh | None) -> None:
    if current is None:
        x = shard(X, "batch _", mesh=GRID)
    else:
        with current:
            x = shard(X, "batch _", mesh=GRID)
    assert (sl.typeof(x), x.mesh) == ("f32[4@data, 6]", GRID)
    assert torch.equal(x.full_tensor(), X)
    assert sl.typeof(shard(x, "_ f@tensor", mesh=GRID)) == "f32[4, 6@tensor]"


def test_a_traced_function_names_its_own_mesh() -> None:
    step = sl.jit(lambda x: shard(x * 2, "batch _", mesh=GRID))
    with GRID:
        assert sl.typeof(step(X)) == "f32[4@data, 6]"
        sl.check(lambda x: shard(x * 2, "batch _", mesh=GRID), X)
    for other in (OTHER, Mesh(data=2, tensor=2), Mesh.abstract(data=8)):
        with other, pytest.raises(ShardingError, match=r"is given Mesh\(data=2, tensor=2, .* the program runs on "):
            step.plan(X)


def test_without_a_mesh_on_purpose_a_named_mesh_is_not_used() -> None:
    with sl.no_mesh():
        assert shard(X, "batch _", mesh=GRID) is X


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: shard(X, "batch _", mesh="data"), "gets mesh='data'"),  # type: ignore[arg-type]
        (lambda: shard(shard(X, "b@data _", mesh=OTHER), "batch _", mesh=GRID), "x lives on Mesh(data=4)"),
    ],
)
def test_another_mesh_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ShardingError) as error:
        call()
    assert says in str(error.value)
    assert "mesh=mesh" in str(error.value) or "Remedy: give a Mesh" in str(error.value)


# --- as many specs as arguments ---------------------------------------------------------------------------------------

ONE = ("batch _",)
FEW: list[tuple[str, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any], str]] = [
    ("second", product, ONE, (X, W), {}, "  * w of shape [6, 8] has no entry"),
    ("list", product, list(ONE), (X, W), {}, "  * w of shape [6, 8] has no entry"),
    ("none", product, (), (X, W), {}, "  * x of shape [4, 6] has no entry\n  * w of shape [6, 8] has no entry"),
    ("by name", product, ONE, (X,), {"w": W}, "  * w of shape [6, 8] has no entry"),
    ("all by name", product, ONE, (), {"w": W, "x": X}, "  * w of shape [6, 8] has no entry"),
    ("a default by position", masked, ONE, (X, X), {}, "  * mask of shape [4, 6] has no entry"),
    ("a dict", lambda x, p: x @ p["a"] @ p["b"], ONE, (X, {"a": W, "b": W.T}), {}, "  * p with 2 tensors has no"),
    ("a builtin", torch.matmul, ONE, (X, W), {}, "  * args[1] of shape [6, 8] has no entry"),
    ("many", lambda *xs: sum(xs), ONE, (X, X, X), {}, "  * xs[1] of shape [4, 6] has no entry\n  * xs[2]"),
]  # fmt: skip


@pytest.mark.parametrize("door", ["call", "plan", "check"])
@pytest.mark.parametrize(("fn", "specs", "args", "named", "says"), [f[1:] for f in FEW], ids=[f[0] for f in FEW])
def test_an_argument_without_a_spec(
    door: str, fn: Any, specs: Any, args: Any, named: dict[str, Any], says: str
) -> None:
    step = sl.jit(fn, in_specs=specs)
    run = {"call": step, "plan": step.plan, "check": lambda *a, **k: sl.check(fn, *a, in_specs=specs, **k)}[door]
    with GRID, pytest.raises(ShardingError) as error:
        run(*args, **named)
    assert says in str(error.value)
    assert "Remedy: write None where the layout is to be inferred" in str(error.value)


@pytest.mark.parametrize(
    ("fn", "specs", "args", "named"),
    [
        (product, ("batch _", None), (X, W), {}),
        (product, ("batch _", "..."), (X,), {"w": W}),
        (product, {"x": "batch _"}, (X, W), {}),
        (product, None, (X, W), {}),
        (lambda x, n: x * n, ONE, (X, 2.0), {}),
        (lambda x, names: x, ONE, (X, ["a", "b"]), {}),
        (lambda x, module: module(x), ONE, (X, torch.nn.Linear(6, 8)), {}),
        (masked, ONE, (X,), {}),
        (masked, ONE, (X,), {"mask": X}),
        (keyword, ONE, (X,), {"scale": X}),
    ],
)
def test_an_argument_that_needs_no_spec(fn: Any, specs: Any, args: Any, named: dict[str, Any]) -> None:
    with GRID:
        out = sl.jit(fn, in_specs=specs)(*args, **named)
    torch.testing.assert_close(out.full_tensor(), fn(*args, **named))


LENGTHS: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    (
        "out_specs too few",
        lambda: sl.jit(lambda x: (x, x * 2), out_specs=ONE)(X),
        ("the result: the specs have a tuple of 1, the values a tuple of 2", "give each of the 2 values an entry"),
    ),
    (
        "shard_map too few",
        lambda: sl.shard_map(product, ONE, "batch _")(X, W),
        ("in_specs has 1 entries, the call has 2 arguments", "  * w has no entry", "they are x, w"),
    ),
    (
        "shard_map too many",
        lambda: sl.shard_map(product, ("batch _", P(), P()), "batch _")(X, W),
        ("in_specs has 3 entries, the call has 2 arguments", "  * 2: P() is for no argument"),
    ),
    (
        "shard_map out_specs",
        lambda: sl.shard_map(product, ("batch _", P()), ("batch _", P()))(X, W),
        ("  * the result: the specs have a tuple of 2, the values a Tensor",),
    ),
    (
        "shard_map a key",
        lambda: sl.shard_map(lambda p, x: x @ p["w"], ({"v": P()}, "batch _"), "batch _")({"w": W}, X),
        ("  * args[0] has no 'v'; it has 'w'",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), [x[1:] for x in LENGTHS], ids=[x[0] for x in LENGTHS])
def test_specs_of_another_length(call: Callable[[], Any], says: tuple[str, ...]) -> None:
    with GRID, pytest.raises(ShardingError) as error:
        call()
    for line in says:
        assert line in str(error.value)


def test_a_plan_is_one_line() -> None:
    with GRID:
        plan = sl.jit(product, in_specs=("batch _", "_ ff")).plan(X, W)
    assert repr(plan) == (
        "<plan of product on data=2, tensor=2 (4 devices, virtual): 0 collectives, 0 B sent per device, "
        "peak memory 176 B>"
    )


# --- values that are printed ------------------------------------------------------------------------------------------


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        print("value", x.sum().item())
        return x


LOG = logging.Logger("first_day")  # of no parent, and without a handler: it writes to stderr, past pytest

LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: print("value", x.sum().item()),
    "float": lambda x: print("value", str(float(x.sum()))),
    "int": lambda x: print("value", int(x.sum())),
    "f-string": lambda x: print(f"value {x.sum().item()}"),
    "f-string of digits": lambda x: print(f"value {x.sum():.3f}"),
    "percent": lambda x: print("value %.3f" % x.sum()),  # noqa: UP031
    "list": lambda x: print("value", x.tolist()),
    "numpy": lambda x: print("value", x.detach().numpy()),
    "shape": lambda x: print("value", x[x > 0].shape),
    "log": lambda x: LOG.warning("value %.3f", x.sum()),
    "logged item": lambda x: LOG.warning("value %s", x.sum().item()),
}


@pytest.mark.parametrize("with_numbers", [False, True])
@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_printed_before_a_value_is_refused(look: str, with_numbers: bool, capfd: Any) -> None:
    """An argument that is a number is a symbol while its function is traced; a tensor is none."""

    def step(x: Tensor, *numbers: float) -> Tensor:
        y = x * 2 if not numbers else x * numbers[0]
        LOOKS[look](y)
        return y

    with GRID, pytest.raises(ShardingError, match=r"test_first_day\.py"):
        sl.jit(step)(X, *([0.5] if with_numbers else []))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("door", ["module and optimizer", "module", "gradient"])
def test_nothing_is_printed_in_a_training_step(door: str, capfd: Any) -> None:
    model = nn.Sequential(Printing(), Printing()) if "module" in door else nn.Linear(6, 6)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print("value", loss.item())
        return loss

    def gradient(x: Tensor) -> Tensor:
        loss = x.square().sum()
        print("value", loss.item())
        return loss

    run = {
        "module and optimizer": lambda: sl.jit(step)(model, opt, X),
        "module": lambda: sl.jit(model)(X),
        "gradient": lambda: sl.jit(sl.grad(gradient))(X),
    }[door]
    with GRID, pytest.raises(ShardingError, match="needs the value of"):
        run()
    assert capfd.readouterr() == ("", "")


def test_an_error_of_logging_is_loggings(capfd: Any) -> None:
    """A wrong number of arguments is no look at a value."""

    def step(x: Tensor) -> Tensor:
        LOG.warning("%s", 1, 2)
        return x * 2

    with GRID:
        sl.jit(step)(X)
    assert "--- Logging error ---" in capfd.readouterr().err


def test_a_value_under_vmap_is_a_value() -> None:
    with (
        GRID,
        pytest.raises(ShardingError, match=r"needs the value of a tensor(.|\n)*values of tensors are known only"),
    ):
        sl.jit(sl.vmap(lambda x: x * x.sum().item()))(X)


# --- modules ----------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        out: Tensor = self.linear(x)
        return out


def test_a_module_that_runs_op_by_op_says_why_and_what_to_do() -> None:
    with GRID:
        model = sl.parallelize(Branching(), {})
    with pytest.warns(EagerWarning) as record:
        model(X)
    (warning,) = record
    head, rule, remedy = str(warning.message).split("\n")
    assert "in Branching.forward: if x.sum() > 0:: its ops run one by one" in head
    assert rule.startswith("Rule: Python runs once, on shapes; the values of tensors are known only when")
    assert remedy.startswith("Remedy: torch.where(condition, a, b) for an if;")
    assert "ignore::shardlib.EagerWarning" in remedy
    assert warning.filename == __file__, "it points at the call, not into torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings._setoption("ignore::shardlib.EagerWarning")  # type: ignore[attr-defined]
        sl.parallelize(Branching(), {}, mesh=GRID)(X)


def test_a_wrong_shape_in_a_parallelized_module() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))
    with pytest.raises(RuntimeError) as plain:
        model(X)
    sl.parallelize(model, {}, mesh=GRID)
    with pytest.raises(RuntimeError) as error:
        model(X)
    message = str(error.value)
    assert message.startswith(f"torch refuses linear: {plain.value}:\n")
    for line in ("test_first_day.py", "  * in 1.1, a Linear", "  * Linear.weight is float32[2, 6]"):
        assert line in message
    assert message.endswith(
        "Rule: shapes and dtypes are those of one device; in a shard_map body, of one shard\n"
        "Remedy: mend the line: plain torch refuses these operands, too"
    )


class Dropping(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.linear, self.looks = nn.Linear(6, 64), looks

    def forward(self, x: Tensor) -> Tensor:
        y = torch.dropout(self.linear(x), 0.5, True)
        return y * 2 if self.looks and y.abs().sum() > 0 else y


@pytest.mark.filterwarnings("ignore::shardlib.EagerWarning")
@pytest.mark.parametrize("looks", [False, True])
def test_dropout_is_compared_as_the_readme_says(looks: bool) -> None:
    plain = Dropping(looks)

    def drawn(mesh: Mesh | None) -> Tensor:
        model = plain if mesh is None else sl.parallelize(copy.deepcopy(plain), {}, mesh=mesh)
        torch.manual_seed(0)
        out = model(X)
        return out if mesh is None else out.full_tensor()

    one = drawn(Mesh(data=1))
    torch.testing.assert_close(drawn(GRID), one)
    torch.testing.assert_close(drawn(Mesh(data=4)), one)
    assert not torch.equal(drawn(None) == 0, one == 0)
    if looks:
        with sl.global_random():
            torch.testing.assert_close(drawn(None), one)
    else:
        with GRID:
            sl.check(plain, X)


# --- the first program ------------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
PLACED = sl.parallelize(copy.deepcopy(MODEL), {"0.weight": "ff _"}, mesh=GRID)
SPEC = {"0.weight": "ff _"}


def _optimizer_first() -> None:
    model = copy.deepcopy(MODEL)
    opt = torch.optim.AdamW(model.parameters())
    sl.parallelize(model, SPEC, mesh=GRID)
    model(X).sum().backward()
    opt.step()


MISTAKES: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a spec too short", lambda: shard(X, "batch"), ("the spec has 1 dim, the tensor has 2 dims",)),
    ("an axis that is not there", lambda: shard(X, "a@dat _"), ("no axis 'dat'; did you mean 'data'?",)),
    ("an axis twice", lambda: shard(X, "a@data b@data"), ("axis 'data' is used by dim 0 `a@data` and by dim 1",)),
    ("commas", lambda: shard(X, "batch, ff"), ("dims are separated by spaces",)),
    ("a list as a spec", lambda: shard(X, ["data", None]), ("is not a spec", "a P(...)")),  # type: ignore[arg-type]
    ("a rule's name in P", lambda: shard(X, P("batch")), ("no axis 'batch'; 'batch' is a name with a rule",)),
    ("a list of tensors", lambda: shard([X, X], "batch _"), ("is a list\n", "torch.stack(x)")),  # type: ignore[arg-type]
    ("a list of numbers", lambda: shard([1.0], "_"), ("is [1.0], a list", "torch.tensor(x)")),  # type: ignore[arg-type]
    ("a module", lambda: shard(MODEL, "_ _"), ("is a Sequential", "sl.parallelize(module")),  # type: ignore[arg-type]
    ("another device", lambda: shard(X, "batch _").cuda(), ("goes to cuda", "whose devices are cpu")),
    ("a call that is jitted", lambda: sl.jit(MODEL(X)), ("not sl.jit(f(x))",)),
    ("a size in text", lambda: Mesh(data="2"), ("axis 'data' has size '2'",)),  # type: ignore[arg-type]
    ("an optimizer first", _optimizer_first, ("parameter 0 was Sequential.0.weight", "make it after parallelize")),
    ("a pattern of nothing", lambda: sl.parallelize(MODEL, {"0.wieght": "ff _"}), ("nearest name is '0.weight'",)),
    ("a strategy", lambda: sl.parallelize(MODEL, SPEC, strategy="fdsp"), ("'fdsp' is no strategy", "fsdp")),
    ("arguments in another order", lambda: sl.parallelize(GRID, MODEL), ("the module is of <class 'shardlib",)),  # type: ignore[arg-type]
    ("suggest without a mesh", lambda: sl.suggest(MODEL, X), ("a Tensor as its mesh", "sl.current_mesh()")),  # type: ignore[arg-type]
    ("a list as a batch", lambda: PLACED([X]), ("must be Tensor, not list", "test_first_day.py", "model(*batch)")),
    ("another dtype", lambda: copy.deepcopy(PLACED).half()(X), ("must have the same dtype", "test_first_day.py")),
    ("another width", lambda: PLACED(X[:, :5]), ("cannot be multiplied (4x5 and 6x8)", "in 0, a Linear")),
    ("DataParallel", lambda: nn.DataParallel(PLACED)(X), ("leave the wrapper out",)),
    ("full_tensor inside", lambda: sl.jit(lambda x: x.full_tensor())(X), ("call .full_tensor() outside",)),
    ("a mask", lambda: sl.jit(lambda x: x[x > 0])(X), ("x.where(mask, 0)",)),
    ("psum outside", lambda: sl.psum(X, "data"), ("call it in fn of sl.shard_map",)),
    ("two meshes", lambda: shard(X, "a@data _", mesh=OTHER) + shard(X, "batch _"), ("takes tensors on 2 meshes",)),
]  # fmt: skip


@pytest.mark.parametrize(("run", "says"), [x[1:] for x in MISTAKES], ids=[x[0] for x in MISTAKES])
def test_a_first_mistake_is_explained(run: Callable[[], Any], says: tuple[str, ...]) -> None:
    with GRID, pytest.raises(ShardingError) as error:
        run()
    for line in says:
        assert line in str(error.value), str(error.value)


RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "numpy": lambda x, model: x.numpy().sum(),
    "item in a loop": lambda x, model: sum(model(x[:2] * i).sum().item() for i in range(3)),
    "compared with a plain tensor": lambda x, model: torch.allclose(x, X) and bool((x == X).all()),
    "batches of a loader": lambda x, model: [model(b).sum().item() for b in torch.utils.data.DataLoader(X, 3)],
    "another dtype": lambda x, model: model.to(torch.float64)(x.double()).sum().item(),
    "no_grad": lambda x, model: torch.no_grad()(model)(x).sum().item(),
    "compiled": lambda x, model: torch.compile(model, backend="eager")(x).sum().item(),
    "gradients added up": lambda x, model: (
        [model(x).sum().backward() for _ in range(2)], float(model[0].weight.grad.sum()))[1],
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_a_first_habit_works(what: str) -> None:
    model = copy.deepcopy(MODEL)
    with GRID:
        ours = RIGHT[what](shard(X, "batch _"), sl.parallelize(copy.deepcopy(model), SPEC))
    assert ours == pytest.approx(RIGHT[what](X, model), rel=1e-5)


# --- a mesh beside the `with` block -----------------------------------------------------------------------------------


def test_from_local_takes_a_mesh() -> None:
    rows = [X[:2], X[2:]]
    pair = Mesh(data=2)
    with OTHER:
        assert sl.from_local(rows, "batch@data _", mesh=pair).mesh == pair
    assert torch.equal(sl.from_local(rows, "batch@data _", mesh=pair).full_tensor(), X)
    with pytest.raises(ShardingError, match=r"is outside any mesh\n.*\nRemedy: .*, or mesh= with devices"):
        sl.from_local(rows, "batch@data _")
    with pytest.raises(ShardingError, match=r"no devices\nRule: shards lie on the devices of a mesh\nRemedy: "):
        sl.from_local(rows, "batch@data _", mesh=Mesh.abstract(data=2))


def test_a_model_of_another_mesh_is_called_on_its_own() -> None:
    step = sl.jit(lambda x: PLACED(x).sum())
    with OTHER, pytest.raises(ShardingError, match="takes tensors of another mesh") as error:
        step(X)
    assert "make the call inside `with` their mesh" in str(error.value)
    with GRID:
        torch.testing.assert_close(step(X).full_tensor(), MODEL(X).sum())


def test_parallelize_for_another_mesh(tmp_path: Path) -> None:
    with pytest.raises(ShardingError, match=r"finds parameters on another mesh(.|\n)*or a new module; sl\.Checkpoints"):
        sl.parallelize(PLACED, {}, strategy="fsdp", mesh=OTHER)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(1, {"model": PLACED})
    moved = sl.parallelize(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), {}, strategy="fsdp", mesh=OTHER)
    checkpoints.load({"model": moved})
    torch.testing.assert_close(moved(X).full_tensor(), MODEL(X))


def test_a_shape_of_a_shard_is_not_called_that_of_one_device() -> None:
    with GRID, pytest.raises(ShardingError) as error:
        sl.shard_map(lambda x: x.view(4, 6), in_specs="n@data _", out_specs="n@data _")(X)
    assert "one device, too" not in str(error.value)
    assert "in a shard_map body, of one shard" in str(error.value)
