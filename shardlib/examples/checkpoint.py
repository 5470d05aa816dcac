"""Checkpoints with `torch.distributed.checkpoint`, which load on another mesh, or on one device.

A checkpoint is a folder `step-000120`: written aside and renamed when it is complete, so that such a folder is usable.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

import shardlib as sl

State = dict[str, Tensor]
_FACTS = "run.json"


def steps(folder: Path) -> list[int]:
    """The steps of which `folder` holds a complete checkpoint, in order."""
    names = (path.name for path in folder.glob("step-*")) if folder.is_dir() else ()
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))


def save(folder: Path, step: int, state: State, facts: dict[str, Any], mesh: sl.Mesh, keep: int = 2) -> Path:
    """Write `state` (ShardedTensors) and the JSON-able `facts`; older checkpoints than the last `keep` go.

    Ranks of torch.distributed each write what they hold, as DTensors; virtual devices share a process, and write whole
    tensors. All ranks must call this.
    """
    final = folder / f"step-{step:06d}"
    aside = folder / f".step-{step:06d}.partial"
    distributed = mesh.kind == "distributed"
    if mesh.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _wait(distributed)
    values = {name: sl.to_dtensor(t) if distributed else t.full_tensor() for name, t in _sharded(state).items()}
    with _quiet():
        dcp_save(values, checkpoint_id=aside, no_dist=not distributed)
    _wait(distributed)
    if mesh.rank == 0:
        (aside / _FACTS).write_text(json.dumps({"step": step} | facts))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:06d}")
    _wait(distributed)
    return final


def facts(folder: Path, step: int) -> dict[str, Any]:
    """What `save` was given beside the tensors, and the step."""
    loaded: dict[str, Any] = json.loads((folder / f"step-{step:06d}" / _FACTS).read_text())
    return loaded


def load(folder: Path, step: int, into: State, mesh: sl.Mesh) -> State:
    """The tensors of a checkpoint, laid out as `into` (ShardedTensors) is, whatever mesh wrote them."""
    path = folder / f"step-{step:06d}"
    sharded = _sharded(into)
    distributed = mesh.kind == "distributed"
    values = {name: sl.to_dtensor(t) if distributed else t.full_tensor() for name, t in sharded.items()}
    with _quiet():
        dcp_load(values, checkpoint_id=path, no_dist=not distributed)
    if distributed:
        return {name: sl.from_dtensor(t, mesh) for name, t in values.items() if isinstance(t, DTensor)}
    with mesh:
        return {name: sl.shard(t, sharded[name].spec) for name, t in values.items()}


def _sharded(state: State) -> dict[str, sl.ShardedTensor]:
    plain = sorted(name for name, t in state.items() if not isinstance(t, sl.ShardedTensor))
    if plain:
        raise TypeError(f"a checkpoint holds ShardedTensors; these are plain: {', '.join(plain)}")
    return {name: t for name, t in state.items() if isinstance(t, sl.ShardedTensor)}


def _wait(distributed: bool) -> None:
    if distributed:
        dist.barrier()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the remark that DCP runs in one process, which is what we ask of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
