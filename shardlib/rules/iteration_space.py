"""Building blocks of rules that follow from shapes: the iteration space of a call, and access to its arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.rules.rule import Accesses, Call, LocalBuilder, LocalCode, Meta, Path, Rule, Ties, WindowMap

Dim = tuple[str, ...]
Ints = dict[Path, tuple[int, Dim]]


class Space:
    """The iteration space of one call. It creates factors, but none for a dim of size 1.

    Example:
        >>> space = Space()
        >>> space.dim(4), space.dim(1), space.dim(6, "k", whole=True)
        (('d',), (), ('k',))
        >>> space.sizes, space.whole
        ({'d': 4, 'k': 6}, {'k'})
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.whole: set[str] = set()

    def dim(self, size: int, hint: str = "d", *, whole: bool = False) -> Dim:
        """Creates a factor, and returns the label of a dim that consists of it."""
        if size == 1:
            return ()
        name = hint if hint not in self.sizes else f"{hint}{len(self.sizes)}"
        self.sizes[name] = size
        if whole or size == 0:
            self.whole.add(name)
        return (name,)

    def dims(self, shape: Sequence[int], hint: str = "d", *, whole: Iterable[int] = ()) -> list[Dim]:
        """Creates a factor for each dim; those at the positions `whole` must not be sharded."""
        fixed = set(whole)
        return [self.dim(n, hint, whole=i in fixed) for i, n in enumerate(shape)]

    def rule(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        *,
        reduce: Mapping[str, str] | None = None,
        linear: Iterable[Iterable[int]] = (),
        emit: Callable[[LocalBuilder], Any] | None = None,
        local_factors: Iterable[str] = (),
        loose: Iterable[str] = (),
        ones: Iterable[str] = (),
        gathers: Iterable[str] = (),
        windows: Mapping[str, WindowMap] | None = None,
        **fields: Any,
    ) -> Rule:
        """Builds the rule, without what `reduce`, the local form and `windows` say about factors that must stay whole.

        `fields` are other fields of `Rule`, `Ties` and `Accesses`.
        """
        factors = frozenset(local_factors) - self.whole
        windows = {i: window for i, window in (windows or {}).items() if not {i, window.by} & self.whole}
        ties, accesses = ({f: fields.pop(f) for f in names if f in fields} for names in (_TIES, _ACCESSES))
        return Rule(
            operands=tuple(tuple(o) for o in operands),
            results=tuple(tuple(r) for r in results),
            sizes=self.sizes,
            reduce={f: kind for f, kind in (reduce or {}).items() if f not in self.whole},
            whole=frozenset(self.whole),
            linear=tuple(frozenset(s) for s in linear),
            gathers=frozenset(gathers),
            ties=Ties(**ties),
            accesses=Accesses(windows=windows, **accesses),
            local=LocalCode(emit if factors else None, factors, frozenset(loose), frozenset(ones)),
            **fields,
        )


_TIES = ("ring", "follows", "lends")
_ACCESSES = ("lookup", "blocks", "groups")


def arg(call: Call, name: str, *missing: Any) -> Any:
    """Returns the argument with this name in the op's schema, or its default; `missing` if the op has none."""
    for i, a in enumerate(schema_of(call.target).arguments):
        if a.name == name:
            return call.args[i] if i < len(call.args) else call.kwargs.get(name, a.default_value)
    if not missing:
        raise ShardingError(f"{call.target} has no argument {name!r}, which its rule reads")
    return missing[0]


def is_backward(call: Call) -> bool:
    """Returns whether the op computes gradients, judging by its name."""
    return "backward" in schema_of(call.target).name


def argument_path(call: Call, name: str) -> Path:
    """Returns the path of the argument with this name."""
    position = [a.name for a in schema_of(call.target).arguments].index(name)
    return (position,) if position < len(call.args) else (name,)


def tensor_arguments(target: Any) -> list[tuple[int, str]] | None:
    """Returns position and name of each argument that may be a tensor; None if an argument is a list of tensors."""
    return _tensor_arguments(schema_of(target))


@lru_cache(maxsize=4096)
def _tensor_arguments(schema: Any) -> list[tuple[int, str]] | None:
    out = []
    for i, a in enumerate(schema.arguments):
        kind = str(a.type)
        if kind.startswith("List[") and "Tensor" in kind:
            return None
        if "Tensor" in kind:
            out.append((i, a.name))
    return out


def present_operands(call: Call, count: int) -> list[int]:
    """Returns the positions, among the op's `count` tensor arguments, of those that are tensors in this call."""
    if len(call.operands) == count:
        return list(range(count))
    tensors = tensor_arguments(call.target) or []
    return [
        i
        for i, (position, name) in enumerate(tensors)
        if isinstance(call.args[position] if position < len(call.args) else call.kwargs.get(name), Meta)
    ]


def normalize_dim(dim: int, rank: int) -> int:
    """Returns the dim, counted from the front. A scalar counts as having one dim."""
    return dim + max(rank, 1) if dim < 0 else dim


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Returns the dims, sorted and counted from the front; None and an empty list mean all dims."""
    if isinstance(dims, int):
        dims = [dims]
    return sorted({normalize_dim(d, rank) for d in dims}) if dims else list(range(rank))


def result(call: Call, i: int = 0) -> Meta:
    meta = call.results[i]
    if meta is None:
        raise ValueError(f"{call.target} has no tensor as result {i}")
    return meta


def result_shape(call: Call, i: int = 0) -> tuple[int, ...]:
    return result(call, i).shape


def size_arguments(call: Call, name: str, dims: Sequence[Dim]) -> Ints:
    """Returns the `ints` of the argument with this name, which lists the sizes of all dims of a value."""
    return {(*argument_path(call, name), i): (1, dim) for i, dim in enumerate(dims)}


def broadcast_labels(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """Returns the labels of an operand of `shape` that broadcasts against a value with labels `dims`."""
    tail = dims[len(dims) - len(shape) :] if shape else []
    return [() if n == 1 else dim for dim, n in zip(tail, shape, strict=True)]


def broadcast_shapes(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Returns the shape to which these shapes broadcast."""
    columns = itertools.zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(next((n for n in column if n != 1), 1) for column in columns)[::-1]


def dim_names(letter: str, count: int) -> str:
    """Returns names for `count` dims of a pattern: `d0 d1 d2`."""
    return " ".join(f"{letter}{i}" for i in range(count))


def count_elements(call: Call, _: int) -> int:
    """Returns the flops of an op that visits each element of its first operand once."""
    return math.prod(call.operands[0].shape)


def largest_numel(call: Call) -> int:
    """Returns the number of elements of the call's largest tensor."""
    return max((math.prod(m.shape) for m in (*call.operands, *call.results) if m is not None), default=0)
