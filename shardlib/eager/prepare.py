"""A call of one op, made ready: as a call on the pieces where its operands fit, as a program where something moves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.core.aten.functional_forms import on_pieces
from shardlib.core.aten.op_traits import has, is_view
from shardlib.core.bounded_cache import Bounded
from shardlib.core.strided_only import refuse_others
from shardlib.core.torch_private import FakeTensorMode, pytree
from shardlib.distributed.provenance import made, note
from shardlib.distributed.turn_errors import number
from shardlib.eager.arg_slots import (
    devices_of,
    filled,
    frozen,
    made_on,
    moved,
    numbers_of,
    slotted,
    specials_of,
    tensors_of,
    with_scalars,
)
from shardlib.eager.compile_op import Operand, Single, single
from shardlib.eager.fits_locally import Fit, fit
from shardlib.eager.infer_meta import Outcome, likeness, recall, remember
from shardlib.eager.local_call import caller
from shardlib.frontend.retarget_device import placed
from shardlib.rules.rule import Call, Meta
from shardlib.rules.table import rule_for
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import alike
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import view_aliases
from shardlib.tensor.eager_cache import LOOSE, Run
from shardlib.tensor.local_shards import there
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import Step

LOCK = threading.RLock()  # one op is made ready at a time


class Prepared:
    """One call that is to be made ready: its tensors apart from the rest of its arguments."""

    def __init__(self, op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> None:
        self.op, self.mesh = op, mesh
        self.tensors: list[torch.Tensor] = []
        args, kwargs = slotted((list(args), kwargs), self.tensors)
        self.sharded = [isinstance(x, ShardedTensor) for x in self.tensors]
        asked = devices_of(args, kwargs)
        self.device = made_on(self.tensors[self.sharded.index(True)].__dict__["_form"].device, asked)
        if asked:
            args, kwargs = moved((args, kwargs), self.device)
        if self.device.type != "cpu":  # where torch would make something that no device is said for
            tupled, kwargs = placed(op, tuple(args), kwargs, self.device)
            args = list(tupled)
        self.args, self.kwargs = args, kwargs
        self.forms = [form_of(x, mesh, self.device) for x in self.tensors]

    def meta(self) -> Any:
        """The results, as meta tensors."""
        return _meta(self.op, self.args, self.kwargs, self.forms, self.device)

    def as_before(self) -> Run | None:
        """`direct` by what calls like this one gave; None where there was none yet, or something must move first."""
        if is_view(self.op) or has(self.op, "other shapes") or not self._settled:
            return None
        op, args, kwargs, forms, device = self.op, self.args, self.kwargs, self.forms, self.device
        outcome = recall(likeness(op, args, kwargs, forms), lambda: _meta(op, args, kwargs, forms, device))
        return None if outcome is None else self._direct(outcome)

    def direct(self, meta: Any, write: bool = False) -> Run | None:
        """The op called on the pieces as they are; None where something must move first.

        With `write`, the result becomes the first argument's value, and has to fit it.
        """
        if not self._settled:
            return None
        refuse_others(f"{self.op} outside jit", [("its result", x) for x in pytree.tree_leaves(meta)])
        outcome = Outcome.of(meta)
        if not is_view(self.op) and not has(self.op, "other shapes"):
            remember(likeness(self.op, self.args, self.kwargs, self.forms), outcome)
        return self._direct(outcome, write)

    @property
    def number(self) -> int:
        """On ranks, what stands for the op and what the key says of its arguments; else 0."""
        if self.mesh.kind != "distributed":
            return 0
        loose = id(self.op) in LOOSE
        said = pytree.tree_map(
            lambda x: type(x) if loose and isinstance(x, int | float | complex) else x, (self.args, self.kwargs)
        )
        return number(str(self.op), repr(said))

    @property
    def _settled(self) -> bool:
        """Whether the op's results are a function of complete values."""
        return not _draws(self.op) and not any(f.layout.pending for f in self.forms)

    def _direct(self, outcome: Outcome, write: bool = False) -> Run | None:
        target, args, kwargs = on_pieces(self.op, self.args, self.kwargs, lambda: outcome.first.shape)
        if (fits := self._fit(target, args, kwargs, outcome)) is None:
            return None
        memory = outcome.memory or ((None, 0),) * len(outcome.metas)
        forms = [
            Form.of(layout, self.mesh, m.dtype, self.device, names, strides, offset) if m is not None else None
            for m, (layout, names), (strides, offset) in zip(outcome.metas, fits.results, memory, strict=True)
        ]
        if write:
            old, (new,) = self.forms[args[0].index], forms
            if new is None or new.layout.canonical != old.layout.canonical or new.dtype != old.dtype:
                return None
        devices, spread = _devices(self.mesh, fits)
        put = {path: i for i, (path, _, _) in enumerate(fits.ints)}
        loose, function, kind = id(self.op) in LOOSE, callable_of(target), outcome.kind
        made = devices, spread, loose, write, self.number
        return caller(function, args, kwargs, self.sharded, forms, kind, put, *made)

    def _fit(self, target: Any, args: list[Any], kwargs: dict[str, Any], outcome: Outcome) -> Fit | None:
        metas = tuple(Meta(tuple(f.shape), f.dtype) for f in self.forms)
        rule = rule_for(Call(target, filled(args, metas, tuple), filled(kwargs, metas, tuple), metas, outcome.metas))
        return None if rule is None else fit(rule, self.forms)

    def program(self) -> Run:
        """The op in a program that moves what must be moved."""
        mesh, loose, program = self.mesh, id(self.op) in LOOSE, self.number
        operands = [Operand(form, plain=not here) for form, here in zip(self.forms, self.sharded, strict=True)]
        op = self.op
        programs: Bounded[Any, Single] = Bounded(64)

        def run(args: Any, kwargs: Any) -> Any:
            numbers = list(numbers_of((args, kwargs))) if loose else []
            ready = programs.get(key := specials_of(numbers))
            if ready is None:
                ready = programs[key] = Prepared(op, args, kwargs or {}, mesh).compiled(operands)
            tensors = tensors_of((args, kwargs))
            origin = made(program, tensors, numbers) if program else 0
            out = wrapped(ready, ready([pieces(x, mesh) for x in tensors], numbers, origin))
            note(origin, out)
            return pytree.tree_unflatten(out, ready.tree)

        return run

    def compiled(self, operands: Sequence[Operand]) -> Single:
        """Returns the op's program; numbers that only enter its arithmetic are inputs, those of `numbers_of`."""
        args, kwargs = self.args, self.kwargs
        if id(self.op) in LOOSE:
            args, kwargs = with_scalars((args, kwargs))
        with LOCK:
            return single(self.op, args, kwargs, operands, self.mesh)

    def viewing(self, run: Run) -> Run:
        """Note whose memory the results show, where the op makes views."""
        if not is_view(self.op):
            return run
        step: Step = (self.op, frozen(self.args[1:]), tuple((k, frozen(x)) for k, x in self.kwargs.items()), None)
        paths = [(step,)], lambda i: ((*step[:3], i),)

        def view(args: Any, kwargs: Any) -> Any:
            with view_aliases.like(args[0]):
                out = run(args, kwargs)
            if type(out) is ShardedTensor:
                view_aliases.view(args[0], out, paths[0][0])
            else:
                for i, x in enumerate(out):
                    view_aliases.view(args[0], x, paths[1](i))
            return out

        return view


