"""Operations on ShardedTensors outside `jit`: each is a program of one op, made once per op, forms and arguments.

Autograd sits above this: `.backward()` on a ShardedTensor dispatches its gradient's ops here one by one. How a call
runs that is not ready yet, `ways` says.
"""

from __future__ import annotations

from typing import Any

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from shardlib.core.context import unseen
from shardlib.core.torch_private import dispatch_modes, is_profiling
from shardlib.eager import unsupported
from shardlib.eager.prepare import LOCK
from shardlib.eager.recompile_warning import note_compiled
from shardlib.eager.strategies import EagerCall, run_of
from shardlib.tensor.eager_cache import PROGRAMS, key_of, learn
from shardlib.tensor.eager_ranges import in_range
from shardlib.tensor.hooks import above
from shardlib.tensor.rank_checks import compare_operands


@unseen
def dispatch(op: Any, args: Any, kwargs: dict[str, Any], key: Any) -> Any:
    """Run one op on sharded (and plain, taken as whole) tensors that is not ready yet; tensor results are sharded.

    `key` is the call's, as `key_of` makes it.

    Raises `ShardingError` as `run_of` does.
    """
    call = EagerCall(op, args, kwargs)
    if any(isinstance(mode, ProxyTorchDispatchMode) for mode in dispatch_modes()):
        unsupported.recorded(op, call.tensors)
    with LOCK:
        if learn(op):
            key = key_of(op, args, kwargs)
        known = PROGRAMS.get(key)
        run = known or (in_range(op, "planned", run_of, call) if is_profiling() else run_of(call))
    if known is None:
        if call.mesh.kind == "distributed":
            compare_operands(op, call.tensors, call.mesh)  # which waits for other ranks, so not under the lock
        PROGRAMS[key] = run
        note_compiled(op, call.args, kwargs)
    return in_range(op, "on ShardedTensors", run, args, kwargs) if is_profiling() else run(args, kwargs)


above.dispatch = dispatch
