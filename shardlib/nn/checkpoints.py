"""Checkpoints of a training run by `torch.distributed.checkpoint`: saved on one mesh, loaded on any other.

A checkpoint is a folder `step-000120`, written aside and renamed when it is complete: killed in the middle, a run goes
on from the one before. Beside the tensors stands `run.json`: what is in the checkpoint, and what files it has.
"""

from __future__ import annotations

import json
import lzma
import os
import pkgutil
import re
import shutil
import struct
import warnings
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.nn.checkpoint_entries import destinations, facts_of, filled, is_value, taken
from shardlib.nn.checkpoint_values import read, written

_SAID = {"step", "entries", "tensors", "files"}
_FACTS, _NEWEST, _VALUES = "run.json", "newest", "values.pt"
_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
_SUMMED = (".metadata", _VALUES)  # files of which there are sums; those of tensors have one of each, which torch made


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
        found = {int(m[1] or m[2]) for name in names if (m := _NAME.fullmatch(name))}
        return sorted(step for step in found if self.path(step).is_dir())

    def path(self, step: int) -> Path:
        """The folder of a checkpoint, which has its old name still where a new one was not put in its place."""
        final, old = self.folder / f"step-{step:06d}", self.folder / f".step-{step:06d}.old"
        return old if old.is_dir() and not final.is_dir() else final

    @property
    def newest(self) -> int | None:
        """The step that was saved last, if that is there, or the highest: a run may have gone back."""
        done, pointer = self.steps, self.folder / _NEWEST
        m = _NAME.fullmatch(pointer.read_text()) if pointer.is_file() else None
        last = int(m[1]) if m is not None and m[1] else None
        return last if last in done else done[-1] if done else None

    def save(self, step: int, state: Mapping[str, Any], *, background: bool = False) -> Path:
        """Write a checkpoint, and drop those that are older than the last `keep`; returns its folder.

        With `background` it is written while the run goes on, from copies that are made before this returns. An error
        there is raised by the next `save`, or by `wait`. Raises, on all ranks, `ShardingError` for names and values
        that a checkpoint cannot hold, before anything is written, and `OSError` where the folder cannot be written.
        """
        self.wait()
        aside, final = self.folder / f".step-{step:06d}.partial", self.folder / f"step-{step:06d}"
        fault: ShardingError | None = None
        try:
            tensors, values = taken(state)
            values[""] = torch.get_rng_state()
            content = written(values)
        except ShardingError as refusal:
            fault = refusal
        _refuse_others(self.folder, step, fault)
        facts = {"step": step, "crc": torch.serialization.get_crc32_options()} | facts_of(state, tensors)
        tensors = {k: x for k, x in tensors.items() if x.numel()}  # of the others, the facts say all
        if _leads():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        _meet()
        if background:
            if self._group is None and _on_ranks():
                self._group = dist.new_group(backend="gloo")
            going = _torchs("state_dict_saver.async_save", tensors, aside, process_group=self._group)
            thread = ThreadPoolExecutor(1)
            self._writing = thread.submit(self._end, going, content, facts, aside, final)
            thread.shutdown(wait=False)
            return final
        _torchs("state_dict_saver.save", tensors, aside)
        error = None
        try:
            self._finish(content, facts, aside, final)
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
        step = self.newest if step is None else step
        _refuse_others(self.folder, step)
        if step not in done:
            raise ShardingError(
                f"there is no checkpoint of step {step} in {self.folder}" if step is not None
                else f"there is no checkpoint in {self.folder}",
                [f"there are those of {', '.join(map(str, done))}"] if done else [],
                remedy="begin the run, or name its folder",
            )  # fmt: skip
        path = self.path(step)
        facts, values = self._read(path)
        into = destinations(state, facts, values, path)
        reader = _reader(path) if facts.get("crc") else None
        try:
            _torchs("state_dict_loader.load", {k: x for k, x in into.items() if x.numel()}, path, storage_reader=reader)
        except pkgutil.resolve_name("torch.distributed.checkpoint.CheckpointException") as error:
            wrong = [f"rank {rank}: {str(first).partition('. ')[0]}" for rank, (first, _) in error.failures.items()]
            raise ShardingError(f"the checkpoint {path} cannot be read", wrong, remedy=self._older(step)) from error
        for name, x in sorted(state.items(), key=lambda entry: _late(entry[1])):
            if hasattr(x, "load_state_dict"):
                x.load_state_dict(filled(values[name], into))
            elif isinstance(x, Tensor):
                with torch.no_grad():
                    x.copy_(into[name])
        torch.set_rng_state(values[""])
        return {k: values[k] for k, x in state.items() if is_value(x)} | {"step": step}

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
        facts["sums"] = {name: crc32((aside / name).read_bytes()) for name in _SUMMED if name in facts["files"]}
        (aside / _FACTS).write_text(json.dumps(facts))
        old = self.folder / f".{final.name}.old"
        if final.exists():  # one of the same step is there until the new one is complete
            shutil.rmtree(old, ignore_errors=True)
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
            if not isinstance(facts, dict) or not facts.keys() >= _SAID or not isinstance(facts["files"], dict):
                raise ValueError(f"it does not say {', '.join(sorted(_SAID))}")
            sizes = {name: (path / name).stat().st_size if (path / name).exists() else None for name in facts["files"]}
        except (OSError, ValueError) as error:
            raise ShardingError(
                f"{path} is no checkpoint", [f"{_FACTS}: {error}"], remedy="load another step: checkpoints.steps"
            ) from error
        wrong = [
            f"{name} is missing" if size is None else f"{name} has {size} bytes of {facts['files'][name]}"
            for name, size in sizes.items()
            if size != facts["files"][name]
        ]
        wrong = wrong or [
            f"{name} has other bytes than were written"
            for name, total in facts.get("sums", {}).items()
            if crc32((path / name).read_bytes()) != total
        ]
        if wrong:
            raise ShardingError(
                f"the checkpoint {path} is incomplete, or damaged",
                wrong,
                rule="its files are as they were written",
                remedy=self._older(facts["step"]),
            )
        return facts, read(path / _VALUES)

    def _older(self, step: int) -> str:
        others = ", ".join(str(other) for other in self.steps if other != step)
        return f"load another one: load(state, step=...), of {others}" if others else "begin the run again"


