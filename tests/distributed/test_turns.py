"""What ranks are told when they are out of step, have different values, or are no ranks; plain torch is the oracle."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardlib as sl
from shardlib.distributed import turns, world
from tests.helpers.ranks import TRANSPORTS, Pool, RankError, only, run_ranks, speak
from tests.validation.stress import killed_ranks, mismatched_ranks

pytestmark = pytest.mark.ranks


def alone(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """In processes of their own, for what leaves them out of step."""
    with closing(Pool(n)) as pool:
        return pool.run(fn, *args)


def refused(call: Callable[[], Any]) -> str:
    """What the error says; "" when there is none."""
    try:
        call()
    except sl.ShardingError as error:
        return str(error)
    return ""


# Out of step.


@pytest.mark.long
@pytest.mark.sampled(3, first=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_slip_are_refused_with_both_lines(transport):
    wrong, _ = mismatched_ranks.campaign(4, transport, seed=7)
    assert wrong == []


def other_numbers(transport: str) -> str:
    """A learning rate that goes apart after some steps, without a new program."""
    speak(transport)
    with sl.Mesh(x=2):
        w = sl.shard(torch.arange(8.0), "a@x")
        step = sl.jit(lambda w, lr, n: (w * lr).sum() * n)
        for lr in (0.1, 0.2):
            step(w, lr, 2)
        assert not step.retraces
        return refused(lambda: step(w, 0.3 + dist.get_rank(), 2))


@pytest.mark.long
@pytest.mark.sampled(3, first=2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_numbers_that_differ_are_told_at_any_call(transport):
    for text in alone(other_numbers, 2, transport):
        assert text.startswith("the ranks call one program with different numbers"), text
        for rank, lr in enumerate(("0.3", "1.3")):
            assert re.search(rf"rank {rank} is in .*<lambda> with {lr}, 2, called at .*test_turns.py:\d+", text), text
        assert "Remedy: compute the number alike everywhere" in text


def one_extra() -> str:
    """The minimal case: a log line on one rank."""
    os.environ["SHARDLIB_OPS"] = ""
    with sl.Mesh(x=2):
        w = sl.shard(torch.arange(8.0), "a@x")
        step = sl.jit(lambda w: (w * w).sum())
        step(w), w.full_tensor()
        dist.barrier()

        def program() -> None:
            if dist.get_rank() == 0:
                w.full_tensor()  # the log line
            float(step(w))  # the step

        return refused(program)


@pytest.mark.long
def test_one_extra_collective():
    for text in alone(one_extra, 2):
        assert text.startswith("the ranks are out of step:\n  * rank 0 is in all_gather of f32[8@x]")
        lines = text.split("\n")
        assert "test_turns.py:" in lines[1]
        assert "test_turns.py:" in lines[2]
        assert lines[2].startswith("  * rank 1 is in all_reduce of f32[+x] of <lambda>")


# One rank differs, in a world of its own: what it does, and what both ranks are told.


def same_function_backward(rank: int) -> Any:
    """Two calls of one program, gone back through in another order."""
    w, (a, b) = sl.shard(torch.eye(4), "a b").requires_grad_(), (sl.shard(torch.randn(8, 4), "a@x b") for _ in "ab")
    step = sl.jit(lambda x, w: ((x @ w) ** 2).sum())
    losses = [step(a, w), step(b, w)]
    return [torch.autograd.grad(loss, [w]) for loss in (losses if rank else losses[::-1])]


def two_programs_on_one_line(rank: int) -> Any:
    x = sl.shard(torch.randn(8, 4), "a@x b")
    both = [sl.jit(lambda x: x.sum()), sl.jit(lambda x: (x * x).sum())]
    for step in both:
        step(x)
    return [step(x) for step in (both if rank else both[::-1])]


def other_setting(rank: int) -> Any:
    x = sl.shard(torch.randn(8, 4), "a@x b")
    x.full_tensor()
    os.environ["SHARDLIB_OPS"] = "torch" if rank else "all_reduce=torch"
    return (x * 3).sum().full_tensor()


def other_rules(rank: int) -> Any:
    with sl.Mesh(x=2, rules={"batch": "x"} if rank else {"batch": None}):
        return sl.shard(torch.ones(8, 4), "batch b")


def _three() -> dict[str, Any]:
    return {name: sl.shard(torch.arange(8.0) * k, "a@x") for k, name in enumerate("abc", 1)}


def other_tensors(rank: int) -> Any:
    """As the items of a set come, in another order in each process."""
    step, xs = sl.jit(lambda x: x.sum()), _three()
    return [float(step(xs[name])) for name in ("ab" if rank else "ba")]


def other_tensors_outside(rank: int) -> Any:
    xs = _three()
    return [float(xs[name].sum()) for name in ("ab" if rank else "ba")]


def one_log_more(rank: int) -> Any:
    """By a function that all go through, so that the line is the same."""

    def log(x: Any) -> float:
        return float(x.full_tensor().sum())

    x = _three()["a"]
    return [log(x * k) for k in ((2, 3, 3) if rank else (1, 2, 3))]


def other_rates(rank: int) -> Any:
    """An optimizer's step makes no rank meet another; what it leaves does."""
    w = torch.nn.Parameter(_three()["a"])
    opt = torch.optim.SGD([w], lr=0.1 * (rank + 1))
    (w * 1.0).sum().backward()
    opt.step()
    return w.full_tensor()


