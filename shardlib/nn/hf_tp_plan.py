"""Turns the `tp_plan` of a transformers model into specs.

The plan maps names of modules or parameters, with `*` for numbers, to styles. Styles that shard a weight become specs.
Other styles describe communication, which follows from the specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from shardlib.core.name_patterns import star
from shardlib.nn.head_factors import shard_factors
from shardlib.sharding.grammar import SpecDim
from shardlib.sharding.spec import Spec, parse

DimText = Callable[[str], str]  # from the name of a sharded dim to its spec: `out` to `out@tensor`, or to its factors

CUTS: dict[str, Callable[[int, DimText], str]] = {
    "colwise": lambda rank, at: _at(rank, max(rank - 2, 0), at("out")),
    "rowwise": lambda rank, at: _at(rank, rank - 1 if rank > 1 else None, at("in")),
    "packed_colwise": lambda rank, at: _at(rank, max(rank - 2, 0), f"(two=2 {at('out')})" if rank > 1 else at("out")),
    "packed_rowwise": lambda rank, at: _at(rank, rank - 1 if rank > 1 else None, f"(two=2 {at('in')})"),
    "embedding_rowwise": lambda rank, at: _at(rank, 0, at("vocab")),
    "embedding_colwise": lambda rank, at: _at(rank, rank - 1, at("embed")),
}
HEAD = ("head_dim", "head_size")  # attributes for the size of a head; the projections are the module's children
HEADS = ("num_heads", "num_attention_heads", "n_heads")  # attributes for the number of heads
SAME = {
    "colwise_gather_output": "colwise", "colwise_rep": "colwise",
    "rowwise_split_input": "rowwise", "rowwise_rep": "rowwise",
}  # fmt: skip


def table_of(module: nn.Module) -> dict[str, str]:
    """Returns the styles in the plans of a module and its submodules, by name, with `*` for numbers."""
    styles: dict[str, str] = {}
    roots: list[str] = []
    for name, part in module.named_modules():
        own = hasattr(type(part), "tp_plan") or "tp_plan" in vars(part)  # not the plan of an inner model (adapters)
        plan = part.tp_plan if own else None
        if isinstance(plan, Mapping) and plan and not any(name.startswith(root) for root in roots):
            roots.append(f"{name}." if name else "")
            styles |= {f"{roots[-1]}{key}": style for key, style in plan.items()}
    return styles


def heads_of(module: nn.Module, table: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Returns the factors of the sharded dim of each attention projection in the table, by name.

    Query heads are grouped by the key and value head that they read, so that head is the first factor. If heads have no
    common size (multi-head latent attention: DeepSeek-AI 2024, arXiv:2405.04434), each projection has all heads.
    """
    styles = {star(key): SAME.get(style, style) for key, style in table.items()}
    by_name: dict[str, tuple[int, ...]] = {}
    for name, part in module.named_modules():
        size, count = _first_number(part, HEAD), _first_number(part, HEADS)
        widths = {}
        for key, x in part.named_children():
            at, weight = f"{name}.{key}" if name else key, getattr(x, "weight", None)
            style = styles.get(star(at))
            if style in ("colwise", "rowwise") and isinstance(weight, Tensor) and weight.dim() == 2:
                widths[at] = weight.shape[0 if style == "colwise" else 1]
        if size is not None:
            heads = {key: width // size for key, width in widths.items() if width % size == 0}
        elif count is not None and _first_number(part, ("num_key_value_heads",)) in (None, count):
            heads = {key: count for key, width in widths.items() if width % count == 0}
        else:
            continue
        few = min(heads.values(), default=1)
        for key, n in heads.items():
            own = widths[key] // n
            factors = (few, n // few, own) if n % few == 0 else (n, own)
            by_name[key] = tuple(k for k in factors if k > 1)
    return by_name


def _first_number(part: nn.Module, names: Sequence[str]) -> int | None:
    return next((n for n in (getattr(part, key, None) for key in names) if isinstance(n, int) and n > 0), None)


def specs_of(
    table: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    axis: str,
    ways: int = 1,
    heads: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[str, Spec]:
    """Returns the spec of every parameter that the table shards; `tensors` are by all of their names.

    `ways` is the size of the axis, and `heads` the result of `heads_of`.

    A module of the table may be wrapped by one with adapters (LoRA: Hu et al. 2021, arXiv:2106.09685). Dims of adapters
    are sharded if they are as large as the weight's.

    Example:
        >>> import torch
        >>> names = {"0.up.base.weight": (8, 4), "0.up.lora_A.weight": (2, 4), "0.up.lora_B.weight": (8, 2)}
        >>> tensors = {name: torch.zeros(shape) for name, shape in names.items()}
        >>> {name: str(spec) for name, spec in specs_of({"*.up": "colwise"}, tensors, "tensor").items()}
        {'0.up.base.weight': 'out@tensor _', '0.up.lora_A.weight': '_ _', '0.up.lora_B.weight': 'out@tensor _'}
    """
    by_pattern = {star(key): style for key, style in table.items()}
    largest: dict[str, Tensor] = {}  # the weight of each module in the table
    owners: dict[str, str] = {}
    for name, x in tensors.items():
        at = next((at for at in _prefixes(name) if star(at) in by_pattern), None)
        if at is not None and x.dim():
            owners[name] = at
            largest[at] = max(x, largest.get(at, x), key=lambda y: (y.numel(), y.dim()))
    specs = {}
    for name, at in owners.items():
        style, x = by_pattern[star(at)], tensors[name]
        cut = CUTS.get(SAME.get(style, style))
        if cut is not None:
            factors = heads.get(at, ())

            def dim_text(dim: str, factors: tuple[int, ...] = factors) -> str:
                return shard_factors(factors, 0, dim, axis, ways) if factors else f"{dim}@{axis}"

            weight, spec = largest[at], parse(cut(x.dim(), dim_text))
            fits = {*_sharded_sizes(x, spec)} <= {*_sharded_sizes(weight, parse(cut(weight.dim(), dim_text)))}
            specs[name] = spec if fits else parse(_at(x.dim(), None, ""))
    return specs


def _prefixes(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:n]) for n in range(len(words), 0, -1)]


def _sharded_sizes(x: Tensor, spec: Spec) -> list[int]:
    return [
        x.shape[d] for d, dim in enumerate(spec.dims) if isinstance(dim, SpecDim) and any(f.axes for f in dim.factors)
    ]


def _at(rank: int, dim: int | None, word: str) -> str:
    return " ".join(word if d == dim else "_" for d in range(rank))
