"""Which collectives of GPUs run on shardlib's kernels: what `choose` says, and which groups have peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardlib.core.errors import ShardingError
from shardlib.ops.collectives import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardlib.ops.collectives.transport import groups as transport_groups
from shardlib.ops.collectives.transport.cuda_peers import Peers
from shardlib.ops.collectives.transport.groups import GroupHandle
from shardlib.ops.collectives.transport.request import CollectiveRequest
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh
from tests.kernels.collectives import make_group

OPS: dict[str, Any] = {
    m.__name__.rpartition(".")[2]: m for m in (all_gather, all_reduce, all_to_all, ppermute, reduce_scatter)
}
KERNELS = [op for op in OPS if op != "ppermute"]


@pytest.fixture(autouse=True)
def _ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", ",".join(f"{op}=cuda" for op in KERNELS))


# --- what choose says -------------------------------------------------------------------------------------------------

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def chosen(op: str, setting: str, nbytes: int, even: bool, dtype: torch.dtype, kind: str, on: str, n: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_OPS", setting)
        return str(OPS[op].choose(CollectiveRequest(nbytes, even, dtype, kind, on, n)))


def hint(op: str) -> str:
    return f"(not yet measured on a GPU: SHARDLIB_OPS={op}=cuda takes shardlib's kernels)"


SMALL_ONE, STAGED = (
    "a small message: its flags travel in it",
    "peers read it a chunk at a time from memory that all share",
)
TWO = "each member adds up a part, then gathers the others'; "


@pytest.mark.parametrize(
    ("op", "nbytes", "even", "dtype", "kind", "n", "expected"),
    [
        ("all_gather", 64 << 10, True, F64, "", 4, f"cuda/packets: {SMALL_ONE}"),
        ("all_gather", 65 << 10, True, F64, "", 4, f"cuda/staged: {STAGED}"),
        ("all_gather", 64 << 10, False, F64, "", 4, "cuda: sizes differ: the longest message decides the form"),
        ("reduce_scatter", 64 << 10, True, BF16, "sum", 4, f"cuda/packets: {SMALL_ONE}"),
        ("all_to_all", 65 << 10, True, F64, "", 4, f"cuda/staged: {STAGED}"),
        ("all_reduce", 16 << 10, True, F32, "sum", 4, f"cuda/packets: {SMALL_ONE}"),
        ("all_reduce", 64 << 10, True, F32, "sum", 4, f"cuda/staged: {STAGED}"),
        ("all_reduce", 72 << 10, True, F32, "sum", 8, f"cuda/packets: {TWO}{SMALL_ONE}"),
        ("all_reduce", 1 << 20, True, F32, "sum", 8, f"cuda/staged: {TWO}{STAGED}"),
        (
            "all_reduce", 64, True, F32, "max", 4,
            "torch/exchange: nccl loses NaNs in a max (not shardlib's kernels: the kernels form sums, no max)",
        ),
        (
            "reduce_scatter", 64, True, F64, "sum", 4,
            "torch/native: sizes are equal"
            " (not shardlib's kernels: the kernels add float32, bfloat16 and float16, not float64)",
        ),
        (
            "all_gather", 64, True, F64, "", 17,
            "torch/native: sizes are equal (not shardlib's kernels: the kernels take up to 16 ranks, not 17)",
        ),
    ],
)  # fmt: skip
def test_asked_for_by_name(
    op: str, nbytes: int, even: bool, dtype: torch.dtype, kind: str, n: int, expected: str
) -> None:
    assert chosen(op, f"{op}=cuda", nbytes, even, dtype, kind, "cuda", n) == expected


@pytest.mark.parametrize("on", ["nccl", "cuda"])
@pytest.mark.parametrize(
    ("op", "dtype", "kind", "expected"),
    [
        ("all_gather", F32, "", f"torch/native: sizes are equal {hint('all_gather')}"),
        ("reduce_scatter", F32, "sum", f"torch/native: sizes are equal {hint('reduce_scatter')}"),
        ("reduce_scatter", F64, "sum", "torch/native: sizes are equal"),
        ("all_reduce", BF16, "sum", f"torch/native: the backend reduces this dtype {hint('all_reduce')}"),
        ("all_reduce", BF16, "max", "torch/exchange: nccl loses NaNs in a max"),
        ("all_to_all", F32, "", f"torch/exchange: pieces are sent pairwise {hint('all_to_all')}"),
        ("ppermute", F32, "", "torch/exchange: tensors are sent pairwise"),
    ],
)
def test_nccl_unless_the_kernels_are_asked_for(on: str, op: str, dtype: torch.dtype, kind: str, expected: str) -> None:
    assert chosen(op, "", 64, True, dtype, kind, on, 4) == expected
    assert chosen(op, "torch", 64, True, dtype, kind, on, 4) == expected.partition(" (not yet")[0]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(
    ("backend", "on", "reason"),
    [
        ("cuda", "nccl", "the ranks made this group before SHARDLIB_OPS asked for the kernels"),
        ("cuda", "gloo", "the members speak over gloo"),
        ("cuda", "shm", "there is no cuda backend of {op} for CPU tensors"),
        ("shm", "nccl", "the members speak over nccl"),
        ("shm", "cuda", "the members speak over nccl"),
    ],
)
def test_what_is_asked_for_and_cannot_run_is_refused(op: str, backend: str, on: str, reason: str) -> None:
    with pytest.raises(ShardingError) as caught:
        chosen(op, f"{op}={backend}", 64, True, F32, "sum" if "reduce" in op else "", on, 4)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"SHARDLIB_OPS asks for {op}={backend}, which cannot run here:"
    assert lines[1] == "  * " + reason.format(op=op)


# --- who gets peers ---------------------------------------------------------------------------------------------------


class Told:
    """A world's turns and its store, in which the other rank has said `other`."""

    other = ""
    room, meetings = "world", 0

    def store(self) -> Told:
        return self

    def watcher(self) -> None:
        return None

    def exchange(
        self, room: str, value: str, ranks: Sequence[int], seconds: float, what: str, watcher: None
    ) -> dict[int, str]:
        return {r: self.other if r else value for r in ranks}


