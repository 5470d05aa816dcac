"""Keys and counters of random draws, which make random numbers independent of the sharding.

torch's default generator for the CPU holds the state, so `torch.manual_seed`, `get_rng_state`, `fork_rng` and
activation checkpointing work as usual. A *call* draws one key from it: a call of a jitted function, or one operation
outside. Each draw of a call has a counter of its own. Counters come from a generator in a fixed state during a trace.
So they are constants of the program, a trace does not change the user's state, and checkpointing, which restores that
state, draws the same counters again when it recomputes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardlib.core.aten.op_traits import is_composite
from shardlib.core.errors import ShardingError
from shardlib.core.source_lines import user_line
from shardlib.core.torch_internals.torch_private import TorchDispatchMode, generator_id, without_modes
from shardlib.distributed.turns import Turn
from shardlib.ops.collectives import all_reduce
from shardlib.ops.collectives.transport.groups import run_in_turn
from shardlib.ops.random import op as ops
from shardlib.primitives.body import current_body
from shardlib.primitives.per_device_ops import random_draw_error
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, peek_mesh
from shardlib.tensor.rank_checks import all_mesh_axes

_FIRST_COUNTER = 0x5348_4152  # the seed of counters


class _Call:
    """The draws of one operation: a key for each generator, and counters, which are equal in every call."""

    def __init__(self) -> None:
        self._keys: dict[Any, Tensor] = {}
        self._drawn = 0

    def key(self, generator: torch.Generator | None) -> Tensor:
        """Returns the call's key."""
        if generator not in self._keys:
            self._keys[generator] = self._key(ops.generator_number(generator))
        return self._keys[generator]

    def _key(self, number: int) -> Tensor:
        return _draw_common_key(number)

    def counter(self) -> int:
        with without_modes():
            while len(_counters) <= self._drawn:
                _counters.append(int(torch.randint(ops.KEYS, (), generator=_counting)))
        self._drawn += 1
        return _counters[self._drawn - 1]


_counting = torch.Generator().manual_seed(_FIRST_COUNTER)
_counters: list[int] = []


