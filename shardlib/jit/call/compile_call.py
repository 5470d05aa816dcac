"""Traces and plans a call that has no program yet, and undoes the trace's side effects."""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardlib.compiler.pipeline import Compiled, compile_program
from shardlib.compiler.plan.plan import Plan
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.context import compiling, skip_dynamo
from shardlib.core.errors import EffectError, NoProgramError, ShardingError, SideEffectError, TraceAnewError
from shardlib.core.mode_restore import without_function_modes
from shardlib.core.progress import show_progress
from shardlib.core.source_lines import caller_at
from shardlib.core.stage_clock import StageClock
from shardlib.core.torch_internals.torch_private import preserved_versions
from shardlib.frontend.guards.flatten_call import flatten_call
from shardlib.frontend.guards.recompile_reasons import (
    OFTEN,
    Change,
    RetraceWarning,
    compare_calls,
    describe_read,
    join_first,
    record_call,
)
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.hazards.escaped_values import keeps_numbers, refuse_kept
from shardlib.frontend.hazards.grad_reads import LookedAtGradientError
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.side_effects.leaks import refuse_late, refuse_leaks
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.side_effects.refused_effects import refuse_effects
from shardlib.frontend.side_effects.snapshot import Snapshot
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.jit.call.function import Function
from shardlib.jit.call.program_cache import PROGRAMS, Programs
from shardlib.jit.call.shared_trace import is_one_trace, tracer
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.sharding.placement import FixedLayout
from shardlib.tensor.sharded_tensor import ShardedTensor

_ATTEMPTS = 6  # most traces of a function whose effects have not settled

# A cache that grows by a token has another shape in each step.
_GENERATES = 'in generate(), cache_implementation="static" keeps the shapes of what is cached; else '


