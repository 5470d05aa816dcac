"""Rules for ops that nobody here has seen, by the guide alone: one line each, proved; and rules that are wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import ShardingError
from shardlib.prove import cuts
from tests.prover import rule_of, target_of
from tests.rule_samples import SAMPLES

aten = torch.ops.aten
GUIDE = Path(sl.__file__).parent / "rules" / "README.md"


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def op(fn: Callable[..., Tensor]) -> Any:
    """A custom op of a function."""
    made = torch.library.custom_op(f"proving::{fn.__name__}", fn, mutates_args=())
    made.register_fake(fn)
    return made


@op
def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).square().sum(-1)


@op
def max_plus(x: Tensor, y: Tensor) -> Tensor:
    """Of no numbers, as a piece may have them, the maximum is -inf."""
    return (x[:, :, None] + y).amax(1) if len(y) else x.new_full((len(x), y.shape[1]), -math.inf)


@op
def form(x: Tensor, a: Tensor, y: Tensor) -> Tensor:
    return ((x @ a) * y).sum(-1)


@op
def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(x @ w) * (x @ v)


@op
def spread(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim) - x.amin(dim) if x.shape[dim] else x.sum(dim)


@op
def energy(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    return x.square().sum(dims, keepdim=keepdim)


@op
def copies(x: Tensor, count: int) -> Tensor:
    return x.repeat(count, 1)


@op
def blend(x: Tensor, w: Tensor, bias: Tensor | None, squash: bool) -> Tensor:
    y = x @ w if bias is None else x @ w + bias
    return y.tanh() if squash else y


@op
def head_means(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).mean(-1)


OPS: dict[str, tuple[Any, tuple[Any, ...], str, list[tuple[str, str]]]] = {
    "distances": (
        distances,
        (r(5, 6), r(7, 6)),
        "n d, m d -> n m | d:sum",
        [
            ("n d, m d -> n m | d:sum {0}", r"it is not linear in the operands \{0\}"),
            ("n d, m d -> n m | d:max", "d@a on a=2: result 0 is wrong: it is off by"),
            ("n d, m d -> m n | d:sum", "does not fit the call"),
        ],
    ),
    "max_plus": (
        max_plus,
        (r(5, 6), r(6, 7)),
        "m k, k n -> m n | k:max",
        [("m k, k n -> m n | k:sum", "k@a on a=2: result 0 is wrong")],
    ),
    "form": (
        form,
        (r(5, 6), r(6, 7), r(5, 7)),
        "b i, i j, b j -> b | i:sum j:sum {0} {1} {2}",
        [("b i, i j, b j -> b | i:sum j:sum {0,1}", r"it is not linear in the operands \{0,1\}")],
    ),
    "gated": (
        gated,
        (r(5, 6), r(6, 7), r(6, 7)),
        "... m k, k n, k n -> ... m n | k:whole {2}",
        [
            ("... m k, k n, k n -> ... m n | k:sum", "k@a on a=2: result 0 is wrong"),
            ("... m k, k n, k n -> ... m n | {1}", r"it is not linear in the operands \{1\}"),
        ],
    ),
    "spread": (
        spread,
        (r(2, 5, 6), -2),
        "[dim] -> ... | dim:whole",
        [
            ("[dim] -> ... | dim:sum", "dim@a on a=2: result 0 is wrong"),
            ("[dim] -> [dim] | dim:whole", "does not fit the call"),
        ],
    ),
    "energy": (
        energy,
        (r(2, 5, 6), [0, 2], True),
        "[dims] -> ... | dims:sum",
        [("[dims] -> ... | dims:max", "dims@a on a=2: result 0 is wrong")],
    ),
    "copies": (
        copies,
        (r(6), 5),
        "d -> n d | n:size(count) {0}",
        [("d -> n d | {0}", "n@a on a=2: result 0 is")],
    ),
    "blend": (
        blend,
        (r(5, 6), r(6, 7), None, True),
        "n k, k m, m -> n m | k:sum k:whole(squash)",
        [("n k, k m, m -> n m | k:sum", "k@a on a=2: result 0 is wrong")],
    ),
    "blend without a bend": (
        blend,
        (r(5, 6), r(6, 7), r(7), False),
        "n k, k m, m -> n m | k:whole",
        [("n k, k m, m -> n m | k:sum k:whole(squash)", "k@a on a=2: result 0 is wrong")],
    ),
    "head_means": (
        head_means,
        (r(5, 6), 3),
        "b _ -> b _ | {0}",
        [("b d -> b d | {0}", "does not fit the call|spelled|result 0")],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_a_rule_in_one_line_and_a_proof_in_one_call(name: str) -> None:
    made, args, text, _ = OPS[name]
    sl.rule(text)(made)
    assert sl.rule(made) == text
    proof = sl.prove(made, *args)
    assert re.fullmatch(rf"proving::{name.split()[0]} \({re.escape(text)}\) of .*: right in all \d+ cuts", str(proof))
    assert proof.cuts >= 5


@pytest.mark.parametrize(("name", "text", "words"), [(n, *w) for n, (*_, wrong) in OPS.items() for w in wrong])
def test_a_rule_that_is_wrong_is_told_with_the_cut(name: str, text: str, words: str) -> None:
    made, args, right, _ = OPS[name]
    try:
        sl.rule(text)(made)
        with pytest.raises(ShardingError, match=words):
            sl.prove(made, *args)
    finally:
        sl.rule(right)(made)


def test_what_has_no_rule_is_told_what_to_write() -> None:
    bare = op(_bare)
    assert sl.rule(bare).startswith('@sl.rule("<dims of x>, <dims of scale> -> <dims of result 0>")')
    with pytest.raises(ShardingError, match=r"_bare has no sharding rule[\s\S]*sl\.rule\(op\) says what to write"):
        sl.prove(bare, r(5), r(5))
    with pytest.raises(ShardingError, match="3 cannot be proved"):
        sl.prove(3)


def _bare(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


LIBRARY = [sample for samples in SAMPLES for sample in samples() if "empty" not in sample[0]]  # which mean nothing


@pytest.mark.parametrize("i", range(0, len(LIBRARY), 29))
def test_it_proves_the_library_s_own_rules(i: int) -> None:
    name, args, kwargs = LIBRARY[i]
    if len(list(cuts(rule_of(name, *args, **kwargs)))) > 1:
        assert sl.prove(target_of(name), *args, **kwargs).cuts > 1
        return
    with pytest.raises(ShardingError, match="no dim of this call may be cut"):
        sl.prove(target_of(name), *args, **kwargs)


def test_what_is_no_proof_is_none() -> None:
    with pytest.raises(ShardingError, match="is not put to the test"):
        sl.prove(aten.mm.default, r(1, 1), r(1, 1))
    with pytest.raises(ShardingError, match="shows the ops that it is made of: prove these"):
        sl.prove(aten.var.correction, r(5, 6), [0])
    with pytest.raises(ShardingError, match=r"OpOverloadPacket.* cannot be proved"):
        sl.prove(aten.mm, r(5, 6), r(6, 7))
    product = op(_product)
    sl.rule("m k, k n -> m n | k:sum {0} {1}")(product)
    assert sl.prove(product, torch.randn(50, 600), torch.randn(600, 7)).cuts, "float32 rounds"


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def test_a_rule_reduces_in_one_way() -> None:
    """What a result owes is one sum, or one maximum: of two kinds, a program once knew the last."""
    with pytest.raises(ShardingError, match="it reduces by max and sum: what a result owes is of one kind"):
        sl.rule("m k, m j -> m | k:sum j:max")(op(_two_ways))


def _two_ways(x: Tensor, y: Tensor) -> Tensor:
    return x.abs().sum(1) * y.amax(1)


def test_an_op_that_refuses_empty_pieces_is_told() -> None:
    best = op(_best)
    sl.rule("n d -> n | d:max")(best)
    with pytest.raises(ShardingError, match=r"d@a on a=4: IndexError: amax\(\)"):
        sl.prove(best, r(5, 6))


def _best(x: Tensor) -> Tensor:
    return x.amax(-1)


def test_the_guide_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(GUIDE), "exec"), {})
