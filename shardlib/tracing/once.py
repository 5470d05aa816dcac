"""Equal pieces of a program are traced once: modules of one kind, and jitted functions that others call.

A module runs as always when it is called first. From its second call on, and a jitted function's first, Python runs
once more, apart (`trace_body`), and every call that looks the same is a copy of the nodes that this wrote, forward and
backward: no op goes through torch again. What
looks the same is decided by what jit's own key knows: shapes, flags, code, what that closes over, modes. Pieces that do
more than compute (they write to what they are given, or leave something behind) are traced as ever: whoever finds that
out names the piece and begins the trace anew.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from shardlib.calls.alike import Alike, Read, noted
from shardlib.calls.ambient import ambient, is_of_traces
from shardlib.calls.differing import is_value
from shardlib.calls.kinds import PLAIN
from shardlib.calls.mappings import opened
from shardlib.calls.numbers import is_given
from shardlib.calls.reach import Reached
from shardlib.calls.state import State
from shardlib.internals import (
    IS_PARAMETER,
    FakeTensor,
    TransformType,
    function_modes,
    pytree,
    running_node,
    saved_hooks,
    transforms,
)
from shardlib.lines import Line
from shardlib.random.draw import is_key, rehearsed
from shardlib.tracing.asked import ASKED, user_is_asking
from shardlib.tracing.body import trace_body
from shardlib.tracing.replay import Body, NotOnceError, owner
from shardlib.tracing.results import refuse_attributes

_REACHED = Reached()
AFTER = 1  # calls of a module that are traced as they come: it may be the only one; of a jitted function, one less
FORMS = 4  # of one piece, which differ in what their code reads
KINDS = 16  # of one code, none of which comes again: then nobody looks for equal ones any more

_current: ContextVar[Once | None] = ContextVar("shardlib_once", default=None)


# Code that does more than compute, with the modes in which it does: tried once a process.
_IMPURE: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def _code(of: Any) -> Any:
    return of if isinstance(of, types.FunctionType) else type(of)


def _is_impure(of: Any) -> bool:
    return getattr(of, "training", None) in _IMPURE.get(_code(of), ())


@dataclass
class _Piece:
    """One piece as it was traced: `reads` are the attributes of modules that its code looked at, `known` what they, and
    all else, were; `places` the tensors that it closes over, by their place in the walk."""

    known: Any
    reads: set[Read]
    body: Body
    places: list[int | None]
    tree: Any
    leaves: list[Any]  # of the result; a tensor stands as its position among the outputs


class Once:
    """The pieces of one trace; with none, everything is traced where it is called."""

    def __init__(self, *, none: bool = False) -> None:
        self.none = none
        self.used = False  # whether anything was traced apart
        self.refused = False  # whether something was found to be more than a computation: the trace begins anew
        self.made: list[weakref.ref[Tensor]] = []  # values of what was traced apart
        self._calls: dict[Any, int] = {}
        self._seen: dict[Any, set[int]] = {}  # by code, what has come once
        self._pieces: dict[Any, list[_Piece]] = {}
        self._kept: list[Any] = []  # what keys know by identity: nothing else gets their ids
        self._busy = False
        self._tracer: Any = None

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
        if small or not self._is_open():
            return forward(*args, **kwargs)
        return self._call(m, forward, args, kwargs, AFTER)

    def function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A jitted function that is called in the trace."""
        return self._call(fn, fn, args, kwargs, AFTER - 1) if self._is_open() else fn(*args, **kwargs)

    def _is_open(self) -> bool:
        """Whether a piece may be taken here: not in another one, in a transform that batches, or where hooks are."""
        mode = get_proxy_mode()
        return (
            not self.none
            and not self._busy
            and mode is not None
            and mode.tracer is self._tracer
            and running_node() is None
            and all(level.key() == TransformType.Grad for level in transforms() or ())
            and saved_hooks(True) is None
            and all(map(is_of_traces, function_modes()))
        )

    def _call(self, of: Any, run: Callable[..., Any], args: Any, kwargs: Any, after: int) -> Any:
        seen = self._seen.setdefault(_code(of), set())
        with torch.DisableTorchFunction():
            call = None if _is_impure(of) or len(seen) > KINDS else _Call.of(of, args, kwargs)
            piece = None if call is None else self._known(of, call)
        if call is None or (piece is None and self._is_early(call.key, after)):
            if call is not None and self._calls[call.key] == 1:
                seen.add(hash(call.key))
                self._kept.append(call.walk.kept)
            return run(*args, **kwargs)
        seen.clear()
        return _again(piece or self._traced(of, run, call), call)

    def _is_early(self, key: Any, after: int) -> bool:
        """Whether too few have come to trace a piece apart, or others of it, each for itself, too often."""
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._calls[key] <= after or len(self._pieces.get(key, ())) >= FORMS

    def _known(self, of: Any, call: _Call) -> _Piece | None:
        for piece in self._pieces.get(call.key, ()):
            walk = Alike(piece.reads)
            if walk.read(of, call.given, _REACHED) == piece.known and not walk.opaque:
                call.walk = walk
                return piece
        return None

    def _traced(self, of: Any, run: Callable[..., Any], call: _Call) -> _Piece:
        self.used = self._busy = True
        reads: set[Read] = set()
        found: list[Any] = []

        def flat(*given: Tensor) -> list[Tensor]:
            leaves = list(call.leaves)
            for i, x in zip(call.where, given, strict=True):
                for j, at in enumerate(call.same):
                    if at == i:
                        leaves[j] = x
            args, kwargs = pytree.tree_unflatten(leaves, call.tree)
            containers = _containers((args, kwargs))
            for i, x in zip(call.where, given, strict=True):
                if isinstance(call.leaves[i], nn.Parameter):
                    setattr(x, IS_PARAMETER, True)
            with _Asking():
                out = run(*args, **kwargs)
            if torch.is_grad_enabled() is not call.follows:
                raise NotOnceError("it leaves another gradient mode")
            if not containers.isdisjoint(_containers(out)):
                raise NotOnceError("it returns a container that it is given")
            now, tree = pytree.tree_flatten((args, kwargs))
            if tree != call.tree or any(x is not y for x, y in zip(now, leaves, strict=True)):
                raise NotOnceError("it changes a container among its arguments")
            results, shape = pytree.tree_flatten(opened(out))
            place = {id(x): i for i, x in zip(call.where, given, strict=True)}
            results = [_At(place[id(x)], given=True) if id(x) in place else x for x in results]
            tensors = [x for x in results if isinstance(x, Tensor)]
            if any(not isinstance(x, Tensor | _At) and type(x) not in PLAIN for x in results):
                raise NotOnceError("it returns an object")
            if any(x.is_leaf and x.requires_grad for x in tensors):
                raise NotOnceError("a gradient begins at its result")
            refuse_attributes(("a result", None, x) for x in tensors)
            if len({id(x) for x in tensors}) != len(tensors):
                raise NotOnceError("it returns one tensor twice")
            places = iter(range(len(tensors)))
            found[:] = [shape, [_At(next(places)) if isinstance(x, Tensor) else x for x in results]]
            return tensors

        try:
            with torch.DisableTorchFunction():
                before, everything = _found(of, call.given)
                if everything.opaque:
                    raise NotOnceError("it finds what no call repeats")
            tensors, names = [call.leaves[i] for i in call.where], list(map(str, call.where))
            with rehearsed(), noted(everything, reads):
                body = trace_body(flat, tensors, names, self._line, differentiate=call.follows, strict=True)
            with torch.DisableTorchFunction():
                if _found(of, call.given)[0] != before:
                    raise NotOnceError("it changes what it finds")
                walk = Alike(reads)
                known = walk.read(of, call.given, _REACHED)
                _refuse_shared(body)
                at = {id(x): i for i, x in enumerate(walk.tensors)}
                piece = _Piece(known, reads, body, [_place(x, at) for x in body.captured], *found)
        except Exception as error:  # whatever it is: if it is the function's own, it comes again in the next trace
            self.refused = True
            _IMPURE.setdefault(_code(of), set()).add(getattr(of, "training", None))
            raise NotOnceError(str(error)) from error
        finally:
            self._busy = False
        self._pieces.setdefault(call.key, []).append(piece)
        self._kept.append(walk.kept)
        self.made += body.made
        call.walk = walk
        return piece