def _meta(op: Any, args: Any, kwargs: dict[str, Any], forms: Sequence[Form], device: torch.device) -> Any:
    values = [form.abstract() for form in forms]
    otherwise = has(op, "other shapes") or (has(op, "other dtypes") and any(f.dtype.itemsize < 4 for f in forms))
    if device.type == "cpu" and not otherwise:
        if devices_of(args, kwargs):
            args, kwargs = moved((args, kwargs), torch.device("meta"))
        return op(*filled(args, values), **filled(kwargs, values))
    with FakeTensorMode():
        values = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in values]
        return op(*filled(args, values), **filled(kwargs, values))


@cache
def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def form_of(x: torch.Tensor, mesh: Mesh, device: torch.device) -> Form:
    """The form of a tensor among the operands; every device has a plain one whole."""
    if isinstance(x, ShardedTensor):
        return x._form
    return Form.of(Layout.replicated(x.shape), mesh, x.dtype, device, None, x.stride())


def pieces(x: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """What this process holds of a tensor."""
    if isinstance(x, ShardedTensor):
        return x._locals
    x = there(x.detach(), mesh)
    return (x,) * (mesh.size if mesh.kind == "virtual" else 1)


def wrapped(ready: Single, results: Sequence[Any]) -> list[Any]:
    """The op's own results."""
    own = zip(results[: ready.own], ready.results, strict=False)
    return [x if form is None else wrap(form, x) for x, form in own]


def whole(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The plain op on whole tensors, on every device alike; its results are replicated."""
    tensors: list[torch.Tensor] = []
    args, kwargs = slotted((args, kwargs), tensors)
    form = next(x for x in tensors if isinstance(x, ShardedTensor))._form
    full = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in tensors]
    out = op(*filled(args, full), **filled(kwargs, full))

    return pytree.tree_map_only(torch.Tensor, lambda x: replicated(x, form), out)


def replicated(x: torch.Tensor, beside: Form) -> ShardedTensor:
    """A plain tensor that every process has whole, on the mesh of another one."""
    form = Form.of(Layout.replicated(x.shape), beside.mesh, x.dtype, beside.device, None, x.stride())
    return wrap(form, pieces(x, beside.mesh))


def _devices(mesh: Mesh, fits: Fit) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """The devices of this process that compute something different, and which of them each device agrees with."""
    coords = mesh.own_coords()
    first = alike(coords, fits.axes)
    different = list(dict.fromkeys(first))
    return [(d, fits.local_ints(coords[d])) for d in different], [different.index(d) for d in first]
