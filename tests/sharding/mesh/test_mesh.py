"""The mesh as a value: coordinates, groups, rules, text, the current mesh, the three kinds."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardlib.core.errors import ShardingError
from shardlib.jit.shard import shard
from shardlib.sharding.mesh.axis import Axis
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from tests.helpers.ranks import apart, heard, run_ranks


def test_axes_are_ordered_and_the_right_most_varies_fastest():
    mesh = Mesh(pod=2, data=3, tensor=2)
    assert mesh.size == 12
    assert mesh.axis_names == ("pod", "data", "tensor")
    assert dict(mesh.axes) == {"pod": 2, "data": 3, "tensor": 2}
    assert mesh.coords(7) == {"pod": 1, "data": 0, "tensor": 1}
    assert list(mesh.coords(7)) == ["pod", "data", "tensor"]
    assert [mesh.rank_of(c) for c in mesh.all_coords()] == list(range(12))
    assert mesh.all_coords() == [mesh.coords(rank) for rank in range(12)]
    assert mesh.axis("data") == Axis("data", 3)
    assert (mesh.kind, mesh.device, mesh.rank) == ("virtual", "cpu", 0)


def test_a_dict_of_axes_is_the_same_mesh():
    assert Mesh({"data": 2, "tensor": 4}) == Mesh(data=2, tensor=4)
    assert Mesh({"data": 2}, tensor=4) == Mesh(data=2, tensor=4)


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_group_ranks_agree_with_the_grid(size):
    # Oracle: the grid of ranks as nested indexing.
    mesh = Mesh(a=2, b=size, c=3)
    grid = [[[(i * size + j) * 3 + k for k in range(3)] for j in range(size)] for i in range(2)]
    for coords in mesh.all_coords():
        i, j, k = coords.values()
        assert mesh.group_ranks((mesh.axis("b"),), coords) == [grid[i][jj][k] for jj in range(size)]
        assert mesh.group_ranks((mesh.axis("c"), mesh.axis("a")), coords) == [
            grid[ii][j][kk] for kk in range(3) for ii in range(2)
        ]
        assert mesh.group_ranks((), coords) == [mesh.rank_of(coords)]


def test_group_ranks_over_parts_of_an_axis():
    mesh = Mesh(tensor=8)
    major, minor = Axis("tensor", 2, pre=1, axis_size=8), Axis("tensor", 4, pre=2, axis_size=8)
    assert mesh.group_ranks((major,), {"tensor": 5}) == [1, 5]
    assert mesh.group_ranks((minor,), {"tensor": 5}) == [4, 5, 6, 7]
    assert mesh.group_ranks((minor, major), {"tensor": 5}) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert mesh.group_ranks((major, minor), {"tensor": 5}) == list(range(8))
    assert mesh.group_ranks((Axis("tensor", 2, pre=2, axis_size=8),), {"tensor": 5}) == [5, 7]


# Texts and not meshes: ranks import this module too, and their world has another size.
TEXTS = [
    "Mesh(data=2, rules={'in': 'data'})",
    "Mesh(data=2, tensor=4)",
    "Mesh(tensor=4, data=2)",
    "Mesh(data=2, rules={'batch': 'data'})",
    "Mesh(pod=2, data=2, rules={'batch': ('pod', 'data'), 'seq': None})",
    "Mesh.abstract(data=512, tensor=8, rules={'ff': 'tensor'})",
    "Mesh.abstract(data=2, tensor=4)",
    "Mesh.abstract(data=2, device='cuda')",
    "Mesh({'rules': 2, 'device': 3})",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_pickle_read_back(text):
    mesh = Mesh.parse(text)
    assert str(mesh) == repr(mesh) == text
    assert eval(text, {"Mesh": Mesh}) == mesh
    assert hash(Mesh.parse(text)) == hash(mesh)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_meshes_differ_by_order_rules_kind_and_device():
    assert len(set(map(Mesh.parse, TEXTS))) == len(TEXTS)


def test_the_same_rules_in_another_form_or_order_are_the_same_mesh():
    a = Mesh(pod=2, data=2, rules={"batch": ["pod", "data"], "seq": ("pod",), "ff": ()})
    b = Mesh(pod=2, data=2, rules={"ff": None, "seq": "pod", "batch": ("pod", "data")})
    assert a == b
    assert hash(a) == hash(b)
    assert a.rules == {"batch": ("pod", "data"), "seq": "pod", "ff": None}


def test_a_mesh_cannot_be_changed():
    mesh = Mesh(data=2)
    with pytest.raises(AttributeError):
        mesh.device = "cuda"
    with pytest.raises(TypeError):
        mesh.rules["batch"] = "data"
    with pytest.raises(TypeError):
        mesh.axes["data"] = 3


@pytest.mark.parametrize(
    ("axes", "rules", "fault"),
    [
        ({}, {}, "it has no axis"),
        ({"data": 0}, {}, "axis 'data' has size 0, not a whole number of 1 or more"),
        ({"data": -2}, {}, "axis 'data' has size -2, not"),
        ({"data": 2.0}, {}, "axis 'data' has size 2.0, not"),
        ({"data": True}, {}, "axis 'data' has size True, not"),
        ({"data-parallel": 2}, {}, "axis 'data-parallel' is not an identifier"),
        ({"in": 2}, {}, "axis 'in' is not an identifier"),
        ({3: 2}, {}, "axis 3 is not an identifier"),
        ({"tensor": 2}, {"ff": "tensr"}, "rule 'ff' -> 'tensr': the mesh (tensor=2) has no axis 'tensr'; did you mean"),
        ({"a": 2}, {"ff": ("a", "a")}, "rule 'ff' -> ('a', 'a') uses an axis twice"),
        ({"a": 2}, {"_": "a"}, "rule '_' is not a logical name"),
    ],
)
def test_bad_meshes_are_refused(axes, rules, fault):
    for make in (Mesh, Mesh.abstract):
        with pytest.raises(ShardingError) as error:
            make(axes, rules=rules)
        assert fault in str(error.value)


def test_all_faults_of_a_mesh_come_at_once():
    with pytest.raises(ShardingError) as error:
        Mesh({"data": 0}, data=2, rules={"batch": "dat", "seq": "pod"})
    assert str(error.value) == (
        "Mesh(data=0, data=2, rules={'batch': 'dat', 'seq': 'pod'}) is not a mesh:\n"
        "  * axis 'data' has size 0, not a whole number of 1 or more\n"
        "  * axis 'data' is given twice\n"
        "  * rule 'batch' -> 'dat': the mesh (data=0, data=2) has no axis 'dat'; did you mean 'data'?\n"
        "  * rule 'seq' -> 'pod': the mesh (data=0, data=2) has no axis 'pod'\n"
        "Rule: axes have distinct names (identifiers) and sizes of 1 or more; a rule maps a name to axes\n"
        "Remedy: sizes of 1 or more: Mesh(data=2, tensor=4)"
    )


@pytest.mark.parametrize(
    ("rules", "remedy"),
    [
        ({"batch": "dat"}, 'write it as Mesh(data=2, tensor=4, rules={"batch": "data"})'),
        (
            [("batch", "data"), ("batch", None)],
            "shardlib.integrations.logical_axes.logical_to_mesh(specs, rules, mesh) takes lists with several rules for "
            "a name",
        ),
    ],
)
def test_remedies_of_rules(rules, remedy):
    with pytest.raises(ShardingError) as error:
        Mesh(data=2, rules=rules)
    assert error.value.remedy == remedy


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: Mesh(data=2).axis("dat"), "Mesh(data=2) has no axis 'dat'; did you mean 'data'?"),
        (lambda: Mesh(data=2).coords(2), "Mesh(data=2) has no rank 2:\n  * its ranks are 0 to 1"),
        (lambda: Mesh(data=2).device_mesh, "Mesh(data=2) has no DeviceMesh:\n  * it is virtual"),
        (lambda: Mesh.abstract(data=2).device_mesh, "Mesh.abstract(data=2) has no DeviceMesh:\n  * it is abstract"),
        (lambda: Mesh(data=2).device_mesh, "torchrun --nproc-per-node 2"),
        (lambda: Mesh(data=2, device="tpu"), "a mesh cannot be on device 'tpu'"),
        (lambda: Mesh.parse("Mesh(2"), "'Mesh(2' cannot be read as a mesh"),
        (lambda: Mesh.parse("Grid(data=2)"), "'Grid(data=2)' cannot be read as a mesh"),
        (lambda: Mesh.parse("Mesh(data=open('x'))"), "cannot be read as a mesh"),
        (lambda: Mesh.parse("Mesh(**{})"), "cannot be read as a mesh"),
        (lambda: Mesh(8), "Mesh(8) does not name the axes of a mesh"),
        (lambda: Mesh(2, 4), "Mesh(2, 4) does not name the axes of a mesh"),
        (lambda: Mesh((2, 4), ("data", "tensor")), "Mesh((2, 4), ('data', 'tensor')) does not name the axes"),
        (lambda: Mesh.abstract((2, 4), ("data", "tensor")), "Remedy: write Mesh(data=2, tensor=4), or Mesh({"),
    ],
)
def test_wrong_questions_have_clear_answers(ask, text):
    with pytest.raises(ShardingError) as error:
        ask()
    assert text in str(error.value)


def test_current_mesh_nests_and_is_re_entrant():
    outer, inner = Mesh(data=2), Mesh(tensor=4)
    assert current_mesh() is None
    with outer:
        assert current_mesh() is outer
        with inner, outer:
            assert current_mesh() is outer
            with outer:
                assert current_mesh() is outer
            assert current_mesh() is outer
        assert current_mesh() is outer
        with pytest.raises(RuntimeError, match="inside"), inner:
            raise RuntimeError("inside")
        assert current_mesh() is outer
    assert current_mesh() is None


def test_blocks_of_generators_may_end_out_of_order():
    def block(mesh):
        with mesh:
            yield

    outer, inner = Mesh(data=2), Mesh(data=2)  # equal values, two blocks
    first, second = block(outer), block(inner)
    next(first), next(second)
    first.close()
    assert current_mesh() is inner
    second.close()
    assert current_mesh() is None


def test_threads_do_not_see_one_anothers_mesh():
    seen, barrier = {}, threading.Barrier(2)

    def work(name):
        seen[name, "before"] = current_mesh()
        with Mesh({name: 2}) as mesh:
            barrier.wait(10)
            seen[name] = current_mesh() is mesh
            barrier.wait(10)

    with Mesh(main=2):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_mesh() == Mesh(main=2)
    assert seen == {("a", "before"): None, ("b", "before"): None, "a": True, "b": True}


def test_under_torchrun_a_mesh_is_distributed_and_must_match_the_world_size(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    mesh = Mesh(data=2, tensor=2)
    assert (mesh.kind, mesh.rank) == ("distributed", 3)
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.abstract(data=64).kind == "abstract"
    with pytest.raises(ShardingError) as error:
        Mesh(data=2, tensor=4)
    assert str(error.value) == (
        "Mesh(data=2, tensor=4) does not match the world size:\n"
        "  * the mesh has 8 devices, torch.distributed has 4 ranks\n"
        "Rule: a distributed mesh has one device for every rank\n"
        "Remedy: run with `torchrun --nproc-per-node 8` (in all), make the axes multiply to 4 "
        "(the size -1 of one axis is inferred), or start the script with plain `python` for virtual devices"
    )


@pytest.mark.parametrize(
    ("ranks", "axes", "shape"),
    [
        (None, {"data": -1, "tensor": 2}, (1, 2)),
        (1, {"data": -1}, (1,)),
        (8, {"data": -1}, (8,)),
        (8, {"data": -1, "tensor": 2}, (4, 2)),
        (8, {"pod": 2, "data": -1, "tensor": 4}, (2, 1, 4)),
        (6, {"data": 2, "tensor": -1}, (2, 3)),
    ],
)
def test_one_size_is_inferred_from_the_ranks(monkeypatch, ranks, axes, shape):
    _start_ranks(monkeypatch, ranks)
    mesh = Mesh(axes, rules={"batch": "data"})
    assert tuple(mesh.shape.values()) == shape
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("ranks", "axes", "faults"),
    [
        (8, {"a": -1, "b": -1}, ["the axes 'a', 'b' have size -1: one size at most can be inferred"]),
        (None, {"a": -1, "b": -1}, ["the axes 'a', 'b' have size -1: one size at most can be inferred"]),
        (8, {"a": -1, "b": 3, "c": 2}, ["axis 'a' has size -1, and the other axes (3 * 2) do not divide 8 ranks"]),
        (2, {"a": -1, "b": 4}, ["axis 'a' has size -1, and the other axes (4) do not divide 2 ranks"]),
        (8, {"a": -1, "b": 0}, ["axis 'b' has size 0, not a whole number of 1 or more"]),
        (8, {"a": -1.0}, ["axis 'a' has size -1.0, not a whole number of 1 or more"]),
    ],
)
def test_sizes_that_cannot_be_inferred_are_refused(monkeypatch, ranks, axes, faults):
    _start_ranks(monkeypatch, ranks)
    with pytest.raises(ShardingError) as error:
        Mesh(axes)
    assert error.value.what == f"Mesh({', '.join(f'{name}={size}' for name, size in axes.items())}) is not a mesh"
    assert list(error.value.offenders) == faults


def test_an_abstract_mesh_has_no_ranks_to_infer_a_size_from():
    with pytest.raises(ShardingError, match="axis 'data' has size -1, not a whole number of 1 or more"):
        Mesh.abstract(data=-1)


def _start_ranks(monkeypatch, count):
    """Sets the environment of a rank; of a plain process for None."""
    if count is not None:
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_bad_timeout_is_refused(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SHARDLIB_TIMEOUT", text)
    with pytest.raises(ShardingError, match=f"SHARDLIB_TIMEOUT='{text}' is not a time"):
        _ = Mesh(data=1).device_mesh


def groups_of_four():
    mesh = Mesh(rows=2, columns=2, rules={"batch": "rows"})  # names of its own: ranks keep their groups for other tests
    os.environ["SHARDLIB_TIMEOUT"] = "30"
    device_mesh = mesh.device_mesh
    del os.environ["SHARDLIB_TIMEOUT"]
    assert mesh.kind == "distributed"
    assert mesh.rank == dist.get_rank()
    assert list(device_mesh.get_coordinate()) == list(mesh.coords(mesh.rank).values())
    for name in mesh.axis_names:
        ranks = torch.zeros(4)
        ranks[mesh.rank] = 1
        group = device_mesh.get_group(name)
        dist.all_reduce(ranks, group=group)
        assert ranks.nonzero().flatten().tolist() == mesh.group_ranks((mesh.axis(name),), mesh.coords(mesh.rank))
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 30
    assert Mesh(rows=2, columns=2).device_mesh is device_mesh
    assert Mesh.from_device_mesh(device_mesh, rules={"batch": "rows"}) == mesh
    whole = Mesh(one=1, all=4).device_mesh
    assert (whole["one"].size(), whole["all"].size()) == (1, 4)
    plain = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    assert Mesh.from_device_mesh(plain).device_mesh is plain
    for bad, fault in ((init_device_mesh("cpu", (4,)), "no names"), (device_mesh["rows"], "of 4")):
        with pytest.raises(ShardingError, match=rf"(?s)cannot become a Mesh.*{fault}"):
            Mesh.from_device_mesh(bad)
    with pytest.raises(ShardingError, match=r"the mesh has 8 devices, torch.distributed has 4 ranks"):
        Mesh(data=2, tensor=4)


@pytest.mark.ranks
def test_the_groups_of_four_ranks():
    run_ranks(groups_of_four, 4)


def _alone(pipe):
    """As under torchrun, before anybody has made a process group."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    mesh = Mesh(data=1)
    found = [dist.is_initialized()]
    found += [mesh.device_mesh["data"].size(), dist.get_backend()]
    first = mesh.device_mesh
    dist.destroy_process_group()
    found.append(mesh.device_mesh is first)  # the groups went with the process group
    dist.destroy_process_group()
    pipe.send(found)


def _one_rank(pipe):
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with Mesh(data=-1):
        x = shard(torch.arange(3.0), "n@data")
    pipe.send((x + x).full_tensor().tolist())


@pytest.mark.ranks
def test_a_world_of_one_rank_computes():
    process, pipe = apart(_one_rank)
    assert heard(pipe) == [0, 2, 4]
    process.join()


@pytest.mark.ranks
def test_a_distributed_mesh_initializes_the_process_group_when_needed():
    process, pipe = apart(_alone)
    assert heard(pipe) == [False, 1, "gloo", False]
    process.join()
