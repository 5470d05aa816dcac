"""One table of traits of ops that their schemas do not state: about the memory and the values of operands.

A schema says which results are views, with exceptions, and little else. Every other fact that a stage needs about an op
is in this table, so that tracing, simplification, lowering, memory reuse, plans and eager ops agree.
`tests/test_traits.py` runs every op that it can find and compares storages: results that share memory need a trait.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import OpOverload, schema_of

TRAITS: Mapping[str, str] = {
    "returns_view": "results are views of the first argument, like those whose schema says so",
    "may_return_view": "results are views of some operand or new memory, depending on values",
    "is_alias": "the result is the operand itself",
    "copies": "the result is a copy of the operand, perhaps with another dtype or device",
    "metadata_only": "reads shape, dtype and device of the operand, not its values",
    "keeps_order": "the same elements in the same order, in other dims",
    "reshapes": "keeps_order, to sizes among the arguments; a copy where strides do not allow a view",
    "permutes": "the same dims in another order",
    "creates": "made from sizes and numbers alone",
    "fills": "one number everywhere: `fill_value`, or 0",
    "zeros": "fills with 0",
    "uninitialized": "memory with undefined contents",
    "sets_lazy_bit": "the result is the operand with its conjugate or negative bit flipped",
    "may_set_lazy_bit": "a kernel may return a result with the conjugate bit set",
    "commutes": "the first two operands may change places",
    "device_shapes": "the shapes of some results depend on the kind of device",
    "device_dtypes": "the dtypes of some results depend on the kind of device if operands have 16 bits",
    "takes_strides": "an argument holds strides of one device's memory",
    "overallocates": "kernels may return a result in larger memory, which held the terms of its sum",
    "needs_contiguous": "kernels read operands as if they were contiguous, or refuse others: a shard need not be",
    "moves_data": "moves elements about, which a plan need not list",
    "bitcasts": "the bytes of the operand as numbers of another dtype",
    "complex_pairs": "complex numbers as pairs of real ones, or back",
    "takes_alpha": "the first operand plus or minus `alpha` times the second",
    "writes_by_index": "the first operand with the elements at an index replaced",
    "raises_on_values": "a call raises for some values of its operands, such as indices and divisors",
    "multiplies": "the product of two operands",
    "pointwise": "like the ops that torch tags as pointwise: numbers only enter the arithmetic of each element",
    "correctly_rounded": "every element has the same bits wherever it lies; approximate kernels may differ at row ends",
    "constrains": "annotates the sharding of its operand",
    "enters_body": "returns the shards of a tensor at the start of a shard_map body",
    "leaves_body": "makes a tensor of the shards that a shard_map body returns",
    "per_device": "in a shard_map body: reads shards of other devices, or this device's position",
    "same_on_axes": "the result is the same along the axes that the call names",
    "casts_addends": "casts every addend of a partial sum",
    "draws_key": "returns the key for the random numbers of a call",
    "receives": "returns a value that another stage of a pipeline has sent",
    "needs_storage": "needs a storage or a sparse layout, which a sharded tensor lacks",
}

# Ops of ATen, and of other namespaces by prefix; all overloads, or the one behind a dot.
_TABLE: Mapping[str, str] = {
    # views that the schema does not declare
    "_unsafe_view": "returns_view, keeps_order, reshapes",
    "unsafe_split": "returns_view",
    "unsafe_chunk": "returns_view",
    "unsafe_split_with_sizes": "returns_view",
    "lift": "returns_view, is_alias",
    **dict.fromkeys(("conj_physical", "sum_to_size", "type_as", "to_dense", "_to_cpu"), "may_return_view"),
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), "may_return_view"),
    **dict.fromkeys(("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"), "may_return_view"),
    **dict.fromkeys(("cartesian_prod", "einsum", "data"), "may_return_view"),
    **dict.fromkeys(
        ("_saturate_weight_to_fp16", "flatten_dense_tensors", "unflatten_dense_tensors", "set", "_foobar"),
        "may_return_view",
    ),
    **dict.fromkeys(
        (f"_cast_{name}" for name in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")),
        "may_return_view",
    ),
    # the same values
    "alias": "is_alias",
    "detach": "is_alias",
    "lift_fresh": "is_alias",
    "clone": "copies, moves_data",
    "_to_copy": "copies, moves_data",
    "lift_fresh_copy": "copies",
    "ones_like": "metadata_only",
    "empty_like": "metadata_only, uninitialized",
    "zeros_like": "metadata_only, fills, zeros",
    "full_like": "metadata_only, fills",
    "view.default": "keeps_order, reshapes",
    "_reshape_alias": "keeps_order, reshapes",
    "reshape": "keeps_order",
    "squeeze": "keeps_order",
    "unsqueeze": "keeps_order",
    "t": "permutes",
    "transpose": "permutes",
    "permute": "permutes",
    "as_strided": "takes_strides",
    "_conj": "sets_lazy_bit",
    "_neg_view": "sets_lazy_bit",
    # arithmetic
    "add": "commutes, correctly_rounded",
    "sub": "correctly_rounded",
    "add.Tensor": "takes_alpha",
    "sub.Tensor": "takes_alpha",
    "mul": "commutes, correctly_rounded",
    **dict.fromkeys(
        ("div.Tensor", "div.Scalar", "neg", "abs", "relu", "maximum", "minimum", "sqrt"), "correctly_rounded"
    ),
    "mul.Tensor": "multiplies",
    **dict.fromkeys(
        ("index_put", "index_add", "index_copy", "scatter", "scatter_add"), "writes_by_index, raises_on_values"
    ),
    **dict.fromkeys(
        ("scatter_reduce", "remainder", "fmod", "floor_divide", "div.Tensor_mode", "div.Scalar_mode"),
        "raises_on_values",
    ),
    **dict.fromkeys(("rsub", "_add_relu", "masked_fill.Scalar", "fill.Scalar"), "pointwise"),
    **dict.fromkeys((f"{x}_backward" for x in ("elu", "hardtanh", "leaky_relu", "softplus")), "pointwise"),
    "view.dtype": "bitcasts",
    "view_as_real": "complex_pairs",
    "view_as_complex": "complex_pairs",
    "view_copy.dtype": "bitcasts",
    **dict.fromkeys(("_linalg_solve_ex", "linalg_lu_solve", "linalg_solve_triangular", "vdot"), "may_set_lazy_bit"),
    **dict.fromkeys(("ones", "new_ones", "scalar_tensor", "arange", "eye"), "creates"),
    **dict.fromkeys(("empty", "new_empty", "new_empty_strided"), "creates, uninitialized"),
    **dict.fromkeys(("empty_strided", "empty_permuted"), "uninitialized"),
    **dict.fromkeys(("full", "new_full"), "creates, fills"),
    **dict.fromkeys(("zeros", "new_zeros"), "creates, fills, zeros"),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"), "overallocates"),
    # results that depend on the device, and ops for plans
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "log_sigmoid_forward"), "device_shapes"),
    **dict.fromkeys(("native_layer_norm", "_native_batch_norm_legit.no_stats"), "device_dtypes"),
    **dict.fromkeys(("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"), "device_dtypes"),
    "_batch_norm_with_update_functional": "device_dtypes",
    **dict.fromkeys(
        ("slice", "select", "slice_backward", "select_backward", "split", "split_with_sizes"), "moves_data"
    ),
    **dict.fromkeys(("cat", "stack", "copy"), "moves_data"),
    # kernels that ignore strides
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), "needs_contiguous"),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), "needs_contiguous"),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool2d_backward"), "needs_contiguous"),
    **dict.fromkeys(("fractional_max_pool3d", "fractional_max_pool3d_backward"), "needs_contiguous"),
    **dict.fromkeys(("adaptive_max_pool3d_backward", "nll_loss2d_backward", "_masked_softmax"), "needs_contiguous"),
    **dict.fromkeys(("linalg_matrix_exp", "view_as_complex_copy"), "needs_contiguous"),
    **dict.fromkeys(("median.dim", "nanmedian.dim"), "needs_contiguous"),  # read out of bounds if a dim has stride 0
    **dict.fromkeys(("searchsorted", "bucketize", "isin"), "needs_contiguous"),  # warn if an operand is not contiguous
    # shardlib's own
    "shardlib::constrain": "constrains",
    "shardlib::cast_terms": "casts_addends, moves_data",
    "shardlib::splice": "moves_data",
    "shardlib::to_local": "enters_body, moves_data",
    "shardlib::from_local": "leaves_body, moves_data",
    **dict.fromkeys(("shardlib::manual_all_reduce", "shardlib::manual_all_gather"), "per_device, same_on_axes"),
    **dict.fromkeys(("shardlib::manual_reduce_scatter", "shardlib::manual_all_to_all"), "per_device"),
    **dict.fromkeys(("shardlib::manual_ppermute", "shardlib::manual_gather"), "per_device"),
    **dict.fromkeys(("shardlib::manual_fetch", "shardlib::manual_give_back"), "per_device"),
    "shardlib::manual_axis_index": "per_device, metadata_only",
    "shardlib::call_key": "draws_key",
    "shardlib::receive": "receives",
    # unsupported by sharded tensors
    **dict.fromkeys(("set_", "to_sparse", "_to_sparse", "to_mkldnn", "record_stream"), "needs_storage"),
}


@cache
def has_trait(target: Any, trait: str) -> bool:
    assert trait in TRAITS, f"no trait is called {trait!r}"
    return trait in _traits_of(target)


@cache
def returns_list(target: Any) -> bool:
    """Returns whether an op's one result is a list of tensors."""
    returns = schema_of(target).returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


