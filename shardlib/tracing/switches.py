"""Torch's switches as a trace has them: one graph, whatever device it is for, of code that does not look at values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.internals import COMPILING, VALIDATES, has_onednn, set_onednn
from shardlib.state import is_tracing


@contextmanager
def switched() -> Iterator[None]:
    """While on: no kernels of cuDNN and oneDNN, and what `torch.compile` has made runs as the function it is made of;
    where a function is traced, torch says that it is being compiled, and distributions take their arguments unseen."""
    onednn = has_onednn()
    with (
        torch.backends.cudnn.flags(enabled=False),
        torch.compiler.set_stance("force_eager"),
        # Model libraries read this flag before they look at the values of masks and positions.
        COMPILING.holding(_Here()),
        VALIDATES.holding(_Elsewhere(VALIDATES.value)),
    ):
        set_onednn(False)
        try:
            yield
        finally:
            set_onednn(onednn)


class _Here:
    """True where a function is traced, and false in all other threads."""

    def __bool__(self) -> bool:
        return is_tracing()

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __ror__, __rand__ = __or__, __and__


class _Elsewhere:
    """What a switch says in all other threads, and false where a function is traced."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch

    def __bool__(self) -> bool:
        return bool(self.switch) and not is_tracing()
