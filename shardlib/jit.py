"""`jit`: a function written for one device, run on the current mesh."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardlib.call import Entry, run, signature
from shardlib.call import entry as make_entry
from shardlib.call import run as _run
from shardlib.compile import compile_program
from shardlib.errors import ShardingError
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.plans.budget import CommBudget, current_budgets
from shardlib.plans.plan import Plan
from shardlib.propagate.flood import Fixed
from shardlib.random.draw import in_call
from shardlib.random.plain import plain_program
from shardlib.run import load
from shardlib.specs.layout import Layout, Pieces
from shardlib.specs.spec import Resolved, Spec
from shardlib.state import is_single_device, is_tracing
from shardlib.tensors.tensor import ShardedTensor, short_dtype
from shardlib.tracing.trace import FlatCall, Static, flatten_call, is_tensor
from shardlib.tracing.trace import _input_names as input_names

__all__ = ["Jitted", "_run", "jit", "relayout"]


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    comm_budget: CommBudget | None = None,
) -> Any:
    """Compile `fn` for the current mesh, at the first call for each set of shapes, dtypes, layouts and static
    arguments.

    `in_specs` (a tuple with an entry per positional argument, or a dict by parameter name) and `out_specs` are prefix
    pytrees of specs: a single spec is every argument's; None leaves a layout to inference. Arguments may be plain
    tensors (every process has them whole) or `ShardedTensor`s; tensor results are `ShardedTensor`s without autograd
    history: take gradients inside, with `sl.grad` or `sl.value_and_grad`. A `ShardedTensor` in `donate_argnums` gives
    its memory up, for results to be written over it, and reading it afterwards is an error; memory that anything else
    refers to (a plain tensor, a view, a piece from `to_local`) is copied instead, and never written to. Works as a
    decorator, also of methods.

    Raises `ShardingError` outside any mesh, where specs do not fit, and where a communication budget is exceeded.

    Example:
        >>> from shardlib import Mesh, jit
        >>> with Mesh(data=2):
        ...     double = jit(lambda x: (2 * x).sum(), in_specs=("batch@data _",))
        ...     float(double(torch.ones(4, 3)))
        24.0
    """
    if fn is None:
        return functools.partial(
            jit,
            in_specs=in_specs,
            out_specs=out_specs,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            comm_budget=comm_budget,
        )
    static = (*_tuple(static_argnums), *_tuple(static_argnames))
    return Jitted(fn, in_specs, out_specs, frozenset(static), frozenset(_tuple(donate_argnums)), comm_budget)


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)


class Jitted:
    """What `jit` returns: call it, or ask for its `plan`. `retraces` tells why it was compiled more than once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        budget: CommBudget | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.fn, self.in_specs, self.out_specs, self.budget = fn, in_specs, out_specs, budget
        self.static, self.donate = _by_position_and_name(fn, static), _by_position_and_name(fn, donate)
        self._entries: dict[Any, Entry] = {}
        self._plans: dict[Any, Plan] = {}
        self._warm: dict[Any, Entry] = {}  # by mesh and signature
        self._lock = threading.RLock()
        self.retraces: list[str] = []

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (real, meta or fake tensors); nothing runs and no device is touched."""
        mesh = self._mesh(args, kwargs)
        plan = self._planned(mesh, args, kwargs)
        self._check_budgets(plan)
        return plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_single_device() and not (is_tracing() or in_call()):
            with plain_program():
                return self.fn(*args, **kwargs)
        if is_single_device() or is_tracing() or _transformed(args, kwargs):
            return self.fn(*args, **kwargs)
        mesh = current_mesh() or self._mesh(args, kwargs)
        read = signature(args, kwargs)
        if read is not None:
            entry = self._warm.get((id(mesh), read[1]))
            if entry is not None:
                if current_budgets():
                    self._check_budgets(entry.plan)
                return run(entry, mesh, read[0])
        call = flatten_call(args, kwargs, self.static)
        leaves = list(call.leaves)
        with self._lock:
            key = self._key(mesh, call)
            entry = self._entries.get(key)
            if entry is None:
                plan = self._planned(mesh, args, kwargs)
                self._check_budgets(plan)
                _refuse_other_devices(plan, mesh, leaves)
                entry = self._entries[key] = self._load(mesh, plan)
            else:
                self._check_budgets(entry.plan)
            # The two readings of a call list the same leaves, but for what only the slow one looks into.
            if read is not None and entry.mesh is mesh and _same(read[0], leaves):
                self._warm[id(mesh), read[1]] = entry
        return run(entry, mesh, leaves)

    def _check_budgets(self, plan: Plan) -> None:
        for budget in (*current_budgets(), *([self.budget] if self.budget else ())):
            budget.check(plan)

    def _mesh(self, args: Any, kwargs: Any) -> Mesh:
        mesh = current_mesh()
        if mesh is None:
            found = {leaf.mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)}
            if len(found) != 1:
                raise ShardingError(
                    f"{self.name} is called outside any mesh",
                    rule="a jitted function runs on the current mesh",
                    remedy="call it inside `with Mesh(data=2, tensor=4):`",
                )
            (mesh,) = found
        return mesh

    def _key(self, mesh: Mesh, call: FlatCall) -> Any:
        return mesh, call.tree, tuple(map(_leaf_key, call.leaves))

    def _planned(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        call = flatten_call(args, kwargs, self.static)
        with self._lock:
            key = self._key(mesh, call)
            known = self._plans.get(key)
            if known is None:
                known = self._compile(mesh, args, kwargs)
                if self._plans:
                    self.retraces.append(_difference(list(self._plans)[-1], key, call, self.fn))
                self._plans[key] = known
        return known

    def _compile(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        def placed(leaf: Any) -> Fixed | None:
            if not isinstance(leaf, ShardedTensor):
                return None
            if leaf.mesh != mesh:
                raise ShardingError(
                    f"an argument of {self.name} lives on {leaf.mesh}, the current mesh is {mesh}",
                    [repr(leaf)],
                    rule="all tensors of a program live on one mesh",
                    remedy="place it again: shard(x.full_tensor(), spec) inside `with` the current mesh",
                )
            return Fixed(leaf.sharding, leaf._form.names, (False,) * leaf.dim(), "")

        compiled = compile_program(
            self.fn,
            args,
            kwargs,
            mesh,
            in_specs=self.in_specs,
            out_specs=self.out_specs,
            static=self.static,
            placed=placed,
        )
        paths = compiled.traced.input_paths
        compiled.program.donated = frozenset(i for i, path in enumerate(paths) if _argument(path) in self.donate)
        return Plan(compiled)

    def _load(self, mesh: Mesh, plan: Plan) -> Entry:
        if mesh.kind == "abstract":
            raise ShardingError(
                f"{self.name} cannot run on {mesh}",
                rule="an abstract mesh has no devices",
                remedy="plan on it (step.plan(...)), or use Mesh(...)",
            )
        return make_entry(plan, mesh, load(plan.compiled.program, mesh, plan))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<jit of {self.name}>"


def _by_position_and_name(fn: Callable[..., Any], chosen: frozenset[int | str]) -> frozenset[int | str]:
    """Arguments that are chosen by position, also by their names, and the other way round; they may be passed either
    way."""
    if not chosen:
        return chosen
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # a builtin
        return chosen
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [p.name for p in parameters if p.kind in kinds]
    chosen |= {i + len(plain) for i in chosen if isinstance(i, int) and i < 0}
    chosen |= {plain[i] for i in chosen if isinstance(i, int) and 0 <= i < len(plain)}
    return chosen | {i for i, name in enumerate(plain) if name in chosen}


def _argument(path: Any) -> int | str:
    """The position or name of the argument that a leaf is in."""
    group, first = path[0], path[1]
    return str(first.key) if group.idx == 1 else int(first.idx)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _refuse_other_devices(plan: Plan, mesh: Mesh, leaves: list[Any]) -> None:
    """Every tensor must be where the mesh's devices are."""
    traced = plan.compiled.traced
    there = torch.device(mesh.device).type
    wrong = [
        f"{name} of shape {list(leaves[i].shape)} is on {leaves[i].device}"
        for i, name in zip(traced.input_leaves, traced.input_names, strict=True)
        if leaves[i].device.type != there
    ]
    if wrong:
        meta = all(leaves[i].device.type in (there, "meta") for i in traced.input_leaves)
        raise ShardingError(
            f"{plan.name} runs on {mesh}, whose devices are {there}",
            wrong,
            rule="arguments live on the devices of the mesh",
            remedy="meta tensors have no values: plan with them (step.plan(...))"
            if meta
            else f"x.to({there!r}) first, or Mesh(..., device=...)",
        )


