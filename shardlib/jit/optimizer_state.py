"""Creates and places an optimizer's state before its first step is traced.

Torch creates moments in the first step, which would make that step another program than the later ones. Moments that
begin as constants, or as the learning rate, are created here, by torch's own code, before the call: one program serves
all steps. The scale of a gradient scaler is created here, too, and so are other marks that the first step, or
`load_state_dict`, would leave.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.schedule_options import MOMENTS
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.context import is_tracing, paused_gc, skip_dynamo
from shardlib.core.torch_internals.torch_private import (
    HAS_STEPPED,
    LAST_RATES,
    WARNS_OF_ORDER,
    has_step_hooks,
    init_group,
)
from shardlib.eager.placement_autograd import place_like
from shardlib.frontend.guards.mutable_places import Item
from shardlib.frontend.guards.number_inputs import is_traced_number
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.grad_scaler_state import NoScaleError, awaited, begin
from shardlib.jit.shard import shard
from shardlib.sharding.spec import parse
from shardlib.tensor.host_offload import move_to_host
from shardlib.tensor.local_shards import is_cpu_scalar
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form

_RATE = (str, "lr")
_PARTS = 16  # moments for the host's memory are created in so many parts
_BY_RATE = torch.optim.Rprop | torch.optim.ASGD  # their moments begin as the rate of the first step
_MOMENTA = ((str, "momentum"), *(Item((str, "betas"), i) for i in range(3)))  # schedulers set these, too


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Lists the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def place(optimizer: torch.optim.Optimizer, skip: Collection[int] = ()) -> None:
    """Moves moments to the layout that the parameter's strategy asks for, but for tensors with an `id` in `skip`."""
    for p in parameters(optimizer):
        if isinstance(p, ShardedTensor):
            for k, x in list(optimizer.state.get(p, {}).items()):
                if id(x) not in skip and (moved := placed(p, x)) is not x:
                    optimizer.state[p][k] = moved


def placed(p: Any, x: Any) -> Any:
    """Returns state of the parameter's shape in the strategy's layout for it, or the parameter's own."""
    if not isinstance(p, ShardedTensor) or not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    if (at := moments_form(p)) is None:
        stays = isinstance(x, ShardedTensor) or not p.dim() or is_tracing()  # results get the parameter's layout
        return x if stays else place_like(x, p)
    if isinstance(x, ShardedTensor) and x.sharding == at.layout:
        return x
    with p.mesh:
        return shard(x, getattr(p, "moments_at"))  # noqa: B009 - mypy knows no such attribute


_forms: BoundedCache[Any, Form] = BoundedCache(1 << 12)


def moments_form(p: Any) -> Form | None:
    """Returns the form of the moments of a parameter, or None if its strategy does not fix it."""
    at, own = p.__dict__.get("moments_at"), p.__dict__.get("_form")
    if at is None or own is None:
        return None
    form = _forms.get((own, at))
    if form is None:
        resolved = parse(at).resolve(own.shape, own.mesh)
        form = Form.intern(resolved.layout, own.mesh, own.dtype, own.device, resolved.names, own.strides, own.offset)
        _forms[own, at] = form
    return form


@paused_gc()
def plan(call: Invocation, *, runs: bool = True) -> tuple[Plan, list[Any]]:
    """Returns the plan of a call, after creating the state of its optimizers, and the objects it knows by identity.

    State that the function does not touch is removed again, and all of it if the call does not run. Learning rates are
    inputs from the start, since schedules change them between steps.
    """
    untouched: set[int] = set()  # parameters, by id
    scales: list[NoScaleError] = []
    noted = call.programs.noted
    while True:
        optimizers = [x for x in call.state.kept if isinstance(x, torch.optim.Optimizer)]
        scalers = [x for x in call.state.kept if isinstance(x, torch.amp.GradScaler)]
        if not optimizers and not scalers:
            return call.plan()
        groups = [id(group) for x in optimizers for group in x.param_groups]
        call.programs.changing.add((group, _RATE) for group in groups)
        call.programs.changing.rates.update((group, name) for group in groups for name in (_RATE, *_MOMENTA))
        wrong: set[int] = set()
        try:
            with ExitStack() as undo:
                away = MOMENTS in call.function.options.schedule.state
                created = {id(x): _begun(x, untouched, undo, away=away) for x in optimizers}
                _part([x for x in call.state.kept if isinstance(x, LRScheduler)], undo)
                for lacking in scales:
                    begin(lacking.scaler, lacking.device, undo)
                call.around = partial(_hidden, [x for x in optimizers if created[id(x)]], scalers)
                call.read()
                planned = call.plan()
                idle = _idle(planned[0], call.leaves)
                for p, entries in itertools.chain.from_iterable(created.values()):
                    if all(id(x) in idle for x in entries.values() if isinstance(x, Tensor)):
                        wrong.add(id(p))
                if runs and not wrong:
                    undo.pop_all()
        except _LookedAtError as error:
            wrong = set(map(id, parameters(error.optimizer)))
        except NoScaleError as error:
            scales.append(error)
        else:
            if not wrong:
                return planned
        untouched |= wrong
        call.programs.noted = noted  # this attempt is no reason for a retrace
        call.read()


