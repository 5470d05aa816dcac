"""Training text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def standard_library(max_bytes: int) -> bytes:
    """Returns the first `max_bytes` bytes of the standard library's top-level modules, in alphabetical order."""
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= max_bytes:
            break
    return b"".join(parts)[:max_bytes]


@dataclass(frozen=True)
class Corpus:
    """Bytes as token ids, in two disjoint parts: `train[N]` and `validation[M]`."""

    train: Tensor
    validation: Tensor

    @staticmethod
    def from_text(text: bytes, held_out: float = 0.05) -> Corpus:
        """Splits `text` and holds its last part out for validation."""
        tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        boundary = int(len(tokens) * (1 - held_out))
        return Corpus(tokens[:boundary], tokens[boundary:])


def batch(tokens: Tensor, index: int, size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random windows of `tokens`: inputs and targets `[size, length]` of batch number `index`.

    They depend on `seed` and `index` alone. So every rank and mesh draws the same batch, and a resumed run continues
    with the batches of an uninterrupted one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    windows = tokens[starts + torch.arange(length + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