@cache
def is_view(target: Any) -> bool:
    """Returns whether an op's results are views of its first argument, by its schema or by the table."""
    if not isinstance(target, OpOverload) or not schema_of(target).arguments:
        return False
    alias = schema_of(target).arguments[0].alias_info
    return "returns_view" in _traits_of(target) or (alias is not None and not alias.is_write)


@cache
def may_return_view(target: Any) -> bool:
    """Returns whether results of an op may be views of some operand; true of custom ops, whose kernels are unknown."""
    if not isinstance(target, OpOverload):
        return True
    if target.namespace not in ("aten", "prims", "shardlib"):
        return True
    is_view_of_other = any(
        a.alias_info is not None and not a.alias_info.is_write for a in schema_of(target).arguments[1:]
    )
    return is_view_of_other or "may_return_view" in _traits_of(target)


@cache
def is_deterministic(target: Any) -> bool:
    """Returns whether an op of torch computes the same result from the same operands in every call."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not has_trait(target, "uninitialized")


@cache
def is_composite(target: Any) -> bool:
    """Returns whether an op is composed of other ops on every device, and for autograd."""
    key = torch.DispatchKey.CompositeImplicitAutograd
    return isinstance(target, OpOverload) and (key in target.py_kernels or target.has_kernel_for_dispatch_key(key))


def _traits_of(target: Any) -> frozenset[str]:
    if not isinstance(target, OpOverload):
        return frozenset()
    name = schema_of(target).name.removeprefix("aten::")
    words = (_TABLE.get(name, ""), _TABLE.get(f"{name}.{schema_of(target).overload_name or 'default'}", ""))
    return frozenset(trait for text in words if text for trait in text.split(", "))
