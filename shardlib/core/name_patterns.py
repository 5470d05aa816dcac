"""Patterns of names: `layers.*.wq` stands for the same tensor of all layers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

_INDEX = re.compile(r"(?<![^.\[])\d+(?![^.\]])")  # a number that is a whole word of a path
_INDEX_OR_STAR = re.compile(rf"{_INDEX.pattern}|\*")
# A number beside `.`, `[`, `]` or `_`, and a module's index in front of its class.
_PART_OF_NAME = re.compile(r"(?<=[.\[_])\d+(?![^\W_])|(?<![^\W_])\d+(?=[.\]_])|^\d+(?= \()")


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

    `rivals` are groups of other names that fit the pattern. Indices are listed at a place where rivals have more, and
    at all places if the listed indices still fit one of them.

    Example:
        >>> restore_indices("h.*.mlp.*", ["h.0.mlp.1.up", "h.0.mlp.2.up"])
        'h.0.mlp.*'
        >>> restore_indices("h.*.w", ["h.0.w", "h.1.w", "h.2.w", "h.5.w"], [["h.3.w", "h.4.w"]])
        'h.{0-2,5}.w'
        >>> restore_indices("h.*.e.*", ["h.0.e.1", "h.1.e.0"], [["h.0.e.0", "h.1.e.1"]])
        'h.{0.e.1,1.e.0}'
    """
    others, rows = [row for rival in rivals for row in _indices(rival)], _indices(names)
    columns = _columns(names)
    if any(row not in rows and all(map(operator.contains, columns, row)) for row in others):
        return _list_middles(pattern, rows, columns)
    words = []
    for i, column in enumerate(columns):
        has_all = all(row[i] in column for row in others if i < len(row))
        words.append("*" if has_all and len(column) > 1 else _list_indices(column))
    indices = iter(words)
    return _INDEX_OR_STAR.sub(lambda _: next(indices), pattern)


def _list_middles(pattern: str, rows: Sequence[tuple[str, ...]], columns: Sequence[set[str]]) -> str:
    """Lists the part of names from the first index that differs to the last one."""
    texts = _INDEX_OR_STAR.split(pattern)
    differ = [i for i, column in enumerate(columns) if len(column) > 1] or [0]
    first, last = differ[0], differ[-1]
    words = [row[first] + "".join(texts[i] + row[i] for i in range(first + 1, last + 1)) for row in rows]
    before = texts[0] + "".join(f"{rows[0][i]}{texts[i + 1]}" for i in range(first))
    after = texts[last + 1] + "".join(f"{rows[0][i]}{texts[i + 1]}" for i in range(last + 1, len(columns)))
    return f"{before}{_braced(list(dict.fromkeys(words)))}{after}"


def _indices(names: Iterable[str]) -> list[tuple[str, ...]]:
    return [tuple(_INDEX_OR_STAR.findall(name)) for name in names]


def _columns(names: Iterable[str]) -> list[set[str]]:
    """Returns the indices of names, by their place."""
    return [{*column} for column in zip(*_indices(names), strict=False)]


def _list_indices(indices: set[str]) -> str:
    """Returns `{0-2,5}` for several indices; three and more successive ones are joined."""
    if len(indices) == 1 or "*" in indices:
        return "*" if "*" in indices else next(iter(indices))
    numbers = sorted(map(int, indices))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return _braced([w for run in runs for w in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))])


def _braced(words: Sequence[str], most: int = 3) -> str:
    """Joins words, at most `most` of them: `{0,1,...}`."""
    return f"{{{','.join(words if len(words) <= most else [*words[: most - 1], '...'])}}}"


def join_words(words: Sequence[str]) -> str:
    """Joins alternatives: `{wq,wk}`, and `result[{0-2}]` for words that differ in an index only.

    Example:
        >>> join_words(["wq", "wk"]), join_words(["result[0]", "result[1]", "result[2]"])
        ('{wq,wk}', 'result[{0-2}]')
        >>> join_words(["result[0][0]", "result[1][1]"])
        '{result[0][0],result[1][1]}'
    """
    columns = _columns(words)
    if len({star(word) for word in words}) == 1 and math.prod(map(len, columns)) == len({*words}):
        indices = map(_list_indices, columns)
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

    Suffixes of nodes are removed; indices are replaced by stars: numbers beside a dot, a bracket or an underscore, and
    the index of a module in front of its class.

    Example:
        >>> strip_numbers("mm_3 = mm(h_1, layers_2_w1)"), strip_numbers("2 (Block)"), strip_numbers("sum over 256")
        ('mm = mm(h, layers_*_w1)', '* (Block)', 'sum over 256')
    """
    return _PART_OF_NAME.sub("*", re.sub(r"(?<=\w)_\d+\b", "", text))
