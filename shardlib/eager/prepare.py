"""A call of one op, made ready: as a call on the pieces where its operands fit, as a program where something moves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from shardlib.eager import aliases
from shardlib.eager.aliases import Step
from shardlib.eager.caller import caller
from shardlib.eager.fit import Fit, fit
from shardlib.eager.single import Operand, Single, single
from shardlib.eager.slots import filled, frozen, moved, numbers_of, slotted, tensors_of
from shardlib.eager.warm import LOOSE, Run
from shardlib.form import Form
from shardlib.layout import Layout
from shardlib.mesh import Mesh
from shardlib.rules.rule import Call, Meta
from shardlib.rules.table import rule_for
from shardlib.run.codegen import fast_binding
from shardlib.tensor import ShardedTensor, wrap
from shardlib.views import is_view

aten = torch.ops.aten

# What these return beside their first result has another shape on every kind of device,
_BY_DEVICE = frozenset(
    {aten._embedding_bag.default, aten._embedding_bag_forward_only.default, aten.log_sigmoid_forward.default}
)
# and these another dtype, where their operands have 16 bits.
_BY_DTYPE = frozenset(
    {
        aten.native_layer_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update_functional.default,
    }
)

LOCK = threading.RLock()  # one op is made ready at a time


class Prepared:
    """One call that is to be made ready: its tensors apart from the rest of its arguments."""

    def __init__(self, op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> None:
        self.op, self.mesh = op, mesh
        self.tensors: list[torch.Tensor] = []
        args, kwargs = slotted((list(args), kwargs), self.tensors)
        self.device = next(x for x in self.tensors if isinstance(x, ShardedTensor))._form.device
        self.args, self.kwargs = moved(args, self.device), moved(kwargs, self.device)
        self.sharded = [isinstance(x, ShardedTensor) for x in self.tensors]
        self.forms = [form_of(x, mesh, self.device) for x in self.tensors]

    def meta(self) -> Any:
        """The results, as meta tensors."""
        args, kwargs = moved((self.args, self.kwargs), torch.device("meta"))
        values = [form.abstract() for form in self.forms]
        short = any(form.dtype.itemsize < 4 for form in self.forms)
        if self.op not in _BY_DEVICE and not (short and self.op in _BY_DTYPE):
            return self.op(*filled(args, values), **filled(kwargs, values))
        with FakeTensorMode():
            values = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device) for x in values]
            return self.op(*filled(args, values), **filled(kwargs, values))

    def direct(self, meta: Any, write: bool = False) -> Run | None:
        """The op called on the pieces as they are; None where something must move first.

        With `write`, the result becomes the first argument's value, and has to fit it.
        """
        if torch.Tag.nondeterministic_seeded in self.op.tags or any(f.layout.pending for f in self.forms):
            return None
        target, args, kwargs = _dimwise(self.op, self.args, self.kwargs, meta)
        results, kind = ([meta], None) if not isinstance(meta, list | tuple) else (list(meta), type(meta))
        if (fits := self._fit(target, args, kwargs, results)) is None:
            return None
        forms = [
            Form.of(layout, self.mesh, x.dtype, self.device, names, x.stride(), int(x.storage_offset()))
            if isinstance(x, torch.Tensor)
            else None
            for x, (layout, names) in zip(results, fits.results, strict=True)
        ]
        if write:
            old, (new,) = self.forms[args[0].index], forms
            if new is None or new.layout.canonical != old.layout.canonical or new.dtype != old.dtype:
                return None
        devices, spread = _devices(self.mesh, fits)
        put = {path: i for i, (path, _, _) in enumerate(fits.ints)}
        loose = id(self.op) in LOOSE
        return caller(fast_binding(target), args, kwargs, self.sharded, forms, kind, put, devices, spread, loose, write)

    def _fit(self, target: Any, args: list[Any], kwargs: dict[str, Any], results: Sequence[Any]) -> Fit | None:
        metas = tuple(Meta(tuple(f.shape), f.dtype) for f in self.forms)
        made = tuple(Meta(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in results)
        rule = rule_for(Call(target, filled(args, metas, tuple), filled(kwargs, metas, tuple), metas, made))
        return None if rule is None else fit(rule, self.forms)

    def program(self) -> Run:
        """The op in a program that moves what must be moved; numbers are part of the program, so one for each."""
        made: dict[Any, Single] = {}
        op, mesh, loose = self.op, self.mesh, id(self.op) in LOOSE
        operands = [Operand(form) for form in self.forms]

        def run(args: Any, kwargs: Any) -> Any:
            key = tuple(map(repr, numbers_of((args, kwargs)))) if loose else ()
            ready = made.get(key)
            if ready is None:
                now = Prepared(op, args, kwargs or {}, mesh)
                with LOCK:
                    ready = made[key] = single(op, now.args, now.kwargs, operands, mesh)
            results = ready([pieces(x, mesh) for x in tensors_of((args, kwargs))])
            return pytree.tree_unflatten(wrapped(ready, results), ready.tree)

        return run

    def viewing(self, run: Run) -> Run:
        """Note whose memory the results show, where the op makes views."""
        if not is_view(self.op):
            return run
        step: Step = (self.op, frozen(self.args[1:]), tuple((k, frozen(x)) for k, x in self.kwargs.items()), None)
        paths = [(step,)], lambda i: ((*step[:3], i),)

        def view(args: Any, kwargs: Any) -> Any:
            out = run(args, kwargs)
            if type(out) is ShardedTensor:
                aliases.view(args[0], out, paths[0][0])
            else:
                for i, x in enumerate(out):
                    aliases.view(args[0], x, paths[1](i))
            return out

        return view


def form_of(x: torch.Tensor, mesh: Mesh, device: torch.device) -> Form:
    """The form of a tensor among the operands; every device has a plain one whole."""
    if isinstance(x, ShardedTensor):
        return x._form
    return Form.of(Layout.replicated(x.shape), mesh, x.dtype, device, None, x.stride())


def pieces(x: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """What this process holds of a tensor."""
    if isinstance(x, ShardedTensor):
        return x._locals
    return (x.detach(),) * (mesh.size if mesh.kind == "virtual" else 1)


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


def _dimwise(op: Any, args: list[Any], kwargs: dict[str, Any], meta: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """The same op without strides and marks, which say nothing about pieces."""
    if op in _RESHAPES:
        return aten.reshape.default, [args[0], list(meta.shape)], {}
    if op in _PHYSICAL:
        return _PHYSICAL[op], args, kwargs
    if op is aten.new_empty_strided.default:
        return aten.new_empty.default, args[:2], kwargs
    return _AT_ONCE.get(op, op), args, kwargs


# A bit that says "conjugate me when you are read" is not for pieces, whose bytes travel.
_AT_ONCE = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
# A conjugate that is only marked as one would be lost: the marks of pieces are not the tensor's.
_PHYSICAL = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}


def _devices(mesh: Mesh, fits: Fit) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """The devices of this process that compute something different, and which of them each device agrees with."""
    coords = mesh.all_coords() if mesh.kind == "virtual" else [mesh.coords(mesh.rank)]
    seen: dict[tuple[int, ...], int] = {}
    devices: list[tuple[int, tuple[int, ...]]] = []
    spread = []
    for d, c in enumerate(coords):
        where = tuple(a.coord(c) for a in fits.axes)
        if where not in seen:
            seen[where] = len(devices)
            devices.append((d, fits.local_ints(c)))
        spread.append(seen[where])
    return devices, spread
