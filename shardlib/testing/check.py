"""`check`: run a function on one device and sharded, and compare everything that comes out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardlib.compiler.codegen import virtual
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.program.steps import Program, makes
from shardlib.core.errors import CollectiveError, ShardingError
from shardlib.core.torch_private import pytree
from shardlib.frontend.epilogue import FREED, ExtraOutputs
from shardlib.frontend.guards.flatten_call import Static, flatten_call, names_of
from shardlib.frontend.guards.mappings import opened
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.execute import caller
from shardlib.jit.jit import Jitted, jit
from shardlib.rules.table import own_rules
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.testing.compare import Compared
from shardlib.testing.first_mismatch import first_difference
from shardlib.testing.rerun import GRAD, Close, Reruns, seeded

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
    without: str = ""  # why no gradients were compared of a loss
    stays: tuple[str, ...] = ()  # what was on the mesh in the run on one device, too

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
        notes = [f"no gradients: {self.without}"] if self.without else []
        if self.stays:
            notes.append(
                f"on one device, too, on the mesh, since something holds them for good: {', '.join(self.stays)}"
            )
        return "\n".join([head, *(f"  {x}" for x in (*self.leaves, *notes))])


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

    On one device there are no ShardedTensors: a parallelized module runs with whole parameters (what a default argument
    holds stays, and the report says so). What a call leaves in arguments, parameters, buffers, `.grad` and an
    optimizer's moments is a result, too, and such a step runs three times; after each run all is again as it was
    before. A loss, one real number, that does not go back itself has its gradients compared, too: for all
    floating-point and complex arguments (copies of them, where they require none), and for whatever it finds that
    requires one (unless something there has been made by others, whose graph would be gone); where torch has no way
    back on one device, the report says so. On small virtual meshes the program also runs with nothing shared between
    devices. `fn` may be jitted: its specs hold. Errors are relative, in the maximum norm of each tensor; `rtol`
    defaults to 1e-12 (f64), 1e-5 (f32) or 1e-2 (bf16, f16), ten times that after three steps, and `atol`, for tensors
    that are zero, to a hundredth of that. All runs start from the same random state, and draw the numbers that the mesh
    draws, dropout's too; plain torch draws others from that state. By hand, compare with a mesh of one device,
    `sl.Mesh(data=1)`, or, for eager ops, with plain code under `sl.global_random()`. Where something differs by more,
    and nobody has said a tolerance, one device runs again with its numbers rounded otherwise: what that changes is
    rounding, too (a bias that cancels out, whose gradient Adam scales).

    Raises `ShardingError` that lists every tensor that differs and, on small virtual meshes, the first value inside
    that does, with its line.

    Example:
        >>> import shardlib as sl
        >>> with sl.Mesh(data=2, tensor=2):
        ...     x, w = torch.ones(4, 3), torch.ones(3, 2)
        ...     print(sl.check(lambda x, w: (x @ w).square().sum(), x, w, in_specs=("b@data _", None)))
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
        reruns = Reruns(step, args, kwargs)
        plan = step.plan(*args, **kwargs)
        after, is_small = plan.compiled.traced.after, mesh.kind == "virtual" and mesh.size <= _SMALL
        times = _STEPS if after.writes or after.rebound else 1
        reruns.eps = max((torch.finfo(d).eps for d in _dtypes(plan) if d.is_floating_point), default=0.0)
        close = Close(rtol, atol, 10 if times > 1 else 1)
        runs: dict[str, Callable[..., Any]] = {"": step}
        if is_small:
            runs[" (nothing shared)"] = lambda *args, **kwargs: unshared(step, mesh, args, kwargs)
        leaves: list[Compared] = []
        one = reruns.alone(step.fn, times)
        for suffix, run in runs.items():
            seen = reruns.compared(close, "result", None, step.fn, one, run, times)
            leaves += [replace(leaf, path=leaf.path + suffix) for leaf in seen]
        without, plans = "", [plan]
        if _is_loss(one.out) and not _goes_back(plan):
            names, back = _backward(reruns, after)
            there = _with_options_of(step, back)
            seen, without = _gradients(names, back, there, reruns, close)
            plans += [] if without or not seen else [there.plan(*args, **kwargs)]
            twice = {leaf.path for leaf in leaves}.intersection(leaf.path for leaf in seen)
            leaves += [replace(leaf, path=leaf.path + " (going back)" * (leaf.path in twice)) for leaf in seen]
        faults = [str(leaf) for leaf in leaves if leaf.fault]
        if faults and is_small and plan.compiled.halves is None:
            first = reruns.sharded(functools.partial(_first, step, mesh, rtol, atol)).out
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
                if (own := own_rules(n.target for x in plans for n in x.compiled.traced.graph.graph.nodes))
                else _BUG
            ),
        )
    made = (var for step in plan.compiled.program.steps for var in makes(step))
    cut = any(var.layout is not None and not var.layout.is_replicated for var in (*plan.compiled.program.inputs, *made))
    return CheckReport(plan.name, mesh, tuple(leaves), times, cut, without, tuple(reruns.stays))


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
            once = lambda run, *given: seeded(run, 1, *given)
            told.append(first_difference(plan.compiled, pieces, leaves, once, rtol, atol))
            return virtual.load(program, mesh, share=False)(pieces, leaves)

        return run

    _loaded(step, mesh, args, kwargs, load)
    return told[0]


def _is_loss(out: Any) -> bool:
    return isinstance(out, Tensor) and out.dim() == 0 and out.is_floating_point()


def _goes_back(plan: Plan) -> bool:
    """Whether the function does so itself: it changes a `.grad`."""
    traced = plan.compiled.traced
    after, names = traced.after, dict(zip(traced.input_leaves, traced.input_names, strict=True))
    return bool(after.grads or after.takes) or any(names[leaf].endswith(GRAD) for leaf, _ in after.written)


def _gradients(
    names: list[str], back: Callable[..., Any], sharded: Jitted, reruns: Reruns, close: Close
) -> tuple[list[Compared], str]:
    """What a way back from a loss leaves and returns, compared; or none of it, and why."""
    try:
        one = reruns.alone(back)
    except CollectiveError:
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0].partition(". ")[0]
        goes_back = FREED in said  # the function itself: then all is compared
        return [], "" if goes_back else f"on one device, torch says: {said}"
    if one.kept:
        return [], f"{', '.join(one.kept)} would keep the history of what is written there"
    return reruns.compared(close, "gradient of ", names, back, one, sharded), ""


def _backward(reruns: Reruns, after: ExtraOutputs) -> tuple[list[str], Callable[..., tuple[Tensor, ...]]]:
    """The way back from a call's loss; it returns gradients of arguments that have no `.grad` by themselves, so called.

    These are of copies, to which the function may write, too. What the way back leaves in the `.grad` of whatever
    requires one is compared as all that a call leaves; but where what is found has been made by others, it does not go
    there: their graph would be gone.
    """
    fn, static, ends = reruns.step.fn, reruns.step.static, reruns.ends
    call = flatten_call(fn, *reruns.given, static)
    copied = [i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and reruns.may_require_grad(x)]
    written = [leaf for leaf, _ in after.written if leaf in copied]

    @functools.wraps(fn)
    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = flatten_call(fn, args, kwargs, static)
        leaves = [x.value if isinstance(x, Static) else x for x in call.leaves]
        made = {id(leaves[i]): leaves[i].detach().clone().requires_grad_() for i in copied}
        inputs = [*made.values(), *(x for x in leaves if isinstance(x, Tensor) and x.is_leaf and x.requires_grad)]
        found = [made[id(leaves[i])] for i in copied]
        given = made | {id(leaves[i]): made[id(leaves[i])].clone() for i in written}
        a, k = pytree.tree_unflatten([given.get(id(x), x) for x in leaves], call.tree)
        with torch.enable_grad():
            loss = fn(*a, **k)
        if not loss.requires_grad:
            return ()
        if ends or inputs:
            torch.autograd.backward(loss, inputs=None if ends else inputs)
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in found)

    return list(names_of(fn, call, copied)), backward
