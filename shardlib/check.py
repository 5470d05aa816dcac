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
from shardlib.errors import ShardingError
from shardlib.internals import pytree
from shardlib.jit import Jitted, jit
from shardlib.jitted.planning import Invocation
from shardlib.jitted.run import caller
from shardlib.meshes.mesh import Mesh, current_mesh
from shardlib.plain import plain_program
from shardlib.rules.table import own_rules
from shardlib.run import virtual
from shardlib.state import single_device
from shardlib.tensors.tensor import ShardedTensor, typeof

_RTOL = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}
_HALF = 1e-2  # bf16, fp16 and smaller
_BUG = "it is a bug of shardlib: report the program"
_SMALL = 16  # devices: on larger virtual meshes the run without sharing takes too long


@dataclass(frozen=True)
class Compared:
    """One leaf: its relative error against one device (maximum norm), and what is wrong with it, if anything."""

    path: str
    type: str
    error: float
    rtol: float
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.path} {self.type}: {self.fault or f'error {self.error:.1e} (tolerance {self.rtol:.0e})'}"


@dataclass(frozen=True)
class CheckReport:
    """What was compared: every output, gradient, and every output of the run in which devices share nothing."""

    name: str
    mesh: Mesh
    leaves: tuple[Compared, ...]

    @property
    def max_error(self) -> float:
        """The largest relative error of all leaves."""
        return max((leaf.error for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        head = f"{self.name} on {self.mesh}: the same as on one device, {len(self.leaves)} tensors compared"
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

    What it writes to arguments, buffers and `.grad` is a result, too; after each run all is again as it was before.
    A function that returns one real number, a loss, and writes nothing has its gradients compared, too, for all
    floating-point arguments. On small virtual meshes the program also runs with nothing shared between devices. `fn`
    may be jitted: its specs hold. Errors are relative, in the maximum norm of each tensor; `rtol` defaults to 1e-12
    (f64), 1e-5 (f32) or 1e-2 (bf16, f16), and `atol`, for tensors that are zero, to a hundredth of that. All runs start
    from the same random state.

    Raises `ShardingError` that lists every tensor that differs.

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
    close = functools.partial(_compare, rtol=rtol, atol=atol)
    opened((args, kwargs))
    with mesh:
        world = _World(step, mesh, args, kwargs)
        expected, written = world.run(functools.partial(_alone, step.fn), *_copies(args, kwargs))
        plan = step.plan(*args, **kwargs)
        runs: dict[str, Callable[..., Any]] = {"": step}
        if mesh.kind == "virtual" and mesh.size <= _SMALL:
            runs[" (nothing shared)"] = lambda *args, **kwargs: unshared(step, mesh, args, kwargs)
        leaves: list[Compared] = []
        for suffix, run in runs.items():
            found, others = world.run(functools.partial(_seeded, run), args, kwargs)
            leaves += close("result", expected, found, suffix)
            both = [name for name in written if world.is_changed(name, written, others)]
            leaves += close("", [written[n] for n in both], [others[n] for n in both], suffix, names=both)
        names = [name for name, value in plan.compiled.inputs if value.dtype.is_floating_point]
        after = plan.compiled.traced.after
        if names and _is_loss(expected) and not after.writes:
            pull = _gradients(step)
            back = _with_options_of(step, pull)
            expected, _ = world.run(functools.partial(_alone, pull), *_copies(args, kwargs))
            found, _ = world.run(functools.partial(_seeded, back), args, kwargs)
            leaves += close("gradient of ", expected, found, names=names)
    if faults := [str(leaf) for leaf in leaves if leaf.fault]:
        raise ShardingError(
            f"check({plan.name}): {len(faults)} of {len(leaves)} tensors differ between one device and {mesh}",
            faults,
            rule="the sharded program computes what the program for one device computes",
            remedy="if the differences are rounding, give rtol=; if not, "
            + (
                f"look at the rule of {' and '.join(own)}"
                if (own := own_rules(n.target for n in plan.compiled.traced.graph.graph.nodes))
                else _BUG
            ),
        )
    return CheckReport(plan.name, mesh, tuple(leaves))


# --- the runs ---------------------------------------------------------------------------------------------------------


def _copied(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Jitted:
    """A jitted function of its own, which donates nothing: arguments are used several times."""
    if not isinstance(fn, Jitted):
        return jit(fn, in_specs=in_specs, out_specs=out_specs)  # type: ignore[no-any-return]
    in_specs, out_specs = in_specs or fn.in_specs, out_specs or fn.out_specs
    return Jitted(fn.fn, in_specs, out_specs, fn.static, frozenset(), (), fn.keeping)


def _with_options_of(step: Jitted, fn: Callable[..., Any]) -> Jitted:
    keeping = replace(step.keeping, memory=None)  # it is another program, with another peak
    return Jitted(fn, step.in_specs, None, step.static, frozenset(), (), keeping)


class _World:
    """What a call may change beside what it returns; each run finds it as it was."""

    def __init__(self, step: Jitted, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step = step
        self.watch = Watch(Invocation.of(step, step.programs, None, args, kwargs).look)
        self.tensors = dict(self._tensors(args, kwargs))
        self.before = {name: _whole(x) for name, x in self.tensors.items()}

    def run(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor | None]]:
        """What a run returns, and what it leaves in each tensor that it is given or finds."""
        try:
            out = pytree.tree_map_only(Tensor, torch.clone, run(*args, **kwargs))
            return out, {name: _whole(x) for name, x in self._tensors(args, kwargs)}
        finally:
            self.watch.restore()
            with torch.no_grad():
                for name, x in self.tensors.items():
                    if x is not None and not _equal(_whole(x), self.before[name]):
                        x.detach().copy_(self.before[name])
                for name, x in self.tensors.items():
                    if name.endswith(_GRAD):
                        self.tensors[name.removesuffix(_GRAD)].grad = x

    def is_changed(self, name: str, *runs: Mapping[str, Tensor | None]) -> bool:
        """Whether some run leaves another value than was there."""
        return not all(_equal(run[name], self.before[name]) for run in runs)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        call = flatten_call(self.step.fn, args, kwargs, self.step.static, self.watch.before)
        for name, x in zip(names_of(self.step.fn, call, range(len(call.leaves))), call.leaves, strict=True):
            if isinstance(x, Tensor) and not name.endswith(_GRAD):
                yield name, x
                yield name + _GRAD, x.grad


_GRAD = ".grad"


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
        if id(x) not in made:
            made[id(x)] = torch.clone(x if type(x) is not ShardedTensor else x.full_tensor()).detach()
            made[id(x)].requires_grad_(x.requires_grad)
            made[id(x)].grad = _whole(x.grad)
        return made[id(x)]

    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, copied, (args, kwargs))
    return found


def _seeded(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return run(*args, **kwargs)


def _alone(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        with plain_program():
            return fn(*args, **kwargs)

    with single_device():
        return _seeded(run)


def unshared(step: Jitted, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A call in which virtual devices share no value: each computes its own."""
    call = Invocation.of(step, step.programs, None, tuple(args), dict(kwargs))
    plan = call.plan()[0]
    ready = step._load(mesh, plan, (), lambda program, mesh, _: virtual.load(program, mesh, share=False))
    return caller(ready.entry)(call.served(plan))


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

        found = torch.func.grad(loss, argnums=tuple(range(len(where))))(*(call.leaves[i] for i in where))
        return tuple(found)

    return gradients


# --- comparing --------------------------------------------------------------------------------------------------------


def _compare(
    root: str,
    expected: Any,
    found: Any,
    suffix: str = "",
    names: Sequence[str] | None = None,
    *,
    rtol: float | None,
    atol: float | None,
) -> list[Compared]:
    """Compare leaf by leaf; leaves are called by their paths, or by `names`."""
    one, tree = pytree.tree_flatten_with_path(expected)
    many, other = pytree.tree_flatten(found)
    if tree != other:
        raise ShardingError(
            "check: the function returns one structure on one device and another when it is traced",
            [f"on one device: {tree}", f"traced: {other}"],
            rule="what a function returns does not depend on how it runs",
        )
    out: list[Compared] = []
    for (path, a), b in zip(one, many, strict=True):
        name = root + (pytree.keystr(path) if names is None else names[len(out)]) + suffix
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            out.append(_compare_tensors(name, a.detach(), b, rtol, atol))
        else:
            same = not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
            out.append(Compared(name, _show(a), 0.0, 0.0, "" if same else f"is {_show(b)} when sharded"))
    return out


def _show(x: Any) -> str:
    return typeof(x) if isinstance(x, Tensor) else repr(x)


def _compare_tensors(name: str, one: Tensor, sharded: Tensor, rtol: float | None, atol: float | None) -> Compared:
    whole = sharded.full_tensor().detach() if isinstance(sharded, ShardedTensor) else sharded.detach()
    if (one.shape, one.dtype) != (whole.shape, whole.dtype):
        return Compared(name, typeof(sharded), float("inf"), 0.0, f"is {typeof(one)} on one device")
    inexact = one.is_floating_point() or one.is_complex()
    if rtol is None:
        rtol = _RTOL.get(one.dtype, _HALF) if inexact else 0.0
    if atol is None:
        atol = rtol / 100
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = (one.to(wide), whole.to(wide)) if inexact else (one, whole)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs() if inexact else 1.0).to(torch.float64)
    far = torch.where(far.isnan(), torch.inf, far)
    finite = torch.where(a.isfinite(), a.abs(), 0.0).to(torch.float64)
    most, scale = (float(x.max()) if x.numel() else 0.0 for x in (far, finite))
    error = most / scale if scale else most
    if most <= atol + rtol * scale:
        return Compared(name, typeof(sharded), error, rtol)
    i = int((far > atol + rtol * scale).flatten().nonzero()[0])
    at = tuple(int(k) for k in torch.unravel_index(torch.tensor(i), one.shape))
    where = f"first at {list(at)}: " if at else ""
    fault = (
        f"error {error:.1e} (tolerance {rtol:.0e}), {where}{one[at].item()} on one device, {whole[at].item()} sharded"
    )
    return Compared(name, typeof(sharded), error, rtol, fault)