def _late(x: Any) -> int:
    """What may refuse to be loaded comes before what was compared as a whole."""
    return isinstance(x, torch.optim.Optimizer) + 2 * isinstance(x, nn.Module | Tensor)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _leads() -> bool:
    return not _on_ranks() or dist.get_rank() == 0


def _meet() -> None:
    if _on_ranks():
        dist.barrier()


def _refuse_others(folder: Path, step: int | None, fault: ShardingError | None = None) -> None:
    """Raise `ShardingError`, on all ranks, where they do not name one checkpoint, or where one of them has a fault."""
    said, faults = [(str(folder.absolute()), step)], [fault and str(fault)]
    if _on_ranks():
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (said[0], faults[0]))
        said, faults = [one for one, _ in every], [text for _, text in every]
    if fault is not None:
        raise fault
    if texts := [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]:
        raise ShardingError("another rank refuses to save", texts, rule="ranks save a checkpoint together")
    if len(set(said)) > 1:
        raise ShardingError(
            "ranks name different checkpoints",
            [
                f"rank {rank}: {'none' if at is None else f'step {at}'} in {where}"
                for rank, (where, at) in enumerate(said)
            ],
            rule="a checkpoint is one folder, which all ranks see and write to together",
            remedy="let one rank make the folder, and tell the others its name (dist.broadcast_object_list)",
        )


def _agree(error: BaseException | None) -> None:
    """Raise the error of the first rank on all of them, that none goes on alone."""
    told = [None if error is None else str(error)]
    if _on_ranks():
        dist.broadcast_object_list(told)
    if error is not None:
        raise error
    if told[0] is not None:
        raise OSError(f"rank 0 could not write a checkpoint: {told[0]}")


def _reader(path: Path) -> Any:
    """Torch's reader of a checkpoint, which looks at the sums that its files have of tensors; `torch.load` does not.

    A rank does so with what it reads. Raises `ValueError`, with all that is damaged, before any of it is read.
    """
    reader = pkgutil.resolve_name("torch.distributed.checkpoint.FileSystemReader")(path)
    read = reader.read_data

    def checked(plan: Any, planner: Any) -> Any:
        stored = dict.fromkeys(item.storage_index for item in plan.items)
        wrong = [f"{at.fqn} in {reader.storage_data[at].relative_path}" for at in stored if _is_damaged(at)]
        if wrong:
            raise ValueError(f"it has other bytes than were written: {'; '.join(dict.fromkeys(wrong))}")
        return read(plan, planner)

    def _is_damaged(at: Any) -> bool:
        stored = reader.storage_data[at]
        with (path / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            content = BytesIO(file.read(stored.length))
        try:
            return ZipFile(content).testzip() is not None
        except _BROKEN:
            return True

    reader.read_data = checked
    return reader


# What a broken archive may be taken for: none, one that is encrypted, compressed otherwise, or ends too soon.
_BROKEN = (BadZipFile, RuntimeError, EOFError, ValueError, OSError, zlib.error, lzma.LZMAError, struct.error)


def _torchs(name: str, tensors: dict[str, Tensor], path: Path, **how: Any) -> Any:
    """Call torch's function of this name, imported when it is needed."""
    function = pkgutil.resolve_name(f"torch.distributed.checkpoint.{name}")
    # It remarks that all is in one process, which is what we ask for; also later, from a thread of its own.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return function(tensors, checkpoint_id=path, no_dist=not _on_ranks(), **how)
