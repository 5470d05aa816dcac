"""Patterns of names: `layers.*.wq` stands for the same tensor of all layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

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


def restore_indices(pattern: str, names: Sequence[str], rivals: Iterable[Sequence[str]] = ()) -> str:
    """Replaces each star of a pattern by the index that all names have at this place, if they have one.

    `rivals` are groups of other names that fit the pattern. Indices are listed at a place where rivals have more.

    Example:
        >>> restore_indices("h.*.mlp.*", ["h.0.mlp.1.up", "h.0.mlp.2.up"])
        'h.0.mlp.*'
        >>> restore_indices("h.*.w", ["h.0.w", "h.1.w", "h.2.w", "h.5.w"], [["h.3.w", "h.4.w"]])
        'h.{0-2,5}.w'
    """
    others = [_columns(rival) for rival in rivals]
    words = []
    for i, column in enumerate(_columns(names)):
        has_all = all(i >= len(other) or other[i] <= column for other in others)
        words.append("*" if has_all and len(column) > 1 else _list_indices(column))
    indices = iter(words)
    return _INDEX_OR_STAR.sub(lambda _: next(indices), pattern)


def _columns(names: Iterable[str]) -> list[set[str]]:
    """Returns the indices of names, by their place."""
    return [{*column} for column in zip(*map(_INDEX_OR_STAR.findall, names), strict=False)]


def _list_indices(indices: set[str], most: int = 3) -> str:
    """Returns `{0-2,5}`, at most `most` words, for several indices; three and more successive ones are joined."""
    if len(indices) == 1 or "*" in indices:
        return "*" if "*" in indices else next(iter(indices))
    numbers = sorted(map(int, indices))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [w for run in runs for w in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"{{{','.join(words if len(words) <= most else [*words[: most - 1], '...'])}}}"


def join_words(words: Sequence[str]) -> str:
    """Joins alternatives: `{wq,wk}`, and `result[{0-2}]` for words that differ in an index only.

    Example:
        >>> join_words(["wq", "wk"]), join_words(["result[0]", "result[1]", "result[2]"])
        ('{wq,wk}', 'result[{0-2}]')
    """
    if len({star(word) for word in words}) == 1:
        indices = map(_list_indices, _columns(words))
        return _INDEX_OR_STAR.sub(lambda _: next(indices), words[0])
    return f"{{{','.join(words)}}}"


def group_names(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Merges rows whose first cells differ only by an index; returns each name with stars, its rows, other cells."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((star(name), *rest), []).append(name)
    alike: dict[str, list[list[str]]] = {}
    for (pattern, *_), names in groups.items():
        alike.setdefault(pattern, []).append(names)
    return [
        (restore_indices(pattern, names, (x for x in alike[pattern] if x is not names)), len(names), tuple(rest))
        for (pattern, *rest), names in groups.items()
    ]


def strip_numbers(text: str) -> str:
    """Returns a text that is equal for other nodes and layers: `mm_3 = mm(layers[3].w)` is `mm = mm(layers[*].w)`.

    Suffixes of nodes are removed; other numbers without a letter beside them are replaced by stars.

    Example:
        >>> strip_numbers("mm_3 = mm(h_1, layers_2_w1)"), strip_numbers("layers.2 (Block)")
        ('mm = mm(h, layers_*_w1)', 'layers.* (Block)')
    """
    return re.sub(r"(?<![^\W_])\d+(?![^\W_])", "*", re.sub(r"(?<=\w)_\d+\b", "", text))
