"""What a model of transformers says itself of tensor parallelism, as specs.

Its table (`tp_plan`) names modules, or parameters, with `*` for a number, and a style for each. Styles that say how a
weight is cut become specs; what else they say is communication, which follows from the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from shardlib.modules.table import numberless
from shardlib.specs.grammar import SpecDim
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
        own = hasattr(type(part), "tp_plan") or "tp_plan" in vars(part)  # not that of a part which it asks (adapters)
        plan = part.tp_plan if own else None
        if isinstance(plan, Mapping) and plan and not any(name.startswith(root) for root in roots):
            roots.append(f"{name}." if name else "")
            found |= {f"{roots[-1]}{key}": style for key, style in plan.items()}
    return found


def specs_of(table: Mapping[str, str], tensors: Mapping[str, Tensor], axis: str) -> dict[str, Spec]:
    """The spec of every parameter of which the table says how it is cut; `tensors` are by all of their names.

    A module of the table may have become one around it, with adapters beside its weight (LoRA: Hu et al. 2021,
    arXiv:2106.09685): they are cut where they are as large as the weight.

    Example:
        >>> import torch
        >>> names = {"0.up.base.weight": (8, 4), "0.up.lora_A.weight": (2, 4), "0.up.lora_B.weight": (8, 2)}
        >>> tensors = {name: torch.zeros(shape) for name, shape in names.items()}
        >>> {name: str(spec) for name, spec in specs_of({"*.up": "colwise"}, tensors, "tensor").items()}
        {'0.up.base.weight': 'out@tensor _', '0.up.lora_A.weight': '_ _', '0.up.lora_B.weight': 'out@tensor _'}
    """
    by_pattern = {numberless(key): style for key, style in table.items()}
    largest: dict[str, Tensor] = {}  # by the name of what the table calls by a pattern
    owners: dict[str, str] = {}
    for name, x in tensors.items():
        at = next((at for at in _prefixes(name) if numberless(at) in by_pattern), None)
        if at is not None and x.dim():
            owners[name] = at
            largest[at] = max(x, largest.get(at, x), key=lambda y: (y.numel(), y.dim()))
    found = {}
    for name, at in owners.items():
        style, x = by_pattern[numberless(at)], tensors[name]
        cut = CUTS.get(SAME.get(style, style))
        if cut is not None:
            weight, spec = largest[at], parse(cut(x.dim(), axis))
            alike = {*_cut_sizes(x, spec)} <= {*_cut_sizes(weight, parse(cut(weight.dim(), axis)))}
            found[name] = spec if alike else parse(_at(x.dim(), None, ""))
    return found


def _prefixes(name: str) -> list[str]:
    """The name, and those of the modules around it, from the nearest on."""
    words = name.split(".")
    return [".".join(words[:n]) for n in range(len(words), 0, -1)]


def _cut_sizes(x: Tensor, spec: Spec) -> list[int]:
    """The sizes of the dims that a spec cuts."""
    return [
        x.shape[d] for d, dim in enumerate(spec.dims) if isinstance(dim, SpecDim) and any(f.axes for f in dim.factors)
    ]


def _at(rank: int, dim: int | None, word: str) -> str:
    return " ".join(word if d == dim else "_" for d in range(rank))
