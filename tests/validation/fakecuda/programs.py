"""The programs that run on fake GPUs: all rules' samples, jitted and eager, W1 in its five modes, whole models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError
from shardlib.frontend import retarget_device
from shardlib.ops import offload
from shardlib.ops.collectives.transport.torch_wire import Handle
from shardlib.rules import rule_for
from shardlib.rules.rule import Labels, Rule
from shardlib.rules.trial_shardings import trial_shardings
from shardlib.sharding.layout import Factor, Layout
from shardlib.tensor.host_offload import OFFLOADED
from tests.helpers.prover import Sample, call_of, mapped, target_of
from tests.models import w1, w1_sharded, zoo
from tests.rules.rule_samples import SAMPLES
from tests.validation.fakecuda.gpu import CUDA, available, cuda_mesh, gpu, on_gpu, placed, ranks
from tests.validation.fakecuda.watch import Seen, Watch, watching

MODELS = ("gpt2", "llama", *sorted(zoo.FAMILIES))


@contextmanager
def world(seen: Seen, name: str, rank: tuple[int, int] | None = None) -> Iterator[None]:
    """A GPU, or a rank that has one (its number, of so many), whose programs are watched in this name."""
    seen.program = name
    with ExitStack() as stack:
        if rank is not None:
            stack.enter_context(ranks(*rank))
        stack.enter_context(gpu())
        stack.enter_context(watching(seen))
        yield


# --- rules' samples ---------------------------------------------------------------------------------------------------


def _layout(rule: Rule, labels: Labels, cut: Mapping[str, Any]) -> Layout:
    dims = (tuple(Factor(rule.sizes[f], cut.get(f, ())) for f in dim) or (Factor(1),) for dim in labels)
    return Layout(tuple(dims))


def samples() -> Iterator[Sample]:
    for family in SAMPLES:
        yield from family()
    yield "log_sigmoid_backward", (torch.empty(3, 4), torch.empty(3, 4), torch.empty(0)), {}  # as a GPU leaves it


def run_sample(seen: Seen, sample: Sample, limit: int | None = None) -> None:
    """One call under (at most `limit`) placements: jitted on virtual devices, and under the first on a rank; eagerly,
    twice, so that the second finds everything ready. What comes out is of the dtype, shape and strides of the plain
    call."""
    name, args, kwargs = sample
    with world(seen, name):
        args, kwargs = retarget_device.with_device(target_of(name), *on_gpu((args, kwargs)), CUDA)
        alone = Seen()
        try:
            with Watch(alone):
                call, tensors, results = call_of(target_of(name), args, kwargs)
        except (UnsupportedOperatorException, DynamicOutputShapeException, DataDependentOutputException) as error:
            seen.counts[f"no plain form: {type(error).__name__}"] += 1
            return
        except (RuntimeError, NotImplementedError, TypeError) as error:
            seen.counts[f"no plain form: {name}: {str(error).splitlines()[0]}"] += 1
            return
        seen.known = {str(call.target)} if alone.faults else set()
        rule = rule_for(call)
        if rule is None:
            seen.counts["no rule"] += 1
            return
        seen.counts["samples"] += 1
        placements = [cut.axes for cut in trial_shardings(rule, (3,)) if not cut.shards]
        layouts = [[_layout(rule, labels, axes).canonical for labels in rule.operands] for axes in placements]

    def fn(*given: Tensor) -> Any:
        feed = iter(given)
        a, k = mapped((tuple(args), dict(kwargs)), lambda _: next(feed))
        return call.target(*a, **k)

    for i, (cut, at) in enumerate(itertools.islice(zip(placements, layouts, strict=True), limit)):
        axes = {a.name: a.axis_size for some in cut.values() for a in some} or {"a": 2}
        text = f"{name} {[list(t.shape) for t in tensors]} as {[str(x) for x in at]}"
        with world(seen, f"jit {text}"):
            mesh = cuda_mesh(**axes)
            _compare(seen, results, lambda mesh=mesh, at=at: _jitted(fn, tensors, at, mesh))
        if tensors:
            with world(seen, f"eager {text}"):
                mesh = cuda_mesh(**axes)
                _compare(seen, results, lambda mesh=mesh, at=at: _eager(seen, fn, tensors, at, mesh), strides=True)
        if i < 2:
            with world(seen, f"rank {text}", (mesh.size - 1, mesh.size)):
                mesh = cuda_mesh(**axes)
                _compare(seen, results, lambda mesh=mesh, at=at: _jitted(fn, tensors, at, mesh))


def _jitted(fn: Any, tensors: Sequence[Tensor], at: Sequence[Layout], mesh: Mesh) -> Any:
    given = [placed(t, x, mesh) for t, x in zip(tensors, at, strict=True)]
    with mesh, available():
        return sl.jit(fn)(*given)


def _eager(seen: Seen, fn: Any, tensors: Sequence[Tensor], at: Sequence[Layout], mesh: Mesh) -> Any:
    for watch in (False, True):
        given = [placed(t, x, mesh) for t, x in zip(tensors, at, strict=True)]
        with mesh, ExitStack() as stack:
            seen.counts["eager calls"] += watch
            stack.enter_context(Watch(seen if watch else Seen()))  # a mode is part of what programs are for
            out = fn(*given)
    return out


def _compare(seen: Seen, expected: Sequence[Any], run: Callable[[], Any], *, strides: bool = False) -> None:
    try:
        out = run()
    except ShardingError as error:
        seen.counts["refused"] += 1
        seen.refusals[str(error).splitlines()[0]] += 1
        return
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        if seen.known:  # as the plain call does
            seen.plain[f"{next(iter(seen.known))} (eager)"] += 1
        else:
            seen.fault(f"{error} makes the host wait for values")
        return
    except Exception as error:  # noqa: BLE001 # whatever a program raises on a GPU is what is looked for
        seen.fault(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return
    found = out if isinstance(out, tuple | list) else [out]
    if len(found) != len(expected):
        seen.fault(f"{len(found)} results for {len(expected)}")
    for i, (want, have) in enumerate(zip(expected, found, strict=False)):
        if isinstance(want, Tensor):
            _alike(seen, f"result {i}", want, have, strides)


def _alike(seen: Seen, name: str, want: Tensor, have: Any, strides: bool) -> None:
    """The result says of itself what the plain call's says, and its pieces are what it says."""
    if not isinstance(have, ShardedTensor):
        seen.fault(f"{name} is a {type(have).__name__}")
        return
    seen.counts["results"] += 1
    if (have.dtype, have.shape, have.device) != (want.dtype, want.shape, want.device):
        seen.fault(
            f"{name} is {have.dtype}{list(have.shape)} on {have.device}, "
            f"the plain one {want.dtype}{list(want.shape)} on {want.device}"
        )
    elif strides and want.numel() and have.stride() != want.stride():
        seen.fault(f"{name} has strides {have.stride()}, the plain one {want.stride()}")
    for piece in have.shards:
        said = (have.dtype, tuple(have.sharding.local_shape(piece.coords)), have.device)
        if (piece.data.dtype, tuple(piece.data.shape), piece.data.device) != said:
            seen.fault(f"{name}: the piece at {piece.coords} is {piece.data}, not {said}")
            return


