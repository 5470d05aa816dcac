"""What a model of transformers says itself of tensor parallelism, as specs.

Its table (`tp_plan`) names modules, or parameters, with `*` for a number, and a style for each. Styles that say how a
weight is cut become specs; what else they say is communication, which follows from the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from shardlib.modules.table import numberless
from shardlib.specs.spec import Spec, parse

CUTS: dict[str, Callable[[int, str], str]] = {
    "colwise": lambda rank, axis: _at(rank, max(rank - 2, 0), f"out@{axis}"),
    "rowwise": lambda rank, axis: _at(rank, rank - 1 if rank > 1 else None, f"in@{axis}"),
    "packed_colwise": lambda rank, axis: _at(
        rank, max(rank - 2, 0), f"(two=2 out@{axis})" if rank > 1 else f"out@{axis}"
    ),
    "packed_rowwise": lambda rank, axis: _at(rank, rank - 1 if rank > 1 else None, f"(two=2 in@{axis})"),
    "embedding_rowwise": lambda rank, axis: _at(rank, 0, f"vocab@{axis}"),
    "embedding_colwise": lambda rank, axis: _at(rank, rank - 1, f"embed@{axis}"),
}
SAME = {
    "colwise_gather_output": "colwise", "colwise_rep": "colwise",
    "rowwise_split_input": "rowwise", "rowwise_rep": "rowwise",
}  # fmt: skip


def table_of(module: nn.Module) -> dict[str, str]:
    """The style of every module, or parameter, of which the module or a part of it says one; `*` is a number."""
    found: dict[str, str] = {}
    roots: list[str] = []
    for name, part in module.named_modules():
        plan = getattr(part, "tp_plan", None)
        if isinstance(plan, Mapping) and plan and not any(name.startswith(root) for root in roots):
            roots.append(f"{name}." if name else "")
            found |= {f"{roots[-1]}{key}": style for key, style in plan.items()}
    return found


def specs_of(table: Mapping[str, str], tensors: Mapping[str, Tensor], axis: str) -> dict[str, Spec]:
    """The spec of every parameter of which the table says how it is cut; `tensors` are by all of their names.

    Example:
        >>> import torch
        >>> found = specs_of({"layers.*.up": "colwise"}, {"layers.0.up.weight": torch.zeros(8, 4)}, "tensor")
        >>> {name: str(spec) for name, spec in found.items()}
        {'layers.0.up.weight': 'out@tensor _'}
    """
    by_pattern = {numberless(key): style for key, style in table.items()}
    found = {}
    for name, x in tensors.items():
        style = by_pattern.get(numberless(name)) or by_pattern.get(numberless(name.rpartition(".")[0]))
        cut = CUTS.get(SAME.get(style, style)) if style else None
        if cut is not None and x.dim():
            found[name] = parse(cut(x.dim(), axis))
    return found


def _at(rank: int, dim: int | None, word: str) -> str:
    return " ".join(word if d == dim else "_" for d in range(rank))
