"""Picks a collective's way: memory that its members share, the kernels of cuda/, or torch."""

from __future__ import annotations

import torch

from shardlib.ops.backend_choice import Choice, requested_backend, unavailable_error

NCCL = ("nccl", "cuda")  # transports of GPUs
_NATIVE = {
    "gloo": {torch.float32, torch.float64, torch.int32, torch.int64},
    "nccl": {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64},
}


def find_native_fault(dtype: torch.dtype, kind: str, backend: str) -> str | None:
    """Returns why the backend's own reduction is not exact, or None if it is."""
    if dtype not in _NATIVE[backend]:
        return f"{backend} does not reduce {str(dtype).removeprefix('torch.')} exactly"
    if kind != "sum" and dtype.is_floating_point:
        return f"{backend} loses NaNs in a {kind}"
    return None


def pick(op: str, transport: str, why: str, shm: Choice | str, other: Choice, cuda: Choice | str) -> Choice:
    """Returns the way that SHARDLIB_OPS asks for; else shared memory, if there is some; else `other`, torch's way.

    * `transport`: "shm", "gloo", "nccl", "cuda" (NCCL, and GPUs that reach each other's memory), "virtual" (all members
      in one process), "none" (one member) or "open" (the ranks do not know yet if they share memory).
    * `why`: the reason why there is no shared memory.
    * `shm`, `cuda`: the ways of these backends, or texts that say why they cannot run this case.
    """
    want = requested_backend(op)
    if transport in ("virtual", "none"):
        return Choice("torch", "", "all members are in this process" if transport == "virtual" else "one member")
    if transport in NCCL and want != "shm":
        return _on_gpus(op, transport, want, cuda, other)
    if transport == "open" and want in (None, "shm") and isinstance(shm, Choice):
        return Choice("shm", shm.way, f"{shm.reason}; {other.name} if the ranks find that they share no memory")
    return _on_cpus(op, transport, want, why, shm, other)


def _on_cpus(op: str, transport: str, want: str | None, why: str, shm: Choice | str, other: Choice) -> Choice:
    """Picks shared memory, unless it is missing, cannot run this case, or SHARDLIB_OPS asks for torch."""
    if transport == "shm":
        fault = shm if isinstance(shm, str) else ""
    else:
        fault = why or f"the members speak over {'nccl' if transport in NCCL else transport}"
    if want == "torch":
        return other
    if want == "shm" and fault:
        raise unavailable_error(op, want, fault)
    if want not in (None, "shm"):
        raise unavailable_error(op, want, fault or f"there is no {want} backend of {op} for CPU tensors")
    if isinstance(shm, Choice) and not fault:
        return shm
    return Choice(other.backend, other.way, f"{other.reason} (no shared memory: {fault})" if fault else other.reason)


def _on_gpus(op: str, transport: str, want: str | None, cuda: Choice | str, other: Choice) -> Choice:
    """Picks NCCL, unless SHARDLIB_OPS asks for the kernels and they can run this case."""
    if want == "torch" or (want is None and isinstance(cuda, str)):
        return other
    if want is None:
        reason = f"not yet measured on a GPU: SHARDLIB_OPS={op}=cuda takes shardlib's kernels"
    elif isinstance(cuda, str):
        reason = f"not shardlib's kernels: {cuda}"
    elif transport == "cuda":
        return cuda
    else:
        raise unavailable_error(op, "cuda", "the ranks made this group before SHARDLIB_OPS asked for the kernels")
    return Choice(other.backend, other.way, f"{other.reason} ({reason})")
