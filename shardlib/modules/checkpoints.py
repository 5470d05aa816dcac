"""Checkpoints of a training run by `torch.distributed.checkpoint`: saved on one mesh, loaded on any other.

A checkpoint is a folder `step-000120`, written aside and renamed when it is complete: killed in the middle, a run goes
on from the one before. Beside the tensors stands `run.json`: what is in the checkpoint, and how long its files are.
"""

from __future__ import annotations

import io
import json
import os
import pkgutil
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.errors import ShardingError
from shardlib.internals import pytree
from shardlib.placing import shard
from shardlib.tensors.tensor import ShardedTensor, typeof

_FACTS, _NEWEST, _VALUES = "run.json", "newest", "values.pt"
_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints in a folder, of which the last `keep` stay.

    What is saved is a dict by names: modules, optimizers, schedulers, gradient scalers and whatever else has a
    `state_dict`, tensors, and values that `torch.load` takes (the position in the data, options). The state of torch's
    generator for the CPU, from which jitted functions draw, comes along. On ranks all of them call every method.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from shardlib import Mesh, parallelize
        >>> model = parallelize(nn.Linear(4, 8), strategy="fsdp", mesh=Mesh(data=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Checkpoints(folder).save(3, {"model": model, "position": 96})
        ...     again = parallelize(nn.Linear(4, 8), strategy="zero1", mesh=Mesh(data=2))
        ...     found = Checkpoints(folder).load({"model": again, "position": 0})
        >>> found, path.name, torch.equal(again.weight.full_tensor(), model.weight.full_tensor())
        ({'position': 96, 'step': 3}, 'step-000003', True)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ShardingError(f"keep={keep} keeps no checkpoint", remedy="keep=1, or more")
        self.folder, self.keep = Path(folder), keep
        self._writing: Future[None] | None = None
        self._group: Any = None  # of ranks that write in the background: beside it, training communicates

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, in order."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(m[1]) for name in names if (m := _NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.folder / f"step-{step:06d}"

    def save(self, step: int, state: Mapping[str, Any], *, background: bool = False) -> Path:
        """Write a checkpoint, and drop those that are older than the last `keep`; returns its folder.

        With `background` it is written while the run goes on, from copies that are made before this returns. An error
        there is raised by the next `save`, or by `wait`. Raises `ShardingError` for names and values that a checkpoint
        cannot hold, what `pickle` raises of values, and `OSError`, on all ranks, where the folder cannot be written.
        """
        self.wait()
        aside, final = self.folder / f".step-{step:06d}.partial", self.path(step)
        tensors, values = _taken(state)
        facts = {"step": step, "entries": sorted(state), "tensors": {k: _kind(x) for k, x in tensors.items()}}
        values[""] = torch.get_rng_state()
        written = _written(values)
        if _leads():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        _meet()
        if background:
            if self._group is None and _on_ranks():
                self._group = dist.new_group(backend="gloo")
            going = _torchs("state_dict_saver.async_save", tensors, aside, process_group=self._group)
            thread = ThreadPoolExecutor(1)
            self._writing = thread.submit(self._end, going, written, facts, aside, final)
            thread.shutdown(wait=False)
            return final
        _torchs("state_dict_saver.save", tensors, aside)
        error = None
        try:
            self._finish(written, facts, aside, final)
        except OSError as first:
            error = first
        _agree(error)
        return final

    def wait(self) -> None:
        """Wait for what is being written in the background; raises what went wrong there."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            _agree(writing.exception())

    def load(self, state: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Fill what `state` holds from a checkpoint, by default the newest; returns its plain values, and the step.

        An optimizer may be fresh: its moments come to live where its parameters' strategy says. Raises
        `ShardingError`, before anything is changed, where there is no such checkpoint, where it is incomplete, and with
        all offenders where it is one of something else.
        """
        self.wait()
        done = self.steps
        step = done[-1] if step is None and done else step
        if step not in done:
            raise ShardingError(
                f"there is no checkpoint of step {step} in {self.folder}" if step is not None
                else f"there is no checkpoint in {self.folder}",
                [f"there are those of {', '.join(map(str, done))}"] if done else [],
                remedy="begin the run, or name its folder",
            )  # fmt: skip
        path = self.path(step)
        facts, values = self._read(path)
        into = _into(state, facts, values, path)
        _torchs("state_dict_loader.load", into, path)
        for name, x in state.items():
            if hasattr(x, "load_state_dict"):
                x.load_state_dict(_filled(values[name], into))
            elif isinstance(x, Tensor):
                with torch.no_grad():
                    x.copy_(into[name])
        torch.set_rng_state(values[""])
        return {k: values[k] for k, x in state.items() if _is_value(x)} | {"step": step}

    # ------------------------------------------------------------------------------------------------------------------

    def _end(self, going: Any, values: bytes, facts: dict[str, Any], aside: Path, final: Path) -> None:
        going.result()
        self._finish(values, facts, aside, final)

    def _finish(self, values: bytes, facts: dict[str, Any], aside: Path, final: Path) -> None:
        """What the first rank does when all have written: the rest, the new name, the pointer; older ones go."""
        if not _leads():
            return
        (aside / _VALUES).write_bytes(values)
        facts["files"] = {file.name: file.stat().st_size for file in sorted(aside.iterdir())}
        (aside / _FACTS).write_text(json.dumps(facts))
        old = self.folder / f".{final.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():  # one of the same step is there until the new one is complete
            final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        pointer = self.folder / f".{_NEWEST}"
        pointer.write_text(final.name)
        pointer.replace(self.folder / _NEWEST)
        for step in [s for s in self.steps if s <= facts["step"]][: -self.keep]:
            shutil.rmtree(self.path(step))

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint says of itself, if all of its files are there."""
        try:
            facts: dict[str, Any] = json.loads((path / _FACTS).read_text())
            sizes = {name: (path / name).stat().st_size if (path / name).exists() else None for name in facts["files"]}
        except (OSError, ValueError, KeyError) as error:
            raise ShardingError(
                f"{path} is no checkpoint", [f"{_FACTS}: {error}"], remedy="load another step: checkpoints.steps"
            ) from error
        wrong = [
            f"{name} is missing" if size is None else f"{name} has {size} bytes of {facts['files'][name]}"
            for name, size in sizes.items()
            if size != facts["files"][name]
        ]
        if wrong:
            raise ShardingError(
                f"the checkpoint {path} is incomplete",
                wrong,
                rule="its files are as long as when they were written",
                remedy=f"load an older one: load(state, step=...), of {', '.join(map(str, self.steps[:-1])) or 'none'}",
            )
        return facts, torch.load(path / _VALUES)


# --- what a state is made of ------------------------------------------------------------------------------------------


def _taken(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state by path (`optimizer.state.0.exp_avg`), and what else is in it, by entry."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    if wrong := [repr(name) for name in state if not isinstance(name, str) or not name or "." in name]:
        raise ShardingError(
            "a checkpoint has entries without a name of their own",
            wrong,
            rule="an entry is called by a text without dots, which stand between it and what is in it",
            remedy='save(step, {"model": model, "cache_k": k})',
        )
    for name, x in state.items():
        held = x.state_dict() if hasattr(x, "state_dict") else x
        values[name] = held if _is_value(x) else _emptied(name, held, tensors)
    cut = [f"{name} holds {typeof(y)}" for name, x in values.items() for y in _placed(x)]
    if cut:
        raise ShardingError(
            "a checkpoint is given tensors on a mesh inside of plain values",
            cut,
            rule="modules, optimizers, and tensors of their own name are written in pieces; other values as they are",
            remedy='give each a name: save(step, {"cache_k": k})',
        )
    return tensors, values


def _placed(x: Any) -> list[ShardedTensor]:
    return [y for y in pytree.tree_leaves(x) if isinstance(y, ShardedTensor)]


def _written(values: Any) -> bytes:
    """The values as a file has them; raises what they could not be read by."""
    out = io.BytesIO()
    torch.save(values, out)
    torch.load(io.BytesIO(out.getvalue()))
    return out.getvalue()


def _emptied(at: str, x: Any, tensors: dict[str, Tensor]) -> Any:
    """The same, in which paths stand for the tensors."""
    if isinstance(x, Tensor):
        if at in tensors:
            raise ShardingError(
                f"two tensors of a checkpoint are called {at}",
                [f"{_said(_kind(tensors[at]))} and {_said(_kind(x))}"],
                rule="a tensor's name is the keys that lead to it, with dots between",
                remedy="give one of the keys in the state_dict another name",
            )
        tensors[at] = x.detach()
        return {_PATH: at}
    if isinstance(x, Mapping):
        return {k: _emptied(f"{at}.{k}", y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(_emptied(f"{at}.{i}", y, tensors) for i, y in enumerate(x))
    return x


def _filled(x: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(x, dict):
        if x.keys() == {_PATH}:
            return tensors[x[_PATH]]
        return {k: _filled(y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_filled(y, tensors) for y in x)
    return x


_PATH = "<tensor>"


def _is_value(x: Any) -> bool:
    return not hasattr(x, "load_state_dict") and not isinstance(x, Tensor)


def _kind(x: Tensor) -> list[Any]:
    return [list(x.shape), str(x.dtype).removeprefix("torch.")]


def _into(
    state: Mapping[str, Any], facts: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Tensors to load into, by path: those of the state, and what a fresh optimizer has yet to make."""
    saved: dict[str, list[Any]] = facts["tensors"]
    here, _ = _taken(state)
    for name, x in state.items():
        if isinstance(x, torch.optim.Optimizer) and name in values:
            here |= {k: y for k, y in _moments(name, x, values[name], saved).items() if k not in here}
    wrong = [f"{name} is not in it" for name in state if name not in facts["entries"]]
    wrong += [f"{name} is in it, and nothing takes it" for name in facts["entries"] if name not in state]
    known = {k: x for k, x in here.items() if k.partition(".")[0] in facts["entries"]}
    wrong += [f"{k} of {_said(_kind(x))} is not in it" for k, x in known.items() if k not in saved]
    wrong += [
        f"{k} of {_said(kind)} is in it, and nothing takes it"
        for k, kind in saved.items()
        if k not in here and k.partition(".")[0] in state
    ]
    wrong += [
        f"{k} is {_said(saved[k])} in it, and {_said(_kind(x))} here"
        for k, x in known.items()
        if k in saved and saved[k] != _kind(x)
    ]
    if wrong:
        raise ShardingError(
            f"the checkpoint {path} is one of something else",
            wrong,
            rule="what is loaded has the names, shapes and dtypes of what was saved",
            remedy="load into the model and the optimizer that the run had, on any mesh",
        )
    return {k: here[k] for k in saved}


def _moments(
    name: str, optimizer: torch.optim.Optimizer, held: Any, saved: Mapping[str, list[Any]]
) -> dict[str, Tensor]:
    """What a fresh optimizer is to hold: as large as a parameter, and where its moments live, or whole and plain."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    made: dict[str, Tensor] = {}
    for i, entries in held.get("state", {}).items():
        for key in entries:
            if (at := f"{name}.state.{i}.{key}") in saved and i < len(params):
                shape, dtype = saved[at][0], getattr(torch, saved[at][1])
                p = params[i]
                made[at] = torch.empty(shape, dtype=dtype)
                if isinstance(p, ShardedTensor) and list(p.shape) == shape:
                    with p.mesh:
                        like = torch.empty_like(p.detach(), dtype=dtype)
                        home = getattr(p, "moments_at", None)
                        made[at] = like if home is None else shard(like, home)
    return made


def _said(kind: list[Any]) -> str:
    return f"{kind[1]}{kind[0]}"


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _leads() -> bool:
    return not _on_ranks() or dist.get_rank() == 0


def _meet() -> None:
    if _on_ranks():
        dist.barrier()


def _agree(error: BaseException | None) -> None:
    """Raise the error of the first rank on all of them, that none goes on alone."""
    told = [None if error is None else str(error)]
    if _on_ranks():
        dist.broadcast_object_list(told)
    if error is not None:
        raise error
    if told[0] is not None:
        raise OSError(f"rank 0 could not write a checkpoint: {told[0]}")


def _torchs(name: str, tensors: dict[str, Tensor], path: Path, **how: Any) -> Any:
    """Call torch's function of this name, imported when it is needed."""
    function = pkgutil.resolve_name(f"torch.distributed.checkpoint.{name}")
    # It remarks that all is in one process, which is what we ask for; also later, from a thread of its own.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return function(tensors, checkpoint_id=path, no_dist=not _on_ranks(), **how)
