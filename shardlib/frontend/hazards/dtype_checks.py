"""Refuses dtypes and numbers that torch's kernels do not support, though its fake tensors accept them.

Without this check the program would fail when it runs. One call of each kind (op, dtypes, ranks, numbers) is tried on
tiny tensors. It is refused if the kernel fails for all tried integers, but runs on operands of these sizes with other
dtypes or numbers: else the tiny sizes do not fit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.call_scalar import Scalar
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of, without_autocast, without_modes
from shardlib.frontend.hazards.fake_tensor_gaps import RealOutcome
from shardlib.frontend.hazards.user_errors import describe_refusal

# Beside pointwise ops and reductions: ops that take tensors whose dims are all of one size.
_OTHERS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "linear", "convolution"),
        *("_cdist_forward", "_pdist_forward", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
        *("_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "logsumexp", "glu"),
        *("sort", "topk", "argsort", "argmax", "argmin", "median", "kthvalue", "mode", "max", "min", "trace"),
        *("index", "index_put", "index_add", "index_copy", "index_fill", "index_reduce", "index_select", "put", "take"),
        *("gather", "scatter", "scatter_add", "scatter_reduce", "masked_fill", "masked_scatter", "embedding"),
        *("fill", "full", "full_like", "new_full", "scalar_tensor", "linspace", "constant_pad_nd"),
        *("where", "clamp", "isin"),
        *("linalg_cholesky_ex", "_linalg_det", "_linalg_slogdet", "_linalg_svd", "_linalg_eigh", "linalg_qr"),
        *("linalg_inv_ex", "linalg_cross", "_linalg_solve_ex", "linalg_solve_triangular", "searchsorted", "bucketize"),
    )
)
_SIZES = (1, 2, 3)  # some ops support only one element, and a cross product takes three
_SIZED = ("size", "normalized_shape", "N", "C", "HxW", "steps", "pad")  # arguments that are sizes
_ONE = ("groups", "group")
_KINDS = (torch.float64, torch.int64, torch.bool, torch.complex64)
_TINY = 1 << 12  # elements
_MANY = 3  # more operands are not tried in all combinations


class _Tensor(NamedTuple):
    """A tensor whose dims are all of one size."""

    dtype: torch.dtype
    rank: int


def refuse_kernels(graph: fx.Graph, names: Mapping[fx.Node, str]) -> None:
    """Refuses the first call, in the forward part of a graph, that no kernel of the CPU supports."""
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("backward") or not _is_checked(node.target):
            continue
        if any(isinstance(x.meta.get("val"), torch.Tensor) and not x.meta["val"].numel() for x in node.all_input_nodes):
            continue  # kernels ignore the dtype of empty tensors
        args = [_token(x) for x in node.args]
        kwargs = {k: _token(x) for k, x in node.kwargs.items() if k != "device"}
        key = (node.target, _frozen(args), _frozen(kwargs.items()))
        if key not in _errors:
            with _plainly():
                _errors[key] = _fault(node.target, args, kwargs)
        if (error := _errors[key]) is not None:
            name = str(schema_of(node.target).name).removeprefix("aten::")
            operands = ((names.get(x, "an operand"), x.meta["val"]) for x in map(_source, node.all_input_nodes))
            raise describe_refusal(error, name, [str(node.meta["line"])], operands, RealOutcome(error=error))


_errors: BoundedCache[Any, Exception | None] = BoundedCache(1 << 10)


@cache
def _is_checked(op: Any) -> bool:
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    form = functional_form(op) if schema_of(op).is_mutable else op
    if form is None or torch.Tag.nondeterministic_seeded in form.tags or form.is_view:
        return False
    return schema_of(form).name in _OTHERS or torch.Tag.pointwise in form.tags or torch.Tag.reduction in form.tags


def _token(x: Any) -> Any:
    if isinstance(x, fx.Node):
        val = x.meta["val"]
        return _Tensor(val.dtype, val.dim()) if isinstance(val, torch.Tensor) else val
    if isinstance(x, list | tuple):
        return [_token(y) for y in x]
    return x.hint if isinstance(x, Scalar) else x


def _frozen(x: Any) -> Any:
    """Returns a hashable key, in which numbers of different types differ."""
    if isinstance(x, _Tensor):
        return x
    if isinstance(x, Iterable) and not isinstance(x, str):
        return tuple(_frozen(y) for y in x)
    return type(x), str(x) if isinstance(x, float | complex) else x


def _fault(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    operands = list(_tensors([*args, *kwargs.values()]))
    mine = tuple(x.dtype for x in operands)
    n = len(operands)
    tame_args, tame_kwargs = _tame(list(args)), {k: _tame(x) for k, x in kwargs.items()}
    if kwargs.get("dtype"):
        tame_kwargs["dtype"] = torch.complex128
    for size in (s for s in _SIZES if all(s**x.rank <= _TINY for x in operands)):
        errors = [_call(op, args, kwargs, size, fill) for fill in (1, 0)]
        if None in errors:
            continue
        kinds = itertools.product(_KINDS, repeat=n) if n <= _MANY else ((kind,) * n for kind in _KINDS)
        for dtypes, fill in itertools.product((mine, *kinds), (1, 0)):
            if _call(op, tame_args, tame_kwargs, size, fill, iter(dtypes)) is None:
                return errors[0]
    return None


def _call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: int,
    fill: int,
    dtypes: Iterator[torch.dtype] | None = None,
) -> Exception | None:
    """Returns the kernel's error for tensors whose integers are `fill` and whose other numbers are 1; or None."""

    def make(x: Any) -> Any:
        if isinstance(x, _Tensor):
            dtype = x.dtype if dtypes is None else next(dtypes)
            return torch.full([size] * x.rank, 1 if dtype.is_floating_point else fill, dtype=dtype, device="cpu")
        return [make(y) for y in x] if isinstance(x, list) else x

    schema = [a.name for a in schema_of(op).arguments]
    a = [make(_small(name, x, size)) for name, x in zip(schema, args, strict=False)]
    k = {name: make(_small(name, x, size)) for name, x in kwargs.items()}
    try:
        op(*a, **k)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        return error.with_traceback(None)  # the traceback would keep the caller's frames
    return None


def _small(name: str, x: Any, size: int) -> Any:
    if name not in _SIZED or isinstance(x, _Tensor):
        return 1 if name in _ONE else x
    return [size] * len(x) if isinstance(x, list) else size


def _tame(x: Any) -> Any:
    """Replaces numbers by 1.0, which every dtype can hold."""
    if isinstance(x, list):
        return [_tame(y) for y in x]
    return 1.0 if isinstance(x, float | complex) else x


def _tensors(x: Any) -> Iterator[_Tensor]:
    if isinstance(x, _Tensor):
        yield x
    elif isinstance(x, list):
        for y in x:
            yield from _tensors(y)


@contextmanager
def _plainly() -> Iterator[None]:
    """Runs kernels directly, without the user's modes, autocast and warnings."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(torch.DisableTorchFunction())
        stack.enter_context(without_autocast())
        stack.enter_context(without_modes())
        stack.enter_context(torch.no_grad())
        yield


def _source(node: fx.Node) -> fx.Node:
    """Returns the tensor behind views: users name that one."""
    while isinstance(node.target, OpOverload) and node.target.is_view and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
