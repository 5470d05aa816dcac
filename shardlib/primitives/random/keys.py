"""Random numbers that do not depend on the sharding: which key and which counter a draw has.

torch's default generator for the CPU holds the state, so `torch.manual_seed`, `get_rng_state`, `fork_rng` and
activation checkpointing mean what they always mean. A *call* draws one key from it: a call of a jitted function, or one
operation outside. The draws of a call are told apart by counters. These come from the same generator, set to a fixed
state for the time of a trace: so they are constants of the program, a trace leaves no mark on the user's state, and
what checkpointing runs again, from the state that it kept, draws the same numbers again.
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
from shardlib.core.torch_private import TorchDispatchMode, generator_id, without_modes
from shardlib.distributed.turns import Turn
from shardlib.ops.collectives import all_reduce
from shardlib.ops.collectives.transport.groups import together
from shardlib.ops.random import op as ops
from shardlib.primitives.body import current_body
from shardlib.primitives.per_device_ops import refuse_draws
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, peek_mesh
from shardlib.tensor.rank_checks import all_mesh_axes

_FIRST_COUNTER = 0x5348_4152  # the seed of counters


class _Call:
    """The draws of one operation: its keys, one for each generator, and its counters, the same in every call."""

    def __init__(self) -> None:
        self._keys: dict[Any, Tensor] = {}
        self._drawn = 0

    def key(self, generator: torch.Generator | None) -> Tensor:
        """The call's key."""
        if generator not in self._keys:
            self._keys[generator] = self._key(ops.number_of(generator))
        return self._keys[generator]

    def _key(self, number: int) -> Tensor:
        return _agreed(number)

    def counter(self) -> int:
        with without_modes():
            while len(_counters) <= self._drawn:
                _counters.append(int(torch.randint(ops.KEYS, (), generator=_counting)))
        self._drawn += 1
        return _counters[self._drawn - 1]


_counting = torch.Generator().manual_seed(_FIRST_COUNTER)
_counters: list[int] = []


class _Program(_Call):
    """The draws of a program. Its counters are the same numbers, but drawn from torch's own generator, set back for the
    time, so that what activation checkpointing runs again gets the same ones again.
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

    Its counters come from a generator of its own, which stands for torch's in this thread: other threads go on drawing.
    Nothing is drawn from the user's generators. If `marked`, they have a seed that tells of any other one meanwhile.
    """

    def __init__(self, generators: Sequence[torch.Generator] | None, marked: bool) -> None:
        _Call.__init__(self)
        self.marked = marked
        self.own = torch.Generator().manual_seed(_FIRST_COUNTER)
        others = [g for g in generators or () if _number(g) != _number(torch.default_generator)]
        self._given = [(g, g.initial_seed(), g.get_state()) for g in others]
        self._node: fx.Node | None = None  # of the key
        self._known = None if generators is None else {*map(_number, generators), _number(torch.default_generator)}

    def key(self, generator: torch.Generator | None) -> Tensor:
        if generator is not None and self._known is not None and _number(generator) not in self._known:
            raise ShardingError(
                "the traced function draws from a generator that it makes itself",
                [f"the draw is at {user_line(sys._getframe(1))}"],
                rule="the numbers of a call come from generators that exist before it, as they are when it begins",
                remedy="make and seed the generator outside, and pass it, or close over it",
            )
        return super().key(generator)

    def counter(self) -> int:
        self._refuse_seeding("the draw is at")
        with without_modes():
            return int(torch.randint(ops.KEYS, (), generator=self.own))

    def __enter__(self) -> None:
        setattr(torch.random, "default_generator", _Default())  # noqa: B010  torch says that it exports no such name
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
            if self._node is not None and _is_at_start(self.own):  # as `fork_rng` leaves it: a call takes no number
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
        """A seed is set once, while the function is traced; every call would have to set it."""
        if self.own.initial_seed() != _FIRST_COUNTER:
            self._refuse("torch's generator", where)

    def _refuse(self, whose: str, where: str) -> NoReturn:
        raise ShardingError(
            f"the traced function sets the seed of {whose} (manual_seed, seed, set_rng_state)",
            [f"{where} {user_line(sys._getframe(2))}"],
            rule="the numbers of a call come from the generator as it is when the call begins, and the call "
            "sets no state of the process",
            remedy="torch.manual_seed(n) before the call, or torch.Generator().manual_seed(n) outside, and generator=",
        )


def _number(generator: torch.Generator) -> int:
    """What is the same for all the objects by which Python knows one generator."""
    return int(generator_id(generator))


def _is_at_start(counting: torch.Generator) -> bool:
    """Whether a generator of counters is as it was before the first."""
    return torch.equal(counting.get_state(), torch.Generator().manual_seed(_FIRST_COUNTER).get_state())


class _Default:
    """Torch's default generator, but for the thread that traces: what checkpointing saves and sets back."""

    def __getattr__(self, name: str) -> Any:
        call = _call.get()
        return getattr(call.own if isinstance(call, _Trace) else torch.default_generator, name)


