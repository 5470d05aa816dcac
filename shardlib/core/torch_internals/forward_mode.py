"""Forward-mode AD of torch: dual levels, and `torch.func.jvp`, which opens one."""

from __future__ import annotations

from shardlib.core.torch_internals.torch_private import dual_level


def is_forward_mode() -> bool:
    """Returns whether a dual level is open."""
    level: int = dual_level()
    return level >= 0
