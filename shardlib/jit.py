"""`jit`: a function written for one device, run on the current mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardlib.budget import CommBudget, current_budgets
from shardlib.compile import compile_program
from shardlib.errors import ShardingError
from shardlib.layout import Layout
from shardlib.lower.program import Var
from shardlib.mesh import Mesh, current_mesh
from shardlib.plan import Plan
from shardlib.propagate.flood import Fixed
from shardlib.run import Runner, load
from shardlib.spec import Resolved
from shardlib.state import is_single_device, is_tracing
from shardlib.tensor import Names, ShardedTensor, cut_up
from shardlib.trace import is_tensor


@dataclass(frozen=True)
class _Entry:
    plan: Plan
    runner: Runner
    inputs: tuple[tuple[int, Layout, bool], ...]  # per input: which leaf of the call, its layout, whether it is donated
    outputs: tuple[tuple[Layout, Names] | None, ...]
    out_tree: pytree.TreeSpec
    donates: bool


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

    `in_specs` (a tuple, one entry per positional argument) and `out_specs` are prefix pytrees of specs; None leaves a
    layout to inference. Arguments may be plain tensors (every process has them whole) or `ShardedTensor`s; tensor
    results are `ShardedTensor`s without autograd history: take gradients inside, with `sl.grad` or `sl.value_and_grad`.
    Memory of arguments in `donate_argnums` may be reused for results: do not read them again. Works as a decorator.

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
    return Jitted(
        fn,
        in_specs,
        out_specs,
        frozenset((*_tuple(static_argnums), *_tuple(static_argnames))),
        frozenset(_tuple(donate_argnums)),
        comm_budget,
    )


def _tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, int | str) else tuple(x)


class Jitted:
    """What `jit` returns: call it, or ask for its `plan`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int],
        budget: CommBudget | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.in_specs, self.out_specs = fn, in_specs, out_specs
        self.static, self.donate, self.budget = static, donate, budget
        self._entries: dict[Any, _Entry] = {}
        self._plans: dict[Any, Plan] = {}
        self.retraces: list[str] = []  # why each compilation after the first was needed

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (real, meta or fake tensors); nothing runs and no device is touched."""
        mesh = self._mesh(args, kwargs)
        leaves, _, key = self._key(mesh, args, kwargs)
        del leaves
        if (known := self._plans.get(key)) is None:
            self._note_retrace(key)
            known = self._plans[key] = self._compile(mesh, args, kwargs)
        for budget in (*current_budgets(), *([self.budget] if self.budget else ())):
            budget.check(known)
        return known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_single_device() or is_tracing() or _transformed(args, kwargs):
            return self.fn(*args, **kwargs)
        mesh = self._mesh(args, kwargs)
        leaves, _, key = self._key(mesh, args, kwargs)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._load(mesh, self.plan(*args, **kwargs))
        return _run(entry, mesh, leaves)

    def _mesh(self, args: Any, kwargs: Any) -> Mesh:
        mesh = current_mesh()
        if mesh is None:
            found = {leaf.mesh for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ShardedTensor)}
            if len(found) != 1:
                raise ShardingError(
                    f"{self.__name__} is called outside any mesh",  # type: ignore[attr-defined]
                    rule="a jitted function runs on the current mesh",
                    remedy="call it inside `with Mesh(data=2, tensor=4):`",
                )
            (mesh,) = found
        return mesh

    def _key(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any, Any]:
        if self.static:
            args_ = tuple(_Static(a) if i in self.static else a for i, a in enumerate(args))
            kwargs_ = {k: _Static(v) if k in self.static else v for k, v in kwargs.items()}
            leaves, tree = pytree.tree_flatten((args_, kwargs_))
        else:
            leaves, tree = pytree.tree_flatten((args, kwargs))
        return leaves, tree, (mesh, tree, tuple(map(_leaf_key, leaves)))

    def _note_retrace(self, key: Any) -> None:
        if self._plans:
            self.retraces.append(_difference(list(self._plans)[-1], key))

    def _compile(self, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        def placed(leaf: Any) -> Fixed | None:
            if not isinstance(leaf, ShardedTensor):
                return None
            if leaf.mesh != mesh:
                raise ShardingError(
                    f"an argument of {self.__name__} lives on {leaf.mesh}, the current mesh is {mesh}",  # type: ignore[attr-defined]
                    [repr(leaf)],
                    rule="all tensors of a program live on one mesh",
                )
            return Fixed(leaf.sharding, leaf._names, (False,) * leaf.dim(), "")

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
        return Plan(compiled)

    def _load(self, mesh: Mesh, plan: Plan) -> _Entry:
        if mesh.kind == "abstract":
            raise ShardingError(
                f"{self.__name__} cannot run on {mesh}",  # type: ignore[attr-defined]
                rule="an abstract mesh has no devices",
                remedy="plan on it (step.plan(...)), or use Mesh(...)",
            )
        compiled = plan.compiled
        program = compiled.program
        paths = compiled.traced.input_paths
        program.donated = frozenset(
            i for i, path in enumerate(paths) if path[0].idx == 0 and path[1].idx in self.donate
        )
        inputs = tuple(
            (leaf, _layout(var), i in program.donated)
            for i, (leaf, var) in enumerate(zip(compiled.traced.input_leaves, program.inputs, strict=True))
        )
        outputs = tuple(
            (_layout(out), names) if isinstance(out, Var) else None
            for out, names in zip(compiled.program.outputs, plan.output_names, strict=True)
        )
        runner = load(compiled.program, mesh, plan)
        return _Entry(plan, runner, inputs, outputs, compiled.traced.out_tree, bool(program.donated))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self.__call__, instance)


def _run(entry: _Entry, mesh: Mesh, leaves: list[Any]) -> Any:
    pieces = []
    for i, layout, donated in entry.inputs:
        leaf = leaves[i]
        if type(leaf) is ShardedTensor:
            pieces.append(leaf._locals)
        else:
            # What is donated is a placed copy: a plain tensor of the caller is never written to.
            pieces.append(cut_up(leaf.detach().clone() if donated else leaf.detach(), layout, mesh))
    if entry.donates:
        _refuse_shared(entry, leaves)
    results = entry.runner(pieces)
    out = [
        r if form is None else ShardedTensor(r, form[0], mesh, form[1])
        for r, form in zip(results, entry.outputs, strict=True)
    ]
    return pytree.tree_unflatten(out, entry.out_tree)


def _refuse_shared(entry: _Entry, leaves: list[Any]) -> None:
    """A donated tensor that is also another argument would be read after it was overwritten."""
    owner: dict[int, int] = {}
    donated = {i for i, _, gone in entry.inputs if gone}
    for i, _, _ in entry.inputs:
        first = owner.setdefault(id(leaves[i]), i)
        if first != i and (first in donated or i in donated):
            names = entry.plan.compiled.traced.input_names
            at = [leaf for leaf, _, _ in entry.inputs]
            raise ShardingError(
                f"{entry.plan.name}: one tensor is given twice, and donated",
                [f"{names[at.index(first)]} and {names[at.index(i)]}, of shape {list(leaves[i].shape)}"],
                rule="a donated argument may be overwritten while the function runs",
                remedy="donate neither, or pass a copy",
            )


class _Static:
    """A static argument: compared by value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _leaf_key(leaf: Any) -> Any:
    if type(leaf) is ShardedTensor:
        return (leaf.shape, leaf.dtype, leaf._layout, leaf.requires_grad)
    if is_tensor(leaf):
        return (tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad)
    if isinstance(leaf, _Static):
        leaf = leaf.value
    return (
        (type(leaf), leaf) if isinstance(leaf, int | float | bool | str | None) else (type(leaf), id(leaf), _Keep(leaf))
    )


