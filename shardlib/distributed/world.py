"""What a process knows about its peers: world size, rank, device, process groups.

What a `Mesh` needs from the environment and from `torch.distributed` is here; the mesh itself keeps none of it.
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
from shardlib.core.torch_private import backend_of, default_timeout, devices_of, timeout_of

_Key = tuple[tuple[tuple[str, int], ...], str]

# The groups belong to one default process group: after it is destroyed and made anew, they are made anew too.
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
    """Refuse a mesh that has not exactly one device for every process."""
    if devices != size():
        raise ShardingError(
            f"{mesh} does not match the world size",
            [f"the mesh has {devices} devices, torch.distributed has {size()} ranks"],
            rule="a distributed mesh has one device for every rank",
            remedy=f"run with `torchrun --nproc-per-node {devices}` (in all), make the axes multiply to {size()}, "
            "or start the script with plain `python` for virtual devices",
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
    """How long a collective waits for its peers: SHARDLIB_TIMEOUT seconds; without it as long as the user told
    `init_process_group`, or 300 s where that was not told either.
    """
    text = os.environ.get("SHARDLIB_TIMEOUT", "")
    if not text:
        return _told_timeout() or timedelta(seconds=300)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ShardingError(f"SHARDLIB_TIMEOUT={text!r} is not a time", remedy="give a number of seconds above 0")
    return timedelta(seconds=seconds)


def current_device(device: str, kind: str) -> torch.device:
    """Where a program that is made in this process has its tensors; an abstract mesh touches no GPU."""
    if device == "cpu":
        return torch.device(device)
    return torch.device(device, 0 if kind == "abstract" else torch.cuda.current_device())


def _told_timeout() -> timedelta | None:
    """The timeout that the process group was given by its maker, if it was; all backends keep one."""
    group = dist.group.WORLD if initialized() else None
    if group is None:
        return None
    options = getattr(backend_of(group)(devices_of(group)[0]), "options", None)
    told = None if options is None else timeout_of(options)
    return None if told == default_timeout(dist.get_backend()) else told


def choose_gpu(device: str) -> None:
    """On CUDA, make this process's GPU the current one, unless the user has set up the process group already."""
    if device == "cuda" and not initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank() % torch.cuda.device_count())))


def remember(axes: Mapping[str, int], device: str, mesh: DeviceMesh) -> None:
    """Use the groups of this DeviceMesh for all meshes of these axes."""
    with _lock:
        _meshes[tuple(axes.items()), device] = (dist.group.WORLD, mesh)


def device_mesh(
    axes: Mapping[str, int], device: str, waited: Callable[[Callable[[], DeviceMesh], str], DeviceMesh]
) -> DeviceMesh:
    """The DeviceMesh of these axes over all ranks; all ranks must ask for the same ones in the same order.

    `waited` runs what waits for them, under a name, and knows what to do when one is gone.
    """
    key = tuple(axes.items()), device
    with _lock:
        if not initialized():
            _initialize("nccl" if device == "cuda" else "gloo")
        owner, mesh = _meshes.get(key, (None, None))
        if mesh is None or owner is not dist.group.WORLD:
            make, text = partial(_new, axes, device), ", ".join(f"{name}={n}" for name, n in axes.items())
            mesh = make() if len(axes) == 1 else waited(make, f"make the groups of Mesh({text})")
            for old in [
                k for k, (of, _) in _meshes.items() if of is not dist.group.WORLD
            ]:  # worlds that were destroyed
                del _meshes[old]
            _meshes[key] = (dist.group.WORLD, mesh)
        return mesh


def refuse_destroyed() -> NoReturn:
    """Raise the error for a rank that has no process group, or none any more."""
    raise ShardingError(
        "a tensor on ranks is used, and torch.distributed is not initialized",
        ["destroy_process_group() was called in this process, or nothing has placed a tensor in it yet"],
        rule="whatever moves pieces needs the process group of all ranks",
        remedy="destroy it when nothing is left to do, or call torch.distributed.init_process_group() again, on all "
        "ranks",
    )


def _initialize(backend: str) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout())
    except ValueError as error:  # of an environment that is not a launcher's
        raise ShardingError(
            "torch.distributed cannot be initialized",
            [str(error)],
            rule="RANK and WORLD_SIZE are set, so this process is taken for a rank",
            remedy="start it by torchrun, call torch.distributed.init_process_group(...) first, or unset them",
        ) from error


def _new(axes: Mapping[str, int], device: str) -> DeviceMesh:
    # init_device_mesh would give the groups the backend's own timeout (30 minutes on Gloo), so they are made here.
    grid = torch.arange(dist.get_world_size()).reshape(tuple(axes.values()))
    groups = [_group(grid.movedim(dim, -1).reshape(-1, grid.shape[dim])) for dim in range(grid.ndim)]
    return DeviceMesh.from_group(groups, device, grid, mesh_dim_names=tuple(axes))


def _group(rows: torch.Tensor) -> dist.ProcessGroup:
    """This rank's group, of those that the rows list."""
    mine: list[dist.ProcessGroup] = []
    for row in rows.tolist():
        group = dist.group.WORLD if len(rows) == 1 else dist.new_group(row, timeout=timeout())
        if rank() in row and isinstance(group, dist.ProcessGroup):
            mine.append(group)
    return mine[0]
