"""`jit`: a function written for one device, run on the current mesh."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shardlib.compiler.codegen import load
from shardlib.compiler.codegen.profiler_ranges import Runner
from shardlib.compiler.graph.regather import Regather
from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.plan.budget import Budget, CommBudget, RedundancyBudget, checked_budgets, current_budgets
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.schedule_options import Schedule
from shardlib.core.context import compiling, is_single_device, is_tracing, skip_dynamo
from shardlib.core.errors import ShardingError
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.torch_internals.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    dual_level,
    transform_level,
)
from shardlib.frontend.guards.recompile_reasons import RetraceWarning
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import refuse_dispatch_modes
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.reuse.subgraph_reuse import SubgraphReuse
from shardlib.jit import optimizer_state
from shardlib.jit.call import autograd_op
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.double_backward import Again
from shardlib.jit.call.execute import caller, entry
from shardlib.jit.call.function import Function
from shardlib.jit.call.methods import Method, Methods
from shardlib.jit.call.program_cache import Programs, Ready
from shardlib.jit.call.stage_placement import move_shared, move_state
from shardlib.jit.call.unsupported import refuse_other_devices, refuse_others_than_functions, refuse_tangents
from shardlib.jit.global_random import plain_program
from shardlib.jit.transformed import Transformed, is_transformed
from shardlib.primitives.random.keys import is_in_call
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, is_without_mesh
from shardlib.tensor.rank_checks import ALWAYS, compare_arguments
from shardlib.tensor.replicas import Verifier, check_every
from shardlib.tensor.stale_params import refuse_replaced

__all__ = ["Jitted", "RetraceWarning", "jit"]


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    comm_budget: CommBudget | None = None,
    redundancy_budget: RedundancyBudget | None = None,
    regather: Regather = "auto",
    schedule: Schedule | str | None = None,
    remat: str | Sequence[str] = "none",
    memory: str | int | None = None,
    planning: str | float | None = None,
    verify_every: int | None = None,
) -> Any:
    """Compiles `fn` for the current mesh, at the first call with each set of shapes, layouts, flags and other facts.

    The docstring of the result's class, `Jitted`, says what a trace may read and change, and describes `regather`,
    `schedule`, `remat`, `memory`, `planning` and `verify_every`. Works as a decorator, also of methods.

    `in_specs` (a tuple with an entry per positional argument, or a dict by parameter name) and `out_specs` are prefix
    pytrees of specs: a single spec holds for every argument, None leaves a layout to inference. `in_specs` may also be
    a function from the list of all leaves of the arguments to a spec, or None, for each. An argument in
    `static_argnums` or `static_argnames` is a constant of the program. A `ShardedTensor` in `donate_argnums` gives up
    its memory for results, and reading it afterwards is an error. Memory that anything else refers to (a plain tensor,
    a view, a shard from `to_local`) is copied instead, and never written to.

    Raises `ShardingError` outside any mesh, for specs that do not fit, for a budget that is exceeded or cannot be met,
    for names that match nothing, and for effects that would leave the trace unseen. Warns `RetraceWarning`, once, if a
    function is compiled again and again.

    Example:
        >>> from shardlib import Mesh, jit
        >>> with Mesh(data=2):
        ...     double = jit(lambda x: (2 * x).sum(), in_specs=("batch@data _",))
        ...     float(double(torch.ones(4, 3)))
        24.0
    """
    if fn is None:
        more: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "donate_argnums": donate_argnums}
        more |= {"static_argnums": static_argnums, "static_argnames": static_argnames, "regather": regather}
        more |= {"comm_budget": comm_budget, "redundancy_budget": redundancy_budget, "schedule": schedule}
        more |= {"remat": remat, "memory": memory, "planning": planning, "verify_every": verify_every}
        return functools.partial(jit, **more)
    refuse_others_than_functions(fn)
    options = MemoryOptions.parse(regather, remat, memory, schedule, planning)
    names = frozenset((*_tuple(static_argnums), *_tuple(static_argnames)))
    limits = checked_budgets(comm_budget, redundancy_budget)
    return Jitted(fn, in_specs, out_specs, names, frozenset(_tuple(donate_argnums)), limits, options, verify_every)


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)


class Jitted(Function):
    """The result of `jit`: call it, or ask for its `plan`. `retraces` lists why it was compiled more than once.

    **Keys.** A program is compiled for each set of: shapes, strides, dtypes and layouts of tensors; flags and static
    arguments; torch's modes (autocast, gradient mode, default dtype ...); the code of the functions, methods and
    classes that the function leads to; and all that these close over: modules with their parameters, buffers and
    flags, variables, attributes of objects and of tensors. Not part of the key are: results of libraries,
    `os.environ`, `globals()`, context variables, weak references, files, locks, events and streams; names of classes,
    and initial seeds of generators; modules that are found by a computed name; functions of libraries that are
    replaced later; containers of more than 1,000 objects, or 20,000 numbers and texts, or behind more than 64 others
    (12 if many are); draws of `uuid` and `secrets`. `id(x)` and `hash(x)` of an argument are those of its stand-in in
    the trace.

    **Inputs.** Tensors that the function finds are inputs, read anew in each call. So are numbers among the
    arguments, if they only enter arithmetic. Numpy's numbers are constants, its arrays tensors. Arguments may be
    plain tensors (every process has them whole) or `ShardedTensor`s; tensor results are `ShardedTensor`s. An argument
    that the function returns, or a view of one, comes back in memory of its own, as do several results that are views
    of one tensor.

    **Effects.** Writes to arguments (also to numpy's arrays), to buffers and to `.grad` are applied after the call,
    and not at all if the function raises. So are new values of attributes, variables and items: tensors, numbers
    (`self.step += 1` is an input and a result), texts, enums, functions, and tuples, lists and dicts of these. Tensors
    that are bound have memory of their own, as results have. An effect that no call can repeat (a new object, a write
    into a numpy array that the function closes over) raises `SideEffectError` before anything runs. Changes of what is
    no part of the key (see above) are neither repeated nor refused. Code that prints or reads a clock runs while
    compiling only. Threads that change the same object, or go back to a parameter while another thread compiles a
    function that reads its `.grad`, must take turns by a lock of their own. A `TorchFunctionMode` around the call acts
    then, too. Torch's own dispatch modes, and those with `only_observes = True`, see the ops; others are refused.

    **Gradients.** Results have a history if an input requires gradients, so `.backward()` goes through the call.
    Inside, gradients are taken by `sl.grad`, `sl.value_and_grad` or `.backward()`. Transforms of `torch.func` around
    a call run programs of its gradients, tangents and batches, which compute the call again: `sl.jit(sl.grad(f))`
    does less work than `sl.grad(sl.jit(f))`.

    **`regather`** decides about inputs that are gathered for the forward pass. `"never"` keeps them whole for the
    backward pass. `"always"` gathers them again, as ZeRO-3 does, which sends more and holds less. `"auto"` gathers
    again parameters whose strategy asks for it (`fsdp`, `hsdp`), and inputs of checkpoints, which run twice.

    **`schedule`**, an `sl.Schedule` or its text, sets how far messages run ahead of their readers.

    **`remat`** names values of the forward pass that the backward pass recomputes: none (`"none"`); all but those
    that one layer hands to the next (`"full"`; a layer is what the program repeats); those inside attention
    (`"attention"`); or the intermediates of modules and the results of ops, by name: a module's path or the end of
    it, its class, an op, `*` for any text. A list combines words and names; `"*.attention"` means a module of that
    name. Draws are repeated exactly, effects and ops of other libraries run once, and nothing is gathered a third
    time.

    **`memory`** is a budget instead (`"72GiB"`, or bytes) for the peak of the program on every device. Values are
    kept, recomputed or moved to the host's memory one by one (the latter if the backward pass is inside, and the
    schedule names none), so that the simulated time on the mesh's machine is short. `torch.utils.checkpoint` inside
    the function is respected.

    **`planning`** limits the search for a plan: `"fast"` stops at the first decision for every op, `"best"` when
    nothing improves, a number after so many seconds. The default is the time of the trace, and at least 4 seconds.
    Seconds are counted from the work of the search, so every rank finds the same plan, and it reports its gap.

    **`verify_every`** compares, on ranks and before every so many calls, digests of replicated inputs; `ShardingError`
    names the first value and the ranks that differ.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        budgets: tuple[Budget, ...],
        options: MemoryOptions,
        verify_every: int | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        super().__init__(fn, in_specs, out_specs, static, donate, options)
        self.budgets, self.verify_every = budgets, check_every(verify_every)
        self.verifier = None if verify_every is None else Verifier(verify_every)
        self.programs = Programs()
        self.methods = Methods()
        users = getattr(fn, "__dict__", {}).keys() - {"__wrapped__"}  # attributes that users set
        self.made_with = frozenset({*vars(self), "made_with", "_closure"} - users)

    @property
    def retraces(self) -> list[str]:
        """The reason of each compilation after the first."""
        return self.programs.retraces

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments (real, meta or fake tensors); nothing runs and no device is touched."""
        return self.plan_of(self.programs, None, args, kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.programs, None, args, kwargs)

    def plan_of(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        call = Invocation.read_new(self, programs, own, args, kwargs)
        plan = optimizer_state.plan(call, runs=False)[0]
        self._check_budgets(plan)
        return plan

    def call(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (once := SubgraphReuse.current()) is not None and is_tracing():
            self.options.refuse_inside(self.name)
            return once.function(self.fn, args, kwargs)
        if is_single_device() or is_tracing():
            with nullcontext() if is_tracing() or is_in_call() else plain_program():
                return self.fn(*args, **kwargs)
        mesh = current_mesh()
        if mesh is None and is_without_mesh():
            return self.fn(*args, **kwargs)
        if count_dispatch_modes():
            refuse_dispatch_modes(self.name)
        if may_be_recorded():
            refuse_recorders(self.name)
        is_taken = False
        while True:
            begun = compiling.count
            if compiling.thread:
                refuse_nested()
                compiling.wait()
            state = StateWalk(own, programs.changing)
            key, leaves = self.read_call(mesh, programs, state, args, kwargs)
            mesh = key[0]
            if state.arrays and not is_taken:
                args, kwargs, is_taken = *self.with_tensors(args, kwargs), True
            elif begun == compiling.count:
                break
        if transform_level() is not None and is_transformed(leaves):
            programs.transformed = programs.transformed or Transformed(_returning)
            return programs.transformed(self, state, key[1], args, kwargs)
        if dual_level() >= 0:
            refuse_tangents(self.name, leaves)
        match = programs.entries.find(key, leaves)
        if match is None:
            refuse_recorders(self.name, leaves)
            match = self._compiled(Invocation(self, mesh, programs, args, kwargs, state, key, leaves))
        elif ALWAYS or self.budgets or current_budgets():
            plan = match[0].plan() or Invocation(self, mesh, programs, args, kwargs, state, key, leaves).plan()[0]
            self._check_budgets(plan)
            if ALWAYS:
                compare_arguments(plan, mesh, leaves)
        ready, leaves = match
        if count_function_modes():
            with torch.DisableTorchFunction():
                return ready.call(leaves)
        return ready.call(leaves)

    def _compiled(self, call: Invocation) -> tuple[Ready, list[Any]]:
        """Returns a new program for a call, unless another thread has compiled one, and the leaves for it."""
        programs, mesh = call.programs, call.mesh
        with programs.lock:
            if (match := programs.entries.find(call.key, call.leaves)) is not None:
                return match
            plan, kept = optimizer_state.plan(call)
            if move_shared(plan.compiled, call.leaves):
                call.read()
                plan, kept = optimizer_state.plan(call)
            leaves, traced = call.leaves, plan.compiled.traced
            self._check_budgets(plan)
            refuse_other_devices(plan, mesh, leaves)
            inputs = [
                (name, leaves[i]) for name, i in zip(traced.input_names, traced.input_leaves, strict=True) if i >= 0
            ]
            reads = "read it from the module (self.weight), not from a list, a closure or another module"
            refuse_replaced(f"{self.name} reads parameters that were replaced", inputs, reads)
            ready = self._load(mesh, plan, kept, call=call)
            if self.verifier is not None:
                ready = ready.verified(self.verifier)
            compare_arguments(plan, mesh, leaves)
            if move_state(plan.compiled, leaves):
                call.read()
            programs.entries.keep(call.key, ready, traced.served)
            return ready, call.served(plan)

    def _check_budgets(self, plan: Plan) -> None:
        for budget in (*current_budgets(), *self.budgets):
            budget.check(plan)

    @skip_dynamo
    def _load(
        self,
        mesh: Mesh,
        plan: Plan,
        kept: Sequence[Any] = (),
        load: Callable[..., Runner] = load,
        call: Invocation | None = None,
    ) -> Ready:
        if mesh.kind == "abstract":
            raise ShardingError(
                f"{self.name} cannot run on {mesh}",
                rule="an abstract mesh has no devices",
                remedy="plan on it (step.plan(...)), or use Mesh(...)",
            )
        program, halves = plan.compiled.program, plan.compiled.halves
        local, own = plan.compiled.local
        if halves is None:
            whole = entry(plan, local, mesh, load(program, mesh, plan, local), kept)
            call_whole = functools.partial(autograd_op.refused, whole) if whole.after.refused else caller(whole)
            return Ready(whole, call_whole, self._kept(plan))
        assert own is not None, "a program of a stage has halves where the whole has some"
        first = entry(plan, own.forward, mesh, load(halves.forward, mesh, plan, own.forward), kept)
        again = Again.for_calls(jit, self.fn, call, first, halves)
        second = autograd_op.backward(plan, own, mesh, load(halves.backward, mesh, plan, own.backward), again)
        return Ready(first, functools.partial(autograd_op.run, first, second), self._kept(plan))

    def _kept(self, plan: Plan) -> Callable[[], Plan | None]:
        """Returns a weak reference to the plan; a strong one with budgets, which read it in each call."""
        return (lambda: plan) if self.budgets else weakref.ref(plan)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Method(self, instance)

    def __reduce__(self) -> Any:
        return Jitted, (
            self.fn,
            self.in_specs,
            self.out_specs,
            self.static,
            self.donate,
            self.budgets,
            self.options,
            self.verify_every,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        _, (fn, *options) = self.__reduce__()
        return Jitted(copy.deepcopy(fn, memo), *options)

    def __repr__(self) -> str:
        return f"<jit of {self.name}>"


class _Returning(Jitted):
    """A function that transforms outside of `jit` may call several times: it must only return values."""

    only_returns = True


def _returning(fn: Callable[..., Any]) -> _Returning:
    return _Returning(fn, None, None, frozenset(), frozenset(), (), MemoryOptions.parse("auto", "none", None, None))
