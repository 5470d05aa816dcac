"""Speeds of devices and of the links between them. The only module with physical constants.

A `Machine` is a value that prints and parses back. Devices stand in nodes; links inside a node and between nodes
differ. A collective uses the links between the ranks of its group: the right-most axis of a mesh varies fastest over
the ranks, so inner axes lie inside nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from shardlib.core.errors import ShardingError
from shardlib.core.repr_literals import format_call, parse_call

_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8": 1}


class Axis(Protocol):
    """A mesh axis, or a part of one: `size` devices, each `post` along the axis `name` from the next."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def post(self) -> int: ...


@dataclass(frozen=True)
class Device:
    """The speeds of one device.

    * `flops`: FLOP/s of matrix products by dtype (`f64`, `f32`, `bf16`, `f16`, `f8`). A dtype without an entry has the
      rate of one that is as wide, or of the next wider one.
    * `efficiency`: the share of `flops` that products reach.
    * `attention`: the rate of attention, its exponentials included, as a share of the rate of products; without it
      attention multiplies at the rate of products, and evaluates exponentials behind them.
    * `bandwidth`: bytes/s of its memory, read or written; `memory`: its bytes.
    * `host`: bytes/s to and from the host's memory.
    * `launch`: seconds to start a call.
    * `special`: special functions (exp, log, erf, ...) per second.
    * `tile`: the block of keys in which attention works; it skips whole tiles only.
    * `overlaps`: True if launches and messages overlap with computation.
    * `spread`: standard deviation of the duration of a call among devices of this kind, as a share of the duration.
    """

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    host: float
    launch: float = 0.0
    efficiency: float = 1.0
    attention: float | None = None
    special: float = math.inf
    tile: int = 1
    overlaps: bool = True
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.flops, Mapping):
            _refuse(self, [f"flops is {self.flops!r}, no FLOP/s by dtype ({', '.join(_BYTES)})"])
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))
        unknown = [f"flops of {name!r}: dtypes are {', '.join(_BYTES)}" for name in self.flops if name not in _BYTES]
        named = {f"flops[{name!r}]": rate for name, rate in self.flops.items()}
        rates = {name: getattr(self, name) for name in ("bandwidth", "memory", "host", "efficiency", "special", "tile")}
        if self.special == math.inf:  # special functions are free
            del rates["special"]
        if self.attention is not None:
            rates["attention"] = self.attention
        wrong = [] if self.flops else ["flops names no dtype"]
        wrong += (
            [f"efficiency is {self.efficiency!r}, more than all"]
            if _is_number(self.efficiency) and self.efficiency > 1
            else []
        )
        wrong += [] if isinstance(self.overlaps, bool) else [f"overlaps is {self.overlaps!r}, not True or False"]
        shares = _find_negative({"launch": self.launch, "spread": self.spread})
        _refuse(self, [*wrong, *unknown, *_find_not_positive(named | rates), *shares])

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> Any:  # a MappingProxyType cannot be pickled
        return parse_call, (repr(self), Device)

    def rate(self, dtype: str, itemsize: int) -> float:
        """Returns FLOP/s of products in `dtype`, whose elements have `itemsize` bytes."""
        if dtype not in self.flops:
            wide = sorted(self.flops, key=lambda name: (_BYTES[name] < itemsize, abs(_BYTES[name] - itemsize)))
            dtype = wide[0]
        return self.flops[dtype] * self.efficiency

    __repr__ = format_call


@dataclass(frozen=True)
class Link:
    """A link: `bandwidth` in bytes/s in each direction at once, `latency` of a hop in seconds, devices `sharing` it."""

    bandwidth: float
    latency: float = 0.0
    sharing: int = 1

    def __post_init__(self) -> None:
        rates = {"bandwidth": self.bandwidth, "sharing": self.sharing}
        _refuse(self, [*_find_not_positive(rates), *_find_negative({"latency": self.latency})])

    __repr__ = format_call


class Span(NamedTuple):
    """A group of ranks on a machine: `near` of them in each of `far` nodes, and the links that they use."""

    near: int
    far: int
    inner: Link
    outer: Link

    @property
    def size(self) -> int:
        return self.near * self.far

    @property
    def shared(self) -> float:
        """Bytes/s that each member can send between nodes while all members of all groups send."""
        return self.outer.bandwidth / self.outer.sharing

    @property
    def ring(self) -> float:
        """Bytes/s that each member sends in a ring over nodes; members of one node share the rings of all its cards."""
        inside = self.inner.bandwidth if self.near > 1 or self.far == 1 else math.inf
        return min(inside, self.near * self.shared) if self.far > 1 else inside

    @property
    def pairwise(self) -> float:
        """Bytes/s that each member sends directly to the others: between nodes through its share of a card."""
        if self.far == 1:
            return self.inner.bandwidth
        return self.shared * (self.size - 1) / (self.size - self.near)


