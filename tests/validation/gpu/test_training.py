"""What people write to train on a GPU, on two virtual devices of one: the same values and gradients as plain torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.core.torch_internals.torch_private import pytree

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
Program = Callable[[Any], Any]  # of a door: how a module, an optimizer and a step are sharded, or left alone

PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


class Plain:
    """One device."""

    def module(self, m: nn.Module, **how: Any) -> nn.Module:
        return m

    def jit(self, fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return fn


class Sharded:
    """Two devices, batches cut over them."""

    def module(self, m: nn.Module, **how: Any) -> nn.Module:
        return sl.parallelize(m, **({"strategy": "fsdp"} | how))

    def jit(self, fn: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return sl.jit(fn, **how)


def _module(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), *more, nn.Linear(16, 8))
    return m.to(DEVICE)


def _x(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _update(m: nn.Module, opt: Any, x: Tensor) -> Tensor:
    value = m(x).square().mean()
    value.backward()
    opt.step()
    opt.zero_grad()
    return value.detach()


def _trained(door: Any, make: Callable[[Any], Any], *, jitted: bool, steps: int = 3, **how: Any) -> Any:
    m = door.module(_module(), **how)
    opt = make(m.parameters())
    step = door.jit(_update) if jitted else _update
    values = [step(m, opt, _x(seed=i)) for i in range(steps)]
    return values, list(m.parameters()), [opt.state[p] for p in m.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, 1e-2, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@program
def clipped(door: Any) -> Any:
    m = door.module(_module())
    opt = torch.optim.AdamW(m.parameters(), 1e-2)

    def step(m: nn.Module, opt: Any, x: Tensor) -> Any:
        m(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return norm

    run = door.jit(step)
    return [run(m, opt, _x(seed=i)) for i in range(2)], list(m.parameters())


@program
def autocast(door: Any) -> Any:
    m = door.module(_module())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        value = m(_x()).float().square().mean()
    value.backward()
    return value, [p.grad for p in m.parameters()]


@program
def autocast_in_a_step(door: Any) -> Any:
    m = door.module(_module())

    def step(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            value = m(x).float().square().mean()
        value.backward()
        return value.detach()

    return door.jit(step)(m, _x()), [p.grad for p in m.parameters()]


@program
def scaled(door: Any) -> Any:
    m, scaler = door.module(_module()), torch.amp.GradScaler(DEVICE, init_scale=8.0)
    opt = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(2):
        scaler.scale(m(_x(seed=i)).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return list(m.parameters())


@program
def scheduled(door: Any) -> Any:
    m = door.module(_module())
    opt = torch.optim.AdamW(m.parameters(), 1e-2)
    schedule, step = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5), door.jit(_update)
    values = []
    for i in range(3):
        values.append(step(m, opt, _x(seed=i)))
        schedule.step()
    return values, list(m.parameters())


@program
def loaded_again(door: Any) -> Any:
    m = door.module(_module())
    opt, step = torch.optim.AdamW(m.parameters(), 1e-2), door.jit(_update)
    step(m, opt, _x())
    opt.load_state_dict(deepcopy(opt.state_dict()))
    return [step(m, opt, _x(seed=i)) for i in range(2)], list(m.parameters())


@program
def outside_then_inside(door: Any) -> Any:
    m = door.module(_module())
    opt, step = torch.optim.AdamW(m.parameters(), 1e-2), door.jit(_update)
    first = _update(m, opt, _x())
    second = step(m, opt, _x(seed=2))
    return first, second, _update(m, opt, _x(seed=3)), list(m.parameters())


@program
def numbers(door: Any) -> Any:
    """On the CPU, as torch takes them beside tensors of a GPU: read, written, with a gradient."""
    number, counter = torch.tensor(2.0, requires_grad=True), torch.tensor(1)

    def fn(x: Tensor, number: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return (x * number).sum() * counter

    value = door.jit(fn)(_x(), number, counter)
    value.backward()
    assert number.grad is not None
    assert number.grad.device.type == counter.device.type == "cpu"
    return value, number.grad, counter


@program
def constants(door: Any) -> Any:
    """A mask in a closure."""
    mask, q = torch.ones(6, 6, dtype=torch.bool, device=DEVICE).tril(), _x(4, 2, 6, 8)
    fn = lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return door.jit(fn)(q)


@program
def masked_attention(door: Any) -> Any:
    mask = torch.ones(4, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
    q = _x(4, 2, 6, 8).bfloat16().requires_grad_()
    out = door.jit(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m))(q, mask)
    return out, torch.autograd.grad(out.float().square().sum(), q)


@program
def remade(door: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    m = door.module(_module(nn.Dropout(0.0)))
    value = checkpoint(m, _x(), use_reentrant=False).square().mean()
    value.backward()
    return value, [p.grad for p in m.parameters()]


@program
def an_encoder(door: Any) -> Any:
    torch.manual_seed(0)
    m = door.module(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(DEVICE))
    value = m(_x(4, 5, 8)).square().mean()
    value.backward()
    return value, [p.grad for p in m.parameters()]


@program
def recurrent(door: Any) -> Any:
    torch.manual_seed(0)
    m = door.module(nn.GRU(8, 8, batch_first=True).to(DEVICE))
    value = m(_x(4, 5, 8))[0].square().mean()
    value.backward()
    return value, [p.grad for p in m.parameters()]


@program
def a_network_of_images(door: Any) -> Any:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    m = door.module(m.append(nn.Linear(4 * 9, 5)).to(DEVICE), strategy="ddp")
    value = F.cross_entropy(m(_x(4, 3, 6, 6)), torch.arange(4, device=DEVICE))
    value.backward()
    return value, [p.grad for p in m.parameters()], m[1].running_mean


@program
def bags_and_tables(door: Any) -> Any:
    torch.manual_seed(0)
    m = door.module(nn.EmbeddingBag(16, 8, mode="sum").to(DEVICE))
    value = m(torch.arange(12, device=DEVICE).view(4, 3)).square().sum()
    value.backward()
    return value, m.weight.grad


@program
def ordered(door: Any) -> Any:
    fn = lambda x: (x.cumsum(0), x.sort(1), x.topk(2, 1), x.argmax(1), x.median(1), torch.linalg.qr(x.T))
    return door.jit(fn)(_x())


@program
def eager_ops(door: Any) -> Any:
    x = _x() if isinstance(door, Plain) else sl.shard(_x(), "b@data _")
    y = (x + torch.tensor(1.0)) @ x.T
    return y, y.sum().item(), F.softmax(y, 1), y.to(torch.bfloat16), torch.cat([x, x], 1), x.max(0).values


@program
def transforms(door: Any) -> Any:
    w = _x(8, 8, seed=3)
    fn = lambda w, x: torch.tanh(x @ w).square().sum()
    grads = door.jit(torch.func.grad(fn))(w, _x())
    return grads, door.jit(torch.func.vmap(lambda v: torch.func.grad(fn)(w, v[None])))(_x())


@program
def kept_on_the_host(door: Any) -> Any:
    m = _module()
    value = door.jit(_backward, schedule=sl.Schedule(offload="saved"))(m, _x())
    return value, [p.grad for p in m.parameters()]


@program
def in_parts(door: Any) -> Any:
    m = door.module(_module())
    step = door.jit(_backward, schedule=sl.Schedule(parts=2))
    return step(m, _x(8, 8)), [p.grad for p in m.parameters()]


@program
def made_again(door: Any) -> Any:
    m = _module()
    return door.jit(_backward, remat="full")(m, _x()), [p.grad for p in m.parameters()]


@program
def within_a_budget(door: Any) -> Any:
    m = door.module(_module(), memory="1GiB")
    value = m(_x()).square().mean()
    value.backward()
    return value, [p.grad for p in m.parameters()]


@program
def made_on_meta(door: Any) -> Any:
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    if isinstance(door, Plain):
        m.to_empty(device=DEVICE)
    else:
        sl.materialize(door.module(m))
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    return m(_x())


@program
def a_language_model(door: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64, **sizes)
    m = door.module(transformers.LlamaForCausalLM(config).to(DEVICE))
    ids = torch.arange(32, device=DEVICE).view(4, 8)
    loss = m(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        tokens = m.generate(ids[:2], max_new_tokens=4, do_sample=False)
    return loss, [p.grad for p in m.parameters()], tokens


def _backward(m: nn.Module, x: Tensor) -> Tensor:
    value = m(x).square().mean()
    value.backward()
    return value.detach()


def _leaves(x: Any) -> list[Any]:
    leaves = pytree.tree_leaves(x)
    return [leaf.full_tensor() if isinstance(leaf, sl.ShardedTensor) else leaf for leaf in leaves]


def _compare(run: Program) -> None:
    want = _leaves(run(Plain()))
    with sl.Mesh(data=2, device=DEVICE):
        found = _leaves(run(Sharded()))
    assert len(found) == len(want)
    for x, y in zip(found, want, strict=True):
        if isinstance(y, Tensor):
            close = 3e-2 if y.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(x.cpu(), y.cpu(), rtol=close, atol=close)
        else:
            assert x == pytest.approx(y, rel=1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    _compare(PROGRAMS[name])


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name: str, jitted: bool) -> None:
    _compare(lambda door: _trained(door, OPTIMIZERS[name], jitted=jitted))