def other_factors(rank: int) -> Any:
    return (_three()["a"] * (2.0 + rank)).full_tensor()


def a_write_more(rank: int) -> Any:
    x = _three()["a"]
    if rank:
        x.mul_(2)
    return x.full_tensor()


def a_write_more_through_a_view(rank: int) -> Any:
    x = sl.shard(torch.arange(8.0).view(4, 2), "a@x b")
    column = x[:, 1]
    if rank:
        column.mul_(2)
    return x.full_tensor()


def a_batch_less(rank: int) -> Any:
    step = sl.jit(lambda x: x.sum(), in_specs=("a@x",))
    return [float(step(torch.arange(8.0) * i)) for i in ((0, 1, 3) if rank else (0, 1, 2, 3))]


def other_rates_outside(rank: int) -> Any:
    """Plain weights, which each rank steps by itself."""
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sl.jit(lambda x: model(x).square().sum(), in_specs=("a@x b",))
    for i in range(3):
        opt.param_groups[0]["lr"] = 0.1 * (1 + rank * i)
        step(torch.ones(4, 4)).backward()
        opt.step()
    return step(torch.ones(4, 4))


ORIGIN = r" with tensors of origin [0-9a-f]+, called at .*test_turns.py:\d+"
ALL_REDUCE = r"rank (\d) is in all_reduce of f32\[.*\+x\] of "
ALL_GATHER = ALL_REDUCE.replace("all_reduce", "all_gather").replace(r"\+x", "@x")
DIFFERENT: dict[Callable[[int], Any], str] = {
    same_function_backward: ALL_REDUCE
    + r"the backward of <lambda> as called in place \d+\.\d+, called at .*test_turns.py:",
    two_programs_on_one_line: ALL_REDUCE + r"<lambda>, called at .* \[[0-9a-f]{16}\]",
    other_tensors: ALL_REDUCE + "<lambda>" + ORIGIN,
    other_tensors_outside: ALL_REDUCE + "sum" + ORIGIN,
    a_batch_less: ALL_REDUCE + "<lambda>" + ORIGIN,
    other_rates_outside: ALL_REDUCE + "<lambda>" + ORIGIN,
    **dict.fromkeys((one_log_more, other_rates, other_factors, a_write_more), ALL_GATHER + "redistribute" + ORIGIN),
    a_write_more_through_a_view: ALL_GATHER.replace("@x", "@x, 2") + "redistribute" + ORIGIN,
    other_setting: r"rank (1) runs sum .*SHARDLIB_OPS='torch'.*SHARDLIB_OPS='all_reduce=torch'",
    other_rules: r"rank (\d) is in comparing the values of x .* \(shard\(x, 'batch b'\) as \[8(?:@x)?, 4\] on Mesh",
}


