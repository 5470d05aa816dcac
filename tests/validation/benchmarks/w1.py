"""The figures of W1 beside those of its peers: `python -m tests.validation.benchmarks.w1 --table all`.

Each table is one function that measures and returns markdown; only the targets are written here. With `--peers-only`
the columns of shardlib stay empty.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.models import w1

from . import peers_jax, planning, ranks, w1_backends
from .timing import apart, interleave, markdown, ms, ratio

ALL_MODES = ("dp8", "tp", "tp_sp", "fsdp8", "fsdp_tp")
TARGET_MB = {
    ("dp8", 2): 24.9,
    ("dp8", 8): 55.4,
    ("tp", 2): 11.6,
    ("tp", 8): 34.9,
    ("tp_sp", 2): 11.8,
    ("tp_sp", 8): 35.2,
    ("fsdp8", 2): 29.1,
    ("fsdp8", 8): 74.8,
    ("fsdp_tp", 2): 12.3,
    ("fsdp_tp", 8): 37.7,
}
PEER_OF = {"tp": "tp_fsdp", "tp_sp": "tp_fsdp", "fsdp_tp": "tp_fsdp", "fsdp8": "fsdp"}
PEER_TITLE = {"tp_fsdp": "DTensor TP + FSDP2", "fsdp": "FSDP2"}
RANKS_TARGET = {"tp_fsdp": "<= 0.65x", "fsdp": "<= 0.85x"}
MISSING = "-"
CHECKED_STEPS = 3


@dataclass(frozen=True)
class Options:
    """What a table is asked for; empty layers and modes mean the table's own."""

    layers: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    rounds: int = 10
    peers_only: bool = False


def bytes_table(o: Options) -> str:
    rows: list[tuple[object, ...]] = []
    for name in o.modes or ALL_MODES:
        for layers in o.layers or (2, 8):
            config = w1.Config(layers=layers)
            ours = MISSING if o.peers_only else f"{_plan(name, config).comm_bytes / 1e6:.1f}"
            jax = peers_jax.launch(name, layers)
            target = TARGET_MB.get((name, layers))
            limit = f"<= {target}" if target else MISSING
            rows.append((name, layers, ours, limit, f"{jax['wire_bytes'] / 1e6:.1f}", f"{jax['apart']:.0e}"))
    return markdown(
        "Wire MB a device and step, W1, 8 devices; weights and batch annotated (tp_sp: the residual stream too)",
        ("mode", "layers", "shardlib", "target", "JAX, the same annotations", "JAX's losses differ from torch by"),
        rows,
    )


def _plan(name: str, config: w1.Config) -> Any:
    from tests.models import w1_sharded

    mode = w1.modes(config)[name]
    with w1_sharded.mesh_of(mode):
        return w1_sharded.sharded_step(mode, config).plan(*w1.abstract(config))


def plan_table(o: Options) -> str:
    repeats = 3
    rows: list[tuple[object, ...]] = []
    for name in o.modes or ("tp",):
        for layers in o.layers or (32,):
            # Fresh processes that take turns: planning is paid once a process, cold caches included.
            ours, jax = [], []
            for _ in range(repeats):
                jax.append(peers_jax.launch(name, layers))
                if not o.peers_only:
                    ours.append(planning.launch(name, layers))
            peer = [r["trace"] + r["lower"] + r["compile"] for r in jax]
            what = f"{name} L={layers}"
            seconds = f"{statistics.median(peer):.2f} s"
            if o.peers_only:
                rows.append((f"{what}: plan against JAX's trace + lower + compile", MISSING, seconds, MISSING, "<= 2x"))
                continue
            total = [r["total"] for r in ours]
            against = ratio(total, peer)
            mine = f"{statistics.median(total):.2f} s ({_stages(ours)})"
            rows.append((f"{what}: plan against JAX's trace + lower + compile", mine, seconds, against, "<= 2x"))
            late = [sum(s for k, s in r["seconds"].items() if k in ("rules", "propagate", "lower")) for r in ours]
            early = [r["seconds"]["trace"] for r in ours]
            share = ratio(late, early)
            rows.append((f"{what}: rules + propagate + lower against trace", *_medians(late, early), share, "<= 0.5x"))
            grids: dict[str, list[float]] = {"1-d": [], "4-d": []}
            for _ in range(repeats):
                for case, samples in grids.items():
                    samples.append(planning.launch(case, layers)["total"])
            four, one = grids["4-d"], grids["1-d"]
            rows.append((f"L={layers}: 4-d mesh against 1-d mesh", *_medians(four, one), ratio(four, one), "<= 1.5x"))
    if not o.peers_only:
        big = planning.launch("llama-70b", 80)
        figure = f"{big['total']:.1f} s, {big['peak_gib']:.2f} GiB"
        rows.append(("Llama 70B on data=512, tensor=8", figure, MISSING, MISSING, "< 60 s, < 4 GiB"))
    return markdown("Planning", ("what", "shardlib", "against", "ratio (quartiles)", "target"), rows)


def _medians(*samples: list[float]) -> tuple[str, ...]:
    return tuple(f"{statistics.median(s):.2f} s" for s in samples)


def _stages(runs: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{stage} {statistics.median(r['seconds'][stage] for r in runs):.2f}" for stage in runs[0]["seconds"]
    )


