"""What ops do with the memory, the marks and the values of their operands, beyond what their schemas say: one table.

A schema says whose memory a result shows, but not always, and it does not say more. Whatever else a stage must know of
an op by its name stands here, so that tracing, normalization, lowering, the reuse of memory, plans and eager ops cannot
disagree. `tests/core/aten/test_op_traits.py` runs every op that it can find and compares storages: what shares must be
marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from shardlib.core.torch_private import OpOverload, schema_of

TRAITS: Mapping[str, str] = {
    "shows": "results show the memory of the first argument, as those whose schema says so do",
    "may show": "results may show the memory of any operand, or have memory of their own: it depends on the values",
    "renames": "the result is the operand itself under another name",
    "copies": "the result is the operand in memory of its own (or of another dtype or device)",
    "like": "the operand gives a shape, a dtype and a device, not its values",
    "regroups": "the same elements in the same order, in other dims",
    "reshapes": "regroups, to sizes that are said; a copy where the strides ask for one will do as well",
    "permutes": "the same dims in another order",
    "creates": "made from sizes and numbers alone",
    "fills": "one number everywhere: `fill_value`, or 0",
    "zeros": "fills, with 0",
    "unset": "memory as it comes: nobody knows what is in it",
    "marks": "the result is the operand with a bit that says what is still to be done with it",
    "leaves marks": "a kernel may leave conjugation to who reads its results, by a bit",
    "commutes": "the first two operands may change places",
    "other shapes": "of some results, on other kinds of devices",
    "other dtypes": "of some results, on other kinds of devices, where the operands have 16 bits",
    "strides": "speaks of strides, of a memory that lies as on one device",
    "slack": "kernels may leave a result in memory that is larger than it, that of the terms of its sum",
    "in order": "kernels read operands as if they were contiguous, or refuse others: a shard need not be",
    "plumbing": "moves elements about, which a plan need not list",
    "retypes": "the bytes of the operand as numbers of another dtype",
    "pairs": "complex numbers as pairs of real ones, or back",
    "takes alpha": "the first operand and `alpha` times the second, or less it",
    "writes places": "the first operand, but for the places that an index names",
    "refuses values": "a call fails where some of its operands' values are none that it takes: indices, divisors",
    "multiplies": "the product of two operands",
    "by element": "as the ops that torch tags as pointwise: numbers only enter the arithmetic of each element",
    "rounds once": "each element, to the same bits wherever it lies: kernels that approximate may not at ends of rows",
    "constrains": "says where its operand lives",
    "enters": "what a device holds of a tensor, at the door of a body of per-device code",
    "leaves": "a tensor, of what every device of such a body makes",
    "per device": "in such a body: what other devices hold, or where this one is",
    "alike": "the same along the axes that it names",
    "casts terms": "another dtype, of every term of a sum that is still to be taken",
    "draws the key": "of the random numbers of a call",
    "storage": "speaks of storages and other layouts, which a tensor in pieces does not have",
}

# Ops of ATen and, with their namespace, of others; all overloads, or that behind a dot.
_TABLE: Mapping[str, str] = {
    # memory that the schema keeps quiet about
    "_unsafe_view": "shows, regroups, reshapes",
    "unsafe_split": "shows",
    "unsafe_chunk": "shows",
    "unsafe_split_with_sizes": "shows",
    "lift": "shows, renames",
    **dict.fromkeys(("conj_physical", "sum_to_size", "type_as", "to_dense", "_to_cpu"), "may show"),
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), "may show"),
    **dict.fromkeys(("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"), "may show"),
    **dict.fromkeys(("cartesian_prod", "einsum", "data"), "may show"),
    **dict.fromkeys(
        ("_saturate_weight_to_fp16", "flatten_dense_tensors", "unflatten_dense_tensors", "set", "_foobar"), "may show"
    ),
    **dict.fromkeys(
        (f"_cast_{name}" for name in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")), "may show"
    ),
    # the same values
    "alias": "renames",
    "detach": "renames",
    "lift_fresh": "renames",
    "clone": "copies, plumbing",
    "_to_copy": "copies, plumbing",
    "lift_fresh_copy": "copies",
    "ones_like": "like",
    "empty_like": "like, unset",
    "zeros_like": "like, fills, zeros",
    "full_like": "like, fills",
    "view.default": "regroups, reshapes",
    "_reshape_alias": "regroups, reshapes",
    "reshape": "regroups",
    "squeeze": "regroups",
    "unsqueeze": "regroups",
    "t": "permutes",
    "transpose": "permutes",
    "permute": "permutes",
    "as_strided": "strides",
    "_conj": "marks",
    "_neg_view": "marks",
    # arithmetic
    "add": "commutes, rounds once",
    "sub": "rounds once",
    "add.Tensor": "takes alpha",
    "sub.Tensor": "takes alpha",
    "mul": "commutes, rounds once",
    **dict.fromkeys(("div.Tensor", "div.Scalar", "neg", "abs", "relu", "maximum", "minimum", "sqrt"), "rounds once"),
    "mul.Tensor": "multiplies",
    **dict.fromkeys(
        ("index_put", "index_add", "index_copy", "scatter", "scatter_add"), "writes places, refuses values"
    ),
    **dict.fromkeys(
        ("scatter_reduce", "remainder", "fmod", "floor_divide", "div.Tensor_mode", "div.Scalar_mode"), "refuses values"
    ),
    **dict.fromkeys(("rsub", "_add_relu", "masked_fill.Scalar", "fill.Scalar"), "by element"),
    **dict.fromkeys((f"{x}_backward" for x in ("elu", "hardtanh", "leaky_relu", "softplus")), "by element"),
    "view.dtype": "retypes",
    "view_as_real": "pairs",
    "view_as_complex": "pairs",
    "view_copy.dtype": "retypes",
    **dict.fromkeys(("_linalg_solve_ex", "linalg_lu_solve", "linalg_solve_triangular", "vdot"), "leaves marks"),
    **dict.fromkeys(("ones", "new_ones", "scalar_tensor", "arange", "eye"), "creates"),
    **dict.fromkeys(("empty", "new_empty", "new_empty_strided"), "creates, unset"),
    **dict.fromkeys(("empty_strided", "empty_permuted"), "unset"),
    **dict.fromkeys(("full", "new_full"), "creates, fills"),
    **dict.fromkeys(("zeros", "new_zeros"), "creates, fills, zeros"),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"), "slack"),
    # what plans, and meta tensors, say of them
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "log_sigmoid_forward"), "other shapes"),
    **dict.fromkeys(("native_layer_norm", "_native_batch_norm_legit.no_stats"), "other dtypes"),
    **dict.fromkeys(("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"), "other dtypes"),
    "_batch_norm_with_update_functional": "other dtypes",
    **dict.fromkeys(("slice", "select", "slice_backward", "select_backward", "split", "split_with_sizes"), "plumbing"),
    **dict.fromkeys(("cat", "stack", "copy"), "plumbing"),
    # kernels that take memory as it comes
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), "in order"),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), "in order"),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool2d_backward"), "in order"),
    **dict.fromkeys(("fractional_max_pool3d", "fractional_max_pool3d_backward"), "in order"),
    **dict.fromkeys(("adaptive_max_pool3d_backward", "nll_loss2d_backward", "_masked_softmax"), "in order"),
    **dict.fromkeys(("linalg_matrix_exp", "view_as_complex_copy"), "in order"),
    **dict.fromkeys(("median.dim", "nanmedian.dim"), "in order"),  # they read past a dim of stride 0
    **dict.fromkeys(("searchsorted", "bucketize", "isin"), "in order"),  # or warn of it
    # shardlib's own
    "shardlib::constrain": "constrains",
    "shardlib::cast_terms": "casts terms, plumbing",
    "shardlib::splice": "plumbing",
    "shardlib::to_local": "enters, plumbing",
    "shardlib::from_local": "leaves, plumbing",
    **dict.fromkeys(("shardlib::manual_all_reduce", "shardlib::manual_all_gather"), "per device, alike"),
    **dict.fromkeys(("shardlib::manual_reduce_scatter", "shardlib::manual_all_to_all"), "per device"),
    **dict.fromkeys(("shardlib::manual_ppermute", "shardlib::manual_gather"), "per device"),
    **dict.fromkeys(("shardlib::manual_fetch", "shardlib::manual_give_back"), "per device"),
    "shardlib::manual_axis_index": "per device, like",
    "shardlib::call_key": "draws the key",
    # what pieces do not have
    **dict.fromkeys(("set_", "to_sparse", "_to_sparse", "to_mkldnn", "record_stream"), "storage"),
}


@cache
def has(target: Any, trait: str) -> bool:
    """Whether an op has a trait of `TRAITS`.

    Example:
        >>> import torch
        >>> aten = torch.ops.aten
        >>> has(aten.t.default, "permutes"), has(aten.unsafe_split.Tensor, "shows"), has(len, "copies")
        (True, True, False)
    """
    assert trait in TRAITS, f"no trait is called {trait!r}"
    return trait in _of(target)


@cache
def returns_list(target: Any) -> bool:
    """Whether an op's one result is a list of tensors.

    Example:
        >>> import torch
        >>> returns_list(torch.ops.aten.split.Tensor), returns_list(torch.ops.aten.max.dim)
        (True, False)
    """
    returns = schema_of(target).returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


@cache
def is_view(target: Any) -> bool:
    """Whether an op's results show the memory of its first argument, by its schema or by the table.

    Example:
        >>> import torch
        >>> aten = torch.ops.aten
        >>> is_view(aten.slice.Tensor), is_view(aten.lift.default), is_view(aten.add_.Tensor)
        (True, True, False)
    """
    if not isinstance(target, OpOverload) or not schema_of(target).arguments:
        return False
    alias = schema_of(target).arguments[0].alias_info
    return "shows" in _of(target) or (alias is not None and not alias.is_write)


@cache
def may_show(target: Any) -> bool:
    """Whether an op's results may show the memory of any operand: also what nobody here has measured may, or keep it.

    Example:
        >>> import torch
        >>> aten = torch.ops.aten
        >>> may_show(aten.conj_physical.default), may_show(aten.add.Tensor)
        (True, False)
    """
    if not isinstance(target, OpOverload):
        return True
    if target.namespace not in ("aten", "prims", "shardlib"):
        return True
    quiet = any(a.alias_info is not None and not a.alias_info.is_write for a in schema_of(target).arguments[1:])
    return quiet or "may show" in _of(target)


@cache
def repeats(target: Any) -> bool:
    """Whether an op of torch makes the same of the same operands in every call.

    Example:
        >>> import torch
        >>> aten = torch.ops.aten
        >>> repeats(aten.add.Tensor), repeats(aten.bernoulli.default), repeats(aten.empty_like.default)
        (True, False, False)
    """
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not has(target, "unset")


@cache
def is_composite(target: Any) -> bool:
    """Whether an op is written as others for every device, and for autograd.

    Example:
        >>> is_composite(torch.ops.aten.dropout.default), is_composite(torch.ops.aten.bernoulli.default)
        (True, False)
    """
    key = torch.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, OpOverload) and (key in target.py_kernels or target.has_kernel_for_dispatch_key(key))


def _of(target: Any) -> frozenset[str]:
    if not isinstance(target, OpOverload):
        return frozenset()
    name = schema_of(target).name.removeprefix("aten::")
    words = (_TABLE.get(name, ""), _TABLE.get(f"{name}.{schema_of(target).overload_name or 'default'}", ""))
    return frozenset(trait for text in words if text for trait in text.split(", "))
