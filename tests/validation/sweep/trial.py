"""One call under one placement: on one device by plain torch, then eagerly or jitted on a mesh, and the difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardlib as sl
from shardlib import Mesh, P, ShardedTensor, ShardingError
from shardlib.core.context import single_device
from tests.helpers.bits import ChangedError, unchanged
from tests.validation.sweep.entries import Case

MODES = ("eager", "jit")

# Relative to the largest element: sums in another order, and decompositions that round otherwise.
_RTOL = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 2e-2  # bf16, fp16


class UntestableError(Exception):
    """Plain torch cannot run the call, or nothing of it can be placed or compared."""


@dataclass(frozen=True)
class Oracle:
    """What a call gives: the leaves of its result, then gradients; and the cotangents, by leaf of the result."""

    leaves: list[Any]
    cotangents: dict[int, Tensor]
    random: bool


@dataclass(frozen=True)
class Outcome:
    """`kind`: "right", "refused" (a ShardingError), "wrong" or "error" (any other exception)."""

    kind: str
    why: str = ""
    replicated: tuple[str, ...] = ()  # ops without a rule


def owned(case: Case) -> Case:
    """The same call on copies of what it may write to (a program leaves its arguments as they were), and what it wrote.

    A floating-point tensor without a gradient may be a buffer: batch_norm writes to its running statistics and, since
    it does not count that, is seen to do so only where they change. Raises UntestableError.
    """
    if any(x.layout != torch.strided or x.is_quantized or x.is_nested for x in case.tensors):
        raise UntestableError("its tensors are not dense")
    tensors = _inputs(replace(case, wants=(False,) * len(case.tensors)))
    before = [x._version for x in tensors]
    with single_device():
        try:
            _seeded(0, lambda: case.fn(*tensors))
        except Exception:  # noqa: BLE001 # the oracle will say so
            return case
    written = [i for i, x in enumerate(tensors) if x._version != before[i] or _far(case.tensors[i], x)]
    buffers = [i for i, x in enumerate(tensors) if x.is_floating_point() and not case.wants[i]]

    def fn(*given: Tensor) -> Any:
        copies = [x.clone() if i in written or i in buffers else x for i, x in enumerate(given)]
        return case.fn(*copies), [copies[i] for i in written]

    return replace(case, fn=fn, finish=lambda out: case.finish(out[0]))


def oracle(case: Case) -> Oracle:
    """The call on one device, by plain torch; raises UntestableError."""
    with single_device():
        try:
            out = _seeded(0, lambda: case.fn(*_inputs(case)))
            random = _seeded(0, lambda: _draws(lambda: case.fn(*_inputs(case))))
        except Exception as error:  # whatever plain torch cannot do says nothing about shards
            raise UntestableError(f"plain torch: {_said(error)}") from error
        leaves = pytree.tree_leaves(out)
        if any(isinstance(x, Tensor) and x.layout != torch.strided for x in leaves):
            raise UntestableError("its result is not dense")
        cotangents = _cotangents(case, out)
        try:
            leaves = _seeded(0, lambda: call(case, list(cotangents), _inputs(case), list(cotangents.values())))
        except Exception:  # noqa: BLE001 # as torch's own tests do: what has no gradient here has none anywhere
            cotangents = {}
        return Oracle([x.detach() if isinstance(x, Tensor) else x for x in leaves], cotangents, random)


def _cotangents(case: Case, out: Any) -> dict[int, Tensor]:
    if not any(case.wants) or case.shapes_only:
        return {}
    leaves = pytree.tree_leaves(case.finish(out))
    torch.manual_seed(1)
    return {i: torch.randn_like(x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}


def call(case: Case, pulled: Sequence[int], tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Any]:
    """The leaves of the result, and the gradients of the inputs that have one."""
    out = case.fn(*tensors)
    leaves = pytree.tree_leaves(out)
    if not pulled:
        return leaves
    done = pytree.tree_leaves(case.finish(out))
    wanted = [x for x, wants in zip(tensors, case.wants, strict=True) if wants]
    grads = torch.autograd.grad([done[i] for i in pulled], wanted, list(cotangents), allow_unused=True)
    return [*leaves, *grads]


def trial(case: Case, reference: Oracle, mesh: Mesh, mode: str, placement: Sequence[P]) -> Outcome:
    """Run the call with its tensors, and after them the cotangents, placed, and compare."""
    plan: list[sl.Plan] = []
    try:
        if reference.random:
            alone = Mesh(x=1)
            found = _RUN[mode](case, reference, alone, [P() for _ in placement], [])
            if fault := _faults(reference.leaves, found, alone, shapes_only=True):
                return Outcome("wrong", f"on one device: {fault}")
            whole = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in found]
            reference = replace(reference, leaves=[x.detach() if isinstance(x, Tensor) else x for x in whole])
        found = _RUN[mode](case, reference, mesh, placement, plan)
        fault = _faults(reference.leaves, found, mesh, case.shapes_only)
    except ShardingError as error:
        return Outcome("refused", _said(error))
    except ChangedError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 # a crash in Python is an outcome
        return Outcome("error", _said(error))
    replicated = tuple(dict.fromkeys(op.partition(" at ")[0] for p in plan for op in p.replicated_ops))
    return Outcome("wrong", fault, replicated) if fault else Outcome("right", "", replicated)


def _eager(case: Case, reference: Oracle, mesh: Mesh, placement: Sequence[P], plan: list[sl.Plan]) -> list[Any]:
    with mesh:
        tensors, cotangents = _placed(case, reference, placement)
        with unchanged([*tensors, *cotangents]):
            return _seeded(0, lambda: call(case, list(reference.cotangents), tensors, cotangents))


def _jit(case: Case, reference: Oracle, mesh: Mesh, placement: Sequence[P], plan: list[sl.Plan]) -> list[Any]:
    def program(tensors: list[Tensor], cotangents: list[Tensor]) -> list[Any]:
        return call(case, list(reference.cotangents), tensors, cotangents)

    with mesh:
        made = not case.tensors  # a factory: its result is placed instead
        step = sl.jit(program, out_specs=placement[0] if made else None)
        tensors, cotangents = _placed(case, reference, [] if made else placement)
        plan.append(step.plan(tensors, cotangents))
        with unchanged([*tensors, *cotangents]):
            found: list[Any] = _seeded(0, lambda: step(tensors, cotangents))
        return found


_RUN: dict[str, Callable[[Case, Oracle, Mesh, Sequence[P], list[sl.Plan]], list[Any]]] = {"eager": _eager, "jit": _jit}


def _placed(case: Case, reference: Oracle, placement: Sequence[P]) -> tuple[list[Tensor], list[Tensor]]:
    given = [*_inputs(case), *reference.cotangents.values()]
    placed = [sl.shard(x, p).detach() for x, p in zip(given, placement, strict=True)]
    n = len(case.tensors)
    return [x.requires_grad_(wants) for x, wants in zip(placed[:n], case.wants, strict=True)], placed[n:]


def _inputs(case: Case) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(wants) for x, wants in zip(case.tensors, case.wants, strict=True)]


@contextmanager
def _fork_rng(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _seeded(seed: int, run: Callable[[], Any]) -> Any:
    with _fork_rng(seed):
        return run()


def _draws(run: Callable[[], Any]) -> bool:
    """Whether it draws random numbers; entries that do set a seed for themselves and put the state back."""
    before = torch.get_rng_state()
    with mock.patch.object(torch, "manual_seed"), mock.patch.object(torch, "set_rng_state"):
        run()
    return not torch.equal(torch.get_rng_state(), before)


def _said(error: Exception) -> str:
    """The first line of an error, and the first thing that it lists, without the line of source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not isinstance(error, ShardingError):
        return f"{type(error).__name__}: {' '.join(lines[:1])}"[:300]
    listed = re.sub(r"( at |^\* )(/|<string>|None).*", "", lines[1]) if len(lines) > 1 else ""
    return f"{lines[0]} {listed}".strip()[:300]


