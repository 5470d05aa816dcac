"""Sharding rules of single op calls, and the values that they are made of.

A rule names the *factors* of one op's iteration space. For every dim of every tensor operand and result it lists the
factors that the dim is made of, major first. A factor of an operand that a result lacks is a reduction and must be
declared.

A rule holds all that the compiler needs to run the op on shards: which factors may be sharded, what the results then
are, which integer arguments are sizes, and the op's local form where the plain op on local tensors is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.reshard import Prices

Labels = tuple[tuple[str, ...], ...]  # per dim, the names of its factors, major first; () for a dim of size 1
Path = tuple[int | str, ...]  # to an argument: (1, 0) is args[1][0]; ("size", 0) is kwargs["size"][0]


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_shape_known(self) -> bool:
        """False if reading the shape asks torch to infer it."""
        return True


@dataclass(frozen=True)
class Call:
    """One call of an ATen op, as rules see it: tensors are `Meta`s."""

    target: Any  # OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Meta, ...]  # the tensors of args, then of kwargs, flattened in order, with repeats
    results: tuple[Meta | None, ...]  # one per output; None for an output that is no tensor

    @cached_property
    def key(self) -> Hashable:
        """The op and its arguments, with lists and dicts as tuples."""
        return self.target, _freeze(self.args), _freeze(self.kwargs) if self.kwargs else None


def _freeze(value: Any) -> Hashable:
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_freeze(item) for item in value])
    if kind is float or kind is bool or kind is complex:
        return kind, repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    return tuple([(key, _freeze(item)) for key, item in value.items()]) if isinstance(value, Mapping) else value


OWNED = "owned"  # partial kind: each device holds the true values of some rows only, and garbage in the others


class Groups(NamedTuple):
    """A ragged dim: factor `factor` counts groups of consecutive rows, and the rows are factor `along`.

    Operand `ends` holds where each group ends, counted in the global rows, or with `own` in the device's rows. With
    `factor` sharded, the op reads and writes the rows of its device's groups only. Results that lack the factor are
    then partial sums, zero in the other rows. Where `reduce` has kind `OWNED`, the other rows hold garbage.
    """

    factor: str
    along: str
    ends: int
    own: bool = False


class WindowMap(NamedTuple):
    """Element j of factor `by` reads or writes elements `stride * j + low` to `stride * j + high` of another factor.

    `elements` counts the j for which this holds.
    """

    by: str
    stride: int
    low: int
    high: int
    elements: int


class Lookup(NamedTuple):
    """A lookup in a table: operands `indices` name its `rows`.

    Where the rows are sharded, a device reads or writes only its own: in the result, or in operand `values`, only the
    entries whose indices name one of these rows.
    """

    rows: tuple[str, ...]
    indices: tuple[int, ...]
    values: int | None = None


class SingleBlock(NamedTuple):
    """The op returns element `block` of `factor`, which one device holds where the factor is sharded.

    With `value` set, the op writes that operand there instead, and no other device reads any of it.
    """

    factor: str
    block: int
    value: int | None = None


@dataclass(frozen=True)
class Ties:
    """Factors whose sharding follows another factor's, as {factor: the other factor}.

    * `ring`: {t: s}: `t` may be sharded only together with `s`, over the same mesh axes. The local form then sends the
      shards of `t` around, so that every shard of `s` meets every shard of `t`. No result is partial over these axes.
    * `follows`: {i: o}: `i` may be sharded only together with `o`, and a request for either one requests both. They are
      one dim in two sizes, such as the input and the output of a convolution.
    * `lends`: {h: s}: for this op `h` may take over a mesh axis that only `s` requests. Attention so exchanges the
      sharding of the sequence for one of the heads.
    """

    ring: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    lends: Mapping[str, str] = field(default_factory=dict)

    @property
    def required(self) -> dict[str, str]:
        """The factors that may be sharded only together with another one."""
        return {**self.ring, **self.follows}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [*self.ring.items(), *self.follows.items(), *self.lends.items()]


@dataclass(frozen=True)
class Accesses:
    """Which elements of its operands the op reads or writes; every field is optional.

    * `windows`: {i: which elements of `i` another factor reads}. The borders of shards that no annotation fixes follow
      from it: aligned shards send little. It decides nothing else.
    * `lookup`: the rows of a table.
    * `blocks`: single elements of a factor.
    * `groups`: the ragged dim of a grouped product.
    """

    windows: Mapping[str, WindowMap] = field(default_factory=dict)
    lookup: Lookup | None = None
    blocks: tuple[SingleBlock, ...] = ()
    groups: Groups | None = None


@dataclass(frozen=True)
class LocalCode:
    """The code that a device runs instead of the op while one of `factors` is sharded.

    * `emit`: writes the code and returns the local results; None where the op itself always serves.
    * `loose`: those of `factors` whose offset the code does not read, so that any of their sub-factors may be sharded.
    * `ones`: the names of dims of size 1, which have no factor, for code that mentions them.
    """

    emit: Callable[[LocalBuilder], Any] | None = None
    factors: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    ones: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one call.

    * `operands`, `results`: labels per tensor, aligned with `Call.operands` and `Call.results`.
    * `sizes`: the size of every factor; factors of size 1 are left out everywhere.
    * `reduce`: factor -> "sum", "max" or "min": sharding it makes the results that lack it partial in that way. "none"
      leaves them complete: the op reads no values of that operand (`new_zeros`), or its local form reduces them.
    * `complete`: results that are never partial, or not for one factor (`(1, "c")`).
    * `whole`: factors that must not be sharded.
    * `linear`: sets of operand positions. The op is jointly linear in each set, so partial sums on exactly these
      operands pass through to the results (`add`: {0, 1}; `mul`: {0} and {1}; `neg`: {0}).
    * `onto`: the operand to which the op adds its partial sum. The operand may be a partial sum itself; then the local
      form adds each device's own addend (`LocalBuilder.has_partial`).
    * `ints`: integer arguments that are `k * product of local sizes of factors`: {path: (k, factors)}.
    * `gathers`: factors that may stay unsharded against a request. Gathering what is written to a few places of a large
      result may send less than summing that result.
    * `flops`: floating-point operations of the whole call.
    * `transparent`: the result re-indexes operand 0, without arithmetic or choice (view, transpose, expand).
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = field(default_factory=dict)
    complete: frozenset[int | tuple[int, str]] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    onto: int | None = None
    ints: Mapping[Path, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    gathers: frozenset[str] = frozenset()
    ties: Ties = Ties()
    accesses: Accesses = Accesses()
    local: LocalCode = LocalCode()
    flops: int = 0
    transparent: bool = False

    def partial_kind(self, result: int, factor: str) -> str | None:
        """Returns the kind of partial result while a factor that the result lacks is sharded; None if complete."""
        kind = self.reduce.get(factor, "none")
        return None if kind == "none" or self.complete & {result, (result, factor)} else kind

    def adds_up(self, sharded: Iterable[str]) -> bool:
        """Returns whether all reductions over these sharded factors are sums."""
        return all(self.reduce.get(factor, "sum") in ("sum", "none") for factor in sharded)

    def window_length(self, factor: str, ways: int) -> int | None:
        """Returns the elements of a ring's factor that a device reads from others, where fetching them at once pays.

        None where a device reads more than half of what the other `ways - 1` devices hold.
        """
        if (window := self.accesses.windows.get(factor)) is None:
            return None
        length = window.high - window.low
        return length if 2 * length * ways <= (ways - 1) * self.sizes[factor] else None


class LocalBuilder(Protocol):
    """The builder that a local form writes its instructions with. Values are opaque.

    Ints may be symbolic, since they differ by device. A symbolic int supports `+ - * //` with ints and symbolic ints,
    and `.eq(int)` (1 or 0). It may stand wherever an op takes an int argument.
    """

    rule: Rule
    call: Call  # the whole call, with global shapes
    args: tuple[Any, ...]  # the call's arguments, with local values for tensors and local sizes for `ints`
    kwargs: dict[str, Any]

    @property
    def prices(self) -> Prices: ...
    def axes(self, factor: str) -> tuple[Axis, ...]:
        """Returns the mesh axes that shard `factor`; () if it is whole."""

    def size(self, factor: str) -> Any:
        """This device's size of `factor`."""

    def has_partial(self, operand: int, factor: str) -> bool:
        """Returns whether an operand is a partial sum over the devices along `factor`."""

    def offset(self, factor: str) -> Any:
        """Returns the global index of this device's first element of `factor`."""

    def extents(self, factor: str) -> list[tuple[Any, Any, int]]:
        """This device's size and offset, and the global size, of each sub-factor of `factor`, major first.

        A sub-factor that is not sharded is merged into the one before it.
        """

    def ways(self, factor: str) -> int:
        """Returns the number of devices that share `factor`."""

    def position(self, factor: str) -> Any:
        """This device's position among the devices that share `factor`."""

    def on_member(self, value: Any, factor: str, member: Callable[[int], int]) -> Any:
        """Returns the symbolic int `value` of the device at position `member(i)`, where i is this device's position."""

    def calc(self, function: Callable[..., Any], *values: Any) -> Any:
        """Returns the symbolic value `function(*values)`. The function returns an int or several."""

    def values(self, value: Any, factor: str) -> list[set[Any]]:
        """Returns the values that a symbolic int has, for each position among the devices that share `factor`."""

    def ppermute(
        self,
        value: Any,
        factor: str,
        pairs: Sequence[tuple[int, int]],
        labels: Labels,
        *,
        name: str,
        holds: Callable[[int], int] = ...,
        parts: int = 1,
    ) -> Any:
        """Sends a local value along (source, destination) positions among the devices that share `factor`.

        A plan calls it `name`, and its dims are `labels`. Member i sends the shard of member `holds(i)`, or one of
        `parts` equal parts of it along `factor`.
        """

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records torch code; returns the local results, with the shapes and dtypes of shards.

        The function is called with tensors without values, once for each distinct set of local sizes. Its ops are
        recorded, and `psum` and the like communicate along factors. Raises `ShardingError` for code that reads values,
        writes to tensors, or takes different steps on different devices.
        """

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Emits one call; returns its value (a tuple of values for ops with several results)."""


RuleFn = Callable[[Call], Rule | None]  # None: this call has no rule after all
