"""The notation of rules: what it reads, what it refuses, and rules for custom ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardlib.core.errors import ShardingError
from shardlib.rules import Call, Meta, Rule, pattern, rule, rule_for
from shardlib.rules.notation import gradient_pattern, parse
from tests.helpers.prover import call_of, check
from tests.rules.rule_samples import f, s

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("... m k,k n->... m n", "... m k, k n -> ... m n"),
        ("m k, k n -> m n|{0}{1} k:sum", "m k, k n -> m n | k:sum {0} {1}"),
        ("~m n, 1 (a  b) -> (a b) m | ...:sum"[:-10], "~m n, 1 (a b) -> (a b) m"),
        ("... d, ... -> v d | ...:sum v:local {0,1}", "... d, ... -> v d | ...:sum v:local {0,1}"),
        ("k, k -> | k:sum", "k, k -> | k:sum"),
        ("s d, t d -> s d | t:round(s) s:lend(t)", "s d, t d -> s d | t:round(s) s:lend(t)"),
        ("->", "->"),
        ("[dim]->...|dim:sum {0}", "[dim] -> ... | dim:sum {0}"),
        ("[two  dim], dim -> [dim]|two:whole", "[two dim], dim -> [dim] | two:whole"),
        ("~[dim], n -> [dim] | n:size(s.0)  dim:whole(at)", "~[dim], n -> [dim] | n:size(s.0) dim:whole(at)"),
        ("... _  _,~_ _ -> ... _ a", "... _ _, ~_ _ -> ... _ a"),
        ("c, -> , | c:sum", "c, -> , | c:sum"),
        ("b t -> b t | t:halo(3, 0)", "b t -> b t | t:halo(3,0)"),
        ("b t -> b t | t:ring(3, n)", "b t -> b t | t:ring(3,n)"),
        ("b t -> b o _ | o:windows(t, size, 2)", "b t -> b o _ | o:windows(t,size,2)"),
        ("[dim] -> [_],[_] | dim:whole", "[dim] -> [_], [_] | dim:whole"),
        ("n (g c), n g -> n (g c) | (g c):size(C)", "n (g c), n g -> n (g c) | (g c):size(C)"),
    ],
)
def test_pattern_text(text: str, plain: str) -> None:
    assert str(parse(text)) == plain
    assert parse(plain) == parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "it has no `->` between operands and results"),
        ("m k, k n -> m n | q:sum", "`q:sum` names a factor that no tensor has"),
        ("m k, k n -> m n | k:round(q)", "`k:round(q)` names a factor that no tensor has"),
        ("m k, k n -> m n | {2}", "{2} names an operand, but there are 2"),
        (
            "m k, k n -> m n | k sum",
            "'k sum' after the bar is neither `factor:kind` nor a set of operands like `{0,1}`",
        ),
        ("m [k, k n -> m n", "'[' in the term 'm [k' is not a name, `1`, `...` or `(a b)`"),
        ("... m ..., k -> m", "the term '... m ...' has more than one `...`"),
        ("m m -> m", "the term 'm m' has 'm' twice"),
        ("m -> ~m", "`~` marks operands, not results"),
        ("m [dim] -> ...", "the term 'm [dim]' has more than the dims that an argument names, which are all dims"),
        ("[a], [b] -> ...", "dims are named by `[a]` and by `[b]`: one argument names them"),
        (
            "b t -> b t | t:halo(-1)",
            "'t:halo(-1)' after the bar is neither `factor:kind` nor a set of operands like `{0,1}`",
        ),
        ("b t -> b | t:halo(1)", "with `t:halo(1)` every result must have `t`; compute the others in another op"),
        ("b (s t) -> b (s t) | t:halo(1)", "`t:halo(1)` needs `t` as a dim of its own, not as part of `(s t)`"),
        ("... t -> ... t | ...:halo(1)", "`...:halo(1)` needs the name of one dim, not `...`"),
        ("b t -> b t | t:halo(1) t:whole", "`t:halo(1)` cannot be combined with `t:whole`"),
        ("b t -> b t | t:halo(1) b:local", "`t:halo(1)` brings its own local form: remove `:local`"),
        ("b t -> b t | t:ring(1) t:none", "`t:ring(1)` cannot be combined with `t:none`"),
        (
            "b t -> b o t | o:windows(t, 2)",
            "`o:windows(t,2)` reads 't' of operands for 'o' of results, and one is on both sides",
        ),
        (
            "b o t -> b w t | o:windows(w, 2) t:halo(1)",
            "`o:windows(w,2)` is of a gradient, and all that is read has to be",
        ),
        ("b t -> b o | o:windows(s, 2)", "`o:windows(s,2)` names a factor that no operand has"),
        ("b (t r) -> b o | o:windows(t, 2)", "`o:windows(t,2)` needs `t` as a dim of its own, not as part of `(t r)`"),
        ("b t -> b o | o:windows(t, 2) t:none", "`o:windows(t,2)` cannot be combined with `t:none`"),
        (
            "b t -> b o | o:windows(t)",
            "'o:windows(t)' after the bar is neither `factor:kind` nor a set of operands like `{0,1}`",
        ),
        ("m -> m | (m n):size(k)", "`(m n):size(k)` names a factor that no tensor has"),
        ("[_] -> ...", "`[_]` needs a `[dim]` in another term: it names the argument"),
        ("[dim] -> ... | d:sum", "`d:sum` names a factor that no tensor has"),
    ],
)
def test_bad_pattern(text: str, message: str) -> None:
    with pytest.raises(ShardingError) as error:
        parse(text)
    assert error.value.offenders == (message,)


def call(pattern_text: str, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> Rule | None:
    metas = tuple(Meta(x, torch.float32) for x in shapes)
    return pattern(pattern_text)(Call(aten.mm.default, metas, {}, metas, (Meta(out, torch.float32),)))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k, k n -> m n", [(2, 3), (4, 5)], "`k` is 4 in [4, 5] and 3 before"),
        ("m k, k n -> m n", [(2, 3), (3, 5, 1)], "[3, 5, 1] does not have the dims of `k n`"),
        ("m (a b), a n -> m n", [(2, 8), (3, 5)], "a dim of size 8 is no `(a b)` with 3 for the sizes that are known"),
        ("m (a b), k n -> m n", [(2, 8), (3, 5)], "the size of `a` does not follow"),
        ("m 1, k n -> m n", [(2, 8), (3, 5)], "[2, 8] has size 8 where `m 1` says 1"),
    ],
)
def test_pattern_that_does_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ShardingError, match=r"does not fit the call aten\.mm\.default") as error:
        call(text, shapes, (2, 5))
    assert message in error.value.offenders


def test_the_gradient_of_a_halo_has_no_pattern() -> None:
    assert gradient_pattern("n c _, c -> n c _ | {0}", "0 1", wrt="0 1") == "n c _, n c _, c -> n c _, c | n:sum {0}"
    assert gradient_pattern("b t -> b o _ | o:windows(t,4,2) {0}") == "b o _ -> b t | o:windows(t,4,2) {0}"
    with pytest.raises(AssertionError, match="gradient of a halo"):
        gradient_pattern("b t -> b t | t:halo(1)")


def test_a_lost_factor_stays_whole_unless_the_rule_says_more() -> None:
    plain = call("m k, k n -> m n", [(2, 3), (3, 4)], (2, 4))
    summed = call("m k, k n -> m n | k:sum", [(2, 3), (3, 4)], (2, 4))
    assert plain is not None
    assert summed is not None
    assert (plain.whole, plain.reduce) == ({"k"}, {})
    assert (summed.whole, summed.reduce) == (set(), {"k": "sum"})


# Rules for custom ops -------------------------------------------------------------------------------------------------


@torch.library.custom_op("shardlib_tests::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return a @ b if bias is None else a @ b + bias


product.register_fake(lambda a, b, bias=None: a.new_empty(*a.shape[:-1], b.shape[1]))


def test_rule_of_a_custom_op() -> None:
    assert rule_for(call_of(torch.ops.shardlib_tests.product.default, (f(2, 3), f(3, 4)), {})[0]) is None
    assert rule("... m k, k n, n -> ... m n | {0}")(product) is product
    wrong = check(s("shardlib_tests::product", f(2, 3, 5), f(5, 4)))
    wrong += check(s("shardlib_tests::product", f(3, 5), f(5, 4)))
    assert not wrong
    with_bias = call_of(torch.ops.shardlib_tests.product.default, (f(3, 5), f(5, 4), f(4)), {})
    sample = s("shardlib_tests::product", f(3, 5), f(5, 4), f(4))
    assert check(sample, lambda _: rule_for(with_bias[0]))  # not linear beside a bias
    rule("... m k, k n, n -> ... m n")(torch.ops.shardlib_tests.product.default)
    assert not check(s("shardlib_tests::product", f(3, 5), f(5, 4), f(4)))


@pytest.mark.parametrize(
    ("text", "op", "message"),
    [
        ("m k, k n -> m n", product, "it takes 3 tensors, the rule has 2 operands"),
        ("m k, k n, n -> m n, m", product, "it returns 1 values, the rule has 2 results"),
        ("m k, k n -> m n | k:local", product, "`k:local` needs a local form: sl.rule(text, local=function)"),
        (
            "m k, k n -> m n | k:round(m)",
            product,
            "`k:round(m)` is for the library's own rules",
        ),
        ("m, n -> m", aten.cat.default, "it takes a list of tensors"),
        ("[dims], n, n -> ...", product, "`[dims]` names no argument of the op"),
        ("m k, k n, n -> m n | k:whole(t)", product, "`k:whole(t)` names no argument of the op"),
        ("m k, k n, n -> m n | m:size(rows.0)", product, "`m:size(rows.0)` names no argument of the op"),
        ("m k, k n, n -> m n | m:halo(2,reach)", product, "`m:halo(2,reach)` names no argument of the op"),
        ("m, m -> m", aten.add_.Tensor, "it writes to an argument"),
    ],
)
def test_rule_that_does_not_fit_the_op(text: str, op: Any, message: str) -> None:
    with pytest.raises(ShardingError, match="does not fit") as error:
        rule(text)(op)
    assert message in error.value.offenders


def test_rule_for_something_else() -> None:
    with pytest.raises(ShardingError, match=r"rules belong to ops of torch\.library"):
        rule("m -> m")(torch.sin)
