"""Enters everything in torch that is different while a function is traced, for one trace at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardlib.core.context import is_tracing, tracing
from shardlib.core.torch_internals.torch_private import (
    CHECKS_ALL,
    IS_COMPILING,
    LAZY_GRAPHS,
    VALIDATES,
    FakeTensorMode,
    has_onednn,
    set_onednn,
)
from shardlib.frontend.gradients.gradient_tags import tag_engine_gradients
from shardlib.frontend.hazards.constant_values import has_known_values
from shardlib.frontend.hazards.numpy_args import accept_stand_ins
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.hazards.value_inspection import raise_from_logging
from shardlib.frontend.torch_rewrites.attention import AttentionCapture
from shardlib.frontend.torch_rewrites.averaged_model import trace_averages
from shardlib.frontend.torch_rewrites.composites import Composites
from shardlib.frontend.torch_rewrites.first_order_grad import record_only_if_visible
from shardlib.frontend.torch_rewrites.grad_scaler import trace_grad_scalers
from shardlib.frontend.torch_rewrites.optimizers import trace_optimizers
from shardlib.frontend.tracer import intercept_module_calls
from shardlib.primitives.random.keys import one_program

_FAKE_CACHE = 1 << 11  # entries
_LOCK = threading.RLock()  # torch's tracing state is global


@contextmanager
def tracing_scope(generators: Sequence[torch.Generator] | None, *, marked: bool) -> Iterator[None]:
    """Replaces parts of torch inside the context (`docs/torch_patches.md`); other threads' traces wait.

    `generators` and `marked` are arguments of `one_program`, whose random numbers the traced ops draw.
    """
    refuse_nested()
    with _LOCK, hold_trace_flags():
        if len(FakeTensorMode.cache) > _FAKE_CACHE:  # torch sets no bound
            FakeTensorMode.cache_clear()
        collects = gc.isenabled()
        gc.disable()  # a trace makes no garbage yet, and looking for some took a quarter of the time
        try:
            draws = one_program(traced=True, generators=generators, marked=marked)
            with (
                tracing(),
                AttentionCapture(),
                Composites(),
                record_only_if_visible(),
                tag_engine_gradients(),
                trace_optimizers(),
                trace_grad_scalers(),
                trace_averages(),
                accept_stand_ins(),
                intercept_module_calls(),
                raise_from_logging(),
                draws,
            ):
                yield
        finally:
            if collects:
                gc.enable()


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


# --- the source of graphs ---------------------------------------------------------------------------------------------

_graphs_lock = threading.Lock()
_makers = 0  # threads that make graphs now
_before = False


@contextmanager
def skip_graph_source() -> Iterator[None]:
    """Delays the source of graph modules that are made inside, in any number of threads, until it is read.

    Nothing reads it, and generating it takes time.
    """
    global _makers, _before
    with _graphs_lock:
        if not _makers:
            _before = LAZY_GRAPHS.value
            LAZY_GRAPHS.value = True
        _makers += 1
    try:
        yield
    finally:
        with _graphs_lock:
            _makers -= 1
            if not _makers:
                LAZY_GRAPHS.value = _before