@dataclass
class _At:
    """Where a result stands among the outputs, or among the leaves of what is given."""

    position: int
    given: bool = False


@dataclass
class _Call:
    """One call of a piece: its leaves, each with the first that is the same, and the positions of its tensors."""

    key: Any
    walk: Alike
    leaves: list[Any]
    same: list[int]
    where: list[int]
    tree: Any
    given: Any
    follows: bool  # whether gradients are on

    @staticmethod
    def of(of: Any, args: Any, kwargs: Any) -> _Call | None:
        """None where something among the arguments is none of what a trace can name."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if not all(isinstance(x, Tensor | nn.Module) or (is_value(x) and not is_given(x)) for x in leaves):
            return None
        walk = Alike(frozenset())
        facts = walk.read(of, (args, kwargs), _REACHED)
        if walk.opaque:
            return None
        known: list[Any] = [(type(x), repr(x)) for x in leaves if type(x) in PLAIN]
        first: dict[int, int] = {}
        same = [first.setdefault(id(x), i) if isinstance(x, Tensor) else -1 for i, x in enumerate(leaves)]
        own = {id(x): i for i, x in enumerate(walk.tensors)}
        known.append(tuple(same))
        known += [own.get(id(x)) for x in leaves]
        where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and same[i] == i]
        key = (facts, tuple(known), tree, ambient(State()))
        try:
            hash(key)
        except TypeError:
            return None
        return _Call(key, walk, leaves, same, where, tree, (args, kwargs), torch.is_grad_enabled())


def _again(piece: _Piece, call: _Call) -> Any:
    """Write a piece out for another call."""
    walk = call.walk
    captured = [x if at is None else walk.tensors[at] for x, at in zip(piece.body.captured, piece.places, strict=True)]
    out = piece.body(*(call.leaves[i] for i in call.where), captured=captured)
    results = [(call.leaves if x.given else out)[x.position] if isinstance(x, _At) else x for x in piece.leaves]
    return pytree.tree_unflatten(results, piece.tree)


def _place(x: Tensor, at: dict[int, int]) -> int | None:
    """Where the walk has a tensor; None for one that is the same in every call."""
    if id(x) in at:
        return at[id(x)]
    if is_key(x) or not (isinstance(x, FakeTensor) or x.requires_grad):
        return None
    raise NotOnceError("it closes over a value of the trace around it")


def _found(of: Any, given: Any) -> tuple[list[Any], Alike]:
    """All that a piece finds: facts, and which tensors; and the walk that found it."""
    walk = Alike(None)
    known = [*walk.read(of, given, _REACHED), *map(id, walk.tensors)]
    for x in walk.held:
        known += [(k, id(y), list(map(id, y.values())) if isinstance(y, dict) else ()) for k, y in vars(x).items()]
    return known, walk


def _containers(tree: Any) -> set[int]:
    """The ids of lists and dicts, which somebody may write to."""
    if isinstance(tree, dict):
        return {id(tree)}.union(*map(_containers, tree.values()))
    inner: set[int] = set().union(*map(_containers, tree)) if isinstance(tree, list | tuple) else set()
    return inner | {id(tree)} if isinstance(tree, list) else inner


class _Asking(TorchFunctionMode):
    """Refuses to tell what a tensor of one piece cannot tell for those of others: where it begins, where it is from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and user_is_asking(sys._getframe(1)):
            raise NotOnceError("it asks who a tensor is")
        return func(*args, **(kwargs or {}))


def _refuse_shared(body: Body) -> None:
    """A result has memory of its own: what is written to it later is written to nothing else."""
    owners: set[fx.Node] = set()
    for node in body.outputs:
        base = owner(node)
        if base.op != "call_function" or base in owners or (base is not node and base in body.kept):
            raise NotOnceError("a result shares its memory")
        owners.add(base)
    if any(_is_of_others(node) for node in (*body.forward, *body.backward)):
        raise NotOnceError("it reads numbers of the call, or draws from a generator of its own")


def _is_of_others(node: fx.Node) -> bool:
    inside = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val")))
    numbers = any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in inside)
    own = node.target is torch.ops.shardlib.call_key.default and bool(node.args and node.args[0])
    return numbers or own or any("scalar" in x.meta for x in node.all_input_nodes)
