"""Tracks which nodes of a traced graph are views of others, and which node holds each value after writes.

A view is its parent and a function that makes it again. A view that is read after a write to its owner is made again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from shardlib.core.aten.op_traits import has_trait, is_view, may_return_view
from shardlib.core.aten.schemas import get_argument, unstrided
from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.errors import ShardingError

aten = torch.ops.aten


@dataclass
class View:
    """One node as a view of `parent`. The result of a write is a view of the tensor that was written to."""

    parent: fx.Node
    remake: Callable[[fx.Node], fx.Node]  # from the value of the parent
    version: int  # of the owner, when the value of the view was computed
    itself: bool = False  # shows all of the parent, in its shape
    same: bool = False  # is the parent, as `x.add_(1)` is `x`


class Views:
    """The views of one graph. `at` is the node that is being rewritten; new nodes go in front of it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.value: dict[fx.Node, fx.Node] = {}  # traced node -> the other node that holds its value now
        self.views: dict[fx.Node, View] = {}
        self.version: dict[fx.Node, int] = {}  # owner -> how often it was written to
        self.version_at: dict[fx.Node, int] = {}  # of the source of `x[i]`, when the index read it
        self.at: fx.Node = graph.output_node()
        self._values: dict[Any, Tensor] = {}  # results of emitted ops, by op and forms of the arguments

    def read(self, node: fx.Node) -> None:
        node.args, node.kwargs = self.current(node.args), self.current(node.kwargs)

    def current(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self.fresh)

    def fresh(self, node: fx.Node) -> fx.Node:
        """Returns the node with the present value of the traced `node`; makes a view again after a write."""
        source = self.picked(node)
        if source is not None and self.version_of(source) != self.version_at.get(self.owner(node), 0):
            self.refuse_picked("read after x was written to", "x[i].clone() in front of the write, or x[i] behind it")
        view = self.views.get(node)
        if view is not None and view.version != (version := self.version_of(node)):
            self.value[node] = view.remake(self.fresh(view.parent))
            view.version = version
        return self.value.get(node, node)

    def owner(self, node: fx.Node) -> fx.Node:
        while node in self.views:
            node = self.views[node].parent
        return node

    def version_of(self, node: fx.Node) -> int:
        return self.version.get(self.owner(node), 0)

    def note_view(self, node: fx.Node) -> None:
        """Records how a view is made: by an op on its first operand, or as one item of an op that lists views."""
        target, args, kwargs = node.target, node.args, dict(node.kwargs)
        source = args[0] if args else None
        if not isinstance(source, fx.Node):
            return
        if "picked" in node.meta:
            self.version_at[node] = self.version_of(source)
        if target is operator.getitem and is_view(source.target):
            base = self.views[source].parent
            self.views[node] = View(
                base, lambda b: self.emit(target, self.views[source].remake(b), args[1]), self.version_of(base)
            )
        elif is_view(target):
            self.views[node] = View(
                source, lambda b: self.emit(target, b, *args[1:], **kwargs), self.version_of(source)
            )

    def rewrite_strided(self, node: fx.Node) -> None:
        """Replaces `as_strided` by views of dims."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        views: list[fx.Node] = []

        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            views.append(self.emit(target, *args, **kwargs))
            return views[-1]

        base: Tensor = source.meta["val"]
        size, stride, at = (get_argument(node, name) for name in ("size", "stride", "storage_offset"))
        first, result = int(base.storage_offset()) if at is None else at, None
        for whole in dict.fromkeys((source, self.owner(source))):  # its elements may lie outside of the source
            val: Tensor = whole.meta["val"]
            offset = first - int(val.storage_offset())
            reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
            if result is None and (0 in size or 0 <= offset <= offset + reach < val.numel()):
                result = unstrided(emit, whole, size, stride, offset)
        if result is None:
            raise ShardingError(
                "a strided view cannot be traced",
                [f"as_strided of {list(base.shape)} at {node.meta['line']}"],
                rule="views name dims; strides are a matter of one device's memory",
                remedy="use slices, permute and reshape",
            )
        for view in views:
            if view.target in (aten.reshape.default, aten.index.Tensor):
                self.note_own(view)
            else:
                self.note_view(view)
            self.read(view)
        self.value[node] = self.fresh(result)  # which may be the source itself
        self.views[node] = View(result, lambda b: b, self.version_of(result), itself=True)

    def note_own(self, node: fx.Node) -> None:
        """Records a reshape or an index in place of a strided view as a view, against its schema."""
        source, argument = node.args
        assert isinstance(source, fx.Node)
        read = node.target
        if read is aten.reshape.default:
            node.target = aten.view.default
        self.views[node] = View(source, lambda b: self.emit(read, b, argument), self.version_of(source))

    def shown(self, node: fx.Node) -> fx.Node:
        """Returns the node whose memory `node` shows, all of it in its shape."""
        while (view := self.views.get(node)) is not None and (view.itself or has_trait(node.target, "is_alias")):
            node = view.parent
        return node

    def picked(self, node: fx.Node) -> fx.Node | None:
        """Returns `x` if `node` shows `x[i]` for a tensor `i` without dims, a view in torch; else None."""
        owner = self.owner(node)
        return owner.args[0] if owner.meta.get("picked") else None  # type: ignore[return-value]

    def refuse_picked(self, verb: str, remedy: str) -> NoReturn:
        raise ShardingError(
            f"x[i] (or x.narrow), where i is a tensor, is {verb}",
            [str(self.at.meta["line"])],
            rule="a value whose place is known only when the program runs is read as a copy; torch makes it a view",
            remedy=remedy,
        )

    def show(self, node: fx.Node, written: fx.Node, *, same: bool = True) -> None:
        """Makes `node` another name of the tensor that was written to."""
        self.views[node] = View(written, lambda b: b, self.version_of(written), itself=True, same=same)
        self.value[node] = self.fresh(written)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Returns a new node in front of `at`, with the line of `at`, and a value computed on fakes."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({k: self.at.meta[k] for k in ("line", "backward") if k in self.at.meta})
        fakes = replace_by_hints(fx.map_arg((args, kwargs), lambda n: n.meta["val"]))
        key = target, _form_of(fakes)
        if (value := self._values.get(key)) is None:
            value = target(*fakes[0], **fakes[1])
            if isinstance(value, Tensor) and not is_view(target) and not may_return_view(target):
                self._values[key] = value
        node.meta["val"] = value
        return node


def _form_of(x: Any) -> Any:
    """Returns the part of an argument that decides the shape and dtype of an op's result."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), x.requires_grad
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_form_of, x))
    if isinstance(x, dict):
        return tuple((k, _form_of(y)) for k, y in x.items())
    return type(x), x
