"""`jit`: a function written for one device, run on the current mesh."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from shardlib.arrays import Shown, taken
from shardlib.calls import gradient
from shardlib.calls.ambient import ambient, refuse_modes
from shardlib.calls.arguments import argument_of, by_position_and_name
from shardlib.calls.closure import Closure
from shardlib.calls.flat import flatten_call, read, twins, wrapped
from shardlib.calls.leaks import refuse_leaks
from shardlib.calls.method import Method, Methods
from shardlib.calls.programs import PROGRAMS, Programs, Ready
from shardlib.calls.reasons import Change, difference, listed, seen
from shardlib.calls.rebound import Watch
from shardlib.calls.refusals import refuse_other_devices, refuse_others_than_functions, refuse_tangents
from shardlib.calls.run import caller, entry
from shardlib.calls.snapshot import Snapshot
from shardlib.calls.state import State
from shardlib.compile import compile_program
from shardlib.errors import ShardingError
from shardlib.meshes.mesh import Mesh, current_mesh, is_without_mesh
from shardlib.plans.budget import CommBudget, current_budgets
from shardlib.plans.plan import Plan
from shardlib.propagate.flood import Fixed
from shardlib.random.draw import in_call
from shardlib.random.plain import plain_program
from shardlib.run import Runner, load
from shardlib.state import is_single_device, is_tracing, unseen
from shardlib.tensors.agreed import ALWAYS, compare_arguments
from shardlib.tensors.tensor import ShardedTensor
from shardlib.tracing.asked import at_home
from shardlib.tracing.lines import user_frame

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
) -> Any:
    """Compile `fn` for the current mesh, at the first call for each set of what it can see.

    That is shapes, strides, dtypes and layouts of tensors, flags and static arguments, torch's modes (autocast,
    gradient mode, default dtype ...), the code of the functions, methods and classes that it leads to, and what all of
    them close over: modules with their parameters, buffers and flags, variables, attributes of objects and of tensors
    (not what libraries compute, `os.environ`, `globals()`, context variables, weak references and files, locks, events
    and streams, names of classes and initial seeds of generators, modules that are found by a name that is no text in
    the code, nor what is in containers of more than 1,000 objects, or 20,000 numbers and texts; `id(x)` and `hash(x)`
    of an argument are those of what stands for it). Tensors found there are inputs, read anew in each call. Numbers
    among the arguments are inputs, too, where they only enter arithmetic; numpy's numbers are constants, its arrays
    tensors. Writes to arguments, numpy's arrays among them, to buffers and `.grad` are applied after the call, and not
    at all if the function raises. So are other values of attributes, variables and items (`self.step += 1` is an input
    and a result); other effects of Python (a print, an append) happen while compiling only. A `TorchFunctionMode`
    around the call acts then, too; torch's own dispatch modes (counters), and those with `only_observes = True`, see
    what runs, and others are refused.

    `in_specs` (a tuple with an entry per positional argument, or a dict by parameter name) and `out_specs` are prefix
    pytrees of specs: a single spec is every argument's; None leaves a layout to inference. Arguments may be plain
    tensors (every process has them whole) or `ShardedTensor`s; tensor results are `ShardedTensor`s. An argument that
    the function returns, or a view of one, comes back in memory of its own. Results have a history where an input
    requires gradients, so that `.backward()` goes through the call; inside, gradients are taken by `sl.grad`,
    `sl.value_and_grad` or `.backward()`. A `ShardedTensor` in `donate_argnums` gives its memory up, for results to be
    written over it, and reading it afterwards is an error; memory that anything else refers to (a plain tensor, a
    view, a piece from `to_local`) is copied instead, and never written to. Works as a decorator, also of methods.

    Raises `ShardingError` outside any mesh, where specs do not fit, where a communication budget is exceeded, and for
    what would leave the trace unseen. Warns `RetraceWarning`, once, of a function that is compiled again and again.

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
        )
    refuse_others_than_functions(fn)
    if comm_budget is not None and not isinstance(comm_budget, CommBudget):
        raise ShardingError(f"{comm_budget!r} is no budget", remedy="comm_budget=sl.comm_budget(max_bytes=...)")
    static = (*_tuple(static_argnums), *_tuple(static_argnames))
    return Jitted(fn, in_specs, out_specs, frozenset(static), frozenset(_tuple(donate_argnums)), comm_budget)


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)


class RetraceWarning(UserWarning):
    """A function is compiled again and again."""


# What a tensor says of itself is read without a look for its `__torch_function__`: that takes half the time.
_PlainAttributes = torch._C.DisableTorchFunctionSubclass
OFTEN = 8  # programs for one reason, from which on it is said


