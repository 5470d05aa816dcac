"""Plans for GPUs on a machine that has none, and programs of tensors that are not all on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.ops.random import op as draw
from shardlib.ops.random import philox
from tests.validation.fakecuda.gpu import available, cuda_mesh
from tests.validation.fakecuda.programs import world
from tests.validation.fakecuda.watch import Seen

aten = torch.ops.aten
CLOSED_OVER = torch.arange(8.0)


def everywhere(x: Tensor, w: Tensor) -> Tensor:
    """Constants of every kind, where a GPU's programs often make them."""
    y = F.layer_norm(x @ w, (8,)) + torch.arange(8) + CLOSED_OVER
    y = F.logsigmoid(y) + torch.tensor([0.5] * 8, device=x.device) + torch.rand_like(y)
    y[y > 0] = 2.0
    return (y.cpu() * torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 8)).sum()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a mesh may be on a GPU")
def test_a_mesh_of_gpus_says_how_to_plan_without_one() -> None:
    with pytest.raises(ShardingError) as error:
        Mesh(data=2, device="cuda")
    assert str(error.value).splitlines() == [
        "a mesh cannot be on device 'cuda':",
        "  * torch sees no GPU in this process",
        'Remedy: device="cpu", or plan without a GPU: Mesh.abstract(..., device="cuda"), and step.plan(...) of meta or '
        "CPU tensors",
    ]


@pytest.mark.long
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_plans_for_gpus_from_anywhere(device: str) -> None:
    """Values are as CUDA has them: statistics of 16-bit rows in float32, no buffer of log_sigmoid, one device."""
    x, w = (torch.empty(8, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
    with Mesh.abstract(data=4, device="cuda"):
        plan = sl.jit(sl.value_and_grad(everywhere, argnums=1), in_specs=("_@data _", None)).plan(x, w)
    nodes = list(plan.compiled.traced.graph.graph.nodes)
    found = [v for n in nodes for v in torch.utils._pytree.tree_leaves(n.meta.get("val")) if isinstance(v, Tensor)]
    assert {v.device for v in found} == {torch.device("cuda", 0)}
    assert {n.kwargs["device"] for n in nodes if "device" in n.kwargs} == {torch.device("cuda", 0)}
    by_target = {n.target: n.meta["val"] for n in nodes}
    assert [v.dtype for v in by_target[aten.native_layer_norm.default]] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    assert by_target[aten.log_sigmoid_forward.default][1].shape == (0,)
    assert aten.index_put.default not in by_target
    assert not any(n.target is aten._to_copy.default and "device" in n.kwargs for n in nodes)


def test_rules_are_those_of_the_device() -> None:
    """A buffer that CPUs fill is empty on GPUs: a rule that was made for the one is not taken for the other."""
    step = sl.jit(sl.value_and_grad(everywhere, argnums=1), in_specs=("_@data _", None))
    for device in ("cpu", "cuda", "cpu"):
        with Mesh.abstract(data=4, device=device):
            plan = step.plan(*(torch.empty(8, 8, device="meta") for _ in range(2)))
        (forward,) = (op for op in plan.compiled.graph.ops if op.target is aten.log_sigmoid_forward.default)
        assert [v is not None and v.shape for v in forward.results][1] == ((8, 8) if device == "cpu" else (0,))


def test_the_same_plan_for_the_cpu_stays_as_it_was() -> None:
    x, w = (torch.empty(8, 8, device="meta") for _ in range(2))
    with Mesh.abstract(data=4):
        plan = sl.jit(everywhere, in_specs=("_@data _", None)).plan(x, w)
    devices = {n.meta["val"].device.type for n in plan.compiled.traced.inputs}
    assert devices == {"cpu"}


def test_such_a_program_runs_without_copies_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    with world(seen, "everywhere"), cuda_mesh(data=2):
        with pytest.raises(ShardingError, match=r"CLOSED_OVER of shape \[8\] is on cpu"):
            sl.jit(everywhere)(*(torch.empty(8, 8, device="cuda") for _ in range(2)))
        monkeypatch.setitem(globals(), "CLOSED_OVER", torch.empty(8, device="cuda"))
        x, w = (torch.empty(8, 8, device="cuda") for _ in range(2))
        sl.jit(sl.value_and_grad(everywhere, argnums=1), in_specs=("_@data _", None))(x, w)
    assert not seen.faults
    assert seen.counts["programs"] == 1


def test_an_op_that_only_the_cpu_has_is_named() -> None:
    class Only(torch.utils._python_dispatch.TorchDispatchMode):
        """Stands for a kernel that refuses fake CUDA tensors."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.relu.default and args[0].device.type == "cuda":
                raise NotImplementedError("no such kernel on cuda")
            return func(*args, **(kwargs or {}))

    with Mesh.abstract(data=2, device="cuda"), Only(), pytest.raises(ShardingError) as error:
        sl.jit(lambda x: x.relu()).plan(torch.empty(4, device="meta"))
    text = str(error.value)
    assert text.startswith("aten.relu.default cannot be planned for this mesh's devices:")
    assert "no such kernel on cuda" in text
    assert "test_planning.py" in text


def test_tensors_on_two_devices_are_refused_on_the_users_line() -> None:
    """Where a GPU is, the function is traced on it, and torch mixes no devices."""
    with world(Seen(), ""), cuda_mesh(data=2), available(), pytest.raises(ShardingError) as error:
        sl.jit(lambda x: x + torch.arange(8))(torch.empty(4, 8, device="cuda"))
    text = str(error.value)
    assert text.startswith("the traced function reads tensors on two devices at once:")
    assert "test_planning.py" in text
    assert "torch.arange(n, device=x.device)" in text


def test_a_mask_and_a_number_fill_without_counting() -> None:
    """`x[mask] = number`, jitted and not, on the CPU too."""
    x, mask, value = torch.randn(5, 6), torch.rand(5) > 0.5, torch.tensor(3.0)

    def write(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        y = x.clone()
        y[mask] = 2.0
        y[:, mask.repeat(2)[:6]] = value
        y[:2, x[0] > 0] = 1
        return y

    expected = write(x, mask, value)
    with Mesh(data=2):
        step = sl.jit(write, in_specs=("_@data _", None, None))
        assert torch.equal(step(x, mask, value).full_tensor(), expected)
        nodes = step.plan(x, mask, value).compiled.traced.graph.graph.nodes
        assert not any(n.target is aten.index_put.default for n in nodes)
        placed = sl.shard(x, "_@data _"), sl.shard(mask, "_@data"), value
        assert torch.equal(write(*placed).full_tensor(), expected)
        ints = sl.shard(torch.arange(5), "_@data")
        with pytest.raises((RuntimeError, ShardingError)):
            ints[mask] = torch.tensor(1.5)  # torch writes no other dtype


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """The ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_keys_are_written_by_kernels_not_copied() -> None:
    """A copy from the CPU would wait for the GPU; meta stands for another device here."""
    before = torch.get_rng_state()
    here = draw.call_key(device=torch.device("cpu"))
    torch.set_rng_state(before)
    with Called() as called:
        there = draw.call_key(device=torch.device("meta"))
        philox.words(3, 4, torch.empty(5, dtype=torch.int64, device="meta"))
    assert (there.device.type, there.dtype, there.shape) == ("meta", here.dtype, here.shape)
    assert aten.full.default in called.ops
    assert not {aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default} & set(called.ops)
