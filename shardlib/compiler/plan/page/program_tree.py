"""Folds the steps of a program into a tree: by phase, then by module or function; repeats are stored once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from shardlib.core.name_patterns import strip_numbers
from shardlib.core.text_tables import find_repeats


@dataclass(frozen=True, eq=False)
class Leaf:
    """One call or collective: its `path` of groups, its `text`, and a `key` that is equal for repeats of it."""

    path: tuple[str, ...]
    text: str
    key: Hashable
    record: Any = None


@dataclass(eq=False)
class Node:
    """A leaf, or a group of nodes that runs `times` times in a row; `last` is the text of the last repeat."""

    text: str
    key: int
    leaf: Leaf | None = None
    children: list[Node] = field(default_factory=list)
    times: int = 1
    last: str = ""


class TreeBuilder:
    """Builds trees; equal subtrees have equal keys."""

    def __init__(self) -> None:
        self._keys: dict[Hashable, int] = {}

    def build(self, leaves: Sequence[Leaf]) -> list[Node]:
        """Returns the top nodes: groups by the first part of the path, and leaves without a path.

        Example:
            >>> leaves = [Leaf(("forward", f"layers.{i}"), f"mm_{i}", ("mm", 64)) for i in range(3)]
            >>> (top,) = TreeBuilder().build(leaves)
            >>> (layers,) = top.children
            >>> top.text, layers.text, layers.times, layers.last, layers.children[0].text
            ('forward', 'layers.0', 3, 'layers.2', 'mm_0')
        """
        return self._level(leaves, 0)

    def _key(self, content: Hashable) -> int:
        return self._keys.setdefault(content, len(self._keys))

    def _level(self, leaves: Sequence[Leaf], depth: int) -> list[Node]:
        nodes: list[Node] = []
        for name, run in groupby(leaves, lambda leaf: leaf.path[depth] if depth < len(leaf.path) else None):
            if name is None:
                nodes += [Node(leaf.text, self._key(leaf.key), leaf) for leaf in run]
            else:
                children = self._level(list(run), depth + 1)
                nodes.append(self._group(name, children))
        return self._fold(nodes)

    def _group(self, text: str, children: list[Node]) -> Node:
        return Node(text, self._key((strip_numbers(text), *((c.key, c.times) for c in children))), None, children)

    def _fold(self, nodes: list[Node]) -> list[Node]:
        """Replaces repeats of a stretch of nodes by one group."""
        keys = [self._key((node.key, node.times)) for node in nodes]
        out: list[Node] = []
        for i, period, times in find_repeats(keys, [False] * len(keys)):
            if times == 1:
                out.append(nodes[i])
                continue
            block, last = nodes[i : i + period], nodes[i + (times - 1) * period]
            if period == 1 and block[0].leaf is None and block[0].times == 1:
                repeated = block[0]
            else:
                repeated = self._group(_join_names([node.text for node in block]), block)
            repeated.times, repeated.last = times, last.text if period == 1 else ""
            out.append(repeated)
        return out


def _join_names(names: Sequence[str]) -> str:
    """Names a repeated stretch by its first two different nodes."""
    distinct = list(dict.fromkeys(names))
    return ", ".join([*distinct[:2], *["..."] * (len(distinct) > 2)])


def walk(nodes: Sequence[Node]) -> Iterator[tuple[Node, int, int]]:
    """Yields every node, the position of its parent (-1: none), and how often it runs in all; parents come first."""
    stack = [(node, -1, 1) for node in reversed(nodes)]
    position = -1
    while stack:
        node, above, outer = stack.pop()
        position += 1
        total = outer * node.times
        yield node, above, total
        stack += [(child, position, total) for child in reversed(node.children)]
