"""Dispatches ops on ShardedTensors outside `jit`: compiles each call once per op, operand forms and arguments.

Autograd works above this module: `.backward()` on a ShardedTensor dispatches the ops of its gradient here one by one.
`strategies` chooses how a new call runs.
"""

from __future__ import annotations

from typing import Any

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from shardlib.core.context import skip_dynamo
from shardlib.core.torch_internals.torch_private import dispatch_modes, is_profiling
from shardlib.eager import unsupported
from shardlib.eager.prepare import COMPILE_LOCK
from shardlib.eager.recompile_warning import note_compiled
from shardlib.eager.strategies import EagerCall, choose_runner
from shardlib.tensor.eager_cache import PROGRAMS, build_key, classify_op
from shardlib.tensor.eager_ranges import run_in_profiler_range
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.rank_checks import compare_operands


@skip_dynamo
def dispatch(op: Any, args: Any, kwargs: dict[str, Any], key: Any) -> Any:
    """Runs an op on sharded and plain tensors whose call has no cached program; plain tensors count as replicated.

    `key` is the call's, from `build_key`. Tensor results are sharded. Raises `ShardingError` as `choose_runner` does.
    """
    call = EagerCall(op, args, kwargs)
    if any(isinstance(mode, ProxyTorchDispatchMode) for mode in dispatch_modes()):
        unsupported.refuse_recorded(op, call.tensors)
    with COMPILE_LOCK:
        if classify_op(op):
            key = build_key(op, args, kwargs)
        cached = PROGRAMS.get(key)
        if cached is not None:
            run = cached
        else:
            run = run_in_profiler_range(op, "planned", choose_runner, call) if is_profiling() else choose_runner(call)
    if cached is None:
        if call.mesh.kind == "distributed":
            compare_operands(op, call.tensors, call.mesh)  # waits for other ranks, so without the lock
        PROGRAMS[key] = run
        note_compiled(op, call.args, kwargs)
    return run_in_profiler_range(op, "on ShardedTensors", run, args, kwargs) if is_profiling() else run(args, kwargs)


tensor_hooks.dispatch = dispatch
