"""`parallelize`: a module of torch whose parameters live on a mesh, and whose forward is one compiled program."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, jit, nn

from shardlib.compiler.memory_options import Keeping
from shardlib.compiler.schedule_options import Schedule
from shardlib.core.context import is_single_device, is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.strided_only import refuse_dtensors, refuse_others
from shardlib.core.torch_private import settle_rnn
from shardlib.jit.shard import shard, shard_known
from shardlib.nn import hf_tp_plan
from shardlib.nn.forward import Batch, Forward
from shardlib.nn.mixed_precision import Precisions, policy_of
from shardlib.nn.parameters import Held, held, put, refuse_classes, refuse_lazy, refuse_losses, retie
from shardlib.nn.spec_table import looked_up, matches, numberless, refuse
from shardlib.nn.strategies import SEQUENCE, TENSOR, Strategy, Taken, axes_for, chosen, cut_more
from shardlib.nn.suggest import proposed
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import Fixed
from shardlib.sharding.spec import P, Spec, axes_of_dims, parse, resolve_many
from shardlib.tensor.rank_checks import same
from shardlib.tensor.sharded_tensor import HOMES, REGATHER, ShardedTensor


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
) -> nn.Module:
    """Place the parameters of a module on a mesh (default: the current one); returns the same module.

    `specs` says where parameters live, by patterns of their names, in which `*` stands for any text; a parameter that
    no pattern matches stays where it is, and is whole on every device if it is plain. Where nothing is said, and the
    mesh has an axis called `tensor`, it is what the module says itself (`tp_plan` of transformers; where that names
    no layer, what `suggest` proposes for them).

    `strategy` is `"ddp"`, `"zero1"`, `"zero2"`, `"fsdp"`, `"hsdp"`, or one of `sl.strategies` with axes named; it cuts
    parameters, gradients and moments over data axes, too. Of the arguments of a call, plain tensors with as many rows
    as the first one are the batch, and cut over the data axes (dim 1 over `seq`), unless some argument is placed
    already (`shard(x, "batch@data ...")`; on ranks, all of which have a plain batch whole, also `from_local(x, ...)` of
    a rank's own rows). Data axes are those of the mesh's rule for `batch`, or of the usual names.

    `precision` is the dtype in which the module computes (`torch.bfloat16`), while its parameters, and what sums their
    gradients over devices, keep theirs, and batch normalization all of it; or a `Precision`, or a dict of such by
    patterns. `remat`, `memory`, `schedule` and `planning` say, as in `jit`, what the backward pass makes again, how
    many bytes the two passes may use at once, how far messages run ahead, and how long one plans; of a function that is
    jitted as a whole, its own `jit` says it. What a later call leaves out stays as it was.

    Parameters become `ShardedTensor`s (and stay `nn.Parameter`s, tied ones tied), so an optimizer is made afterwards:
    one that was made before is refused when it steps. `forward` becomes one program for the mesh, its backward another,
    from one joint trace: `loss.backward()` and `optimizer.step()` work outside `jit` as they do on one device, and
    inside. `module.forward.plan(*args)` shows both. A module whose Python, or whose shapes, depend on what tensors hold
    runs op by op on ShardedTensors instead, with one warning that names the line; so does one that keeps tensors which
    it computes in lists, as hooks do, or whose backward hooks look at values or change anything. What such hooks only
    read, a number say, is as it was when the module was called.

    With dropout, a parallelized model draws other numbers than plain torch with the same seed, and the same ones on
    every mesh: compare it with itself on a mesh of one device, `sl.Mesh(data=1)`, or use `sl.check`. (A module that
    runs op by op draws what plain code draws under `sl.global_random()`.)

    What forward writes into its arguments reaches the caller. Where forward is one program by itself, a list, dict or
    object among the arguments may not change, and the call is refused; inside `jit`, and op by op, it may. A class that
    gets another `forward` later, and a copy of the module, run the forward that they would run on one device.

    Raises `ShardingError`, with all offenders and before anything is placed, for patterns that match nothing or
    contradict each other, specs that do not fit, a strategy whose axes the mesh has not, and parameters that live on
    another mesh, hold a gradient, have hooks, or are of a class of their own (quantized weights).

    Example:
        >>> import torch
        >>> from shardlib import Mesh, typeof
        >>> with Mesh(data=2, tensor=2):
        ...     model = parallelize(nn.Linear(8, 4), {"weight": "out@tensor in", "bias": "out@tensor"})
        >>> out = model(torch.ones(6, 8))
        >>> out.sum().backward()
        >>> typeof(model.weight.grad), typeof(out)
        ('f32[4@tensor, 8]', 'f32[6@data, 4@tensor]')
        >>> with Mesh(data=4):
        ...     model = parallelize(nn.Linear(8, 4), strategy="fsdp")
        >>> typeof(model.weight), typeof(model.bias)
        ('f32[4, 8@data]', 'f32[4@data]')
    """
    mesh = mesh or current_mesh()
    name = type(module).__name__
    if not isinstance(module, nn.Module) or not isinstance(specs, Mapping | None):
        what = f"the module is of {type(module)}, specs are of {type(specs)}"
        raise ShardingError(what, remedy='parallelize(module, {"*.weight": "out@tensor in"}, mesh=mesh)')
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
    taken = chosen(strategy).on(mesh)
    retie(module)
    tensors = held(module)
    refuse_lazy(f"parallelize({name})", tensors)
    refuse_dtensors(f"parallelize({name})", ((x.name, x.tensor) for x in held(module, buffers=True)))
    refuse_classes(f"parallelize({name})", tensors)
    others = [f"{x.name} is on {x.tensor.mesh}" for x in tensors if _is_elsewhere(x.tensor, mesh)]
    if others:
        raise ShardingError(
            f"parallelize({name}) on {mesh} finds parameters on another mesh",
            others,
            rule="the parameters of a module live on one mesh",
            remedy="give that mesh, or a module that is not placed yet",
        )
    said = _said(module, tensors, mesh, taken) if specs is None else _read(specs, module, tensors, mesh)
    replaced = vars(module).get("forward")  # somebody's own, or that of an earlier call
    before = replaced if isinstance(replaced, Forward) else None
    policy = policy_of(precision, module, tensors) or (before.policy if before else None)
    keeping = (before.keeping if before else Keeping()).but(remat, memory, schedule, planning)
    dtypes = {} if policy is None else {name: said.parameter for name, said in policy.by_name.items()}
    homes = _homes(tensors, said, mesh, taken)
    moving = {
        x.name: x
        for x in tensors
        if not _is_at(x.tensor, homes[x.name][0]) or (dtypes.get(x.name) or x.tensor.dtype) != x.tensor.dtype
    }
    refuse_losses(f"parallelize({name})", [*moving.values()])
    places = {at: homes[at][0].resolve(x.tensor.shape, mesh, name=at) for at, x in moving.items()}
    known = _compared(f"parallelize({name})", moving, places, mesh)
    with mesh:
        for x in tensors:
            here, *elsewhere = homes[x.name]
            if x.name not in moving and strategy is None:
                continue  # what an earlier call says of it stands
            value = x.tensor.detach().to(dtypes.get(x.name) or x.tensor.dtype)
            new = x.tensor
            if x.name in known:
                new = put(module, x, shard_known(x.name, value, places[x.name], mesh, known[x.name]))
            elif x.name in moving:
                new = put(module, x, shard(value, here))
            for attribute, spec in zip(HOMES, elsewhere, strict=True):
                new.__dict__.pop(attribute, None)
                if str(spec) != str(here):
                    setattr(new, attribute, str(spec))
            new.__dict__.pop(REGATHER, None)
            if taken.regather and x.tensor.numel() >= taken.threshold:
                setattr(new, REGATHER, True)
    for inner in module.modules():
        if isinstance(inner, nn.RNNBase):  # else its first call does that, and finds another state than later ones
            settle_rnn(inner)
    own = replaced if before is None else before.own
    rows, columns = ({axis: mesh.axes[axis] for axis in axes} for axes in (taken.batch, _sequence(mesh)))
    module.forward = Forward(module, own, mesh, Batch(rows, columns), policy, keeping)
    return module


def _compared(what: str, moving: Mapping[str, Held], places: Mapping[str, Fixed], mesh: Mesh) -> dict[str, int]:
    """The plain parameters of which all ranks found that they have the same values, before any is placed; digests."""
    plain = {at: x.tensor for at, x in moving.items() if not isinstance(x.tensor, ShardedTensor)}
    if is_tracing() or is_single_device():
        return {}
    plain = {at: x for at, x in plain.items() if not x.is_meta}
    refuse_others(what, [*plain.items()])
    found = same(mesh, what, [*plain.items()], [places[at].layout for at in plain], _SEEDS)
    return dict(zip(plain, found, strict=False))


_SEEDS = (
    "the same torch.manual_seed(...) on every rank before the module is made; or make it under torch.device('meta'), "
    "and sl.materialize(module) then; or load the same checkpoint on every rank before"
)


def _is_at(x: Tensor, spec: Spec) -> bool:
    """Whether a parameter is placed there already: then it stays the one that it is."""
    return isinstance(x, ShardedTensor) and spec.resolve(x.shape, x.mesh).layout == x.sharding


def _is_elsewhere(x: Tensor, mesh: Mesh) -> bool:
    return isinstance(x, ShardedTensor) and x.mesh != mesh


def _said(module: nn.Module, tensors: Sequence[Held], mesh: Mesh, taken: Taken) -> dict[str, Spec]:
    """Where parameters live of which the caller says nothing: as the module's own table has it, or whole."""
    inner = [axis for axis in mesh.axes if axis in TENSOR]
    used = {*taken.batch, *taken.parameters, *_sequence(mesh), *inner}
    table = hf_tp_plan.table_of(module) if inner else {}
    found: dict[str, Spec] = {}
    if table:
        by_name = {at: x.tensor for x in tensors for at in x.names}
        heads = hf_tp_plan.heads_of(module, table)
        found = hf_tp_plan.specs_of(table, by_name, inner[0], mesh.axes[inner[0]], heads)
        if found and all(numberless(name) == name for name in found):
            found = {**_of_layers(module, mesh, inner[0], found), **found}
    grid = ", ".join(f"{axis}={n}" for axis, n in mesh.axes.items())
    wrong = [f"nothing says what {axis!r} cuts" for axis in mesh.axes if axis not in used]
    if inner and not found:
        why = "no weight is in its tp_plan" if table else f"{type(module).__name__} has no tp_plan"
        wrong.append(f"nothing says which weights {inner[0]!r} cuts: {why}")
    if wrong:
        raise ShardingError(
            f"parallelize({type(module).__name__}) on ({grid}) is given no specs",
            wrong,
            rule="without specs, axes cut the batch (data), the sequence (seq), and what the module's own table says",
            remedy="give specs, or let sl.suggest(module, mesh, *example) propose them",
        )
    tied = {x.name: [at for at in x.names if at in found] for x in tensors}
    return {at: found[known[0]] for at, known in tied.items() if known}


def _of_layers(module: nn.Module, mesh: Mesh, axis: str, found: Mapping[str, Spec]) -> dict[str, Spec]:
    """What `suggest` says of the layers of a model whose own table says nothing of them, if it can be called."""
    example = getattr(module, "dummy_inputs", None)
    if not isinstance(example, Mapping) or not _takes(module, example):
        return {}
    decided = [x.name for x in held(module) if not found.keys().isdisjoint(x.names)]
    try:
        table, _ = proposed(_beside(module), mesh, axis, (), example, decided)
    except (ShardingError, AssertionError, RuntimeError, TypeError, ValueError) as error:  # of its own Python, say
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"layers of {type(module).__name__} stay whole, since its dummy_inputs cannot be traced: {said}; "
            "give specs, or those of sl.suggest(module, mesh, *example)",
            stacklevel=5,
        )
        return {}
    return {name: parse(spec) for name, spec in table.items()}


