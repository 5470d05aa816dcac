"""Samples for `shardlib.rules.nn_ops.loss`, beside those that `tests.rules.rule_samples` has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from tests.helpers.prover import Sample
from tests.rules.samples.make import f, i, pos, s

aten = torch.ops.aten


def nll_means() -> Iterator[Sample]:
    yield s("nll_loss_forward", f(6, 5).half(), torch.arange(6) % 5, pos(5).half(), 1, -100)
    yield s("nll_loss_forward", f(5), torch.tensor(3), pos(5), 1, -100)
    planes = i(4, 3, 2, 5)
    for reduction, weight, ignore in itertools.product((0, 1, 2), (None, pos(4)), (-100, 2)):
        yield s("nll_loss2d_forward", f(3, 4, 2, 5), planes, weight, reduction, ignore)
        grad = f(3, 2, 5) if reduction == 0 else f()
        yield s("nll_loss2d_backward", grad, f(3, 4, 2, 5), planes, weight, reduction, ignore, pos())


def gradients_of_scores() -> Iterator[Sample]:
    """What `nll_loss_backward` makes of each target, and what goes on with it."""
    cases = (((5, 4), i(4, 5)), ((4,), torch.tensor(3)), ((4,), torch.tensor(2)), ((3, 4, 2, 5), i(4, 3, 2, 5)))
    for (shape, target), dtype in itertools.product(cases, (torch.float64, torch.bfloat16)):
        for grad, ignore in itertools.product((f(), f(*target.shape)), (-100, 2)):
            scores, how = f(*shape).log_softmax(min(1, len(shape) - 1)), 2 if not grad.dim() else 0
            back = aten.nll_loss2d_backward if len(shape) > 2 else aten.nll_loss_backward
            found = back(grad, scores, target, None, how, ignore, torch.ones(()).double())
            grads = (x.to(dtype) for x in (found, scores, found.sum(min(1, len(shape) - 1))))
            yield s("shardlib::scores_backward", *grads, min(1, len(shape) - 1))


def margin_loss() -> Iterator[Sample]:
    yield s("multi_margin_loss", f(5, 4), i(4, 5))
    yield s("multi_margin_loss", f(5, 4), i(4, 5), reduction=1, margin=2)
    yield s("huber_loss", f(3, 5) * 3, f(3, 5), delta=2.0)
    yield s("binary_cross_entropy_with_logits", f(3, 5), f(3, 5).sigmoid(), pos_weight=pos(5))
    for how in (0, 1, 2):
        yield s("soft_margin_loss", f(3, 5), f(3, 5).sign(), how)
        yield s("soft_margin_loss_backward", f() if how else f(3, 5), f(3, 5), f(3, 5).sign(), how)
        for weight, pos_weight in ((None, None), (f(5), pos(5)), (f(3, 1), None), (None, pos(3, 1))):
            yield s("binary_cross_entropy_with_logits", f(3, 5), f(3, 5).sigmoid(), weight, pos_weight, how)
        rows = (((5, 4), i(4, 5), pos(4)), ((3, 5), i(5, 3), None), ((4,), i(4, 1), pos(4)), ((4,), i(4), None))
        for shape, target, weight in rows:
            grad = f(*shape[:-1]) if how == 0 else f()
            yield s("multi_margin_loss", f(*shape), target, 1, 1.5, weight, how)
            yield s("multi_margin_loss_backward", grad, f(*shape), target, 2, 1.5, weight, how)
        for shape in ((5, 4), (4,)):
            labels = torch.tensor([[3, 0, -1, 1], [0, -1, -1, -1], [2, 1, 3, 0], [1, 3, -1, 0], [3, -1, 0, 0]])
            target = labels if len(shape) == 2 else labels[0]
            grad = f(*shape[:-1]) if how == 0 else f()
            yield s("multilabel_margin_loss_forward", f(*shape), target, how)
            known = aten.multilabel_margin_loss_forward(f(*shape), target, how)[1]
            yield s("multilabel_margin_loss_backward", grad, f(*shape), target, how, known)


def ctc_loss() -> Iterator[Sample]:
    x, targets, lengths = f(6, 3, 4).log_softmax(-1), i(3, 3, 2) + 1, (torch.tensor([6, 5, 6]), torch.tensor([2, 1, 2]))
    for longest in (2, 3):
        loss, alpha = torch.ops.shardlib.ctc_loss(x, targets, *lengths, 0, False, longest)
        # Of a sequence that is shorter than others, the end of its table is not filled.
        same = (torch.tensor([6, 6, 6]), torch.tensor([2, 2, 2]))
        yield s("shardlib::ctc_loss", x, targets, *same, 0, False, longest)
        yield s("shardlib::ctc_loss_backward", f(3), x, targets, *lengths, loss, alpha, 0, False)


SAMPLES: tuple[Callable[[], Iterator[Sample]], ...] = (nll_means, gradients_of_scores, margin_loss, ctc_loss)