@dataclass
class Invocation:
    """One call of a function on a mesh; `key`, `leaves` and `state` are those of the last reading."""

    function: Function
    mesh: Mesh
    programs: Programs
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: StateWalk
    key: Any
    leaves: list[Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # wraps the trace
    read_at: int = -2  # the count of traces at the last reading

    @staticmethod
    def read_new(
        function: Function, programs: Programs, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Invocation:
        """Reads a call on the current mesh; `own` is the object of a method."""
        begun = _traces_begun()
        state = StateWalk(own, programs.changing)
        key, leaves = function.read_call(current_mesh(), programs, state, args, kwargs)
        call = Invocation(function, key[0], programs, args, kwargs, state, key, leaves, read_at=begun)
        if call.state.arrays:
            call.args, call.kwargs = function.with_tensors(args, kwargs)
            call.read()
        return call

    def read(self) -> None:
        """Reads the call again."""
        self.read_at = _traces_begun()
        self.state = StateWalk(self.state.own, self.programs.changing)
        self.key, self.leaves = self._read(self.state)

    @without_function_modes
    def look(self) -> Snapshot:
        """Returns all objects that the call finds, place by place."""
        snapshot = Snapshot(self.state.own, self.programs.changing)
        self._read(snapshot)
        flatten_call(self.function.fn, self.args, self.kwargs, self.function.static, snapshot)
        return snapshot

    def _read(self, state: StateWalk) -> tuple[Any, list[Any]]:
        return self.function.read_call(self.mesh, self.programs, state, self.args, self.kwargs)

    @skip_dynamo
    def plan(self) -> tuple[Plan, list[Any]]:
        """Returns the plan, and the objects that it identifies; all effects of the trace are undone.

        The key of a call whose program serves only this call is None.
        """
        with self.programs.lock:
            if (match := self.programs.plans.find(self.key, self.leaves)) is not None:
                return match[0]
            refuse_nested()
            with compiling():
                if compiling.count > self.read_at + 1:  # another thread may have traced since
                    self.read()
                return self._plan()

    def _plan(self) -> tuple[Plan, list[Any]]:
        name, programs, modes = self.function.name, self.programs, self.key[1]
        for attempt in itertools.count():
            watch = MutationTracker(self.look)
            changed = programs.changing.compare(watch.before.values)
            numbers, logs = watch.can_be_given(changed), watch.before.grown(changed)
            read = watch.before.read_logs()
            if numbers or logs or read:  # the caller changed these between calls
                programs.changing.add(numbers, logs=logs, no_logs=read)
                self.read()
                watch = MutationTracker(self.look)
            watch.around = self.around
            try:
                with _undone(watch):
                    plan = self._compile(watch)
                    left = self._left(watch, plan)
                    late = watch.late(left)
                    if left.leaked or keeps_numbers(plan.compiled.traced.outlived):
                        watch.restore()  # a number that outlives the trace must not be symbolic
                        plan = self._compile(watch, exact=True)
                        left = self._left(watch, plan)
                        late = watch.late(left)
            except LookedAtGradientError:
                programs.changing.grads = True
                self.read()
                continue
            except _ChangedNumberError:
                programs.changing.add(watch.numbers, watch.holders, watch.logs)
                self.read()
                continue
            left_behind = watch.undo(left)
            with _undone(watch):
                refuse_leaks(name, left_behind)
                refuse_late(name, late if plan.compiled.traced.after.gradients else ())
                refuse_kept(name, plan.compiled.traced.outlived)
                after = left if watch.leaves(left) else watch.look()
                effects = watch.unsupported(after)
                mine = [x for x in effects if not any(text.startswith(after.name(x.place)) for text in late)]
                refuse_effects(name, mine, after.name, partial(describe_read, self.key[2]))
            is_known = watch.learn(programs.changing)
            programs.asks |= plan.compiled.traced.asks_memory
            tensors = [*map(id, self.state.tensors)]
            if left is not watch.before or programs.asks:
                self.read()
            if tensors == [*map(id, self.state.tensors)] and is_known:
                break
            if attempt == _ATTEMPTS:
                watch.restore()
                raise SideEffectError(
                    f"{name} leaves what it finds in another order each time that it is traced",
                    ["the submodules or attributes of an object change their order"],
                    rule="a jitted function finds the same tensors in the same order before and after a trace",
                    remedy="hold them in a list, and change its items; or pass them as arguments",
                )
        return self._keep(watch, plan, after, modes, bool(late))

    def _keep(
        self, watch: MutationTracker, plan: Plan, after: Snapshot, modes: Any, is_late: bool
    ) -> tuple[Plan, list[Any]]:
        """Keeps a plan for calls with this key, and notes why the function was compiled again."""
        programs, served = self.programs, plan.compiled.traced.served
        call = flatten_call(self.function.fn, self.args, self.kwargs, self.function.static, self.state)
        now = record_call(self.function.fn, call, self.key, served.guarded_leaves, watch.before, after)
        if programs.last is not None:
            self._note(compare_calls(programs.last, now))
        programs.last = now
        programs.changing.grads |= plan.compiled.traced.looked  # the key then says whether there is a `.grad`
        if self.key[1] != modes or is_late:  # modes, or what another thread has changed since, count in one call
            self.key = None
        programs.plans.keep(self.key, (plan, self.state.kept), served)
        return plan, self.state.kept

    def _left(self, watch: MutationTracker, plan: Plan) -> Snapshot:
        """Returns the objects after a trace: the snapshot from before if nothing changed, and the call reads alike.

        Hooks of a backward pass may change objects after the function has returned.
        """
        if watch.is_still and not plan.compiled.traced.after.gradients and not self.programs.changing.anything:
            key, leaves = self.key, self.leaves
            self.read()
            if key == self.key and list(map(id, leaves)) == list(map(id, self.leaves)):
                return watch.before
        return watch.look()

    def served(self, plan: Plan) -> list[Any]:
        """Returns the leaves with which the program runs."""
        leaves = plan.compiled.traced.served.run_host_steps(self.leaves)
        if leaves is None:
            raise ShardingError(
                f"{self.function.name} steps a schedule that gives something else each time",
                rule="a schedule works out rates from its own numbers, and nothing else",
                remedy="step it outside the jitted function",
            )
        return leaves

    def _note(self, changes: Mapping[str, Change]) -> None:
        """Notes why the function is compiled again; warns if that happens again and again."""
        programs = self.programs
        programs.retraces.append(join_first([f"{subject}{change.text}" for subject, change in changes.items()]))
        del programs.retraces[:-PROGRAMS]
        if is_one_trace():
            return
        programs.reasons.update(list(changes))
        if often := [subject for subject in changes if programs.reasons[subject] == OFTEN]:
            name, generates = self.function.name, ""
            method = inspect.unwrap(self.function.fn, stop=lambda fn: hasattr(fn, "__self__"))
            module = getattr(method, "__self__", None)
            if isinstance(module, torch.nn.Module):
                name = f"{type(module).__name__}.{name}"
                generates = _GENERATES if hasattr(module, "generate") else ""
            warnings.warn_explicit(
                f"{name} has been compiled {OFTEN + 1} times, the last time because of {programs.retraces[-1]}.\n"
                f"Remedy: {generates}{changes[often[0]].remedy}. {name}.retraces lists all reasons",
                RetraceWarning,
                *caller_at(sys._getframe(1)),
            )

    def _compile(self, watch: MutationTracker, *, exact: bool = False) -> Plan:
        function = self.function
        counted = tuple(x for x in self.state.tensors if not x.is_inference())
        clock = StageClock()
        # A trace does not write to the tensors that it reads.
        progress = show_progress(lambda: f"plans {function.name}: {clock.stage}")
        with preserved_versions(counted), watch.cut(self.state), progress:
            compiled = compile_program(
                function.fn,
                self.args,
                self.kwargs,
                self.mesh,
                in_specs=function.in_specs,
                out_specs=function.out_specs,
                static=function.static,
                placed=self._placed,
                state=self.state,
                exact=exact or self.state.rates,
                watch=watch,
                donate=function.donate,
                options=function.options,
                tracer=self._trace,
                before=self._before(),
                clock=clock,
                differentiate=any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.leaves),
            )
        after = compiled.traced.after
        if function.goes_back and after.refused:
            raise NoProgramError(
                f"the backward pass of {function.name} is no program",
                [after.why],
                rule="a program is traced once, its backward pass and the hooks in it with it",
                remedy="leave that line out of hooks and custom gradients",
            )
        if function.only_returns:
            _refuse_effects(function.name, compiled)
        return Plan(compiled)

    def _trace(self, *args: Any, watch: MutationTracker, **how: Any) -> TracedFunction:
        """Traces the call; stops before the other stages if the function changes a number that is no input yet."""
        traced = tracer(self.key, self.leaves)(*args, watch=watch, **how)
        if not watch.numbers <= self.programs.changing.numbers:
            raise _ChangedNumberError
        return traced

    def _before(self) -> Iterator[Compiled]:
        """Yields earlier programs for this mesh and these modes, the last one first."""
        for key, plans in reversed(self.programs.plans.items()):
            if key[:2] == self.key[:2]:
                yield from (plan.compiled for (plan, _), _ in reversed(plans))

    def _placed(self, leaf: Any) -> FixedLayout | None:
        """Returns the layout of a leaf that is placed already."""
        return FixedLayout.at(leaf.sharding, leaf._form.names) if isinstance(leaf, ShardedTensor) else None


def _traces_begun() -> int:
    """Returns how many traces have begun; -2 during a trace, when readings are not reliable."""
    return -2 if compiling.thread else compiling.count


def _refuse_effects(name: str, compiled: Compiled) -> None:
    after = compiled.traced.after
    draws = any(has_trait(node.target, "draws_key") for node in compiled.traced.graph.graph.nodes)
    if after.writes or after.rebound or draws:
        raise EffectError(
            f"{name} {'draws random numbers' if draws else 'changes tensors or values that it does not return'}",
            rule="outside jit, a transform of torch.func calls a function more than once",
            remedy="put jit around the transform: sl.jit(sl.grad(f))(x)",
        )


class _ChangedNumberError(TraceAnewError):
    """A function changes a number that its trace took for a constant."""


@contextmanager
def _undone(watch: MutationTracker) -> Iterator[None]:
    """Restores objects if the body raises."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            watch.restore()