_call: ContextVar[_Call | None] = ContextVar("shardlib_draws", default=None)


@contextmanager
def one_call() -> Iterator[None]:
    """One operation runs: its draws have one key."""
    token = _call.set(_Call())
    try:
        yield
    finally:
        _call.reset(token)


@contextmanager
def one_program(
    *, traced: bool = False, generators: Sequence[torch.Generator] | None = None, marked: bool = False
) -> Iterator[None]:
    """A function is traced, or runs as a plain program: the draws of all its operations have one key.

    `generators` are those that a traced function may draw from, None: all; `marked` if its code may seed them.
    """
    call: _Program = _Trace(generators, marked) if traced else _Program()
    token = _call.set(call)
    try:
        with call:
            yield
    finally:
        _call.reset(token)


def in_call() -> bool:
    """Whether a call is running that its draws belong to."""
    return _call.get() is not None


def _agreed(number: int) -> Tensor:
    """A key of this generator, where the mesh's tensors are; on ranks, that of the first."""
    mesh = current_mesh()
    apart = mesh is not None and mesh.kind == "distributed" and mesh.size > 1
    lead = mesh is None or mesh.rank == 0
    with without_modes():
        key = ops.call_key(number, device=torch.device("cpu"), lead=int(lead), apart=apart)
        drawn = int(key)
        if mesh is None or mesh.device == "cpu":
            return _summed(key, mesh) if mesh is not None and apart else key
    key = torch.full((), drawn, dtype=torch.int64, device=mesh.device)  # by a kernel: nobody waits for it
    return _summed(key, mesh) if apart else key


def _summed(key: Tensor, mesh: Mesh) -> Tensor:
    return together(mesh, _KEY, all_mesh_axes(mesh), lambda group: all_reduce.start(key, group, "sum").finish())


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
    """The next numbers of the running call, of shape `size`; see `shardlib.ops.random.op` for `kind`, `dtype` and `p`.

    `like` is a tensor of that shape beside which the numbers are to lie.
    """
    call = _running()
    size = list(size)
    out: Tensor = torch.ops.shardlib.draw(
        call.key(generator), like, call.counter(), kind, size, [0] * len(size), size, dtype=dtype, device=device, p=p
    )
    return out


def fresh_key(*, device: torch.device) -> Tensor:
    """A key for an op that draws by itself (attention), int64 `[2]`."""
    call = _running()
    key: Tensor = torch.ops.shardlib.numbered_key(call.key(None), call.counter())
    return key.to(device)


class Redrawn:
    """The draws of nodes that are written again, in one copy of them: the call's key, and other counters."""

    def __init__(self) -> None:
        self._counters: dict[int, int] = {}

    def key(self, node: fx.Node) -> Tensor | None:
        """The call's key, where a node draws it."""
        return _running().key(None) if node.target is torch.ops.shardlib.call_key.default else None

    def renumber(self, node: fx.Node) -> None:
        """Give a node that draws a counter of this copy."""
        if (at := COUNTER.get(node.target)) is not None:
            old = node.args[at]
            assert isinstance(old, int)
            if old not in self._counters:
                self._counters[old] = _running().counter()
            node.update_arg(at, self._counters[old])


# Where the counter stands among the arguments of ops that are told one.
COUNTER: Mapping[Any, int] = {torch.ops.shardlib.draw.default: 2, torch.ops.shardlib.numbered_key.default: 1}


@contextmanager
def rehearsed() -> Iterator[None]:
    """What is drawn meanwhile is written again later, and counts then."""
    call = _running()
    assert isinstance(call, _Trace), "a function is traced"
    keys, state, node = dict(call._keys), call.own.get_state(), call._node
    try:
        yield
    finally:
        call.own.set_state(state)
        call._keys, call._node = keys, node


def is_key(x: Tensor) -> bool:
    """Whether a tensor is the key of the running call."""
    return any(x is key for key in _running()._keys.values())


def _running() -> _Call:
    call = _call.get()
    assert call is not None, "numbers are drawn in a call"
    if isinstance(call, _Trace) and current_body() is not None:
        raise refuse_draws()
    return call


# --- plain programs ---------------------------------------------------------------------------------------------------


class PlainDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While on, ATen's random ops on plain tensors are `forms`, each a call of its own unless one is running."""

    supports_higher_order_operators = True

    def __init__(self, forms: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forms = forms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = self.forms.get(func)
        if form is None or not all(t in (torch.Tensor, torch.nn.Parameter) for t in types):
            with self if is_composite(func) else nullcontext():  # under `inference_mode` such come here whole
                return func.decompose(*args, **kwargs) if is_composite(func) else func(*args, **kwargs)
        with nullcontext() if _call.get() else one_call(), self:  # a form may be written with other random ops
            return form(*args, **kwargs)