def _leaf_key(leaf: Any) -> Any:
    if type(leaf) is ShardedTensor:
        return tuple(leaf.shape), leaf.dtype, leaf.sharding, leaf.requires_grad, leaf._form.names
    if is_tensor(leaf):
        return tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad, type(leaf)
    if isinstance(leaf, Static):
        leaf = leaf.value
        try:
            hash(leaf)
        except TypeError:
            return type(leaf), _Keep(leaf)
        return type(leaf), leaf
    return (type(leaf), leaf) if isinstance(leaf, int | float | bool | str | None) else (type(leaf), _Keep(leaf))


class _Keep:
    """Compares an object by identity, and keeps it alive as long as its key, so that no other one gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep) and (self.value is other.value)

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__} (compared by identity)"


def _difference(old: Any, new: Any, call: FlatCall, fn: Callable[..., Any]) -> str:
    """What changed between two calls, in words."""
    if old[0] != new[0]:
        return f"the mesh was {old[0]}, is {new[0]}"
    if old[1] != new[1]:
        return "the arguments have another structure"
    names = list(input_names(fn, call.paths))
    changes = [f"{name}: {_show(a)} -> {_show(b)}" for name, a, b in zip(names, old[2], new[2], strict=True) if a != b]
    return "; ".join(changes)


def _show(key: Any) -> str:
    if len(key) == 2:
        return repr(key[1])
    where = f" [{key[2]}]" if isinstance(key[2], Layout) else ""
    return f"{short_dtype(key[1])}{list(key[0])}{where}{' requires_grad' if key[3] else ''}"


def _transformed(args: Any, kwargs: Any) -> bool:
    """Whether a torch.func transform is running on these arguments: then the function is part of that program."""
    if torch._C._functorch.maybe_current_level() is None:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in pytree.tree_leaves((args, kwargs)))


_relayouts: dict[Any, Jitted] = {}


def relayout(x: ShardedTensor, resolved: Resolved) -> ShardedTensor:
    """`x` laid out as `resolved` says, through a program of nothing but the reshard; without history."""
    if x.sharding.canonical == resolved.layout.canonical:
        return ShardedTensor(x._locals, resolved.layout, x.mesh, resolved.names)
    key = resolved.spec
    if any(isinstance(f.size, Pieces) for f in x.sharding.factors):
        key = Spec.exactly(resolved.layout, resolved.names, pieces=True)  # not the pieces that it has now
    step = _relayouts.get(key)
    if step is None:
        step = _relayouts[key] = Jitted(_identity, None, key, frozenset(), frozenset(), None)
    with x.mesh:
        out: ShardedTensor = step(x.detach())
    return out


def _identity(x: Any) -> Any:
    return x
