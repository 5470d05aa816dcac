"""One device, on which steps run on tensors without values: what they make, in its shapes, strides and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.compiler.program.check_order import ProgramError
from shardlib.compiler.program.nested_args import rebuild
from shardlib.compiler.program.steps import TIERS, Collective, Compute, Var
from shardlib.compiler.program.sym_int import Sym
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_private import OpOverload, memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Coords, group_position, group_size
from shardlib.sharding.mesh.mesh import Mesh

Shape = tuple[int, ...]


class Local(NamedTuple):
    """A tensor as one device has it, without values; `own` is whether it shows no memory of an operand."""

    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: bool = True

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype) -> Local:
        return Local(tuple(shape), tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))), dtype)

    @staticmethod
    def of(x: Tensor, operands: Collection[int]) -> Local:
        return Local(tuple(x.shape), x.stride(), x.dtype, memory_of(x.untyped_storage()) not in operands)


class Device:
    """What one device of a mesh holds."""

    def __init__(self, mesh: Mesh, coords: Coords) -> None:
        self.coords = dict.fromkeys(mesh.axes, 0) | dict(coords)
        self.known: dict[Var, Local | None] = {}  # None: nobody knows its shape
        self._made: dict[Any, tuple[Local | None, ...]] = {}
        self._pieces: dict[tuple[int, torch.dtype], tuple[Layout, Local]] = {}  # by the id of a layout, which is kept

    def __str__(self) -> str:
        return " ".join(f"{name}={i}" for name, i in self.coords.items()) or "the one device"

    def hold(self, var: Var, x: Local | None) -> None:
        self.known[var] = x

    def held(self, var: Var) -> Local | None:
        """What it holds of a variable: as it was made here, or else as its layout says."""
        x = self.known.get(var)
        if x is None and var not in self.known:
            x = self.known[var] = None if var.layout is None else self.piece(var)
        return x

    def piece(self, var: Var) -> Local:
        """What a variable's layout says."""
        assert var.layout is not None, f"{var} has a layout"
        key = id(var.layout), var.dtype
        if (known := self._pieces.get(key)) is None:
            made = Local.dense(var.layout.local_shape(self.coords), var.dtype)
            known = self._pieces[key] = var.layout, made
        return known[1]

    def compute(self, step: Compute) -> Sequence[Local | None]:
        """What a call makes; None of what nobody knows. Raises what torch refuses it by: one of `REFUSALS`."""
        if None in [self.held(v) for v in step.operands] or (not step.operands and _acts(step.target)):
            return [None] * len(step.outs)
        known, here = self.known, self.here
        args: tuple[Any, ...] = tuple(
            [x if (kind := type(x)) in _SAME else known[x] if kind is Var else here(x) for x in step.args]
        )
        kwargs = here(step.kwargs) if step.kwargs else ()
        key = id(step.target), args, kwargs  # a program keeps what it calls
        if (made := self._made.get(key)) is None:
            made = self._made[key] = makes(step.target, args, kwargs)
        return made or [None] * len(step.outs)

    def collective(self, step: Collective) -> Local | None:
        """What a collective makes. Raises `ProgramError` where it is told of sizes that this device does not hold."""
        source = self.held(step.source)
        if source is None:
            return None
        told = rebuild(step.params, lambda x: x.at(self.coords) if isinstance(x, Sym) else x)
        at, n = group_position(self.coords, step.axes), group_size(step.axes)
        return Local.dense(tuple(_RESULT[step.kind](source.shape, told, at, n)), source.dtype)

    def here(self, x: Any) -> Any:
        """Arguments as they are on this device, as a key: numbers with their types, lists and dicts as tuples."""
        kind = type(x)
        if kind is Var:
            return self.held(x)
        if kind in _SAME:
            return x
        if kind is tuple or kind is list:
            return tuple(map(self.here, x))
        if kind is Sym:
            return x.at(self.coords)
        return frozen(x.hint if isinstance(x, Scalar) else x, self.here)


