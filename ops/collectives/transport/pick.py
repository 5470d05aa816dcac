"""Picks a collective's way: memory that its members share, the kernels of cuda/, or torch."""

from __future__ import annotations

from dataclasses import replace

from shardlib.ops.backend_choice import Choice, requested_backend, unavailable_error
from shardlib.ops.collectives.transport import cuda_wire, forms
from shardlib.ops.collectives.transport.request import NCCL, CollectiveRequest


def pick(op: str, request: CollectiveRequest, shm: Choice | str, over_torch: Choice) -> Choice:
    """Returns the way that SHARDLIB_OPS asks for; else shared memory, if there is some; else torch's way.

    Where the members span machines, the machine model chooses the form over torch. `shm` is a text if shared memory
    cannot run this case: it says why.
    """
    transport, want = request.transport, requested_backend(op)
    if transport in ("virtual", "none"):
        return Choice("torch", "", "all members are in this process" if transport == "virtual" else "one member")
    r = request
    if r.span is not None and op in forms.OPS:
        over_torch = forms.choose_form(op, r.nbytes, r.even, r.dtype, r.kind, r.span).choice
    if transport in NCCL and want != "shm":
        return _on_gpus(op, request, want, over_torch)
    if transport == "open" and want in (None, "shm") and isinstance(shm, Choice):
        return Choice("shm", shm.way, f"{shm.reason}; {over_torch.name} if the ranks find that they share no memory")
    return _on_cpus(op, request, want, shm, over_torch)


def _on_cpus(op: str, request: CollectiveRequest, want: str | None, shm: Choice | str, over_torch: Choice) -> Choice:
    """Picks shared memory, unless it is missing, cannot run this case, or SHARDLIB_OPS asks for torch."""
    if request.transport == "shm":
        fault = shm if isinstance(shm, str) else ""
    else:
        backend = "nccl" if request.transport in NCCL else request.transport
        fault = request.shm_fault or f"the members speak over {backend}"
    if want == "torch":
        return over_torch
    if want == "shm" and fault:
        raise unavailable_error(op, want, fault)
    if want not in (None, "shm"):
        raise unavailable_error(op, want, fault or f"there is no {want} backend of {op} for CPU tensors")
    if isinstance(shm, Choice) and not fault:
        return shm
    return replace(over_torch, reason=f"{over_torch.reason} (no shared memory: {fault})") if fault else over_torch


def _on_gpus(op: str, request: CollectiveRequest, want: str | None, over_torch: Choice) -> Choice:
    """Picks NCCL, unless SHARDLIB_OPS asks for the kernels and they can run this case."""
    cuda = cuda_wire.choose_form(op, request)
    if want == "torch" or (want is None and isinstance(cuda, str)):
        return over_torch
    if want is None:
        reason = f"not yet measured on a GPU: SHARDLIB_OPS={op}=cuda takes shardlib's kernels"
    elif isinstance(cuda, str):
        reason = f"not shardlib's kernels: {cuda}"
    elif request.transport == "cuda":
        return cuda
    else:
        raise unavailable_error(op, "cuda", "the ranks made this group before SHARDLIB_OPS asked for the kernels")
    return replace(over_torch, reason=f"{over_torch.reason} ({reason})")
