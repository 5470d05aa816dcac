"""`parallelize`: places a torch module's parameters on a mesh and compiles its forward to one program.

Parameters become `ShardedTensor`s (and stay `nn.Parameter`s, tied ones tied). `forward` becomes one program for the
mesh, its backward another, from one joint trace. `loss.backward()` and `optimizer.step()` work outside `jit` as on one
device, and inside.

A module whose Python or shapes depend on values of tensors runs op by op on ShardedTensors instead, with one warning
that names the line. So does a module that keeps computed tensors in lists, as hooks do, and one whose backward hooks
look at values or change anything. If such hooks only read a number of the module, they see its value at the time of the
call.

With dropout, a parallelized model draws other random numbers than plain torch with the same seed, and the same ones on
every mesh. So compare it with a mesh of one device, `sl.Mesh(data=1)`, or use `sl.check`. A module that runs op by op
draws the numbers of plain code under `sl.global_random()`.

Writes of forward to its arguments reach the caller. If forward is one program, a list, dict or object among the
arguments may not change; the call is refused. Inside `jit`, and op by op, it may. A class that gets another `forward`
later, and a copy of the module, run the forward that they would run on one device.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import jit, nn

from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.schedule_options import Schedule
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.strided_only import refuse_dtensors
from shardlib.nn import hf_tp_plan
from shardlib.nn.forward import Batch, Forward
from shardlib.nn.mixed_precision import Precisions, policy_of
from shardlib.nn.parameters import (
    NamedTensor,
    list_named,
    refuse_classes,
    refuse_lazy,
    retie,
)
from shardlib.nn.place_parameters import Placer
from shardlib.nn.spec_table import match_table, matches, numberless, refuse_table
from shardlib.nn.stage_patterns import run_on_stages
from shardlib.nn.strategies import SEQUENCE, TENSOR, Strategy, StrategyAxes, axes_for, resolve_strategy
from shardlib.nn.suggest import propose_specs
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.spec import P, Spec, axes_of_dims, parse, resolve_many
from shardlib.tensor.replicas import check_every
from shardlib.tensor.sharded_tensor import ShardedTensor


def parallelize(
    module: nn.Module,
    specs: Mapping[str, str | P | Spec] | None = None,
    *,
    strategy: str | Strategy | Callable[[], Strategy] | None = None,
    precision: Precisions = None,
    mesh: Mesh | None = None,
    remat: str | Sequence[str] | None = None,
    memory: str | int | None = None,
    schedule: Schedule | str | None = None,
    planning: str | float | None = None,
    verify_every: int | None = None,
    stages: Mapping[str, int] | None = None,
) -> nn.Module:
    """Places the parameters of a module on a mesh (default: the current one); returns the same module.

    `specs` maps patterns of parameter names, in which `*` stands for any text, to specs. A parameter without a pattern
    stays as it is; a plain one is replicated. Without `specs`, on a mesh with an axis `tensor`, the module's own table
    decides (`tp_plan` of transformers); if that names no layer, `suggest` proposes specs.

    `strategy` is `"ddp"`, `"zero1"`, `"zero2"`, `"fsdp"`, `"hsdp"`, or one of `sl.strategies` with named axes. It also
    shards parameters, gradients and moments over data axes: those of the rule for `batch`, or of the usual names. The
    batch, plain arguments of a call with as many rows as the first one, is sharded over them (dim 1 over `seq`),
    unless an argument is placed already by `shard` or, from a rank's own rows, by `from_local`.

    `precision` is the dtype to compute in (`torch.bfloat16`), a `Precision`, or a dict of them by patterns. Parameters,
    sums of their gradients, and batch normalization keep their dtype. `remat`, `memory`, `schedule` and `planning` are
    as in `jit`; inside a jitted function, that function's options hold. So is `verify_every`: it compares parameters,
    buffers and their optimizers' state before every so many calls of forward. A later call keeps what it leaves out.

    `stages` maps patterns of module names to stages: `{"layers.[0-3].*": 0, "layers.[4-7].*": 1}`. Other modules go
    with their neighbors. Without it, `sl.stage` in the model's code says where it runs, or else `sl.partition`.

    Parameters are new objects, so make the optimizer afterwards: one of old parameters is refused when it steps.
    `module.forward.plan(*args)` shows the programs. Raises `ShardingError` before anything is placed.

    Example:
        >>> import torch
        >>> from shardlib import Mesh, typeof
        >>> with Mesh(data=2, tensor=2):
        ...     model = parallelize(nn.Linear(8, 4), {"weight": "out@tensor in", "bias": "out@tensor"})
        >>> typeof(model.weight), typeof(model(torch.ones(6, 8)))
        ('f32[4@tensor, 8]', 'f32[6@data, 4@tensor]')
    """
    mesh = _check_arguments(module, specs, mesh or current_mesh())
    strategy_axes = resolve_strategy(strategy).on(mesh)
    tensors = _list_placeable(module, mesh)
    placer = Placer(module, tensors, mesh, strategy_axes, keeps_earlier=strategy is None)
    replaced = vars(module).get("forward")
    earlier = replaced if isinstance(replaced, Forward) else None  # else it is the user's own
    table = _default_specs(module, tensors, mesh, strategy_axes) if specs is None else _read_specs(specs, placer)
    policy = policy_of(precision, module, tensors) or (earlier.policy if earlier else None)
    options = (earlier.options if earlier else MemoryOptions()).but(remat, memory, schedule, planning)
    every = check_every(verify_every) or (earlier.verify_every if earlier else None)
    placer.stages = run_on_stages(module, tensors, stages, mesh)
    placer.place(table, {} if policy is None else {name: each.parameter for name, each in policy.by_name.items()})
    own = replaced if earlier is None else earlier.own
    batch = Batch(*({a: mesh.axes[a] for a in axes} for axes in (strategy_axes.batch, _sequence_axes(mesh))))
    module.forward = Forward(module, own, mesh, batch, policy, options, every)
    return module


def _check_arguments(module: nn.Module, specs: Any, mesh: Mesh | None) -> Mesh:
    """Returns the mesh; raises `ShardingError` for arguments of other types, TorchScript, and a missing mesh."""
    name = type(module).__name__
    if not isinstance(module, nn.Module) or not isinstance(specs, Mapping | None):
        types = f"the module is of {type(module)}, specs are of {type(specs)}"
        raise ShardingError(types, remedy='parallelize(module, {"*.weight": "out@tensor in"}, mesh=mesh)')
    if mesh is None:
        raise ShardingError(
            f"parallelize({name}) is outside any mesh",
            rule="parameters live on the current mesh, or on the one that is given",
            remedy="put it inside `with Mesh(data=2, tensor=4):`, or give mesh=",
        )
    if isinstance(module, jit.ScriptModule):
        raise ShardingError(
            f"parallelize({name}) is given TorchScript",
            rule="parameters are put in the place of a module's own, and a ScriptModule keeps its own",
            remedy="give the module that it was made of",
        )
    return mesh


def _list_placeable(module: nn.Module, mesh: Mesh) -> list[NamedTensor]:
    """Returns the parameters; refuses those without shape, of own classes, DTensors, and on another mesh."""
    retie(module)
    tensors = list_named(module)
    caller = f"parallelize({type(module).__name__})"
    refuse_lazy(caller, tensors)
    refuse_dtensors(caller, ((x.name, x.tensor) for x in list_named(module, buffers=True)))
    refuse_classes(caller, tensors)
    others = [
        f"{x.name} is on {x.tensor.mesh}"
        for x in tensors
        if isinstance(x.tensor, ShardedTensor) and x.tensor.mesh.whole != mesh
    ]
    if others:
        raise ShardingError(
            f"{caller} on {mesh} finds parameters on another mesh",
            others,
            rule="the parameters of a module live on one mesh",
            remedy="give that mesh, or a new module; sl.Checkpoints carries values from mesh to mesh",
        )
    return tensors


def _default_specs(
    module: nn.Module, tensors: Sequence[NamedTensor], mesh: Mesh, strategy_axes: StrategyAxes
) -> dict[str, Spec]:
    """Returns specs for a caller who gives none: those of the module's own table."""
    inner = [axis for axis in mesh.axes if axis in TENSOR]
    used = {*strategy_axes.batch, *strategy_axes.parameters, *_sequence_axes(mesh), *inner}
    table = hf_tp_plan.table_of(module) if inner else {}
    specs: dict[str, Spec] = {}
    if table:
        by_name = {at: x.tensor for x in tensors for at in x.names}
        heads = hf_tp_plan.heads_of(module, table)
        specs = hf_tp_plan.specs_of(table, by_name, inner[0], mesh.axes[inner[0]], heads)
        if specs and all(numberless(name) == name for name in specs):
            specs = {**_suggest_layers(module, mesh, inner[0], specs), **specs}
    grid = ", ".join(f"{axis}={n}" for axis, n in mesh.axes.items())
    wrong = [f"nothing says what {axis!r} shards" for axis in mesh.axes if axis not in used]
    if inner and not specs:
        why = "no weight is in its tp_plan" if table else f"{type(module).__name__} has no tp_plan"
        wrong.append(f"nothing says which weights {inner[0]!r} shards: {why}")
    if wrong:
        raise ShardingError(
            f"parallelize({type(module).__name__}) on ({grid}) is given no specs",
            wrong,
            rule="without specs, axes shard the batch (data), the sequence (seq), and what the module's own table says",
            remedy="give specs, or let sl.suggest(module, mesh, *example) propose them",
        )
    tied = {x.name: [at for at in x.names if at in specs] for x in tensors}
    return {at: specs[names[0]] for at, names in tied.items() if names}


