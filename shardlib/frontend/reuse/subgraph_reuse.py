"""Equal pieces of a program are traced once: modules of one kind, and jitted functions that others call.

A module runs as always when it is called first. From its second call on, and a jitted function's first, Python runs
once more, apart (`trace_body`), and every call that looks the same is a copy of the nodes that this wrote, forward and
backward: no op goes through torch again. What
looks the same is decided by what jit's own key knows: shapes, flags, code, what that closes over, modes. Of those that
are handed an object, Python runs in every call (`followed`). Pieces that do more than compute (they write to what they
are given, or leave something behind elsewhere) are traced as ever: whoever finds that out names the piece and begins
the trace anew.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.forward_mode import is_forward_mode
from shardlib.core.source_lines import Line
from shardlib.core.torch_private import IS_PARAMETER, function_modes, pytree, running_node, saved_hooks
from shardlib.frontend.guards.code_refs import Reached
from shardlib.frontend.guards.mappings import opened
from shardlib.frontend.guards.torch_modes import is_of_traces
from shardlib.frontend.guards.value_kinds import PLAIN
from shardlib.frontend.results import refuse_attributes
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import NotOnceError, only_gradients
from shardlib.frontend.reuse.module_equality import Alike, Read, noted
from shardlib.frontend.reuse.replay_python import Asking, OtherError, Recording
from shardlib.frontend.reuse.subgraph import (
    REACHED,
    At,
    Call,
    Piece,
    again,
    containers_in,
    follow,
    left_behind,
    looked,
    place,
    refuse_shared,
    shows_all,
    surroundings,
)
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.primitives.random.keys import discarding_draws

AFTER = 1  # calls of a module that are traced as they come: it may be the only one; of a jitted function, one less
FORMS = 4  # of one piece, which differ in what their code reads
KINDS = 16  # of one code, none of which comes again: then nobody looks for equal ones any more

_current: ContextVar[Once | None] = ContextVar("shardlib_once", default=None)


# Code that does more than compute, with the modes in which it does: tried once a process.
_IMPURE: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
# Code that is followed, and did something else where only a number was another: there 0 and 1 are taken for flags.
_BY_FLAGS: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def _code(of: Any) -> Any:
    return of if isinstance(of, types.FunctionType) else type(of)


def _mode(of: Any, call: Call) -> tuple[Any, bool]:
    return getattr(of, "training", None), call.objects


class Once:
    """The pieces of one trace; with none, everything is traced where it is called."""

    def __init__(self, *, none: bool = False) -> None:
        self.none = none
        self.used = False  # whether anything was traced apart
        self.refused = False  # whether something was found to be more than a computation: the trace begins anew
        self.made: list[weakref.ref[Tensor]] = []  # values of what was traced apart
        self._calls: dict[Any, int] = {}
        self._seen: dict[Any, set[int]] = {}  # by code, what has come once
        self._pieces: dict[Any, list[Piece]] = {}
        self._kept: list[Any] = []  # what keys know by identity: nothing else gets their ids
        self._busy = False
        self._tracer: Any = None
        self.interrupt: Callable[[], None] = lambda: None  # called before a piece

    @staticmethod
    def current() -> Once | None:
        """That of the trace that is going on here."""
        return _current.get()

    @contextmanager
    def on(self) -> Iterator[None]:
        """While on, this is the current one."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._tracer = None  # nothing of the trace stays
            self._pieces.clear()
            self._kept.clear()

    def watches(self, tracer: Any, line: Line) -> None:
        """Take the calls of modules that this tracer sees."""
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
        """A jitted function that is called in the trace."""
        return self._call(fn, fn, args, kwargs, AFTER - 1) if self.is_open() else fn(*args, **kwargs)

    def is_open(self) -> bool:
        """Whether a piece may be taken here: not in another one, in a transform that batches, or where hooks are."""
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
            and all(map(is_of_traces, function_modes()))
        )

    def _call(self, of: Any, run: Callable[..., Any], args: Any, kwargs: Any, after: int) -> Any:
        self.interrupt()
        seen = self._seen.setdefault(_code(of), set())
        with torch.DisableTorchFunction():
            call = None if len(seen) > KINDS else Call.of(of, args, kwargs)
            if call is not None and _mode(of, call) in _IMPURE.get(_code(of), ()):
                call = None
            piece = None if call is None else self._known(of, call)
        if call is None or (piece is None and self._is_early(call.key, after)):
            if call is not None and self._calls[call.key] == 1:
                seen.add(hash(call.key))
                self._kept.append(call.walk.kept)
            return run(*args, **kwargs)
        seen.clear()
        if piece is None:
            with self._apart(of, call):
                piece = self._traced(of, run, call)
        if not call.objects:
            return again(piece, call)
        with self._apart(of, call):
            return follow(piece, call, run)

    def _is_early(self, key: Any, after: int) -> bool:
        """Whether too few have come to trace a piece apart, or others of it, each for itself, too often."""
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] <= after or len(self._pieces.get(key, ())) >= FORMS

    def _known(self, of: Any, call: Call) -> Piece | None:
        for piece in self._pieces.get(call.key, ()):
            walk = Alike(piece.reads)
            if walk.read(of, call.shown, REACHED) == piece.known and not walk.opaque:
                call.walk = walk
                return piece
        return None

    @contextmanager
    def _apart(self, of: Any, call: Call) -> Iterator[None]:
        """While something is traced apart, or followed."""
        self.used = self._busy = True
        try:
            yield
        except Exception as error:  # whatever it is: if it is the function's own, it comes again in the next trace
            self.refused = True
            is_new = isinstance(error, OtherError) and _mode(of, call) not in _BY_FLAGS.get(_code(of), ())
            (_BY_FLAGS if is_new else _IMPURE).setdefault(_code(of), set()).add(_mode(of, call))
            raise NotOnceError(str(error)) from error
        finally:
            self._busy = False

    def _traced(self, of: Any, run: Callable[..., Any], call: Call) -> Piece:
        reads: set[Read] = set()
        found: list[Any] = []
        record: Recording | None = None
        reached = Reached() if call.objects else REACHED  # functions in objects may hold values of the trace

        def flat(*given: Tensor) -> list[Tensor]:
            nonlocal record
            leaves = list(call.leaves)
            for i, x in zip(call.where, given, strict=True):
                for j, at in enumerate(call.same):
                    if at == i:
                        leaves[j] = x
            args, kwargs = pytree.tree_unflatten(leaves, call.tree)
            containers = containers_in((args, kwargs))
            for i, x in zip(call.where, given, strict=True):
                if isinstance(call.leaves[i], nn.Parameter):
                    setattr(x, IS_PARAMETER, True)
            record = Recording(given) if call.objects else None
            with record or Asking():
                out = run(*args, **kwargs)
            if torch.is_grad_enabled() is not call.follows:
                raise NotOnceError("it leaves another gradient mode")
            now, tree = pytree.tree_flatten((args, kwargs))
            if tree != call.tree or any(x is not y for x, y in zip(now, leaves, strict=True)):
                raise NotOnceError("it changes a container among its arguments")
            results: list[Any]
            if record is not None:
                with torch.DisableTorchFunction():
                    tensors = left_behind(record, of, (args, kwargs), out, reached)
                results, shape = [], None
            elif containers.isdisjoint(containers_in(out)):
                results, shape = pytree.tree_flatten(opened(out))
                place = {id(x): i for i, x in zip(call.where, given, strict=True)}
                results = [At(place[id(x)], given=True) if id(x) in place else x for x in results]
                tensors = [x for x in results if isinstance(x, Tensor)]
            else:
                raise NotOnceError("it returns a container that it is given")
            if any(not isinstance(x, Tensor | At) and type(x) not in PLAIN for x in results):
                raise NotOnceError("it returns an object")
            if any(x.is_leaf and x.requires_grad for x in tensors):
                raise NotOnceError("a gradient begins at its result")
            refuse_attributes(("a result", None, x) for x in tensors)
            if len({id(x) for x in tensors}) != len(tensors):
                raise NotOnceError("it returns one tensor twice")
            places = iter(range(len(tensors)))
            found[:] = [shape, [At(next(places)) if isinstance(x, Tensor) else x for x in results]]
            return tensors

        with torch.DisableTorchFunction():
            before, everything = surroundings(of, call.given, reached)
            if everything.opaque or (call.objects and not shows_all(call.given)):
                raise NotOnceError("it finds what no call repeats")
            watch = MutationTracker(lambda: looked(of, call.given, reached)) if call.objects else None
        names = list(map(str, call.where))
        with discarding_draws(), noted(everything, reads):
            body = trace_body(flat, call.tensors, names, self._line, differentiate=call.follows, strict=True)
        with torch.DisableTorchFunction():
            if watch is not None:
                watch.restore()
            if surroundings(of, call.given, reached)[0] != before:
                raise NotOnceError("it changes what it finds")
            if record is not None:  # numbers are a matter of the code, which runs in every call
                held = {everything.modules[id(m)]: vars(m) for m in everything.held}
                flags = (0, 1) if _mode(of, call) in _BY_FLAGS.get(_code(of), ()) else ()
                reads = {(at, k) for at, k in reads if type(x := held[at].get(k)) is not int or x in flags}
            walk = Alike(reads)
            known = walk.read(of, call.shown, REACHED)
            refuse_shared(body, copied=record is not None)
            at = {id(x): i for i, x in enumerate(walk.tensors)} if record is None else record.close()
            shape, results = found
            piece = Piece(known, reads, body, [place(x, at) for x in body.captured], shape, results, record)
        self._pieces.setdefault(call.key, []).append(piece)
        self._kept.append(walk.kept)
        self.made += body.made
        call.walk = walk
        return piece
