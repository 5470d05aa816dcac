"""`jit`: a function written for one device, run on the current mesh."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shardlib.compiler.codegen import Runner, load
from shardlib.compiler.graph.regather import Regather
from shardlib.compiler.memory_options import Keeping
from shardlib.compiler.plan.budget import Budget, CommBudget, RedundancyBudget, current_budgets
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.schedule_options import Schedule
from shardlib.core.context import compiling, is_single_device, is_tracing, skip_dynamo
from shardlib.core.errors import ShardingError
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    dual_level,
    transform_level,
)
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.recompile_reasons import RetraceWarning
from shardlib.frontend.guards.torch_modes import autocast_of, refuse_modes
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.reuse.subgraph_reuse import Once
from shardlib.jit import optimizer_state
from shardlib.jit.call import autograd_op
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.double_backward import Again, pull_of
from shardlib.jit.call.execute import caller, entry
from shardlib.jit.call.function import Function
from shardlib.jit.call.methods import Method, Methods
from shardlib.jit.call.program_cache import Programs, Ready
from shardlib.jit.call.unsupported import refuse_other_devices, refuse_others_than_functions, refuse_tangents
from shardlib.jit.global_random import plain_program
from shardlib.jit.transformed import Transformed, is_transformed
from shardlib.primitives.random.keys import in_call
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, is_without_mesh
from shardlib.tensor.rank_checks import ALWAYS, compare_arguments
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
) -> Any:
    """Compile `fn` for the current mesh, at the first call for each set of what it can see.

    That is shapes, strides, dtypes and layouts of tensors, flags and static arguments, torch's modes (autocast,
    gradient mode, default dtype ...), the code of the functions, methods and classes that it leads to, and what all of
    them close over: modules with their parameters, buffers and flags, variables, attributes of objects and of tensors
    (not what libraries compute, `os.environ`, `globals()`, context variables, weak references and files, locks, events
    and streams, names of classes and initial seeds of generators, modules that are found by a name that is no text in
    the code, functions of libraries that somebody replaces later, nor what is in containers of more than 1,000 objects,
    or 20,000 numbers and texts, or behind more than 64 others, or 12 where many are, what `uuid` and `secrets` draw;
    `id(x)` and `hash(x)` of an argument are those of what stands for it). Tensors found there are inputs, read anew in
    each call. Numbers among the arguments are inputs, too, where they only enter arithmetic; numpy's numbers are
    constants, its arrays tensors. Writes to arguments, numpy's arrays among them, to buffers and `.grad` are applied
    after the call, and not at all if the function raises. Threads that change the same thing, or go back to a parameter
    while another one compiles what reads its `.grad`, take turns by a lock of their own. So are other values of
    attributes, variables and items: tensors, numbers (`self.step += 1` is an input and a result), texts, enums,
    functions, and tuples, lists and dicts of such. An effect that no program can repeat (a new object, a write into a
    numpy array that it closes over) is traced in every such call, which is slow and said. What prints, reads a clock,
    or appends to something that it does not read, does so while compiling only. A `TorchFunctionMode` around the call
    acts then, too; torch's own dispatch modes (counters), and those with `only_observes = True`, see what runs, and
    others are refused.

    `in_specs` (a tuple with an entry per positional argument, or a dict by parameter name) and `out_specs` are prefix
    pytrees of specs: a single spec is every argument's; None leaves a layout to inference. (`in_specs` may also be a
    function of the list of all leaves of the arguments, which returns a spec, or None, for each.) Arguments may be
    plain tensors (every process has them whole) or `ShardedTensor`s; tensor results are `ShardedTensor`s. An argument
    that the function returns, or a view of one, comes back in memory of its own, as each of several results does that
    are views of one tensor. Results have a history where an input requires gradients, so that `.backward()` goes
    through the call; inside, gradients are taken by `sl.grad`, `sl.value_and_grad` or `.backward()`. Transforms of
    `torch.func` around a call run programs of its gradients, tangents and batches, which compute the call again:
    `sl.jit(sl.grad(f))` does less than `sl.grad(sl.jit(f))`. A `ShardedTensor` in `donate_argnums` gives its memory up,
    for results to be written over it, and reading it afterwards is an error; memory that anything else refers to (a
    plain tensor, a view, a piece from `to_local`) is copied instead, and never written to. Works as a decorator, also
    of methods.

    `regather` says whether inputs that are gathered for the forward pass are kept whole for the backward one:
    `"never"` keeps them; `"always"` gathers them again, which sends more and holds less, as ZeRO-3 does; `"auto"` does
    so for parameters whose strategy says it (`fsdp`, `hsdp`), and for what is read in checkpoints, which run twice.
    `schedule`, an `sl.Schedule` or its text, says how far messages run ahead of what waits for them.

    `remat` says what of the forward pass is made again for the backward one rather than kept: nothing (`"none"`),
    everything but what one layer hands on to the next (`"full"`; a layer is what the program repeats), what is inside
    attention (`"attention"`), or what modules make for themselves, and ops, by names: a module's path or the end of
    it, its class, an op, `*` for any text. A list takes what any of its words and names says; a module that is called
    like a word is `"*.attention"`. Draws are exact, effects and ops of other libraries run once, nothing is gathered a
    third time. `memory` is a budget instead (`"72GiB"`, or bytes): the peak of the program that runs is at most that on
    every device. Which values are kept for it, made again, or wait in the host's memory (where the backward pass is
    inside, and the schedule names none) is chosen one by one, so that the simulated time on the mesh's machine is
    short. `torch.utils.checkpoint` inside the function stays what it is.

    `planning` says how long the search for a plan goes on: `"fast"`, no further than the first decision for every op;
    `"best"`, until nothing improves; or so many seconds. By default it may take as long as the trace, and 4 seconds
    at least. The seconds are counted from what the search looks at, so that every machine and rank finds the same plan.
    A plan says where that was too little, and how far it then is from a lower bound.

    Raises `ShardingError` outside any mesh, where specs do not fit, where a budget is exceeded or cannot be met, for
    names of nothing, and for what would leave the trace unseen. Warns `RetraceWarning`, once, of a function that is
    compiled again and again.

    Example:
        >>> from shardlib import Mesh, jit
        >>> with Mesh(data=2):
        ...     double = jit(lambda x: (2 * x).sum(), in_specs=("batch@data _",))
        ...     float(double(torch.ones(4, 3)))
        24.0
    """
    if fn is None:
        return functools.partial(
            jit,
            in_specs=in_specs,
            out_specs=out_specs,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            comm_budget=comm_budget,
            redundancy_budget=redundancy_budget,
            regather=regather,
            schedule=schedule,
            remat=remat,
            memory=memory,
            planning=planning,
        )
    refuse_others_than_functions(fn)
    keeping = Keeping.of(regather, remat, memory, schedule, planning)
    budgets: list[Budget] = []
    for budget, kind, example in (
        (comm_budget, CommBudget, "max_bytes=..."),
        (redundancy_budget, RedundancyBudget, "max_share=..."),
    ):
        if isinstance(budget, kind):
            budgets.append(budget)
        elif budget is not None:
            raise ShardingError(f"{budget!r} is no budget", remedy=f"{kind.name}=sl.{kind.name}({example})")
    static = (*_tuple(static_argnums), *_tuple(static_argnames))
    return Jitted(
        fn, in_specs, out_specs, frozenset(static), frozenset(_tuple(donate_argnums)), tuple(budgets), keeping
    )


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)


class Jitted(Function):
    """What `jit` returns: call it, or ask for its `plan`. `retraces` tells why it was compiled more than once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        budgets: tuple[Budget, ...],
        keeping: Keeping,
    ) -> None:
        functools.update_wrapper(self, fn)
        super().__init__(fn, in_specs, out_specs, static, donate, keeping)
        self.budgets = budgets
        self.programs = Programs()
        self.methods = Methods()
        given = getattr(fn, "__dict__", {}).keys() - {"__wrapped__"}
        self.made_with = frozenset({*vars(self), "made_with", "_closure"} - given)  # the rest is what somebody gave it

    @property
    def retraces(self) -> list[str]:
        """Why it was compiled again, each time."""
        return self.programs.retraces

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (real, meta or fake tensors); nothing runs and no device is touched."""
        return self.plan_of(self.programs, None, args, kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.programs, None, args, kwargs)

    def plan_of(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        call = Invocation.of(self, programs, own, args, kwargs)
        plan = optimizer_state.plan(call, runs=False)[0]
        self._check_budgets(plan)
        return plan

    def call(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (once := Once.current()) is not None and is_tracing():
            self.keeping.refuse_inside(self.name)
            return once.function(self.fn, args, kwargs)
        if is_single_device() or is_tracing():
            with nullcontext() if is_tracing() or in_call() else plain_program():
                return self.fn(*args, **kwargs)
        mesh = current_mesh()
        if mesh is None and is_without_mesh():
            return self.fn(*args, **kwargs)
        if count_dispatch_modes():
            refuse_modes(self.name)
        if may_be_recorded():
            refuse_recorders(self.name)
        is_taken = False
        while True:
            begun = compiling.count
            if compiling.thread:
                refuse_nested()
                compiling.wait()
            state = State(own, programs.changing)
            key, leaves = self.read_call(mesh, programs, state, args, kwargs)
            mesh = key[0]
            if state.arrays and not is_taken:
                args, kwargs, is_taken = *self.with_tensors(args, kwargs), True
            elif begun == compiling.count:
                break
        if transform_level() is not None and is_transformed(leaves):
            programs.transformed = programs.transformed or Transformed(_returning)
            return programs.transformed(self, state, autocast_of(key[1]), args, kwargs)
        if dual_level() >= 0:
            refuse_tangents(self.name, leaves)
        found = programs.entries.find(key, leaves)
        if found is None:
            refuse_recorders(self.name, leaves)
            with programs.lock:
                found = programs.entries.find(key, leaves)
                if found is None:
                    call = Invocation(self, mesh, programs, args, kwargs, state, key, leaves)
                    plan, kept = optimizer_state.plan(call)
                    leaves = call.leaves
                    self._check_budgets(plan)
                    refuse_other_devices(plan, mesh, leaves)
                    given = zip(plan.compiled.traced.input_names, plan.compiled.traced.input_leaves, strict=True)
                    held = [(name, leaves[i]) for name, i in given if i >= 0]
                    reads = "read it from the module (self.weight), not from a list, a closure or another module"
                    refuse_replaced(f"{self.name} reads parameters that were replaced", held, reads)
                    ready = self._load(mesh, plan, kept, call=call)
                    compare_arguments(plan, mesh, leaves)
                    programs.entries.keep(call.key, ready, plan.compiled.traced.served)
                    found = ready, call.served(plan)
        elif ALWAYS or self.budgets or current_budgets():
            plan = found[0].plan() or Invocation(self, mesh, programs, args, kwargs, state, key, leaves).plan()[0]
            self._check_budgets(plan)
            if ALWAYS:
                compare_arguments(plan, mesh, leaves)
        ready, leaves = found
        if count_function_modes():
            with torch.DisableTorchFunction():
                return ready.call(leaves)
        return ready.call(leaves)

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
        if halves is None:
            whole = entry(plan, program, mesh, load(program, mesh, plan), kept)
            way = functools.partial(autograd_op.refused, whole) if whole.after.refused else caller(whole)
            return Ready(whole, way, self._kept(plan))
        first = entry(plan, halves.forward, mesh, load(halves.forward, mesh, plan), kept)
        again = Again.of(self, call, first, halves)
        second = autograd_op.backward(plan, halves, mesh, load(halves.backward, mesh, plan), again)
        return Ready(first, functools.partial(autograd_op.run, first, second), self._kept(plan))

    @functools.cached_property
    def pull(self) -> Jitted:
        """The program that gives the gradients of a call, with gradients of their own."""
        found: Jitted = jit(pull_of(self.fn, self.name), static_argnames=("how",))
        return found

    def _kept(self, plan: Plan) -> Callable[[], Plan | None]:
        """A way to the plan as long as somebody has it; a budget reads it in each call."""
        return (lambda: plan) if self.budgets else weakref.ref(plan)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Method(self, instance)

    def __reduce__(self) -> Any:
        return Jitted, (self.fn, self.in_specs, self.out_specs, self.static, self.donate, self.budgets, self.keeping)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        fn = copy.deepcopy(self.fn, memo)
        return Jitted(fn, self.in_specs, self.out_specs, self.static, self.donate, self.budgets, self.keeping)

    def __repr__(self) -> str:
        return f"<jit of {self.name}>"


class _Returning(Jitted):
    """A function that transforms outside of `jit` call."""

    only_returns = True


def _returning(fn: Callable[..., Any]) -> _Returning:
    return _Returning(fn, None, None, frozenset(), frozenset(), (), Keeping.of("auto", "none", None, None))
