"""What torch's kernels refuse and its fake tensors let pass: dtypes that do not go together, or that a kernel does not
take, and numbers that a dtype cannot hold.

A fake tensor knows shapes; of dtypes it asks little, and the program would fail when it runs. So a call of each kind
(op, dtypes, ranks, numbers) is tried once, on tiny tensors. It is refused if the kernel refuses it whatever integers
hold, but would take operands of these sizes in other dtypes, or other numbers: else the sizes do not fit.
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
from shardlib.core.torch_private import OpOverload, schema_of, without_autocast, without_modes
from shardlib.frontend.hazards.fake_tensor_gaps import OnOneDevice
from shardlib.frontend.hazards.user_errors import refused

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
_SIZES = (1, 2, 3)  # what torch does with one element it may not do with more; a cross product takes three
_SIZED = ("size", "normalized_shape", "N", "C", "HxW", "steps", "pad")  # arguments that are sizes
_ONE = ("groups", "group")
_KINDS = (torch.float64, torch.int64, torch.bool, torch.complex64)
_TINY = 1 << 12  # elements
_MANY = 3  # operands, whose kinds are not combined any more


class _Tensor(NamedTuple):
    """A tensor whose dims are all of one size."""

    dtype: torch.dtype
    rank: int


def refuse_kernels(graph: fx.Graph, names: Mapping[fx.Node, str]) -> None:
    """Raise the error of the first call in the user's own part of a graph that no kernel of the CPU takes."""
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("backward") or not _tried(node.target):
            continue
        if any(isinstance(x.meta.get("val"), torch.Tensor) and not x.meta["val"].numel() for x in node.all_input_nodes):
            continue  # of what is empty, kernels do not look at the dtype
        args = [_token(x) for x in node.args]
        kwargs = {k: _token(x) for k, x in node.kwargs.items() if k != "device"}
        key = (node.target, _frozen(args), _frozen(kwargs.items()))
        if key not in _known:
            with _plainly():
                _known[key] = _fault(node.target, args, kwargs)
        if (error := _known[key]) is not None:
            name = str(schema_of(node.target).name).removeprefix("aten::")
            operands = ((names.get(x, "an operand"), x.meta["val"]) for x in map(_source, node.all_input_nodes))
            raise refused(error, name, [str(node.meta["line"])], operands, OnOneDevice(error=error))


_known: BoundedCache[Any, Exception | None] = BoundedCache(1 << 10)


@cache
def _tried(op: Any) -> bool:
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
    """A key: numbers count by their type, too."""
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
    """What the kernel says to tensors whose integers are `fill`, whose other numbers are 1."""

    def made(x: Any) -> Any:
        if isinstance(x, _Tensor):
            dtype = x.dtype if dtypes is None else next(dtypes)
            return torch.full([size] * x.rank, 1 if dtype.is_floating_point else fill, dtype=dtype, device="cpu")
        return [made(y) for y in x] if isinstance(x, list) else x

    schema = [a.name for a in schema_of(op).arguments]
    a = [made(_small(name, x, size)) for name, x in zip(schema, args, strict=False)]
    k = {name: made(_small(name, x, size)) for name, x in kwargs.items()}
    try:
        op(*a, **k)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        return error.with_traceback(None)  # which would keep who calls
    return None


def _small(name: str, x: Any, size: int) -> Any:
    if name not in _SIZED or isinstance(x, _Tensor):
        return 1 if name in _ONE else x
    return [size] * len(x) if isinstance(x, list) else size


def _tame(x: Any) -> Any:
    """Arguments with numbers that every dtype can hold."""
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
    """Kernels themselves, whatever the user has switched on."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(torch.DisableTorchFunction())
        stack.enter_context(without_autocast())
        stack.enter_context(without_modes())
        stack.enter_context(torch.no_grad())
        yield


def _source(node: fx.Node) -> fx.Node:
    """What a view is of: users name that."""
    while isinstance(node.target, OpOverload) and node.target.is_view and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
