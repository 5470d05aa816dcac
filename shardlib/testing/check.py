"""`check`: runs a function on one device and sharded, and compares all results."""

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
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.gradients.joint_backward import FREED
from shardlib.frontend.guards.flatten_call import Static, flatten_call, leaf_names
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.traced_graph import ExtraOutputs
from shardlib.jit.call.compile_call import Invocation
from shardlib.jit.call.execute import caller
from shardlib.jit.jit import Jitted, jit
from shardlib.rules.table import user_rules
from shardlib.sharding.mesh.mesh import Mesh, current_mesh
from shardlib.testing.compare import Compared
from shardlib.testing.first_mismatch import find_first_difference
from shardlib.testing.rerun import GRAD, Reruns, Tolerance, run_seeded

_BUG = "it is a bug of shardlib: report the program"
_STEPS = 3  # runs of a function that changes state
_SMALL = 16  # devices; on larger virtual meshes the run without sharing takes too long


@dataclass(frozen=True)
class CheckReport:
    """Every compared output and gradient, and every output of the run in which devices share nothing."""

    name: str
    mesh: Mesh
    leaves: tuple[Compared, ...]
    steps: int = 1
    cut: bool = True  # some value of the program is sharded
    without: str = ""  # the reason why a loss has no compared gradients
    stays: tuple[str, ...] = ()  # tensors that stayed on the mesh in the run on one device

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
    """Runs `fn` on one device as plain torch, and sharded on `mesh`; compares every result.

    Without `mesh`, the step runs on the current mesh, else on the mesh of the tensors that it reads, as in `jit`.

    Results include the state after a call: arguments, parameters, buffers, `.grad` and an optimizer's moments. A
    function that changes state runs three times; each run starts from the same state. The run on one device has no
    ShardedTensors: a parallelized module runs with whole parameters. (The report lists tensors that stay on the mesh.)

    If `fn` returns a loss, one real number, and does not go back itself, gradients are compared, too: those of all
    floating-point and complex arguments, and of other tensors that require one. Tensors with a history are left out.
    On small virtual meshes the program runs once more with nothing shared between devices.

    Errors are relative, in the maximum norm of each tensor. `rtol` defaults to 1e-12 (f64), 1e-5 (f32) or 1e-2 (bf16,
    f16), and to ten times that after three steps. `atol`, for tensors of zeros, defaults to a hundredth of `rtol`.
    Without given tolerances, a difference that other rounding makes on one device, too, is no fault. (An example is a
    bias that cancels out, whose gradient Adam scales.)

    All runs start from the same random state and draw the mesh's random numbers, also for dropout, not those of plain
    torch. To compare by hand, use `sl.Mesh(data=1)`, or, for eager ops, plain code under `sl.global_random()`.

    Raises `ShardingError` that lists every tensor that differs and, on small virtual meshes, the first intermediate
    value that does, with its line.

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
    step = _copy_jitted(fn, in_specs, out_specs)
    register_mappings((args, kwargs))
    mesh = mesh or current_mesh() or step.plan(*args, **kwargs).mesh  # the mesh of the tensors
    with mesh:
        comparison = _Comparison(step, mesh, args, kwargs, rtol, atol)
        comparison.compare_results()
        comparison.compare_gradients()
        comparison.refuse_differences()
    return comparison.report()


class _Comparison:
    """The runs of one function on one device and on a mesh; `leaves` collects the compared tensors."""

    def __init__(
        self, step: Jitted, mesh: Mesh, args: Any, kwargs: Any, rtol: float | None, atol: float | None
    ) -> None:
        self.step, self.mesh, self.args, self.kwargs = step, mesh, args, kwargs
        self.rtol, self.atol = rtol, atol
        self.reruns = Reruns(step, args, kwargs)
        self.plan: Plan = step.plan(*args, **kwargs)
        self.plans = [self.plan]
        dtypes = {value.dtype for value in self.plan.compiled.graph.values()}
        self.reruns.eps = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)
        self.effects = self.plan.compiled.traced.after
        self.steps = _STEPS if self.effects.writes or self.effects.rebound else 1
        self.is_small = mesh.kind == "virtual" and mesh.size <= _SMALL
        self.tolerance = Tolerance(rtol, atol, 10 if self.steps > 1 else 1)
        self.leaves: list[Compared] = []
        self.no_gradients = ""

    def compare_results(self) -> None:
        """Compares outputs and changed state with one device: of the program, and of the program without sharing."""
        step, mesh = self.step, self.mesh
        runs: dict[str, Callable[..., Any]] = {"": step}
        if self.is_small:
            runs[" (nothing shared)"] = lambda *args, **kwargs: run_unshared(step, mesh, args, kwargs)
        self.expected = self.reruns.run_on_one_device(step.fn, self.steps)
        for suffix, run in runs.items():
            compared = self.reruns.compare(self.tolerance, "result", None, step.fn, self.expected, run, self.steps)
            self.leaves += [replace(leaf, path=leaf.path + suffix) for leaf in compared]

    def compare_gradients(self) -> None:
        """Compares the gradients of a loss, unless the function goes back itself."""
        if not _is_loss(self.expected.out) or _goes_back(self.plan):
            return
        names, backward = _backward(self.reruns, self.effects)
        options = replace(self.step.options, memory=None)  # another program, with another peak
        sharded = Jitted(backward, self.step.in_specs, None, self.step.static, frozenset(), (), options)
        gradients, self.no_gradients = _compare_backward(names, backward, sharded, self.reruns, self.tolerance)
        if gradients and not self.no_gradients:
            self.plans.append(sharded.plan(*self.args, **self.kwargs))
        twice = {leaf.path for leaf in self.leaves}.intersection(leaf.path for leaf in gradients)
        self.leaves += [replace(leaf, path=leaf.path + " (going back)" * (leaf.path in twice)) for leaf in gradients]

    def refuse_differences(self) -> None:
        faults = [str(leaf) for leaf in self.leaves if leaf.fault]
        if not faults:
            return
        count = f"{len(faults)} of {len(self.leaves)}"
        if self.is_small and self.plan.compiled.halves is None:
            find = functools.partial(_find_first_difference, self.step, self.mesh, self.rtol, self.atol)
            first = self.reruns.run_sharded(find).out
            faults[:0] = [f"the first value that differs: {first}"] if first else []
        own = user_rules(n.target for plan in self.plans for n in plan.compiled.traced.graph.graph.nodes)
        raise ShardingError(
            f"check({self.plan.name}): {count} tensors differ between one device and {self.mesh}",
            faults,
            rule="the sharded program computes what the program for one device computes",
            remedy="if the differences are rounding, give rtol=; if not, "
            + (f"look at the rule of {' and '.join(own)}" if own else _BUG),
        )

    def report(self) -> CheckReport:
        program = self.plan.compiled.program
        values = (*program.inputs, *(var for step in program.steps for var in makes(step)))
        is_sharded = any(var.layout is not None and not var.layout.is_replicated for var in values)
        stays = tuple(self.reruns.stays)
        return CheckReport(
            self.plan.name, self.mesh, tuple(self.leaves), self.steps, is_sharded, self.no_gradients, stays
        )


# --- the runs ---------------------------------------------------------------------------------------------------------


def _copy_jitted(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Jitted:
    """Returns a jitted function that donates nothing, since arguments are used several times."""
    if not isinstance(fn, Jitted):
        return jit(fn, in_specs=in_specs, out_specs=out_specs)  # type: ignore[no-any-return]
    in_specs, out_specs = in_specs or fn.in_specs, out_specs or fn.out_specs
    return Jitted(fn.fn, in_specs, out_specs, fn.static, frozenset(), (), fn.options)


def run_unshared(step: Jitted, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls `step` on virtual devices that share no value: each computes its own."""
    return _run_loaded(step, mesh, args, kwargs, lambda program, mesh, *_: virtual.load(program, mesh, share=False))