@contextmanager
def _warm(mode: w1.Mode, config: w1.Config, *, skip: bool) -> Iterator[tuple[dict[str, Callable[[], Any]], str]]:
    """Our step and the eager one, both started from the same parameters, and how far their first losses are apart."""
    params, batch = w1.init(config), w1.batch(config)
    eager = w1.Eager(params, config)
    contestants: dict[str, Callable[[], Any]] = {"eager": lambda: eager.step(*batch)}
    if skip:
        yield contestants, MISSING
        return
    from tests.models import w1_sharded

    with w1_sharded.mesh_of(mode):
        step = w1_sharded.sharded_step(mode, config)
        state, *placed = w1_sharded.place(mode, params, *batch)

        def ours() -> Any:
            nonlocal state
            value, state = step(state, *placed)
            return value

        steps = range(CHECKED_STEPS)
        error = apart("shardlib", [float(ours()) for _ in steps], [float(eager.step(*batch)) for _ in steps])
        yield contestants | {"ours": ours}, f"{error:.0e}"


def _against_eager(what: str, mode: w1.Mode, config: w1.Config, target: str, o: Options) -> tuple[object, ...]:
    with _warm(mode, config, skip=o.peers_only) as (contestants, differ):
        samples = interleave(contestants, o.rounds)
    eager, ours = samples["eager"], samples.get("ours")
    if ours is None:
        return what, MISSING, ms(eager), MISSING, target, differ
    return what, ms(ours), ms(eager), ratio(ours, eager), target, differ


def one_table(o: Options) -> str:
    cases = [(f"W1 L={n}", w1.Config(layers=n), "<= 1.05x, aim 1.0x") for n in o.layers or (8,)]
    cases.append(("tiny W1 (batch 2, sequence 16, L=2)", w1.TINY, "aim 0.85x"))
    rows: list[tuple[object, ...]] = []
    for what, config, target in cases:
        mode = w1.Mode("one", {"data": 1}, {"batch": "data"}, w1.specs(config))
        rows.append(_against_eager(what, mode, config, target, o))
    return markdown("A warm call on a mesh of one device against plain torch eager", _EAGER_HEADER, rows)


def virtual_table(o: Options) -> str:
    rows: list[tuple[object, ...]] = []
    for name in o.modes or ALL_MODES:
        for layers in o.layers or (2, 8):
            config = w1.Config(layers=layers)
            mode = w1.modes(config)[name]
            rows.append(_against_eager(f"{name} L={layers}", mode, config, "<= 1.25x, aim 1.12x", o))
    return markdown("One step on 8 virtual devices against plain torch eager on the whole batch", _EAGER_HEADER, rows)


_EAGER_HEADER = ("what", "shardlib", "torch eager", "ratio (quartiles)", "target", "losses differ by")


def ranks_table(o: Options) -> str:
    rows: list[tuple[object, ...]] = []
    for name in o.modes or ("tp", "fsdp_tp", "fsdp8"):
        for layers in o.layers or (2, 8):
            peer = PEER_OF[name]
            run = ranks.launch(None if o.peers_only else name, peer, layers, rounds=o.rounds)
            samples = run["samples"]
            mine, against = MISSING, MISSING
            if "ours" in samples:
                mine, against = ms(samples["ours"]), str(ratio(samples["ours"], samples["peer"]))
            differ = ", ".join(f"{who} {error:.0e}" for who, error in run["apart"].items())
            theirs = f"{PEER_TITLE[peer]}: {ms(samples['peer'])}"
            rows.append((f"{name} L={layers}", mine, theirs, against, RANKS_TARGET[peer], differ))
    return markdown(
        "One step on 4 Gloo processes, one thread each, against DTensor by hand (rank 0's clock)",
        ("what", "shardlib", "peer", "ratio (quartiles)", "target", "losses differ from torch by"),
        rows,
    )


def shm_table(o: Options) -> str:
    rows: list[tuple[object, ...]] = []
    for name in o.modes or ALL_MODES:
        for layers in o.layers or (2, 8):
            samples, differ = w1_backends.launch(name, layers, o.rounds)
            against = ratio(samples["shm"], samples["torch"])
            figures = ms(samples["shm"]), ms(samples["torch"])
            rows.append((f"{name} L={layers}", *figures, against, "< 1x", f"{differ:.0e}"))
    return markdown(
        "One step on 4 processes, one thread each, collectives over shared memory against SHARDLIB_OPS=torch (Gloo)",
        ("what", "shared memory", "Gloo", "ratio (quartiles)", "target", "losses differ from torch by"),
        rows,
    )


TABLES = {
    "bytes": bytes_table,
    "plan": plan_table,
    "virtual": virtual_table,
    "one": one_table,
    "ranks": ranks_table,
    "shm": shm_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of W1 beside those of its peers.")
    parser.add_argument("--table", nargs="+", choices=[*TABLES, "all"], default=["all"])
    parser.add_argument("--layers", type=int, nargs="+", default=[])
    parser.add_argument("--modes", nargs="+", choices=ALL_MODES, default=[])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of this process")
    parser.add_argument("--peers-only", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    options = Options(tuple(a.layers), tuple(a.modes), a.rounds, a.peers_only)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    for name in TABLES if "all" in a.table else a.table:
        print(TABLES[name](options))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
