"""What SHARDLIB_OPS says, and what is said to a user who gets it wrong."""

from __future__ import annotations

import pytest

from shardlib.core.errors import ShardingError
from shardlib.ops.backend_choice import BACKENDS, Choice, requested_backend, unavailable_error

OPS = ("attention", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ppermute", "send", "random", "matmul")
REST = 'Rule: SHARDLIB_OPS is "torch", which means every op, or entries op=backend with commas between them'
REMEDY = 'Remedy: for instance "all_gather=shm,attention=math"'


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        (None, {}),
        ("", {}),
        ("torch", dict.fromkeys(OPS, "torch")),
        (" torch ", dict.fromkeys(OPS, "torch")),
        ("attention=math", {"attention": "math"}),
        ("sequence=ring", {"sequence": "ring"}),
        ("attention=torch, all_gather = shm ,", {"attention": "torch", "all_gather": "shm"}),
        ("ppermute=shm,ppermute=shm", {"ppermute": "shm"}),
    ],
)
def test_what_is_wanted(text: str | None, wants: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDLIB_OPS", raising=False)
    if text is not None:
        monkeypatch.setenv("SHARDLIB_OPS", text)
    assert {op: backend for op in BACKENDS if (backend := requested_backend(op))} == wants


@pytest.mark.parametrize(
    ("text", "bullets"),
    [
        ("shm", ["'shm' names no op and backend"]),
        ("torch,attention=math", ["'torch' names no op and backend"]),
        (
            "gather=shm",
            [
                "'gather=shm': there is no op 'gather'; the ops are attention, all_gather, reduce_scatter, all_reduce,"
                " all_to_all, ppermute, send, random, matmul, sequence"
            ],
        ),
        ("sequence=torch", ["'sequence=torch': sequence has no backend 'torch'; it has ring, zigzag, heads, gather"]),
        ("all_gather=nccl", ["'all_gather=nccl': all_gather has no backend 'nccl'; it has torch, shm, cuda"]),
        ("all_gather=", ["'all_gather=': all_gather has no backend ''; it has torch, shm, cuda"]),
        ("attention=shm", ["'attention=shm': attention has no backend 'shm'; it has torch, math, cuda"]),
        ("ppermute=cuda", ["'ppermute=cuda': ppermute has no backend 'cuda'; it has torch, shm"]),
        ("all_gather=math", ["'all_gather=math': all_gather has no backend 'math'; it has torch, shm, cuda"]),
        (
            "x, attention=math, attention=cuda",
            ["'x' names no op and backend", "'attention=cuda': attention is to be math already"],
        ),
    ],
)
def test_what_it_cannot_mean(text: str, bullets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLIB_OPS", text)
    for op in ("attention", "ppermute"):
        with pytest.raises(ShardingError) as caught:
            requested_backend(op)
        expected = [f"cannot read SHARDLIB_OPS={text!r}:", *(f"  * {bullet}" for bullet in bullets), REST, REMEDY]
        assert str(caught.value).splitlines() == expected


def test_it_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("shm", "torch", "shm"):
        monkeypatch.setenv("SHARDLIB_OPS", f"all_gather={backend}")
        assert requested_backend("all_gather") == backend


def test_a_choice_prints_its_reason() -> None:
    assert str(Choice("shm", "", "all ranks on this machine")) == "shm: all ranks on this machine"
    assert str(Choice("torch", "exchange", "unequal pieces")) == "torch/exchange: unequal pieces"
    assert {Choice("shm", "", "a"): 1}[Choice("shm", "", "a")] == 1


def test_a_backend_that_cannot_run_is_an_error_and_no_fallback() -> None:
    assert str(unavailable_error("all_gather", "shm", "no C++ compiler")).splitlines() == [
        "SHARDLIB_OPS asks for all_gather=shm, which cannot run here:",
        "  * no C++ compiler",
        "Rule: a backend that is asked for by name is never replaced by another one",
        "Remedy: mend that, or take all_gather=shm out of SHARDLIB_OPS",
    ]
