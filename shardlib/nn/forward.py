"""Runs a module's forward as one program that shards the batch."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.compiler.memory_options import MemoryOptions
from shardlib.compiler.plan.plan import Plan
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.context import is_tracing
from shardlib.core.errors import NoProgramError, ShardingError, ValueNeededError, public
from shardlib.core.plain_types import plain_types
from shardlib.core.recorders import may_be_recorded, refuse_recorders
from shardlib.core.source_lines import caller_at
from shardlib.core.torch_internals.torch_private import CALL_HOOKS, SET_MODULE_STATE, is_wrapped, pytree
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.jit.jit import Jitted
from shardlib.jit.shard import shard
from shardlib.nn.argument_copies import counting_writes, run_on_copies
from shardlib.nn.mixed_precision import Policy
from shardlib.nn.verify import ModuleVerifier
from shardlib.sharding.mesh.mesh import Mesh, current_mesh, is_without_mesh
from shardlib.tensor.sharded_tensor import ShardedTensor

_IGNORE = "ignore::shardlib.EagerWarning"


@public
class EagerWarning(UserWarning):
    """Warns that a module's forward is no program: its ops run one by one."""


class Forward:
    """The `forward` of a module on the mesh of its parameters.

    It runs the forward of the module's class, which may change, or `own`, a function that replaced it on the module.
    `batch` is the sharding of arguments if none is placed, `policy` the precision, and `options` holds the options of
    memory and schedule. Before every `verify_every`-th call, ranks compare replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        mesh: Mesh,
        batch: Batch,
        policy: Policy | None,
        options: MemoryOptions,
        verify_every: int | None = None,
    ) -> None:
        self.module, self.own = module, own
        bound = self._function()[1]
        vars(self).update(getattr(bound, "__dict__", {}))
        vars(self).update({k: getattr(bound, k) for k in functools.WRAPPER_ASSIGNMENTS if hasattr(bound, k)})
        vars(self)["__wrapped__"] = own  # part of the key of a call that reads the module
        self.module, self.own = module, own
        self.mesh, self.batch, self.policy, self.options = mesh, batch, policy, options
        self.verify_every = verify_every
        self.verifier = None if verify_every is None else ModuleVerifier(verify_every)
        self._versions: BoundedCache[int, _Version] = BoundedCache(VERSIONS)

    def __reduce__(self) -> Any:  # a copy has programs of its own
        return Forward, (self.module, self.own, self.mesh, self.batch, self.policy, self.options, self.verify_every)

    def copy_for(self, module: nn.Module) -> Forward:
        return Forward(module, self.own, self.mesh, self.batch, self.policy, self.options, self.verify_every)

    def _function(self) -> tuple[Any, Any]:
        """Returns the current forward function of the class, and the function bound to the module."""
        if self.own is not None:
            return self.own, self.own
        kind = type(self.module)
        function = next(vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
        bind = getattr(type(function), "__get__", None)
        return function, function if bind is None else bind(function, self.module, kind)

    @property
    def version(self) -> _Version:
        """The current forward with its programs; a new version if the class got another function."""
        function, bound = self._function()
        version = self._versions.get(id(function))
        if version is None or version.function is not function:
            run = bound if self.policy is None else self.policy.wrap_forward(self.module, bound)
            program = _Program(run, self.batch.specs, None, frozenset(), frozenset(), (), self.options)
            version = self._versions[id(function)] = _Version(function, bound, run, program, set(), {})
        return version

    @property
    def fn(self) -> Callable[..., Any]:
        return self.version.fn

    @property
    def run(self) -> Callable[..., Any]:
        """The module's own forward, in its precision."""
        return self.version.run

    @property
    def program(self) -> _Program:
        return self.version.program

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._on_copies(args, kwargs)
        if self.verifier is not None:
            self.verifier.count_call(self.module, self.mesh)
        if may_be_recorded() or self.version.eager:
            refuse_recorders(self.fn.__qualname__, pytree.tree_leaves((args, kwargs)))
        with self._enter_mesh():
            version = self.version
            if version.eager and self._mode in version.eager:
                return self._on_copies(args, kwargs)
            try:
                return version.program(*args, **kwargs)
            except NoProgramError as error:
                message = error.what.replace("the traced function", self.fn.__name__)
                if self.options.memory is not None and torch.is_grad_enabled():
                    raise ShardingError(
                        f"{message}, and {self.options.text} is said of it",
                        error.offenders,
                        rule="a program keeps to a budget; ops that run one by one take what they take",
                        remedy="write that line so that it is traced, or say no memory",
                    ) from error
                version.eager.add(self._mode)
                version.type_spaces.update(self._read_state(args, kwargs).type_spaces)
                warnings.warn_explicit(
                    f"{message}{', at' if isinstance(error, ValueNeededError) else ':'} {error.offenders[0]}: "
                    "its ops run one by one, on ShardedTensors, outside a program"
                    + (f", in which {self.options.text} says nothing" if self.options.text else "")
                    + f"\nRule: {error.rule}\nRemedy: {error.remedy}; or leave it: the values are right, and only "
                    f"slower to get (-W {_IGNORE} hides this warning)",
                    EagerWarning,
                    *caller_at(sys._getframe(1)),
                )
            return self._on_copies(args, kwargs)

    @property
    def retraces(self) -> list[str]:
        """The reasons why its program was compiled again."""
        reasons: list[str] = self.program.retraces
        return reasons

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of forward and backward for these arguments; nothing runs."""
        with self._enter_mesh():
            plan: Plan = self.program.plan(*args, **kwargs)
            return plan

    def _enter_mesh(self) -> AbstractContextManager[Any]:
        """Enters the module's mesh, unless there is a current mesh or `no_mesh`."""
        now = current_mesh()
        if now is not None and now.axes != self.mesh.axes:
            raise ShardingError(
                f"{self.fn.__qualname__} is called on {now}",
                rule=f"a module runs on the mesh where its parameters live, {self.mesh}",
                remedy="leave that `with` block, or parallelize the module on this mesh",
            )
        return nullcontext() if now is not None or is_without_mesh() else self.mesh

    def _read_state(self, args: Any, kwargs: Any) -> StateWalk:
        """Returns the state that the code of a call reaches besides its arguments."""
        state = StateWalk()
        self.program.read_call(self.mesh, self.program.programs, state, args, kwargs)
        return state

    @property
    def _mode(self) -> Any:
        """Training, hooks and `no_grad`: whether forward can be one program may depend on these."""
        return (
            torch.is_grad_enabled(),
            self.module.training,
            sum(len(getattr(x, kind)) for x in self.module.modules() for kind in CALL_HOOKS),
        )

    def _on_copies(self, args: Any, kwargs: Any) -> Any:
        """Runs the forward inside another trace, or op by op, on sharded copies of the batch.

        Writes to a copy reach the original. Parameters, buffers and, outside a trace, tensors that require a gradient
        are not copied.
        """
        call = register_mappings((args, kwargs))
        leaves = pytree.tree_leaves(call)
        specs = self.batch.specs(leaves) if current_mesh() is not None else ()
        places = {id(x): spec for x, spec in zip(leaves, specs, strict=False) if spec is not None}
        own = {id(x) for x in self.module.buffers()}

        def placed(x: Tensor) -> Tensor | None:
            is_own = id(x) in own or isinstance(x, nn.Parameter) or is_wrapped(x)
            if is_own or id(x) not in places or (x.requires_grad and not is_tracing()):
                return None
            with counting_writes():
                return shard(x, places[id(x)])

        version, name = self.version, getattr(self, "__name__", "forward")
        with nullcontext() if is_tracing() else plain_types(version.type_spaces):
            return run_on_copies(
                name, self.module, version.run, call, placed, lambda: self._read_state(args, kwargs).tensors
            )


