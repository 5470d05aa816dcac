"""Mixed precision: the dtypes in which parameters are stored, gathered and computed with, and gradients are summed.

As in FSDP (Zhao et al. 2023, arXiv:2304.11277), with master weights as in Micikevicius et al. 2018 (arXiv:1710.03740):
the optimizer updates parameters in their own dtype.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import repeat_in_checkpoints
from shardlib.core.source_lines import Line, line_at, replayed
from shardlib.core.torch_internals.module_tensors import module_tensors, replacing
from shardlib.core.torch_internals.torch_private import BatchNormalization, pytree
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.nn.argument_copies import run_on_copies
from shardlib.nn.parameters import NamedTensor, list_named
from shardlib.nn.spec_table import matches, read_table
from shardlib.ops.cast_terms import CAST_TERMS


@dataclass(frozen=True)
class Precision:
    """Dtypes of a parameter; None keeps a dtype.

    * `parameter`: the stored parameter (master weights) and the optimizer's moments.
    * `compute`: the parameter in the module's ops, and the module's floating-point arguments.
    * `communication`: the gathered parameter; by default as `compute`.
    * `reduction`: sums of gradients over devices, along every axis; by default the parameter's dtype.
    * `output`: the module's results.

    Batch normalization (`BatchNorm*d`, `SyncBatchNorm`) keeps the dtype of its parameters and statistics, as in FSDP,
    since torch mixes 16-bit activations with float32. A pattern that matches nothing but batch normalization changes
    its dtype.

    Example:
        >>> Precision(compute=torch.bfloat16)
        Precision(compute=torch.bfloat16)
    """

    parameter: torch.dtype | None = None
    compute: torch.dtype | None = None
    communication: torch.dtype | None = None
    reduction: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        dtypes = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [
            f"{name}={x!r} is no dtype of real floating-point numbers"
            for name, x in dtypes.items()
            if x is not None and not (isinstance(x, torch.dtype) and x.is_floating_point)
        ]
        if wrong:
            raise ShardingError(
                "this is no precision", wrong, remedy="Precision(compute=torch.bfloat16, reduction=torch.float32)"
            )

    def __repr__(self) -> str:
        dtypes = ((field.name, getattr(self, field.name)) for field in fields(self))
        return f"Precision({', '.join(f'{name}={x}' for name, x in dtypes if x is not None)})"

    @property
    def casts(self) -> bool:
        """True if the parameter is computed with, gathered or summed in another dtype."""
        return any((self.compute, self.communication, self.reduction))


Precisions = torch.dtype | Precision | Mapping[str, Precision] | None


def policy_of(precision: Precisions, module: nn.Module, tensors: Sequence[NamedTensor]) -> Policy | None:
    """Returns the precision of a module and of its floating-point parameters, by their first names.

    Refuses dtypes of batch normalization that torch cannot mix.
    """
    if precision is None:
        return None
    norms = {at: x for at, x in module.named_modules(remove_duplicate=False) if isinstance(x, BatchNormalization)}
    kept = {x.name for x in tensors if any(at.rpartition(".")[0] in norms for at in x.names)}
    whole = Precision(compute=precision) if isinstance(precision, torch.dtype) else precision
    if isinstance(whole, Precision):
        precisions = {x.name: whole for x in tensors}
    elif isinstance(whole, Mapping) and all(isinstance(x, Precision) for x in whole.values()):
        precisions = read_table(whole, [x.names for x in tensors], [at for at, _ in module.named_buffers()])
        for pattern in whole:
            named = {x.name for x in tensors if any(matches(pattern, at) for at in x.names)}
            kept -= named if named <= kept else set()
        whole = Precision()
    else:
        raise ShardingError(
            f"precision={precision!r} is none",
            rule="a dtype to compute in, a Precision, or a dict of such by patterns of parameters' names",
            remedy="precision=torch.bfloat16",
        )
    if not hasattr(getattr(module.forward, "fn", module.forward), "__self__"):
        raise ShardingError(
            f"the forward of this {type(module).__name__} is no method of it",
            rule="with a precision, forward runs on other parameters than the module has",
            remedy="put the function into a class of its own, or cast inside of it",
        )
    inexact = [x.name for x in tensors if x.name in precisions and x.tensor.is_floating_point()]
    by_name = {name: precisions[name] for name in inexact if name not in kept}
    _refuse_mixtures(type(module).__name__, norms, by_name, whole)
    return Policy(whole, by_name)


_MIXED = {torch.float32, torch.bfloat16, torch.float16}


def _refuse_mixtures(name: str, norms: Mapping[str, Any], by_name: Mapping[str, Precision], whole: Precision) -> None:
    """Refuses batch normalization whose activations, parameters and statistics have dtypes that torch does not mix."""
    wrong = []
    for at, norm in norms.items():
        dtypes = {key: x.dtype for key, x in norm.named_buffers(prefix=at) if x.is_floating_point()}
        for key, x in norm.named_parameters(prefix=at):
            precision = by_name.get(key, Precision())
            dtypes[key] = precision.compute or precision.parameter or x.dtype
        mixed = {*dtypes.values(), *([whole.compute] if whole.compute else [])}
        is_supported = len(mixed) <= 1 or (mixed <= _MIXED and torch.float32 in dtypes.values())
        if len({*dtypes.values()}) > 1 or not is_supported:
            parts = [*dtypes.items(), *([("the activations", whole.compute)] if whole.compute else [])]
            wrong.append(f"{at or name} of {type(norm).__name__}: " + ", ".join(f"{key} in {x}" for key, x in parts))
    if wrong:
        raise ShardingError(
            f"the precision of {name} is none that torch normalizes batches in",
            wrong,
            rule="parameters and statistics have one dtype, that of the activations, or float32 beside 16-bit ones",
            remedy="keep the module in float32 (module.float()), and name no parameter of batch normalization",
        )


@dataclass(frozen=True)
class Policy:
    """The precision of a module's arguments and results (`whole`), and of its parameters."""

    whole: Precision
    by_name: Mapping[str, Precision]

    def wrap_forward(self, module: nn.Module, forward: Any) -> Callable[..., Any]:
        """Returns a module's `forward` as a function that casts parameters, arguments and results."""
        by_name = {name: precision for name, precision in self.by_name.items() if precision.casts}
        compute, output = self.whole.compute, self.whole.output
        code = getattr(inspect.unwrap(forward), "__code__", type(self).wrap_forward.__code__)
        line, lock = line_at(code, code.co_firstlineno), threading.RLock()
        name = getattr(forward, "__name__", "forward")

        def cast(x: Tensor) -> Tensor | None:
            return x.to(compute) if compute is not None and x.is_floating_point() else None

        @contextmanager
        def cast_parameters() -> Iterator[None]:
            with _refuse_threads(lock, module), _cast_parameters(module, by_name, line):
                yield

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with repeat_in_checkpoints(cast_parameters):
                out = run_on_copies(name, module, forward, register_mappings((args, kwargs)), cast)
            return out if output is None else _convert(register_mappings(out), output)

        return run


