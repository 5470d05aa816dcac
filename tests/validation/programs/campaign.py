"""Running random programs: one device against virtual devices, shared and unshared, and what the plan promised.

`outcome` says of one program whether it came out the same, was refused, or is a failure; `smallest` shrinks a failure;
`tests.validation.programs.record` runs many and keeps the score.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, ShardingError
from shardlib.compiler.codegen import virtual
from shardlib.compiler.program.steps import Collective
from shardlib.core.context import single_device
from shardlib.sharding import reshard
from shardlib.sharding.layout import Layout
from shardlib.sharding.reshard import routing
from shardlib.testing.check import run_unshared
from tests.helpers.bits import ChangedError, unchanged
from tests.validation.programs import Input, Program

RTOL = 1e-10
NOISE = 1e-13  # of a probe that tells how well-conditioned a program is
Call = tuple[str, int, float]  # kind, members, bytes of the largest result


@dataclass(frozen=True)
class Outcome:
    """`kind`: "same", "refused" (before anything ran), "vague" (rounding decides), "wrong" or "crash"."""

    kind: str
    detail: str = ""
    collectives: int = 0
    replicated: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crash")


def outcome(p: Program) -> Outcome:
    """Run `p` every way there is."""
    args = [x.make() for x in p.inputs]
    fn = compiled(p.function)
    expected = alone(fn, args)
    tolerance = tolerances(p, args, expected)
    mesh = Mesh(dict(p.mesh))
    step = sl.jit(fn, in_specs=tuple(x.spec for x in p.inputs), out_specs=p.specs)
    try:
        with mesh:
            try:
                plan = step.plan(*args)
            except ShardingError as error:
                return Outcome("refused", str(error))
            promised = plan.compiled.program.collectives
            once = len(promised), plan.replicated_ops
            str(plan)
            with unchanged(args):
                leaves = pytree.tree_leaves(step(*args))
            if fault := differ(expected, leaves, tolerance):
                return Outcome("wrong", fault, *once)
            with counting() as calls, unchanged(args):
                found = pytree.tree_leaves(run_unshared(step, mesh, args, {}))
            if fault := differ_anywhere(expected, found, mesh, tolerance):
                return Outcome("wrong", f"run_unshared: {fault}", *once)
            if fault := broken_promise(promised, calls, mesh):
                return Outcome("wrong", f"bytes: {fault}", *once)
            if not p.grad and math.inf not in tolerance and (fault := lost_gradient(p, fn, step, args)):
                return Outcome("wrong", f"gradients through the call: {fault}", *once)
    except ChangedError as error:
        return Outcome("wrong", str(error))
    except (
        AssertionError,
        ArithmeticError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        NameError,
    ) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        inside = next(
            (f for f in reversed(traceback.extract_tb(error.__traceback__)) if "shardlib" in f.filename), where
        )
        return Outcome("crash", f"{type(error).__name__}: {error} ({inside.name}:{inside.lineno})")
    return Outcome("same", "", *once)


def compiled(source: str, **names: Any) -> Callable[..., Any]:
    namespace = {"torch": torch, "F": F, "sl": sl, "shard": sl.shard, **names}
    exec(source, namespace)
    function: Callable[..., Any] = namespace["program"]
    return function


def alone(fn: Callable[..., Any], args: list[Tensor]) -> list[Any]:
    with single_device():
        return pytree.tree_leaves(fn(*args))


def lost_gradient(p: Program, fn: Callable[..., Any], step: Any, args: list[Tensor]) -> str:
    """What is wrong with the gradients that autograd takes through a jitted call, from outside."""
    try:
        with single_device():
            expected = gradients(fn, args)
            shaken = gradients(noisy(p), [noise(a) for a in args])
    except RuntimeError:  # what torch does not differentiate
        return ""
    limits = [slack(a, b) for a, b in zip(expected, shaken, strict=True)]
    if not expected or math.inf in limits:
        return ""
    return differ(expected, gradients(step, args), limits)


def gradients(run: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The gradients of all inputs, of a weighted sum of all results."""
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    leaves = pytree.tree_leaves(run(*given))
    outs = [y for y in leaves if isinstance(y, Tensor) and y.requires_grad and not y.is_complex()]
    wanted = [x for x in given if x.requires_grad]
    if not outs or not wanted:
        return []
    total = sum((y * torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)).sum() for y in outs)
    if isinstance(total, sl.ShardedTensor):
        total = total.full_tensor()
    assert isinstance(total, Tensor)
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def tolerances(p: Program, args: list[Tensor], expected: list[Any]) -> list[float]:
    """Per result: rounding at `RTOL`, or more where a little noise on every line changes more; inf where it is all."""
    shaken = alone(noisy(p), [noise(a) for a in args])
    return [2 * slack(a, b) for a, b in zip(expected, shaken, strict=True)]