@dataclass(frozen=True)
class Machine:
    """Nodes of `node` devices, `inner` links inside a node and `outer` ones between nodes.

    `links` maps mesh axes to links of their own. `Machine.preset` returns known machines, `Machine.measure` measures
    this one, and `dataclasses.replace` changes fields. Raises one `ShardingError` for all rates that are not positive.

    Example:
        >>> machine = Machine.preset("h100")
        >>> machine.node, machine.device.memory, machine.inner
        (8, 80000000000.0, Link(bandwidth=340e9, latency=3e-06))
        >>> Machine.parse(repr(machine)) == machine
        True
    """

    device: Device
    inner: Link
    outer: Link
    node: int = 8
    name: str = ""
    links: Mapping[str, Link] = field(default_factory=dict)

    measured: ClassVar[Callable[[], Machine]]  # set by the module that runs the measurement

    def __post_init__(self) -> None:
        links = dict(self.links) if isinstance(self.links, Mapping) else {"": self.links}
        object.__setattr__(self, "links", MappingProxyType(links))
        kinds = [("device", self.device, Device), ("inner", self.inner, Link), ("outer", self.outer, Link)]
        kinds += [(f"links[{name!r}]" if name else "links", x, Link) for name, x in links.items()]
        wrong = [f"{name} is {x!r}, no {kind.__name__}" for name, x, kind in kinds if not isinstance(x, kind)]
        wrong += [f"links names {name!r}, no axis" for name in links if not isinstance(name, str)]
        wrong += [] if isinstance(self.node, int) else [f"node is {self.node!r}, no number of devices"]
        wrong += [] if isinstance(self.name, str) else [f"name is {self.name!r}, no text"]
        _refuse(self, [*wrong, *_find_not_positive({"node": self.node})])

    def __hash__(self) -> int:
        return hash(repr(self))

    __repr__ = format_call

    def __reduce__(self) -> Any:
        return Machine.parse, (repr(self),)

    def __str__(self) -> str:
        return self.name if PRESETS.get(self.name) == self else repr(self)

    @staticmethod
    def preset(name: str) -> Machine:
        """Returns a machine by name: `"h100"`, `"h200"`, `"a100-40"`, `"cpu"`, or `"node"`.

        Peak rates are the vendors' (dense, without sparsity); links have the rates that collectives reach. `"node"` is
        one node of GPUs in round figures, and the default of a mesh.

        Example:
            >>> Machine.preset("a100-40").device.flops["bf16"]
            312000000000000.0
        """
        if not isinstance(name, str) or name not in PRESETS:
            close = get_close_matches(str(name), PRESETS, n=1)
            raise ShardingError(
                f"{name!r} is no machine" + (f"; did you mean {close[0]!r}?" if close else ""),
                rule=f"known are {', '.join(PRESETS)}",
                remedy="Machine(device=Device(...), inner=Link(...), outer=Link(...)), or Machine.measure()",
            )
        return PRESETS[name]

    @staticmethod
    def parse(text: str) -> Machine:
        """Parses the name of a preset, or the text that `repr` prints."""
        if not isinstance(text, str) or not (text := text.strip()).startswith("Machine("):
            return Machine.preset(text)
        try:
            machine = parse_call(text, Machine, Device, Link)
        except ShardingError:
            raise
        except (SyntaxError, ValueError, TypeError) as error:
            raise ShardingError(f"{text!r} cannot be read as a machine", [str(error)]) from error
        assert isinstance(machine, Machine)
        return machine

    @staticmethod
    def convert(machine: Machine | str | None) -> Machine:
        """Converts a machine, its text, or None for the default."""
        if isinstance(machine, Machine):
            return machine
        if isinstance(machine, str):
            return Machine.parse(machine)
        if machine is None:
            return PRESETS["node"]
        raise ShardingError(f"{machine!r} is no machine", remedy='machine="h100", or an sl.Machine')

    @staticmethod
    def measure() -> Machine:
        """Measures this process, or this world of ranks: times products, copies and collectives.

        Takes some seconds. Inside a mesh it times the mesh's device type, else torch's default device. With several
        ranks, every rank must call it; all are timed at the same time, and get the mean of each figure. A single
        process has no links to time and takes those of the preset `"cpu"`.
        """
        return Machine.measured()

    def faults(self, axes: Mapping[str, int]) -> list[str]:
        """Lists why this machine does not fit a mesh with these axes."""
        listing = ", ".join(f"{name}={size}" for name, size in axes.items())
        return [
            f"the machine has a link for axis {name!r}, the mesh ({listing}) has none"
            for name in self.links
            if name not in axes
        ]

    def span(self, group: Sequence[Axis], axes: Mapping[str, int]) -> Span:
        """Returns how a group along some axes of a mesh spreads over nodes, and its links."""
        own = [self.links[a.name] for a in group if a.name in self.links]
        if own:  # the slowest of the named links limits the group
            link = min(own, key=lambda link: link.bandwidth / link.sharing)
            return Span(1, math.prod(a.size for a in group), link, link)
        strides, stride = {}, 1
        for name, size in reversed(list(axes.items())):
            strides[name], stride = stride, stride * size
        near = far = 1
        for axis in group:
            step = strides[axis.name] * axis.post
            inside = math.gcd(axis.size, self.node // step) if self.node % step == 0 else 1
            near, far = near * inside, far * (axis.size // inside)
        return Span(near, far, self.inner, self.outer)


def _find_not_positive(values: Mapping[str, float]) -> list[str]:
    return [
        f"{name} is {x!r}, not a positive, finite number" for name, x in values.items() if not _is_number(x) or x <= 0
    ]


def _find_negative(values: Mapping[str, float]) -> list[str]:
    return [f"{name} is {x!r}, not a number of 0 or more" for name, x in values.items() if not _is_number(x) or x < 0]


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _refuse(x: object, faults: Sequence[str]) -> None:
    if faults:
        rule = "rates are per second, in bytes or FLOPs, and positive"
        raise ShardingError(f"{type(x).__name__} cannot be made", faults, rule=rule)


# The special function units of a multiprocessor begin 16 functions a cycle (CUDA C++ Programming Guide, throughput of
# arithmetic instructions): on 132 of them at 1.83 GHz 3.9e12 a second (Shah et al., "FlashAttention-3", 2024), on the
# 108 of an A100 at 1.41 GHz 2.4e12. Attention works on tiles of 128 keys (Dao, "FlashAttention-2", 2023). Between the
# whiskers of a box plot, which are 5.4 standard deviations apart, one GPU takes 8 % longer than another of its kind
# (Sinha et al., "Not All GPUs Are Created Equal", 2022; none of their clusters had an A100 or H100).
_H100 = Device(
    {"f64": 67e12, "f32": 67e12, "bf16": 989e12, "f16": 989e12, "f8": 1979e12},
    bandwidth=3.35e12, memory=80e9, host=55e9, launch=3e-6, efficiency=0.7, special=3.9e12, tile=128, spread=0.015,
)  # fmt: skip
_A100 = Device(
    {"f64": 19.5e12, "f32": 19.5e12, "bf16": 312e12, "f16": 312e12},
    bandwidth=1.555e12, memory=40e9, host=25e9, launch=3e-6, efficiency=0.7, special=2.4e12, tile=128, spread=0.015,
)  # fmt: skip

# NVLink 4 is 450 GB/s a direction and NVLink 3 300 GB/s, a 400 Gb/s card 50 GB/s: collectives reach some nine tenths of
# the network and three quarters of NVLink. An A100 node on EFA has four cards of 100 Gb/s for its eight devices.
PRESETS: Mapping[str, Machine] = MappingProxyType({
    machine.name: machine
    for machine in (
        # Round figures to rank alternatives by: one node of any size, where small collectives are cheap.
        Machine(
            Device({"f32": 50e12, "bf16": 400e12}, bandwidth=2e12, memory=80e9, host=25e9),
            Link(300e9, 3e-8), Link(300e9, 3e-8), 1, "node",
        ),
        Machine(_H100, Link(340e9, 3e-6), Link(45e9, 1e-5), 8, "h100"),
        Machine(replace(_H100, bandwidth=4.8e12, memory=141e9), Link(340e9, 3e-6), Link(45e9, 1e-5), 8, "h200"),
        Machine(_A100, Link(230e9, 3e-6), Link(11e9, 2e-5, sharing=2), 8, "a100-40"),
        Machine(
            Device(
                {"f64": 50e9, "f32": 100e9}, bandwidth=10e9, memory=16e9, host=10e9, launch=2e-6, special=1e9,
                tile=128, overlaps=False,
            ),
            Link(2e9, 5e-5), Link(1e9, 1e-4), 8, "cpu",
        ),
    )
})  # fmt: skip
