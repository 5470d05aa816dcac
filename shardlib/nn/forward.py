"""A module's forward as one program, which says itself how its batch is cut."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.compiler.memory_options import Keeping
from shardlib.compiler.plan.plan import Plan
from shardlib.core.context import is_tracing
from shardlib.core.errors import NoProgramError, ShardingError, ValueNeededError, public
from shardlib.core.plain_types import plain_types
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.source_lines import caller_at
from shardlib.core.torch_private import CALL_HOOKS, is_wrapped, pytree, version_of
from shardlib.frontend.guards.object_state import State
from shardlib.jit.jit import Jitted
from shardlib.jit.shard import shard
from shardlib.nn.mixed_precision import Policy
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, is_without_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor, marks

_IGNORE = "ignore::shardlib.EagerWarning"


@public
class EagerWarning(UserWarning):
    """A module's forward is no program: its ops run one by one."""


class Forward:
    """The `forward` of a module on the mesh where its parameters live; `fn` is the module's own.

    `batch` says how arguments are cut of which none is placed; `policy` in which precision it runs, `keeping` what is
    kept for its backward pass, and how far messages run ahead.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        batch: Batch,
        policy: Policy | None,
        keeping: Keeping,
    ) -> None:
        self.fn, self.mesh, self.batch, self.policy, self.keeping = fn, mesh, batch, policy, keeping
        self.run = fn if policy is None else policy.around(fn)
        self.eager: set[Any] = set()  # modes of the module in which no program can be made
        self.type_spaces: dict[int, dict[str, Any]] = {}  # globals of its code that may ask for `type(x)` then
        self.program = _Program(self.run, batch.specs, None, frozenset(), frozenset(), (), keeping)
        functools.update_wrapper(self, fn)

    def __reduce__(self) -> Any:  # a copy is of another module
        return Forward, (self.fn, self.mesh, self.batch, self.policy, self.keeping)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._on_copies(args, kwargs)
        if may_be_recorded() or self.eager:
            refuse_recorders(self.fn.__qualname__, pytree.tree_leaves((args, kwargs)))
        with self._where():
            if self.eager and self._mode in self.eager:
                return self._on_copies(args, kwargs)
            try:
                return self.program(*args, **kwargs)
            except NoProgramError as error:
                what = error.what.replace("the traced function", self.fn.__name__)
                if self.keeping.memory is not None and torch.is_grad_enabled():
                    raise ShardingError(
                        f"{what}, and {self.keeping.said} is said of it",
                        error.offenders,
                        rule="a program keeps to a budget; ops that run one by one take what they take",
                        remedy="write that line so that it is traced, or say no memory",
                    ) from error
                self.eager.add(self._mode)
                self.type_spaces = self._read_type_spaces(args, kwargs)
                warnings.warn_explicit(
                    f"{what}{', at' if isinstance(error, ValueNeededError) else ':'} {error.offenders[0]}: "
                    "its ops run one by one, on ShardedTensors, outside a program"
                    + (f", in which {self.keeping.said} says nothing" if self.keeping.said else "")
                    + f"\nRule: {error.rule}\nRemedy: {error.remedy}; or leave it: the values are right, and only "
                    f"slower to get (-W {_IGNORE} hides this warning)",
                    EagerWarning,
                    *caller_at(sys._getframe(1)),
                )
            return self._on_copies(args, kwargs)

    @property
    def retraces(self) -> list[str]:
        """Why its program was compiled again, each time."""
        found: list[str] = self.program.retraces
        return found

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan of forward and backward for these arguments; nothing runs."""
        with self._where():
            found: Plan = self.program.plan(*args, **kwargs)
            return found

    def _where(self) -> AbstractContextManager[Any]:
        """The current mesh, if there is one, or none on purpose; otherwise the module's."""
        now = current_mesh()
        if now is not None and now.axes != self.mesh.axes:
            raise ShardingError(
                f"{self.fn.__qualname__} is called on {now}",
                rule=f"a module runs on the mesh where its parameters live, {self.mesh}",
                remedy="leave that `with` block, or parallelize the module on this mesh",
            )
        return nullcontext() if now is not None or is_without_mesh() else self.mesh

    def _read_type_spaces(self, args: Any, kwargs: Any) -> dict[int, dict[str, Any]]:
        state = State()
        self.program.read_call(self.mesh, self.program.programs, state, args, kwargs)
        return state.type_spaces

    @property
    def _mode(self) -> Any:
        """What a module does in training it may not do in evaluation; what hooks do, not without them; what a backward
        pass does, not under `no_grad`."""
        module = getattr(self.fn, "__self__", None)
        if not isinstance(module, nn.Module):
            return None
        return (
            torch.is_grad_enabled(),
            module.training,
            sum(len(getattr(x, kind)) for x in module.modules() for kind in CALL_HOOKS),
        )

    def _on_copies(self, args: Any, kwargs: Any) -> Any:
        """Inside another traced function, and op by op, the batch is no argument of a program: copies of it are cut.

        A copy has the attributes of what it stands for, which gets what is written to it; one tensor stays one. What
        the module holds itself, parameters, and, outside a trace, what requires a gradient, are taken as they are.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        module = getattr(self.fn, "__self__", None)
        known = {id(x) for x in module.buffers()} if isinstance(module, nn.Module) else set()
        cut: dict[int, tuple[Tensor, Tensor, int]] = {}
        for x, at in zip(leaves, self.batch.specs(leaves) if current_mesh() is not None else (), strict=False):
            own = at is None or id(x) in known or isinstance(x, nn.Parameter) or is_wrapped(x)
            if at is not None and not own and id(x) not in cut and (is_tracing() or not x.requires_grad):
                with _counting_writes():
                    y = shard(x, at)
                y.__dict__.update(marks(x))
                cut[id(x)] = x, y, version_of(y)
        args, kwargs = pytree.tree_unflatten([cut[id(x)][1] if id(x) in cut else x for x in leaves], tree)
        with nullcontext() if is_tracing() else plain_types(self.type_spaces):
            out = self.run(*args, **kwargs)
        for x, y, version in cut.values():
            if version_of(y) != version:
                x.copy_(y.full_tensor() if isinstance(y, ShardedTensor) else y)
        return out


class _Program(Jitted):
    goes_back = True  # op by op, results have a history of their own


@contextmanager
def _counting_writes() -> Iterator[None]:
    """What is made here counts how often it is written to; what inference mode makes does not."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class Batch:
    """How the arguments of a call are cut: tensors that have as many rows as the first one over the axes `rows` (each
    with its size), and over `columns` those that have as many columns as the first with more dims, too."""

    rows: Mapping[str, int]
    columns: Mapping[str, int]

    def specs(self, leaves: Sequence[Any]) -> list[str | None]:
        """For each argument, how it is cut, if it is; none where one of them is placed already.

        A dim of which some devices would get nothing stays whole.

        Example:
            >>> import torch
            >>> Batch({"data": 2}, {}).specs([torch.ones(4, 3), torch.ones(3), torch.ones(4), 7])
            ['batch@(data)? _?', None, 'batch@(data)?', None]
        """
        if any(isinstance(x, ShardedTensor) for x in leaves):
            return [None] * len(leaves)
        shapes = [x.shape for x in leaves if isinstance(x, Tensor) and x.dim()]
        rows = shapes[0][0] if shapes else 0
        columns = next((shape[1] for shape in shapes if len(shape) > 1 and shape[0] == rows), 0)

        def spec(x: Any) -> str | None:
            if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != rows:
                return None
            words = ["_?"] * x.dim()
            if self.rows and rows >= math.prod(self.rows.values()):
                words[0] = f"batch@({' '.join(self.rows)})?"
            if self.columns and x.dim() > 1 and x.shape[1] == columns >= math.prod(self.columns.values()):
                words[1] = f"seq@({' '.join(self.columns)})?"
            return " ".join(words) if any("@" in word for word in words) else None

        return [spec(x) for x in leaves]
