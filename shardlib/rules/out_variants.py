"""In-place and out= variants of decomposed ops: the decomposition, whose results are copied to the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of, torchs_own_forms

Composite = Callable[..., Any]


def full_name(name: str) -> str:
    """Returns the name with its namespace: `aten` unless written out, as in `shardlib::attention`."""
    return name if "::" in name else f"aten::{name}"


def op_named(name: str) -> OpOverload:
    namespace, _, rest = full_name(name).partition("::")
    packet, _, overload = rest.partition(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return op


def by_torch(*names: str) -> dict[str, Composite]:
    """Torch's own decompositions of these ops."""
    forms = torchs_own_forms(list(map(op_named, names)))
    return {name: forms[op_named(name)] for name in names}


def writers(target: OpOverload, form: Composite) -> Iterator[tuple[OpOverload, Composite]]:
    """Yields the ops that write the results of `target` to `self` or to out= arguments, with their decompositions."""
    namespace, _, name = schema_of(target).name.partition("::")
    ops = getattr(torch.ops, namespace)
    for packet in (getattr(ops, n, None) for n in (name, f"{name}_")):
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if op is not target and functional_form(op) is target and _is_plain(op, target):
                yield op, _writing(op, form)


def _is_plain(op: OpOverload, target: OpOverload) -> bool:
    """Returns whether the op writes one tensor per result and draws no random numbers, which have their own rules."""
    written = [a for a in schema_of(op).arguments if a.name in written_arguments(op)]
    outs = [a for a in written if a.is_out]
    kinds = {str(a.type) for a in written}
    random = torch.Tag.nondeterministic_seeded in op.tags
    single = len(written) == len(schema_of(target).returns) and kinds == {"Tensor"}
    return single and not random and (written == outs or [a.name for a in written] == ["self"])


def refuse_cast(value: Tensor, into: Tensor) -> None:
    """Raises torch's error for a cast that would lose the imaginary part or the fractions."""
    if not torch.can_cast(value.dtype, into.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {into.dtype}")


def _writing(op: OpOverload, form: Composite) -> Composite:
    outs = [a.name for a in schema_of(op).arguments if a.is_out]

    def write(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs[name] for name in outs] if outs else [args[0]]
        results = form(*args, **{k: v for k, v in kwargs.items() if k not in outs})
        if results is NotImplemented:
            return NotImplemented
        pairs = list(zip(targets, results if isinstance(results, tuple) else (results,), strict=True))
        if any((a.shape != b.shape and a.numel()) or not torch.can_cast(b.dtype, a.dtype) for a, b in pairs):
            return NotImplemented  # torch resizes the argument, or raises
        for a, b in pairs:
            (a if a.shape == b.shape else a.resize_(b.shape)).copy_(b)
        return tuple(targets) if len(targets) > 1 else targets[0]

    return write
