"""`python -m shardlib.testing.missing_rules` lists the ops of torch that have no rule, and so run on whole operands.

A custom op is not listed: `sl.rule(op)` says whether it has a rule.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardlib.core.aten.op_traits import is_composite
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_internals.torch_private import OpOverload, all_op_names, schema_of
from shardlib.rules.out_variants import op_named
from shardlib.rules.table import DECOMPOSITIONS, row


def ops_without_rule() -> list[str]:
    """Returns the names of ATen ops that compute with tensors, are no other ops together, and have no rule."""
    return sorted({str(op.name()).removeprefix("aten::") for op in _aten_ops() if _needs_rule(op)})  # type: ignore[no-untyped-call]


def _aten_ops() -> Iterator[OpOverload]:
    for name in all_op_names():
        if name.startswith("aten::") and hasattr(torch.ops.aten, name.removeprefix("aten::").partition(".")[0]):
            yield op_named(name)


def _needs_rule(op: OpOverload) -> bool:
    """True for an op of which a program may consist, without a rule."""
    schema = schema_of(op)
    kinds = [str(x.type) for x in (*schema.arguments, *schema.returns)]
    computes = "Tensor" in kinds and not written_arguments(op) and not is_composite(op)
    return computes and row(op) is None and op not in DECOMPOSITIONS


if __name__ == "__main__":
    print("\n".join(ops_without_rule()))
