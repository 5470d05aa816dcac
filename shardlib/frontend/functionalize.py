"""Rewrites in-place ops of a traced graph into functional ones.

A write to a view is carried up, view by view, into the tensor that owns the memory: a write to `x[1:]` becomes
`slice_scatter(x, value, ...)`. `x.data = y` makes `x` another view of `y`; older views of `x` keep its former memory.
New values and new memory of inputs are further results. Writes into other tensors from outside would outlive the
program unseen: one error refuses all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.aten.schemas import find_nodes, get_argument, write_through_view, written_arguments
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.frontend.alias_analysis import Views
from shardlib.frontend.readonly_inputs import refuse_unwritable
from shardlib.frontend.torch_rewrites.custom_ops import copying_form
from shardlib.ops.set_data import OP as SET_DATA

aten = torch.ops.aten


@dataclass(frozen=True)
class Written:
    """Inputs that a function changes, by position.

    The graph returns the new values of `values`, then the new memory of `data`. `others` are pairs: the first input
    gets the memory of the second.
    """

    values: tuple[int, ...] = ()
    data: tuple[int, ...] = ()
    others: tuple[tuple[int, int], ...] = ()


def functionalize(gm: fx.GraphModule, input_names: Sequence[str] = (), body: bool = False) -> Written:
    """Rewrites `gm` so that no op writes to memory; `input_names` are the placeholders' names in errors.

    The `body` of a loop may write only to tensors that it makes.

    Returns the changed inputs, whose new values are further results.
    Raises ShardingError for writes into captured tensors, and for writes that have no functional form.
    """
    written = Written()
    if any(written_arguments(n.target) or n.target in _REWRITTEN for n in gm.graph.nodes):
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        names = dict(zip(placeholders, input_names or [p.name for p in placeholders], strict=True))
        written = _Rewriter(gm.graph, names, body).run()
    for node in gm.graph.nodes:
        # A value, and a local shard of it even more so, may have other strides than the tensor that was traced.
        if has_trait(node.target, "reshapes"):
            node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(node.meta["val"].shape)), {}
        if node.target in _LAZY:
            _resolve_lazy(node)
    gm.recompile()
    return written


def _resolve_lazy(node: fx.Node) -> None:
    """Computes a conjugate or a negation now: the bit that delays it does not travel with the bytes of a tensor."""
    target, number = _LAZY[node.target]
    if isinstance(node.args[0], fx.Node):
        node.target = target
        return
    value = number(node.args[0])  # a Python number that torch looked at as a tensor
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: value if n is node else n)
    node.graph.erase_node(node)


_REWRITTEN = (aten.as_strided.default, SET_DATA)
_LAZY: dict[Any, tuple[Any, Callable[[Any], Any]]] = {
    aten._conj.default: (aten.conj_physical.default, lambda x: x.conjugate()),
    aten._neg_view.default: (aten.neg.default, operator.neg),
}
COPIED_VIEWS = frozenset({*_LAZY, aten.as_strided.default})  # views that a program has copies for


class _Rewriter(Views):
    def __init__(self, graph: fx.Graph, names: dict[fx.Node, str], body: bool) -> None:
        super().__init__(graph)
        self.names, self.body = names, body
        self.memory: dict[fx.Node, fx.Node] = {}  # input with other data -> the node of its former memory
        self.returned: dict[
            fx.Node, Sequence[fx.Node]
        ] = {}  # a write to several tensors -> the tensors that it returns
        self.offenders: list[str] = []

    def run(self) -> Written:
        """Rewrites all ops; returns the changed inputs."""
        replaced = []
        for node in list(self.graph.nodes):
            self.at = node
            if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                self.rename_view(node)
            if written_arguments(node.target):
                self.rewrite_write(node)
                replaced.append(node)
            elif node.target is aten.as_strided.default:
                self.rewrite_strided(node)
                replaced.append(node)
            elif node.target is SET_DATA:
                self.set_data(*node.args)
                replaced.append(node)
            elif node.target is operator.getitem and node.args[0] in self.returned:
                self.show(node, self.returned[node.args[0]][node.args[1]])
                replaced.append(node)
            else:
                self.note_view(node)
                self.read(node)
        if self.offenders and self.body:
            raise body_writes(self.offenders)
        if self.offenders:
            raise ShardingError(
                "the traced function writes to tensors that are not its own",
                list(dict.fromkeys(self.offenders)),
                rule="a traced function writes to its arguments, to what it closes over, and to what it makes",
                remedy="make the tensor an argument, or write x = x + 1 instead of x += 1 (or clone x first)",
            )
        memory = [self.memory.get(n, n) for n in self.names]
        inputs, places = ({n: i for i, n in reversed([*enumerate(nodes)])} for nodes in (self.names, memory))
        data = {n: self.shown(n) for n in self.memory}
        output = self.at = self.graph.output_node()
        values = [m for m in memory if m in self.version]
        new = [n for n, m in data.items() if m not in places]
        output.args = ((*output.args[0], *map(self.fresh, (*values, *new))),)  # type: ignore[misc]
        for node in reversed(replaced):
            self.graph.erase_node(node)
        return Written(
            tuple(places[m] for m in values),
            tuple(inputs[n] for n in new),
            tuple((inputs[n], places[m]) for n, m in data.items() if m in places and m is not self.memory[n]),
        )

    def rename_view(self, node: fx.Node) -> None:
        """Makes an op like `x.squeeze_()` a view: later ops see the same memory in another shape."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        assert isinstance(node.target, OpOverload)
        if source.op in ("placeholder", "get_attr"):
            name = schema_of(node.target).name.partition("::")[2]
            if name.startswith("set"):
                raise ShardingError(
                    f"{name} gives other memory to a tensor that is not the traced function's own",
                    [self.describe(source)],
                    rule="a program knows values, not storages",
                    remedy="x.data = value, which the call repeats; or write to it, x.copy_(value)",
                )
            raise ShardingError(
                f"{name} changes the shape of a tensor that is not the traced function's own",
                [self.describe(source)],
                rule="an argument of a program keeps its shape; values are written back, shapes are not",
                remedy="make a new tensor of it, y = x.flatten()[:n].reshape(shape), or write to it, x.copy_(values)"
                if name.startswith("resize")
                else f"use the op without the underscore, and a name of its own: y = x.{name.rstrip('_')}(...)",
            )
        view = functional_form(node.target)
        if view is not None and is_view(view):
            node.target = view
        if node.target in (aten.resize_.default, aten.resize_as_.default):
            self.resize(node, source)

    def resize(self, node: fx.Node, source: fx.Node) -> None:
        """Makes a resize a view of the first elements; a resized empty tensor is new memory."""
        old, new = source.meta["val"], node.meta["val"]
        if old.numel() == 0 and new.numel():
            node.target, node.args = aten.empty.memory_format, (list(new.shape),)
            node.kwargs = {"dtype": new.dtype, "device": new.device}
        elif new.numel() <= old.numel():
            stride = [math.prod(new.shape[d + 1 :]) for d in range(new.dim())]
            node.target, node.args, node.kwargs = aten.as_strided.default, (source, list(new.shape), stride), {}

    # --- writing ------------------------------------------------------------------------------------------------------

    def rewrite_write(self, node: fx.Node) -> None:
        assert isinstance(node.target, OpOverload)
        written = [t for name in written_arguments(node.target) for t in find_nodes(get_argument(node, name))]
        for target in written:
            if self.picked(target) is not None:
                self.refuse_picked("written to", "x[i] = x[i] + 1, or x.index_copy_(dim, i.reshape(1), value)")
        others = ("get_attr", "placeholder") if self.body else ("get_attr",)
        foreign = [t for t in written if self.owner(t).op in others]
        self.offenders += [self.describe(t) for t in foreign]
        new, own = self.functional(node, written)
        for target, value in zip(written, new, strict=True):
            if self.owner(target).op == "placeholder":
                refuse_unwritable(self.describe(target), self.owner(target), target, value)
            self.write(target, self.fitted(value, target.meta["val"]))
        if own is not None:
            self.value[node] = own
        elif isinstance(node.meta["val"], Tensor):  # x.add_(1) returns x
            self.show(node, written[0])
        else:
            self.returned[node] = written

    def set_data(self, x: fx.Node, value: fx.Node) -> None:
        """Makes `x` a view of `value`; older views of `x` keep its former memory."""
        if x.op == "get_attr" or (self.body and x.op == "placeholder"):
            self.offenders.append(self.describe(x))
            return
        while x in self.views and self.views[x].same:
            x = self.views[x].parent
        if self.shown(value) is x:
            return
        old = self.emit(aten.alias.default, self.fresh(x))
        itself = {x}
        for node, view in self.views.items():
            if view.parent in itself:
                if view.same:
                    itself.add(node)
                    view.version = -1  # it shows something else now
                else:
                    view.parent = old
        if x in self.views:
            self.views[old] = self.views[x]
        elif x in self.version:
            self.version[old] = self.version.pop(x)
        if x in self.names:
            self.memory.setdefault(x, old)
        self.show(x, value, same=False)

    def functional(self, node: fx.Node, written: Sequence[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
        """Returns the new values of the tensors that `node` writes to, and the node of its other results or None."""
        assert isinstance(node.target, OpOverload)
        if special := _SPECIAL.get(node.target):
            return [special(self.emit, *self.current(node.args), **self.current(node.kwargs))], None
        target, args, kwargs = functional_form(node.target), node.args, dict(node.kwargs)
        if target is None and (target := copying_form(node.target)) is not None:
            args, kwargs = tuple(get_argument(node, a.name) for a in schema_of(node.target).arguments), {}
        if target is None or torch.Tag.inplace_view in node.target.tags:
            raise ShardingError(
                f"{node.target} cannot be traced",
                [str(node.meta["line"])],
                rule="what an op writes is the value of a tensor of the same shape and memory, or else of a result",
                remedy="use an op that returns a new tensor; an op of your own may write to tensors, not to lists",
            )
        kept = {a.name for a in schema_of(target).arguments}
        kwargs = {k: v for k, v in kwargs.items() if k in kept}
        out: Tensor = written[0].meta["val"]
        own_form = {a.name for a in schema_of(node.target).arguments}
        kwargs |= {k: getattr(out, k) for k in ("dtype", "device") if k in kept and k not in own_form}
        result = self.emit(target, *self.current(args), **self.current(kwargs))
        own = sum(r.alias_info is None for r in schema_of(node.target).returns)
        if isinstance(result.meta["val"], Tensor):
            return [result], None
        values = [
            self.emit(operator.getitem, x, j) if j is not None else x
            for i, val in enumerate(result.meta["val"])
            for x in ([result] if isinstance(val, Tensor) else [self.emit(operator.getitem, result, i)])
            for j in ([i] if isinstance(val, Tensor) else range(len(val)))
        ]
        alone = isinstance(node.meta["val"], Tensor)
        return values[own:], (values[0] if alone else result) if own else None

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """Makes `value` the value of `node`, and carries it up to the owner."""
        shown = [(node, value)]
        while (view := self.views.get(node)) is not None:
            if not view.itself:
                new = write_through_view(self.emit, node, self.fresh(view.parent), value)
                if new is None:
                    through = "overlapping strides" if "overlaps" in node.meta else str(node.target)
                    raise ShardingError(
                        f"a write through {through} cannot be traced",
                        [str(self.at.meta["line"])],
                        rule="in-place writes go through views that show every element once and name dims",
                        remedy="compute the new value and use torch.where, torch.cat or index_put",
                    )
                value = new
            node = view.parent
            shown.append((node, value))
        self.version[node] = version = self.version.get(node, 0) + 1
        for link, now in shown:
            self.value[link] = now
            if link in self.views:
                self.views[link].version = version

    def fitted(self, value: fx.Node, like: Tensor) -> fx.Node:
        """Returns `value` in the dtype of `like`: a write keeps the dtype of its target."""
        return (
            value
            if value.meta["val"].dtype == like.dtype
            else self.emit(aten._to_copy.default, value, dtype=like.dtype)
        )

    def describe(self, node: fx.Node) -> str:
        owner = self.owner(node)
        tensor = f"input {self.names[owner]}" if owner.op == "placeholder" else "a tensor that the function closes over"
        through = "" if owner is node else ", through a view,"
        return f"{tensor}{through} is written to at {self.at.meta['line']}"


def body_writes(offenders: Sequence[str]) -> ShardingError:
    """Returns the error for the body of a loop that writes to its arguments, or to tensors from outside."""
    return ShardingError(
        "the body of scan writes to tensors that it did not make",
        list(dict.fromkeys(offenders)),
        rule="a body runs once, for every step: what changes from step to step is its carry",
        remedy="return the new value in the carry, h = h + x instead of h += x; take a buffer into the carry, and "
        "write it behind scan; for BatchNorm in training, eval(), track_running_stats=False or a loop in Python",
    )


# --- writes that are simpler than their functional op -----------------------------------------------------------------


def _copy(emit: Any, base: fx.Node, source: fx.Node, non_blocking: bool = False) -> fx.Node:
    old, new = base.meta["val"], source.meta["val"]
    changes = {k: getattr(old, k) for k in ("dtype", "device") if getattr(old, k) != getattr(new, k)}
    node = emit(aten._to_copy.default, source, **changes) if changes else source
    return node if old.shape == new.shape else emit(aten.expand.default, node, list(old.shape))


def _fill(emit: Any, base: fx.Node, value: Any) -> fx.Node:
    return _copy(emit, base, value) if isinstance(value, fx.Node) else emit(aten.full_like.default, base, value)


_SPECIAL: dict[OpOverload, Callable[..., fx.Node]] = {
    aten.copy_.default: _copy,
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _fill,
    aten.polygamma_.default: lambda emit, base, n: emit(aten.polygamma.default, n, base),
    aten.zero_.default: lambda emit, base: _fill(emit, base, 0),
    aten.bernoulli_.float: lambda emit, base, p=0.5, **named: emit(aten.bernoulli.p, base, p, **named),
}
