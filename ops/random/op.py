"""Numbers of one distribution for a part of a tensor: every element is drawn from its own place in the whole.

Shapes: key scalar, int64; out `size`, the part that begins at `first` in a tensor of shape `whole`. `key` and `counter`
name the draw (they are seed and counter of `ops/random/philox.py`), the element's row-major index names the number in
it. So devices that hold the same element draw the same number, and nothing is communicated.

A program has one key, which it draws anew in every call (`call_key`), and gives each of its draws a counter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.ops.backend_choice import Choice, unavailable, wanted
from shardlib.ops.random import host as random_host
from shardlib.ops.random import philox
from shardlib.ops.random.distributions import KINDS, elements_per_block, values

# --- schema -----------------------------------------------------------------------------------------------------------

_LIB: Any = torch.library.Library("shardlib", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIB.define(
    "draw(Tensor key, Tensor? like, int counter, str kind, SymInt[] size, SymInt[] first, SymInt[] whole, *, "
    "ScalarType dtype, Device device, int p=0) -> Tensor"
)
_SEEDED = (torch.Tag.nondeterministic_seeded,)
_LIB.define(
    "call_key(int generator=0, *, Device device, int lead=1, bool apart=False, bool keep=False) -> Tensor", tags=_SEEDED
)
_LIB.define("numbered_key(Tensor key, int counter) -> Tensor")
_LIB.define("fresh_key(*, Device device) -> Tensor", tags=_SEEDED)

KEYS = 1 << 62  # keys and counters are below

# --- fake -------------------------------------------------------------------------------------------------------------


def _fake(
    key: Tensor,
    like: Tensor | None,
    counter: int,
    kind: str,
    size: Sequence[int],
    first: Sequence[int],
    whole: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    p: int = 0,
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


torch.library.register_fake("shardlib::draw", _fake, lib=_LIB)
torch.library.register_fake(
    "shardlib::call_key",
    lambda generator=0, *, device, lead=1, apart=False, keep=False: torch.empty((), dtype=torch.int64, device=device),
    lib=_LIB,
)
torch.library.register_fake("shardlib::numbered_key", lambda key, counter: key.new_empty(2), lib=_LIB)
torch.library.register_fake(
    "shardlib::fresh_key",
    lambda *, device: torch.empty(2, dtype=torch.int64, device=device),
    lib=_LIB,
)

# --- reference --------------------------------------------------------------------------------------------------------

_BLOCKS = {"cpu": 1 << 14}  # evaluated at once: in the cache of a processor, or enough for a whole card
_MANY = 1 << 22


def reference(
    seed: Tensor | int,
    counter: int,
    kind: str,
    size: Sequence[int],
    first: Sequence[int],
    whole: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    p: int = 0,
) -> Tensor:
    """The definition, on any device.

    Example:
        >>> cpu = torch.device("cpu")
        >>> a = reference(1, 2, "normal", [4, 6], [0, 0], [4, 6], dtype=torch.float32, device=cpu)
        >>> b = reference(1, 2, "normal", [2, 3], [1, 3], [4, 6], dtype=torch.float32, device=cpu)
        >>> torch.equal(a[1:3, 3:], b)
        True
    """
    per = elements_per_block(kind, dtype)
    starts, run = _rows(size, first, whole, device)
    if not starts.numel() or not run:
        return torch.empty(list(size), dtype=dtype, device=device)
    count = -(-(per - 1 + run) // per)  # blocks that a row may touch
    block = ((starts // per)[:, None] + torch.arange(count, device=device)).flatten()
    step = _BLOCKS.get(device.type, _MANY)
    parts = [values(kind, dtype, philox.words(seed, counter, b), p) for b in torch.split(block, step)]
    drawn = torch.cat(parts).view(len(starts), count * per)
    place = (starts % per)[:, None] + torch.arange(run, device=device)
    return drawn.gather(1, place).view(list(size))


def _rows(size: Sequence[int], first: Sequence[int], whole: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """The indices at which rows of neighbors begin, and how long each row is."""
    run, outer = 1, len(size)
    while outer and (outer == len(size) or size[outer] == whole[outer]):
        outer -= 1
        run *= size[outer]
    starts = torch.zeros((), dtype=torch.int64, device=device)
    for d, (n, begin, of) in enumerate(zip(size, first, whole, strict=True)):
        places = torch.arange(begin, begin + n if d < outer else begin + 1, device=device)
        starts = starts[..., None] * of + places
    return starts.flatten(), run


# --- backends ---------------------------------------------------------------------------------------------------------


def choose(device: torch.device) -> Choice:
    """Which backend draws on a device, and why; both give the same bits. `SHARDLIB_OPS` may name one.

    Example:
        >>> choose(torch.device("meta")).backend
        'torch'
    """
    want = wanted("random")
    host = random_host.library() if device.type == "cpu" else Missing(f"{device.type} is not the CPU")
    if want == "torch" or (want is None and isinstance(host, Missing)):
        return Choice("torch", "", "SHARDLIB_OPS" if want else str(host))
    if isinstance(host, Missing):
        raise unavailable("random", "host", str(host))
    return Choice("host", "", "shardlib's own code")


def forward(
    key: Tensor,
    like: Tensor | None,
    counter: int,
    kind: str,
    size: Sequence[int],
    first: Sequence[int],
    whole: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    p: int = 0,
) -> Tensor:
    """The op itself, by the chosen backend. `like` says where the result lies; its values are not read.

    `kind` is one of `KINDS`, whose numbers `ops/random/distributions.py` defines; `dtype` is int64 for `word` and
    `long`, float32 or float64 otherwise, and may be bool for `bernoulli`.
    """
    check(kind, size, first, whole, dtype)
    device = torch.device(device)
    if choose(device).backend == "host":
        return random_host.draw(int(key), counter, kind, size, first, whole, dtype=dtype, p=p)
    seed = int(key) if key.device.type == "cpu" else key.to(device)  # a number travels with a kernel
    return reference(seed, counter, kind, size, first, whole, dtype=dtype, device=device, p=p)


_DTYPES = {"word": (torch.int64,), "long": (torch.int64,), "bernoulli": (torch.bool, torch.float32, torch.float64)}


def check(kind: str, size: Sequence[int], first: Sequence[int], whole: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ShardingError with everything that does not fit."""
    wrong = []
    if kind not in KINDS:
        wrong.append(f"there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    elif dtype not in _DTYPES.get(kind, (torch.float32, torch.float64)):
        wrong.append(f"{kind} numbers are not drawn as {dtype}")
    if not len(size) == len(first) == len(whole):
        wrong.append("size, first and whole have an entry for every dim")
    elif any(n and not 0 <= begin <= of - n for n, begin, of in zip(size, first, whole, strict=True)):
        wrong.append(f"a part of size {list(size)} at {list(first)} does not lie in {list(whole)}")
    if math.prod(whole) >= KEYS:
        wrong.append(f"{math.prod(whole)} elements are too many to number them")
    if wrong:
        raise ShardingError("draw does not fit", wrong)


# --- keys -------------------------------------------------------------------------------------------------------------


_generators: list[torch.Generator | None] = [None]


def number_of(generator: torch.Generator | None) -> int:
    """What stands for a generator in a program, which keeps it alive; 0 is torch's own for the CPU."""
    known = next((i for i, g in enumerate(_generators) if g is generator), None)
    if known is None:
        known = len(_generators)
        _generators.append(generator)
    return known


def call_key(
    generator: int = 0, *, device: torch.device, lead: int = 1, apart: bool = False, keep: bool = False
) -> Tensor:
    """The key of one call, int64 scalar: a number from a generator.

    On a mesh only the first device (`lead`) decides: others give 0, and what is used is the sum over all. A process
    that has a device for itself (`apart`) draws all the same, so that generators that were alike stay alike. With
    `keep` the generator is set back: the next call has the same key.
    """
    own = _generators[generator]
    before = (own or torch.default_generator).get_state() if keep else None
    where = torch.device("cpu") if own is None else own.device
    drawn = torch.randint(KEYS, (), generator=own, device=where) if lead or apart else None
    if before is not None:
        (own or torch.default_generator).set_state(before)
    if drawn is not None and lead and where.type == torch.device(device).type:
        return drawn.to(device)
    # A number travels with the kernel that writes it: nobody waits for a GPU, as a copy from the CPU would.
    return torch.full((), int(drawn) if drawn is not None and lead else 0, dtype=torch.int64, device=device)


def numbered_key(key: Tensor, counter: int) -> Tensor:
    """Seed and counter, int64 `[2]`, as attention takes them.

    Example:
        >>> numbered_key(torch.tensor(7), 9)
        tensor([7, 9])
    """
    return torch.stack([key, torch.full_like(key, counter)])


def fresh_key(*, device: torch.device) -> Tensor:
    """A key that nobody else has, int64 `[2]`; in a program, made of the call's key
    (`shardlib.primitives.random.keys`)."""
    return numbered_key(call_key(device=device), 0)


_LIB.impl("draw", forward, "CompositeExplicitAutograd")
_LIB.impl("call_key", call_key, "CompositeExplicitAutograd")
_LIB.impl("numbered_key", numbered_key, "CompositeExplicitAutograd")
_LIB.impl("fresh_key", fresh_key, "CompositeExplicitAutograd")
