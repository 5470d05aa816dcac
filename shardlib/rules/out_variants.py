"""Ops in place and with out=, of ops that are written as other ops: the same form, and its results copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_private import OpOverload, schema_of, torchs_own_forms

Composite = Callable[..., Any]


def full_name(name: str) -> str:
    """`mm` and `add.Tensor` are ATen's; other namespaces are written out, `shardlib::attention`."""
    return name if "::" in name else f"aten::{name}"


def op_named(name: str) -> OpOverload:
    namespace, _, rest = full_name(name).partition("::")
    packet, _, overload = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


def by_torch(*names: str) -> dict[str, Composite]:
    """The forms that torch itself has of these ops."""
    forms = torchs_own_forms(list(map(op_named, names)))
    return {name: forms[op_named(name)] for name in names}


def writers(target: OpOverload, form: Composite) -> Iterator[tuple[OpOverload, Composite]]:
    """The ops that write what `target` returns to `self` or to their out= arguments, and their forms."""
    namespace, _, name = schema_of(target).name.partition("::")
    ops = getattr(torch.ops, namespace)
    for packet in (getattr(ops, n, None) for n in (name, f"{name}_")):
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if op is not target and functional_form(op) is target and _plain(op, target):
                yield op, _writing(op, form)


def _plain(op: OpOverload, target: OpOverload) -> bool:
    """Whether it writes one tensor for each result, and draws nothing: random numbers have rules of their own."""
    written = [a for a in schema_of(op).arguments if a.name in written_arguments(op)]
    outs = [a for a in written if a.is_out]
    kinds = {str(a.type) for a in written}
    random = torch.Tag.nondeterministic_seeded in op.tags
    single = len(written) == len(schema_of(target).returns) and kinds == {"Tensor"}
    return single and not random and (written == outs or [a.name for a in written] == ["self"])


def refuse_cast(value: Tensor, into: Tensor) -> None:
    """Refuse, in torch's words, to write what would lose its imaginary part or its fractions."""
    if not torch.can_cast(value.dtype, into.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {into.dtype}")


def _writing(op: OpOverload, form: Composite) -> Composite:
    outs = [a.name for a in schema_of(op).arguments if a.is_out]

    def write(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs[name] for name in outs] if outs else [args[0]]
        results = form(*args, **{k: v for k, v in kwargs.items() if k not in outs})
        if results is NotImplemented:
            return NotImplemented
        pairs = list(zip(given, results if isinstance(results, tuple) else (results,), strict=True))
        if any((a.shape != b.shape and a.numel()) or not torch.can_cast(b.dtype, a.dtype) for a, b in pairs):
            return NotImplemented  # torch would resize it, or refuse
        for a, b in pairs:
            (a if a.shape == b.shape else a.resize_(b.shape)).copy_(b)
        return tuple(given) if len(given) > 1 else given[0]

    return write
