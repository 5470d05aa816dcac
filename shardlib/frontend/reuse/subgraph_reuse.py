"""Traces equal parts of a program once: modules of one class, and jitted functions that others call.

The first call of a module is traced in place. From its second call on, and from a jitted function's first, Python runs
once more, separately (`trace_body`). Every call with the same key copies the nodes of this trace, forward and backward,
so that no op runs through torch again. The key has the facts of jit's own key: shapes, flags, code, closures, modes.
Code that gets objects runs in every call (`run_and_emit`). Code that does more than compute (it writes to its inputs,
or leaves a value elsewhere) is always traced in place: the first error excludes it and restarts the trace.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.source_lines import Line
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import IS_PARAMETER, function_modes, pytree, running_node, saved_hooks
from shardlib.frontend.guards.code_refs import CodeReadsCache
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.guards.torch_modes import is_trace_mode
from shardlib.frontend.guards.value_kinds import PLAIN
from shardlib.frontend.results import refuse_attributes
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import NotReusableError, only_gradients
from shardlib.frontend.reuse.module_equality import AttributeRead, EqualityWalk, record_reads
from shardlib.frontend.reuse.replay_python import CallRecording, IdentityGuard, MismatchError
from shardlib.frontend.reuse.subgraph import (
    REACHED,
    ResultPosition,
    Subgraph,
    SubgraphCall,
    captured_position,
    container_ids,
    emit_copy,
    find_remaining_tensors,
    read_surroundings,
    refuse_shared_memory,
    run_and_emit,
    shows_all_changes,
    take_snapshot,
)
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.primitives.random.keys import discarding_draws

AFTER = 1  # calls of a module that are traced in place, since it may be the only one; one less for a jitted function
FORMS = 4  # subgraphs with one key, which differ in the attributes that their code reads
KINDS = 16  # keys of one code without a repetition, after which its calls are traced in place

_current: ContextVar[SubgraphReuse | None] = ContextVar("shardlib_once", default=None)


# Code that does more than compute, with its modes; each process tries once.
_IMPURE: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
# Code that runs in every call and made other torch calls when an int differed; for it, 0 and 1 count as flags.
_BY_FLAGS: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def _code(owner: Any) -> Any:
    """Returns the function itself, or the class of a module."""
    return owner if isinstance(owner, types.FunctionType) else type(owner)


def _mode(owner: Any, call: SubgraphCall) -> tuple[Any, bool]:
    return getattr(owner, "training", None), call.has_objects


class SubgraphReuse:
    """The subgraphs of one trace; with `none`, every call is traced in place."""

    def __init__(self, *, none: bool = False) -> None:
        self.none = none
        self.used = False  # True once a call was traced separately
        self.refused = False  # True if a call did more than compute; the trace then restarts
        self.made: list[weakref.ref[Tensor]] = []  # tensors of separate traces
        self._calls: dict[Any, int] = {}
        self._seen: dict[Any, set[int]] = {}  # by code, hashes of the keys that came once
        self._subgraphs: dict[Any, list[Subgraph]] = {}
        self._kept: list[Any] = []  # objects that keys know by identity; kept, so that no other object gets an id
        self._busy = False
        self._tracer: Any = None
        self.interrupt: Callable[[], None] = lambda: None  # called before each call

    @staticmethod
    def current() -> SubgraphReuse | None:
        """Returns the instance of the running trace; None without one."""
        return _current.get()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Makes this the current instance."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._tracer = None  # releases the trace
            self._subgraphs.clear()
            self._kept.clear()

    def watch_modules(self, tracer: Any, line: Line) -> None:
        """Handles the calls of modules that a tracer sees."""
        self._tracer, self._line = tracer, line
        call = tracer.call_module
        tracer.call_module = lambda m, forward, args, kwargs: call(
            m, lambda *a, **k: self._module(m, forward, a, k), args, kwargs
        )

    def _module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        small = type(m).__module__.startswith("torch.nn.") and next(m.children(), None) is None
        if small or not self.is_open():
            return forward(*args, **kwargs)
        return self._call(m, forward, args, kwargs, AFTER)

    def function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a jitted function inside the trace."""
        return self._call(fn, fn, args, kwargs, AFTER - 1) if self.is_open() else fn(*args, **kwargs)

    def is_open(self) -> bool:
        """Returns whether calls may be reused here: not inside another one, under vmap, or under saved-tensor hooks."""
        mode = get_proxy_mode()
        return (
            not self.none
            and not self._busy
            and mode is not None
            and mode.tracer is self._tracer
            and running_node() is None
            and only_gradients()
            and not is_forward_mode()
            and saved_hooks(True) is None
            and all(map(is_trace_mode, function_modes()))
        )

    def _call(self, owner: Any, run: Callable[..., Any], args: Any, kwargs: Any, after: int) -> Any:
        """Calls a module or a function: by a copy of its subgraph, or in place if there is none yet."""
        self.interrupt()
        seen = self._seen.setdefault(_code(owner), set())
        with torch.DisableTorchFunction():
            call = None if len(seen) > KINDS else SubgraphCall.create(owner, args, kwargs)
            if call is not None and _mode(owner, call) in _IMPURE.get(_code(owner), ()):
                call = None
            subgraph = None if call is None else self._find(owner, call)
        if call is None or (subgraph is None and self._is_early(call.key, after)):
            if call is not None and self._calls[call.key] == 1:
                seen.add(hash(call.key))
                self._kept.append(call.walk.kept)
            return run(*args, **kwargs)
        seen.clear()
        if subgraph is None:
            with self._separately(owner, call):
                subgraph = self._trace(owner, run, call)
        if not call.has_objects:
            return emit_copy(subgraph, call)
        with self._separately(owner, call):
            return run_and_emit(subgraph, call, run)

    def _is_early(self, key: Any, after: int) -> bool:
        """Counts a call; returns whether it is too early for a subgraph, or whether there are too many with its key."""
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] <= after or len(self._subgraphs.get(key, ())) >= FORMS

    def _find(self, owner: Any, call: SubgraphCall) -> Subgraph | None:
        """Returns the subgraph for a call, and stores its walk in the call; None if there is none."""
        for subgraph in self._subgraphs.get(call.key, ()):
            walk = EqualityWalk(subgraph.reads)
            if walk.read(owner, call.key_arguments, REACHED) == subgraph.facts and not walk.opaque:
                call.walk = walk
                return subgraph
        return None

    @contextmanager
    def _separately(self, owner: Any, call: SubgraphCall) -> Iterator[None]:
        """Traces or replays a call; an error excludes its code and restarts the trace."""
        self.used = self._busy = True
        try:
            yield
        except Exception as error:  # an error of the function's own comes again in the next trace
            self.refused = True
            is_new = isinstance(error, MismatchError) and _mode(owner, call) not in _BY_FLAGS.get(_code(owner), ())
            (_BY_FLAGS if is_new else _IMPURE).setdefault(_code(owner), set()).add(_mode(owner, call))
            raise NotReusableError(str(error)) from error
        finally:
            self._busy = False

    def _trace(self, owner: Any, run: Callable[..., Any], call: SubgraphCall) -> Subgraph:
        """Traces a call separately. Raises `NotReusableError` if its code does more than compute."""
        reads: set[AttributeRead] = set()
        reached = CodeReadsCache() if call.has_objects else REACHED  # functions in objects may hold values of the trace
        flat = _FlatCall(owner, run, call, reached)
        with torch.DisableTorchFunction():
            before, surroundings = read_surroundings(owner, call.arguments, reached)
            if surroundings.opaque or (call.has_objects and not shows_all_changes(call.arguments)):
                raise NotReusableError("it reads state that calls do not repeat")
            tracker = (
                MutationTracker(lambda: take_snapshot(owner, call.arguments, reached)) if call.has_objects else None
            )
        names = list(map(str, call.positions))
        with discarding_draws(), record_reads(surroundings, reads):
            body = trace_body(flat.run, call.tensors, names, self._line, differentiate=call.gradients_on, strict=True)
        record = flat.record
        with torch.DisableTorchFunction():
            if tracker is not None:
                tracker.restore()
            if read_surroundings(owner, call.arguments, reached)[0] != before:
                raise NotReusableError("it changes an object that it reads")
            if record is not None:  # the code runs in every call, so it may read other numbers
                held = {surroundings.modules[id(m)]: vars(m) for m in surroundings.held}
                flags = (0, 1) if _mode(owner, call) in _BY_FLAGS.get(_code(owner), ()) else ()
                reads = {(at, k) for at, k in reads if type(x := held[at].get(k)) is not int or x in flags}
            walk = EqualityWalk(reads)
            facts = walk.read(owner, call.key_arguments, REACHED)
            refuse_shared_memory(body, copied=record is not None)
            positions = {id(x): i for i, x in enumerate(walk.tensors)} if record is None else record.close()
            places = [captured_position(x, positions) for x in body.captured]
            subgraph = Subgraph(facts, reads, body, places, flat.tree, flat.results, record)
        self._subgraphs.setdefault(call.key, []).append(subgraph)
        self._kept.append(walk.kept)
        self.made += body.trace_values
        call.walk = walk
        return subgraph


