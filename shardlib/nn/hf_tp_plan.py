"""What a model of transformers says itself of tensor parallelism, as specs.

Its table (`tp_plan`) names modules, or parameters, with `*` for a number, and a style for each. Styles that say how a
weight is cut become specs; what else they say is communication, which follows from the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from shardlib.nn.head_factors import factored
from shardlib.nn.spec_table import numberless
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.spec import Spec, parse

Word = Callable[[str], str]  # of what is cut: `out` is `out@tensor`, or what is said of its factors

CUTS: dict[str, Callable[[int, Word], str]] = {
    "colwise": lambda rank, at: _at(rank, max(rank - 2, 0), at("out")),
    "rowwise": lambda rank, at: _at(rank, rank - 1 if rank > 1 else None, at("in")),
    "packed_colwise": lambda rank, at: _at(rank, max(rank - 2, 0), f"(two=2 {at('out')})" if rank > 1 else at("out")),
    "packed_rowwise": lambda rank, at: _at(rank, rank - 1 if rank > 1 else None, f"(two=2 {at('in')})"),
    "embedding_rowwise": lambda rank, at: _at(rank, 0, at("vocab")),
    "embedding_colwise": lambda rank, at: _at(rank, rank - 1, at("embed")),
}
HEAD = ("head_dim", "head_size")  # what a module calls the size of a head, whose projections are its children,
HEADS = ("num_heads", "num_attention_heads", "n_heads")  # and their number, where each projection has heads of its size
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


def heads_of(module: nn.Module, table: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The factors of what a module of the table makes, or takes, where that is heads, as the module around it says.

    Queries stand by the head of keys and values that they read, so these are the first factor. Where heads have no one
    size (multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434), each projection makes all of them, or takes.
    """
    styles = {numberless(key): SAME.get(style, style) for key, style in table.items()}
    found: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        size, count = _said(part, HEAD), _said(part, HEADS)
        widths = {}
        for key, x in part.named_children():
            at, weight = f"{name}.{key}" if name else key, getattr(x, "weight", None)
            style = styles.get(numberless(at))
            if style in ("colwise", "rowwise") and isinstance(weight, Tensor) and weight.dim() == 2:
                widths[at] = weight.shape[0 if style == "colwise" else 1]
        if size is not None:
            heads = {key: width // size for key, width in widths.items() if width % size == 0}
        elif count is not None and _said(part, ("num_key_value_heads",)) in (None, count):
            heads = {key: count for key, width in widths.items() if width % count == 0}
        else:
            continue
        few = min(heads.values(), default=1)
        for key, n in heads.items():
            own = widths[key] // n
            factors = (few, n // few, own) if n % few == 0 else (n, own)
            found[key] = tuple(k for k in factors if k > 1)
    return found


def _said(part: nn.Module, names: Sequence[str]) -> int | None:
    """The number that a module has under one of these names."""
    return next((n for n in (getattr(part, key, None) for key in names) if isinstance(n, int) and n > 0), None)


def specs_of(
    table: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    axis: str,
    ways: int = 1,
    heads: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[str, Spec]:
    """The spec of every parameter of which the table says how it is cut; `tensors` are by all of their names.

    The axis has so many `ways`, and `heads` are what `heads_of` finds.

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
            factors = heads.get(at, ())

            def word(what: str, factors: tuple[int, ...] = factors) -> str:
                return factored(factors, 0, what, axis, ways) if factors else f"{what}@{axis}"

            weight, spec = largest[at], parse(cut(x.dim(), word))
            alike = {*_cut_sizes(x, spec)} <= {*_cut_sizes(weight, parse(cut(weight.dim(), word)))}
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
