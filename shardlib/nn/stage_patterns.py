"""Reads a table from patterns of module names to the stages of a pipeline, and runs each module on its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import FragmentTag, enter_tag, leave_tag
from shardlib.nn.parameters import NamedTensor
from shardlib.sharding.mesh.mesh import Mesh

_HOOKS = "_shardlib_stage_hooks"


def assign_modules(module: nn.Module, table: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """Returns the stage of every module that a pattern names, or that holds parameters and no pattern names.

    A pattern is a module's name with `*`, `?` and `[...]` as in `fnmatch`; `layers.3.*` names `layers.3`, too. A module
    without a pattern takes the stage of the module before it; modules before the first named one take its stage. Raises
    `ShardingError` with all patterns that name no module, modules with two stages, and stages that do not exist.
    """
    faults = [] if mesh.stage_axis is not None else [f"{mesh} has no axis of stages"]
    names = [name for name, _ in module.named_modules() if name]
    assigned: dict[str, int] = {}
    for pattern, index in table.items():
        named = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(f"{name}.", pattern)]
        if not named:
            faults.append(f"{pattern!r} names no module")
        if type(index) is not int or index < 0:
            faults.append(f"{pattern!r}: {index!r} is no stage")
        faults += [
            f"{x} is on stage {assigned[x]} and, by {pattern!r}, on {index}"
            for x in named
            if assigned.get(x, index) != index
        ]
        assigned.update(dict.fromkeys(named, index))
    if faults:
        raise ShardingError(
            "the table of stages does not fit the module",
            faults,
            rule="every pattern names modules, and each module is on one stage",
            remedy='stages={"layers.[0-3].*": 0, "layers.[4-7].*": 1} on Mesh(stage=2, ..., stages="stage")',
        )
    owners = {name for name, m in module.named_modules() if name and [*m.parameters(recurse=False)]}
    return _with_neighbors([name for name in names if name in owners or name in assigned], assigned)


def _with_neighbors(names: Sequence[str], assigned: Mapping[str, int]) -> dict[str, int]:
    """Gives names without a stage that of their parent, else of the name in front, else of the first one behind."""
    result: dict[str, int] = {}
    last = next((assigned[name] for name in names if name in assigned), 0)
    for name in names:
        parents = (name[:i] for i, c in enumerate(name) if c == ".")
        inherited = [assigned[p] for p in parents if p in assigned]
        last = result[name] = assigned.get(name, inherited[-1] if inherited else last)
    return result


def stages_of_parameters(tensors: Sequence[NamedTensor], modules: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """Returns the stages of parameters, by name: those of the modules that hold them first.

    A part of the model behind the last stage of the mesh, of an interleaved schedule, is left out: the first step says
    which stage runs it.
    """
    held = {x.name: modules.get(x.name.rpartition(".")[0]) for x in tensors}
    return {name: index for name, index in held.items() if index is not None and index < mesh.stages}


def run_on_stages(
    module: nn.Module, tensors: Sequence[NamedTensor], table: Mapping[str, int] | None, mesh: Mesh
) -> dict[str, int]:
    """Makes modules run on the stages of a table, in place of an earlier one; returns the stages of parameters.

    Raises `ShardingError` as `assign_modules` does. Without a table (None), nothing changes.
    """
    if table is None:
        return {}
    modules = assign_modules(module, table, mesh)
    for handle in module.__dict__.pop(_HOOKS, ()):
        handle.remove()
    handles = []
    for name, index in modules.items():
        inner, hook = module.get_submodule(name), _OnStage(index)
        handles.append(inner.register_forward_pre_hook(hook.enter))
        handles.append(inner.register_forward_hook(hook.leave, always_call=True))
    module.__dict__[_HOOKS] = handles
    return stages_of_parameters(tensors, modules, mesh)


class _OnStage:
    """Enters a stage in front of a module's forward, and leaves it behind.

    In a trace, torch calls no hook behind a forward that raises, as the end of a checkpoint's second pass does. Then
    the code around it leaves the stage.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._before: list[FragmentTag] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        self._before.append(enter_tag(FragmentTag(stage=self.index)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        leave_tag(self._before.pop())
