"""Numbers of one distribution for a part of a tensor: every element depends on its index in the whole only.

Shapes: key scalar, int64; out `size`, the part that begins at `first` in a tensor of shape `whole`. `key` and `counter`
identify the draw (they are seed and counter of `ops/random/philox.py`); the element's row-major index identifies the
number in it. So devices that hold the same element draw the same number without communication.

A program draws one new key in every call (`call_key`), and gives each of its draws a counter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.core.errors import ShardingError
from shardlib.ops import native_libs
from shardlib.ops.backend_choice import Choice, requested_backend, unavailable_error
from shardlib.ops.random import host as random_host
from shardlib.ops.random import philox
from shardlib.ops.random.distributions import KINDS, compute_values, elements_per_block

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

KEYS = 1 << 62  # the limit of keys and counters

# --- fake -------------------------------------------------------------------------------------------------------------


torch.library.register_fake(
    "shardlib::draw",
    lambda key, like, counter, kind, size, first, whole, *, dtype, device, p=0: torch.empty(
        size, dtype=dtype, device=device
    ),
    lib=_LIB,
)
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

_BLOCKS = {"cpu": 1 << 14}  # evaluated at once, by device type: they fit in a processor's cache
_DEFAULT_BLOCKS = 1 << 22  # enough to fill a GPU


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
    """Computes the definition, on any device."""
    per = elements_per_block(kind, dtype)
    starts, run = _find_rows(size, first, whole, device)
    if not starts.numel() or not run:
        return torch.empty(list(size), dtype=dtype, device=device)
    count = -(-(per - 1 + run) // per)  # blocks that a row may touch
    block = ((starts // per)[:, None] + torch.arange(count, device=device)).flatten()
    step = _BLOCKS.get(device.type, _DEFAULT_BLOCKS)
    parts = [compute_values(kind, dtype, philox.words(seed, counter, b), p) for b in torch.split(block, step)]
    drawn = torch.cat(parts).view(len(starts), count * per)
    index = (starts % per)[:, None] + torch.arange(run, device=device)
    return drawn.gather(1, index).view(list(size))


def _find_rows(
    size: Sequence[int], first: Sequence[int], whole: Sequence[int], device: torch.device
) -> tuple[Tensor, int]:
    """Returns the first indices of runs of consecutive elements, and the length of a run."""
    run, outer = 1, len(size)
    while outer and (outer == len(size) or size[outer] == whole[outer]):
        outer -= 1
        run *= size[outer]
    starts = torch.zeros((), dtype=torch.int64, device=device)
    for d, (n, begin, total) in enumerate(zip(size, first, whole, strict=True)):
        indices = torch.arange(begin, begin + n if d < outer else begin + 1, device=device)
        starts = starts[..., None] * total + indices
    return starts.flatten(), run


# --- backends ---------------------------------------------------------------------------------------------------------


def choose(device: torch.device) -> Choice:
    """Chooses the backend that draws on a device; both draw the same bits. `SHARDLIB_OPS` may name one."""
    want = requested_backend("random")
    host = native_libs.host() if device.type == "cpu" else Missing(f"{device.type} is not the CPU")
    if want == "torch" or (want is None and isinstance(host, Missing)):
        return Choice("torch", "", "SHARDLIB_OPS" if want else str(host))
    if isinstance(host, Missing):
        raise unavailable_error("random", "host", str(host))
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
    """Runs the op on the chosen backend. `like` has the result's layout; its values are not read.

    `kind` is one of `KINDS`, whose numbers `ops/random/distributions.py` defines; `dtype` is int64 for `word` and
    `long`, float32 or float64 otherwise, and may be bool for `bernoulli`.
    """
    check(kind, size, first, whole, dtype)
    device = torch.device(device)
    if choose(device).backend == "host":
        return random_host.draw(int(key), counter, kind, size, first, whole, dtype=dtype, p=p)
    seed = int(key) if key.device.type == "cpu" else key.to(device)  # a number needs no copy to the device
    return reference(seed, counter, kind, size, first, whole, dtype=dtype, device=device, p=p)


_DTYPES = {"word": (torch.int64,), "long": (torch.int64,), "bernoulli": (torch.bool, torch.float32, torch.float64)}


def check(kind: str, size: Sequence[int], first: Sequence[int], whole: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ShardingError with all arguments that do not fit."""
    wrong = []
    if kind not in KINDS:
        wrong.append(f"there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
    elif dtype not in _DTYPES.get(kind, (torch.float32, torch.float64)):
        wrong.append(f"{kind} numbers are not drawn as {dtype}")
    if not len(size) == len(first) == len(whole):
        wrong.append("size, first and whole have an entry for every dim")
    elif any(n and not 0 <= begin <= total - n for n, begin, total in zip(size, first, whole, strict=True)):
        wrong.append(f"a part of size {list(size)} at {list(first)} does not lie in {list(whole)}")
    if math.prod(whole) >= KEYS:
        wrong.append(f"{math.prod(whole)} elements are too many to number them")
    if wrong:
        raise ShardingError("draw does not fit", wrong)


# --- keys -------------------------------------------------------------------------------------------------------------


_generators: list[torch.Generator | None] = [None]


def generator_number(generator: torch.Generator | None) -> int:
    """Returns a generator's number in programs, and keeps the generator alive; 0 is torch's default for the CPU."""
    number = next((i for i, g in enumerate(_generators) if g is generator), None)
    if number is None:
        number = len(_generators)
        _generators.append(generator)
    return number


def call_key(
    generator: int = 0, *, device: torch.device, lead: int = 1, apart: bool = False, keep: bool = False
) -> Tensor:
    """Draws the key of one call, int64 scalar, from a generator.

    On a mesh the key is the sum over all devices: only the first device (`lead`) returns a number, others return 0. A
    process per device (`apart`) draws in any case, so that equal generators stay equal. With `keep` the generator's
    state is restored: the next call has the same key.
    """
    own = _generators[generator]
    before = (own or torch.default_generator).get_state() if keep else None
    source = torch.device("cpu") if own is None else own.device
    drawn = torch.randint(KEYS, (), generator=own, device=source) if lead or apart else None
    if before is not None:
        (own or torch.default_generator).set_state(before)
    if drawn is not None and lead and source.type == torch.device(device).type:
        return drawn.to(device)
    # `full` passes the number to the kernel; a copy from the CPU would wait for the GPU.
    return torch.full((), int(drawn) if drawn is not None and lead else 0, dtype=torch.int64, device=device)


def numbered_key(key: Tensor, counter: int) -> Tensor:
    """Stacks seed and counter, int64 `[2]`, as attention takes them."""
    return torch.stack([key, torch.full_like(key, counter)])


def fresh_key(*, device: torch.device) -> Tensor:
    """Draws a new key, int64 `[2]`. Programs derive it from the call's key (`shardlib.primitives.random.keys`)."""
    return numbered_key(call_key(device=device), 0)


_LIB.impl("draw", forward, "CompositeExplicitAutograd")
_LIB.impl("call_key", call_key, "CompositeExplicitAutograd")
_LIB.impl("numbered_key", numbered_key, "CompositeExplicitAutograd")
_LIB.impl("fresh_key", fresh_key, "CompositeExplicitAutograd")
