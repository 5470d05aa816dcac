"""`parallelize`: a module of torch whose parameters live on a mesh, and whose forward is one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardlib.errors import ShardingError
from shardlib.jit import jit
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.modules.table import read
from shardlib.placing import shard
from shardlib.plans.plan import Plan
from shardlib.specs.spec import P, Spec, resolve_many
from shardlib.tensors.tensor import ShardedTensor


def parallelize(module: nn.Module, specs: Mapping[str, str | P | Spec], *, mesh: Mesh | None = None) -> nn.Module:
    """Place the parameters of a module on a mesh (default: the current one); returns the same module.

    `specs` says where parameters live, by patterns of their names, in which `*` stands for any text; a parameter that
    no pattern matches is whole on every device. Parameters become `ShardedTensor`s (and stay `nn.Parameter`s, tied ones
    tied), so an optimizer is made afterwards: one that was made before is refused when it steps. `forward` becomes one
    program for the mesh, its backward another, from one joint trace: `loss.backward()` and `optimizer.step()` work
    outside `jit` as they do on one device, and inside. `module.forward.plan(*args)` shows both. Where a batch lives is
    said of the batch (`shard(x, "batch@data ...")`).

    Raises `ShardingError`, with all offenders and before anything is placed, for patterns that match nothing or
    contradict each other, specs that do not fit, and parameters that live on another mesh or hold a gradient. (Hooks on
    a parameter stay with the plain one: register them afterwards.)

    Example:
        >>> import torch
        >>> from shardlib import Mesh, shard, typeof
        >>> with Mesh(data=2, tensor=2):
        ...     model = parallelize(nn.Linear(8, 4), {"weight": "out@tensor in", "bias": "out@tensor"})
        ...     out = model(shard(torch.ones(6, 8), "batch@data ..."))
        >>> out.sum().backward()
        >>> typeof(model.weight.grad), typeof(out)
        ('f32[4@tensor, 8]', 'f32[6@data, 4@tensor]')
    """
    mesh = mesh or current_mesh()
    name = type(module).__name__
    if mesh is None:
        raise ShardingError(
            f"parallelize({name}) is outside any mesh",
            rule="parameters live on the current mesh, or on the one that is given",
            remedy="put it inside `with Mesh(data=2, tensor=4):`, or give mesh=",
        )
    if not isinstance(module, nn.Module) or not isinstance(specs, Mapping):
        what = f"the module is of {type(module)}, specs are of {type(specs)}"
        raise ShardingError(what, remedy='parallelize(module, {"*.weight": "out@tensor in"})')
    names: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for at, x in module.named_parameters(remove_duplicate=False):
        known = names.setdefault(id(x), [])
        known.append(at)
        tensors.setdefault(known[0], x)
    others = [f"{at} is on {x.mesh}" for at, x in tensors.items() if isinstance(x, ShardedTensor) and x.mesh != mesh]
    if others:
        raise ShardingError(
            f"parallelize({name}) on {mesh} finds parameters on another mesh",
            others,
            rule="the parameters of a module live on one mesh",
            remedy="give that mesh, or a module that is not placed yet",
        )
    if held := [f"{at} of {list(x.shape)} has one" for at, x in tensors.items() if x.grad is not None]:
        raise ShardingError(
            f"parallelize({name}) would lose gradients",
            held,
            rule="parameters are replaced by new ones, which have no gradient yet",
            remedy="call module.zero_grad() before",
        )
    said = read(specs, map(tuple, names.values()))
    resolve_many([(at, tensors[at].shape, spec, None) for at, spec in said.items()], mesh, what="parallelize")
    with mesh:
        for ties in names.values():
            old = tensors[ties[0]]
            new = nn.Parameter(shard(old.detach(), said.get(ties[0], "...")), requires_grad=old.requires_grad)
            for at in ties:
                path, _, last = at.rpartition(".")
                setattr(module.get_submodule(path), last, new)
            _replaced[old] = f"{name}.{ties[0]}"
    if not isinstance(module.forward, Forward):
        module.forward = Forward(module.forward, mesh)
    return module


_replaced = WeakTensorKeyDictionary()  # a plain parameter that a module no longer has -> its name


def _refuse_replaced(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of parameters that no module has would step, and train nothing."""
    if not _replaced:
        return
    old = [_replaced[p] for group in optimizer.param_groups for p in group["params"] if p in _replaced]
    if old:
        raise ShardingError(
            f"this {type(optimizer).__name__} was made before parallelize",
            [f"{at} has been replaced by a parameter on the mesh" for at in old],
            rule="an optimizer steps the parameters that it was given",
            remedy="make the optimizer behind parallelize(module, ...), from module.parameters()",
        )


register_optimizer_step_pre_hook(_refuse_replaced)


class Forward:
    """A module's `forward` as a program for the mesh on which its parameters live."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh) -> None:
        self.mesh = mesh
        self.program = jit(fn)
        functools.update_wrapper(self, fn)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if current_mesh() is not None:
            return self.program(*args, **kwargs)
        with self.mesh:
            return self.program(*args, **kwargs)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan of forward and backward for these arguments; nothing runs."""
        with self.mesh:
            found: Plan = self.program.plan(*args, **kwargs)
            return found