def noisy(p: Program) -> Callable[..., Any]:
    """The program with a little noise on every line."""
    lines = tuple(re.sub(r"^(v\d+) = (.*?)(;|$)", r"\1 = noise(\2)\3", line) for line in p.lines)
    return compiled(replace(p, lines=lines).function, noise=noise)


def noise(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        wave = NOISE * torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)
        return x * (1 + wave) + 0.1 * wave * (x != 0)  # of what cancels, only rounding is left
    return x


def slack(a: Any, b: Any) -> float:
    """How far a result may be off, given what noise changes."""
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return 0.0 if not isinstance(a, Tensor) or torch.equal(a, b) else math.inf
    scale = float(a.abs().max()) if a.numel() else 0.0
    change = float((a - b).abs().max()) if a.numel() else 0.0
    return math.inf if change > 1e-5 * scale else RTOL * scale + 1e-11 + 1e3 * change


def differ(expected: list[Any], found: list[Any], tolerance: list[float]) -> str:
    """What is wrong with the results, if anything."""
    faults = []
    for i, (a, b, t) in enumerate(zip(expected, found, tolerance, strict=True)):
        whole = b.full_tensor() if isinstance(b, sl.ShardedTensor) else b
        if fault := far(a, whole, t):
            faults.append(f"leaf {i}: {fault}")
    return "; ".join(faults)


def differ_anywhere(expected: list[Any], found: list[Any], mesh: Mesh, tolerance: list[float]) -> str:
    """The same for every device's local tensor."""
    faults = []
    for i, (a, sharded, t) in enumerate(zip(expected, found, tolerance, strict=True)):
        if not isinstance(sharded, sl.ShardedTensor):
            continue
        layout: Layout = sharded.sharding
        for coords, b in zip(mesh.all_coords(), sharded._locals, strict=True):
            if fault := far(layout.scatter(a, coords), b, t):
                faults.append(f"leaf {i} on {dict(coords)} as [{layout}]: {fault}")
                break
    return "; ".join(faults)


