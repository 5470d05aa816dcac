"""What the session measures: every row of its table with its target, whether it comes to be measured or not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

CARDS = ("sm_90a", "sm_80")
DTYPES = ("bf16", "fp16")
WIDTHS = (64, 128)
HEAD_DIMS = (64, 96, 112, 128, 256)
SEQUENCES = (2048, 4096, 8192, 16384)
OPS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
TOOLS = ("memcheck", "racecheck", "synccheck")

# On an H100: at least this many times the speed of torch's flash and of cuDNN, and what is aimed at beside cuDNN.
SPEED = {"forward": (1.3, 0.85, 1.0), "backward": (1.2, None, 0.95)}
BANDWIDTH = {"all_gather": 0.95, "reduce_scatter": 0.90}  # of copy_'s bytes per second
LATENCY = 8e-6  # seconds of an empty collective, eager
LATENCY_RANKS = (2, 8)
CTAS_OF_LINK = "CTAs of a rank that copy 450 GB/s"
LIBRARY_BYTES = 15e6

MACHINE = "Machine.measure()"
STEP = "a step of four layers of Llama 8B, 2 x 8k tokens, through jit"
STEP_SIMULATED = "the same step, simulated over measured"
EAGER_PEAK = "the same step through eager torch: peak"
KEEPING = ("all kept", "all made again", "within 70 %", "saved values on the host")  # for the backward pass
PEAK_OFF = 0.10
WAITS = ("fsdp8", "fsdp_tp", "llama")  # programs on 4 processes
LONGEST_WAIT, LONGEST_STEP = 0.5, 1.03  # with the schedule, times those without

# What is tried: CTAs of a large collective, sizes up to which one way may beat another, keys of a tile of the forward.
SWEPT_CTAS = (4, 8, 16, 24, 32)  # of each of 4 virtual ranks, all of which run at once
SWEPT_BYTES = tuple(1 << n for n in range(10, 19))
SWEEPS = CTAS_SWEEP, PACKETS_SWEEP, STEPS_SWEEP = (
    "CTAs of a staged all_gather and reduce_scatter, GB/s",
    "all_gather by packets, times the speed of staged, by bytes of a message",
    "all_reduce in one step, times the speed of two, by bytes",
)
TILES: dict[tuple[int, bool], tuple[int, ...]] = {
    (64, False): (96, 128), (96, False): (96, 128, 144), (128, False): (96, 128, 176), (256, False): (64, 80),
    (64, True): (48, 64), (128, True): (48, 64), (256, True): (32, 48),
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A row: the part that measures it, its name, and the target in words (empty: it is reported only).

    Of a figure with `best`, cases are tried to find the one of the highest value.
    """

    part: str
    name: str
    target: str = ""
    best: bool = False


def error_of(direction: str, card: str, dtype: str) -> str:
    return f"attention {direction}, {card} kernels, {dtype}: error against float64"


def bits_of(card: str) -> str:
    return f"attention, {card} kernels: two runs, the same bits"


@dataclass(frozen=True)
class Speed:
    """A kind of attention that is timed: 16k tokens of 2048 numbers. Grouped: four query heads read one key head."""

    direction: str
    width: int
    causal: bool
    sequence: int
    general: bool = False  # some keys of every sequence are hidden by a mask
    grouped: bool = False

    @property
    def name(self) -> str:
        kinds = ", general" * self.general + ", grouped" * self.grouped
        return (
            f"{self.direction} bf16 hd{self.width} {'causal' if self.causal else 'full'} {self.sequence >> 10}k{kinds}"
        )

    @property
    def anchor(self) -> bool:
        """Whether there is a target for it."""
        return self.width in WIDTHS and not self.general and not self.grouped


def speeds(direction: str) -> list[Speed]:
    """Those with targets, of all lengths; and every head dim, grouped or not, plain and general, short and long."""
    found = [Speed(direction, d, causal, s) for d in WIDTHS for causal in (False, True) for s in SEQUENCES]
    for d, grouped in itertools.product(HEAD_DIMS, (False, True)):
        found += [Speed(direction, d, causal, s, False, grouped) for causal in (False, True) for s in (4096, 16384)]
        found.append(Speed(direction, d, True, 4096, True, grouped))
    return list(dict.fromkeys(found))