def _run_loaded(
    step: Jitted, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], load: Callable[..., Any]
) -> Any:
    call = Invocation.read_new(step, step.programs, None, tuple(args), dict(kwargs))
    plan = call.plan()[0]
    return caller(step._load(mesh, plan, (), load).entry)(call.served(plan))


def _find_first_difference(
    step: Jitted, mesh: Mesh, rtol: float | None, atol: float | None, /, *args: Any, **kwargs: Any
) -> str:
    """Calls `step` and returns the text of the first value that differs from one device, or ""."""
    texts: list[str] = []

    def load(program: Program, mesh: Mesh, plan: Plan, own: Program) -> Callable[..., Any]:
        def run(shards: Sequence[Sequence[Tensor]], leaves: Sequence[Any] = ()) -> Any:
            run_once = lambda run, *args: run_seeded(run, 1, *args)
            texts.append(find_first_difference(plan.compiled, shards, leaves, run_once, rtol, atol))
            return virtual.load(program, mesh, share=False)(shards, leaves)

        return run

    _run_loaded(step, mesh, args, kwargs, load)
    return texts[0]


def _is_loss(out: Any) -> bool:
    return isinstance(out, Tensor) and out.dim() == 0 and out.is_floating_point()


def _goes_back(plan: Plan) -> bool:
    """True if the function goes back itself: it changes a `.grad`."""
    traced = plan.compiled.traced
    after, names = traced.after, dict(zip(traced.input_leaves, traced.input_names, strict=True))
    return bool(after.grads or after.takes) or any(names[leaf].endswith(GRAD) for leaf, _ in after.written)


