"""What a sharding rule is.

A rule names the *factors* of one op's iteration space and says, for every dim of every tensor operand and result, which
factors it is made of (major first). A factor of an operand that a result lacks is a reduction and must be declared.

Everything the compiler needs to run the op on shards is here: which factors may be cut, what the results then are,
which integer arguments are sizes, and, where the plain op on local tensors is not enough, a `local` form of it.
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
Path = tuple[int | str, ...]  # where an argument sits: (1, 0) is args[1][0]; ("size", 0) is kwargs["size"][0]


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def at_hand(self) -> bool:
        """Whether reading the shape costs nothing: of a result, torch may have to be asked."""
        return True


@dataclass(frozen=True)
class Call:
    """One call of an ATen op, as rules see it: tensors are `Meta`s."""

    target: Any  # OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Meta, ...]  # the tensors among args, then kwargs, flattened in order, repeats kept
    results: tuple[Meta | None, ...]  # one per output; None where the op returns no tensor

    @cached_property
    def key(self) -> Hashable:
        """The op and all that it is told, lists and dicts as tuples."""
        return self.target, _frozen(self.args), _frozen(self.kwargs) if self.kwargs else None


def _frozen(x: Any) -> Hashable:
    kind = type(x)
    if kind is tuple or kind is list:
        return tuple([_frozen(y) for y in x])
    return tuple([(k, _frozen(y)) for k, y in x.items()]) if isinstance(x, Mapping) else x


OWNED = "owned"  # how a value is pending of which each device has some rows only, and anything at the others


class Groups(NamedTuple):
    """A ragged dim: `factor` counts groups of what lies along `along`; operand `ends` says where each group ends: of
    all rows, or of a device's `own`.

    With `factor` cut, the op reads and makes the rows of its device's groups alone. Results that lack the factor are a
    pending sum over it, zero at other rows; or, where `reduce` says `OWNED`, have anything there.
    """

    factor: str
    along: str
    ends: int
    own: bool = False


class Reads(NamedTuple):
    """Element j of factor `by` reads elements `stride * j + low` to `stride * j + high` of another one, or is made of
    them, or put there; so many of its `elements` do."""

    by: str
    stride: int
    low: int
    high: int
    elements: int


class Looks(NamedTuple):
    """Where `rows` of a table are cut, a device reads, or writes, only those that it has: of what the op returns, or of
    operand `values`, the places at which operands `indices` name one of these."""

    rows: tuple[str, ...]
    indices: tuple[int, ...]
    values: int | None = None


class Held(NamedTuple):
    """One of the blocks of a dim, `block` of `factor`, which a single device has where that is cut: the op returns it,
    or takes operand `value` for it, of which then nobody else reads anything."""

    factor: str
    block: int
    value: int | None = None


@dataclass(frozen=True)
class Rule:
    """How one call shards.

    * `operands`, `results`: labels per tensor, aligned with `Call.operands` and `Call.results`.
    * `sizes`: the size of every factor; factors of size 1 are left out everywhere.
    * `reduce`: factor -> "sum", "max" or "min": cutting it leaves the results that lack it pending that way. "none"
      leaves them complete: the op reads no values of that operand (`new_zeros`), or its `local` form reduces them
      itself.
    * `complete`: results that owe nothing, whatever is cut, or while a factor is (`(1, "c")`): they have nothing to do
      with what the others add up.
    * `whole`: factors that must not be cut.
    * `linear`: each entry is a set of operand positions in which the op is jointly linear, so that pending sums on
      exactly these operands may pass through it to the results (`add`: {0, 1}; `mul`: {0} and {1}; `neg`: {0}).
    * `onto`: the operand onto which is added what a cut factor makes a pending sum: it may owe that sum, too, and then
      `local` takes what each device has of it (`Local.owes`).
    * `ints`: integer arguments that are `k * product of local sizes of factors`: {path: (k, factors)}.
    * `local`: the per-device form, used when one of `local_factors` is cut; returns the local results.
    * `rounds`: {t: s}: `t` may be cut only together with `s`, over the same mesh axes; then `local` passes the pieces
      of `t` round, so that every piece of `s` meets every piece of `t`, and no result owes anything over these axes.
      Where `reads` says that this takes little of `t`, only that is passed (`near`).
    * `follows`: {i: o}: `i` may be cut only together with `o`, and whoever wants one of them cut wants both: they are
      one dim in two sizes (what goes into a convolution and what comes out), so cutting one nearly cuts the other.
    * `reads`: {i: which of its elements those of another factor lie at}: where the one is cut, the other is best cut
      beside that, so that little is sent. It decides nothing but where pieces end that nobody has chosen.
    * `loose`: those of `local_factors` of which `local` asks no offset, so that any part of them may be cut.
    * `lends`: {h: s}: for this op `h` may take over a mesh axis that only `s` wants (attention exchanges the cut of the
      sequence for one of the heads).
    * `gathers`: factors that may stay whole although somebody wants them cut: what is written to few places of a large
      result may be less to gather than that result is to sum up.
    * `ones`: the names of dims of size 1, which have no factor, for a local form that speaks of them.
    * `groups`: the ragged dim of a grouped product.
    * `looks`: which rows of a table the op reads or writes.
    * `held`: which single blocks of a dim it reads or writes.
    * `flops`: floating-point operations of the whole call.
    * `transparent`: the result is a re-indexing of operand 0 without arithmetic or choice (view, transpose, expand).
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
    local: Callable[[Local], Any] | None = None
    local_factors: frozenset[str] = frozenset()
    rounds: Mapping[str, str] = field(default_factory=dict)
    lends: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, Reads] = field(default_factory=dict)
    loose: frozenset[str] = frozenset()
    gathers: frozenset[str] = frozenset()
    ones: frozenset[str] = frozenset()
    groups: Groups | None = None
    looks: Looks | None = None
    held: tuple[Held, ...] = ()
    flops: int = 0
    transparent: bool = False

    def owed(self, result: int, factor: str) -> str | None:
        """How a result must be reduced that has not this factor while it is cut: "sum", "max", "min", or not at all."""
        kind = self.reduce.get(factor, "none")
        return None if kind == "none" or self.complete & {result, (result, factor)} else kind

    def adds_up(self, cut: Iterable[str]) -> bool:
        """Whether all that is made while these factors are cut adds up, if anything has to be reduced."""
        return all(self.reduce.get(factor, "sum") in ("sum", "none") for factor in cut)

    def near(self, factor: str, ways: int) -> int | None:
        """How many elements a device gets of a factor that goes round among so many devices, if it needs no more than
        half of what the others have: what it needs is held at once."""
        if (read := self.reads.get(factor)) is None:
            return None
        few = read.high - read.low
        return few if 2 * few * ways <= (ways - 1) * self.sizes[factor] else None