class _Program(_Call):
    """The draws of a program, with counters from torch's own generator, in a fixed state meanwhile.

    Activation checkpointing restores that state, and so draws the same counters when it recomputes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = self._state = torch.default_generator.get_state()  # the user's

    def _key(self, number: int) -> Tensor:
        if number:
            return super()._key(number)
        own, counters = torch.default_generator, torch.default_generator.get_state()
        own.set_state(self._state)
        key = super()._key(number)
        self._state = own.get_state()
        own.set_state(counters)
        return key

    def counter(self) -> int:
        with without_modes():
            return int(torch.randint(ops.KEYS, ()))

    def __enter__(self) -> None:
        torch.default_generator.manual_seed(_FIRST_COUNTER)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._before if _is_at_start(torch.default_generator) else self._state)


class _Trace(_Program):
    """The draws of a program that is being traced: its key is a node, which draws a number in every call.

    Its counters come from a generator of its own, which replaces torch's in this thread; other threads are unaffected.
    The trace draws nothing from the user's generators. If `marked`, they have a known seed during the trace, so that a
    seed set by the user's code shows.
    """

    def __init__(self, generators: Sequence[torch.Generator] | None, marked: bool) -> None:
        _Call.__init__(self)
        self.marked = marked
        self.own = torch.Generator().manual_seed(_FIRST_COUNTER)
        others = [g for g in generators or () if _generator_id(g) != _generator_id(torch.default_generator)]
        self._given = [(g, g.initial_seed(), g.get_state()) for g in others]
        self._node: fx.Node | None = None  # of the key
        self._known = (
            None if generators is None else {*map(_generator_id, generators), _generator_id(torch.default_generator)}
        )

    def key(self, generator: torch.Generator | None) -> Tensor:
        if generator is not None and self._known is not None and _generator_id(generator) not in self._known:
            raise ShardingError(
                "the traced function draws from a generator that it makes itself",
                [f"the draw is at {user_line(sys._getframe(1))}"],
                rule="the numbers of a call come from generators that exist before it, in their state when it begins",
                remedy="make and seed the generator outside, and pass it, or close over it",
            )
        return super().key(generator)

    def counter(self) -> int:
        self._refuse_seeding("the draw is at")
        with without_modes():
            return int(torch.randint(ops.KEYS, (), generator=self.own))

    def __enter__(self) -> None:
        setattr(torch.random, "default_generator", _DefaultGenerator())  # noqa: B010  torch says that it exports no such name
        for generator, _, _ in self._given if self.marked else ():
            generator.manual_seed(_FIRST_COUNTER)

    def __exit__(self, *raised: object) -> None:
        setattr(torch.random, "default_generator", torch.default_generator)  # noqa: B010
        seeded = [
            (generator, state)
            for generator, seed, state in self._given
            if generator.initial_seed() != (_FIRST_COUNTER if self.marked else seed)
        ]
        for generator, state in [(g, state) for g, _, state in self._given] if self.marked else seeded:
            generator.set_state(state)
        if not any(raised):
            self._refuse_seeding("the function is called at")
            if self._node is not None and _is_at_start(self.own):  # `fork_rng` restored it: a call must restore, too
                self._node.kwargs = {**self._node.kwargs, "keep": True}
            if seeded:
                self._refuse("a generator", "the function is called at")

    def _key(self, number: int) -> Tensor:
        mesh = peek_mesh()
        where = torch.device("cpu" if mesh is None else mesh.device)
        key: Tensor = torch.ops.shardlib.call_key(number, device=where)
        if not number and (mode := get_proxy_mode()) is not None:
            self._node = next(iter(reversed(mode.tracer.graph.nodes)))
        return key

    def _refuse_seeding(self, where: str) -> None:
        """Raises if the function sets torch's seed: only the trace would set it, not every call."""
        if self.own.initial_seed() != _FIRST_COUNTER:
            self._refuse("torch's generator", where)

    def _refuse(self, generator: str, where: str) -> NoReturn:
        raise ShardingError(
            f"the traced function sets the seed of {generator} (manual_seed, seed, set_rng_state)",
            [f"{where} {user_line(sys._getframe(2))}"],
            rule="the numbers of a call come from the generator as it is when the call begins, and the call "
            "sets no state of the process",
            remedy="torch.manual_seed(n) before the call, or torch.Generator().manual_seed(n) outside, and generator=",
        )


def _generator_id(generator: torch.Generator) -> int:
    """Returns an id that all Python objects for one generator share."""
    return int(generator_id(generator))


def _is_at_start(counting: torch.Generator) -> bool:
    """True if a generator of counters has not drawn yet."""
    return torch.equal(counting.get_state(), torch.Generator().manual_seed(_FIRST_COUNTER).get_state())


class _DefaultGenerator:
    """Delegates to torch's default generator or, in the tracing thread, to the trace's, which checkpointing saves."""

    def __getattr__(self, name: str) -> Any:
        call = _call.get()
        return getattr(call.own if isinstance(call, _Trace) else torch.default_generator, name)


_call: ContextVar[_Call | None] = ContextVar("shardlib_draws", default=None)


@contextmanager
def one_call() -> Iterator[None]:
    """Runs one operation, whose draws share a key."""
    token = _call.set(_Call())
    try:
        yield
    finally:
        _call.reset(token)


@contextmanager
def one_program(
    *, traced: bool = False, generators: Sequence[torch.Generator] | None = None, marked: bool = False
) -> Iterator[None]:
    """Traces a function, or runs it as a plain program: the draws of all its operations share a key.

    A traced function may draw from `generators`; None: from all. `marked`: its code may seed them.
    """
    call: _Program = _Trace(generators, marked) if traced else _Program()
    token = _call.set(call)
    try:
        with call:
            yield
    finally:
        _call.reset(token)


def is_in_call() -> bool:
    """True if a call is running, to which draws belong."""
    return _call.get() is not None


