"""The machine: what its devices, and the links between them, do in a second. The one place with physical constants.

A `Machine` is a value that prints and parses back. Devices stand in nodes; links inside a node and between nodes
differ. Which link a collective uses follows from where the ranks of its group are: on a mesh, the right-most axis
varies fastest over the ranks, so inner axes lie inside nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from shardlib.core.errors import ShardingError
from shardlib.core.repr_literals import read, written

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
    """One device.

    `flops` are FLOP/s of products by dtype (`f64`, `f32`, `bf16`, `f16`, `f8`; a dtype that is not named has the rate
    of one as wide, or the next wider one); `efficiency` is the share of them that products reach. `bandwidth` is
    bytes/s of its memory, read or written, `memory` its bytes, `host` bytes/s to and from the host's memory, `launch`
    the seconds that it takes to begin a call, `special` the functions (exp, log, erf, ...) that it works out in a
    second, `tile` the keys that attention works on at once, all or none. `overlaps` says whether calls begin, and
    messages fly, while it computes. `spread` is how much devices of the kind differ: the standard deviation of what a
    call takes on them, as a share of it.
    """

    flops: Mapping[str, float]
    bandwidth: float
    memory: float
    host: float
    launch: float = 0.0
    efficiency: float = 1.0
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
        if self.special == math.inf:  # functions take no time
            del rates["special"]
        wrong = [] if self.flops else ["flops names no dtype"]
        wrong += [f"efficiency is {self.efficiency!r}, more than all"] if _above(self.efficiency, 1) else []
        wrong += [] if isinstance(self.overlaps, bool) else [f"overlaps is {self.overlaps!r}, not True or False"]
        shares = _negative({"launch": self.launch, "spread": self.spread})
        _refuse(self, [*wrong, *unknown, *_not_positive(named | rates), *shares])

    def __hash__(self) -> int:
        return hash(repr(self))

    def __reduce__(self) -> Any:  # a view of a dict cannot be copied
        return read, (repr(self), Device)

    def rate(self, dtype: str, itemsize: int) -> float:
        """FLOP/s of products in `dtype`, whose elements have `itemsize` bytes.

        Example:
            >>> h100 = Machine.preset("h100").device
            >>> h100.rate("bf16", 2) == h100.flops["bf16"] * h100.efficiency
            True
        """
        if dtype not in self.flops:
            wide = sorted(self.flops, key=lambda name: (_BYTES[name] < itemsize, abs(_BYTES[name] - itemsize)))
            dtype = wide[0]
        return self.flops[dtype] * self.efficiency

    def __repr__(self) -> str:
        return written(self)


@dataclass(frozen=True)
class Link:
    """A link: `bandwidth` in bytes/s that a device sends while it receives as much, `latency` in seconds of a hop,
    and how many devices share it (`sharing`, of a network card)."""

    bandwidth: float
    latency: float = 0.0
    sharing: int = 1

    def __post_init__(self) -> None:
        rates = {"bandwidth": self.bandwidth, "sharing": self.sharing}
        _refuse(self, [*_not_positive(rates), *_negative({"latency": self.latency})])

    def __repr__(self) -> str:
        return written(self)


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
        """Bytes/s that each member may send between nodes while all members of all groups do."""
        return self.outer.bandwidth / self.outer.sharing

    @property
    def ring(self) -> float:
        """Bytes/s that each member sends in a ring, node by node; several members in a node have a ring through each
        card."""
        inside = self.inner.bandwidth if self.near > 1 or self.far == 1 else math.inf
        return min(inside, self.near * self.shared) if self.far > 1 else inside

    @property
    def apart(self) -> float:
        """Bytes/s that each member sends to the others by itself: between nodes through its share of a card."""
        if self.far == 1:
            return self.inner.bandwidth
        return self.shared * (self.size - 1) / (self.size - self.near)


@dataclass(frozen=True)
class Machine:
    """Nodes of `node` devices, `inner` links inside a node and `outer` ones between nodes.

    `links` names mesh axes that have a link of their own. `Machine.preset` knows some machines, `Machine.measure` this
    one, and `dataclasses.replace` changes fields. Text parses back. Raises `ShardingError` for rates that are not
    positive, naming all of them.

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

    measured: ClassVar[Callable[[], Machine]]  # filled in by the floor that can run things

    def __post_init__(self) -> None:
        links = dict(self.links) if isinstance(self.links, Mapping) else {"": self.links}
        object.__setattr__(self, "links", MappingProxyType(links))
        kinds = [("device", self.device, Device), ("inner", self.inner, Link), ("outer", self.outer, Link)]
        kinds += [(f"links[{name!r}]" if name else "links", x, Link) for name, x in links.items()]
        wrong = [f"{name} is {x!r}, no {kind.__name__}" for name, x, kind in kinds if not isinstance(x, kind)]
        wrong += [f"links names {name!r}, no axis" for name in links if not isinstance(name, str)]
        wrong += [] if isinstance(self.node, int) else [f"node is {self.node!r}, no number of devices"]
        wrong += [] if isinstance(self.name, str) else [f"name is {self.name!r}, no text"]
        _refuse(self, [*wrong, *_not_positive({"node": self.node})])

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return written(self)

    def __reduce__(self) -> Any:
        return Machine.parse, (repr(self),)

    def __str__(self) -> str:
        return self.name if PRESETS.get(self.name) == self else repr(self)

    @staticmethod
    def preset(name: str) -> Machine:
        """A machine by name: `"h100"`, `"h200"`, `"a100-40"`, `"cpu"`, and `"node"`, round figures of one node of GPUs.

        Peak rates are the makers' (dense, without sparsity); links are what collectives reach on them. `"node"` is
        what a mesh has that names no machine.

        Example:
            >>> Machine.preset("a100-40").device.flops["bf16"]
            312000000000000.0
        """
        if not isinstance(name, str) or name not in PRESETS:
            close = get_close_matches(str(name), PRESETS, n=1)
            raise ShardingError(
                f"{name!r} is no machine" + (f"; did you mean {close[0]!r}?" if close else ""),
                [f"known are {', '.join(PRESETS)}"],
                remedy="Machine(device=Device(...), inner=Link(...), outer=Link(...)), or Machine.measure()",
            )
        return PRESETS[name]

    @staticmethod
    def parse(text: str) -> Machine:
        """The machine of a text: the name of a preset, or what `repr` prints.

        Example:
            >>> Machine.parse("h200").name
            'h200'
        """
        if not isinstance(text, str) or not (text := text.strip()).startswith("Machine("):
            return Machine.preset(text)
        try:
            machine = read(text, Machine, Device, Link)
        except ShardingError:
            raise
        except (SyntaxError, ValueError, TypeError) as error:
            raise ShardingError(f"{text!r} cannot be read as a machine", [str(error)]) from error
        assert isinstance(machine, Machine)
        return machine

    @staticmethod
    def of(what: Machine | str | None) -> Machine:
        """A machine, the one of a text, or the default."""
        if isinstance(what, Machine):
            return what
        if isinstance(what, str):
            return Machine.parse(what)
        if what is None:
            return PRESETS["node"]
        raise ShardingError(f"{what!r} is no machine", remedy='machine="h100", or an sl.Machine')

    @staticmethod
    def measure() -> Machine:
        """The machine that this process, or this world of ranks, runs on: products, copies and collectives are timed.

        Takes some seconds. Inside a mesh it is the mesh's kind of device that is timed, else torch's default one. On
        ranks every rank calls it, they are timed at once, as they run (processes on one machine share its cores), and
        all get the same machine: the mean of each figure. In one process there are no links to be timed: they are those
        of the preset `"cpu"`.
        """
        return Machine.measured()

    def faults(self, axes: Mapping[str, int]) -> list[str]:
        """What keeps this machine from being that of a mesh with these axes."""
        listing = ", ".join(f"{name}={size}" for name, size in axes.items())
        return [
            f"the machine has a link for axis {name!r}, the mesh ({listing}) has none"
            for name in self.links
            if name not in axes
        ]

    def span(self, group: Sequence[Axis], axes: Mapping[str, int]) -> Span:
        """Where the members of a group along some axes of a mesh are.

        Example:
            >>> from shardlib import Mesh
            >>> mesh, h100 = Mesh.abstract(data=16, tensor=8), Machine.preset("h100")
            >>> [h100.span((mesh.axis(name),), mesh.axes)[:2] for name in ("data", "tensor")]
            [(1, 16), (8, 1)]
        """
        own = [self.links[a.name] for a in group if a.name in self.links]
        if own:  # the slowest of the named links is what the group goes at
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


def _not_positive(values: Mapping[str, float]) -> list[str]:
    return [
        f"{name} is {x!r}, not a positive, finite number" for name, x in values.items() if not _is_number(x) or x <= 0
    ]


def _negative(values: Mapping[str, float]) -> list[str]:
    return [f"{name} is {x!r}, not a number of 0 or more" for name, x in values.items() if not _is_number(x) or x < 0]


def _above(x: object, most: float) -> bool:
    return isinstance(x, int | float) and x > most


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
        # Round figures that rank choices: one node of any size. Small collectives travel together there.
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
