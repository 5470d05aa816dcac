"""The mesh: a grid of devices with named axes, the logical rules, and the current mesh.

A mesh is a value: two meshes with the same axes, rules, kind and device are equal. State of the process (the process
groups of a distributed mesh, the stack of `with` blocks) is never part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh

from shardlib.core.context import mesh_queries
from shardlib.core.errors import ShardingError
from shardlib.distributed import torch_waits, turns, world
from shardlib.sharding.mesh import mesh_format
from shardlib.sharding.mesh.device_grid import DeviceGrid
from shardlib.sharding.mesh.machine import Machine
from shardlib.sharding.mesh.mesh_format import Kind, MeshAxes, Rules, format_mesh, list_axes

# Every thread and asyncio task has a stack of its own; None stands for a `with no_mesh():` block.
_stack: ContextVar[tuple[Mesh | None, ...]] = ContextVar("shardlib_mesh", default=())


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Mesh(DeviceGrid):
    """A grid of devices with named axes, the right-most varying fastest over the ranks.

    `rules` map logical names of tensor dims to a mesh axis, several (major first) or None; they are a dict, or pairs as
    in flax. In a plain process the devices are virtual; under torchrun, or once `torch.distributed` is initialized,
    they are its ranks, and the sizes must agree. One axis may have size -1, which is inferred from the number of ranks,
    so that a script also runs on fewer machines; in a plain process it is 1. `device` is "cpu" or "cuda" (None: torch's
    default device). Axes may also be given as a dict. On a `strict` mesh every logical name in a spec needs a rule
    (which may be None) or axes of its own, as in `ff@tensor` and `ff@()`.

    `stages` names the axis along which a model is cut into the stages of a pipeline. It shards no tensor, so it is in
    `shape` and not in `axes`. A tensor on the mesh is on every stage; one on `mesh.at(stage=1)` is on that stage alone.

    `machine` is an `sl.Machine` or its text, whose speeds the compiler uses to choose layouts, and ranks to choose how
    collectives cross machines. Without one all links are alike.

    A mesh reads as the mapping `shape`, axis to size in order, as in JAX: `mesh["data"]` is a size, `in`, iteration and
    `len` are over the names of axes (`mesh.size` counts devices). Raises `ShardingError` for bad names and sizes, rules
    that name no axis, and a mesh that does not match the world size.

    Example:
        >>> mesh = Mesh(data=2, tensor=4, rules={"batch": "data", "ff": "tensor"})
        >>> mesh.size, mesh.axis_names, mesh.kind
        (8, ('data', 'tensor'), 'virtual')
        >>> mesh["tensor"], list(mesh), "pod" in mesh, dict(mesh.shape)
        (4, ['data', 'tensor'], False, {'data': 2, 'tensor': 4})
        >>> Mesh(data=2, tensor=4, rules=[("batch", "data"), ("ff", "tensor")]) == mesh
        True
        >>> mesh.coords(6)
        {'data': 1, 'tensor': 2}
        >>> Mesh.parse(str(mesh)) == mesh
        True
        >>> pipeline = Mesh(stage=2, data=2, stages="stage")
        >>> pipeline.size, pipeline.stages, dict(pipeline.axes), pipeline.at(stage=1)
        (4, 2, {'data': 2}, Mesh(stage=2, data=2, stages='stage').at(stage=1))
        >>> with mesh:
        ...     current_mesh() is mesh
        True
    """

    rules: Mapping[str, MeshAxes]
    device: str
    strict: bool
    machine: Machine | None

    def __init__(
        self,
        *axes: Mapping[str, int],
        rules: Rules | None = None,
        device: str | None = None,
        strict: bool = False,
        machine: Machine | str | None = None,
        stages: str | None = None,
        **sizes: int,
    ) -> None:
        self._set(list_axes(axes, sizes), rules, world.kind(), device, strict, machine, stages)

    @classmethod
    def abstract(
        cls,
        *axes: Mapping[str, int],
        rules: Rules | None = None,
        device: str | None = None,
        strict: bool = False,
        machine: Machine | str | None = None,
        stages: str | None = None,
        **sizes: int,
    ) -> Self:
        """Makes a mesh for planning only, of any size, in any process; no tensor can be placed on it.

        Example:
            >>> Mesh.abstract(data=512, tensor=8)
            Mesh.abstract(data=512, tensor=8)
        """
        mesh = cls.__new__(cls)
        mesh._set(list_axes(axes, sizes), rules, "abstract", device, strict, machine, stages)
        return mesh

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        rules: Rules | None = None,
        strict: bool = False,
        machine: Machine | str | None = None,
        stages: str | None = None,
    ) -> Self:
        """Converts a `torch.distributed` DeviceMesh with dim names, over all ranks in order; shares its groups."""
        names = device_mesh.mesh_dim_names
        ranks = device_mesh.mesh.flatten().tolist()
        if names is None or ranks != list(range(world.size() or 1)):
            fault = "its dims have no names" if names is None else f"it holds ranks {ranks} of {world.size()}"
            raise ShardingError(
                f"{device_mesh} cannot become a Mesh",
                [fault],
                rule="a mesh names every axis and covers all ranks of the world, in order",
                remedy="init_device_mesh(device, shape, mesh_dim_names=(...)) over the whole world",
            )
        mesh = cls.__new__(cls)
        sizes = list(zip(names, device_mesh.mesh.shape, strict=True))
        mesh._set(sizes, rules, "distributed", device_mesh.device_type, strict, machine, stages)
        world.remember(mesh.shape, mesh.device, device_mesh)
        return mesh

    def _set(
        self,
        sizes: list[tuple[str, int]],
        rules: Rules | None,
        kind: Kind,
        device: str | None,
        strict: bool,
        machine: Machine | str | None,
        stages: str | None,
    ) -> None:
        normalized, rule_faults = mesh_format.normalize_rules(rules)
        parsed = None if machine is None else Machine.convert(machine)
        written, size_faults = sizes, list[str]()
        if kind != "abstract":
            sizes, size_faults = mesh_format.infer_size(sizes, world.size())
        if faults := [
            *size_faults,
            *mesh_format.find_faults(sizes, normalized, stages),
            *rule_faults,
            *(parsed.faults(dict(sizes)) if parsed is not None else ()),
        ]:
            raise ShardingError(
                f"{format_mesh(kind, written, normalized, 'cpu', stages=stages)} is not a mesh",
                faults,
                rule="axes have distinct names (identifiers) and sizes of 1 or more; a rule maps a name to axes",
                remedy=mesh_format.remedy_of(faults),
            )
        shape = {name: int(size) for name, size in sizes}
        axes = {name: size for name, size in shape.items() if name != stages}
        self.__dict__.update(axes=MappingProxyType(axes), shape=MappingProxyType(shape), stage_axis=stages, stage=None)
        self.__dict__.update(rules=MappingProxyType(normalized), kind=kind)
        self.__dict__.update(device=world.device_type(device, kind), strict=bool(strict), machine=parsed)
        if kind == "distributed":
            world.check_size(format_mesh(kind, sizes, {}, "cpu", stages=stages), self.size)
            world.choose_gpu(self.device)
            if world.initialized():
                turns.current()  # introduces this rank to the others

    def at(self, **stage: int | None) -> Mesh:
        """Returns the part of the mesh at one stage, on which tensors of that stage live; for None, the whole mesh.

        Raises `ShardingError` if the argument is not the axis of stages, or is no stage.

        Example:
            >>> mesh = Mesh(stage=2, data=2, stages="stage")
            >>> mesh.at(stage=1).stage, mesh.at(stage=1).at(stage=None) == mesh
            (1, True)
        """
        ((name, place),) = stage.items() if len(stage) == 1 else ((None, None),)
        if name is None or name != self.stage_axis or (place is not None and not 0 <= place < self.stages):
            request = ", ".join(f"{k}={x!r}" for k, x in stage.items())
            valid = f"{self.stage_axis}=0 to {self.stages - 1}" if self.stage_axis else "it has no axis of stages"
            raise ShardingError(
                f"{self} has no part at({request})", [valid], remedy='Mesh(stage=2, ..., stages="stage")'
            )
        return self.on_stage(place)

    def on_stage(self, place: int | None) -> Mesh:
        """Returns the part of the mesh at one stage; for None, the whole mesh."""
        if place == self.stage:
            return self
        other = Mesh.__new__(Mesh)
        other.__dict__.update({k: x for k, x in self.__dict__.items() if not k.startswith("_")}, stage=place)
        return other

    @property
    def whole(self) -> Mesh:
        """The mesh of all stages."""
        return self.on_stage(None)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The `torch.distributed` DeviceMesh of a distributed mesh (initializes the process group when needed)."""
        if self.kind != "distributed":
            raise ShardingError(
                f"{self} has no DeviceMesh",
                [f"it is {self.kind}: its devices are not ranks of torch.distributed"],
                remedy=f"run the script with `torchrun --nproc-per-node {self.size}`",
            )
        return world.device_mesh(self.shape, self.device, torch_waits.run_watched)

    def __enter__(self) -> Self:
        _stack.set((*_stack.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _leave(self)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        # The order of axes is part of the value, the order of rules is not.
        shape, rules = tuple(self.shape.items()), frozenset(self.rules.items())
        return shape, rules, self.kind, self.device, self.strict, self.machine, self.stage_axis, self.stage

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.parse, (str(self),)

    def __str__(self) -> str:
        at = "" if self.machine is None else str(self.machine)
        text = format_mesh(
            self.kind, list(self.shape.items()), self.rules, self.device, self.strict, at, self.stage_axis
        )
        return text if self.stage is None else f"{text}.at({self.stage_axis}={self.stage})"

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> Mesh:
        """Parses the text that `str` prints (`Mesh(data=2, rules={"batch": "data"})`, or `Mesh.abstract(...)`).

        Example:
            >>> Mesh.parse("Mesh.abstract(data=4, rules={'batch': 'data'})").size
            4
        """
        kind, axes, words, stage = mesh_format.parse_mesh(text)
        mesh = (Mesh.abstract if kind == "Mesh.abstract" else Mesh)(*axes, **{"device": "cpu", **words})
        return mesh.at(**stage) if stage else mesh


def current_mesh() -> Mesh | None:
    """Returns the mesh of the innermost `with mesh:` block of this thread; None outside.

    Example:
        >>> with Mesh(data=2):
        ...     current_mesh()
        Mesh(data=2)
        >>> current_mesh() is None
        True
    """
    mesh_queries.again()
    return peek_mesh()


def peek_mesh() -> Mesh | None:
    """Returns the current mesh without making a trace depend on it."""
    return (_stack.get() or (None,))[-1]


@contextmanager
def no_mesh() -> Iterator[None]:
    """Inside `with no_mesh():` code that is written for a mesh runs as plain torch code.

    `shard` returns its tensor unchanged, after it has checked the spec against the tensor's dims and sizes (but not its
    axes); a jitted function runs without `jit`. The innermost block counts: `with mesh:` inside places tensors again.
    So a layer can be tested without a mesh, unchanged.

    Example:
        >>> import torch, shardlib as sl
        >>> def layer(x, w):
        ...     return sl.shard(x @ w, "batch ff@tensor")
        >>> with no_mesh():
        ...     layer(torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    _stack.set((*_stack.get(), None))
    try:
        yield
    finally:
        _leave(None)


def is_without_mesh() -> bool:
    """Returns whether the innermost block of this thread is `with no_mesh():`."""
    return bool(_stack.get()) and peek_mesh() is None


def _leave(block: Mesh | None) -> None:
    # Generators may leave their blocks out of order, so remove the innermost entry of this very mesh.
    stack = _stack.get()
    last = max(i for i, mesh in enumerate(stack) if mesh is block)
    _stack.set(stack[:last] + stack[last + 1 :])