def _convert(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


@contextmanager
def _refuse_threads(lock: Any, module: nn.Module) -> Iterator[None]:
    """Refuses a second thread, which would find the casts of the first in the place of parameters."""
    if not lock.acquire(blocking=False):
        raise ShardingError(
            f"two threads run the forward of one {type(module).__name__} op by op, or trace it, at a time",
            rule="with a precision, forward runs on casts, which stand in the module for that time",
            remedy="call it once before the threads start, if it is one program; or take turns",
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _cast_parameters(module: nn.Module, by_name: Mapping[str, Precision], line: Line) -> Iterator[None]:
    """Replaces parameters by casts under all their names; `line` is the source line of the casts."""
    cast: Any = _Cast.apply
    named = [x for x in list_named(module) if x.name in by_name]
    token = replayed.set(line)
    try:
        casts = {id(x.tensor): cast(x.tensor, by_name[x.name]) for x in named}
    finally:
        replayed.reset(token)
    held = module_tensors(module.modules())
    with replacing((space, name, casts[id(x)]) for space, name, x in held if id(x) in casts):
        yield


class _Cast(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, precision: Precision) -> Tensor:
        compute = precision.compute or x.dtype
        sent = precision.communication or compute
        return x.to(sent).to(compute) if {sent, compute} != {x.dtype} else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.precision = inputs
        ctx.own, ctx.sums = x.dtype, ctx.precision.reduction or x.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        summed = grad if grad.dtype == ctx.sums else CAST_TERMS(grad, dtype=ctx.sums)
        return summed.to(ctx.own), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return _Cast.apply(tangent, ctx.precision)  # type: ignore[no-untyped-call]
