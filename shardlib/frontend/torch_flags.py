"""Sets torch's switches for a trace: one graph for every device, of code that does not look at values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing
from shardlib.core.torch_internals.torch_private import CHECKS_ALL, IS_COMPILING, VALIDATES, has_onednn, set_onednn
from shardlib.frontend.hazards.constant_values import has_known_values


@contextmanager
def hold_trace_flags() -> Iterator[None]:
    """Turns off cuDNN and oneDNN, and runs functions of `torch.compile` in Python, inside the context.

    In a traced function, distributions do not validate their arguments, and libraries' checks of values become ops.
    """
    onednn = has_onednn()
    with (
        torch.backends.cudnn.flags(enabled=False),
        torch.compiler.set_stance("force_eager"),
        VALIDATES.holding(_OffInTraces(VALIDATES.value)),
        CHECKS_ALL.holding(_check_by_op(CHECKS_ALL.value)),
    ):
        set_onednn(False)
        try:
            yield
        finally:
            set_onednn(onednn)


def _is_compiling() -> bool:
    """Returns True in a traced function, or if torch compiles; it becomes the code of `torch.compiler.is_compiling`.

    Model libraries ask it, by imported names, before they look at the values of masks and positions.
    """
    import torch

    from shardlib.core.context import is_tracing
    from shardlib.core.torch_internals.torch_private import COMPILING

    return is_tracing() or bool(getattr(torch.compiler, COMPILING))


_torchs = IS_COMPILING.value
IS_COMPILING.value = _is_compiling.__code__.replace(  # TorchScript reads the source, and finds torch's
    co_filename=_torchs.co_filename, co_firstlineno=_torchs.co_firstlineno
)


class _OffInTraces:
    """A switch that is false in a traced function; other threads see its own value."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch

    def __bool__(self) -> bool:
        return bool(self.switch) and not is_tracing()


def _check_by_op(check: Callable[..., None]) -> Callable[..., None]:
    """Wraps torch's check of a tensor of bools: if a traced function's arguments decide it, an op checks it."""

    def check_all(error: type[Exception], cond: Any, message: Callable[[], object] | None = None) -> None:
        traced = is_tracing() and isinstance(cond, Tensor) and cond.dtype is torch.bool
        if traced and error is RuntimeError and not has_known_values(cond):  # the op raises it, too
            text = str(message()) if message else "Expected cond to be True, but got False"  # as torch says
            torch.ops.aten._assert_async.msg(cond.all(), text)
        else:
            check(error, cond, message)

    return check_all
