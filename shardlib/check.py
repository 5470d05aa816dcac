"""`check`: run a function on one device and sharded, and compare everything that comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.calls.flat import Static, flatten_call, names_of
from shardlib.calls.mappings import opened
from shardlib.calls.rebound import Watch
from shardlib.calls.snapshot import Snapshot
from shardlib.comparing import Compared, compare
from shardlib.errors import ShardingError
from shardlib.internals import pytree
from shardlib.jit import Jitted, jit
from shardlib.jitted.planning import Invocation
from shardlib.jitted.run import caller
from shardlib.locate import first_difference
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.plain import plain_program
from shardlib.plans.plan import Plan
from shardlib.program.steps import Program, makes
from shardlib.rules.table import own_rules
from shardlib.run import virtual
from shardlib.state import single_device
from shardlib.tensors.tensor import ShardedTensor

_BUG = "it is a bug of shardlib: report the program"
_STEPS = 3  # of a function that changes what it finds
_SMALL = 16  # devices: on larger virtual meshes the run without sharing takes too long


@dataclass(frozen=True)
class CheckReport:
    """What was compared: every output, gradient, and every output of the run in which devices share nothing."""

    name: str
    mesh: Mesh
    leaves: tuple[Compared, ...]
    steps: int = 1
    cut: bool = True  # whether any value of the program is

    @property
    def max_error(self) -> float:
        """The largest relative error of all leaves."""
        return max((leaf.error for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        head = f"{self.name} on {self.mesh}: the same as on one device, {len(self.leaves)} tensors compared"
        if self.steps > 1:
            head += f" after {self.steps} steps"
        if not self.cut:
            head += "; but all devices do all of it: nothing says where a tensor lives (in_specs=, shard, parallelize)"
        return "\n".join([head, *(f"  {leaf}" for leaf in self.leaves)])


def check(
    fn: Callable[..., Any],
    /,
    *args: Any,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Run `fn` on one device, as the plain torch program that it is, and sharded on `mesh`, and compare every result.

    What it leaves in arguments, parameters, buffers, `.grad` and an optimizer's moments is a result, too, and such a
    step runs three times; after each run all is again as it was before. A function that returns one real number, a
    loss, and writes nothing has its gradients compared, too, for all floating-point arguments, and for parameters of
    modules (unless something that it is given or finds has been made by others, whose graph would be gone). On small
    virtual meshes the program also runs with nothing shared between devices. `fn` may be jitted: its specs hold. Errors
    are relative, in the maximum norm of each tensor; `rtol` defaults to 1e-12 (f64), 1e-5 (f32) or 1e-2 (bf16, f16),
    ten times that after three steps, and `atol`, for tensors that are zero, to a hundredth of that. All runs start from
    the same random state. Where something differs by more, and nobody has said a tolerance, one device runs again with
    its numbers rounded otherwise: what that changes is rounding, too (a bias that cancels out, whose gradient Adam
    scales).

    Raises `ShardingError` that lists every tensor that differs and, on small virtual meshes, the first value inside
    that does, with its line.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2, tensor=2):
        ...     x, w = torch.ones(4, 3), torch.ones(3, 2)
        ...     print(sl.check(lambda x, w: (x @ w).square().sum(), x, w, in_specs=("b@data _",)))
        <lambda> on Mesh(data=2, tensor=2): the same as on one device, 4 tensors compared
          result f32[]: error ... (tolerance 1e-05)
          result (nothing shared) f32[]: error ... (tolerance 1e-05)
          gradient of x f32[4@data, 3]: error ... (tolerance 1e-05)
          gradient of w f32[3, 2]: error ... (tolerance 1e-05)
    """
    mesh = mesh or current_mesh()
    if mesh is None:
        raise ShardingError(
            "check is called outside any mesh",
            rule="it compares one device with the current mesh",
            remedy="call it inside `with Mesh(data=2, tensor=4):`, or give mesh=",
        )
    step = _copied(fn, in_specs, out_specs)
    opened((args, kwargs))
    with mesh:
        world = _World(step, mesh, args, kwargs)
        plan = step.plan(*args, **kwargs)
        after, is_small = plan.compiled.traced.after, mesh.kind == "virtual" and mesh.size <= _SMALL
        times = _STEPS if after.writes or after.rebound else 1
        world.eps = max((torch.finfo(d).eps for d in _dtypes(plan) if d.is_floating_point), default=0.0)
        close = _Close(rtol, atol, 10 if times > 1 else 1)
        runs: dict[str, Callable[..., Any]] = {"": step}
        if is_small:
            runs[" (nothing shared)"] = lambda *args, **kwargs: unshared(step, mesh, args, kwargs)
        leaves: list[Compared] = []
        alone = functools.partial(_alone, step.fn, times)
        one = world.run(alone, *_copies(args, kwargs))
        for suffix, run in runs.items():
            seen = world.compared(close, "result", None, alone, one, functools.partial(_seeded, run, times))
            leaves += [replace(leaf, path=leaf.path + suffix) for leaf in seen]
        names = [name for name, value in plan.compiled.inputs if value.dtype.is_floating_point]
        if _is_loss(one[0]) and not after.writes:
            for pull in (_gradients(step), *([_backward(step)] if world.ends else [])):
                alone, back = functools.partial(_alone, pull, 1), _with_options_of(step, pull)
                one = world.run(alone, *_copies(args, kwargs))
                leaves += world.compared(close, "gradient of ", names, alone, one, functools.partial(_seeded, back, 1))
        faults = [str(leaf) for leaf in leaves if leaf.fault]
        if faults and is_small and plan.compiled.halves is None:
            first = world.run(functools.partial(_first, step, mesh, rtol, atol), args, kwargs)[0]
            faults[:0] = [f"the first value that differs: {first}"] if first else []
    if faults:
        count = f"{sum(bool(leaf.fault) for leaf in leaves)} of {len(leaves)}"
        raise ShardingError(
            f"check({plan.name}): {count} tensors differ between one device and {mesh}",
            faults,
            rule="the sharded program computes what the program for one device computes",
            remedy="if the differences are rounding, give rtol=; if not, "
            + (
                f"look at the rule of {' and '.join(own)}"
                if (own := own_rules(n.target for n in plan.compiled.traced.graph.graph.nodes))
                else _BUG
            ),
        )
    made = (var for step in plan.compiled.program.steps for var in makes(step))
    cut = any(var.layout is not None and not var.layout.is_replicated for var in (*plan.compiled.program.inputs, *made))
    return CheckReport(plan.name, mesh, tuple(leaves), times, cut)


