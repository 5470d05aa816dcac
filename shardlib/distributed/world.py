"""World size, rank, device and process groups of this process.

This module reads the environment and `torch.distributed` for a `Mesh`, which holds no such state itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import backend_of, default_timeout, devices_of, timeout_of
from shardlib.distributed.rendezvous import initialize

_Key = tuple[tuple[tuple[str, int], ...], str]

# The groups belong to one default process group; a new default group needs new groups.
_meshes: dict[_Key, tuple[object, DeviceMesh]] = {}
_lock = Lock()


def initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def size() -> int | None:
    """The number of processes; None in a plain process."""
    if initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if {"WORLD_SIZE", "RANK"} <= os.environ.keys() else None


def rank() -> int:
    return dist.get_rank() if initialized() else int(os.environ.get("RANK", "0"))


def kind() -> Literal["virtual", "distributed"]:
    return "virtual" if size() is None else "distributed"


def check_size(mesh: str, devices: int) -> None:
    """Raises `ShardingError` unless a mesh has one device for every process."""
    if devices != size():
        raise ShardingError(
            f"{mesh} does not match the world size",
            [f"the mesh has {devices} devices, torch.distributed has {size()} ranks"],
            rule="a distributed mesh has one device for every rank",
            remedy=f"run with `torchrun --nproc-per-node {devices}` (in all), make the axes multiply to {size()} "
            "(the size -1 of one axis is inferred), or start the script with plain `python` for virtual devices",
        )


def device_type(device: str | None, kind: str) -> str:
    """Checks a device type; None is the backend's device where there is one, otherwise torch's default device."""
    if device is None:
        device = torch.get_default_device().type
        if kind == "distributed" and initialized() and dist.get_backend() == "nccl":
            device = "cuda"
        return device if device in ("cpu", "cuda") else "cpu"
    if device not in ("cpu", "cuda"):
        raise ShardingError(f"a mesh cannot be on device {device!r}", remedy='device="cpu" or device="cuda"')
    fault = ""
    if device == "cuda" and kind != "abstract" and not torch.cuda.is_available():
        fault = "torch sees no GPU in this process"
    if device == "cpu" and kind == "distributed" and initialized() and dist.get_backend() == "nccl":
        fault = "the process group's backend is nccl, which cannot reach CPU tensors"
    if fault:
        plan = "or Mesh.abstract(...) to plan only"
        if device == "cuda":
            plan = 'or plan without a GPU: Mesh.abstract(..., device="cuda"), and step.plan(...) of meta or CPU tensors'
        other = "cpu" if device == "cuda" else "cuda"
        raise ShardingError(
            f"a mesh cannot be on device {device!r}",
            [fault],
            remedy=f'device="{other}", {plan}',
        )
    return device


def timeout() -> timedelta:
    """Returns the time that a collective waits for its peers.

    This is SHARDLIB_TIMEOUT in seconds, else the timeout that the user passed to `init_process_group`, else 300 s.
    """
    text = os.environ.get("SHARDLIB_TIMEOUT", "")
    if not text:
        return _user_timeout() or timedelta(seconds=300)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ShardingError(f"SHARDLIB_TIMEOUT={text!r} is not a time", remedy="give a number of seconds above 0")
    return timedelta(seconds=seconds)


def current_device(device: str, kind: str) -> torch.device:
    """Returns the device of tensors of a program; an abstract mesh does not initialize a GPU."""
    if device == "cpu":
        return torch.device(device)
    return torch.device(device, 0 if kind == "abstract" else torch.cuda.current_device())


def _user_timeout() -> timedelta | None:
    """Returns the timeout that the user passed for the process group, if any."""
    group = dist.group.WORLD if initialized() else None
    if group is None:
        return None
    options = getattr(backend_of(group)(devices_of(group)[0]), "options", None)
    group_timeout = None if options is None else timeout_of(options)
    return None if group_timeout == default_timeout(dist.get_backend()) else group_timeout


def choose_gpu(device: str) -> None:
    """Selects this process's GPU on CUDA, unless the user has initialized the process group."""
    if device == "cuda" and not initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank() % torch.cuda.device_count())))


def remember(axes: Mapping[str, int], device: str, mesh: DeviceMesh) -> None:
    """Registers the DeviceMesh of these axes, whose groups all meshes of these axes will use."""
    with _lock:
        _meshes[tuple(axes.items()), device] = (dist.group.WORLD, mesh)


def device_mesh(
    axes: Mapping[str, int], device: str, run_watched: Callable[[Callable[[], DeviceMesh], str], DeviceMesh]
) -> DeviceMesh:
    """Returns the DeviceMesh of these axes over all ranks; every rank must make the same ones in the same order.

    `run_watched(task, description)` runs a task that waits for the other ranks.
    """
    key = tuple(axes.items()), device
    with _lock:
        if not initialized():
            initialize("nccl" if device == "cuda" else "gloo", timeout())
        owner, mesh = _meshes.get(key, (None, None))
        if mesh is None or owner is not dist.group.WORLD:
            make, text = partial(_new_device_mesh, axes, device), ", ".join(f"{name}={n}" for name, n in axes.items())
            mesh = make() if len(axes) == 1 else run_watched(make, f"make the groups of Mesh({text})")
            for old in [k for k, (group, _) in _meshes.items() if group is not dist.group.WORLD]:
                del _meshes[old]  # of a destroyed world
            _meshes[key] = (dist.group.WORLD, mesh)
        return mesh


def refuse_destroyed() -> NoReturn:
    """Raises the error for a rank without a process group."""
    raise ShardingError(
        "a tensor on ranks is used, and torch.distributed is not initialized",
        ["destroy_process_group() was called in this process, or nothing has placed a tensor in it yet"],
        rule="communication needs the process group of all ranks",
        remedy="destroy it when nothing is left to do, or call torch.distributed.init_process_group() again, on all "
        "ranks",
    )


def _new_device_mesh(axes: Mapping[str, int], device: str) -> DeviceMesh:
    # init_device_mesh would use the backend's own timeout (30 minutes on Gloo), so the groups are made here.
    grid = torch.arange(dist.get_world_size()).reshape(tuple(axes.values()))
    groups = [_group(grid.movedim(dim, -1).reshape(-1, grid.shape[dim])) for dim in range(grid.ndim)]
    return DeviceMesh.from_group(groups, device, grid, mesh_dim_names=tuple(axes))


def _group(rows: torch.Tensor) -> dist.ProcessGroup:
    """Makes a group for every row, and returns this rank's."""
    mine: list[dist.ProcessGroup] = []
    for row in rows.tolist():
        group = dist.group.WORLD if len(rows) == 1 else dist.new_group(row, timeout=timeout())
        if rank() in row and isinstance(group, dist.ProcessGroup):
            mine.append(group)
    return mine[0]