@dataclass(frozen=True)
class _Version:
    """A function that is, or was, a module's forward: bound (`fn`), in its precision (`run`), and as a program."""

    function: Any
    fn: Callable[..., Any]
    run: Callable[..., Any]
    program: _Program
    eager: set[Any]  # modes in which its ops run one by one
    type_spaces: dict[int, dict[str, Any]]  # globals of code that may call `type(x)` in these modes


VERSIONS = 8  # functions of a module's forward that keep their programs


class _Program(Jitted):
    goes_back = True  # results have a history


@dataclass(frozen=True)
class Batch:
    """Shards the arguments of a call: over the axes `rows` tensors with as many rows as the first one.

    Of these, tensors with as many columns as the first one with columns are also sharded over the axes `columns`.
    """

    rows: Mapping[str, int]
    columns: Mapping[str, int]

    def specs(self, leaves: Sequence[Any]) -> list[str | None]:
        """Returns a spec, or None, for each argument; None for all if one of them is placed already.

        A dim with fewer rows than devices stays whole.
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


_set_state = SET_MODULE_STATE.value


@functools.wraps(_set_state)
def _set_copy_state(self: nn.Module, state: dict[str, Any]) -> None:
    """Sets the state of a copied module, whose forward then runs on the copy."""
    _set_state(self, state)
    forward = vars(self).get("forward")
    if isinstance(forward, Forward) and forward.module is not self:
        vars(self)["forward"] = forward.copy_for(self)


SET_MODULE_STATE.value = _set_copy_state