# --- eager ------------------------------------------------------------------------------------------------------------

_x, _w = P("data", None), P(None, "tensor")


def _written(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 1.0
    y[:, 1:3] += 2
    y[y > 0] = 0.0
    y.t()[2].mul_(3)
    return y.add_(x)


# Functions of x (6, 8), cut over data, and w (8, 6), cut over tensor: what a training loop writes outside jit.
EAGER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a layer": lambda x, w: torch.nn.functional.gelu(x @ w).sum(),
    "norms": lambda x, w: (torch.nn.functional.layer_norm(x, (8,)), torch.nn.functional.rms_norm(x.bfloat16(), (8,))),
    "softmax": lambda x, w: torch.nn.functional.cross_entropy(x @ w, torch.zeros(6, dtype=torch.int64, device="cuda")),
    "views": lambda x, w: (x.t().reshape(4, 2, 6).transpose(0, 1).flatten(), x.chunk(2, 1)[1].contiguous()),
    "writes": _written,
    "made beside": lambda x, w: x.new_ones(6, 8) + torch.zeros_like(x) + x.new_full((8,), 2.0),
    "numbers": lambda x, w: x * torch.tensor(2.0) + torch.tensor(1) + 3.0,  # on the CPU: they travel with the kernel
    "plain beside": lambda x, w: x + torch.ones(8, device="cuda"),
    "draws": lambda x, w: (torch.nn.functional.dropout(x), torch.rand_like(x), torch.randn_like(w), x.bernoulli()),
    "drawn in place": lambda x, w: x.clone().normal_().uniform_(0, 1),
    "attention": lambda x, w: torch.nn.functional.scaled_dot_product_attention(
        *[x.view(1, 6, 2, 4).transpose(1, 2)] * 3
    ),
    "log_sigmoid": lambda x, w: torch.nn.functional.logsigmoid(x) + torch.ops.aten.log_sigmoid_forward(w.t())[0],
    "an optimizer": lambda x, w: torch._foreach_add([x, w], [x * 0.1, w * 0.1], alpha=-0.1),
    "moved": lambda x, w: (x.redistribute(P(None, "tensor")), w.full_tensor()),
    "compared": lambda x, w: (torch.where(x > 0, x, 0.0), x.topk(2), x.argmax(1), (x @ w).amax()),
}


