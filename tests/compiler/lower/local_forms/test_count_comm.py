"""What ops send while they run is in the estimate as in the plan: of every row of the tables, and of users' ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import Mesh, P
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Inside
from shardlib.rules.rule import Labels, Rule
from tests.helpers.prover import Sample, mapped, rule_of, target_of
from tests.rules.rule_samples import SAMPLES


def estimated(plan: Plan) -> tuple[float, int]:
    """The bytes and messages of ops of their own by which the plan was decided."""
    search = plan.compiled.propagated.search
    found = [
        (nbytes, sender.times)
        for kind, senders in enumerate(search.problem.senders)
        for sender in senders
        for cut in [search.estimate.slot_axes(kind, search.choices[kind])]
        for _, _, nbytes in search.problem.sends(sender.op, {x: cut[s] for x, s in sender.slots if cut[s]})
    ]
    return sum(nbytes * times for nbytes, times in found), sum(times for _, times in found)


def written(plan: Plan) -> tuple[float, int]:
    """Those that the plan has."""
    found = [c.bytes for c in plan.compiled.program.collectives if isinstance(c.because, Inside)]
    return sum(found), len(found)


def _plans(sample: Sample) -> Iterator[tuple[str, Plan]]:
    """Plans of a call in which one of the dims is cut that its local form is for."""
    name, args, kwargs = sample
    rule, tensors = rule_of(name, *args, **kwargs), list[Tensor]()
    mapped((args, kwargs), tensors.append)
    if rule.local.emit is None or rule.ties.ring or rule.ties.lends:
        return

    def program(*given: Tensor) -> Any:
        feed = iter(given)
        some, named = mapped((tuple(args), dict(kwargs)), lambda _: next(feed))
        return target_of(name)(*some, **named)

    for f in sorted(rule.local.factors - rule.whole - rule.ties.follows.keys()):
        specs = [_spec(rule, labels, f) for labels in rule.operands]
        if any("a" in spec for spec in specs):
            with Mesh.abstract(a=2):
                yield f"{name}, {f} cut, {specs}", sl.jit(program, in_specs=tuple(specs)).plan(*tensors)


def _spec(rule: Rule, labels: Labels, f: str) -> P:
    both = {f, *(t for t, s in rule.ties.follows.items() if s == f)}
    return P(*("a" if dim and dim[0] in both else None for dim in labels))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("family", SAMPLES, ids=lambda g: g.__name__)
def test_what_is_estimated_is_what_is_sent(family: Callable[[], Iterator[Sample]]) -> None:
    wrong, named = [], set[str]()
    for sample in family():
        if sample[0] not in named:
            named.add(sample[0])
            for said, plan in _plans(sample):
                if estimated(plan) != written(plan):
                    wrong.append(f"{said}: {estimated(plan)} estimated, {written(plan)} in the plan")
    assert not wrong, "\n".join(wrong)


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


def _centered_here(x: Tensor) -> Tensor:
    return x - sl.psum(x.sum(0), "n") / sl.piece("n").whole


def test_a_local_form_of_a_user_counts() -> None:
    """What a form sends that nobody of the library wrote is priced, too."""
    op = torch.library.custom_op("inside::centered", _centered, mutates_args=())
    op.register_fake(_centered)
    sl.rule("n d -> n d | n:local", local=_centered_here)(op)
    x = torch.empty(64, 4096, device="meta")
    with Mesh.abstract(a=8):
        one = sl.jit(op, in_specs=("n@a _",)).plan(x)
    assert estimated(one) == written(one) == (2 * 4096 * 4 * 7 / 8, 1)
    assert sl.prove(op, torch.randn(5, 3)).cuts > 1


def test_ops_that_decide_together_send_what_each_of_them_does() -> None:
    """Of these two slices one sends a row, and the other nothing."""
    with sl.Mesh.abstract(seq=8, machine="h100"):
        plan = sl.jit(lambda x: x[1:] - x[:-1], in_specs=("s@seq _",)).plan(torch.empty(1024, 64, device="meta"))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("ppermute", 256)]
