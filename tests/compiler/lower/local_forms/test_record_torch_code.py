"""Local forms that users write: torch code for one device, proved, run by programs and by ranks, and refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.compiler.lower.local_forms import record_torch_code
from shardlib.compiler.program.steps import Compute
from shardlib.rules.out_variants import op_named
from shardlib.rules.trial_shardings import TrialSharding
from shardlib.sharding.mesh.axis import Axis
from shardlib.testing.run_one_op import Trial
from tests.helpers.ranks import run_ranks, speak


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def op(fn: Callable[..., Any], text: str, local: Callable[..., Any], **how: Any) -> Any:
    """A custom op of a function, with a rule and a local form."""
    made = torch.library.custom_op(f"local_forms::{fn.__name__}", fn, mutates_args=(), **how)
    made.register_fake(fn)
    return sl.rule(text, local=local)(made)


def _softmax(x: Tensor, scale: float = 1.0) -> Tensor:
    return torch.softmax(x * scale, -1)


def _softmax_here(x: Tensor, scale: float = 1.0) -> Tensor:
    held = F.pad(x * scale, [0, int(x.shape[-1] == 0)], value=-torch.inf)
    top = sl.pmax(held.amax(-1, keepdim=True), "v")
    exp = torch.exp(x * scale - top)
    return exp / sl.psum(exp.sum(-1, keepdim=True), "v")


def _pull(grad: Tensor, y: Tensor) -> Tensor:
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def _pull_here(grad: Tensor, y: Tensor) -> Tensor:
    return y * (grad - sl.psum((grad * y).sum(-1, keepdim=True), "v"))


def _before(x: Tensor) -> Tensor:
    return x.cumsum(0)


def _before_here(x: Tensor) -> Tensor:
    totals = sl.all_gather(x.sum(0, keepdim=True), "n")
    ahead = torch.arange(sl.axis_size("n")) < sl.axis_index("n")
    return x.cumsum(0) + (totals * ahead[:, None]).sum(0)


def _standardized(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean()
    return x - mean, mean.clone()


def _standardized_here(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = sl.psum(x.sum(), ("n", "m")) / (sl.piece("n").whole * sl.piece("m").whole)
    return x - mean, mean


def _ramp(x: Tensor) -> Tensor:
    return x * torch.arange(len(x), dtype=x.dtype, device=x.device)


def _ramp_here(x: Tensor) -> Tensor:
    offset, size, _ = sl.piece("n")
    return x * torch.arange(offset, offset + size, dtype=x.dtype, device=x.device)


def _embedded(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def _embedded_here(table: Tensor, index: Tensor) -> Tensor:
    offset, size, _ = sl.piece("v")
    mine = index - offset
    elsewhere = (mine < 0) | (mine >= size)
    return F.pad(table, [0, 0, 0, 1])[mine.masked_fill(elsewhere, size)]


softmax = op(_softmax, "... v -> ... v | v:local", _softmax_here)
pull = op(_pull, "... v, ... v -> ... v | v:local {0}", _pull_here)
softmax.register_autograd(
    lambda ctx, grad: (pull(grad * ctx.scale, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(output), setattr(ctx, "scale", inputs[1]))[0],
)
running = op(_before, "n m -> n m | n:local {0}", _before_here)
standardized = op(_standardized, "n m -> n m, | n:none m:none n:local m:local {0}", _standardized_here)
ramp = op(_ramp, "n -> n | n:local {0}", _ramp_here)
embedded = op(_embedded, "v d, n -> n d | v:sum v:local {0}", _embedded_here)

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a softmax": (softmax, (r(5, 7),)),
    "scaled": (softmax, (r(2, 3, 6), 0.5)),
    "of size 1": (softmax, (r(5, 1),)),
    "its gradient": (pull, (r(5, 7), r(5, 7).softmax(-1))),
    "what came before": (running, (r(7, 5),)),
    "over two dims": (standardized, (r(5, 6),)),
    "where a piece begins": (ramp, (r(7),)),
    "rows that lie elsewhere": (embedded, (r(7, 3), torch.tensor([0, 6, 3, 3]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_local_forms_are_proved(name: str) -> None:
    made, args = CALLS[name]
    assert sl.prove(made, *args).cuts > 1


@pytest.mark.parametrize("way", ["jit", "eager"])
def test_programs_run_them(way: str) -> None:
    x, w = r(6, 5), r(6, 5)
    fn = lambda x, w: (softmax(x, 2.0) * w).sum() + running(w).sum()
    with Mesh(data=2, tensor=4):
        a = sl.shard(x, "b@data v@tensor").requires_grad_()
        total = (sl.jit(fn) if way == "jit" else fn)(a, sl.shard(w, "b@data v@tensor"))
        total.backward()
    plain = x.requires_grad_()
    expected = (_softmax(plain, 2.0) * w).sum() + _before(w).sum()
    expected.backward()
    torch.testing.assert_close(total.full_tensor(), expected)
    torch.testing.assert_close(a.grad.full_tensor(), plain.grad)


def test_a_plan_shows_what_they_do() -> None:
    with Mesh(data=2, tensor=4):
        plan = sl.jit(lambda x: softmax(x)).plan(sl.shard(r(6, 8), "b@data v@tensor"))
        both = sl.jit(lambda x: standardized(x)).plan(sl.shard(r(6, 8), "n@data m@tensor"))
        scanned = sl.jit(lambda x: (x + x).cumprod(1)).plan(sl.shard(r(6, 8), "b@data v@tensor"))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_reduce", 36.0)] * 2, "3 rows of 8 bytes, 2 * 3 / 4"
    assert re.search(r"! all_reduce\[tensor\] .* max over v, inside", plan.full)
    assert [len(c.axes) for c in both.collectives] == [2], "one sum over two dims"
    assert "! all_gather[tensor] cumprod's pieces " in scanned.full, "which nobody adds up"


def _ranks_of_rows(x: Tensor) -> Tensor:
    return x + torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None]


def _ranks_of_rows_here(x: Tensor) -> Tensor:
    return x + torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None] + sl.piece("n").offset


def test_numbers_differ_by_the_axes_that_they_follow_from() -> None:
    ranked = op(_ranks_of_rows, "n m -> n m | n:local", _ranks_of_rows_here)
    with Mesh(a=2, b=2):
        plan = sl.jit(lambda x: ranked(x)).plan(sl.shard(r(5, 7), "n@a m@b"))
    program = plan.compiled.program
    (count,) = [s.args[0] for s in program.steps if isinstance(s, Compute) and "arange" in str(s.target)]
    assert str(count) == "[3 2]@a", "whatever is uneven beside"


# Calls, of whose operand dims 0 and 1 are cut in 8 (of a slice: its blocks in 2, and what is in them in 8), and on how
# many devices the form of each is run.
_RUNS = {
    "rows and columns of a triangle, which only shift the diagonal": ("tril", (r(16, 16), 1), 0),
    "what is inside the blocks of a slice": ("slice.Tensor", (r(64), 0, 0, 32), 2),
    "columns beside a scan": ("cumsum", (r(16, 16), 0), 8),
}


@pytest.mark.parametrize("name", _RUNS)
def test_a_form_is_run_where_it_is_told_other_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, args, count = _RUNS[name]
    runs, run = [], record_torch_code._Run.record
    monkeypatch.setattr(
        record_torch_code._Run, "record", lambda self, *given: (runs.append(self), run(self, *given))[1]
    )
    call = Trial.trace(op_named(op), args, {})
    monkeypatch.setattr(record_torch_code, "_LIBRARY_CODE", {})
    assert call.op.rule is not None
    a, b = (f for dim in call.op.rule.operands[0] for f in dim)
    ways = 2 if op == "slice.Tensor" else 8
    call.program(TrialSharding({a: (Axis("a", ways),), b: (Axis("b", 8),)}), Mesh.abstract(a=ways, b=8))
    assert len(runs) == count


def test_equal_ops_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, run = [], record_torch_code._Run.record
    monkeypatch.setattr(
        record_torch_code._Run, "record", lambda self, *given: (runs.append(self), run(self, *given))[1]
    )
    monkeypatch.setattr(record_torch_code, "_LIBRARY_CODE", {})

    def scans(x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = x.sin().cumsum(0)
        return x

    x = torch.randn(16, 6)
    with Mesh(a=8):
        for times in (1, 4):
            runs.clear()
            result = sl.jit(scans, in_specs=("s@a f", None), out_specs="s@a f")(x, times).full_tensor()
            torch.testing.assert_close(result, scans(x, times))
        assert not runs, "all four scans equal the first one"
        runs.clear()
        sl.jit(lambda x: x.sin().cumsum(1), in_specs="s f@a", out_specs="s f@a")(torch.randn(16, 16))
        assert runs, "another dim is another recording"


def _scan(spec: str, dim: int = 0, *, dtype: torch.dtype = torch.float64, **axes: int) -> Any:
    return lambda x: (lambda x: x.cumsum(dim), x.to(dtype), spec, axes or {"a": 4})


def _pad(value: float) -> Any:
    return lambda x: (lambda x: F.pad(x, (1, 1), value=value), x, "_ f@a", {"a": 4})


# Two calls that differ in one thing, which the recording of their local form depends on.
_DIFFERENT = {
    "an argument": (_scan("s@a f", 0), _scan("s f@a", 1)),
    "a dtype": (_scan("s@a f"), _scan("s@a f", dtype=torch.float32)),
    "the number of devices": (_scan("s@a f"), _scan("s@a f", a=2)),
    "the axis": (_scan("s@a f", a=4, b=2), _scan("s@b f", a=4, b=2)),
    "the name of the axis": (_scan("s@a f", a=4), _scan("s@b f", b=4)),
    "uneven shards": (_scan("s@a=[2 2 2 6] f"), _scan("s@a f")),
    "a number": (_pad(0.5), _pad(2.0)),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", _DIFFERENT)
def test_different_ops_have_recordings_of_their_own(name: str, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_torch_code, "_LIBRARY_CODE", {})
    x = r(12, 12)
    for make in reversed(_DIFFERENT[name]) if turned else _DIFFERENT[name]:
        count = len(record_torch_code._LIBRARY_CODE)
        fn, value, spec, axes = make(x)
        with Mesh(**axes):
            result = sl.jit(fn, in_specs=spec)(value).full_tensor()
        torch.testing.assert_close(result, fn(value))
        assert len(record_torch_code._LIBRARY_CODE) > count, "a recording of its own"


def test_inference_mode_records_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_torch_code, "_LIBRARY_CODE", {})
    x, texts = r(7, 3), []
    with Mesh(a=4):
        for is_inference in (True, False):
            record_torch_code._LIBRARY_CODE.clear()
            with torch.inference_mode(is_inference):
                program = sl.jit(lambda x: x.cumsum(0), in_specs="s@a f").plan(x).compiled.program
            texts.append([str(s.target) for s in program.steps if isinstance(s, Compute)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0)])
def test_zeros_of_two_signs_are_two_arguments(values: tuple[float, ...]) -> None:
    """Equal numbers that mean different things: caches must tell the two calls apart, in both orders."""
    x = r(7, 6)
    with Mesh(a=4):
        for value in values:
            padded = sl.jit(lambda x, value=value: 1 / F.pad(x, (1, 1), value=value), in_specs="_ b@a")(x)
            assert torch.equal(padded.full_tensor(), 1 / F.pad(x, (1, 1), value=value)), value


def _on_ranks(transport: str) -> None:
    speak(transport)
    torch.manual_seed(0)
    x = r(5, 7)
    with Mesh(a=2):
        got = sl.jit(lambda x: ramp(softmax(x)[0]) + running(x).sum(0))(sl.shard(x, "b v@a")).full_tensor()
    torch.testing.assert_close(got, _ramp(_softmax(x)[0]) + _before(x).sum(0))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_ranks_run_them(transport: str) -> None:
    run_ranks(_on_ranks, 2, transport)


# --- refused ----------------------------------------------------------------------------------------------------------


def _twice(x: Tensor) -> Tensor:
    return 2 * x


KEPT = torch.ones(3)
WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "reads a value": (lambda x: x * x.sum().item(), r"fails: RuntimeError: Tensor\.item\(\) cannot be called on meta"),
    "decides by one": (lambda x: x if x.sum() > 0 else -x, "fails"),
    "writes": (lambda x: x.mul_(2), r"writes to a tensor: aten\.mul_"),
    "draws": (lambda x: 2 * x * torch.rand_like(x), r"draws random numbers: aten\.rand_like"),
    "a tensor of its own": (lambda x: x * KEPT[0], r"reads what no program has: a tensor of shape \[3\] is no operand"),
    "by sizes": (
        lambda x: 2 * x if x.shape[0] == 2 else x + x,
        r"takes other steps on other devices: aten\.add\.Tensor\(%0, %0\) -> %2 on the first",
    ),
    "more by sizes": (lambda x: (x * 1 * 2) if x.shape[0] == 2 else x * 1, "takes other steps on other devices"),
    "numbers by sizes": (lambda x: x * (4 / x.shape[0]), "takes other steps on other devices"),
    "too much": (lambda x: sl.psum(2 * x, "n").repeat(2), r"makes other results than the rule says: result 0 is \[6\]"),
    "another dtype": (lambda x: x.float(), r"result 0 is \[3\] of torch\.float32, not \[3\] of torch\.float64"),
    "two results": (lambda x: (x, x), "makes other results than the rule says: 2 results, not 1"),
    "a number": (lambda x: 1.0, r"result 0 is 1\.0, no tensor"),
    "pieces of other sizes": (
        lambda x: sl.all_gather(2 * x, "n")[: len(x)],
        r"hands pieces that differ in size to all_gather: of a dim they have 3, 2",
    ),
    "the sum of a number": (lambda x: x * sl.psum(len(x), "n"), r"psum of the number 3 in the local form of a rule"),
    "a dim that is none": (
        lambda x: sl.psum(x, "k"),
        r"psum over 'k' in the local form of a rule: the rule has no dim",
    ),
    "the mesh's axis": (lambda x: sl.psum(x, "a"), "the rule has no dim 'a'"),
    "wrong": (lambda x: x, "result 0 is wrong: it is off by"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_local_form_is_told(name: str) -> None:
    local, words = WRONG[name]
    made = op(_twice, "n -> n | n:local", local)
    with pytest.raises(ShardingError) as error:
        sl.prove(made, r(5))
    assert re.search(words, re.sub(r"(, with [^\n]*)?:\n  \* ", ": ", str(error.value))), error.value


def test_a_program_does_not_begin_with_a_wrong_one() -> None:
    made = op(_twice, "n -> n | n:local", lambda x: x.float())
    with Mesh(a=2), pytest.raises(ShardingError, match=r"the local form of local_forms\._twice.* makes other results"):
        sl.jit(lambda x: made(x))(sl.shard(r(5), "n@a"))


def test_a_rule_and_its_local_form_go_together() -> None:
    with pytest.raises(ShardingError, match=r"`n:local` needs a local form: sl\.rule\(text, local=function\)"):
        sl.rule("n -> n | n:local")(torch.ops.local_forms._ramp)
    with pytest.raises(ShardingError, match="it has a local form, and no dim is marked for it: `k:local`"):
        sl.rule("n -> n", local=_ramp_here)(torch.ops.local_forms._ramp)


def test_pieces_are_known_in_local_forms() -> None:
    with pytest.raises(ShardingError, match=r"piece\('n'\) outside any local form"):
        sl.piece("n")
    with Mesh(a=2), pytest.raises(ShardingError, match=r"piece\('a'\) outside any local form"):
        sl.shard_map(lambda x: x + sl.piece("a").size, in_specs="n@a", out_specs="n@a")(r(4))
