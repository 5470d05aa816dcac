"""Ranks that run different sequences of collectives: each pair must be refused, on both ranks, with both lines named.

python -m tests.validation.stress.mismatched_ranks --pairs 200 --transport shm

`--transport gloo` and `--transport far` (Gloo without a way round it) are the others.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from tests.helpers.ranks import TRANSPORTS, Pool, speak

Ops = dict[str, Callable[[], Any]]


def operations() -> Ops:
    """Things that communicate, by name, each on a line of its own; all are on one mesh."""
    mesh = sl.Mesh(x=2)
    mesh.__enter__()
    torch.manual_seed(0)
    w, v = (sl.shard(torch.randn(4, 6), "a@x b") for _ in range(2))
    long = sl.shard(torch.randn(1 << 16), "a@x")
    total, mean = sl.jit(lambda x: x.sum()), sl.jit(lambda x: (x * x).mean())
    two = sl.jit(lambda x, y: ((x @ y.t()).sum(), x.sum(0)))
    return {
        "full": lambda: w.full_tensor(),
        "full_again": lambda: w.full_tensor(),
        "other": lambda: v.full_tensor(),
        "long": lambda: long.full_tensor(),
        "move": lambda: w.redistribute("a b@x"),
        "jit": lambda: total(w),
        "jit_again": lambda: total(v),
        "mean": lambda: mean(w),
        "two": lambda: two(w, v),
        "eager": lambda: w @ v.t(),
        "item": lambda: float(w.sum()),
        "draw": lambda: v.clone().normal_(),
        "place": lambda: sl.shard(torch.ones(4, 2), "a b@x"),
        "end": lambda: w.sum(0).full_tensor(),
    }


@dataclass(frozen=True)
class Seen:
    """What a rank saw: the error, when the first different operation began, and when the error came."""

    error: str
    began: float
    ended: float


def pair(rng: random.Random, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Two sequences that begin alike and then are not the same; all end in "end"."""
    some = [name for name in names if name != "end"]
    common, rest = ([rng.choice(some) for _ in range(rng.randrange(1, 4))] for _ in range(2))
    kind = rng.choice(["extra", "other", "swapped", "missing"])
    one, two = list(rest), list(rest)
    if kind == "extra":
        two.insert(rng.randrange(len(two) + 1), rng.choice(some))
    elif kind == "other":
        two[rng.randrange(len(two))] = rng.choice(some)
    elif kind == "swapped":
        two.reverse()
    else:
        del two[rng.randrange(len(two))]
    if one == two:
        two.append(rng.choice(some))
    sequences = [*common, *one, "end"], [*common, *two, "end"]
    return sequences if rng.random() < 0.5 else sequences[::-1]


def first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def run_pairs(
    pairs: Sequence[tuple[list[str], list[str]]], port: int, warm: Sequence[bool], transport: str
) -> list[Seen]:
    """On a rank: every pair in a world of its own, whose store is at this port."""
    speak(transport)
    rank, seen = dist.get_rank(), []
    for i, (sequences, before) in enumerate(zip(pairs, warm, strict=True)):
        dist.destroy_process_group()
        gc.collect()  # the last world goes now, not in the middle of a refusal: Gloo waits for what is still under way
        store = dist.PrefixStore(f"{i}", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        ops, mine = operations(), sequences[rank]
        if before:
            for name in sorted({*sequences[0], *sequences[1]}):
                ops[name]()
        apart, began, error = first_difference(*sequences), 0.0, ""
        try:
            for k, name in enumerate(mine):
                if k == apart:
                    began = time.monotonic()
                ops[name]()
        except sl.ShardingError as caught:
            error = str(caught)
        seen.append(Seen(error, began, time.monotonic()))
    return seen


def lines() -> dict[str, str]:
    """Where each operation is, as errors print it."""
    source = Path(__file__).read_text().split("\n")
    names = ((number, re.match(r'\s+"(\w+)": lambda: ', text)) for number, text in enumerate(source, 1))
    return {name[1]: f"mismatched_ranks.py:{number}" for number, name in names if name}


def faults(pairs: Sequence[tuple[list[str], list[str]]], results: Sequence[Sequence[Seen]]) -> list[str]:
    """What is wrong with what the ranks saw."""
    where, wrong = lines(), []
    for i, (sequences, *seen) in enumerate(zip(pairs, *results, strict=True)):
        apart = first_difference(*sequences)
        want = [where[sequence[apart]] for sequence in sequences]
        for rank, s in enumerate(seen):
            if not s.error:
                wrong.append(f"pair {i} {sequences}: rank {rank} was told nothing")
            elif not all(place in s.error for place in want):
                wrong.append(f"pair {i} {sequences}: rank {rank} is not told {want}, but {s.error}")
    return wrong


def campaign(count: int, transport: str, seed: int = 0) -> tuple[list[str], list[float]]:
    """Faults, and the seconds after which each pair was refused."""
    rng = random.Random(seed)
    pairs = [pair(rng, list(lines())) for _ in range(count)]
    warm = [rng.random() < 0.7 for _ in pairs]
    with closing(Pool(2)) as pool:
        results = pool.run(run_pairs, pairs, pool.store.port, warm, transport, timeout=60.0 + 30 * count)
    late = [max(s.ended for s in seen) - max(s.began for s in seen) for seen in zip(*results, strict=True)]
    return faults(pairs, results), late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--transport", choices=TRANSPORTS, default="shm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong, late = campaign(options.pairs, options.transport, options.seed)
    print("\n".join(wrong))
    print(f"{options.pairs} pairs on {options.transport}: {len(wrong)} faults, refused after {max(late):.2f} s at most")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
