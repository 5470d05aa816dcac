"""The passes that look at one node at a time, or at equal ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.aten.schemas import get_argument
from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.torch_private import OpOverload, schema_of

aten = torch.ops.aten


# --- passes -----------------------------------------------------------------------------------------------------------


def drop_identities(gm: fx.GraphModule) -> None:
    """Nodes that return their operand go; a copy stays where the function would else return the same memory twice."""
    returned = _returned(gm)
    for node in gm.graph.nodes:
        if not _returns_operand(node) or not _same_as_operand(node):
            continue
        source = _shown(node)
        if node in returned:
            owner = _owner(source)
            if owner in returned or owner.op != "call_function":
                continue
            returned.add(owner)
        _note_copies(node)
        node.replace_all_uses_with(source)


def leave_out_empty(gm: fx.GraphModule) -> None:
    """What has no elements is not put beside others (a cache that is empty yet); one tensor alone is copied."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.cat.default):
        full = [x for x in node.args[0] if x.meta["val"].numel()]
        dtypes = {x.meta["val"].dtype for x in full}
        if 0 < len(full) < len(node.args[0]) and dtypes == {node.meta["val"].dtype}:
            node.args = (full, *node.args[1:])
            if len(full) == 1:
                node.target, node.args, node.kwargs = aten.clone.default, (*full,), {}


def one_permute(gm: fx.GraphModule) -> None:
    """`t` and `transpose` are `permute`, which is as fast; a permutation of a permutation is one, or none."""
    for node in gm.graph.nodes:
        if not has_trait(node.target, "permutes"):
            continue
        dims, source = dims_of(node), node.args[0]
        if source.target is aten.permute.default:
            dims, source = [source.args[1][d] for d in dims], source.args[0]
        if dims == sorted(dims):
            node.replace_all_uses_with(source)
        else:
            node.target, node.args, node.kwargs = aten.permute.default, (source, dims), {}


def compose_reshapes(gm: fx.GraphModule) -> None:
    """A reshape of reshapes is one, or none; a copy that several read is made once."""
    for node in gm.graph.nodes:
        if not has_trait(node.target, "keeps_order"):
            continue
        source = node.args[0]
        while has_trait(source.target, "keeps_order") and not (source.meta.get("copies") and len(source.users) > 1):
            node.meta["copies"] = node.meta.get("copies", False) or source.meta.get("copies", False)
            source = source.args[0]
        if source.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(source)
        elif source is not node.args[0]:
            node.target, node.args, node.kwargs = aten.reshape.default, (source, list(node.meta["val"].shape)), {}


def no_vectors(gm: fx.GraphModule) -> None:
    """A decomposition of which singular values are read, alone, makes no vectors: torch makes some for any tensor that
    might need a gradient."""
    for node in gm.graph.nodes:
        if node.target is aten._linalg_svd.default and {user.args[1] for user in node.users} == {1}:
            x, values = node.args[0], node.meta["val"][1]
            node.args = (x, False, False)
            node.meta["val"] = (x.meta["val"].new_empty(0), values, x.meta["val"].new_empty(0))


def fill_by_masks(gm: fx.GraphModule) -> None:
    """`x[mask] = number` fills where the mask says, as torch does it: a write by indices would first count the mask's
    elements, and wait for a GPU to know."""
    for node in gm.graph.nodes:
        if node.target is not aten.index_put.default:
            continue
        x, indices, value, *accumulate = node.args
        seen = [None if i is None else i.meta["val"] for i in indices]
        at = mask_filled(x.meta["val"], seen, value.meta["val"], *accumulate, *node.kwargs.values())
        if at is None:
            continue
        mask = indices[at]
        with gm.graph.inserting_before(node):
            for _ in range(x.meta["val"].dim() - at - mask.meta["val"].dim()):
                mask = call(gm, node, aten.unsqueeze.default, mask, -1)
        node.target, node.args, node.kwargs = aten.masked_fill.Tensor, (x, mask, value), {}