def far(a: Any, b: Any, tolerance: float) -> str:
    if not isinstance(a, Tensor):
        return "" if a == b else f"{a} became {b}"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
    if a.numel() == 0 or math.isinf(tolerance):
        return ""
    error = (a.double() - b.double()).abs().nan_to_num(nan=math.inf).max()
    return f"differs by {float(error):.1e} of {float(a.abs().max()):.1e}" if float(error) > tolerance else ""


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Inside, programs are planned as if tensors were large: a collective costs its bytes alone.

    Small tensors take the ways with the fewest collectives; so the others are tried, too.
    """
    with contextlib.ExitStack() as patches:
        only_bytes = (0.0, reshard.DEFAULT_PRICES.rate(()))
        patches.enter_context(mock.patch.object(type(reshard.DEFAULT_PRICES), "link", return_value=only_bytes))
        for cache in (routing.plan_steps, routing.plan_route):
            cache.cache_clear()
            patches.callback(cache.cache_clear)
        yield


# What ran against what was planned ------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting() -> Iterator[list[Call]]:
    """Programs loaded inside note every collective that runs."""
    calls: list[Call] = []

    def noting(kind: str, reference: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def call(shards: list[Tensor], **params: Any) -> list[Tensor]:
            out = reference(shards, **params)
            most: float = max(o.nbytes for o in out)
            if kind == "all_to_all" and not isinstance((table := params["split_sizes"])[0], int):
                most = _exchanged(shards, params["split_dim"], table)
            calls.append((kind, len(shards), most))
            return out

        return call

    tables = [{kind: noting(kind, f) for kind, f in t.items()} for t in (virtual._SHARED, virtual._SEPARATE)]
    with mock.patch.object(virtual, "_SHARED", tables[0]), mock.patch.object(virtual, "_SEPARATE", tables[1]):
        yield calls


def _exchanged(shards: list[Tensor], dim: int, table: list[list[int]]) -> float:
    """Where pieces of one dim change hands: the most that one device sends, as a share of a result that all send."""
    rows = [x.split_with_sizes(row, dim) for x, row in zip(shards, table, strict=True)]
    sent = max(sum(piece.nbytes for j, piece in enumerate(row) if j != i) for i, row in enumerate(rows))
    return sent * len(shards) / (len(shards) - 1)


_WIRE: dict[str, Callable[[float, int], float]] = {
    "all_gather": lambda out, n: out * (n - 1) / n,
    "all_to_all": lambda out, n: out * (n - 1) / n,
    "all_reduce": lambda out, n: 2 * out * (n - 1) / n,
    "reduce_scatter": lambda out, n: out * (n - 1),
    "ppermute": lambda out, n: out,
}


def broken_promise(promised: list[Collective], calls: list[Call], mesh: Mesh) -> str:
    """How the collectives that ran differ from the planned ones, in number, kind, members or bytes."""
    feed = iter(calls)
    for c in promised:
        n = math.prod(a.size for a in c.axes)
        if n == 1:
            return f"{c} has one member"
        ran = [next(feed, None) for _ in range(mesh.size // n)]
        if any(call is None or call[:2] != (c.kind, n) for call in ran):
            return f"planned {c}, ran {ran}"
        most = _WIRE[c.kind](max(call[2] for call in ran if call), n)
        if abs(most - c.bytes) > 1e-6 * most:
            return f"planned {c}, ran with {most:,.0f} bytes"
    return "" if next(feed, None) is None else "more collectives ran than were planned"


# Shrinking ------------------------------------------------------------------------------------------------------------


def smallest(p: Program, found: Outcome, budget: float = 20.0) -> Program:
    """A smaller program that fails in the same way; gives up after `budget` seconds."""
    end = time.monotonic() + budget

    def still(q: Program) -> bool:
        try:
            now = outcome(q)
        except (RuntimeError, IndexError, ValueError, NameError, SyntaxError, TypeError, KeyError):
            return False  # no program any more
        return now.kind == found.kind and now.detail[:12] == found.detail[:12]

    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for q in _smaller(p):
            if time.monotonic() > end:
                break
            if still(q):
                p, progress = q, True
                break
    return p


def _smaller(p: Program) -> Iterator[Program]:
    for i in range(len(p.outputs)):
        if len(p.outputs) > 1:
            yield replace(
                p, outputs=p.outputs[:i] + p.outputs[i + 1 :], out_specs=p.out_specs[:i] + p.out_specs[i + 1 :]
            )
    yield from (q for q in [_without_dead(p)] if q != p)
    for i in range(len(p.lines) - 1, -1, -1):  # return an earlier value instead
        names = re.findall(r"\bv\d+\b", p.lines[i].split(" = ")[0])
        if len(p.outputs) == 1 and names and names[0] != p.outputs[0]:
            yield _without_dead(replace(p, outputs=(names[0],), out_specs=(None,)))
    if p.grad:
        yield replace(p, grad=False)
    for i, name in enumerate(name for name, _ in p.mesh):
        yield _without_axis(p, name, i)
    for i, x in enumerate(p.inputs):
        if x.spec is not None:
            yield replace(p, inputs=_put(p.inputs, i, replace(x, spec=None)))
    for i, spec in enumerate(p.out_specs):
        if spec is not None:
            yield replace(p, out_specs=_put(p.out_specs, i, None))
    if p.grads_like_inputs:
        yield replace(p, grads_like_inputs=False)
    for i, line in enumerate(p.lines):
        name, _, body = line.partition(" = ")
        for operand in dict.fromkeys(re.findall(r"\b[vx]\d+\b", body)):
            if body != operand and "," not in name:
                yield replace(p, lines=_put(p.lines, i, f"{name} = {operand}"))
        if re.fullmatch(r"\b[vx]\d+\b", body):
            rest = [re.sub(rf"\b{name}\b", body, later) for later in p.lines[i + 1 :]]
            outs = tuple(body if o == name else o for o in p.outputs)
            yield replace(p, lines=(*p.lines[:i], *rest), outputs=outs)
    for i, x in enumerate(p.inputs):
        if x.spec and "?" in x.spec:
            yield replace(p, inputs=_put(p.inputs, i, replace(x, spec=x.spec.replace("?", ""))))
    for name, size in p.mesh:
        if size > 2:
            yield replace(p, mesh=tuple((n, 2 if n == name else k) for n, k in p.mesh))


def _put(items: tuple[Any, ...], i: int, x: Any) -> tuple[Any, ...]:
    return (*items[:i], x, *items[i + 1 :])


def _without_dead(p: Program) -> Program:
    needed, lines = set(p.outputs), []
    for line in reversed(p.lines):
        if set(re.findall(r"\b[vxi]\d+\b", line.split(" = ")[0])) & needed:
            needed |= set(re.findall(r"\b[vxi]\d+\b", line))
            lines.append(line)
    inputs: tuple[Input, ...] = tuple(x for x in p.inputs if x.name in needed)
    return replace(p, lines=tuple(lines[::-1]), inputs=inputs or p.inputs[:1])


def _without_axis(p: Program, axis: str, i: int) -> Program:
    def drop(spec: str | None) -> str | None:
        return spec and re.sub(rf"@{axis}\b", "", re.sub(rf"(?<=[( ]){axis} | {axis}(?=\))", "", spec))

    lines = tuple(
        re.sub(r"shard\((\w+), '(.*)'\)", lambda m: f"shard({m[1]}, {drop(m[2])!r})", line) for line in p.lines
    )
    inputs = tuple(replace(x, spec=drop(x.spec)) for x in p.inputs)
    mesh = p.mesh[:i] + p.mesh[i + 1 :] or (("z", 1),)
    return replace(p, lines=lines, inputs=inputs, mesh=mesh, out_specs=tuple(map(drop, p.out_specs)))
