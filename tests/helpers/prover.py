"""What tests ask of rules: `sl.prove` for any call, with the rule of the table or another one in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.rules import rule_for
from shardlib.rules.rule import Call, Meta, Rule
from shardlib.testing.prove_rule import label_faults, linearity_faults, result_faults
from shardlib.testing.run_one_op import Trial

Sample = tuple[str, tuple[Any, ...], dict[str, Any]]  # name of an op, its arguments


def call_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[torch.Tensor], list[Any]]:
    """What the rules see of a concrete call, its tensors in order, and what it returns."""
    out = kernel(target)(*args, **kwargs)
    results = list(out) if isinstance(out, tuple | list) else [out]
    tensors: list[torch.Tensor] = []

    def abstract(value: Any) -> Any:
        tensors.append(value)
        return Meta(tuple(value.shape), value.dtype)

    abstract_args, abstract_kwargs = mapped((tuple(args), dict(kwargs)), abstract)
    metas = tuple(Meta(tuple(t.shape), t.dtype) for t in tensors)
    outs = tuple(Meta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    return Call(target, abstract_args, abstract_kwargs, metas, outs), tensors, results


def kernel(target: Any) -> Any:
    """What runs an op here: torch's decomposition, when the op has a kernel for other devices only."""
    return torch._decomp.decomposition_table[target] if target.name() in _ELSEWHERE else target


_ELSEWHERE = ("aten::_fused_rms_norm_backward",)


@contextmanager
def here(target: Any) -> Iterator[None]:
    """An op with a kernel for other devices only runs on this one, too."""
    if (form := kernel(target)) is target:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl(target, form, "CPU")
    try:
        yield
    finally:
        library._destroy()


def mapped(value: Any, f: Callable[[Any], Any], kind: Any = torch.Tensor) -> Any:
    """`value` with every leaf of `kind` replaced, in the order of arguments."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(v, f, kind) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, f, kind) for k, v in value.items()}
    return f(value) if isinstance(value, kind) else value


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal in shape and dtype, and in value up to the precision of the dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    room = max(tolerance, _precision(a.dtype))
    return torch.allclose(a, b, rtol=room, atol=room, equal_nan=True)


def _precision(dtype: torch.dtype) -> float:
    """What rounding may cost in a few operations."""
    return {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 0.0)


def target_of(name: str) -> Any:
    """The op that `mm`, `add.Tensor` or `shardlib::attention` names."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")


def check(sample: Sample, planted: Callable[[Call], Rule | None] = rule_for, each: int = 1) -> list[str]:
    """What is wrong with the rule of one call, in every `each`-th cut; `planted` gives another rule in its place."""
    name, args, kwargs = sample
    target = target_of(name)
    rule = planted(call_of(target, args, kwargs)[0])
    if rule is None:
        return [f"{name}: no rule"]
    with here(target):  # what `empty` holds means nothing
        call, values = Trial.trace(target, args, kwargs), "empty" not in name
        call.op.rule = rule
        try:
            if not (wrong := [*label_faults(call)]):
                wrong = [*result_faults(call, each, values=values), *(linearity_faults(call) if values else ())]
        except ShardingError as error:
            wrong = [str(error)]
    return [f"{name}: {fault}" for fault in wrong]


def takes_turned(sample: Sample) -> bool:
    """Whether the op takes tensors whose dims lie in memory in the other order."""
    name, args, kwargs = sample
    with here(target_of(name)):
        return Trial.trace(target_of(name), args, kwargs).takes_reversed_strides


def rule_of(name: str, *args: Any, **kwargs: Any) -> Rule:
    """The rule of a call that has one."""
    found = rule_for(call_of(target_of(name), args, kwargs)[0])
    assert found is not None
    return found