def _draw_common_key(number: int) -> Tensor:
    """Draws a key from this generator, on the mesh's device; on ranks, the first rank's key."""
    mesh = current_mesh()
    distributed = mesh is not None and mesh.kind == "distributed" and mesh.size > 1
    lead = mesh is None or mesh.rank == 0
    with without_modes():
        key = ops.call_key(number, device=torch.device("cpu"), lead=int(lead), apart=distributed)
        drawn = int(key)
        if mesh is None or mesh.device == "cpu":
            return _sum_over_ranks(key, mesh) if mesh is not None and distributed else key
    key = torch.full((), drawn, dtype=torch.int64, device=mesh.device)  # a kernel: the host does not wait
    return _sum_over_ranks(key, mesh) if distributed else key


def _sum_over_ranks(key: Tensor, mesh: Mesh) -> Tensor:
    return run_in_turn(mesh, _KEY, all_mesh_axes(mesh), lambda group: all_reduce.start(key, group, "sum").finish())


_KEY = Turn("all_reduce of i64[2]: the key of random numbers")


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(
    kind: str,
    size: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
    like: Tensor | None = None,
    p: int = 0,
) -> Tensor:
    """Draws the next numbers of the running call, of shape `size`; `shardlib.ops.random.op` explains `kind` and `p`.

    `like` is a tensor of that shape whose layout the numbers should have.
    """
    call = _current_call()
    size = list(size)
    out: Tensor = torch.ops.shardlib.draw(
        call.key(generator), like, call.counter(), kind, size, [0] * len(size), size, dtype=dtype, device=device, p=p
    )
    return out


def fresh_key(*, device: torch.device) -> Tensor:
    """Makes a key for an op that draws by itself (attention), int64 `[2]`."""
    call = _current_call()
    key: Tensor = torch.ops.shardlib.numbered_key(call.key(None), call.counter())
    return key.to(device)


class CopiedDraws:
    """The draws in one copy of some nodes: the call's key, and new counters."""

    def __init__(self) -> None:
        self._counters: dict[int, int] = {}

    def key(self, node: fx.Node) -> Tensor | None:
        """Returns the call's key if a node draws it, else None."""
        return _current_call().key(None) if node.target is torch.ops.shardlib.call_key.default else None

    def renumber(self, node: fx.Node) -> None:
        """Gives a node that draws a counter of this copy."""
        if (at := COUNTER.get(node.target)) is not None:
            old = node.args[at]
            assert isinstance(old, int)
            if old not in self._counters:
                self._counters[old] = _current_call().counter()
            node.update_arg(at, self._counters[old])


# The position of the counter among an op's arguments.
COUNTER: Mapping[Any, int] = {torch.ops.shardlib.draw.default: 2, torch.ops.shardlib.numbered_key.default: 1}


@contextmanager
def discarding_draws() -> Iterator[None]:
    """Restores keys and counters at the end: the draws meanwhile are traced again later."""
    call = _current_call()
    assert isinstance(call, _Trace), "a function is traced"
    keys, state, node = dict(call._keys), call.own.get_state(), call._node
    try:
        yield
    finally:
        call.own.set_state(state)
        call._keys, call._node = keys, node


def is_key(x: Tensor) -> bool:
    """True if a tensor is the key of the running call."""
    return any(x is key for key in _current_call()._keys.values())


def _current_call() -> _Call:
    call = _call.get()
    assert call is not None, "numbers are drawn in a call"
    if isinstance(call, _Trace) and current_body() is not None:
        raise random_draw_error()
    return call


# --- plain programs ---------------------------------------------------------------------------------------------------


class PlainDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, ATen's random ops on plain tensors run as `forms`; each is a call of its own unless a call runs."""

    supports_higher_order_operators = True

    def __init__(self, forms: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forms = forms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = self.forms.get(func)
        if form is None or not all(t in (torch.Tensor, torch.nn.Parameter) for t in types):
            with self if is_composite(func) else nullcontext():  # `inference_mode` does not decompose composite ops
                return func.decompose(*args, **kwargs) if is_composite(func) else func(*args, **kwargs)
        with nullcontext() if _call.get() else one_call(), self:  # a form may call other random ops
            return form(*args, **kwargs)