# --- the runs ---------------------------------------------------------------------------------------------------------


def _dtypes(plan: Plan) -> set[torch.dtype]:
    return {value.dtype for value in plan.compiled.graph.values()}


def _copied(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Jitted:
    """A jitted function of its own, which donates nothing: arguments are used several times."""
    if not isinstance(fn, Jitted):
        return jit(fn, in_specs=in_specs, out_specs=out_specs)  # type: ignore[no-any-return]
    in_specs, out_specs = in_specs or fn.in_specs, out_specs or fn.out_specs
    return Jitted(fn.fn, in_specs, out_specs, fn.static, frozenset(), (), fn.keeping)


def _with_options_of(step: Jitted, fn: Callable[..., Any]) -> Jitted:
    keeping = replace(step.keeping, memory=None)  # it is another program, with another peak
    return Jitted(fn, step.in_specs, None, step.static, frozenset(), (), keeping)


_Run = Callable[..., Any]
_Ran = tuple[Any, dict[str, Tensor | None]]  # what a run returns, and what it leaves in each tensor


@dataclass(frozen=True)
class _Close:
    """How results are compared; a tolerance that nobody said is so many times `looser`."""

    rtol: float | None
    atol: float | None
    looser: float

    def __call__(self, root: str, one: Any, other: Any, names: Sequence[str] | None) -> list[Compared]:
        return compare(root, one, other, names=names, rtol=self.rtol, atol=self.atol, looser=self.looser)


class _World:
    """What a call may change beside what it returns; each run finds it as it was."""

    def __init__(self, step: Jitted, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step, self.given = step, (args, kwargs)
        self.eps = 0.0  # of the coarsest numbers that the function computes with
        self.watch = Watch(Invocation.of(step, step.programs, None, args, kwargs).look)
        self.tensors = dict(self._tensors(args, kwargs, self.watch.before))
        self.before = {name: _whole(x) for name, x in self.tensors.items()}

    def run(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ran:
        """What a run returns, and what it leaves in each tensor that it is given or finds."""
        try:
            out = pytree.tree_map_only(Tensor, torch.clone, run(*args, **kwargs))
            return out, {name: _whole(x) for name, x in self._tensors(args, kwargs, self.watch.look())}
        finally:
            self.watch.restore()
            with torch.no_grad():
                for name, x in self.tensors.items():
                    if x is not None and not _equal(_whole(x), self.before[name]):
                        x.detach().copy_(self.before[name])
                for name, x in self.tensors.items():
                    if name.endswith(_GRAD):
                        self.tensors[name.removesuffix(_GRAD)].grad = x

    def rounded(self, run: _Run) -> _Ran:
        """The same of a run on one device in which some of the numbers that it is given are rounded up."""
        draws = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in self.tensors.items():
                was = self.before[name]
                if was is not None and was.is_floating_point() and not x.is_inference() and not name.endswith(_GRAD):
                    up = torch.rand(was.shape, generator=draws).to(was.device) < 0.5
                    eps = max(self.eps, torch.finfo(was.dtype).eps)
                    x.detach().copy_(torch.where(up, was * (1 + eps), was))
        return self.run(run, *_copies(*self.given))

    @property
    def ends(self) -> bool:
        """Whether a way back ends at these tensors, and does not go on to what others have made."""
        return all(x is None or x.grad_fn is None for x in self.tensors.values())

    def compared(
        self, close: _Close, root: str, names: Sequence[str] | None, alone: _Run, one: _Ran, run: _Run
    ) -> list[Compared]:
        """A run beside what one device made of it, `one`; where they differ, that runs once more, rounded."""
        (expected, written), (found, others) = one, self.run(run, *self.given)
        changed = [
            n for n in written | others if not all(_equal(x.get(n), self.before.get(n)) for x in (written, others))
        ]

        def beside(out: Any, left: Mapping[str, Tensor | None]) -> list[Compared]:
            ours, theirs = ([x.get(n) for n in changed] for x in (left, written))
            return close(root, expected, out, names) + close("", theirs, ours, changed)

        seen = beside(found, others)
        if close.rtol is close.atol is None and any(leaf.fault for leaf in seen):
            seen = [a.beside(b.error) for a, b in zip(seen, beside(*self.rounded(alone)), strict=True)]
        return seen

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Snapshot) -> Iterator[tuple[str, Any]]:
        call = flatten_call(self.step.fn, args, kwargs, self.step.static, found)
        for name, x in zip(names_of(self.step.fn, call, range(len(call.leaves))), call.leaves, strict=True):
            if isinstance(x, Tensor) and not name.endswith(_GRAD):
                yield name, x
                yield name + _GRAD, _grad(x)


_GRAD = ".grad"


def _grad(x: Tensor) -> Tensor | None:
    """The gradient of a tensor that has one; torch warns of the question where it has none."""
    return x.grad if x.is_leaf or x.retains_grad else None


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two values are one to the bit, but for NaN."""
    return a is b if a is None or b is None else a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


def _whole(x: Tensor | None) -> Tensor | None:
    """A copy of all of a tensor."""
    if x is None:
        return None
    return (x.full_tensor() if isinstance(x, ShardedTensor) else x).detach().clone()


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whole copies of a call's arguments: the function may write to them."""
    made: dict[int, Tensor] = {}  # one tensor in two places stays one

    def copied(x: Tensor) -> Tensor:
        if type(x) is torch.nn.Parameter:  # a module that the function finds may have it, too; it is put back
            return x
        if id(x) not in made:
            made[id(x)] = torch.clone(x if type(x) is not ShardedTensor else x.full_tensor()).detach()
            made[id(x)].requires_grad_(x.requires_grad)
            made[id(x)].grad = _whole(_grad(x))
        return made[id(x)]

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, copied, (args, kwargs))
    return found


def _seeded(run: Callable[..., Any], times: int, /, *args: Any, **kwargs: Any) -> Any:
    """What the last of so many calls returns."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [run(*args, **kwargs) for _ in range(times)][-1]


def _alone(fn: Callable[..., Any], times: int, /, *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        with plain_program():
            return fn(*args, **kwargs)

    with single_device():
        return _seeded(run, times)


def unshared(step: Jitted, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call in which virtual devices share no value: each computes its own."""
    return _loaded(step, mesh, args, kwargs, lambda program, mesh, _: virtual.load(program, mesh, share=False))


def _loaded(step: Jitted, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], load: Callable[..., Any]) -> Any:
    """A call whose program is loaded in another way."""
    call = Invocation.of(step, step.programs, None, tuple(args), dict(kwargs))
    plan = call.plan()[0]
    return caller(step._load(mesh, plan, (), load).entry)(call.served(plan))