# --- comparing --------------------------------------------------------------------------------------------------------


def _faults(expected: Sequence[Any], found: Sequence[Any], mesh: Mesh, shapes_only: bool) -> str:
    """What is wrong with the results, whole and on every device; "" if nothing is."""
    if len(expected) != len(found):
        return f"{len(found)} results for {len(expected)}"
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        for where, x, y in _pieces(a, b, mesh):
            if fault := _far(x, y, shapes_only):
                return f"result {i}{where}: {fault}"
    return ""


def _pieces(a: Any, b: Any, mesh: Mesh) -> Iterator[tuple[str, Any, Any]]:
    """A result beside what was expected of it: as a whole, then what each device holds."""
    if not isinstance(b, ShardedTensor):
        yield "", a, b.detach() if isinstance(b, Tensor) else b
        return
    b = b.detach()
    yield "", a, b.full_tensor()
    if isinstance(a, Tensor) and a.shape == b.shape:
        for piece in b.shards:
            yield f" on {dict(piece.coords)}", b.sharding.scatter(a, piece.coords), piece.data


def _far(a: Any, b: Any, shapes_only: bool = False) -> str:
    """How two results differ; "" if they do not."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        same = type(a) is type(b) and (
            a == b or (isinstance(a, float) and abs(a - b) <= 1e-8 * abs(a)) or (a != a and b != b)
        )
        return "" if same else f"{type(a).__name__} {a} became {type(b).__name__} {b}"[:200]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
    if shapes_only or a.numel() == 0:
        return ""
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return ""
    if not (a.is_floating_point() or a.is_complex()):
        return f"{int((~same).sum())} of {a.numel()} elements differ"
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf).max()
    size = torch.where(x.isfinite(), x.abs(), 0.0).max()
    if float(error) <= _RTOL.get(a.dtype, _COARSE) * max(float(size), 1e-3):
        return ""
    return f"differs by {float(error):.1e} of {float(size):.1e}"
