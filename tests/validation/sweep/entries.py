"""The entries of torch's `op_db`, and their samples as functions of tensors."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SIZES = ("even", "uneven")
_EVEN = {"XS": 2, "S": 4, "M": 12, "L": 24}  # instead of torch's 3, 5, 10, 20: 2 divides all of them, 4 most
_READ = 200  # samples of an entry that are looked at before some are chosen

# Whose samples lay segments on data of torch's own sizes: on other data the kernel reads what lies behind it.
_OWN_SIZES = {"_segment_reduce"}

# What these return is whatever the memory held: only shape and dtype mean something.
_UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}


@cache
def op_db() -> list[Any]:
    """Torch's OpInfos; who asks one for samples is not looked for among unittests, which took most of the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations, common_utils  # takes seconds, and scipy
        from torch.testing._internal.opinfo import core
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    common_methods_invocations.wrapper_set_seed = _unseeded
    found: list[Any] = common_methods_invocations.op_db
    return found


@cache
def entries() -> dict[str, Any]:
    """All OpInfos with a float32 form on the CPU, by name and variant: `mul`, `std.unbiased`."""
    named = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db()}
    return {name: op for name, op in named.items() if op.supports_dtype(torch.float32, "cpu")}


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's entries seed the generator within the call; a trial does so before it, as a program has to."""
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One call: a function of tensors, the tensors, and which of them are differentiated.

    `finish` is what torch's own gradient tests apply to the result: an eigenvector, say, is defined up to a phase.
    """

    label: str
    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    wants: tuple[bool, ...]
    finish: Callable[[Any], Any]
    shapes_only: bool = False


def cases(name: str, sizes: str, limit: int) -> tuple[list[Case], list[Case]]:
    """Up to `limit` samples of an entry, spread over all that it has; and in-place and out= forms of the outer two.

    Samples are float64 where the op has that, which makes the sharper oracle.
    """
    op = entries()[name]
    dtype = torch.float64 if op.supports_dtype(torch.float64, "cpu") else torch.float32
    try:
        samples = _samples(op, dtype, "uneven" if op.name in _OWN_SIZES else sizes)
    except (RuntimeError, IndexError):  # some are written for torch's own sizes: these then, cut only where it is even
        samples = _samples(op, dtype, "uneven")
    plain = [_Sample(name, op, samples[i], f"sample {i}").call() for i in _spread(len(samples), limit)]
    outer = [_Sample(name, op, samples[i], f"sample {i}") for i in _spread(len(samples), 2)]
    return plain, [case for s in outer for case in (s.in_place(), s.out()) if case is not None]


def _samples(op: Any, dtype: torch.dtype, sizes: str) -> list[Any]:
    with _sized(sizes):
        torch.manual_seed(0)
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), _READ))


def _spread(n: int, limit: int) -> list[int]:
    """At most `limit` indices below `n`, the first and the last among them."""
    return list(range(n)) if n <= limit else sorted({round(k * (n - 1) / max(limit - 1, 1)) for k in range(limit)})


@contextmanager
def _sized(sizes: str) -> Iterator[None]:
    """Samples are made of a few global sizes, which their modules read each time."""
    changed = {} if sizes == "uneven" else _EVEN
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("torch.testing._internal.")]
    with ExitStack() as stack:
        for module, (key, n) in itertools.product(modules, changed.items()):
            if type(vars(module).get(key)) is int:
                stack.enter_context(mock.patch.object(module, key, n))
        yield


class _Sample:
    """One sample, taken apart into its tensors and the rest."""

    def __init__(self, name: str, op: Any, sample: Any, label: str) -> None:
        self.name, self.op, self.sample, self.label = name, op, sample, label
        self.leaves, self.tree = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self.where = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        self.tensors = tuple(self.leaves[i].detach() for i in self.where)
        self.wants = tuple(bool(self.leaves[i].requires_grad) for i in self.where)
        rest = {i: x for i, x in enumerate(self.leaves) if i not in self.where}
        self.rest = [rest.get(i) for i in range(len(self.leaves))]

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.rest)
        for i, x in zip(self.where, tensors, strict=True):
            leaves[i] = x
        source, args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return source, args, kwargs

    def call(self) -> Case:
        def fn(*tensors: Tensor) -> Any:
            source, args, kwargs = self.arguments(tensors)
            return self.op.op(source, *args, **kwargs)

        return self.case("", fn, self.wants)

    def in_place(self) -> Case | None:
        op = self.op.inplace_variant
        if op is None or not isinstance(self.sample.input, Tensor) or self.sample.broadcasts_input:
            return None

        def fn(*tensors: Tensor) -> Any:
            source, args, kwargs = self.arguments(tensors)
            written = source.clone()
            return op(written, *args, **kwargs), written

        wants = self.wants if self.op.supports_inplace_autograd else (False,) * len(self.wants)
        return self.case(", in place", fn, wants)

    def out(self) -> Case | None:
        if not self.op.supports_out or not self.tensors:
            return None

        def fn(*tensors: Tensor) -> Any:
            source, args, kwargs = self.arguments(tensors)
            like = self.op.op(source, *args, **kwargs)
            buffers = pytree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, like)
            if isinstance(buffers, tuple | list):
                buffers = tuple(buffers)
            return self.op.op(source, *args, **kwargs, out=buffers), buffers

        return self.case(", out=", fn, (False,) * len(self.wants))

    def case(self, form: str, fn: Callable[..., Any], wants: tuple[bool, ...]) -> Case:
        sample = self.sample
        finish = lambda out: sample.output_process_fn_grad(out[0] if form else out)
        return Case(self.label + form, fn, self.tensors, wants, finish, self.name in _UNINITIALIZED)
