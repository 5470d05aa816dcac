"""A logical name that is nearly another: told where it is a slip, and nowhere else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib import Mesh, P, shard
from shardlib.sharding.typos import is_near

X, W = torch.ones(4, 6), torch.ones(6, 8)
RULES = {"batch": "data", "ff": "tensor", "heads": "tensor", "kv_heads": "tensor"}

NEAR = [
    ("batch", "btach"), ("batch", "abtch"), ("batch", "batc"), ("batch", "battch"),
    ("heads", "haeds"), ("kv_heads", "kvheads"), ("kv_heads", "kv_haeds"),
    ("layers0", "lyaers0"),
    ("sequence", "seqeunec"), ("Batch", "batch"), ("hidden", "hiddn"), ("vocab", "vocba"),
    ("seq", "sqe"), ("seq", "sequ"),
]  # fmt: skip
APART = [
    ("batch", "patch"), ("state", "stage"), ("seq_q", "seq_k"), ("q_heads", "k_heads"), ("dim1", "dim2"), ("ff", "fc"),
    ("a", "b"), ("in", "on"), ("embed", "hidden"), ("model", "modes"), ("height", "weight"), ("batch", "batch2"),
    ("seq", "seq2"), ("kv", "k"), ("in", "out"), ("seq", "set"), ("ffn", "ff"), ("kv", "vk"),
    ("f", "ff"), ("bhs", "bhd"),
    ("src_len", "tgt_len"), ("features_in", "features_out"), ("heads", "kv_heads"), ("x", "xy"), ("row", "raw"),
    ("experts", "expert_ff"), ("width", "depth"), ("hd", "h"), ("key", "kv"), ("time", "mel"), ("conv_w", "conv_h"),
    ("batch", "batcj"), ("embed", "embad"),
]  # fmt: skip
ONE_WAY = [  # a name, a known one that it is near, and that is not near it
    ("fff", "ff"), ("hdd", "hd"), ("batches", "batch"), ("heads", "head"), ("kv_heads", "kv_head"), ("tokens", "token"),
    ("vocabularies", "vocabulary"), ("ffn", "fn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "known"), ONE_WAY)
def test_a_plural_or_a_bounced_key_is_near_and_the_other_way_round_is_another_name(name: str, known: str) -> None:
    assert is_near(name, known)
    assert not is_near(known, name)


@pytest.mark.parametrize(("a", "b"), NEAR)
def test_slips_are_near(a: str, b: str) -> None:
    assert is_near(a, b)
    assert is_near(b, a)


@pytest.mark.parametrize(("a", "b"), APART)
def test_other_words_are_not(a: str, b: str) -> None:
    assert not is_near(a, b)
    assert not is_near(b, a)


def _told(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told, Mesh(data=2, tensor=2, rules=RULES):
        warnings.simplefilter("always")
        call()
    return [str(w.message).partition("\n")[0] for w in told]


_near = "'{}' has no rule and stays whole; did you mean '{}'?".format


SLIPS: list[tuple[str, Any, str]] = [
    ("bounced", lambda: shard(X, "_ fff"), f"shard(x) with spec '_ fff': {_near('fff', 'ff')}"),
    ("plural", lambda: shard(X, "batches _"), f"shard(x) with spec 'batches _': {_near('batches', 'batch')}"),
    ("placed", lambda: shard(X, "btach _"), f"shard(x) with spec 'btach _': {_near('btach', 'batch')}"),
    (
        "moved",
        lambda: shard(X, "batch _").redistribute("_ haeds"),
        f"redistribute(x) with spec '_ haeds': {_near('haeds', 'heads')}",
    ),
    (
        "argument",
        lambda: sl.jit(torch.matmul, in_specs=("btach embed", "embed ff")).plan(X, W),
        f"in_specs of args[0] with spec 'btach embed': {_near('btach', 'batch')}",
    ),
    (
        "by name",
        lambda: sl.jit(
            lambda x, w: x @ w, in_specs={"x": "batch embed", "w": "embde ff"}, out_specs="_ embed"
        ).plan(X, W),
        f"in_specs of w with spec 'embde ff': {_near('embde', 'embed')}",
    ),
    (
        "result",
        lambda: sl.jit(torch.matmul, out_specs="btach ff").plan(X, W),
        f"out_specs of result with spec 'btach ff': {_near('btach', 'batch')}",
    ),
    (
        "near one with axes",
        lambda: sl.jit(lambda x, y: x + y, in_specs=("rows@data _", "rwos _")).plan(X, X),
        f"in_specs of y with spec 'rwos _': {_near('rwos', 'rows')}",
    ),
    (
        "in shard_map",
        lambda: sl.jit(lambda x: sl.shard_map(torch.sin, in_specs=("btach _",), out_specs="batch _")(x)).plan(X),
        _near("btach", "batch"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), [s[1:] for s in SLIPS], ids=[s[0] for s in SLIPS])
def test_a_slip_is_told(call: Any, message: str) -> None:
    (told,) = _told(call)
    assert message in told


def test_a_slip_in_a_function_is_told_once_with_its_line() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = shard(torch.sin(x), "btach _")
        return x

    step = sl.jit(layers)
    (told,) = _told(lambda: (step(X), step(X), step.plan(X)))
    assert "test_typos.py" in told
    assert "with spec 'btach _': 'btach' has no rule" in told


RIGHT: list[tuple[str, Any]] = [
    ("no rule for embed", lambda: sl.jit(torch.matmul, in_specs=("batch embed", "embed ff")).plan(X, W)),
    ("said twice", lambda: sl.jit(torch.matmul, in_specs=("head hidden", "hidden head")).plan(X, W)),
    ("both in one spec", lambda: shard(torch.ones(4, 8), "batch (heads head)", heads=2)),
    ("singular", lambda: shard(X, "batch head")),
    ("numbered", lambda: shard(X, "batch2 ff2")),
    ("a part of a short name", lambda: sl.jit(torch.matmul, in_specs=("batch f", "f _")).plan(X, W)),
    ("axes of its own", lambda: shard(X, "btach@data _")),
    ("whole on purpose", lambda: shard(X, "btach@() _")),
    ("positional", lambda: shard(X, P("data"))),
    ("what a tensor says", lambda: shard(shard(X, "btach@data _") * 1, shard(X, "btach@data _").spec)),
    ("neither has a rule", lambda: sl.jit(lambda x, y: x + y, in_specs=("embed _", "embde _")).plan(X, X)),
]


@pytest.mark.parametrize("call", [r[1] for r in RIGHT], ids=[r[0] for r in RIGHT])
def test_right_programs_are_left_alone(call: Any) -> None:
    assert _told(call) == []


def test_a_rule_says_that_a_name_is_meant() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Mesh(data=2, rules={"heads": "data", "haeds": None}):
            shard(X, "haeds _")
        with Mesh(data=2, rules={"heads": "data"}), pytest.raises(UserWarning, match="'haeds' has no rule"):
            shard(X, "haeds _")