def each_in_a_world(port: int, transport: str) -> list[str]:
    """What each of `DIFFERENT` is told."""
    rank, errors = dist.get_rank(), []
    for i, case in enumerate(DIFFERENT):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"{i}", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        speak(transport)
        torch.manual_seed(0)
        with sl.Mesh(x=2):
            errors.append(refused(lambda case=case: case(rank)))  # type: ignore[misc]
    return errors


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_differ_are_told_how(transport):
    with closing(Pool(2)) as pool:
        for errors in pool.run(each_in_a_world, pool.store.port, transport):
            for (case, pattern), text in zip(DIFFERENT.items(), errors, strict=True):
                ranks = re.findall(pattern, text)
                assert ranks == (["1"] if case is other_setting else ["0", "1"]), f"{case.__name__}: {text}"


def alike() -> list[float]:
    """What ranks may do apart: look at values, and compute what no other rank meets."""
    rank, seen = dist.get_rank(), []
    with sl.Mesh(x=2):
        xs, step = _three(), sl.jit(lambda x, lr: (x * lr).sum())
        if rank:
            str(xs["a"] * 3), xs["b"].to_local().sum()
        w = torch.nn.Parameter(xs["a"])
        opt = torch.optim.AdamW([w], lr=0.1)
        for lr in (0.5, float("nan"), 0.25):
            (w * xs["b"]).sum().backward()
            opt.step()
            opt.zero_grad()
            if rank:
                (w.detach() * lr).to_local()
            seen.append(float(step(w, lr)))
    return seen


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_that_do_more_alone_are_left_alone():
    first, second = alone(alike, 2)
    assert first[::2] == second[::2]
    assert first[1] != first[1]


def other_meshes(port: int) -> list[str]:
    """Axes in another order, and of other sizes."""
    rank, errors = dist.get_rank(), []
    for i, (mine, theirs) in enumerate([("p", "q"), ("p", "r")]):
        dist.destroy_process_group()
        store = dist.PrefixStore(f"{i}", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=20))
        axes = {"p": {"p": 2, "q": 2}, "q": {"q": 2, "p": 2}, "r": {"p": 4, "q": 1}}[mine if rank else theirs]
        with sl.Mesh(axes):
            errors.append(refused(lambda: sl.shard(torch.ones(8, 4), "a@p b").full_tensor()))
    return errors


@pytest.mark.long
def test_meshes_that_differ():
    with closing(Pool(4)) as pool:
        for swapped, sized in pool.run(other_meshes, pool.store.port):
            for text, parts in (
                (swapped, ["to make the groups of Mesh(p=2, q=2)", "to make the groups of Mesh(q=2, p=2)"]),
                (sized, ["to make the groups of Mesh(p=4, q=1)", "to make the groups of Mesh(p=2, q=2)"]),
            ):
                assert all(part in text for part in parts), text


def threads(n: int) -> list[str]:
    """Two threads a rank, each with a tensor of its own; what they were told, and wrong values."""
    told: list[str] = []
    with sl.Mesh(x=dist.get_world_size()):
        xs = [sl.shard(torch.full((4,), float(k)), "a@x") for k in range(2)]
        for x in xs:
            x.full_tensor()

    def work(k: int) -> None:
        try:
            for _ in range(n):
                with xs[k].mesh:
                    if xs[k].full_tensor().tolist() != [float(k)] * 4:
                        told.append("wrong")
        except sl.ShardingError as error:
            told.append(str(error))

    both = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert not any(thread.is_alive() for thread in both)
    return told


@pytest.mark.long
def test_two_threads_of_a_rank_are_right_or_refused():
    for told in alone(threads, 2, 200):
        for text in told:
            assert "out of step" in text or "cannot go on" in text


# Values.


def different_values() -> list[str]:
    rank = dist.get_rank()
    with sl.Mesh(x=2):
        torch.manual_seed(rank)
        w, own = torch.randn(4), torch.full((4,), float(rank))
        x = sl.shard(torch.ones(4), "a@x")
        program = sl.jit(lambda x, b: (x * b).sum())
        return [
            refused(lambda: sl.shard(w, "a")),
            refused(lambda: program(x, own)),
            refused(lambda: x * own),
            refused(lambda: x.copy_(own)),
            refused(lambda: sl.check(lambda x, b: (x * b).sum(), x, own)),
            refused(lambda: sl.jit(lambda x: (x * own).sum())(x)),
        ]