class Jitted:
    """What `jit` returns: call it, or ask for its `plan`. `retraces` tells why it was compiled more than once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        budget: CommBudget | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.fn, self.in_specs, self.out_specs, self.budget = fn, in_specs, out_specs, budget
        self.static, self.donate = by_position_and_name(fn, static), by_position_and_name(fn, donate)
        self.programs = Programs()
        self.methods = Methods()

    @functools.cached_property
    def _closure(self) -> Closure:
        return Closure(self.fn)

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
        mesh = self._mesh(args, kwargs)
        state = State(own, programs.changing)
        key, leaves = self._read(mesh, programs, state, args, kwargs)
        if state.arrays:
            args, kwargs, state = *self._taken(args, kwargs), State(own, programs.changing)
            key, leaves = self._read(mesh, programs, state, args, kwargs)
        plan = self._planned(programs, mesh, key, leaves, state, args, kwargs)[0]
        self._check_budgets(plan)
        return plan

    def call(self, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_single_device() or is_tracing() or (_level() is not None and _transformed(args, kwargs)):
            with nullcontext() if is_tracing() or in_call() or not is_single_device() else plain_program():
                return self.fn(*args, **kwargs)
        mesh = current_mesh()
        if mesh is None:
            if is_without_mesh():
                return self.fn(*args, **kwargs)
            mesh = self._mesh(args, kwargs)
        if _dispatch_modes():
            refuse_modes(self.name)
        state = State(own, programs.changing)
        key, leaves = self._read(mesh, programs, state, args, kwargs)
        if state.arrays:
            args, kwargs, state = *self._taken(args, kwargs), State(own, programs.changing)
            key, leaves = self._read(mesh, programs, state, args, kwargs)
        if forward_ad._current_level >= 0:
            refuse_tangents(self.name, leaves)
        ready = programs.entries.find(key, leaves)
        if ready is None:
            with programs.lock:
                ready = programs.entries.find(key, leaves)
                if ready is None:
                    plan, kept, key, leaves = self._planned(programs, mesh, key, leaves, state, args, kwargs)
                    self._check_budgets(plan)
                    refuse_other_devices(plan, mesh, leaves)
                    ready = self._load(mesh, plan, kept)
                    compare_arguments(plan, mesh, leaves)
                    programs.entries.keep(key, ready, plan.compiled.traced.looked)
        elif ALWAYS or self.budget is not None or current_budgets():
            plan = ready.plan() or self._planned(programs, mesh, key, leaves, state, args, kwargs)[0]
            self._check_budgets(plan)
            if ALWAYS:
                compare_arguments(plan, mesh, leaves)
        if _function_modes():
            with torch._C.DisableTorchFunction():
                return ready.call(leaves)
        return ready.call(leaves)

    def _read(
        self, mesh: Mesh, programs: Programs, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The key of a call and its leaves; what comes with it is added to `state`."""
        leaves: list[Any] = []
        known: list[Any] = [None if kwargs else len(args)]
        if self.static:
            args, kwargs = wrapped(args, kwargs, self.static)
        with _PlainAttributes():
            read((args, kwargs) if kwargs else args, leaves, known, state)
            modes = ambient(state)
            self._closure.read(state, known)
        if state.otherwise:
            known += state.otherwise
        count = len(leaves)
        leaves += state.tensors
        if len(leaves) > 1 and len(set(map(id, leaves))) < len(leaves):
            known += twins(leaves[:count], state.tensors).items()
        if programs.asks:
            known.append(tuple(map(at_home, leaves)))
        if not state.quick:
            leaves += [x for x, _ in state.numbers.values()]
        return (mesh, modes, tuple(known)), leaves

    def look(self, mesh: Mesh, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
        """All that a call finds, place by place."""
        found = Snapshot(own, programs.changing)
        self._read(mesh, programs, found, args, kwargs)
        return found

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors for numpy's arrays, but for the static ones."""
        said, shown = f"an argument of {self.name}", Shown()
        return (
            tuple(x if i in self.static else taken(x, said, shown) for i, x in enumerate(args)),
            {k: x if k in self.static else taken(x, said, shown) for k, x in kwargs.items()},
        )

    def _check_budgets(self, plan: Plan) -> None:
        for budget in (*current_budgets(), *([self.budget] if self.budget else ())):
            budget.check(plan)

    def _mesh(self, args: Any, kwargs: Any) -> Mesh:
        mesh = current_mesh()
        if mesh is None:
            found = {leaf.mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)}
            if len(found) != 1:
                raise ShardingError(
                    f"{self.name} is called outside any mesh",
                    rule="a jitted function runs on the current mesh",
                    remedy="call it inside `with Mesh(data=2, tensor=4):`",
                )
            (mesh,) = found
        return mesh

    @unseen
    def _planned(
        self,
        programs: Programs,
        mesh: Mesh,
        key: Any,
        leaves: list[Any],
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Plan, list[Any], Any, list[Any]]:
        """The plan of a call, what its key knows by identity, and its key and leaves as they are after a trace."""
        with programs.lock:
            known = programs.plans.find(key, leaves)
            if known is None:
                own, changing, modes = state.own, programs.changing, key[1]
                while True:
                    watch = Watch(functools.partial(self.look, mesh, programs, own, args, kwargs))
                    try:
                        plan = self._compile(mesh, leaves, state, args, kwargs, watch)
                        if watch.look().leaked:  # a number that stays outside is no number of the trace
                            watch.restore()
                            plan = self._compile(mesh, leaves, state, args, kwargs, watch, exact=True)
                    except ShardingError:
                        watch.restore()
                        raise
                    finally:
                        left_behind = watch.undo()
                    if left_behind:
                        watch.restore()
                    refuse_leaks(self.name, left_behind)
                    is_known = watch.learn(changing)
                    programs.asks |= plan.compiled.traced.asked
                    found, state = state, State(own, changing)
                    left, leaves = self._read(mesh, programs, state, args, kwargs)
                    if not watch.is_moved(self.name, found, state) and is_known:
                        break
                key = left if left[1] == modes else None  # what switches torch otherwise is traced in every call
                call = flatten_call(args, kwargs, self.static, state)
                now = seen(self.fn, call, left, plan.compiled.traced.looked, watch.before.held, watch.look().held)
                if programs.last is not None:
                    self._retraced(programs, difference(programs.last, now))
                programs.last, known = now, (plan, state.kept)
                programs.plans.keep(key, known, plan.compiled.traced.looked)
        return *known, key, leaves

    def _retraced(self, programs: Programs, changes: Mapping[str, Change]) -> None:
        """Note why; say it when it happens again and again."""
        programs.retraces.append(listed([f"{name}{change.text}" for name, change in changes.items()]))
        del programs.retraces[:-PROGRAMS]
        programs.reasons.update(list(changes))
        if often := [name for name in changes if programs.reasons[name] == OFTEN]:
            warnings.warn_explicit(
                f"{self.name} has been compiled {OFTEN + 1} times, the last time because of "
                f"{programs.retraces[-1]}.\n"
                f"Remedy: {changes[often[0]].remedy}. {self.name}.retraces lists all reasons",
                RetraceWarning,
                *_asked_at(),
            )

    def _compile(
        self,
        mesh: Mesh,
        leaves: list[Any],
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        watch: Watch,
        *,
        exact: bool = False,
    ) -> Plan:
        def placed(leaf: Any) -> Fixed | None:
            if not isinstance(leaf, ShardedTensor):
                return None
            if leaf.mesh != mesh:
                raise ShardingError(
                    f"an argument of {self.name} lives on {leaf.mesh}, the current mesh is {mesh}",
                    [repr(leaf)],
                    rule="all tensors of a program live on one mesh",
                    remedy="place it again: shard(x.full_tensor(), spec) inside `with` the current mesh",
                )
            return Fixed(leaf.sharding, leaf._form.names, (False,) * leaf.dim(), "")

        compiled = compile_program(
            self.fn,
            args,
            kwargs,
            mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            static=self.static,
            placed=placed,
            state=state,
            exact=exact or state.exact,
            watch=watch,
            differentiate=any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves),
        )
        paths = compiled.traced.input_paths
        compiled.program.donated = frozenset(
            i for i, path in enumerate(paths) if path is not None and argument_of(path) in self.donate
        )
        return Plan(compiled)

    @unseen
    def _load(self, mesh: Mesh, plan: Plan, kept: Sequence[Any] = (), load: Callable[..., Runner] = load) -> Ready:
        if mesh.kind == "abstract":
            raise ShardingError(
                f"{self.name} cannot run on {mesh}",
                rule="an abstract mesh has no devices",
                remedy="plan on it (step.plan(...)), or use Mesh(...)",
            )
        program, halves = plan.compiled.program, plan.compiled.halves
        if halves is None:
            whole = entry(plan, program, mesh, load(program, mesh, plan), kept)
            way = functools.partial(gradient.refused, whole) if whole.after.refused else caller(whole)
            return Ready(whole, way, self._kept(plan))
        halves.forward.donated = program.donated
        first = entry(plan, halves.forward, mesh, load(halves.forward, mesh, plan), kept)
        second = gradient.backward(plan, halves, mesh, load(halves.backward, mesh, plan))
        return Ready(first, functools.partial(gradient.run, first, second), self._kept(plan))

    def _kept(self, plan: Plan) -> Callable[[], Plan | None]:
        """A way to the plan as long as somebody has it; a budget reads it in each call."""
        return weakref.ref(plan) if self.budget is None else lambda: plan

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Method(self, instance)

    def __reduce__(self) -> Any:
        return Jitted, (self.fn, self.in_specs, self.out_specs, self.static, self.donate, self.budget)

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        fn = copy.deepcopy(self.fn, memo)
        return Jitted(fn, self.in_specs, self.out_specs, self.static, self.donate, self.budget)

    def __repr__(self) -> str:
        return f"<jit of {self.name}>"


def _asked_at() -> tuple[str, int]:
    """The line of the user's that calls."""
    frame = user_frame(sys._getframe(1))
    return ("<unknown>", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


_level = torch._C._functorch.maybe_current_level
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def _transformed(args: Any, kwargs: Any) -> bool:
    """Whether a torch.func transform is running on these arguments: then the function is part of that program."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in pytree.tree_leaves((args, kwargs)))
