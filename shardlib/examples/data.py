"""Text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def standard_library(max_bytes: int) -> bytes:
    """The top-level modules of the standard library, in alphabetical order, at most `max_bytes` of them.

    Example:
        >>> text = standard_library(1000)
        >>> len(text), text == standard_library(2000)[:1000]
        (1000, True)
    """
    parts, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= max_bytes:
            break
    return b"".join(parts)[:max_bytes]


@dataclass(frozen=True)
class Corpus:
    """Bytes as token ids, in two parts that share nothing: `train[N]` and `validation[M]`."""

    train: Tensor
    validation: Tensor

    @staticmethod
    def of(text: bytes, held_out: float = 0.05) -> Corpus:
        """Split `text`; its last part is held out."""
        tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        cut = int(len(tokens) * (1 - held_out))
        return Corpus(tokens[:cut], tokens[cut:])


def batch(tokens: Tensor, index: int, size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[size, length]` of batch number `index`: windows at random, the same on every rank and mesh.

    The random state is that of (`seed`, `index`) alone, so a resumed run sees the batches that it would have seen.

    Example:
        >>> inputs, targets = batch(torch.arange(100), index=3, size=2, length=8)
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 8]), True)
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    windows = tokens[starts + torch.arange(length + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