class GpuMesh:
    """Two ranks with a GPU each, as far as `_groups` looks."""

    device, rank, size, kind, device_mesh = "cuda", 0, 2, "distributed", None

    def all_axes_coords(self, rank: int) -> dict[str, int]:
        return {"x": rank}

    def group_ranks(self, axes: tuple[Axis, ...], coords: dict[str, int]) -> list[int]:
        return [1, 0]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GroupHandle]]:
    """The groups that were opened, without GPUs."""
    groups: list[GroupHandle] = []
    peers = make_group(2)

    def open_group(handle: GroupHandle, device: torch.device) -> Peers | str:
        groups.append(handle)
        return peers

    monkeypatch.setattr(transport_groups, "open_group", open_group)
    monkeypatch.setattr(transport_groups.turns, "current", Told)
    monkeypatch.setattr(transport_groups, "_peers", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield groups
    transport_groups._peers.clear()


MESH = cast(Mesh, GpuMesh())
HANDLE = GroupHandle((0, 1), None, 0, "nccl")


def test_a_group_is_opened_once(opened: list[GroupHandle]) -> None:
    first = transport_groups._open_peers(MESH, HANDLE, ((0, 1),))
    assert transport_groups._open_peers(MESH, HANDLE, ((0, 1),)) is first
    transport_groups._open_peers(MESH, HANDLE, ((1, 0),))  # another order is another group
    assert len(opened) == 2
    assert GroupHandle((0, 1), None, 0, "nccl", peers=first).transport == "cuda"
    assert HANDLE.transport == "nccl"
    transport_groups._peers["another world", ((0, 1),)] = first
    transport_groups._forget_worlds()  # a new world's session does
    assert {world for world, _ in transport_groups._peers} == {dist.group.WORLD}


def test_groups_are_made_with_peers_if_they_are_asked_for(
    opened: list[GroupHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_groups, "_session", lambda mesh: None)
    monkeypatch.setattr(transport_groups, "_process_group", lambda *_: None)
    monkeypatch.setattr(transport_groups, "_handles", {})
    axes = (Axis("x", 2, 1, 4),)
    handle = transport_groups.group_for(MESH, axes)
    assert handle.peers is transport_groups._peers[dist.group.WORLD, ((1, 0),)]
    assert (handle.ranks, handle.position, handle.by_rank, handle.transport) == ((1, 0), 1, (1, 0), "cuda")
    assert [group.ranks for group in opened] == [(1, 0)]
    monkeypatch.setattr(transport_groups, "_handles", {})
    monkeypatch.setenv("SHARDLIB_OPS", "")
    assert transport_groups.group_for(MESH, axes).peers is None
    assert len(opened) == 1


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_no_rank_goes_on_when_one_has_no_peers(
    whose: str, opened: list[GroupHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = "rank 1: an old card is older than the kernels' sm_80"
    monkeypatch.setenv("SHARDLIB_OPS", "attention=cuda,all_to_all=cuda")
    if whose == "ours":
        monkeypatch.setattr(transport_groups, "open_group", lambda handle, device: fault)
    else:
        monkeypatch.setattr(Told, "other", fault)
    with pytest.raises(ShardingError) as caught:
        transport_groups._open_peers(MESH, HANDLE, ((0, 1),))
    assert str(caught.value).splitlines() == [
        "SHARDLIB_OPS asks for all_to_all=cuda, which cannot run here:",
        f"  * {fault}",
        "Rule: a backend that is asked for by name is never replaced by another one",
        "Remedy: mend that, or take all_to_all=cuda out of SHARDLIB_OPS",
    ]
    assert not transport_groups._peers


@pytest.mark.parametrize(
    ("setting", "size", "asks"),
    [
        ("", 2, False),
        ("torch", 2, False),
        ("attention=cuda,ppermute=torch,all_gather=torch", 2, False),
        ("all_gather=torch,all_reduce=cuda", 2, True),
        ("all_gather=cuda", 1, False),
        ("all_gather=cuda", 16, True),
        ("all_gather=cuda", 17, False),
    ],
)
def test_when_peers_are_asked_for(setting: str, size: int, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", setting)
    assert transport_groups._needs_peers(MESH, size) == asks
    on_cpus = GpuMesh()
    on_cpus.device = "cpu"
    assert not transport_groups._needs_peers(cast(Mesh, on_cpus), size)


def test_a_plan_is_told_before_the_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = (Axis("x", 2),)
    assert transport_groups.predict_transport(MESH, axes) == ("cuda", "")
    monkeypatch.setenv("SHARDLIB_OPS", "")
    assert transport_groups.predict_transport(MESH, axes) == ("nccl", "")
