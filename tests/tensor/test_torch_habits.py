"""What torch's users do with tensors beside arithmetic, on ShardedTensors: as on plain tensors, or refused in words."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)
from torch.nn.utils import prune
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib import Mesh, ShardedTensor, ShardingError, shard
from shardlib.distributed import comm_counting
from tests.helpers.oracle import same
from tests.helpers.ranks import Pool, apart, heard, only, run_ranks
from tests.helpers.versions import HAS_FAKE_QUANTIZED

W = torch.arange(24.0).view(4, 6) / 7 - 1


def placed(dtype: torch.dtype = torch.float32, spec: str = "a@data b@tensor") -> ShardedTensor:
    return shard(W.to(dtype).clone(), spec)


@pytest.fixture(autouse=True)
def _mesh():
    with Mesh(data=2, tensor=2):
        yield


def refusal(fn: Callable[[], Any]) -> str:
    with pytest.raises(ShardingError) as caught:
        fn()
    return str(caught.value)


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY: dict[str, Callable[[Any], Any]] = {
    "address": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage().resize_(0),
    "typed storage": lambda x: x.storage().tolist(),
    "private storage": lambda x: x._typed_storage(),
    "share_memory_": lambda x: x.share_memory_(),
    "pin_memory": lambda x: x.pin_memory(),
    "dlpack": lambda x: x.__dlpack__(),
    "dlpack device": lambda x: x.__dlpack_device__(),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "numpy's from_dlpack": lambda x: np.from_dlpack(x),
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "a module's share_memory": lambda x: _linear(x).share_memory(),
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_tensor_in_pieces_shows_no_memory(name):
    message = refusal(lambda: MEMORY[name](placed()))
    assert message.startswith("f32[4@data, 6@tensor] ")
    assert "Rule: a ShardedTensor has no storage of its own" in message


def test_plain_tensors_still_go_out_by_dlpack():
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(W)), W)


def _meta() -> list[str]:
    with Mesh(data=2):
        x = shard(torch.empty(4, 6, device="meta"), "a@data b")
        assert (x + 1).is_meta
        assert x.shards[0].data.shape == (2, 6)
        return [refusal(call) for call in (lambda: x.full_tensor(), lambda: sl.jit(lambda x: x.sum())(x))]


def _with_data(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x.data = value
    return x


DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain tensor's": (
        lambda: _with_data(W.clone(), placed()),
        "the data of a plain tensor of shape [4, 6] is",
    ),
    "a parameter's": (lambda: _with_data(nn.Parameter(W.clone()), placed()), "nn.Parameter(value)"),
    "of another dtype": (lambda: _with_data(W.clone(), placed(torch.float64)), "x.copy_(value)"),
    "a placed one's": (lambda: _with_data(placed(), W.clone()), "a ShardedTensor stays one"),
    "in a trace": (
        lambda: sl.jit(lambda x: _with_data(x, x[0]))(placed()),
        "sets the data of a tensor to another shape",
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data_stays_of_its_kind(name):
    fn, text = DATA[name]
    assert text in refusal(fn)


@pytest.mark.parametrize("x", [nn.Parameter(W.clone()), None])
def test_data_that_is_set_in_a_trace_is_a_write(x):
    x = nn.Parameter(placed()) if x is None else x
    step = sl.jit(lambda y: _with_data(x, y * 2) + 1)
    for i in range(2):
        y = W + i
        torch.testing.assert_close(_full(step(y)), y * 2 + 1)
        torch.testing.assert_close(_full(x.detach()), y * 2)


MADE: dict[str, Callable[[Any], Any]] = {
    "empty_like": lambda x: torch.empty_like(x, device="cpu"),
    "zeros_like": lambda x: torch.zeros_like(x, device="cpu"),
    "of another dtype": lambda x: torch.ones_like(x, device="cpu", dtype=torch.float64),
    "turned": lambda x: torch.zeros_like(x.t(), device="cpu").t(),
    "drawn": lambda x: torch.randn_like(x, device="cpu"),
    "filled": lambda x: torch.empty_like(x, device="cpu").copy_(W),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_meta_tensor_lives_where_it_says(name):
    x = shard(W.to("meta"), "a@data b@tensor")
    made = MADE[name](x)
    assert made.spec == x.spec
    assert {p.device.type for p in made._locals} == {made.device.type} == {"cpu"}
    assert (made + 1).full_tensor().shape == W.shape
    assert torch.empty_like(x).is_meta
    assert x.new_zeros(3, device="cpu").device.type == "cpu"


def test_a_module_from_meta_keeps_its_layout():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    for m in net:
        for name, p in m.named_parameters():
            setattr(m, name, nn.Parameter(shard(p.detach(), "a@tensor ...")))
    net.to_empty(device="cpu")
    assert {str(p.spec) for p in net.parameters()} == {"a@tensor", "a@tensor _@()"}
    for p in net.parameters():
        nn.init.ones_(p)
    assert net(torch.ones(2, 6)).full_tensor().tolist() == [[29.0] * 6] * 2


class Table(nn.Module):
    """Reads its parameter at places, and makes tensors where its own are."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 4))
        self.register_buffer("places", torch.zeros(6, 6, dtype=torch.int64))

    def forward(self, x):
        there = self.table.device
        ones = (
            torch.ones(4, device=there) + self.table.new_tensor([1.0, 2, 3, 4]) + torch.tensor([1.0] * 4, device=there)
        )
        return x @ self.table[self.places].sum(1) + ones


@pytest.mark.parametrize("parallelized", [False, True])
def test_a_module_on_meta_has_the_plan_of_one_that_is_not(parallelized):
    def step(m, x):
        m(x).square().mean().backward()

    plans = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            m, x = Table(), torch.zeros(8, 6)
        with Mesh(data=2):
            if parallelized:
                sl.parallelize(m, strategy="ddp")
            plans.append(sl.jit(step, in_specs=(None, "b@data _")).plan(m, x).full)
    assert plans[0] == plans[1]