def frozen(x: Any, here: Callable[[Any], Any]) -> Any:
    """An argument as a key: lists and dicts as tuples of what `here` says of what is in them, numbers with types."""
    if isinstance(x, tuple | list):
        return tuple(map(here, x))
    if isinstance(x, dict):
        return tuple((k, here(y)) for k, y in x.items())
    return _Number(x, type(x)) if isinstance(x, bool | float) else x


_SAME = frozenset({int, str, type(None), torch.dtype, torch.device})


class _Number(NamedTuple):
    value: Any
    kind: type  # 1, 1.0 and True are equal


_MADE: BoundedCache[Any, tuple[Local | None, ...]] = BoundedCache(1 << 12)


def makes(target: Any, args: Any, kwargs: Any) -> tuple[Local | None, ...]:
    """What an op makes of arguments that are frozen, as tensors without values; nothing where torch cannot say."""
    key = (target, args, kwargs, torch.get_default_dtype())
    if (made := _MADE.get(key)) is None:
        made = _MADE[key] = _made(*key[:3])
    return made


def _made(target: Any, args: Any, kwargs: Any) -> tuple[Local | None, ...]:

    operands: set[int] = set()

    def given(x: Any) -> Any:
        if isinstance(x, Local):
            tensor = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
            operands.add(memory_of(tensor.untyped_storage()))
            return tensor
        if isinstance(x, _Number):
            return x.value
        if isinstance(x, tuple):
            return [given(y) for y in x]
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        out = target(*map(given, args), **{k: given(x) for k, x in kwargs})
    except NotImplementedError:  # no kernel for tensors without values: nothing is known of its results
        return ()
    if has_trait(target, "device_shapes"):
        return ()
    every = out if isinstance(out, tuple | list) else (out,)
    return tuple(Local.of(x, operands) if isinstance(x, Tensor) else None for x in every)


def _acts(target: Any) -> bool:
    """Whether an op may do something though it gets no tensor: draw a number, print a text."""
    known = isinstance(target, OpOverload) and target.namespace == "aten"
    return not known or torch.Tag.nondeterministic_seeded in target.tags


# What each kind of collective makes on one member: of its shape, what it is told, its position, and their number.


def _expect(what: str, have: object, said: object) -> None:
    if have != said:
        raise ProgramError(f"{what} {have}, and it is told {said}")


def _with(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


def _all_gather(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = told["dim"], told["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("a piece has the length", shape[dim], sizes[at])
    return _with(shape, dim, sum(sizes))


def _reduce_scatter(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = told["dim"], told["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("the whole has the length", shape[dim], sum(sizes))
    return _with(shape, dim, sizes[at])


def _all_to_all(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    split, splits, concat, concats = (told[f"{x}_{y}"] for x in ("split", "concat") for y in ("dim", "sizes"))
    _expect("it has so many members:", n, len(splits))
    if not concats:  # who sends how much to whom
        _expect("a piece has the length", shape[split], sum(splits[at]))
        return _with(shape, split, sum(row[at] for row in splits))
    _expect("a piece has the length", shape[split], sum(splits))
    _expect("a piece has the length", shape[concat], concats[at])
    joined = n * splits[at] if split == concat else sum(concats)
    return _with(_with(shape, split, splits[at]), concat, joined)


def _ppermute(shape: Shape, told: Mapping[str, Any], at: int, n: int) -> Shape:
    source = {dst: src for src, dst in told["pairs"]}
    if any(not 0 <= i < n for pair in told["pairs"] for i in pair) or len(source) < len(told["pairs"]):
        raise ProgramError(f"it is told to send by {told['pairs']} among {n} members")
    if "shapes" not in told:
        return shape
    _expect("a piece has the shape", list(shape), list(told["shapes"][at]))
    return tuple(told["shapes"][source.get(at, at)])


# What ops raise of arguments: a kernel for tensors without values may be stricter than the one that will run.
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, ArithmeticError)
_RESULT: Mapping[str, Callable[[Shape, Mapping[str, Any], int, int], Shape]] = {
    "all_reduce": lambda shape, told, at, n: shape,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    **dict.fromkeys(TIERS, lambda shape, told, at, n: shape),
}
