"""Threads that use one process's meshes, programs and caches at once, each with modes of its own; plain torch is right.

python -m tests.validation.stress.threads --threads 8 --minutes 10
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from shardlib.jit.jit import RetraceWarning
from tests.helpers.oracle import same, whole

X = torch.arange(32.0).view(8, 4).sin()
MESHES = (sl.Mesh(data=2), sl.Mesh(data=2, tensor=2), sl.Mesh(x=4))
SPECS = ("a@{0} b", "a b@{0}", "a b")

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(requires_grad=False)


def _layers(x: Tensor, n: float) -> Tensor:
    for i in range(3):
        x = torch.tanh(x * n + i)
    return x.sum(0)


def _value_and_grad(x: Tensor, n: float) -> tuple[Tensor, Tensor]:
    value, grad = sl.value_and_grad(lambda x: (x.exp() * n).mean())(x)
    return value, grad


def _outside(x: Tensor, n: float) -> Tensor:
    """A gradient that goes through the call."""
    x = x.detach().requires_grad_()
    (SHARED["squares"](x, n) * 2).sum().backward()
    assert x.grad is not None
    return x.grad


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "layers": _layers,
    "squares": lambda x, n: x * x * n,
    "product": lambda x, n: (x @ x.t()) + n,
    "softmax": lambda x, n: F.softmax(x * n, -1),
    "net": lambda x, n: NET(x) * n,
    "gradient": _value_and_grad,
    "written": lambda x, n: x.clone().mul_(n).t().contiguous(),
}
SHARED = {name: sl.jit(fn) for name, fn in FUNCTIONS.items()}


def _eager(x: Tensor, n: float) -> Any:
    y = (x * n).clone()
    y[1:3] += 1
    y.t().mul_(2)
    return y, y.sum(1), torch.cat([x, y])[2:5], (x @ y.t()).amax()


JOBS: dict[str, Callable[[Tensor, float], Any]] = {
    **SHARED,
    "outside": _outside,
    "eager": _eager,
    "fresh": lambda x, n: sl.jit(FUNCTIONS["layers"])(x, n),
}


def _job(rng: random.Random) -> Callable[[], None]:
    """Something to do, and to compare with what plain torch makes of it."""
    name, mesh = rng.choice(list(JOBS)), rng.choice(MESHES)
    spec = rng.choice(SPECS).format(mesh.axis_names[0])
    rows, n = rng.choice((2, 5, 8)), rng.choice((0.5, 2.0, 3.0))
    dtype = rng.choice((torch.float32, torch.float64)) if name != "net" else torch.float32
    mode = rng.choice((nullcontext, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)))
    if name in ("outside", "gradient"):
        mode = nullcontext
    x = X[:rows].to(dtype)

    rough = mode not in (nullcontext, torch.no_grad)  # autocast rounds what is summed in pieces otherwise

    def run() -> None:
        with mesh, mode():
            placed = sl.shard(x.clone(), spec)
            found = JOBS[name](placed, n)
            with sl.no_mesh():
                expected = JOBS[name](x.clone(), n)
            same(placed, x)
        if rough:
            torch.testing.assert_close(whole(found), whole(expected), rtol=0.05, atol=0.05)
        else:
            same(found, expected)

    return run


def campaign(threads: int, seconds: float, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How often each thread was right, and what was wrong."""
    before, end = sys.getswitchinterval(), time.monotonic() + seconds
    sys.setswitchinterval(1e-6)
    right: Counter[str] = Counter()
    wrong: list[str] = []

    def work(k: int) -> None:
        rng = random.Random(f"{seed}/{k}")
        while time.monotonic() < end and not wrong:
            try:
                _job(rng)()
            except Exception as error:  # noqa: BLE001  whatever it is, it is reported
                wrong.append(f"thread {k}: {type(error).__name__}: {error}")
            right[f"thread {k}"] += 1

    every = [threading.Thread(target=work, args=(k,), name=f"thread {k}", daemon=True) for k in range(threads)]
    try:
        for thread in every:
            thread.start()
        for thread in every:
            thread.join(max(0.0, end - time.monotonic()) + 120)
        wrong += [f"{thread.name} hangs" for thread in every if thread.is_alive()]
    finally:
        sys.setswitchinterval(before)
    return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore", RetraceWarning)
    right, wrong = campaign(args.threads, 60 * args.minutes, args.seed)
    print(f"{args.threads} threads, {args.minutes:g} minutes: {sum(right.values())} calls, {len(wrong)} wrong")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
