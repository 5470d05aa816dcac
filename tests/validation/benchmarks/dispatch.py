"""What one eager op costs beside DTensor's: warm on real ranks, and the first time, on meshes of 1 to 4 axes.

`python -m tests.validation.benchmarks.dispatch` prints both tables and the same ops on virtual devices. Both libraries
run in the same processes and take turns. Tensors are small, so that dispatch is all there is. First-time figures are
taken on one rank of a world whose other ranks are not there (torch's `fake` process group): nothing in them
communicates.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardlib import Mesh, P, shard
from tests.helpers.ranks import run_ranks

from .timing import Samples, interleave, markdown, ratio

CALLS = 50  # in one timing of a warm op; few, so that most timings are not interrupted

Ops = dict[str, Callable[[], object]]


def ops(x: Tensor, w: Tensor, scale: Tensor) -> Ops:
    """The ops that are timed: x is [8, 16], w [16, 16], scale [16]."""
    return {
        "add": lambda: x + x,
        "mm": lambda: torch.mm(x, w),
        "view": lambda: x.view(8, 4, 4),
        "layer_norm": lambda: F.layer_norm(x, (16,), scale, scale),
    }


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(8, 16), torch.randn(16, 16), torch.ones(16)


def _many(op: Callable[[], object]) -> None:
    for _ in range(CALLS):
        op()


def _contest(contestants: dict[str, Ops], rounds: int) -> dict[str, Samples]:
    names = list(next(iter(contestants.values())))
    return {
        name: interleave({who: functools.partial(_many, mine[name]) for who, mine in contestants.items()}, rounds)
        for name in names
    }


def warm_on_ranks(rounds: int) -> dict[str, Samples]:
    """On one of the ranks: seconds of `CALLS` calls, by op and library."""
    n = dist.get_world_size()
    x, w, scale = _inputs()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("data",))
    theirs = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(0)), (w, Replicate()), (scale, Replicate()))]
    with Mesh(data=n):
        ours = [shard(x, "_@data _"), shard(w, P()), shard(scale, P())]
    for mine, peer in zip(ops(*ours).values(), ops(*theirs).values(), strict=True):
        torch.testing.assert_close(mine().to_local(), peer().to_local())  # type: ignore[attr-defined]
    with torch.no_grad():
        return _contest({"shardlib": ops(*ours), "dtensor": ops(*theirs), "plain": ops(x, w, scale)}, rounds)


def warm_on_virtual_devices(rounds: int) -> dict[str, Samples]:
    """The same on virtual devices; all of them compute in this process."""
    x, w, scale = _inputs()
    contestants = {"plain": ops(x, w, scale)}
    for n in (1, 2, 4):
        with Mesh(data=n):
            contestants[f"{n} devices"] = ops(shard(x, "_@data _"), shard(w, P()), shard(scale, P()))
    with torch.no_grad():
        return _contest(contestants, rounds)


# --- the first time ---------------------------------------------------------------------------------------------------

SHAPES = {1: (4,), 2: (2, 2), 3: (2, 2, 2), 4: (2, 2, 2, 2)}
COLD: dict[str, Callable[[Tensor, Tensor], object]] = {
    "linear": F.linear,
    "add": lambda x, w: x + x,
    "view": lambda x, w: x.view(x.shape[0], 4, 4),
    "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
}


def first_time(rank: int, rounds: int) -> dict[str, Samples]:
    """Seconds of the first call for shapes that were never seen, on a mesh of `rank` axes."""
    shape = SHAPES[rank]
    names = tuple("abcd"[:rank])
    theirs = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = Mesh(dict(zip(names, shape, strict=True)))
    sizes = iter(range(16, 1 << 16, 16))
    found: dict[str, Samples] = {name: {"shardlib": [], "dtensor": []} for name in COLD}
    for i in range(-2, rounds):
        for name, op in COLD.items():
            n = next(sizes)
            pairs = {"shardlib": _ours(mesh, names, n), "dtensor": _theirs(theirs, rank, n)}
            for who in list(pairs)[:: 1 if i % 2 else -1]:
                start = time.perf_counter()
                op(*pairs[who])
                if i >= 0:
                    found[name][who].append(time.perf_counter() - start)
    return found


def _ours(mesh: Mesh, names: Sequence[str], n: int) -> list[Tensor]:
    with mesh:
        w = P() if len(names) == 1 else P(names[-1])
        return [shard(torch.zeros(n, 16), P(names[0])), shard(torch.zeros(32, 16), w)]


def _theirs(mesh: DeviceMesh, rank: int, n: int) -> list[Tensor]:
    whole = [Replicate()] * rank
    w = whole if rank == 1 else [*whole[1:], Shard(0)]
    return [
        distribute_tensor(torch.zeros(n, 16), mesh, [Shard(0), *whole[1:]]),
        distribute_tensor(torch.zeros(32, 16), mesh, w),
    ]


def _fake_world(rank: int, rounds: int) -> dict[str, Samples]:
    """`first_time` in a process that takes itself for rank 0 of a large enough world."""
    dist.destroy_process_group()
    os.environ["SHARDLIB_CHECK"] = "off"  # the others are not there to say what values they have
    size = functools.reduce(lambda a, b: a * b, SHAPES[rank])
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    with torch.no_grad():
        return first_time(rank, rounds)


# --- tables -----------------------------------------------------------------------------------------------------------


def _median(seconds: Sequence[float], per: int = 1) -> float:
    return sorted(seconds)[len(seconds) // 2] / per * 1e6


def table(title: str, found: dict[str, Samples], per: int, peer: str) -> str:
    who = list(next(iter(found.values())))
    rows = []
    for name, samples in found.items():
        figures = [f"{_median(samples[w], per):.1f}" for w in who]
        rows.append([name, *figures, *(ratio(samples[w], samples[peer]) for w in who if w not in (peer, "plain"))])
    heads = ["op", *(f"{w} us" for w in who), *(f"{w} / {peer}" for w in who if w not in (peer, "plain"))]
    return markdown(title, heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\n")
    (warm, *_) = run_ranks(warm_on_ranks, options.ranks, options.rounds, timeout=300)
    print(table(f"warm, {options.ranks} Gloo ranks, us an op", warm, CALLS, "dtensor"))
    print(table("warm, virtual devices, us an op", warm_on_virtual_devices(options.rounds), CALLS, "plain"))
    for rank, shape in SHAPES.items():
        few = max(2, options.rounds // {1: 1, 2: 1, 3: 4, 4: 10}[rank])  # DTensor takes seconds there
        (cold,) = run_ranks(_fake_world, 1, rank, few, timeout=300)
        print(table(f"the first time, mesh {shape}, us an op", cold, 1, "dtensor"))


if __name__ == "__main__":
    main()