NO_VALUES: dict[str, Callable[[Any], Any]] = {
    "to": lambda x: x.to("cpu"),
    "copy_": lambda x: placed().copy_(x),
    "copy_ of a plain one": lambda x: placed().copy_(W.to("meta")),
    "add": lambda x: placed() + x,
    "mm": lambda x: x @ W.t(),
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_meta_tensors_have_no_values(name):
    with pytest.raises((ShardingError, NotImplementedError), match=r"takes meta tensors and others|no data"):
        NO_VALUES[name](shard(W.to("meta"), "a@data b"))


@pytest.mark.long
@pytest.mark.ranks
def test_meta_tensors_on_ranks_are_not_sent():
    moved, called = only(run_ranks(_meta, 2))
    assert moved.startswith("redistribute on Mesh(data=2) communicates, and is given tensors without values:")
    assert "operand 0 of shape [4, 6]" in moved
    assert "sl.materialize(module)" in moved
    assert called.startswith("<lambda> runs on Mesh(data=2), whose devices are cpu:\n  * x of shape [4, 6] is on meta")


def _traced_collective() -> str:
    with Mesh(data=2):
        return refusal(lambda: sl.jit(_functional)(torch.ones(4, 6)))


@pytest.mark.ranks
def test_collectives_of_torch_in_a_traced_function_are_refused():
    for message in run_ranks(_traced_collective, 2):
        assert message.startswith("a jitted function calls collectives of torch.distributed")


# --- dtypes, copies, state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float64, torch.int64])
@pytest.mark.parametrize("spec", ["a@data b@tensor", "a b", "a b@data", "a b@tensor"])
def test_views_as_another_dtype(dtype, spec):
    x = placed(spec=spec)
    assert torch.equal(x.view(dtype).full_tensor(), W.view(dtype))
    assert torch.equal(sl.jit(lambda x: x.view(dtype))(x).full_tensor(), W.view(dtype))


def test_a_transposed_view_as_another_dtype():
    f = lambda x: x.t().view(torch.int32)
    assert torch.equal(f(placed()).full_tensor(), f(W))
    assert torch.equal(sl.jit(f)(placed()).full_tensor(), f(W))


def _linear(weight: torch.Tensor) -> nn.Linear:
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    "wrap", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal,
             nn.utils.parametrizations.weight_norm]
)  # fmt: skip
def test_parametrizations(wrap):
    plain = _linear(W.clone())
    sharded = copy.deepcopy(plain)
    sharded.weight = nn.Parameter(placed())
    wrap(plain), wrap(sharded)
    for mine, theirs in zip(sharded.buffers(), plain.buffers(), strict=True):
        mine.copy_(theirs.clone())  # they begin with random numbers
    x = torch.ones(2, 6)
    for module in plain, sharded:
        module(x).square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_full(mine.grad), theirs.grad, atol=1e-4, rtol=1e-4)


def _full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


@pytest.mark.parametrize("inf", [False, True])
def test_grad_scaler(inf):
    found = []
    for x in W.clone(), placed():
        w = x.requires_grad_()
        scaler, opt = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), torch.optim.SGD([w], lr=0.1)
        scaler.scale((w * w).sum() * (float("inf") if inf else 1)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_([w], 1.0)
        scaler.step(opt)
        scaler.update()
        found.append((_full(w.detach()), scaler.get_scale()))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == (2.0 if inf else 8.0)


def _loads(pipe, path):
    pipe.send(torch.load(path)["x"].full_tensor().sum().item())


@pytest.mark.long
@pytest.mark.ranks
def test_torch_load_in_a_fresh_process(tmp_path):
    torch.save({"x": placed()}, tmp_path / "x.pt")
    process, pipe = apart(_loads, tmp_path / "x.pt")
    assert heard(pipe) == pytest.approx(float(W.sum()))
    process.join()


def test_safetensors_takes_whole_tensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="it comes with transformers")
    bytes_ = safetensors.save({"w": placed().full_tensor(), "r": placed(spec="a b").full_tensor()})
    assert torch.equal(safetensors.load(bytes_)["w"], W)
    state = {"w": placed(), "r": placed(spec="a b"), "other": placed()}
    tied = {**state, "same": state["w"].detach()}
    for refused in (state, tied):
        message = refusal(lambda refused=refused: safetensors.save_file(refused, tmp_path / "x"))
        assert "Remedy: save full tensors, {name: x.full_tensor() for name, x in state.items()}" in message
    assert not list(tmp_path.iterdir())


IDENTITIES = {
    "safetensors": lambda: __import__("safetensors.torch").torch.storage_ptr,
    "transformers": lambda: __import__("transformers.pytorch_utils").pytorch_utils.id_tensor_storage,
    "hub": lambda: __import__("huggingface_hub").get_torch_storage_id,
    "accelerate": lambda: __import__("accelerate.utils.modeling").utils.modeling.id_tensor_storage,
    "address": lambda: lambda x: x.untyped_storage().data_ptr(),
    "storage": lambda: lambda x: x.storage().data_ptr(),
    "_cdata": lambda: lambda x: x.untyped_storage()._cdata,
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_libraries_see_which_tensors_share_memory(name):
    try:
        identity = IDENTITIES[name]()
    except ImportError:
        pytest.skip(f"{name} is not installed")
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    module[2].weight = module[0].weight
    sl.parallelize(module, strategy="fsdp", mesh=Mesh(data=8))  # of a bias, half of the shards are empty
    for state in (module.state_dict(), module.state_dict(keep_vars=True)):
        ids = {key: identity(x) for key, x in state.items()}
        assert ids["0.weight"] == ids["2.weight"]
        assert len(set(ids.values())) == 5
        assert 0 not in ids.values()
    x = next(module.parameters())
    assert (x.untyped_storage().nbytes(), x.storage().size()) == (64, 16)
    assert "has no storage, and .tolist is read" in refusal(lambda: x.untyped_storage().tolist())


def test_accelerate_drops_no_parameter(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sl.parallelize(module, strategy="fsdp", mesh=Mesh(data=2))
    accelerate.PartialState(cpu=True)
    clean = accelerate.utils.other.clean_state_dict_for_safetensors
    assert sorted(clean(module.state_dict())) == ["0.bias", "0.weight", "1.bias", "1.weight"]


OLD: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.4),
}


def _stack(wrap: str, place: bool) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 6))
    if place:
        module[2].weight = nn.Parameter(shard(module[2].weight.detach(), "a@tensor b"))
    OLD[wrap](module[0])
    return module