def test_different_values_are_refused_where_they_come_in():
    texts = only(run_ranks(different_values, 2))
    heads = ["shard(x, 'a')", "<lambda>", "aten.mul", "aten.copy_", "<lambda>"]
    for head, text in zip(heads, texts, strict=False):
        assert text.startswith(f"{head}: the ranks have different values:\n  * ")
        assert "of shape [4]: rank 0 has one value, rank 1 has another" in text
        assert "torch.manual_seed(...)" in text
        assert "src=0" in text
        assert "sl.from_local(x, spec)" in text
        assert "bug" not in text


def modules_that_differ() -> list[str]:
    rank = dist.get_rank()

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))

    with sl.Mesh(data=2):
        module = make(rank)
        texts = [refused(lambda: sl.parallelize(module, strategy="fsdp"))]
        assert type(module[0].weight) is nn.Parameter, "nothing is placed"
        sl.parallelize(make(0), strategy="fsdp")
        with torch.device("meta"):
            later = make(rank)
        sl.materialize(sl.parallelize(later, strategy="fsdp"))
        odd = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2 + rank))
        return [*texts, refused(lambda: sl.parallelize(odd, {"1.weight": "_ a@data"}))]


@pytest.mark.long
def test_modules_that_were_made_differently_are_refused_parameter_by_parameter():
    text, other = only(alone(modules_that_differ, 2))
    assert text == (
        "parallelize(Sequential): the ranks have different values:\n"
        "  * 0.weight of shape [4, 6]: rank 0 has one value, rank 1 has another\n"
        "  * 0.bias of shape [4]: rank 0 has one value, rank 1 has another\n"
        "  * 2.weight of shape [2, 4]: rank 0 has one value, rank 1 has another\n"
        "Rule: a plain tensor is whole, and the same, on every rank\n"
        "Remedy: the same torch.manual_seed(...) on every rank before the module is made; or make it under "
        "torch.device('meta'), and sl.materialize(module) then; or load the same checkpoint on every rank before"
    )
    assert "comparing the values of 0.weight of shape [4, 6]" in other


