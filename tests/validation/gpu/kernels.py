"""How the parts reach the kernels: on a GPU, or, to rehearse the session on a machine with none, emulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.build.build_recipe import Missing
from shardlib.ops import native_libs
from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.collectives.transport import cuda_peers
from shardlib.ops.collectives.transport.cuda_args import Tuning
from shardlib.ops.collectives.transport.cuda_peers import Peers
from tests.helpers.virtual_peers import virtual_peers

Kernel = Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """Where kernels run: `get_kernel(card, direction)` is attention as a torch op, `launch` runs a collective's."""

    device: str
    kernel: Callable[[str, str], Kernel]
    launch: cuda_peers.Launch
    cards: tuple[str, ...]  # whose kernels run here
    rehearsal: bool = False

    def group(self, ranks: int, *, seconds: float = 10.0, tuning: Tuning | None = None, **more: Any) -> Peers:
        """A group of virtual ranks; a rehearsal's is small."""
        if self.rehearsal and tuning is None:
            tuning = Tuning(ctas=2, threads=32, packet_bytes=256, window=4096, chunk=256)
        return virtual_peers(ranks, self.device, tuning, seconds=seconds, launch=self.launch, **more)

    def install(self, *, poison: bool = False) -> None:
        """Have the attention backend call these kernels; with `poison`, on outputs that are NaN everywhere."""
        poisoned = lambda card, way: _poisoned(self.kernel(card, way), way)
        attention_cuda.get_kernel = poisoned if poison else self.kernel


def find(rehearsal: bool = False) -> Kernels | str:
    """The kernels of this machine, or why there are none."""
    if rehearsal:
        from tests.validation.gpu import rehearsal as emulated

        return Kernels("cpu", emulated.kernel, emulated.launch, ("sm_90a", "sm_80"), rehearsal=True)
    library = native_libs.cuda()
    if isinstance(library, Missing):
        return str(library)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    return Kernels("cuda", attention_cuda.get_kernel, cuda_peers.launch, ("sm_90a", "sm_80") if hopper else ("sm_80",))


def _poisoned(kernel: Kernel, direction: str) -> Kernel:
    """The outputs are (o, lse) behind q, k, v, and (dq, dk, dv) behind seven tensors."""

    def run(*arguments: Any) -> None:
        outputs: tuple[Tensor, ...] = arguments[3:5] if direction == "forward" else arguments[7:10]
        for x in outputs:
            x.fill_(math.nan)
        kernel(*arguments)

    return run


@contextmanager
def deterministic() -> Iterator[None]:
    """Sums in a fixed order; and torch fills what it allocates with NaN, or the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def served(kernels: Kernels, op: str) -> bool:
    """Whether the library has the op; the collectives came later than attention."""
    return kernels.rehearsal or hasattr(torch.ops.shardlib_cuda, op)