class Local(Protocol):
    """What a `local` form writes its instructions with. Values are opaque; ints may be symbolic (they differ by
    device).

    Symbolic ints support `+ - * //` with ints and each other and `.eq(int)` (1 or 0), and may stand wherever an int
    argument of an op may.
    """

    rule: Rule
    call: Call  # the whole call, with global shapes
    args: tuple[Any, ...]  # the call's arguments, tensors replaced by local values, `ints` made local
    kwargs: dict[str, Any]

    @property
    def prices(self) -> Prices: ...
    def axes(self, factor: str) -> tuple[Axis, ...]:
        """The mesh axes that cut `factor` here; () when it is whole."""

    def size(self, factor: str) -> Any:
        """This device's size of `factor`."""

    def owes(self, operand: int, factor: str) -> bool:
        """Whether an operand is a pending sum over the devices along `factor`."""

    def offset(self, factor: str) -> Any:
        """The global index of this device's first element of `factor`."""

    def pieces(self, factor: str) -> list[tuple[Any, Any, int]]:
        """The leaves of `factor`, major first: this device's size of each, its offset there, and the whole's size.

        A leaf that nothing cuts is part of the one before it.
        """

    def ways(self, factor: str) -> int:
        """In how many pieces `factor` is cut: the members of the group over its axes, in order."""

    def position(self, factor: str) -> Any:
        """This device's place among the members of the group over `factor`'s axes."""

    def of(self, value: Any, factor: str, member: Callable[[int], int]) -> Any:
        """The symbolic int `value` as member `member(i)` of the group over `factor`'s axes has it; i is this device's
        own position there."""

    def calc(self, function: Callable[..., Any], *values: Any) -> Any:
        """The symbolic value `function(*values)`: a function of symbolic values, which returns an int or several."""

    def values(self, value: Any, factor: str) -> list[set[Any]]:
        """For each position in the group over `factor`'s axes, what a symbolic value is on the devices there."""

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
        """Send a local value along (source, destination) positions in the group over `factor`'s axes.

        A plan calls it `name`. Its dims are `labels`; member i sends what member `holds(i)` has of them, or one of
        `parts` equal parts of that along `factor`.
        """

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What torch code makes of local values and numbers: the local results, of the shapes and dtypes of pieces.

        It is called with tensors without values, of the sizes that one device holds, on as many devices as differ; what
        it computes is written down, and `psum` and the like communicate along factors. Raises `ShardingError` for code
        that reads values, writes to tensors, or takes other steps on other devices.
        """

    def op(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit one call; returns its value (a tuple of values for ops with several results)."""


RuleFn = Callable[[Call], Rule | None]  # None: this call has no rule after all