def _compare_backward(
    names: list[str], backward: Callable[..., Any], sharded: Jitted, reruns: Reruns, tolerance: Tolerance
) -> tuple[list[Compared], str]:
    """Compares the results of a backward pass; returns them, or an empty list and the reason why there are none."""
    try:
        expected = reruns.run_on_one_device(backward)
    except CollectiveError:
        raise
    except RuntimeError as error:
        message = str(error).partition("\n")[0].partition(". ")[0]
        is_backward_inside = FREED in message  # the function went back: then everything is compared already
        return [], "" if is_backward_inside else f"on one device, torch says: {message}"
    if expected.kept:
        return [], f"{', '.join(expected.kept)} would keep the history of what is written there"
    return reruns.compare(tolerance, "gradient of ", names, backward, expected, sharded), ""


def _backward(reruns: Reruns, effects: ExtraOutputs) -> tuple[list[str], Callable[..., tuple[Tensor, ...]]]:
    """Returns a function that runs a call and its backward pass, and the names of the gradients that it returns.

    These are gradients of copies of arguments, to which the call may write. Gradients of other tensors end up in their
    `.grad`, which is compared like all state that a call leaves. The pass does not enter graphs that were made before
    the call, since it would free them.
    """
    fn, static, may_go_everywhere = reruns.step.fn, reruns.step.static, reruns.reaches_only_leaves
    call = flatten_call(fn, *reruns.call, static)
    copied = [i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and reruns.may_require_grad(x)]
    written = [leaf for leaf, _ in effects.written if leaf in copied]

    @functools.wraps(fn)
    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = flatten_call(fn, args, kwargs, static)
        leaves = [x.value if isinstance(x, Static) else x for x in call.leaves]
        copies = {id(leaves[i]): leaves[i].detach().clone().requires_grad_() for i in copied}
        inputs = [*copies.values(), *(x for x in leaves if isinstance(x, Tensor) and x.is_leaf and x.requires_grad)]
        differentiated = [copies[id(leaves[i])] for i in copied]
        passed = copies | {id(leaves[i]): copies[id(leaves[i])].clone() for i in written}  # no leaf may be written to
        a, k = pytree.tree_unflatten([passed.get(id(x), x) for x in leaves], call.tree)
        with torch.enable_grad():
            loss = fn(*a, **k)
        if not loss.requires_grad:
            return ()
        if may_go_everywhere or inputs:
            torch.autograd.backward(loss, inputs=None if may_go_everywhere else inputs)
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in differentiated)

    return list(leaf_names(fn, call, copied)), backward