def _first(step: Jitted, mesh: Mesh, rtol: float | None, atol: float | None, /, *args: Any, **kwargs: Any) -> str:
    """The first value that differs in a call."""
    told: list[str] = []

    def load(program: Program, mesh: Mesh, plan: Plan) -> Callable[..., Any]:
        def run(pieces: Sequence[Sequence[Tensor]], leaves: Sequence[Any] = ()) -> Any:
            once = lambda run, *given: _seeded(run, 1, *given)
            told.append(first_difference(plan.compiled, pieces, leaves, once, rtol, atol))
            return virtual.load(program, mesh, share=False)(pieces, leaves)

        return run

    _loaded(step, mesh, args, kwargs, load)
    return told[0]


def _is_loss(out: Any) -> bool:
    return isinstance(out, Tensor) and out.dim() == 0 and out.is_floating_point()


def _gradients(step: Jitted) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of all floating-point leaves of a call, in order."""

    @functools.wraps(step.fn)
    def gradients(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = flatten_call(step.fn, args, kwargs, step.static)
        where = [i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and x.is_floating_point()]

        def loss(*some: Tensor) -> Any:
            leaves = [x.value if isinstance(x, Static) else x for x in call.leaves]
            for i, x in zip(where, some, strict=True):
                leaves[i] = x
            a, k = pytree.tree_unflatten(leaves, call.tree)
            return step.fn(*a, **k)

        some = [call.leaves[i] for i in where]
        return tuple(torch.func.grad(loss, argnums=tuple(range(len(some))))(*some)) if some else ()

    return gradients


def _backward(step: Jitted) -> Callable[..., tuple[()]]:
    """The call's loss goes back: what that leaves in a module's parameters is compared as all that a call leaves."""

    @functools.wraps(step.fn)
    def backward(*args: Any, **kwargs: Any) -> tuple[()]:
        loss = step.fn(*args, **kwargs)
        if loss.requires_grad:
            loss.backward()
        return ()

    return backward
