"""Checks that may take long, load native code or hang, each run by the doctor in a process of its own.

`python -m shardlib.command_line.self_test NAME` prints a line with `PREFIX` and a JSON list of findings.
Under torchrun, rank 0 prints.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.build import build_cache, library
from shardlib.build.build_recipe import Missing
from shardlib.command_line.finding import FAULT, OK, PREFIX, WARNING, Finding
from shardlib.jit.jit import jit
from shardlib.nn.parallelize import parallelize
from shardlib.ops import matmul, native_libs
from shardlib.ops.attention import op as attention
from shardlib.ops.attention.variant import Variant
from shardlib.ops.collectives.transport.shm_segment import Segment, SegmentError
from shardlib.ops.random import op as random
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor

TOLERANCE = 1e-5  # of a loss and of parameters after two steps, in float32
_SEGMENT_BYTES = 64 << 20


def check_compiler() -> Iterator[Finding]:
    """Builds or loads the host library."""
    answer = library.get_library("host")
    if isinstance(answer, Missing):
        log = f"; the compiler's output is in {answer.log}" if answer.log else ""
        remedy = f"install g++ (apt install g++) or set CXX; then python -m shardlib.build{log}"
        yield Finding("host library", WARNING, f"{answer}; collectives run over Gloo, random numbers in torch", remedy)
    elif isinstance(loaded := native_libs.host(), Missing):
        yield Finding("host library", FAULT, str(loaded), f"delete {answer.path} and run python -m shardlib.build")
    else:
        how = "was in the cache" if answer.seconds is None else f"was built in {answer.seconds:.0f} s"
        yield Finding("host library", OK, f"{how}: {answer.path}")
    folder = build_cache.writable_folder()
    if isinstance(folder, Missing):
        yield Finding("cache folder", WARNING, str(folder), "name a folder of yours by SHARDLIB_CACHE")
    else:
        yield Finding("cache folder", OK, str(folder))


def check_shared_memory() -> Iterator[Finding]:
    """Makes a segment and opens it as another process would."""
    try:
        own = Segment.make(_SEGMENT_BYTES)
        try:
            Segment.open(own.address).close()
        finally:
            own.close()
    except SegmentError as error:
        remedy = "free memory, raise the memory limit of the container, or allow /proc/PID/fd (ptrace) in it"
        yield Finding("shared memory", WARNING, f"{error}; collectives run over Gloo", remedy)
    else:
        yield Finding("shared memory", OK, f"a segment of {_SEGMENT_BYTES >> 20} MiB can be made and opened")


def check_gpu() -> Iterator[Finding]:
    """Lists the GPUs and builds the CUDA library."""
    if not torch.cuda.is_available():
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        if not devices:
            yield Finding("GPU", OK, "there is none; meshes live on the CPU, and plans need no device")
        else:
            remedy = "install torch for the driver's CUDA version (nvidia-smi prints it)"
            yield Finding("GPU", WARNING, f"torch {torch.__version__} does not see {devices[0]}", remedy)
        return
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        text = f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        old = facts.major < 8
        remedy = "torch's kernels run; shardlib's own need sm_80 or later" if old else ""
        yield Finding(f"GPU {i}", WARNING if old else OK, text, remedy)
    kernels = native_libs.cuda()
    if isinstance(kernels, Missing):
        remedy = "install the CUDA toolkit (nvcc) or set CUDA_HOME; then python -m shardlib.build cuda"
        yield Finding("CUDA library", WARNING, f"{kernels}; torch's kernels run instead", remedy)
    else:
        yield Finding("CUDA library", OK, "it is loaded")


def check_kernels() -> Iterator[Finding]:
    """Names the backend of each op on one device, and the reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.zeros(1, 2, 128, 64, device=device, dtype=dtype)
    yield Finding("attention", OK, f"{attention.choose(q, q, Variant(causal=True).explicit(q, q))}, on {device.type}")
    yield Finding("matmul", OK, f"{matmul.choose()}, for large float32 matrices on the CPU")
    yield Finding("random", OK, f"{random.choose(device)}, on {device.type}")


def check_virtual() -> Iterator[Finding]:
    """Trains on four virtual devices."""
    yield _compare(Mesh(data=2, tensor=2, device="cpu"))[0]


def check_ranks() -> Iterator[Finding]:
    """Trains on the ranks of this world."""
    yield from _compare(Mesh(data=2, device="cpu"))


def _compare(mesh: Mesh) -> list[Finding]:
    """Trains a module for two steps, and compares losses and parameters with one device; lists its collectives."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    sharded = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    sharded.load_state_dict(single.state_dict())
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    with mesh:
        parallelize(
            sharded, {"0.*": "ff@tensor ...", "2.weight": "_ ff@tensor"} if "tensor" in mesh else {}, strategy="fsdp"
        )
        losses = _train(sharded, jit(_step), x, y)
        pairs = [*zip(losses, _train(single, _step, x, y), strict=True)]
        pairs += [(_whole(a), b) for a, b in zip(sharded.parameters(), single.parameters(), strict=True)]
        error = max(float((a - b).detach().abs().max()) for a, b in pairs)
        plan = jit(_step).plan(sharded, torch.optim.AdamW(sharded.parameters()), x, y)
    name = f"{mesh.size} {'virtual devices' if mesh.kind == 'virtual' else 'ranks'}"
    if not error <= TOLERANCE:
        remedy = "report it, with this output: a sharded step computes what one device computes"
        return [Finding(name, FAULT, f"two training steps differ from one device by {error:.1e}", remedy)]
    backends = {c.kind: c.backend for c in plan.collectives if c.backend}
    return [
        Finding(name, OK, f"two training steps equal those of one device (largest difference {error:.0e})"),
        *(Finding(kind, OK, f"{backend}, on {name}") for kind, backend in backends.items()),
    ]


def _train(model: nn.Module, step: Callable[..., Any], x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, x, y) for _ in range(2)]
    return [_whole(loss) for loss in losses]


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


CHECKS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "compiler": check_compiler,
    "shared-memory": check_shared_memory,
    "gpu": check_gpu,
    "kernels": check_kernels,
    "virtual": check_virtual,
    "ranks": check_ranks,
}


if __name__ == "__main__":
    findings = [asdict(finding) for name in sys.argv[1:] for finding in CHECKS[name]()]
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{PREFIX}{json.dumps(findings)}", flush=True)
