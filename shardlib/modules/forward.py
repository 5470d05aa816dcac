"""A module's forward as one program, which says itself how its batch is cut and where gradients land."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardlib.errors import ValueNeededError
from shardlib.internals import pytree
from shardlib.jit import jit
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.placing import shard
from shardlib.plans.plan import Plan
from shardlib.state import is_tracing
from shardlib.tensors.tensor import ShardedTensor


class EagerWarning(UserWarning):
    """A module's forward is no program: its ops run one by one."""


class Forward:
    """The `forward` of a module on the mesh where its parameters live; `fn` is the module's own.

    `batch` says how arguments are cut of which none is placed.
    """

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, batch: Batch) -> None:
        self.fn, self.mesh, self.batch = fn, mesh, batch
        self.eager: set[Any] = set()  # modes of the module in which it asks for values, so that no program can be made

        @functools.wraps(fn)
        def cutting(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = batch.cut((args, kwargs))
            return fn(*args, **kwargs)

        self.program, self.cutting = jit(fn), jit(cutting)
        functools.update_wrapper(self, fn)

    def __reduce__(self) -> Any:  # a copy is of another module
        return Forward, (self.fn, self.mesh, self.batch)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if current_mesh() is not None else self.mesh:
            if self._mode in self.eager:
                return self._by_op(args, kwargs)
            try:
                return self._for(args, kwargs)(*args, **kwargs)
            except ValueNeededError as error:
                if is_tracing():
                    raise
                self.eager.add(self._mode)
                warnings.warn(
                    f"{error.what.replace('the traced function', self.fn.__name__)}, at {error.offenders[0]}: "
                    "its ops run one by one, on ShardedTensors, outside a program",
                    EagerWarning,
                    stacklevel=2,
                )
            return self._by_op(args, kwargs)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan of forward and backward for these arguments; nothing runs."""
        with self.mesh:
            found: Plan = self._for(args, kwargs).plan(*args, **kwargs)
            return found

    @property
    def _mode(self) -> Any:
        """What a module does in training it may not do in evaluation."""
        return getattr(getattr(self.fn, "__self__", None), "training", None)

    def _by_op(self, args: Any, kwargs: Any) -> Any:
        if self._for(args, kwargs) is self.cutting:
            args, kwargs = self.batch.cut((args, kwargs))
        return self.fn(*args, **kwargs)

    def _for(self, args: Any, kwargs: Any) -> Any:
        """The program for these arguments: where one of them is placed, the caller has said where the batch lives."""
        placed = any(isinstance(x, ShardedTensor) for x in pytree.tree_leaves((args, kwargs)))
        return self.program if placed or not (self.batch.rows or self.batch.columns) else self.cutting


@dataclass(frozen=True)
class Batch:
    """How the arguments of a call are cut: tensors that have as many rows as the first one over the axes `rows` (each
    with its size), and over `columns` those that have as many columns as the first with more dims, too."""

    rows: Mapping[str, int]
    columns: Mapping[str, int]

    def cut(self, tree: Any) -> Any:
        """The arguments as annotated. A dim of which some devices would get nothing stays whole."""
        shapes = [x.shape for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.dim()]
        rows = shapes[0][0] if shapes else 0
        columns = next((shape[1] for shape in shapes if len(shape) > 1 and shape[0] == rows), 0)

        def place(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != rows:
                return x
            if x.requires_grad and not is_tracing():  # placing is not differentiated
                return x
            words = ["_?"] * x.dim()
            if self.rows and rows >= math.prod(self.rows.values()):
                words[0] = f"batch@({' '.join(self.rows)})?"
            if self.columns and x.dim() > 1 and x.shape[1] == columns >= math.prod(self.columns.values()):
                words[1] = f"seq@({' '.join(self.columns)})?"
            return shard(x, " ".join(words))

        return pytree.tree_map(place, tree)
