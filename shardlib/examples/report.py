"""Files of a run besides its checkpoints, such as losses and their curve. Each is written aside and then renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Losses:
    """Losses by step, in nats per byte; `validation` holds (step, loss) pairs."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def write(path: Path, make: Callable[[Path], object]) -> None:
    """Replaces `path` by the file that `make` writes. A reader finds the old file or the new one, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    make(partial)
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    write(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_losses(folder: Path, losses: Losses) -> None:
    """Writes `losses.json` and the curve `loss.png` to `folder`."""
    from matplotlib.figure import Figure  # takes seconds to import

    write_text(folder / "losses.json", json.dumps(asdict(losses), indent=1) + "\n")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses.train) + 1), losses.train, linewidth=0.8, label="training")
    if losses.validation:
        axes.plot(*zip(*losses.validation, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    write(folder / "loss.png", lambda partial: figure.savefig(partial, format="png", dpi=120))