@pytest.mark.parametrize("reentrant", [False, True])
def test_batches_that_are_counted_in_a_checkpoint(reentrant):
    """Twice, as in plain torch: it runs again."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None)).double()
    mine = copy.deepcopy(plain)
    again = lambda m, x: checkpoint(m, x, use_reentrant=reentrant).pow(3).sum().backward()
    step = sl.jit(again)
    for i in range(3):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_()
        again(plain, x)
        step(mine, x.detach().requires_grad_())
    for (name, x), y in zip(mine.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(_full(x), y, msg=name)
    torch.testing.assert_close(_full(mine[0].weight.grad), plain[0].weight.grad)


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", OLD)
@pytest.mark.parametrize("place", [False, True])
def test_modules_that_make_their_weights_and_count_their_batches(wrap, place):
    plain, mine = _stack(wrap, False), _stack(wrap, place)
    step = sl.jit(mine)
    for training in (True, True, True, False):
        for module, fn in ((plain, plain), (mine, step)):
            module.train(training)
            module.zero_grad()
            fn(W).square().mean().backward()
            with torch.no_grad():
                for p in module.parameters():
                    p -= 0.1 * p.grad
        for (name, x), y in zip(mine.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(_full(x), y, msg=name)
    assert len(step.retraces) <= 3


def test_results_that_retain_their_gradient_are_refused():
    def fn(x, zero=0):
        h = x * 2 + zero
        if not isinstance(zero, torch.Tensor):
            h.retain_grad()
        return h, h.sin().sum()

    assert "returns tensors that retain their gradient" in refusal(lambda: sl.jit(fn)(placed().requires_grad_()))
    zero = torch.zeros_like(W).requires_grad_()
    sl.jit(fn)(placed(), zero)[1].backward()  # as the refusal says
    torch.testing.assert_close(zero.grad, (W * 2).cos())


# --- numpy, lists -----------------------------------------------------------------------------------------------------


def _read_only() -> np.ndarray:
    a = W.numpy().copy()
    a.flags.writeable = False
    return a


ARRAYS = {
    "array": lambda: W.numpy().copy(),
    "read-only": _read_only,
    "backwards": lambda: W.numpy()[::-1],
    "transposed": lambda: W.numpy().T,
    "integers": lambda: np.arange(6).reshape(2, 3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_arrays_are_tensors(name):
    a = ARRAYS[name]()
    expected = torch.from_numpy(a.copy())
    assert torch.equal(sl.jit(lambda x: x + 1)(a).full_tensor(), expected + 1)
    assert torch.equal(sl.jit(lambda d: d["x"] + 1)({"x": a}).full_tensor(), expected + 1)
    assert torch.equal(shard(a, "a b").full_tensor(), expected)


def test_a_numpy_array_is_read_at_every_call_and_kept_by_none():
    a, f = W.numpy().copy(), sl.jit(lambda x: x * 2)
    x = shard(a, "a@data b")
    f(a)
    a[:] = 5
    assert torch.equal(f(a).full_tensor(), torch.full((4, 6), 10.0))
    assert torch.equal(x.full_tensor(), W)
    assert not f.retraces


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "as_tensor": lambda a: torch.as_tensor(a).add_(1),
    "asarray": lambda a: torch.asarray(a)[1:].mul_(3),
    "in place": lambda a: a.__iadd__(2),
    "an item": lambda a: a.__setitem__(0, 5),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_to_numpy_arrays_come_back(name):
    f = sl.jit(lambda d: (WRITTEN[name](d["a"]), torch.ones(2))[1])
    for make in (lambda: np.arange(4.0), lambda: np.arange(12.0).reshape(4, 3)[:, 1]):
        expected, a = make(), make()
        for _ in range(2):
            WRITTEN[name](expected)
            f({"a": a})
            assert np.array_equal(a, expected)


def test_a_numpy_array_that_is_passed_twice_is_one():
    def fn(a, b, c):
        torch.as_tensor(a).add_(1)
        return torch.as_tensor(b) * torch.as_tensor(c).sum()

    a, one = np.arange(4.0), np.arange(4.0)
    assert torch.equal(sl.jit(fn)(a, a, c=a).full_tensor(), fn(one, one, one))
    assert np.array_equal(a, one)
    ids = np.arange(5.0)
    assert torch.equal(sl.jit(lambda x, y: x * y)(ids[:-1], ids[1:]).full_tensor(), torch.tensor([0.0, 2, 6, 12]))


@pytest.mark.parametrize("take", [torch.as_tensor, torch.from_numpy])
def test_writes_to_a_numpy_array_that_is_closed_over_are_refused(take):
    closed = np.zeros(3)
    message = refusal(lambda: sl.jit(lambda x: (take(closed)[1:].add_(1), x)[1])(W))
    assert "writes to a numpy array that it closes over:\n  * at " in message
    assert not closed.any()
    assert sl.jit(lambda x: (take(closed).clone().add_(1), x)[1])(W).shape == W.shape
    assert sl.jit(lambda x: (torch.as_tensor(np.zeros(2)).add_(1), x)[1])(W).shape == W.shape


def _filled(x, a):
    torch.from_numpy(a).fill_(3.0)
    return x + torch.from_numpy(a)


@pytest.mark.parametrize("fn", [lambda x, a: x + torch.from_numpy(a), lambda x, a: x * torch.asarray(a), _filled])
def test_from_numpy_takes_what_stands_for_an_array(fn):
    a, one = W.numpy().copy(), W.numpy().copy()
    same(sl.jit(fn)(placed(), a), fn(W, one))
    assert np.array_equal(a, one)


FOR_ARRAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "astype": (lambda x, a: x + torch.from_numpy(a.astype(np.float32)), "reads .astype of a tensor, as of an array"),
    "sum": (lambda x, a: x + np.sum(a), "gives a tensor to a function of numpy"),
    "from numpy": (lambda x, a: x + _from_numpy(a), "gives a tensor to from_numpy"),
    "asarray": (lambda x, a: x + np.asarray(a), "turns a tensor into a numpy array"),
}
_from_numpy = torch.from_numpy


@pytest.mark.parametrize("name", FOR_ARRAYS)
def test_what_only_arrays_can_do_is_refused(name):
    fn, what = FOR_ARRAYS[name]
    message = refusal(lambda: sl.jit(fn)(placed(), W.numpy().copy()))
    assert what in message
    assert "test_torch_habits.py" in message
    assert torch.from_numpy is _from_numpy


def _divided(x, s):
    with np.errstate(divide="ignore"):
        return x * float(s / 0)


def _squared(x, s):
    with np.errstate(over="ignore"):
        return x * float(s * s)


NUMPYS: dict[str, tuple[Callable[..., Any], Any]] = {
    "product": (lambda x, s: x * s, np.float32(2)),
    "from the left": (lambda x, s: s * x, np.float64(2)),
    "as a tensor": (lambda x, s: x.half() * torch.as_tensor(s), np.float64(2)),
    "class": (lambda x, s: x * isinstance(s, np.floating), np.float32(2)),
    "dtype": (lambda x, s: x * (s.dtype == np.int16), np.int16(2)),
    "overflow": (_squared, np.uint8(20)),
    "infinite": (_divided, np.float32(1)),
    "decision": (lambda x, s: x if s else -x, np.bool_(False)),
    "returned": (lambda x, s: (x, s + s), np.float32(2)),
}


@pytest.mark.parametrize("name", NUMPYS)
def test_numpy_numbers_are_numpys(name):
    fn, s = NUMPYS[name]
    closed = sl.jit(lambda x: fn(x, s))
    for step in (sl.jit(fn), lambda x, s: closed(x)):
        for _ in range(2):
            same(step(placed(), s), fn(W, s))
        s = type(s)(3)
        same(step(placed(), s), fn(W, s))


def test_numpy_numbers_count_by_their_values():
    step = sl.jit(lambda x, s: x * s)
    for s in (1.5, 1.5, 2.5, 2.5, 1.5):
        same(step(W, np.float32(s)), W * s)
    assert step.retraces == ["s: numpy's float32 1.5 -> numpy's float32 2.5"]


NO_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: sl.jit(lambda x: x)(np.array(["a"])), "an argument of <lambda> is a numpy array of dtype <U1"),
    "a list": (lambda: shard([[1.0, 2.0]], "a b"), "the x of shard(x, 'a b') is [[1.0, 2.0]], a list"),
    "no dims": (lambda: sl.jit(lambda x: x)(np.array(1.5)), "is a numpy array of no dims, of dtype float64"),
    "a mask": (lambda: sl.jit(lambda x: x)(np.ma.array([1.0])), "is a MaskedArray of shape [1]"),
    "a number": (lambda: shard(1.0, ""), "is 1.0, a float"),
    "nothing": (lambda: shard(None, ""), "is a NoneType"),
    "a module": (lambda: shard(nn.Linear(2, 2), "a b"), "a Linear"),
    "a list in jit": (lambda: sl.jit(lambda x: torch.sin(x))([1.0]), "'input' (position 1) must be Tensor, not list"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_named(name):
    fn, text = NO_TENSORS[name]
    assert text in refusal(fn)


# --- a traced function ------------------------------------------------------------------------------------------------


def _mismatch(x, w):
    hidden = x + 1
    return hidden @ w


MISTAKES: dict[str, tuple[Callable[..., Any], type[Exception], list[str]]] = {
    "matmul": (_mismatch, RuntimeError, ["return hidden @ w", "hidden is float32[4, 6]", "w is float32[4, 6]"]),
    "view": (lambda x, w: x.view(5, 5), RuntimeError, ["x.view(5, 5)", "x is float32[4, 6]"]),
    "add": (lambda x, w: x + w[:3, :2], RuntimeError, ["x is float32[4, 6]", "an operand is float32[3, 2]"]),
    "index": (lambda x, w: x[7], IndexError, ["x[7]", "x is float32[4, 6]"]),
    "cat": (lambda x, w: torch.cat([x, w.t()]), RuntimeError, ["torch.cat", "x is float32[4, 6]"]),
    "einsum": (lambda x, w: torch.einsum("ij,jk->ik", x, w), RuntimeError, ["torch.einsum", "w is float32[4, 6]"]),
    "a module": (lambda x, w: nn.Linear(5, 2)(x), RuntimeError, ["nn.Linear(5, 2)(x)", "Linear.bias is float32[2]"]),
    "a gradient": (lambda x, w: sl.grad(lambda x: _mismatch(x, w).sum())(x), RuntimeError, ["hidden is float32[4, 6]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_what_torch_refuses_is_said_on_the_users_line(name, caplog):
    fn, kind, texts = MISTAKES[name]
    with pytest.raises(ShardingError) as caught:
        sl.jit(fn).plan(W, W)
    assert isinstance(caught.value, kind)
    head = str(caught.value).partition("\n")[0]
    assert head.startswith("torch refuses ")
    assert not head.endswith(".:")
    assert "trace" not in str(caught.value)
    with pytest.raises(kind) as plain:
        fn(W, W)
    words = str(plain.value).partition("\n")[0].rstrip(".")
    assert words in head, "torch's own words, as on one device"
    for text in (*texts, "test_torch_habits.py", "Rule: shapes and dtypes are those of one device"):
        assert text in str(caught.value)
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")], "the error says it all"


def test_an_error_of_the_user_stays_as_it_is():
    def fn(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        sl.jit(fn)(W)


@pytest.mark.parametrize("name", ["full_tensor", "redistribute", "to_local", "shards", "mesh", "spec", "sharding"])
def test_members_of_a_sharded_tensor_in_a_traced_function(name):
    message = refusal(lambda: sl.jit(lambda x: getattr(x, name))(placed()))
    assert message.startswith(f"the traced function reads .{name} of a tensor")
    assert "test_torch_habits.py" in message


def test_whether_a_value_has_a_member_may_be_asked():
    assert torch.equal(sl.jit(lambda x: x if hasattr(x, "full_tensor") else x + 1)(placed()).full_tensor(), W + 1)


def _sections(x):
    with record_function("outer"):
        y = x @ x.t()
        with record_function("inner"):
            y = y.softmax(-1)
        y = y @ x
    return y.sum() * 2


def test_record_function_makes_sections_of_the_plan():
    x = placed()
    step = sl.jit(_sections)
    lines = [line.strip() for line in step.plan(x).full.splitlines()]
    found = [line for line in lines if line.startswith("[")]
    assert found == ["[outer]", "[outer > inner]", "[outer]", "[outside sections]"]
    torch.testing.assert_close(step(x).full_tensor(), _sections(W))
    torch.testing.assert_close(sl.jit(sl.grad(_sections))(x).full_tensor(), sl.grad(_sections)(W))


def test_an_optimizer_steps_in_a_traced_function():
    def step(w, x):
        w = w.clone().requires_grad_()
        opt = torch.optim.AdamW([w], lr=0.1)
        (w * x).sum().backward()
        opt.step()
        return w.detach()

    torch.testing.assert_close(sl.jit(step)(placed(), placed()).full_tensor(), step(W, W))


def _seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(4, 6)


def _forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.seed()
        return x + torch.rand(4, 6)


def _seeded_last(x):
    y = x + torch.rand(4, 6)
    torch.manual_seed(3)
    return y


def _set(x, state=torch.get_rng_state()):  # noqa: B008 - a state from outside is what is meant
    torch.set_rng_state(state)
    return x + torch.rand(4, 6)


@pytest.mark.parametrize("fn", [_seeded, _forked, _seeded_last, _set])
def test_a_seed_inside_a_traced_function_is_refused(fn):
    before = torch.get_rng_state()
    assert "sets the seed of torch's generator" in refusal(lambda: sl.jit(fn)(placed()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_is_honored_in_a_traced_function():
    g, f = torch.Generator(), sl.jit(lambda x: x + torch.rand(4, 6, generator=g))
    assert not torch.equal(f(placed()).full_tensor(), f(placed()).full_tensor())
    g.manual_seed(3)
    torch.manual_seed(7)
    again = f(placed()).full_tensor()
    g.manual_seed(3)
    torch.manual_seed(8)
    assert torch.equal(again, f(placed()).full_tensor())


@pytest.mark.parametrize("go", [lambda x: x.cuda(), lambda x: x.to("cuda"), lambda x: _linear(x).to("cuda")])
def test_a_device_that_the_mesh_has_not_is_refused(go):
    message = refusal(lambda: go(placed()))
    assert message.startswith("f32[4@data, 6@tensor] goes to cuda")
    assert "Mesh(..., device='cuda')" in message


# --- dtypes and numbers that torch's kernels do not take --------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
PAIRS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (lambda a, b: a @ b, (4, 4), (4, 4)),
    "mv": (torch.mv, (4, 4), (4,)),
    "dot": (torch.dot, (4,), (4,)),
    "bmm": (torch.bmm, (2, 4, 4), (2, 4, 4)),
    "linear": (F.linear, (2, 4, 4), (4, 4)),
    "bias": (lambda x, b: F.linear(x, x, b), (4, 4), (4,)),
    "addmm": (lambda a, b: torch.addmm(a, b, b), (4, 4), (4, 4)),
    "baddbmm": (lambda a, b: torch.baddbmm(a, a, b), (2, 4, 4), (2, 4, 4)),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (4, 4), (4, 4)),
    "conv1d": (F.conv1d, (2, 2, 4), (4, 2, 3)),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 4, 4), (2, 2, 3, 3)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w, w), (2, 4), (4,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), (2, 4, 4), (4,)),
    "cross": (torch.linalg.cross, (2, 3), (2, 3)),
    "embedding": (F.embedding, (4,), (4, 4)),
    "index_select": (lambda x, i: x.index_select(0, i), (4, 4), (2,)),
    "index_add": (lambda x, v: x.index_add(0, torch.tensor([0, 1]), v), (4,), (2,)),
    "index_copy": (lambda x, v: x.index_copy(0, torch.tensor([0, 1]), v), (4,), (2,)),
    "scatter": (lambda x, v: x.scatter(0, torch.tensor([0, 1]), v), (4,), (2,)),
    "x[i] = v": (lambda x, v: _assigned(x, torch.tensor([0, 1]), v), (4,), (2,)),
    "sub": (torch.sub, (4,), (4,)),
    "add_": (lambda a, b: a.clone().add_(b), (4,), (4,)),
    "maximum": (torch.maximum, (4,), (4,)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.5), (4,), (4,)),
    "softmax": (lambda a, b: (a.softmax(0), b.sum()), (4,), (4,)),
    "cholesky": (lambda a, b: torch.linalg.cholesky(torch.eye(4, dtype=a.dtype) + 0 * b), (4, 4), (4, 4)),
}


def _assigned(x: Any, at: Any, value: Any) -> Any:
    x = x.clone()
    x[at] = value
    return x


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (RuntimeError, IndexError, ShardingError):
        return True
    return False


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:.*(C|c)omplex")
@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_is_refused_where_torch_refuses_dtypes(name: str):
    fn, left, right = PAIRS[name]
    wrong = []
    for i, (one, other) in enumerate(itertools.combinations_with_replacement(DTYPES, 2)):
        one, other = (other, one) if i % 2 else (one, other)
        args = torch.ones(left, dtype=one), torch.ones(right, dtype=other)
        plain, planned = _refuses(lambda a=args: fn(*a)), _refuses(lambda a=args: sl.jit(fn).plan(*a))
        if plain != planned:
            wrong.append(f"{one} and {other}: torch {'refuses' if plain else 'takes'} them")
    assert wrong == []


NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "x * n": lambda x, n: x * n,
    "x + n": lambda x, n: x + n,
    "add_": lambda x, n: x.clone().add_(n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "full": lambda x, n: torch.full((4,), n, dtype=x.dtype),
    "full_like": torch.full_like,
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "x[0] = n": lambda x, n: _assigned(x, 0, n),
    "x ** n": lambda x, n: x**n,
}
HELD: list[tuple[torch.dtype, Any]] = [
    (torch.float16, 2**40),
    (torch.float16, 1e10),
    (torch.bfloat16, 1e39),
    (torch.float32, 1e39),
    (torch.float32, 1j),
    (torch.int8, 1000),
    (torch.uint8, -1),
    (torch.int64, 2.5),
    (torch.int64, 2**70),
]


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*(C|c)omplex")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_a_dtype_cannot_hold_do_what_torch_does(name: str):
    fn = NUMBERS[name]
    for (dtype, number), given in itertools.product(HELD, (False, True)):
        x = torch.ones(4, dtype=dtype)
        call = sl.jit(fn if given else lambda x: fn(x, number))  # noqa: B023 - traced here and now
        args = (x, number) if given else (x,)
        try:
            expected = fn(x, number)
        except (RuntimeError, OverflowError, TypeError, ValueError):
            with pytest.raises(ShardingError):
                call.plan(*args)
        else:
            found = call(*args).full_tensor()
            assert found.dtype == expected.dtype
            assert torch.equal(found.to(torch.complex128).nan_to_num(), expected.to(torch.complex128).nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_write_that_would_lose_its_imaginary_part_is_refused(dtype: torch.dtype):
    x = placed(dtype)
    for write in (lambda x: x.add_(1j), lambda x: x[0].mul_(x[0] * 1j)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            write(W.to(dtype))
        with pytest.raises(RuntimeError, match="can't be cast"):
            write(x)
        with pytest.raises(ShardingError, match="can't be cast"):
            sl.jit(write).plan(x)
    assert torch.equal(x.full_tensor(), W.to(dtype))


def test_what_torch_asserts_is_said_too():
    message = refusal(lambda: sl.jit(lambda x: torch.complex(x.long(), x.long())).plan(placed()))
    assert message.startswith("torch refuses complex: Expected both inputs to be Half, Float or Double tensors")


def test_operands_of_two_dtypes_are_named():
    x, w = torch.ones(2, 4, 4), torch.ones(4, 4, dtype=torch.float64)
    message = refusal(lambda: sl.jit(lambda x, w: F.linear(x * 1, w)).plan(x, w))
    assert message.startswith("torch refuses mm: expected m1 and m2 to have the same dtype")
    for words in (
        "test_torch_habits.py:",
        "  * an operand is float32[2, 4, 4]\n",
        "  * w is float64[4, 4]\n",
        "mend the line",
    ):
        assert words in message
    with pytest.raises(RuntimeError):  # torch's own type, too
        sl.jit(torch.mm).plan(w.float(), w)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which makes one dtype of two
        assert sl.jit(F.linear)(x, w.float()).dtype == torch.bfloat16
        refusal(lambda: sl.jit(torch.autocast("cpu", enabled=False)(F.linear)).plan(x, w.bfloat16()))


def test_what_a_kernel_says_to_other_values_and_sizes_says_nothing():
    n, x = torch.arange(1, 5), torch.ones(4, 4)
    for fn in (
        lambda n, x: n // n,
        lambda n, x: n % n,
        lambda n, x: x[n - 1],
        lambda n, x: x.repeat(1, 1)[:, :2] @ x[:2],
    ):
        assert torch.equal(sl.jit(fn)(n, x).full_tensor(), fn(n, x))


# --- profilers --------------------------------------------------------------------------------------------------------


def _profiled() -> list[str]:
    """The ranges of a jitted call, and of an eager op, that are collectives."""
    step = sl.jit(lambda x: (x @ x.t()).sum(), in_specs="a b@data")
    with Mesh(data=2), torch.profiler.profile(acc_events=True) as profile:
        x = shard(W, "a b@data")
        step(x)
        x.sum()
    names = [event.name for event in profile.events()]
    return [name for name in names if name.startswith(("all_reduce", "wait for", "all_gather", "reduce_scatter"))]


def test_collectives_are_ranges_of_a_profiler():
    found = _profiled()
    assert len(found) == 2, found
    for name in found:
        assert name.startswith("all_reduce[data] ")
        assert " B at " in name
        assert "test_torch_habits.py:" in name


def _counted() -> list[list[str]]:
    first = _profiled()
    return [first, _profiled()]


@pytest.mark.ranks
def test_collectives_of_ranks_are_ranges_of_a_profiler():
    for first, second in run_ranks(_counted, 2):
        assert len(first) == len(second) == 4
        assert sum(name.startswith("wait for all_reduce[data] ") for name in first) == 2


@pytest.mark.parametrize(("file", "name"), [("virtual", "all_reduce"), ("codegen", "sum")])
def test_a_program_without_a_profiler_has_no_ranges(monkeypatch, file, name):
    made = []
    module = importlib.import_module(f"shardlib.compiler.codegen.{file}")
    monkeypatch.setattr(module, "ranged", lambda fn, name: made.append(name) or fn)
    step, x = sl.jit(lambda x: x.sum()), placed()
    step(x)
    assert not made
    with torch.profiler.profile(acc_events=True):
        step(x)
    assert any(label.startswith(name) for label in made)


def _ranges(run: Callable[[], Any]) -> set[str]:
    run()
    with torch.profiler.profile(acc_events=True) as profile:
        run()
    return {re.sub(r" [^ ]*(test_torch_habits.py):\d+$", r" \1", event.name) for event in profile.events()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x):
        return torch.tanh(self.up(x))


@pytest.mark.parametrize("cut", [{}, {"up.weight": "o@tensor _"}])
def test_ops_are_ranges_of_a_profiler_with_their_modules(cut):
    model, x = Block(), torch.ones(4, 6)
    with Mesh(data=2, tensor=2) as mesh:
        sl.parallelize(model, cut)
    names = _ranges(lambda: model(x).sum().backward())
    assert "addmm in up at test_torch_habits.py" in names
    assert "tanh in Block at test_torch_habits.py" in names
    assert "mm in up, backward of test_torch_habits.py" in names
    assert "aten.sum.default on ShardedTensors at test_torch_habits.py" in names
    step = sl.jit(lambda model, x: model(x).sin().sum())
    with mesh:
        names = _ranges(lambda: step(Block(), x))
    assert {"addmm in up at test_torch_habits.py", "sin at test_torch_habits.py"} <= names


def test_eager_ops_are_ranges_of_a_profiler_with_their_modules():
    with Mesh(data=2):
        x = shard(torch.ones(4, 6), "b@data _").requires_grad_()
        model = Block()
    names = _ranges(lambda: model(x).sum().backward())
    assert "aten.addmm.default on ShardedTensors in Linear at test_torch_habits.py" in names
    assert "aten.tanh.default on ShardedTensors in Block at test_torch_habits.py" in names
    assert "aten.tanh_backward.default on ShardedTensors, backward at test_torch_habits.py" in names


def test_an_eager_op_that_is_new_says_that_it_is_planned():
    with Mesh(data=2):
        x = shard(torch.ones(4, 7, 5), "b@data _ _")
    with torch.profiler.profile(acc_events=True) as profile:
        x.logcumsumexp(1)
    names = [event.name for event in profile.events()]
    for what in ("planned", "on ShardedTensors"):
        assert any(re.match(f"aten._?logcumsumexp.default {what} at ", name) for name in names)


def test_without_a_profiler_an_eager_op_has_no_range(monkeypatch):
    labels = []
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: labels.append(name) or nullcontext())
    x = placed()
    x.sin()
    assert not labels


# --- CommDebugMode ----------------------------------------------------------------------------------------------------


def test_modes_that_count_are_entered_and_left_in_many_threads() -> None:
    lost: list[int] = []

    def work(k: int) -> None:
        mode = object()
        for _ in range(1000):
            comm_counting.add_counter(mode)
            if not any(mode is other for other in comm_counting.active_modes):
                lost.append(k)
            comm_counting.remove_counter(mode)

    before, threads = sys.getswitchinterval(), [threading.Thread(target=work, args=(k,)) for k in range(4)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not lost
    assert not comm_counting.active_modes
    mode = object()
    comm_counting.add_counter(mode), comm_counting.add_counter(mode), comm_counting.remove_counter(mode)
    assert comm_counting.active_modes == (mode,)
    comm_counting.remove_counter(mode)


_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "ppermute": "all_to_all_single",
}


def _loss(x: Any, w: Any, v: Any) -> Any:
    return (torch.relu(x @ w) @ v).square().sum()


def _turn(x: Any) -> Any:
    return sl.ppermute(x, "data", [(0, 1), (1, 0)])


def _told(ops: str) -> list[str]:
    """What the mode counts otherwise than plans say, in a cold and in a warm call."""
    os.environ["SHARDLIB_OPS"] = ops
    from torch.distributed.tensor.debug import CommDebugMode

    def moves(x: Any) -> Any:
        return shard(shard(x, "a b@data"), "a b")

    specs = ("a@data e", "e f@tensor", "f@tensor e")
    wrong = []
    with Mesh(data=2, tensor=2):
        x, w, v = (shard(torch.ones(4, 4), spec).requires_grad_() for spec in specs)
        turn = sl.shard_map(_turn, in_specs="a@data e", out_specs="a@data e")
        step = sl.jit(_loss)
        calls: dict[str, tuple[Any, sl.Plan]] = {
            "forward and backward": (lambda: step(x, w, v).backward(), step.plan(x, w, v)),
            "eager": (lambda: _loss(x, w, v).backward(), step.plan(x, w, v)),
            "moves": (lambda: sl.jit(moves)(x.detach()), sl.jit(moves).plan(x.detach())),
            "eager moves": (lambda: moves(x.detach()), sl.jit(moves).plan(x.detach())),
            "a permutation": (lambda: sl.jit(turn)(x.detach()), sl.jit(turn).plan(x.detach())),
        }
        for name, (call, plan) in calls.items():
            expected = Counter(_OPS[c.kind] for c in plan.collectives)
            for _ in range(2):
                with CommDebugMode() as outer, CommDebugMode() as mode:
                    call()
                for m in (mode, outer):
                    found = {str(op).removeprefix("c10d_functional."): n for op, n in m.get_comm_counts().items()}
                    if found != expected or not found:
                        wrong.append(f"{name}: {found} for {dict(expected)}")
        with CommDebugMode() as mode:  # ranks compare values and agree on a key
            torch.nn.functional.dropout(shard(torch.ones(4, 4), "a@data e"))
        if mode.get_total_counts():
            wrong.append(f"no plan: {mode}")
        if "all_reduce[tensor] 32 B at " not in (table := _table(CommDebugMode(), step, x, w, v)):
            wrong.append(table)
    return wrong


def _table(mode: Any, step: Any, *args: Any) -> str:
    with mode:
        step(*args)
    table: str = mode.generate_comm_debug_tracing_table(noise_level=3)
    return table


def test_the_mode_that_counts_collectives_counts_those_of_plans(monkeypatch):
    monkeypatch.setenv("SHARDLIB_OPS", "")
    assert _told("") == []


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.ranks
@pytest.mark.parametrize("ops", ["", "torch"])
def test_the_mode_counts_on_ranks_whatever_carries_collectives(ops):
    with closing(Pool(4)) as pool:  # what is set there stays with a world
        assert pool.run(_told, ops) == [[]] * 4


def test_modules_are_counted_in_a_jitted_call():
    from torch.distributed.tensor.debug import CommDebugMode

    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    step, x = sl.jit(lambda x: net(x).sum()), placed().requires_grad_()
    expected = len(step.plan(x).collectives)
    for _ in range(2):
        with CommDebugMode() as mode:
            step(x).backward()
        assert mode.get_total_counts() == expected > 0
    before = len(step.retraces)
    with CommDebugMode():
        step(x), step(x)
    assert len(step.retraces) == before
    assert not any(m._forward_hooks for m in net.modules())


def test_other_modes_see_a_program_that_is_counted():
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.flop_counter import FlopCounterMode

    step, x = sl.jit(lambda x: (x @ x.t()).sum()), placed()
    flops = []
    for _ in range(2):
        with CommDebugMode() as mode, FlopCounterMode(display=False) as counter:
            step(x)
        flops.append(counter.get_total_flops())
        assert mode.get_total_counts() == len(step.plan(x).collectives)
    for _ in range(2):  # the first call is traced, too
        with FlopCounterMode(display=False) as alone:
            step(x)
    assert flops[1] == alone.get_total_flops() > 0


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILED: dict[str, Callable[[Any], Any]] = {
    "jitted": lambda x: torch.compile(sl.jit(lambda x: x.sin().sum()), backend="eager")(x),
    "around": lambda x: torch.compile(lambda x: sl.jit(lambda y: y.sin())(x).cos() + 1, backend="aot_eager")(x),
    "ops": lambda x: torch.compile(lambda x: (x.sin() @ x.t()).softmax(-1), backend="aot_eager")(x),
    "module": lambda x: torch.compile(_linear(x), backend="aot_eager")(torch.ones(2, 6)).sum(),
    "functional": lambda x: torch.compile(_called, backend="aot_eager")(m := _tied(), dict(m.named_parameters())),
    "inside": lambda x: sl.jit(lambda x: torch.compile(lambda y: y.sin(), backend=_unasked)(x))(x),
    "gradient": lambda x: sl.jit(sl.value_and_grad(torch.compile(_sines, backend=_unasked)))(x)[1],
    "of a gradient": lambda x: sl.jit(torch.compile(torch.func.grad_and_value(_sines), backend=_unasked))(x)[0],
}


def _tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return sl.parallelize(model, {"0.weight": "out@tensor _"})


def _called(model: nn.Module, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.func.functional_call(model, parameters, (torch.arange(24.0).view(4, 6),)).square().sum()


def _sines(x: torch.Tensor) -> torch.Tensor:
    return x.sin().sum()


def _unasked(*_: Any) -> Any:
    raise AssertionError("a trace has nothing for another compiler")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    torch.manual_seed(0)
    mine = COMPILED[name](placed())
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        expected = COMPILED[name](placed())
    torch.testing.assert_close(_full(mine), _full(expected))
    assert type(mine) is ShardedTensor


def test_a_whole_graph_of_a_jitted_function_is_refused():
    from torch._dynamo.exc import Unsupported

    with pytest.raises(Unsupported, match=r"Jitted.__call__"):
        torch.compile(sl.jit(lambda x: x.sin()), backend="eager", fullgraph=True)(placed())


# --- torch.distributed ------------------------------------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce async": lambda x: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.zeros(4, 6)] * 2, x),
    "all_gather into": lambda x: dist.all_gather([x, x], torch.zeros(4, 6)),
    "scatter": lambda x: dist.scatter(x, [torch.zeros(4, 6)] * 2 if dist.get_rank() == 0 else None),
    "scatter from": lambda x: dist.scatter(*((torch.zeros(4, 6), [x, x]) if dist.get_rank() == 0 else (x, None))),
    "gather": lambda x: dist.gather(x, [torch.zeros(4, 6)] * 2 if dist.get_rank() == 0 else None),
    "reduce_scatter": lambda x: dist.reduce_scatter(torch.zeros(4, 6), [x, x]),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros(4, 6), x),
    "send": lambda x: dist.send(x, 1 - dist.get_rank()),
    "recv": lambda x: dist.recv(x, 1 - dist.get_rank()),
    "functional": lambda x: _functional(x),
    "ddp": lambda x: nn.parallel.DistributedDataParallel(_linear(x)),
    "dp": lambda x: nn.DataParallel(_linear(x)),
    "fsdp": lambda x: _fsdp().FullyShardedDataParallel(_linear(x), device_id=torch.device("cpu")),
    "fully_shard": lambda x: _fsdp().fully_shard(_linear(x), mesh=x.mesh.device_mesh["data"]),
}


def _fsdp() -> Any:
    from torch.distributed import fsdp

    return fsdp


def _functional(x: torch.Tensor) -> Any:
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


def _collectives() -> dict[str, str]:
    """What every one says; the last of them shows that the ranks are still in step."""
    found = {}
    with Mesh(data=2):
        x = shard(W, "a@data b")
        for name, call in COLLECTIVES.items():
            try:
                call(x)
                found[name] = "no error"
            except ShardingError as error:
                found[name] = str(error)
        plain = torch.ones(2)
        dist.all_reduce(plain)
        found["plain"] = str(plain.tolist())
    return found


@pytest.mark.ranks
def test_collectives_and_wrappers_of_torch_are_refused_before_they_run():
    for found in run_ranks(_collectives, 2):
        assert found.pop("plain") == "[2.0, 2.0]"
        for name, message in found.items():
            assert "f32[4@data, 6]" in message, (name, message)
            assert "Remedy:" in message


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _checkpoints(folder: str) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as sd

    found = []
    with Mesh(data=2):
        module = _linear(shard(W.clone(), "a@data b"))
        opt = torch.optim.Adam(module.parameters(), lr=0.1)
        module(torch.ones(2, 6)).square().sum().backward()
        opt.step()
        whole = module.weight.detach().full_tensor().clone()
        for how in ({}, {"cpu_offload": True}):
            options = sd.StateDictOptions(full_state_dict=True, **how)
            state = sd.get_model_state_dict(module, options=options)
            if state:  # with cpu_offload, the first rank alone has it
                found.append(f"{type(state['weight']).__name__} {torch.equal(state['weight'], whole)}")
        options = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = sd.get_model_state_dict(module, options=sd.StateDictOptions(full_state_dict=True))
        moments = sd.get_optimizer_state_dict(module, opt, options=sd.StateDictOptions(full_state_dict=True))
        with torch.no_grad():
            module.weight.zero_()
        sd.set_model_state_dict(module, state if dist.get_rank() == 0 else {}, options=options)
        found.append(f"back {torch.equal(module.weight.detach().full_tensor(), whole)} {module.weight.spec}")
        kept = opt.state[module.weight]["exp_avg"].full_tensor()
        sd.set_optimizer_state_dict(module, opt, moments, options=sd.StateDictOptions(full_state_dict=True))
        again = opt.state[module.weight]["exp_avg"]
        found.append(f"moment {torch.equal(again.full_tensor(), kept)} {again.sharding}")
        future = dcp.async_save({"w": module.weight.detach()}, checkpoint_id=folder)
        with torch.no_grad():
            module.weight.zero_()  # the copy is made when async_save returns
        future.result()
        there = {"w": shard(torch.zeros(4, 6), "a b@data")}
        dcp.load(there, checkpoint_id=folder)
        found.append(f"async {torch.equal(there['w'].full_tensor(), whole)}")
    return found


@pytest.mark.ranks
def test_whole_state_dicts_and_background_saves():
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(_checkpoints, 2, folder)
    rest = ["back True a@data b@()", "moment True 4@data, 6", "async True"]
    assert first == ["Tensor True", "Tensor True", *rest]
    assert second == ["Tensor True", *rest]
    assert only([first[2:], second[1:]])


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "categorical": lambda x: Categorical(logits=x).log_prob(torch.arange(len(x)) % 4) + Categorical(logits=x).entropy(),
    "normal": lambda x: Normal(x, x.exp()).log_prob(x * 2) + Normal(x, x.exp()).entropy(),
    "bernoulli": lambda x: Bernoulli(logits=x).log_prob((x > 1).float()),
    "multivariate": lambda x: MultivariateNormal(x, torch.eye(4)).log_prob(x * 2),
    "divergence": lambda x: kl_divergence(Normal(x, x.exp()), Normal(0.0, 1.0)),
    "transformed": lambda x: Independent(TransformedDistribution(Normal(x, 1.0), [TanhTransform()]), 1).log_prob(
        x.tanh() / 2
    ),
    "drawn": lambda x: Normal(x, x.exp()).rsample().square(),
    "drawn together": lambda x: MultivariateNormal(x, torch.eye(4)).rsample().square(),
    "drawn classes": lambda x: (d := Categorical(logits=x)).log_prob(d.sample()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("log_prob", DISTRIBUTIONS.values(), ids=list(DISTRIBUTIONS))
def test_distributions(log_prob: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile leaves it False
    x = torch.arange(24.0).reshape(6, 4) / 24
    with Mesh(data=2):
        sl.check(lambda x: log_prob(x).sum(), x, in_specs=("b@data _",))
    with pytest.raises(ValueError, match="satisfy the constraint"):  # outside, torch looks at values as ever
        Normal(x, -x)


def test_an_optimizer_that_decides_by_values() -> None:
    weight = nn.Parameter(W.clone())
    lbfgs = torch.optim.LBFGS([weight])

    def loss() -> Tensor:
        lbfgs.zero_grad()
        total = weight.square().sum()
        total.backward()
        return total

    said = refusal(sl.jit(lambda: lbfgs.step(loss)))
    assert "Remedy: call opt.step(closure) outside of jit; the closure may call a jitted function, which leaves" in said
    with Mesh(data=2):
        lbfgs.step(sl.jit(loss))
    assert weight.abs().max() < W.abs().max()


def test_an_average_that_decides_by_its_count() -> None:
    model = nn.Linear(4, 4)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, n: new if n < 3 else old)
    said = refusal(sl.jit(lambda: average.update_parameters(model)))
    assert "Remedy: call update_parameters() behind the jitted function" in said


def test_a_cache_that_is_a_dict() -> None:
    masks: dict[int, Tensor] = {}

    def masked(x: Tensor) -> Tensor:
        if len(x) not in masks:
            masks[len(x)] = torch.tril(torch.ones(len(x), len(x)))
        return masks[len(x)] @ x

    expected = masked(W)
    masks.clear()
    jitted = sl.jit(masked)
    same([jitted(W), jitted(W), jitted(W)], [expected] * 3)
    assert (len(masks), len(jitted.retraces)) == (1, 1)


QUANTIZED: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).t().dequantize(),
    lambda x: torch.quantize_per_channel(x, torch.ones(6), torch.zeros(6), 1, torch.quint8).dequantize(),
]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_values() -> None:
    for fn in QUANTIZED:
        said = refusal(lambda fn=fn: sl.jit(fn)(W))
        assert "the traced function makes a quantized tensor" in said
        assert "Remedy: call x.dequantize() at once" in said
    if HAS_FAKE_QUANTIZED:
        both = lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() + 1
        sl.check(both, W, in_specs=("a@data b",))
    sl.check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), W, in_specs=("a@data b",))
