"""One device that runs steps on tensors without values: only shapes, strides and dtypes."""

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
from shardlib.core.torch_internals.torch_private import OpOverload, memory_of
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import Coords, group_position, group_size
from shardlib.sharding.mesh.mesh import Mesh

Shape = tuple[int, ...]


class Local(NamedTuple):
    """One device's tensor, without values; `own` is True if it views no operand's memory."""

    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: bool = True

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype) -> Local:
        return Local(tuple(shape), tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))), dtype)

    @staticmethod
    def result(x: Tensor, operands: Collection[int]) -> Local:
        return Local(tuple(x.shape), x.stride(), x.dtype, memory_of(x.untyped_storage()) not in operands)


class Device:
    """The tensors that one device of a mesh holds."""

    def __init__(self, mesh: Mesh, coords: Coords) -> None:
        self.coords = dict.fromkeys(mesh.axes, 0) | dict(coords)
        self.known: dict[Var, Local | None] = {}  # None: its shape is unknown
        self._results: dict[Any, tuple[Local | None, ...]] = {}
        self._shards: dict[tuple[int, torch.dtype], tuple[Layout, Local]] = {}  # by the id of the layout

    def __str__(self) -> str:
        return " ".join(f"{name}={i}" for name, i in self.coords.items()) or "the one device"

    def hold(self, var: Var, x: Local | None) -> None:
        self.known[var] = x

    def held(self, var: Var) -> Local | None:
        """Returns the local tensor of a variable: as computed here, else after its layout."""
        x = self.known.get(var)
        if x is None and var not in self.known:
            x = self.known[var] = None if var.layout is None else self.shard(var)
        return x

    def shard(self, var: Var) -> Local:
        """Returns the local tensor after a variable's layout."""
        assert var.layout is not None, f"{var} has a layout"
        key = id(var.layout), var.dtype
        if (cached := self._shards.get(key)) is None:
            local = Local.dense(var.layout.local_shape(self.coords), var.dtype)
            cached = self._shards[key] = var.layout, local
        return cached[1]

    def compute(self, step: Compute) -> Sequence[Local | None]:
        """Returns the results of a call, None where they are unknown. Raises torch's own errors, `REFUSALS`."""
        if None in [self.held(v) for v in step.operands] or (not step.operands and _may_act(step.target)):
            return [None] * len(step.outs)
        values, local = self.known, self.local
        args: tuple[Any, ...] = tuple(
            [x if (kind := type(x)) in _SAME else values[x] if kind is Var else local(x) for x in step.args]
        )
        kwargs = local(step.kwargs) if step.kwargs else ()
        key = id(step.target), args, kwargs  # a program keeps what it calls
        if (results := self._results.get(key)) is None:
            results = self._results[key] = results_of(step.target, args, kwargs)
        return results or [None] * len(step.outs)

    def collective(self, step: Collective) -> Local | None:
        """Returns the result of a collective. Raises `ProgramError` if its sizes are not those of the device."""
        source = self.held(step.source)
        if source is None:
            return None
        params = rebuild(step.params, lambda x: x.at(self.coords) if isinstance(x, Sym) else x)
        at, n = group_position(self.coords, step.axes), group_size(step.axes)
        return Local.dense(tuple(_RESULT[step.kind](source.shape, params, at, n)), source.dtype)

    def local(self, x: Any) -> Any:
        """Returns arguments on this device as a key: numbers with their types, lists and dicts as tuples."""
        kind = type(x)
        if kind is Var:
            return self.held(x)
        if kind in _SAME:
            return x
        if kind is tuple or kind is list:
            return tuple(map(self.local, x))
        if kind is Sym:
            return x.at(self.coords)
        return frozen(x.hint if isinstance(x, Scalar) else x, self.local)


def frozen(x: Any, local: Callable[[Any], Any]) -> Any:
    """Returns an argument as a key: lists and dicts as tuples of `local` items, numbers with their types."""
    if isinstance(x, tuple | list):
        return tuple(map(local, x))
    if isinstance(x, dict):
        return tuple((k, local(y)) for k, y in x.items())
    return _Number(x, type(x)) if isinstance(x, bool | float) else x


