"""Patterns of names: `layers.*.wq` stands for the same tensor of all layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_INDEX = re.compile(r"(?<![^.\[])\d+(?![^.\]])")  # a number that is a whole word of a path
_INDEX_OR_STAR = re.compile(rf"{_INDEX.pattern}|\*")


@lru_cache(maxsize=1 << 14)
def star(name: str, count: int = 0) -> str:
    """Returns a name with a star for every index, or for the first `count` of them.

    Example:
        >>> star("model.layers.3.wq"), star("params.layers[3].wq"), star("0.weight"), star("h.0.mlp.1.w", 1)
        ('model.layers.*.wq', 'params.layers[*].wq', '*.weight', 'h.*.mlp.1.w')
    """
    return _INDEX.sub("*", name, count=count)


def restore_indices(pattern: str, names: Iterable[str]) -> str:
    """Replaces each star of a pattern by the index that all names have at this place, if they have one.

    Example:
        >>> restore_indices("h.*.mlp.*", ["h.0.mlp.1.up", "h.0.mlp.2.up"])
        'h.0.mlp.*'
    """
    columns = zip(*map(_INDEX_OR_STAR.findall, names), strict=False)
    indices = iter([column[0] if len({*column}) == 1 else "*" for column in columns])
    return re.sub(r"\*", lambda _: next(indices), pattern)


def group_names(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Merges rows whose first cells differ only by an index; returns each name with stars, its rows, other cells."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((star(name), *rest), []).append(name)
    return [(restore_indices(pattern, names), len(names), tuple(rest)) for (pattern, *rest), names in groups.items()]


def strip_numbers(text: str) -> str:
    """Returns a text that is equal for other nodes and layers: `mm_3 = mm(layers[3].w)` is `mm = mm(layers[*].w)`.

    Suffixes of nodes are removed; other numbers without a letter beside them are replaced by stars.

    Example:
        >>> strip_numbers("mm_3 = mm(h_1, layers_2_w1)"), strip_numbers("layers.2 (Block)")
        ('mm = mm(h, layers_*_w1)', 'layers.* (Block)')
    """
    return re.sub(r"(?<![^\W_])\d+(?![^\W_])", "*", re.sub(r"(?<=\w)_\d+\b", "", text))
