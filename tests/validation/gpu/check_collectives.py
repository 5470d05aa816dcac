"""The CUDA collectives on one GPU: virtual ranks against the ops' references, bit for bit, in every form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlib.core.errors import CollectiveError
from shardlib.ops.collectives import all_gather, reduce_scatter
from shardlib.ops.collectives.transport.cuda_peers import Peers
from shardlib.ops.collectives.transport.flat_messages import combine
from tests.validation.gpu.figures import OPS, of_part
from tests.validation.gpu.kernels import Kernels, deterministic, find, served
from tests.validation.gpu.records import Outcome, Recorder

FORMS = ("packets", "staged", "direct")
RANKS = (2, 3, 8)
LONGEST = {"packets": (1, 250), "staged": (33, 70_001, 9_000_000), "direct": (33, 70_001, 3_000_000)}
ABSENT = "a rank that never comes"

Check = Callable[[Peers, int, int, torch.dtype, str], str]  # (group, longest, askew, dtype, form): what is wrong


def collectives(run: Recorder) -> None:
    """Every op, form and dtype, with uneven, empty and misaligned messages."""
    kernels = find(run.device == "cpu")
    if isinstance(kernels, str):
        return run.absent(of_part("collectives"), kernels)
    if not all(served(kernels, op) for op in ("all_gather", "all_to_all", "reduce_scatter")):
        return run.absent(of_part("collectives"), "the library has no collectives")
    for op in OPS:
        checks = {"all_gather": _gather, "all_to_all": _exchange, "reduce_scatter": _scatter, "all_reduce": _reduce}
        summing = op in ("reduce_scatter", "all_reduce")
        dtypes = (torch.float32, torch.bfloat16, torch.float16) if summing else (torch.uint8, torch.float64)
        forms: Sequence[str] = ("",) if op == "all_reduce" else FORMS
        for ranks in RANKS[:1] if kernels.rehearsal else RANKS:
            for form in forms:
                for dtype in dtypes[:1] if run.quick else dtypes:
                    name = f"{ranks} ranks{form and f', {form}'}, {str(dtype).removeprefix('torch.')}"
                    case = functools.partial(_checked, checks[op], kernels, ranks, form, dtype)
                    run.attempt(f"{op}: bits of the reference", name, case, seconds=45)
    for form in FORMS[:1] if kernels.rehearsal else FORMS:
        run.attempt(ABSENT, form, functools.partial(_absent, kernels, form))
    return None


def _checked(check: Check, kernels: Kernels, ranks: int, form: str, dtype: torch.dtype) -> Outcome:
    group = kernels.group(ranks)
    longest = (1, 30) if kernels.rehearsal else LONGEST[form or "staged"]
    for askew, most in enumerate(longest):
        with deterministic():
            wrong = check(group, most, askew, dtype, form)
        if wrong:
            return Outcome(False, f"messages of up to {most}: {wrong}")
        if kernels.device == "cuda":
            torch.cuda.synchronize()
        group.check()
    return Outcome(True, "equal")


def _gather(group: Peers, longest: int, askew: int, dtype: torch.dtype, form: str) -> str:
    sizes = _sizes(group.size, longest)
    messages = _messages(group, sizes, askew, dtype, form)
    expected = all_gather.reference(messages, 0, sizes)
    return _compare(group.gather(messages, sizes, form), expected)


def _exchange(group: Peers, longest: int, askew: int, dtype: torch.dtype, form: str) -> str:
    counts = [_sizes(group.size, max(1, longest // group.size), r) for r in range(group.size)]
    messages = _messages(group, [sum(row) for row in counts], askew, dtype, form)
    pieces = [x.split_with_sizes(row) for x, row in zip(messages, counts, strict=True)]
    expected = [torch.cat([of_rank[r] for of_rank in pieces]) for r in range(group.size)]
    return _compare(group.exchange(messages, counts, form), expected)


def _scatter(group: Peers, longest: int, askew: int, dtype: torch.dtype, form: str) -> str:
    counts = _sizes(group.size, max(1, longest // group.size))
    messages = _messages(group, [sum(counts)] * group.size, askew, dtype, form)
    return _compare(group.scatter_sum(messages, counts, form), reduce_scatter.reference(messages, 0, counts))


def _reduce(group: Peers, longest: int, askew: int, dtype: torch.dtype, form: str) -> str:
    messages = _messages(group, [longest] * group.size, askew, dtype, form)
    return _compare(group.reduce(messages), [combine(messages, "sum")] * group.size)


def _sizes(ranks: int, longest: int, turn: int = 0) -> list[int]:
    """One message is the longest, one is empty (where there are three), the others are uneven."""
    uneven = [
        longest,
        longest // 3 + 1,
        *([0] if ranks > 2 else []),
        *(max(1, longest - 7 * r) for r in range(3, ranks)),
    ]
    return [uneven[(r + turn) % ranks] for r in range(ranks)]


def _messages(group: Peers, sizes: Sequence[int], askew: int, dtype: torch.dtype, form: str) -> list[Tensor]:
    """Random messages, `askew` elements behind an aligned place, in shared memory where the form reads it there."""
    device = group.memory[0].device
    whole = []
    for n in sizes:
        # Of all sizes, so that another order of addends gives other bits.
        x = torch.randn(askew + n + 1, device=device) * 2.0 ** torch.randint(-8, 8, (askew + n + 1,), device=device)
        whole.append(x.to(dtype) if dtype.is_floating_point else torch.randint_like(x, 0, 200).to(dtype))
    if form == "direct":
        group.share(whole[0], [x.data_ptr() for x in whole])
    return [x[askew:-1] for x in whole]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    for rank, (x, want) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(x, want):
            return f"rank {rank} has {int((x != want).sum())} of {want.numel()} elements wrong"
    return ""


def _absent(kernels: Kernels, form: str) -> Outcome:
    """Three ranks of four call; they must give up and name the fourth."""
    group = kernels.group(4, seconds=0.5, present=range(3))
    messages = _messages(group, [50] * 4, 0, torch.float32, form)[:3]
    group.gather(messages, [50] * 4, form)
    if kernels.device == "cuda":
        torch.cuda.synchronize()
    try:
        group.check()
    except CollectiveError as error:
        said = str(error).splitlines()[0]
        return Outcome("waiting for rank 3" in said, said)
    return Outcome(False, "the call ended as if all had come")
