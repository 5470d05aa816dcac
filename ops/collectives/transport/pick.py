"""Which way a collective goes: by memory that its members share, by the kernels of cuda/, or by torch."""

from __future__ import annotations

from shardlib.ops.backend_choice import Choice, unavailable, wanted

NCCL = ("nccl", "cuda")  # transports of GPUs


def pick(op: str, transport: str, why: str, shm: Choice | str, other: Choice, cuda: Choice | str) -> Choice:
    """What SHARDLIB_OPS asks for; else shared memory where there is some; else `other`, torch's way.

    The transport is "shm", "gloo", "nccl", "cuda" (NCCL, and GPUs that reach each other's memory), "virtual" (all
    members in one process), "none" (one member) or "open" (the ranks have not found out yet whether they share memory).
    `why` says why there is no shared memory; `shm` and `cuda`, when they are texts, what these cannot do in this case.
    """
    want = wanted(op)
    if transport in ("virtual", "none"):
        return Choice("torch", "", "all members are in this process" if transport == "virtual" else "one member")
    if transport in NCCL and want != "shm":
        return _on_gpus(op, transport, want, cuda, other)
    if transport == "open" and want in (None, "shm") and isinstance(shm, Choice):
        return Choice("shm", shm.way, f"{shm.reason}; {other.name} if the ranks find that they share no memory")
    return _on_cpus(op, transport, want, why, shm, other)


def _on_cpus(op: str, transport: str, want: str | None, why: str, shm: Choice | str, other: Choice) -> Choice:
    """Shared memory, unless it is not there, cannot do this, or SHARDLIB_OPS asks for torch."""
    if transport == "shm":
        fault = shm if isinstance(shm, str) else ""
    else:
        fault = why or f"the members speak over {'nccl' if transport in NCCL else transport}"
    if want == "torch":
        return other
    if want == "shm" and fault:
        raise unavailable(op, want, fault)
    if want not in (None, "shm"):
        raise unavailable(op, want, fault or f"there is no {want} backend of {op} for CPU tensors")
    if isinstance(shm, Choice) and not fault:
        return shm
    return Choice(other.backend, other.way, f"{other.reason} (no shared memory: {fault})" if fault else other.reason)


def _on_gpus(op: str, transport: str, want: str | None, cuda: Choice | str, other: Choice) -> Choice:
    """NCCL, unless SHARDLIB_OPS asks for the kernels and they do this."""
    if want == "torch" or (want is None and isinstance(cuda, str)):
        return other
    if want is None:
        reason = f"not yet measured on a GPU: SHARDLIB_OPS={op}=cuda takes shardlib's kernels"
    elif isinstance(cuda, str):
        reason = f"not shardlib's kernels: {cuda}"
    elif transport == "cuda":
        return cuda
    else:
        raise unavailable(op, "cuda", "the ranks made this group before SHARDLIB_OPS asked for the kernels")
    return Choice(other.backend, other.way, f"{other.reason} ({reason})")