def _beside(module: nn.Module) -> nn.Module:
    """A copy that holds the same tensors: what a call of it appends to is nobody else's."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(x): x for x in tensors})


def _takes(module: nn.Module, example: Mapping[str, Any]) -> bool:
    """Whether `forward` has arguments of these names."""
    try:
        inspect.signature(module.forward).bind(**example)
    except TypeError:
        return False
    return True


def _read(
    specs: Mapping[str, str | P | Spec], module: nn.Module, tensors: Sequence[Held], mesh: Mesh
) -> dict[str, str | P | Spec]:
    """The table read; where its patterns are wrong, so may be its specs, and all of that is one error."""
    found, wrong = looked_up(specs, [x.names for x in tensors], [name for name, _ in module.named_buffers()])
    if wrong:
        names = [name for x in tensors for name in x.names]
        shapes = {x.name: x.tensor.shape for x in tensors}
        faults = [_fault(repr(p), x, None, mesh) for p, x in specs.items() if not any(matches(p, at) for at in names)]
        refuse(wrong, *filter(None, [*faults, *(_fault(at, x, shapes[at], mesh) for at, x in found.items())]))
    return found


def _fault(who: str, spec: str | P | Spec, shape: Sequence[int] | None, mesh: Mesh) -> ShardingError | None:
    """What is wrong with a spec for a tensor of this shape; with its axes alone, where there is no tensor."""
    try:
        if shape is None:
            axes_of_dims(spec, sum(dim is not ... for dim in Spec.of(spec).dims), mesh, who)
        else:
            resolve_many([(who, shape, spec, None)], mesh)
    except ShardingError as error:
        texts = [f"{who} with spec {str(spec)!r}: {text}" for text in error.offenders or [error.what]]
        return ShardingError(error.what, texts, rule=error.rule, remedy=error.remedy)
    return None


def _sequence(mesh: Mesh) -> tuple[str, ...]:
    return axes_for("seq", SEQUENCE, mesh)


def _homes(
    tensors: Sequence[Held], said: Mapping[str, str | P | Spec], mesh: Mesh, taken: Taken
) -> dict[str, tuple[Spec, Spec, Spec]]:
    """Where every parameter, its gradient and its moments live."""
    shapes = {x.name: x.tensor.shape for x in tensors}
    items = [(at, shapes[at], spec, None) for at, spec in said.items()]
    fixed = dict(zip(said, resolve_many(items, mesh, what="parallelize"), strict=True))
    homes = {}
    for x in tensors:
        here = x.tensor.spec if isinstance(x.tensor, ShardedTensor) else "..."
        spec = Spec.of(said.get(x.name, here))
        now = fixed.get(x.name) or spec.resolve(x.tensor.shape, mesh)
        more = (taken.parameters, taken.gradients, taken.moments) if x.tensor.numel() >= taken.threshold else ((),) * 3
        first, second, third = (cut_more(now, x.tensor.shape, mesh, axes) if axes else spec for axes in more)
        homes[x.name] = first, second, third
    return homes
