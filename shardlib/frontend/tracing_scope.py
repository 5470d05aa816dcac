"""Enters everything in torch that is different while a function is traced, for one trace at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardlib.core.context import tracing
from shardlib.core.torch_internals.torch_private import FakeTensorMode
from shardlib.frontend.gradients.gradient_tags import tag_engine_gradients
from shardlib.frontend.hazards.numpy_args import accept_stand_ins
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.hazards.value_inspection import raise_from_logging
from shardlib.frontend.torch_flags import hold_trace_flags
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