def mask_filled(
    x: torch.Tensor, indices: Sequence[Any], value: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> int | None:
    """Which of the indices is the one mask that `x[indices] = value` writes a number by; None of other writes."""
    given = [i for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or accumulate or value.dim() or value.dtype is not x.dtype:
        return None
    (at,) = given
    mask = indices[at]
    return at if mask.dtype is torch.bool and mask.shape == x.shape[at : at + mask.dim()] else None


def divide_losses_late(gm: fx.GraphModule) -> None:
    """The mean of a loss is a sum over a count: every part of the rows adds to both, and the division comes last."""
    for node in list(gm.graph.nodes):
        if node.target not in _LOSSES or get_argument(node, "reduction") != MEAN:
            continue
        if node.args[0].meta["val"].dtype == torch.float16:
            continue  # the sum would overflow
        if node.target in _LOSS_BACKWARDS:
            total = get_argument(node, "total_weight")
            with gm.graph.inserting_before(node):
                grad = call(gm, node, aten.div.Tensor, node.args[0], total)
            node.args = (grad, *node.args[1:4], SUM, *node.args[5:])
            continue
        items = {user.args[1]: user for user in node.users}
        node.args = (*node.args[:3], SUM, *node.args[4:])
        if loss := items.get(0):
            total = items.get(1)
            with gm.graph.inserting_after(loss):
                if total is None or total > loss:
                    fresh = call(gm, loss, operator.getitem, node, 1)
                    total = total.replace_all_uses_with(fresh) and fresh if total else fresh
            with gm.graph.inserting_after(total):
                mean = call(gm, node, aten.div.Tensor, loss, total)
            loss.replace_all_uses_with(mean, delete_user_cb=lambda user, mean=mean: user is not mean)


def forget_totals(gm: fx.GraphModule) -> None:
    """What a mean divides by is nothing to the gradient of a sum, so nobody has to add it up for that."""
    for node in gm.graph.nodes:
        if node.target in _LOSS_BACKWARDS and get_argument(node, "reduction") != MEAN:
            with gm.graph.inserting_before(node):
                node.args = (*node.args[:6], call(gm, node, aten.new_full.default, node.args[0], [], 1))


def merge_repeated(gm: fx.GraphModule) -> None:
    """Two nodes that compute the same are one.

    Not so when both are returned, each with memory of its own, nor when a backward node repeats forward arithmetic:
    that is how activation checkpointing trades time for memory.
    """
    returned = _returned(gm)
    known: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        if (op := node.op) not in ("call_function", "get_attr"):
            continue
        free = op == "get_attr" or _is_free(node.target)
        if free is None:
            continue
        phase = None if free else bool(node.meta.get("backward"))
        target = node.target if op == "get_attr" else id(node.target)
        key = (target, phase, _key(node.args), _key(kwargs) if (kwargs := node.kwargs) else ())
        first = known.setdefault(key, node)
        if first is not node and (free or not returned.issuperset((node, first))):
            if node in returned and not free:  # now the first one is
                returned.add(first)
                first.meta = {k: v for k, v in node.meta.items() if k == "gradient of"} | first.meta
            node.replace_all_uses_with(first)


def drop_dead(gm: fx.GraphModule) -> None:
    """Nodes without readers go; a call's key stays, since drawing it moves a generator on, and so do checks."""
    for node in reversed(gm.graph.nodes):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        if not _is_random(node.target) and not _is_check(node.target):
            gm.graph.erase_node(node)


def free_draws(gm: fx.GraphModule) -> None:
    """Random numbers lie beside an input that they are drawn for; a tensor made on the way is not kept for them."""
    for node in gm.graph.nodes:
        if node.target is torch.ops.shardlib.draw.default and isinstance(like := node.args[1], fx.Node):
            while any(has_trait(like.target, trait) for trait in ("is_alias", "copies", "metadata_only")):
                like = like.args[0]
            key, _, *rest = node.args
            node.args = (key, like if like.op == "placeholder" else None, *rest)


# --- helpers ----------------------------------------------------------------------------------------------------------

_LOSS_BACKWARDS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}
_LOSSES = _LOSS_BACKWARDS | {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
MEAN, SUM = 1, 2


def _is_one(node: fx.Node) -> bool:
    value = node.args[1]
    return isinstance(value, int | float) and value == 1


_IDENTITIES: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(
        (aten.expand.default, aten.slice.Tensor, aten.slice_scatter.default, aten.reshape.default), lambda node: True
    ),
    **dict.fromkeys((aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor), _is_one),
    aten.pow.Tensor_Scalar: _is_one,  # from the gradient of x ** 2
}


def _returns_operand(node: fx.Node) -> bool:
    """Returns whether a node's values are those of its operand, if shape and dtype are."""
    test = _IDENTITIES.get(node.target)
    return has_trait(node.target, "is_alias") or has_trait(node.target, "copies") or (test is not None and test(node))


def _shown(node: fx.Node) -> Any:
    """The operand that a node returns, if it returns one: of a write into another tensor, what is written."""
    return node.args[node.target is aten.slice_scatter.default]


def _same_as_operand(node: fx.Node) -> bool:
    source = _shown(node)
    if not isinstance(source, fx.Node):
        return False
    old, new = source.meta["val"], node.meta["val"]
    return bool(old.shape == new.shape and old.dtype == new.dtype and old.device == new.device)


def _note_copies(node: fx.Node) -> None:
    """A reshape took this copy because it needed one; it now copies by itself."""
    for user in node.users:
        if node.target is aten.clone.default and user.target is aten.reshape.default:
            user.meta["copies"] = True


def _returned(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes whose memory the function returns."""
    return {_owner(node) for node in gm.graph.output_node().all_input_nodes}


def _owner(node: fx.Node) -> fx.Node:
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.all_input_nodes[0].target)):
        node = node.all_input_nodes[0]
    return node


def _is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


@cache
def _is_free(target: Any) -> bool | None:
    """Returns whether an op does no arithmetic; None of one that draws random numbers."""
    if _is_random(target):
        return None
    return target is operator.getitem or is_view(target) or has_trait(target, "keeps_order")


def _is_check(target: Any) -> bool:
    """Returns whether an op is there for the error that it may raise: it makes nothing."""
    return isinstance(target, OpOverload) and not schema_of(target).returns


_SAME = frozenset({int, bool, str, type(None), torch.dtype, torch.device})


def _key(value: Any) -> Any:
    """Hashable, and apart wherever 1, 1.0, True or 0.0, -0.0 mean different programs."""
    kind = type(value)
    if kind is fx.Node:
        return value
    if kind in _SAME:
        return kind, value
    if isinstance(value, list | tuple):
        return tuple([(int, x) if type(x) is int else _key(x) for x in value])
    if isinstance(value, dict):
        return tuple([(k, _key(v)) for k, v in sorted(value.items())])
    return kind, repr(value)


def dims_of(node: fx.Node) -> list[int]:
    """The order in which a permutation has the dims of its operand."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]  # type: ignore[union-attr]
    dims = list(range(rank))
    if rank > 1:
        a, b = (0, 1) if node.target is aten.t.default else (get_argument(node, "dim0"), get_argument(node, "dim1"))
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def call(gm: fx.GraphModule, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node with the line of `like`; the caller says where."""
    node = gm.graph.call_function(target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in ("line", "backward", "gradient of", "modules") if k in like.meta})
    node.meta["val"] = value_of(gm, target, args, kwargs)
    return node


def value_of(gm: fx.GraphModule, target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the fake value of a call; calls of one op on operands of the same form in one graph share it."""
    forms = fx.map_arg((args, kwargs), _form)
    key = target, _key(replace_by_hints(forms))
    values: dict[Any, Any] = gm.meta.setdefault(_VALUES, {})
    if key not in values:
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        values[key] = target(*replace_by_hints(args), **kwargs)
    return values[key]


def forget_values(gm: fx.GraphModule) -> None:
    """Drop the values that calls share; nodes keep theirs."""
    gm.meta.pop(_VALUES, None)


_VALUES = "values of calls"


def _form(node: fx.Node) -> Any:
    x = node.meta["val"]
    if not isinstance(x, torch.Tensor):
        return node  # several tensors, or none
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.storage_offset(), x.is_conj(), x.is_neg()