class _FlatCall:
    """A call as a function from its tensors to the tensors of its result.

    After `run`, `tree` and `results` are the structure and the leaves of the result; a `ResultPosition` stands for each
    tensor. `record` holds the torch calls of code that runs in every call.
    """

    def __init__(self, owner: Any, run: Callable[..., Any], call: SubgraphCall, reached: CodeReadsCache) -> None:
        self._owner, self._run, self._call, self._reached = owner, run, call, reached
        self.record: CallRecording | None = None
        self.tree: Any = None
        self.results: list[Any] = []

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """Runs the call; returns its new tensors. Raises `NotReusableError` for results that copies cannot have."""
        call = self._call
        leaves = list(call.leaves)
        for i, x in zip(call.positions, tensors, strict=True):
            for j, first in enumerate(call.first_same):
                if first == i:
                    leaves[j] = x
        args, kwargs = pytree.tree_unflatten(leaves, call.tree)
        containers = container_ids((args, kwargs))
        for i, x in zip(call.positions, tensors, strict=True):
            if isinstance(call.leaves[i], nn.Parameter):
                setattr(x, IS_PARAMETER, True)
        self.record = record = CallRecording(tensors) if call.has_objects else None
        with record or IdentityGuard():
            out = self._run(*args, **kwargs)
        if torch.is_grad_enabled() is not call.gradients_on:
            raise NotReusableError("it leaves another gradient mode")
        leaves_after, tree = pytree.tree_flatten((args, kwargs))
        if tree != call.tree or any(x is not y for x, y in zip(leaves_after, leaves, strict=True)):
            raise NotReusableError("it changes a container among its arguments")
        results: list[Any]
        if record is not None:
            with torch.DisableTorchFunction():
                new = find_remaining_tensors(record, self._owner, (args, kwargs), out, self._reached)
            results, self.tree = [], None
        elif containers.isdisjoint(container_ids(out)):
            results, self.tree = pytree.tree_flatten(register_mappings(out))
            arguments = {id(x): i for i, x in zip(call.positions, tensors, strict=True)}
            results = [ResultPosition(arguments[id(x)], is_argument=True) if id(x) in arguments else x for x in results]
            new = [x for x in results if isinstance(x, Tensor)]
        else:
            raise NotReusableError("it returns a container of its arguments")
        _refuse_results(results, new)
        indices = iter(range(len(new)))
        self.results = [ResultPosition(next(indices)) if isinstance(x, Tensor) else x for x in results]
        return new


def _refuse_results(results: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Raises `NotReusableError` for results that a copy cannot have."""
    if any(not isinstance(x, Tensor | ResultPosition) and type(x) not in PLAIN for x in results):
        raise NotReusableError("it returns an object")
    if any(x.is_leaf and x.requires_grad for x in tensors):
        raise NotReusableError("a gradient begins at its result")
    refuse_attributes(("a result", None, x) for x in tensors)
    if len({id(x) for x in tensors}) != len(tensors):
        raise NotReusableError("it returns one tensor twice")
