"""Torch's switches as a trace has them: one graph, whatever device it is for, of code that does not look at values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.torch_private import CHECKS_ALL, IS_COMPILING, VALIDATES, has_onednn, set_onednn
from shardlib.frontend.hazards.constant_values import is_known


@contextmanager
def switched() -> Iterator[None]:
    """While on: no kernels of cuDNN and oneDNN, and what `torch.compile` has made runs as the function it is made of;
    where a function is traced, distributions take their arguments unseen, and what libraries check of values is checked
    where the program runs."""
    onednn = has_onednn()
    with (
        torch.backends.cudnn.flags(enabled=False),
        torch.compiler.set_stance("force_eager"),
        VALIDATES.holding(_Elsewhere(VALIDATES.value)),
        CHECKS_ALL.holding(_checked(CHECKS_ALL.value)),
    ):
        set_onednn(False)
        try:
            yield
        finally:
            set_onednn(onednn)


def _is_compiling() -> bool:
    """True where a function is traced, or torch compiles: the code of `torch.compiler.is_compiling` from now on.

    Model libraries ask it before they look at the values of masks and positions, by names that they imported earlier.
    """
    import torch

    from shardlib.core.context import is_tracing
    from shardlib.core.torch_private import COMPILING

    return is_tracing() or bool(getattr(torch.compiler, COMPILING))


_torchs = IS_COMPILING.value
IS_COMPILING.value = _is_compiling.__code__.replace(  # TorchScript reads the source, and finds torch's
    co_filename=_torchs.co_filename, co_firstlineno=_torchs.co_firstlineno
)


class _Elsewhere:
    """What a switch says in all other threads, and false where a function is traced."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch

    def __bool__(self) -> bool:
        return bool(self.switch) and not is_tracing()


def _checked(check: Callable[..., None]) -> Callable[..., None]:
    """A check of a tensor of bools that is an op of the program where a traced function's arguments decide it."""

    def check_all(error: type[Exception], cond: Any, message: Callable[[], object] | None = None) -> None:
        traced = is_tracing() and isinstance(cond, Tensor) and cond.dtype is torch.bool
        if traced and error is RuntimeError and not is_known(cond):  # which is what the op raises
            text = str(message()) if message else "Expected cond to be True, but got False"  # as torch says
            torch.ops.aten._assert_async.msg(cond.all(), text)
        else:
            check(error, cond, message)

    return check_all
