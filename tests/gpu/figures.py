"""What the session measures: every row of its table with its target, whether it comes to be measured or not."""

from __future__ import annotations

from dataclasses import dataclass

CARDS = ("sm_90a", "sm_80")
DTYPES = ("bf16", "fp16")
WIDTHS = (64, 128)
SEQUENCES = (2048, 4096, 8192, 16384)
OPS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
TOOLS = ("memcheck", "racecheck", "synccheck")

# On an H100: at least this many times the speed of torch's flash and of cuDNN, and what is aimed at beside cuDNN.
SPEED = {"forward": (1.3, 0.85, 1.0), "backward": (1.2, None, 0.95)}
BANDWIDTH = {"all_gather": 0.95, "reduce_scatter": 0.90}  # of copy_'s bytes per second
LATENCY = 8e-6  # seconds of an empty collective, eager
LIBRARY_BYTES = 15e6


@dataclass(frozen=True)
class Figure:
    """A row: the part that measures it, its name, and the target in words (empty: it is reported only)."""

    part: str
    name: str
    target: str = ""


def error_of(direction: str, card: str, dtype: str) -> str:
    return f"attention {direction}, {card} kernels, {dtype}: error against float64"


def bits_of(card: str) -> str:
    return f"attention, {card} kernels: two runs, the same bits"


def speed_of(direction: str, width: int, causal: bool, sequence: int) -> str:
    return f"{direction} bf16 hd{width} {'causal' if causal else 'full'} {sequence >> 10}k"


def bandwidth_of(op: str, form: str) -> str:
    return f"{op}, 4 virtual ranks, 64 MiB, {form}"


def _speed_target(direction: str) -> str:
    flash, cudnn, aim = SPEED[direction]
    least = f">= {flash}x flash" + (f", >= {cudnn}x cuDNN" if cudnn else "")
    return f"{least} (aim {aim}x cuDNN)"


def all_speeds(direction: str) -> list[tuple[int, bool, int]]:
    return [(d, causal, s) for d in WIDTHS for causal in (False, True) for s in SEQUENCES]


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
        Figure(f"{direction} speed", speed_of(direction, *case), _speed_target(direction))
        for direction in ("forward", "backward")
        for case in all_speeds(direction)
    ),
    *(
        Figure("collective speed", bandwidth_of(op, form), f">= {BANDWIDTH[op]}x copy_" if form == "direct" else "")
        for op in ("all_gather", "reduce_scatter")
        for form in ("direct", "staged")
    ),
    Figure("collective speed", "CTAs of a rank that copy 450 GB/s"),
    Figure("collective speed", "empty all_gather, 8 virtual ranks, eager", "<= 8 us"),
    Figure("collective speed", "empty all_gather, 8 virtual ranks, in a CUDA graph"),
    *(Figure("sanitizer", f"compute-sanitizer {tool}: attention", "0 errors") for tool in TOOLS),
    *(Figure("sanitizer", f"compute-sanitizer {tool}: collectives", "0 errors") for tool in ("memcheck", "synccheck")),
    Figure("gpu tests", "pytest -m gpu", "all pass"),
    Figure("cpu tests", "a part of the CPU tests, under this torch", "all pass"),
)


def of_part(part: str) -> list[str]:
    """The names of a part's figures."""
    return [figure.name for figure in FIGURES if figure.part == part]
