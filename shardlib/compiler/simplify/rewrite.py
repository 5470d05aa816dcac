"""Runs local rewrites, which are rows of data: the ops that a row matches, a condition, and a replacement.

torch has matchers of its own. Patterns of `torch.fx.replace_pattern` are traced functions: they fix every overload and
every number, and the nodes that replace a match lose `meta` and names. Inductor's matcher is private and lowers to its
own IR. Our rows match ops by trait, keep the source line, and rewrite a node in place, so that plans keep its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardlib.compiler.simplify.emit import Emit, Node
from shardlib.core.aten.op_traits import has_trait

Ops = str | Collection[Any]  # a trait of ops, or the ops


@dataclass(frozen=True)
class Call:
    """Replaces a node's call in place; `val` is the new fake value, if it changes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    val: Any = None


@dataclass(frozen=True)
class Rewrite:
    """Matches a chain of ops: a node's op, its first operand's, and so on.

    `replace` returns a call in place of the node's, another node with the same value, or None where it does not apply.
    """

    ops: Sequence[Ops]
    replace: Callable[[Emit, Node], Call | fx.Node | None]
    condition: Callable[[Node], bool] = lambda node: True

    def matches(self, node: Node) -> bool:
        """Returns whether the row applies to a node whose own op fits."""
        source = node
        for ops in self.ops[1:]:
            source = source.args[0]
            if not isinstance(source, fx.Node) or not _is_op(source.target, ops):
                return False
        return self.condition(node)


class RewritePass:
    """Applies rows to each node, the first that matches, until none does.

    Nodes are visited in order; if `backward`, from the last on. If `erases`, replaced nodes leave the graph at once:
    its rows count readers.
    """

    def __init__(self, name: str, *rows: Rewrite, backward: bool = False, erases: bool = False) -> None:
        self.__name__ = name
        self.rows, self.backward, self.erases = rows, backward, erases
        self._rows_of: dict[Any, list[Rewrite]] = {}

    def __call__(self, gm: fx.GraphModule) -> None:
        for node in reversed(gm.graph.nodes) if self.backward else gm.graph.nodes:
            if node.op == "call_function":
                while self._rewrite(gm, node):
                    pass

    def _rewrite(self, gm: fx.GraphModule, node: fx.Node) -> bool:
        """Returns whether the node has another call now, which may match again."""
        if node.target not in self._rows_of:
            self._rows_of[node.target] = [row for row in self.rows if _is_op(node.target, row.ops[0])]
        for row in self._rows_of[node.target]:
            result = row.replace(Emit(gm, node), node) if row.matches(node) else None
            if isinstance(result, Call):
                node.target, node.args, node.kwargs = result.target, result.args, dict(result.kwargs)
                if result.val is not None:
                    node.meta["val"] = result.val
                return True
            if result is not None:
                node.replace_all_uses_with(result)
                if self.erases:
                    gm.graph.erase_node(node)
                return False
        return False


def _is_op(target: Any, ops: Ops) -> bool:
    return has_trait(target, ops) if isinstance(ops, str) else target in ops