def tiles_of(width: int, general: bool) -> str:
    return f"keys of a tile, forward hd{width} {'general' if general else 'plain'}"


def ring_of(direction: str) -> str:
    return f"{direction}, the last of 4 ranks of a causal ring, 16k, hd128: beside one call"


def peak_of(options: str) -> str:
    return f"the same step, {options}: peak, planned over measured"


def wait_of(program: str) -> str:
    return f"{program}, 8 layers, 4 processes on the CPUs: seconds waited, scheduled over not"


def bandwidth_of(op: str, form: str) -> str:
    return f"{op}, 4 virtual ranks, 64 MiB, {form}"


def latency_of(ranks: int, how: str) -> str:
    return f"empty all_gather, {ranks} virtual ranks, {how}"


def _speed_target(direction: str) -> str:
    flash, cudnn, aim = SPEED[direction]
    least = f">= {flash}x flash" + (f", >= {cudnn}x cuDNN" if cudnn else "")
    return f"{least} (aim {aim}x cuDNN)"


FIGURES: tuple[Figure, ...] = (
    Figure("build", "cuda/ compiles", "0 bytes spilled, <= 15 MB"),
    Figure("ceilings", "copy_ of 1 GiB, read + write"),
    Figure("ceilings", "bf16 matmul 8192^3"),
    *(
        Figure(f"errors {card}", error_of(direction, card, dtype), "<= 2x torch's, every case")
        for card in CARDS
        for direction in ("forward", "backward")
        for dtype in DTYPES
    ),
    *(Figure("same bits", bits_of(card), "equal") for card in CARDS),
    *(Figure("collectives", f"{op}: bits of the reference", "equal") for op in OPS),
    Figure("collectives", "a rank that never comes", "an error that names it"),
    *(
        Figure(f"{direction} speed", case.name, _speed_target(direction) if case.anchor else "")
        for direction in ("forward", "backward")
        for case in speeds(direction)
    ),
    *(Figure("rings", ring_of(direction)) for direction in ("forward", "backward")),
    *(
        Figure("collective speed", bandwidth_of(op, form), f">= {BANDWIDTH[op]}x copy_" if form == "direct" else "")
        for op in ("all_gather", "reduce_scatter")
        for form in ("direct", "staged")
    ),
    Figure("collective speed", CTAS_OF_LINK),
    *(
        Figure("collective speed", latency_of(ranks, how), target)
        for ranks in LATENCY_RANKS
        for how, target in (("eager", "<= 8 us"), ("in a CUDA graph", ""))
    ),
    *(Figure("collective sweeps", name, best=True) for name in SWEEPS),
    *(Figure("tile sweeps", tiles_of(*kind), best=True) for kind in TILES),
    Figure("steps", MACHINE),
    Figure("steps", STEP, "eager's loss"),
    Figure("steps", STEP_SIMULATED),
    Figure("steps", EAGER_PEAK),
    *(Figure("steps", peak_of(options), f"within {100 * PEAK_OFF:.0f} %") for options in KEEPING),
    *(Figure("waits", wait_of(name), f"<= {LONGEST_WAIT}x, the step <= {LONGEST_STEP}x") for name in WAITS),
    *(Figure("sanitizer", f"compute-sanitizer {tool}: attention", "0 errors") for tool in TOOLS),
    *(Figure("sanitizer", f"compute-sanitizer {tool}: collectives", "0 errors") for tool in ("memcheck", "synccheck")),
    Figure("gpu tests", "pytest -m gpu", "all pass"),
    Figure("cpu tests", "a part of the CPU tests, under this torch", "all pass"),
)


def of_part(part: str) -> list[str]:
    """The names of a part's figures."""
    return [figure.name for figure in FIGURES if figure.part == part]
