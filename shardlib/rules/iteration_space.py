"""Building blocks for rules that follow from shapes: an iteration space, and where a call's arguments sit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import schema_of
from shardlib.rules.rule import Call, Local, Meta, Path, Reads, Rule

Dim = tuple[str, ...]
Ints = dict[Path, tuple[int, Dim]]


class Space:
    """The iteration space of one call: hands out factors, and leaves out those of size 1.

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
        """A new factor, as the label of a dim made of it alone."""
        if size == 1:
            return ()
        name = hint if hint not in self.sizes else f"{hint}{len(self.sizes)}"
        self.sizes[name] = size
        if whole or size == 0:
            self.whole.add(name)
        return (name,)

    def dims(self, shape: Sequence[int], hint: str = "d", *, whole: Iterable[int] = ()) -> list[Dim]:
        """One new factor a dim; those at the positions `whole` must not be cut."""
        kept = set(whole)
        return [self.dim(n, hint, whole=i in kept) for i, n in enumerate(shape)]

    def rule(
        self,
        operands: Sequence[Sequence[Dim]],
        results: Sequence[Sequence[Dim]],
        *,
        reduce: Mapping[str, str] | None = None,
        linear: Iterable[Iterable[int]] = (),
        local: Callable[[Local], Any] | None = None,
        local_factors: Iterable[str] = (),
        reads: Mapping[str, Reads] | None = None,
        **rest: Any,
    ) -> Rule:
        """What is said of factors that must not be cut counts for nothing; `rest` are other fields of a `Rule`."""
        cut_locally = frozenset(local_factors) - self.whole
        others: dict[str, Any] = {name: frozenset(x) if name in _SETS else x for name, x in rest.items()}
        return Rule(
            operands=tuple(tuple(o) for o in operands),
            results=tuple(tuple(r) for r in results),
            sizes=self.sizes,
            reduce={f: kind for f, kind in (reduce or {}).items() if f not in self.whole},
            whole=frozenset(self.whole),
            linear=tuple(frozenset(s) for s in linear),
            local=local if cut_locally else None,
            local_factors=cut_locally,
            reads={i: r for i, r in (reads or {}).items() if not {i, r.by} & self.whole},
            **others,
        )


_SETS = ("loose", "gathers", "ones")  # the fields of a rule that are sets of factors, beside those above


def arg(call: Call, name: str, *lacking: Any) -> Any:
    """An argument of the op, by its name in the schema, or its default; or what is said for ops that are `lacking` it.

    Example:
        >>> import torch
        >>> call = Call(torch.ops.aten.sum.dim_IntList, (), {}, (), ())
        >>> arg(call, "keepdim"), arg(call, "reduction", "none")
        (False, 'none')
    """
    for i, a in enumerate(schema_of(call.target).arguments):
        if a.name == name:
            return call.args[i] if i < len(call.args) else call.kwargs.get(name, a.default_value)
    if not lacking:
        raise ShardingError(f"{call.target} has no argument {name!r}, which its rule reads")
    return lacking[0]


def is_backward(call: Call) -> bool:
    """Whether the op is a gradient's, by its name."""
    return "backward" in schema_of(call.target).name


def path(call: Call, name: str) -> Path:
    """Where that argument sits."""
    position = [a.name for a in schema_of(call.target).arguments].index(name)
    return (position,) if position < len(call.args) else (name,)


def tensor_arguments(target: Any) -> list[tuple[int, str]] | None:
    """Position and name of every argument that may be a tensor; None if some argument is a list of tensors."""
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


def present(call: Call, count: int) -> list[int]:
    """Which of the `count` tensor arguments of the op this call gives (others are None, or Python numbers)."""
    if len(call.operands) == count:
        return list(range(count))
    where = tensor_arguments(call.target) or []
    return [
        i
        for i, (position, name) in enumerate(where)
        if isinstance(call.args[position] if position < len(call.args) else call.kwargs.get(name), Meta)
    ]


def axis(dim: int, rank: int) -> int:
    """A dim counted from the front (scalars have one dim for this purpose)."""
    return dim + max(rank, 1) if dim < 0 else dim


def axes(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Reduced dims; None and an empty list mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    return sorted({axis(d, rank) for d in dims}) if dims else list(range(rank))


def result(call: Call, i: int = 0) -> Meta:
    found = call.results[i]
    if found is None:
        raise ValueError(f"{call.target} has no tensor as result {i}")
    return found


def result_shape(call: Call, i: int = 0) -> tuple[int, ...]:
    return result(call, i).shape


def shape_ints(prefix: Path, dims: Sequence[Dim]) -> Ints:
    """A size argument that lists every dim of a value."""
    return {(*prefix, i): (1, dim) for i, dim in enumerate(dims)}


def broadcast(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """The labels of an operand of `shape` that is broadcast against a value labeled `dims`."""
    tail = dims[len(dims) - len(shape) :] if shape else []
    return [() if n == 1 else dim for dim, n in zip(tail, shape, strict=True)]


def join(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape of all of them together."""
    columns = itertools.zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(next((n for n in column if n != 1), 1) for column in columns)[::-1]


def words(letter: str, count: int) -> str:
    """Names for so many dims of a pattern."""
    return " ".join(f"{letter}{i}" for i in range(count))


def elements(call: Call, _: int) -> int:
    """An operation for each element of the first operand: the arithmetic of ops that look at every one once."""
    return numel(call.operands[0].shape)


def numel(shape: Sequence[int]) -> int:
    return math.prod(shape)


def largest(call: Call) -> int:
    """The elements of the largest tensor of a call."""
    return max((numel(m.shape) for m in (*call.operands, *call.results) if m is not None), default=0)