def _suggest_layers(module: nn.Module, mesh: Mesh, axis: str, specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Returns specs that `suggest` proposes for layers without `specs`, if the model has example inputs."""
    example = getattr(module, "dummy_inputs", None)
    if not isinstance(example, Mapping) or not _accepts(module, example):
        return {}
    decided = [x.name for x in list_named(module) if not specs.keys().isdisjoint(x.names)]
    try:
        table, _ = propose_specs(_copy_around_tensors(module), mesh, axis, (), example, decided)
    except (ShardingError, AssertionError, RuntimeError, TypeError, ValueError) as error:  # also of the model's Python
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"layers of {type(module).__name__} stay whole, since its dummy_inputs cannot be traced: {message}; "
            "give specs, or those of sl.suggest(module, mesh, *example)",
            stacklevel=5,
        )
        return {}
    return {name: parse(spec) for name, spec in table.items()}


def _copy_around_tensors(module: nn.Module) -> nn.Module:
    """Returns a copy that holds the same tensors in containers of its own, which a call may change."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(x): x for x in tensors})


def _accepts(module: nn.Module, example: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(**example)
    except TypeError:
        return False
    return True


def _read_specs(specs: Mapping[str, str | P | Spec], placer: Placer) -> dict[str, str | P | Spec]:
    """Returns the specs by parameter; raises one error for faults of patterns and of specs."""
    tensors, mesh = placer.tensors, placer.mesh
    buffers = [name for name, _ in placer.module.named_buffers()]
    by_name, wrong = match_table(specs, [x.names for x in tensors], buffers)
    if wrong:
        names = [name for x in tensors for name in x.names]
        shapes = {x.name: x.tensor.shape for x in tensors}
        unmatched = {p: x for p, x in specs.items() if not any(matches(p, name) for name in names)}
        faults = [_find_fault(repr(p), x, None, mesh) for p, x in unmatched.items()]
        faults += [_find_fault(name, x, shapes[name], mesh) for name, x in by_name.items()]
        refuse_table(wrong, *filter(None, faults))
    return by_name


def _find_fault(name: str, spec: str | P | Spec, shape: Sequence[int] | None, mesh: Mesh) -> ShardingError | None:
    """Returns the error of a spec for a tensor of this shape; without a shape, checks the axes alone."""
    try:
        if shape is None:
            axes_of_dims(spec, sum(dim is not ... for dim in Spec.convert(spec).dims), mesh, name)
        else:
            resolve_many([(name, shape, spec, None)], mesh)
    except ShardingError as error:
        texts = [f"{name} with spec {str(spec)!r}: {text}" for text in error.offenders or [error.what]]
        return ShardingError(error.what, texts, rule=error.rule, remedy=error.remedy)
    return None


def _sequence_axes(mesh: Mesh) -> tuple[str, ...]:
    return axes_for("seq", SEQUENCE, mesh)
