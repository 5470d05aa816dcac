"""A process that seems to have a GPU: fake CUDA tensors, meshes on them, and a rank with a fake process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from shardlib import Mesh, ShardedTensor
from shardlib.distributed import world
from shardlib.ops.collectives.transport.shm_world import Session
from shardlib.sharding.layout import Layout
from shardlib.tensor import rank_checks
from shardlib.tensor.local_shards import is_cpu_scalar
from shardlib.tensor.sharded_tensor import wrap
from shardlib.tensor.tensor_meta import Form
from tests.validation.fakecuda.guard import stand_in

CUDA = torch.device("cuda", 0)


@contextmanager
def gpu() -> Iterator[FakeTensorMode]:
    """Tensors made inside are fake; those on cuda may be, and meshes too."""
    stand_in()
    with ExitStack() as stack:
        told = ("current_device", 0), ("device_count", 8), ("set_device", None), ("get_device_name", "a fake one")
        for name, value in told:
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
        # A fake number on the CPU has no value.
        there = lambda x, mesh: torch.full(x.shape, 1, dtype=x.dtype, device=mesh.device) if is_cpu_scalar(x) else x
        for module in ("shardlib.eager.prepare", "shardlib.jit.call.generated_glue"):
            stack.enter_context(mock.patch(f"{module}.place_scalar", there))
        stack.enter_context(mock.patch("shardlib.jit.call.execute.refuse_overlaps"))  # nor an address
        for module in ("shardlib.jit.jit", "shardlib.nn.forward"):  # fake tensors are no mistake here
            stack.enter_context(mock.patch(f"{module}.refuse_recorders"))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(mock.patch.object(torch._subclasses.fake_tensor.log, "exception"))  # it raises as well
        # An op without a fake form would run on zeros, which takes a real device.
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False))


def cuda_mesh(rules: Mapping[str, Any] | None = None, /, **axes: int) -> Mesh:
    """A mesh of GPUs, of this process or of its fake ranks."""
    with available():
        return Mesh(**axes, rules=rules, device="cuda")


@contextmanager
def available() -> Iterator[None]:
    """torch says that it has a GPU: functions are traced on it, which autograd does not bear."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        yield


@contextmanager
def ranks(rank: int, size: int) -> Iterator[None]:
    """This process is a rank of `size` whose collectives move nothing; it says that its backend is NCCL."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(dist, "get_backend", return_value="nccl"))
            stack.enter_context(mock.patch.dict(os.environ, SHARDLIB_CHECK="off"))  # nor to say what values they have
            stack.enter_context(mock.patch.object(world, "_user_timeout", return_value=None))  # NCCL's is not here
            stack.enter_context(
                mock.patch("shardlib.compiler.codegen.distributed.compare_programs")
            )  # the others are not there to agree
            stack.enter_context(mock.patch("shardlib.distributed.torch_waits.run_watched", lambda task, what: task()))
            stack.enter_context(
                mock.patch.object(rank_checks, "digest", return_value=0)
            )  # constants have no values either
            stack.enter_context(mock.patch.object(Session, "_meet", _alone))
            stack.enter_context(mock.patch.object(world, "_new_device_mesh", _really(world._new_device_mesh)))
            yield
    finally:
        dist.destroy_process_group()


def _really(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same with tensors that have values: a grid of ranks is read on the host."""

    def made(*args: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args)

    return made


def _alone(session: Session, size: int, device: str) -> tuple[dict[int, str], dict[int, str]]:
    assert device == "cuda", "GPUs share no host memory"
    return dict.fromkeys(range(size), "its tensors are on cuda"), {}


def on_gpu(x: Any) -> Any:
    """A pytree with its tensors as fake ones on the GPU, of the same strides."""

    def move(t: Tensor) -> Tensor:
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
        return made.requires_grad_(t.requires_grad)

    return pytree.tree_map_only(Tensor, move, x)


def placed(x: Tensor, layout: Layout, mesh: Mesh) -> ShardedTensor:
    """A tensor of x's shape and dtype, laid out so."""
    coords: Sequence[Any] = mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(mesh.rank)]
    pieces = [torch.empty(layout.local_shape(c), dtype=x.dtype, device="cuda") for c in coords]
    first = pieces[0]  # fake pieces are none that a user could give
    return wrap(Form.intern(layout, mesh, first.dtype, first.device), tuple(pieces))
