"""Makes functional forms of users' ops that write to their operands.

Such a form copies the written operands, calls the op on the copies, and returns its results, then the copies. It has
the op's own fake form, and no rule: it runs on whole operands.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.library import Library

from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

_library = Library("shardlib_written", "DEF")  # type: ignore[no-untyped-call]


@functools.cache
def copying_form(op: OpOverload) -> OpOverload | None:
    """Returns the functional form of an op that writes to tensors, with positional arguments.

    Returns None if the op writes to lists of tensors, or returns a written tensor.
    """
    arguments, written = schema_of(op).arguments, written_arguments(op)
    position = {a.name: i for i, a in enumerate(arguments)}
    if any(str(a.type) != "Tensor" for a in arguments if a.name in written):
        return None
    if any(r.alias_info is not None for r in schema_of(op).returns):
        return None
    results = [str(r.type) for r in schema_of(op).returns]

    def form(*args: Any) -> Any:
        values = [x.clone() if a.name in written else x for a, x in zip(arguments, args, strict=True)]
        named = {a.name: values[position[a.name]] for a in arguments if a.kwarg_only}
        result = op(*values[: len(values) - len(named)], **named)
        copies = (values[position[name]] for name in written)
        out = [*(result if len(results) > 1 else [result] * len(results)), *copies]
        return tuple(out) if len(out) > 1 else out[0]

    name = str(op).replace(".", "_")
    while hasattr(torch.ops.shardlib_written, name):  # of an op that was defined again
        name += "_"
    takes = ", ".join(f"{a.type} {a.name}" for a in arguments)
    gives = ", ".join([*results, *["Tensor"] * len(written)])
    _library.define(f"{name}({takes}) -> {f'({gives})' if ',' in gives else gives}")  # type: ignore[no-untyped-call]
    _library.impl(name, form, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    copying: OpOverload = getattr(torch.ops.shardlib_written, name).default
    return copying