def run_eager(seen: Seen, name: str, rank: int | None = None) -> None:
    """A function of ShardedTensors outside jit, twice: cold, then with every op made ready."""
    with world(seen, f"eager {name}", None if rank is None else (rank, 4)), cuda_mesh(data=2, tensor=2):
        for warm in (False, True):
            x, w = (sl.shard(torch.empty(6, 8, device="cuda"), _x), sl.shard(torch.empty(8, 6, device="cuda"), _w))
            with Watch(seen if warm else Seen(), mine=True):  # a mode is part of what programs are for
                out = EAGER[name](x, w)
            seen.counts["eager calls"] += warm
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, ShardedTensor):
                _alike(seen, "a result", torch.empty(leaf.shape, dtype=leaf.dtype, device="cuda"), leaf, strides=False)


# --- W1 and models ----------------------------------------------------------------------------------------------------


def run_w1(seen: Seen, name: str, rank: int | None = None) -> None:
    """Two steps of W1 in a mode: forward, backward, update; the second from the first one's parameters."""
    config = w1.TINY.with_(batch=8, d=32, heads=8, ff=48, vocab=64)
    mode = w1.modes(config)[name]
    with world(seen, f"W1 {name}", None if rank is None else (rank, 8)):
        with cuda_mesh(dict(mode.rules), **mode.axes):
            params, *batch = w1_sharded.place(mode, on_gpu(w1.init(config)), *on_gpu(w1.batch(config)))
            step = w1_sharded.sharded_step(mode, config)
            _, params = step(params, *batch)
            value, params = step(params, *batch)
        expected = (torch.empty((), device="cuda"), on_gpu(w1.init(config)))
        _all_alike(seen, expected, (value, params))