class _Keep:
    """Keeps an object that is compared by identity alive as long as its key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep) and (self.value is other.value)

    def __hash__(self) -> int:
        return id(self.value)


def _difference(old: Any, new: Any) -> str:
    """What changed between two calls, in words."""
    if old[0] != new[0]:
        return f"the mesh was {old[0]}, is {new[0]}"
    if old[1] != new[1]:
        return "the arguments have another structure"
    changes = [
        f"leaf {i}: {_show(a)} -> {_show(b)}" for i, (a, b) in enumerate(zip(old[2], new[2], strict=True)) if a != b
    ]
    return "; ".join(changes)


def _show(key: Any) -> str:
    if len(key) == 4:
        return f"{str(key[1]).removeprefix('torch.')}{list(key[0])} {key[2]}{' requires_grad' if key[3] else ''}"
    return repr(key[1])


def _transformed(args: Any, kwargs: Any) -> bool:
    """Whether a torch.func transform is running on these arguments: then the function is part of that program."""
    if torch._C._functorch.maybe_current_level() is None:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(x, torch.Tensor) and wrapped(x) for x in pytree.tree_leaves((args, kwargs)))


def _layout(var: Var) -> Layout:
    assert var.layout is not None, f"{var} is no value of the program"
    return var.layout


_relayouts: dict[Any, Jitted] = {}


def relayout(x: ShardedTensor, resolved: Resolved) -> ShardedTensor:
    """`x` laid out as `resolved` says, through a program of nothing but the reshard."""
    if x.sharding.canonical == resolved.layout.canonical:
        return ShardedTensor(x._locals, resolved.layout, x.mesh, resolved.names, x.requires_grad)
    key = resolved.spec
    step = _relayouts.get(key)
    if step is None:
        step = _relayouts[key] = Jitted(_identity, None, resolved.spec, frozenset(), frozenset(), None)
    with x.mesh:
        out: ShardedTensor = step(x)
    return out


def _identity(x: Any) -> Any:
    return x
