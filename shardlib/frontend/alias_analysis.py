"""What the nodes of a traced graph show of each other's memory, and the nodes that hold their values by now.

A view is remembered as (what it views, how). One that is read after its owner changed is made again.
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
    """One node as a view of `parent`; what a write returns is a view of what it wrote to."""

    parent: fx.Node
    remake: Callable[[fx.Node], fx.Node]  # from the value of the parent
    version: int  # of the owner, when the view's value was made
    itself: bool = False  # shows all of the parent, as it is
    same: bool = False  # is the parent, as `x.add_(1)` is `x`


class Views:
    """Of one graph; `at` is the node that is being rewritten, in front of which new ones are written."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.value: dict[fx.Node, fx.Node] = {}  # traced node -> the node that holds its value now, if it is another
        self.views: dict[fx.Node, View] = {}
        self.version: dict[fx.Node, int] = {}  # owner -> how often it was written to
        self.version_at: dict[fx.Node, int] = {}  # of what an index picks from, when it did
        self.at: fx.Node = graph.output_node()
        self._values: dict[Any, Tensor] = {}  # of what was written, by the op and what is known of its arguments

    def read(self, node: fx.Node) -> None:
        node.args, node.kwargs = self.current(node.args), self.current(node.kwargs)

    def current(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self.fresh)

    def fresh(self, node: fx.Node) -> fx.Node:
        """The node that holds what the traced `node` shows now: made again if its owner was written to since."""
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
        """Remember how a view is made: an op on its first operand, or one item of an op that lists views."""
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
        """Replace `as_strided` by views that know dims."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        made: list[fx.Node] = []

        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made.append(self.emit(target, *args, **kwargs))
            return made[-1]

        base: Tensor = source.meta["val"]
        size, stride, at = (get_argument(node, name) for name in ("size", "stride", "storage_offset"))
        first, result = int(base.storage_offset()) if at is None else at, None
        for whole in dict.fromkeys((source, self.owner(source))):  # what it reads may be beside what it is taken of
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
        for view in made:
            if view.target in (aten.reshape.default, aten.index.Tensor):
                self.note_own(view)
            else:
                self.note_view(view)
            self.read(view)
        self.value[node] = self.fresh(result)  # which may be the source itself
        self.views[node] = View(result, lambda b: b, self.version_of(result), itself=True)

    def note_own(self, node: fx.Node) -> None:
        """A reshape or an index that stands for a strided view is one, whatever its schema says."""
        source, what = node.args
        assert isinstance(source, fx.Node)
        read = node.target
        if read is aten.reshape.default:
            node.target = aten.view.default
        self.views[node] = View(source, lambda b: self.emit(read, b, what), self.version_of(source))

    def shown(self, node: fx.Node) -> fx.Node:
        """Whose memory `node` shows all of, as it is."""
        while (view := self.views.get(node)) is not None and (view.itself or has_trait(node.target, "is_alias")):
            node = view.parent
        return node

    def picked(self, node: fx.Node) -> fx.Node | None:
        """What `x[i]` picks from, where `i` is a tensor without dims and `node` shows that: in torch a view."""
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
        """Make `node` another name of what was written to."""
        self.views[node] = View(written, lambda b: b, self.version_of(written), itself=True, same=same)
        self.value[node] = self.fresh(written)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in front of the one that is being rewritten, with its line, and its value computed on fakes."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({k: self.at.meta[k] for k in ("line", "backward") if k in self.at.meta})
        fakes = replace_by_hints(fx.map_arg((args, kwargs), lambda n: n.meta["val"]))
        key = target, _known(fakes)
        if (value := self._values.get(key)) is None:
            value = target(*fakes[0], **fakes[1])
            if isinstance(value, Tensor) and not is_view(target) and not may_return_view(target):
                self._values[key] = value
        node.meta["val"] = value
        return node


def _known(x: Any) -> Any:
    """What the shape and the dtype of an op's result depend on."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), x.requires_grad
    if isinstance(x, tuple | list):
        return type(x), tuple(map(_known, x))
    if isinstance(x, dict):
        return tuple((k, _known(y)) for k, y in x.items())
    return type(x), x