_SAME = frozenset({int, str, type(None), torch.dtype, torch.device})


class _Number(NamedTuple):
    value: Any
    kind: type  # 1, 1.0 and True are equal


_RESULTS: BoundedCache[Any, tuple[Local | None, ...]] = BoundedCache(1 << 12)


def results_of(target: Any, args: Any, kwargs: Any) -> tuple[Local | None, ...]:
    """Returns the results of an op on frozen arguments, as tensors without values; () if torch has no meta kernel."""
    key = (target, args, kwargs, torch.get_default_dtype())
    if (results := _RESULTS.get(key)) is None:
        results = _RESULTS[key] = _run_on_meta(*key[:3])
    return results


def _run_on_meta(target: Any, args: Any, kwargs: Any) -> tuple[Local | None, ...]:
    operands: set[int] = set()

    def thawed(x: Any) -> Any:
        if isinstance(x, Local):
            tensor = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
            operands.add(memory_of(tensor.untyped_storage()))
            return tensor
        if isinstance(x, _Number):
            return x.value
        if isinstance(x, tuple):
            return [thawed(y) for y in x]
        return torch.device("meta") if isinstance(x, torch.device) else x

    try:
        out = target(*map(thawed, args), **{k: thawed(x) for k, x in kwargs})
    except NotImplementedError:  # no meta kernel
        return ()
    if has_trait(target, "device_shapes"):
        return ()
    every = out if isinstance(out, tuple | list) else (out,)
    return tuple(Local.result(x, operands) if isinstance(x, Tensor) else None for x in every)


def _may_act(target: Any) -> bool:
    """True if an op without tensor operands may have a side effect: draw a number, print a text."""
    is_aten = isinstance(target, OpOverload) and target.namespace == "aten"
    return not is_aten or torch.Tag.nondeterministic_seeded in target.tags


# The result's shape of each kind of collective on one member: of its shape, parameters, position, and member count.


def _expect(subject: str, have: object, expected: object) -> None:
    if have != expected:
        raise ProgramError(f"{subject} {have}, and it is told {expected}")


def _with(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


def _all_gather(shape: Shape, params: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = params["dim"], params["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("a piece has the length", shape[dim], sizes[at])
    return _with(shape, dim, sum(sizes))


def _reduce_scatter(shape: Shape, params: Mapping[str, Any], at: int, n: int) -> Shape:
    dim, sizes = params["dim"], params["sizes"]
    _expect("it has so many members:", n, len(sizes))
    _expect("the whole has the length", shape[dim], sum(sizes))
    return _with(shape, dim, sizes[at])


def _all_to_all(shape: Shape, params: Mapping[str, Any], at: int, n: int) -> Shape:
    split, splits, concat, concats = (params[f"{x}_{y}"] for x in ("split", "concat") for y in ("dim", "sizes"))
    _expect("it has so many members:", n, len(splits))
    if not concats:  # who sends how much to whom
        _expect("a piece has the length", shape[split], sum(splits[at]))
        return _with(shape, split, sum(row[at] for row in splits))
    _expect("a piece has the length", shape[split], sum(splits))
    _expect("a piece has the length", shape[concat], concats[at])
    joined = n * splits[at] if split == concat else sum(concats)
    return _with(_with(shape, split, splits[at]), concat, joined)


def _ppermute(shape: Shape, params: Mapping[str, Any], at: int, n: int) -> Shape:
    source = {dst: src for src, dst in params["pairs"]}
    if any(not 0 <= i < n for pair in params["pairs"] for i in pair) or len(source) < len(params["pairs"]):
        raise ProgramError(f"it is told to send by {params['pairs']} among {n} members")
    if "shapes" not in params:
        return shape
    _expect("a piece has the shape", list(shape), list(params["shapes"][at]))
    return tuple(params["shapes"][source.get(at, at)])


# What ops raise for bad arguments: a meta kernel may be stricter than the kernel that will run.
REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, AssertionError, ArithmeticError)
_RESULT: Mapping[str, Callable[[Shape, Mapping[str, Any], int, int], Shape]] = {
    "all_reduce": lambda shape, params, at, n: shape,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    **dict.fromkeys(TIERS, lambda shape, params, at, n: shape),
}