def same_values() -> list[Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x, bits = torch.randn(5, 3), torch.tensor([-0.0, float("nan"), float("inf")])
    with sl.Mesh(x=2):
        from_1 = sl.shard(x, "a@x b", src=1).full_tensor()
        special = sl.shard(bits if rank == 0 else torch.zeros(3), "a", src=0).full_tensor()
        grad = sl.shard(x.requires_grad_(), "a@x b", src=0).requires_grad
        whole = sl.from_local(torch.full((2, 3), float(rank)), "b@x _")
        uneven = sl.from_local(torch.full((1 + 2 * rank, 2), float(rank)), "b@x _", sizes={"b": [1, 3]})
        parts = sl.from_local(torch.full((6,), float(rank)), "(three h@x d)", three=3, h=2)
    torch.manual_seed(1)
    expected = [torch.equal(from_1, torch.randn(5, 3)), special.view(torch.int32).tolist(), grad]
    return [*expected, *((str(t.spec), t.full_tensor().tolist()) for t in (whole, uneven, parts))]


def test_values_of_one_rank_and_of_each_rank():
    equal, special, grad, whole, uneven, parts = only(run_ranks(same_values, 2))
    assert equal
    assert special == torch.tensor([-0.0, float("nan"), float("inf")]).view(torch.int32).tolist()
    assert grad
    assert whole[1] == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert uneven[1] == [[0.0] * 2] + [[1.0] * 2] * 3
    assert parts[1] == [0.0, 0.0, 1.0, 1.0] * 3


def bad_pieces() -> list[str]:
    rank = dist.get_rank()
    with sl.Mesh(x=2):
        return [
            refused(lambda: sl.from_local(torch.ones(1 + 2 * rank, 2), "b@x _")),
            refused(lambda: sl.from_local(torch.full((2,), float(rank)), "b")),
            refused(lambda: sl.from_local(torch.ones((2,) * (1 + rank)), "b ...")),
            refused(lambda: sl.from_local([torch.ones(2)] * 2, "b@x")),
            refused(lambda: sl.shard(torch.ones(2), "b", src=5)),
        ]


def test_pieces_that_do_not_fit_are_refused():
    for texts in run_ranks(bad_pieces, 2):
        uneven, copies, kinds, count, src = texts
        assert "device 0 has a shard of shape [1, 2], [4@x, 2] asks for [2, 2]" in uneven
        assert "device 1 has a shard of shape [3, 2], [4@x, 2] asks for [2, 2]" in uneven
        assert "devices 0 and 1 hold the same shard of [2], and have different values" in copies
        assert kinds.startswith("from_local(x, 'b ...'): the shards are of different kinds")
        assert "2 shards for 1 device of this process" in count
        assert src.startswith("shard(x, 'b', src=5): there is no rank 5")


def test_pieces_of_virtual_devices():
    with sl.Mesh(a=2, b=2):
        x = sl.from_local([torch.full((1, 2), float(i // 2)) for i in range(4)], "r@a c")
        assert x.full_tensor().tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert "devices 0 and 1 hold the same shard" in refused(
            lambda: sl.from_local([torch.full((1, 2), float(i)) for i in range(4)], "r@a c")
        )
        assert "1 shard for 4 devices of this process" in refused(lambda: sl.from_local(torch.ones(2), "r@a"))
        assert "x is a value of the program" in refused(
            lambda: sl.jit(lambda x: sl.shard(x, "r", src=0))(torch.ones(2))
        )


# No ranks.


def fork() -> tuple[str, str, list[float]]:
    with sl.Mesh(x=2):
        x = sl.shard(torch.arange(4.0), "a@x")
        x.full_tensor()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, (refused(x.full_tensor) + "|" + refused(lambda: sl.shard(torch.ones(2), "a"))).encode())
            os._exit(0)
        os.waitpid(child, 0)
        one, two = os.read(read, 4000).decode().split("|")
        return one, two, x.full_tensor().tolist()


def test_a_fork_of_a_rank_says_so():
    for one, two, values in run_ranks(fork, 2):
        for text in (one, two):
            assert text.startswith("a fork of a rank uses a ShardedTensor or a collective:\n  * process ")
        assert values == [0.0, 1.0, 2.0, 3.0]


def checkpoint_alone(folder: str) -> str:
    with sl.Mesh(x=2):
        x = sl.shard(torch.arange(4.0), "a@x")
        x.full_tensor()
    dist.destroy_process_group()
    return refused(lambda: dcp.save({"x": x}, checkpoint_id=folder, no_dist=True))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_before_the_ranks_have_met_is_refused(tmp_path):
    with closing(Pool(2)) as pool, pytest.raises(RankError) as caught:
        pool.run(save_or_raise, str(tmp_path))
    for error in caught.value.errors.values():
        assert "f32[4@x] is in a checkpoint that this rank would make alone" in str(error)


def save_or_raise(folder: str) -> None:
    raise AssertionError(checkpoint_alone(folder))


# Worlds.


def anew(port: int) -> list[Any]:
    """A warm program and warm eager ops, before and after the process group was made again."""
    rank = dist.get_rank()
    found = []
    step = sl.jit(lambda x: (x * x).sum())
    for i in range(3):
        with sl.Mesh(x=2):
            x = sl.shard(torch.arange(4.0), "a@x")
            found.append([float(step(x)), x.full_tensor().tolist(), float((x + x).sum())])
        room = turns.current().room
        dist.destroy_process_group()
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(str(i), client)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=9))
        assert turns.current().room != room
    os.environ.pop("SHARDLIB_TIMEOUT", None)
    told = world.timeout().total_seconds()
    os.environ["SHARDLIB_TIMEOUT"] = "7"
    return [*found, told, world.timeout().total_seconds()]


@pytest.mark.long
def test_a_process_group_made_again_and_its_timeout():
    with closing(Pool(2)) as pool:
        *found, told, said = only(pool.run(anew, pool.store.port))
    assert found == [[14.0, [0.0, 1.0, 2.0, 3.0], 12.0]] * 3
    assert (told, said) == (9.0, 7.0)


def destroyed() -> list[str]:
    """Whatever is used after the process group is gone."""
    with sl.Mesh(x=2):
        x, step = sl.shard(torch.ones(8), "a@x"), sl.jit(lambda x: x.sum())
        step(x), x.full_tensor()
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [lambda: step(x), x.full_tensor, x.sum, lambda: x + x, lambda: x * torch.ones(8)]
    return [refused(call) for call in calls]


@pytest.mark.long
def test_a_process_group_that_is_gone():
    for texts in alone(destroyed, 2):
        for text in texts:
            assert text.startswith(
                ("torch.distributed cannot be initialized:", "a tensor on ranks is used, and torch.distributed is not ")
            ), text
            assert "torch.distributed.init_process_group(" in text


def in_its_own_folder(folder: str) -> float:
    os.makedirs(f"{folder}/{dist.get_rank()}")  # noqa: PTH103
    os.chdir(f"{folder}/{dist.get_rank()}")
    with sl.Mesh(x=2):
        return float(sl.jit(lambda x: x.sum())(sl.shard(torch.ones(4), "a@x")))


@pytest.mark.long
def test_ranks_in_different_folders_agree(tmp_path):
    assert alone(in_its_own_folder, 2, str(tmp_path)) == [4.0, 4.0]


# Deaths.


@pytest.mark.long
@pytest.mark.parametrize(
    ("n", "transport", "delay"), [(2, "shm", 0.3), (2, "gloo", 0.3), (2, "far", 0.3), (4, "shm", 0.0)]
)
def test_a_killed_rank_is_named_by_all_others(n, transport, delay, tmp_path):
    assert killed_ranks.kill(n, transport, delay, n - 1, str(tmp_path)) == []


# Names.


class _Key:
    pass


def keyed_by_objects() -> tuple[list[float], list[float]]:
    """An optimizer with state, and dicts by tensors, ids, functions and objects: addresses differ in all processes."""
    junk = [object() for _ in range(1000 * dist.get_rank())]
    torch.manual_seed(0)
    model, key = torch.nn.Linear(4, 2), _Key()
    opt = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    means = {p: p.detach().clone() for p in model.parameters()}
    by_id = {id(p): p.detach() * 2 for p in model.parameters()}
    others = {
        key: torch.ones(2),
        (key, 1): torch.ones(2),
        id(key): torch.ones(2),
        len: torch.ones(2),
        _Key: torch.ones(1),
    }

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        for p in model.parameters():
            means[p].lerp_(p.detach(), 0.1)
            by_id[id(p)].lerp_(p.detach(), 0.1)
        for k in others:
            others[k] = others[k] * 2
        return loss

    with sl.Mesh(x=2):
        run = sl.jit(step, in_specs=("a@x b",))
        losses = [float(run(torch.ones(4, 4) * i)) for i in range(3)]
    del junk
    return losses, [float(x.sum()) for x in (*means.values(), *by_id.values(), *others.values())]


@pytest.mark.long
def test_addresses_are_no_names() -> None:
    only(alone(keyed_by_objects, 2))


def results_that_have_no_literal() -> list[Any]:
    """A set's order and an object's address differ in all processes; they are no part of the program."""
    made = _Key()
    with sl.Mesh(x=2):
        run = sl.jit(lambda x: (x.sum(), {"alpha", "beta", "gamma"}, len, made), in_specs=("a@x",))
        total, texts, function, same = run(torch.ones(4))
    return [float(total), sorted(texts), function is len, same is made]


@pytest.mark.long
def test_results_that_have_no_literal() -> None:
    assert only(alone(results_that_have_no_literal, 2)) == [4.0, ["alpha", "beta", "gamma"], True, True]


def lone_element() -> list[float]:
    column, scalar = torch.arange(10.0).view(2, 5)[:1, 3], torch.tensor(2.0).expand(1)  # of any stride
    with sl.Mesh(x=2):
        placed, step = sl.shard(column, "a"), sl.jit(lambda a, b: a * b)
        return [(placed * scalar).item(), step(column, scalar).item()]


def test_one_element_may_have_any_stride() -> None:
    assert run_ranks(lone_element, 2) == [[6.0, 6.0]] * 2