def run_model(seen: Seen, name: str, rank: int | None = None) -> None:
    """A step of a model of transformers: forward, backward, update."""
    from tests.models import gpt2, llama

    if name in zoo.FAMILIES:
        lm, rules, vocab = zoo.build(name), zoo.RULES, zoo.VOCAB
    else:
        module = {"gpt2": gpt2, "llama": llama}[name]
        lm, rules, vocab = module.build(d=32, seq=16, vocab=64), module.RULES, 64
    tokens = torch.randint(2, vocab, (8, 16))
    rules = {n: axis for n, axis in rules.items() if axis in ("data", "tensor")}
    with world(seen, name, None if rank is None else (rank, 8)):
        params = on_gpu(lm.params())
        for module in lm.module.modules():
            module._buffers.update(on_gpu(dict(module._buffers)))
        with cuda_mesh(rules, data=2, tensor=4 if rank is not None else 2):
            step = sl.jit(model_step(lm), in_specs=(lm.specs(), "batch seq"), out_specs=(None, lm.specs()))
            value, new = step(params, on_gpu(tokens))
        _all_alike(seen, (torch.empty((), device="cuda"), params), (value, new))


def model_step(lm: Any) -> Any:
    def step(params: Any, tokens: Tensor) -> Any:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value = lm.loss(leaves, {"input_ids": tokens, "labels": tokens})
        grads = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}

    return step


def _all_alike(seen: Seen, expected: Any, found: Any) -> None:
    pairs = zip(pytree.tree_leaves_with_path(expected), pytree.tree_leaves(found), strict=True)
    for (path, want), have in pairs:
        _alike(seen, pytree.keystr(path), want, have, strides=False)


# --- training ---------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "AdamW": {},
    "Adam": {"foreach": False},
    "NAdam": {},
    "Rprop": {},
    "Adafactor": {},
}


def run_training(seen: Seen, name: str, rank: int | None = None, away: Sequence[str] = ()) -> None:
    """Three steps of a module and an optimizer, which counts them in a number on the CPU; `away` is what lives in the
    host's memory between them."""
    copies = {"to_host": partial(_moved, to="cpu"), "to_device": partial(_moved, to="cuda")}
    with (
        world(seen, f"training by {name}", None if rank is None else (rank, 2)),
        cuda_mesh(data=2),
        patch.multiple(offload, **copies),
    ):
        layers = nn.Linear(8, 16, device="cuda"), nn.LayerNorm(16, device="cuda"), nn.Linear(16, 8, device="cuda")
        module = sl.parallelize(nn.Sequential(*layers), strategy="fsdp")
        optimizer = getattr(torch.optim, name)(module.parameters(), 0.01, **OPTIMIZERS[name])

        @sl.jit(schedule=sl.Schedule(offload=away or None))
        def step(module: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
            loss: Tensor = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(3):
            step(module, optimizer, torch.empty(4, 8, device="cuda"))
        kept = [x for entries in optimizer.state.values() for x in entries.values() if isinstance(x, Tensor)]
        assert {x.device.type for x in kept} <= {"cuda"}
        if away:
            assert {x.__dict__[OFFLOADED][0].device.type for x in kept if x.dim()} == {"cpu"}
            assert {x.to_local().device.type for x in kept if x.dim()} == {"cuda"}


def _moved(x: Tensor, to: str) -> Handle[Tensor]:
    """A copy to another tier, for which there is no stream here."""
    watched = isinstance(_get_current_dispatch_mode(), Watch)
    with _pop_mode_temporarily() if watched else nullcontext():
        out = torch.empty_like(x, device=to)
    return Handle(lambda: out)


def run_numbers(seen: Seen, rank: int | None = None) -> None:
    """Numbers on the CPU beside tensors of a GPU: read and written."""

    def fn(x: Tensor, number: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return x * number + counter

    with world(seen, "numbers", None if rank is None else (rank, 2)), cuda_mesh(data=2):
        number, counter = torch.full((), 2.0), torch.full((), 1)
        out = sl.jit(fn)(torch.empty(4, 8, device="cuda"), number, counter)
        _alike(seen, "the result", torch.empty(4, 8, device="cuda"), out, strides=False)
        assert counter.device.type == "cpu"
