"""Saves checkpoints of a training run by `torch.distributed.checkpoint` on one mesh, and loads them on any other.

A checkpoint is a folder `step-000120`. It is written under another name and renamed when complete, so a killed run
continues from the checkpoint before. Its file `run.json` lists the contents and the files.
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlib.core.byte_sizes import folder_bytes
from shardlib.core.errors import ShardingError
from shardlib.core.progress import show_progress
from shardlib.core.text_tables import format_si
from shardlib.distributed import torch_waits, world
from shardlib.nn.checkpoint_entries import describe_state, destinations, insert_tensors, is_value, split_state
from shardlib.nn.checkpoint_values import encode_values, read_values

_REQUIRED_FACTS = {"step", "entries", "tensors", "files"}
_FACTS, _NEWEST, _VALUES = "run.json", "newest", "values.pt"
_NAME = re.compile(r"step-(\d{6,})|\.step-(\d{6,})\.old")
_SUMMED = (".metadata", _VALUES)  # files with checksums in run.json; files of tensors have checksums inside


class Checkpoints:
    """The checkpoints in a folder; the last `keep` stay.

    A state is a dict by names. It may hold objects with a `state_dict` (modules, optimizers, schedulers, gradient
    scalers), tensors, and values that `torch.load` takes (the position in the data, options). The state of torch's CPU
    generator, from which jitted functions draw, is saved, too. On ranks all of them call every method.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from shardlib import Mesh, parallelize
        >>> model = parallelize(nn.Linear(4, 8), strategy="fsdp", mesh=Mesh(data=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Checkpoints(folder).save(3, {"model": model, "position": 96})
        ...     again = parallelize(nn.Linear(4, 8), strategy="zero1", mesh=Mesh(data=2))
        ...     values = Checkpoints(folder).load({"model": again, "position": 0})
        >>> values, path.name, torch.equal(again.weight.full_tensor(), model.weight.full_tensor())
        ({'position': 96, 'step': 3}, 'step-000003', True)
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ShardingError(f"keep={keep} keeps no checkpoint", remedy="keep=1, or more")
        self.folder, self.keep = Path(folder), keep
        self._writing: Future[None] | None = None
        self._group: Any = None  # ranks that write in the background, while training communicates over another group

    @property
    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        steps = {int(m[1] or m[2]) for name in names if (m := _NAME.fullmatch(name))}
        return sorted(step for step in steps if self.path(step).is_dir())

    def path(self, step: int) -> Path:
        """Returns the folder of a checkpoint: the renamed old one if saving over it was interrupted."""
        final, old = self.folder / f"step-{step:06d}", self.folder / f".step-{step:06d}.old"
        return old if old.is_dir() and not final.is_dir() else final

    @property
    def newest(self) -> int | None:
        """The step that was saved last, or else the highest; a run that went back has a lower last step."""
        done, pointer = self.steps, self.folder / _NEWEST
        m = _NAME.fullmatch(pointer.read_text()) if pointer.is_file() else None
        last = int(m[1]) if m is not None and m[1] else None
        return last if last in done else done[-1] if done else None

    def save(self, step: int, state: Mapping[str, Any], *, background: bool = False) -> Path:
        """Writes a checkpoint, and deletes those older than the last `keep`; returns its folder.

        With `background` a thread writes it from copies that are made before this returns. The next `save`, or `wait`,
        raises an error of the thread. Before anything is written, all ranks raise `ShardingError` for names and values
        that a checkpoint cannot hold. All raise `OSError` if the folder cannot be written.
        """
        self.wait()
        partial, final = self.folder / f".step-{step:06d}.partial", self.folder / f"step-{step:06d}"
        fault: ShardingError | None = None
        try:
            tensors, values = split_state(state)
            values[""] = torch.get_rng_state()
            content = encode_values(values)
        except ShardingError as refusal:
            fault = refusal
        _refuse_disagreement(self.folder, step, fault)
        facts = {"step": step, "crc": torch.serialization.get_crc32_options()} | describe_state(state, tensors)
        tensors = {k: x for k, x in tensors.items() if x.numel()}  # facts describe empty tensors completely
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        if _on_ranks():
            _watched(dist.barrier, "save a checkpoint")
        if background:
            if self._group is None and _on_ranks():
                self._group = _watched(
                    lambda: dist.new_group(backend="gloo", timeout=world.timeout()),
                    "make a group that saves checkpoints",
                )
            saving = _call_torch("state_dict_saver.async_save", tensors, partial, process_group=self._group)
            thread = ThreadPoolExecutor(1)
            self._writing = thread.submit(self._finish_async, saving, content, facts, partial, final)
            thread.shutdown(wait=False)
            return final
        error = None
        with show_progress(lambda: f"saves {final.name}: {format_si(folder_bytes(partial), 'B')}"):
            _call_torch("state_dict_saver.save", tensors, partial)
            try:
                self._finish(content, facts, partial, final)
            except OSError as first:
                error = first
        _raise_on_all_ranks(lambda: error)
        return final

    def wait(self) -> None:
        """Waits for the checkpoint that is written in the background; raises the error of writing it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            _raise_on_all_ranks(writing.exception)

    def load(self, state: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Loads a checkpoint, by default the newest, into `state`; returns its plain values and the step.

        An optimizer may be fresh: its moments are placed by its parameters' strategy. Before anything changes, raises
        `ShardingError` for a missing or incomplete checkpoint, and with all offenders for one of another state.
        """
        self.wait()
        done = self.steps
        step = self.newest if step is None else step
        _refuse_disagreement(self.folder, step)
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
            _call_torch(
                "state_dict_loader.load", {k: x for k, x in into.items() if x.numel()}, path, storage_reader=reader
            )
        except pkgutil.resolve_name("torch.distributed.checkpoint.CheckpointException") as error:
            wrong = [f"rank {rank}: {str(first).partition('. ')[0]}" for rank, (first, _) in error.failures.items()]
            raise ShardingError(f"the checkpoint {path} cannot be read", wrong, remedy=self._older(step)) from error
        for name, x in sorted(state.items(), key=lambda entry: _load_order(entry[1])):
            if hasattr(x, "load_state_dict"):
                x.load_state_dict(insert_tensors(values[name], into))
            elif isinstance(x, Tensor):
                with torch.no_grad():
                    x.copy_(into[name])
        torch.set_rng_state(values[""])
        return {k: values[k] for k, x in state.items() if is_value(x)} | {"step": step}

    def _finish_async(self, saving: Any, values: bytes, facts: dict[str, Any], partial: Path, final: Path) -> None:
        saving.result()
        self._finish(values, facts, partial, final)

    def _finish(self, values: bytes, facts: dict[str, Any], partial: Path, final: Path) -> None:
        """Writes values and facts on the first rank, renames the folder, and deletes older checkpoints."""
        if not _is_first_rank():
            return
        (partial / _VALUES).write_bytes(values)
        facts["files"] = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        facts["sums"] = {name: crc32((partial / name).read_bytes()) for name in _SUMMED if name in facts["files"]}
        (partial / _FACTS).write_text(json.dumps(facts))
        old = self.folder / f".{final.name}.old"
        if final.exists():  # keep the old checkpoint of this step until the new one is complete
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        pointer = self.folder / f".{_NEWEST}"
        pointer.write_text(final.name)
        pointer.replace(self.folder / _NEWEST)
        for step in [s for s in self.steps if s <= facts["step"]][: -self.keep]:
            shutil.rmtree(self.path(step))

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the facts and values of a checkpoint; raises `ShardingError` if files are missing or damaged."""
        try:
            facts: dict[str, Any] = json.loads((path / _FACTS).read_text())
            if (
                not isinstance(facts, dict)
                or not facts.keys() >= _REQUIRED_FACTS
                or not isinstance(facts["files"], dict)
            ):
                raise ValueError(f"it does not say {', '.join(sorted(_REQUIRED_FACTS))}")
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
        return facts, read_values(path / _VALUES)

    def _older(self, step: int) -> str:
        others = ", ".join(str(other) for other in self.steps if other != step)
        return f"load another one: load(state, step=...), of {others}" if others else "begin the run again"


def _load_order(x: Any) -> int:
    """Returns a sort key: objects that may refuse their state first, then optimizers, then modules and tensors."""
    return isinstance(x, torch.optim.Optimizer) + 2 * isinstance(x, nn.Module | Tensor)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _on_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_first_rank() -> bool:
    return not _on_ranks() or dist.get_rank() == 0


def _refuse_disagreement(folder: Path, step: int | None, fault: ShardingError | None = None) -> None:
    """Raises `ShardingError` on all ranks if they name different checkpoints, or if a rank has a fault."""
    names, faults = [(str(folder.absolute()), step)], [fault and str(fault)]
    if _on_ranks():
        all_ranks: list[Any] = [None] * dist.get_world_size()
        _watched(lambda: dist.all_gather_object(all_ranks, (names[0], faults[0])), "name a checkpoint")
        names, faults = [name for name, _ in all_ranks], [text for _, text in all_ranks]
    if fault is not None:
        raise fault
    if texts := [f"rank {rank}: {text}" for rank, text in enumerate(faults) if text]:
        raise ShardingError("another rank refuses to save", texts, rule="ranks save a checkpoint together")
    if len(set(names)) > 1:
        raise ShardingError(
            "ranks name different checkpoints",
            [
                f"rank {rank}: {'none' if at is None else f'step {at}'} in {where}"
                for rank, (where, at) in enumerate(names)
            ],
            rule="a checkpoint is one folder, which all ranks see and write to together",
            remedy="let one rank make the folder, and tell the others its name (dist.broadcast_object_list)",
        )


def _watched(task: Callable[[], Any], description: str) -> Any:
    """Runs a task that may wait for other ranks; raises `ShardingError` that names the lost ones."""
    return torch_waits.run_watched(task, description) if _on_ranks() else task()


def _raise_on_all_ranks(result: Callable[[], BaseException | None]) -> None:
    """Raises the error that `result` waits for on this rank, or else that of rank 0."""
    error: BaseException | None = None
    message: list[str | None] = [None]

    def share() -> None:
        nonlocal error
        error = result()
        message[0] = None if error is None else str(error)
        if _on_ranks():
            dist.broadcast_object_list(message)

    _watched(share, "finish a checkpoint")
    if error is not None:
        raise error
    if message[0] is not None:
        raise OSError(f"rank 0 could not write a checkpoint: {message[0]}")


def _reader(path: Path) -> Any:
    """Returns torch's reader of a checkpoint with a check of the tensors' checksums, which `torch.load` skips.

    Each rank checks the tensors that it reads. The reader raises `ValueError` with all damaged ones, and reads none.
    """
    reader = pkgutil.resolve_name("torch.distributed.checkpoint.FileSystemReader")(path)
    read = reader.read_data

    def read_checked(plan: Any, planner: Any) -> Any:
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

    reader.read_data = read_checked
    return reader


# Errors of a damaged archive, which may look encrypted, compressed differently, or too short.
_BROKEN = (BadZipFile, RuntimeError, EOFError, ValueError, OSError, zlib.error, lzma.LZMAError, struct.error)


def _call_torch(name: str, tensors: dict[str, Tensor], path: Path, **options: Any) -> Any:
    """Calls this function of `torch.distributed.checkpoint`, imported on use."""
    function = pkgutil.resolve_name(f"torch.distributed.checkpoint.{name}")
    # Torch warns of a save in one process, which is intended; its thread warns later, so the filter stays.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return _watched(
        lambda: function(tensors, checkpoint_id=path, no_dist=not _on_ranks(), **options), f"run {name} of torch"
    )