def _begun(
    optimizer: torch.optim.Optimizer, untouched: Collection[int], undo: ExitStack, *, away: bool = False
) -> list[tuple[Any, Any]]:
    """Creates the state of an optimizer's first step; returns it with its parameters.

    State that lives in the host's memory (`away`) goes there part by part.
    """
    undo.callback(_put_back, optimizer, {p: dict(kept) for p, kept in optimizer.state.items()})
    _settle(optimizer)
    _mark(optimizer.defaults, "differentiable", False, undo)  # as `load_state_dict` does where there is none
    if hasattr(optimizer.step, WARNS_OF_ORDER):  # its schedule warns where no step came first
        _mark(vars(optimizer), HAS_STEPPED, True, undo)
    fresh = [p for p in parameters(optimizer) if p.requires_grad and p.is_leaf and not optimizer.state.get(p)]
    fresh = [p for p in fresh if id(p) not in untouched]
    if not fresh or not type(optimizer).__module__.startswith("torch.") or has_step_hooks(optimizer):
        return []
    if isinstance(optimizer, _BY_RATE) and any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return []  # a rate tensor may still change before the step
    part = max(len(fresh) // _PARTS, 1) if away else len(fresh)
    for i in range(0, len(fresh), part):
        now = fresh[i : i + part]
        _begin(optimizer, set(map(id, now)))
        _settle(optimizer)
        moments = [x for p in now if away for x in optimizer.state.get(p, {}).values()]
        for x in moments:
            if isinstance(x, ShardedTensor) and x.dim():
                move_to_host(x)
    return [(p, optimizer.state[p]) for p in fresh if optimizer.state.get(p)]


def _mark(space: dict[str, Any], name: str, mark: bool, undo: ExitStack) -> None:
    if name not in space:
        space[name] = mark
        undo.callback(space.pop, name, None)


def _part(schedules: Sequence[LRScheduler], undo: ExitStack) -> None:
    """Gives each schedule a list of rates of its own, as a step in a program does; composed schedules share one."""
    seen: set[int] = set()
    for x in schedules:
        rates = vars(x).get(LAST_RATES)
        if type(rates) is list and id(rates) in seen:
            undo.callback(setattr, x, LAST_RATES, rates)
            setattr(x, LAST_RATES, list(rates))
        seen.add(id(rates))


def _put_back(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    """Restores the optimizer's state."""
    for p in [p for p in optimizer.state if p not in before]:
        del optimizer.state[p]
    for p, kept in before.items():
        optimizer.state[p].update(kept)


def _settle(optimizer: torch.optim.Optimizer) -> None:
    """Places the state, and moves step counts to the parameter's device: writes to the CPU would synchronize."""
    place(optimizer)
    for p in parameters(optimizer):
        kept = optimizer.state.get(p, {}) if p.device.type != "cpu" else {}
        for k, x in kept.items():
            if isinstance(x, Tensor) and is_cpu_scalar(x):
                kept[k] = x.to(p.device)


# --- the created state is hidden until the optimizer steps ------------------------------------------------------------


class _LookedAtError(Exception):
    """A function read an optimizer's state, or changed its settings, before its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class _Hidden(defaultdict[Any, Any]):
    """Replaces the state of an optimizer in a trace until it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(dict)
        self.optimizer, self.state, self.settings = optimizer, optimizer.state, _settings(optimizer)

    def _look(self, *_: Any, **__: Any) -> Any:
        raise _LookedAtError(self.optimizer)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __bool__ = __eq__ = _look
    __reversed__ = __or__ = __ror__ = __ior__ = __repr__ = __copy__ = __deepcopy__ = __reduce_ex__ = _look
    get = items = keys = values = pop = popitem = setdefault = update = clear = copy = _look


def begins(optimizer: torch.optim.Optimizer) -> None:
    """Reveals the created state at the first step, if the settings are still those that it was created for."""
    hidden = vars(optimizer).get("state")
    if isinstance(hidden, _Hidden):
        if _settings(optimizer) != hidden.settings:
            raise _LookedAtError(optimizer)
        optimizer.state = hidden.state


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the settings that determine moments: input numbers by value, tensors by identity, momentum as a bool."""
    without = {"params", "betas"} if isinstance(optimizer, _BY_RATE) else {"params", "betas", "lr"}
    return [
        {k: x != 0 if k == "momentum" else _setting(x) for k, x in group.items() if k not in without}
        for group in optimizer.param_groups
    ]


def _setting(x: Any) -> Any:
    return x.scalar.hint if is_traced_number(x) else id(x) if isinstance(x, Tensor) else x


@contextmanager
def _hidden(optimizers: Sequence[torch.optim.Optimizer], scalers: Sequence[Any]) -> Iterator[None]:
    """Hides the state while a function is traced."""
    before = [(x, x.state) for x in optimizers]
    for x in optimizers:
        x.state = _Hidden(x)
    try:
        with awaited(scalers):
            yield
    finally:
        for x, state in before:
            x.state = state


@skip_dynamo
def _begin(optimizer: torch.optim.Optimizer, fresh: Collection[int]) -> None:
    """Creates state as the first lines of `step` do, for parameters that have a gradient."""
    before = [(p, p.grad) for p in parameters(optimizer)]
    try:
        with torch.no_grad():
            for p, _ in before:
                p.grad = p.detach() if id(p) in fresh else None
            for group in optimizer.param_groups:
                init_group(optimizer, group)
                if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and not group["dampening"]:
                    for p in group["params"]:  # a momentum that begins as the gradient may begin as zeros
                        if id(p) in fresh:
                            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    finally:
        for p, grad in before:
            p.grad = grad
            if not optimizer.state.get(p):
                optimizer.state.pop(p, None)


def _idle(plan: Plan, leaves: list[Any]) -> set[int]:
    """Returns the tensors among the leaves of a call that its program neither reads nor writes."""
    traced = plan.compiled.traced
    used = {leaf for node, leaf in zip(traced.inputs, traced.input_leaves, strict=True) if node.users}
    return {id(x) for i, x in enumerate(leaves) if i not in used}
