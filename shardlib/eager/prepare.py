"""Prepares a call of one op: as a call on local shards if the operands fit, else as a program that reshards."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from shardlib.compiler.codegen.op_callables import callable_of
from shardlib.core.aten.functional_forms import to_shard_call
from shardlib.core.aten.op_traits import has_trait, is_view
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.torch_internals.strided_only import refuse_unstrided
from shardlib.core.torch_internals.torch_private import FakeTensorMode, pytree
from shardlib.distributed.provenance import record_origin, result_origin
from shardlib.distributed.turn_errors import hash_texts
from shardlib.eager.arg_slots import (
    choose_device,
    extract_tensors,
    fill_slots,
    freeze_args,
    iterate_numbers,
    lift_numbers,
    list_tensors,
    replace_devices,
    requested_devices,
    special_numbers_key,
)
from shardlib.eager.compile_op import CompiledOp, Operand, compile_op
from shardlib.eager.fits_locally import LocalFit, fit_locally
from shardlib.eager.infer_meta import Outcome, recall_outcome, remember_outcome, similarity_key
from shardlib.eager.local_call import LocalCall
from shardlib.frontend.retarget_device import with_device
from shardlib.rules.rule import Call, Meta
from shardlib.rules.table import rule_for
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.axis import first_replicas
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor import view_aliases
from shardlib.tensor.eager_cache import OPS_KEYED_BY_NUMBER_TYPE, Runner
from shardlib.tensor.local_shards import place_scalar
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import ViewStep

COMPILE_LOCK = threading.RLock()  # one op is compiled at a time


class PreparedCall:
    """A call to be compiled: its tensors, and its other arguments with a `Slot` for each tensor."""

    def __init__(self, op: Any, args: Any, kwargs: dict[str, Any], mesh: Mesh) -> None:
        self.op, self.mesh = op, mesh
        self.tensors: list[torch.Tensor] = []
        args, kwargs = extract_tensors((list(args), kwargs), self.tensors)
        self.sharded = [isinstance(x, ShardedTensor) for x in self.tensors]
        requested = requested_devices(args, kwargs)
        self.device = choose_device(self.tensors[self.sharded.index(True)].__dict__["_form"].device, requested)
        if requested:
            args, kwargs = replace_devices((args, kwargs), self.device)
        if self.device.type != "cpu":  # new tensors without a device would go to the CPU
            tupled, kwargs = with_device(op, tuple(args), kwargs, self.device)
            args = list(tupled)
        self.args, self.kwargs = args, kwargs
        self.forms = [operand_form(x, mesh, self.device) for x in self.tensors]

    def meta(self) -> Any:
        """Returns the results as meta tensors."""
        return infer_results(self.op, self.args, self.kwargs, self.forms, self.device)

    def run_like_similar(self) -> Runner | None:
        """Returns `run_locally` with the outcome of a similar call; None if there is none, or an operand must move."""
        if is_view(self.op) or has_trait(self.op, "device_shapes") or not self._has_complete_operands:
            return None
        op, args, kwargs, forms, device = self.op, self.args, self.kwargs, self.forms, self.device
        outcome = recall_outcome(
            similarity_key(op, args, kwargs, forms), lambda: infer_results(op, args, kwargs, forms, device)
        )
        return None if outcome is None else self._call_on_shards(outcome)

    def run_locally(self, meta: Any, write: bool = False) -> Runner | None:
        """Returns a call of the op on the local shards; None if an operand must be resharded first.

        With `write`, the result becomes the first argument's value, and must have its layout and dtype.
        """
        if not self._has_complete_operands:
            return None
        refuse_unstrided(f"{self.op} outside jit", [("its result", x) for x in pytree.tree_leaves(meta)])
        outcome = Outcome.from_results(meta)
        if not is_view(self.op) and not has_trait(self.op, "device_shapes"):
            remember_outcome(similarity_key(self.op, self.args, self.kwargs, self.forms), outcome)
        return self._call_on_shards(outcome, write)

    @property
    def number(self) -> int:
        """On ranks, a number for the op and the arguments in its key; else 0."""
        if self.mesh.kind != "distributed":
            return 0
        loose = id(self.op) in OPS_KEYED_BY_NUMBER_TYPE
        keyed = pytree.tree_map(
            lambda x: type(x) if loose and isinstance(x, int | float | complex) else x, (self.args, self.kwargs)
        )
        return hash_texts(str(self.op), repr(keyed))

    @property
    def _has_complete_operands(self) -> bool:
        """True if the op draws no random numbers and reads no partial sum."""
        return not _draws_random(self.op) and not any(f.layout.pending for f in self.forms)

    def _call_on_shards(self, outcome: Outcome, write: bool = False) -> Runner | None:
        target, args, kwargs = to_shard_call(self.op, self.args, self.kwargs, lambda: outcome.first.shape)
        if (fits := self._fit(target, args, kwargs, outcome)) is None:
            return None
        memory = outcome.memory or ((None, 0),) * len(outcome.metas)
        forms = [
            Form.intern(layout, self.mesh, m.dtype, self.device, names, strides, offset) if m is not None else None
            for m, (layout, names), (strides, offset) in zip(outcome.metas, fits.results, memory, strict=True)
        ]
        if write:
            old, (new,) = self.forms[args[0].index], forms
            if new is None or new.layout.canonical != old.layout.canonical or new.dtype != old.dtype:
                return None
        devices, spread = _distinct_devices(self.mesh, fits)
        ints = {path: i for i, (path, _, _) in enumerate(fits.ints)}
        run = partial(_absent, forms, outcome.kind, self.mesh) if self.mesh.is_elsewhere else callable_of(target)
        call = LocalCall(run, self.sharded, ints, devices, spread, id(self.op) in OPS_KEYED_BY_NUMBER_TYPE)
        return call.build(args, kwargs, forms, outcome.kind, write, self.number)

    def _fit(self, target: Any, args: list[Any], kwargs: dict[str, Any], outcome: Outcome) -> LocalFit | None:
        metas = tuple(Meta(tuple(f.shape), f.dtype) for f in self.forms)
        rule = rule_for(
            Call(target, fill_slots(args, metas, tuple), fill_slots(kwargs, metas, tuple), metas, outcome.metas)
        )
        return None if rule is None else fit_locally(rule, self.forms)

    def run_program(self) -> Runner:
        """Returns a program of the op that reshards operands first."""
        mesh, loose, program = self.mesh, id(self.op) in OPS_KEYED_BY_NUMBER_TYPE, self.number
        operands = [Operand(form, plain=not sharded) for form, sharded in zip(self.forms, self.sharded, strict=True)]
        op = self.op
        programs: BoundedCache[Any, CompiledOp] = BoundedCache(64)

        def run(args: Any, kwargs: Any) -> Any:
            numbers = list(iterate_numbers((args, kwargs))) if loose else []
            compiled = programs.get(key := special_numbers_key(numbers))
            if compiled is None:
                compiled = programs[key] = PreparedCall(op, args, kwargs or {}, mesh).compiled(operands)
            tensors = list_tensors((args, kwargs))
            origin = result_origin(program, tensors, numbers) if program else 0
            out = wrap_results(compiled, compiled([get_local_shards(x, mesh) for x in tensors], numbers, origin))
            record_origin(origin, out)
            return pytree.tree_unflatten(out, compiled.tree)

        return run

    def compiled(self, operands: Sequence[Operand]) -> CompiledOp:
        """Returns the op's program; numbers that only enter its arithmetic are inputs."""
        args, kwargs = self.args, self.kwargs
        if id(self.op) in OPS_KEYED_BY_NUMBER_TYPE:
            args, kwargs = lift_numbers((args, kwargs))
        with COMPILE_LOCK:
            return compile_op(self.op, args, kwargs, operands, self.mesh)

    def record_views(self, run: Runner) -> Runner:
        """Wraps the call of a view op so that its results share memory with the first argument."""
        if not is_view(self.op):
            return run
        step: ViewStep = (
            self.op,
            freeze_args(self.args[1:]),
            tuple((k, freeze_args(x)) for k, x in self.kwargs.items()),
            None,
        )

        def view(args: Any, kwargs: Any) -> Any:
            with view_aliases.match_inference_mode(args[0]):
                out = run(args, kwargs)
            if type(out) is ShardedTensor:
                view_aliases.note_view(args[0], out, (step,))
            else:
                for i, x in enumerate(out):
                    view_aliases.note_view(args[0], x, ((*step[:3], i),))
            return out

        return view


def infer_results(op: Any, args: Any, kwargs: dict[str, Any], forms: Sequence[Form], device: torch.device) -> Any:
    values = [form.abstract() for form in forms]
    is_device_dependent = has_trait(op, "device_shapes") or (
        has_trait(op, "device_dtypes") and any(f.dtype.itemsize < 4 for f in forms)
    )
    if device.type == "cpu" and not is_device_dependent:
        if requested_devices(args, kwargs):
            args, kwargs = replace_devices((args, kwargs), torch.device("meta"))
        return op(*fill_slots(args, values), **fill_slots(kwargs, values))
    with FakeTensorMode():
        values = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in values]
        return op(*fill_slots(args, values), **fill_slots(kwargs, values))


@cache
def _draws_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def operand_form(x: torch.Tensor, mesh: Mesh, device: torch.device) -> Form:
    """Returns an operand's form; a plain tensor is replicated."""
    if isinstance(x, ShardedTensor):
        return x._form
    return Form.intern(Layout.replicated(x.shape), mesh, x.dtype, device, None, x.stride())


def get_local_shards(x: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    if isinstance(x, ShardedTensor):
        return x._locals
    x = x.detach().to("meta") if mesh.is_elsewhere else place_scalar(x.detach(), mesh)
    return (x,) * (mesh.stage_size if mesh.kind == "virtual" else 1)


def wrap_results(compiled: CompiledOp, results: Sequence[Any]) -> list[Any]:
    """Returns the op's own results as ShardedTensors and constants."""
    own = zip(results[: compiled.own], compiled.results, strict=False)
    return [x if form is None else wrap(form, x) for x, form in own]


def run_replicated(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs the op on gathered tensors; its results are replicated."""
    tensors: list[torch.Tensor] = []
    args, kwargs = extract_tensors((args, kwargs), tensors)
    form = next(x for x in tensors if isinstance(x, ShardedTensor))._form
    full = [x.full_tensor() if isinstance(x, ShardedTensor) else x for x in tensors]
    out = op(*fill_slots(args, full), **fill_slots(kwargs, full))
    return pytree.tree_map_only(torch.Tensor, lambda x: replicate_plain(x, form), out)


def replicate_plain(x: torch.Tensor, like: Form) -> ShardedTensor:
    """Places a plain tensor, which every process has whole, on the mesh of `match_inference_mode`."""
    form = Form.intern(Layout.replicated(x.shape), like.mesh, x.dtype, like.device, None, x.stride())
    return wrap(form, get_local_shards(x, like.mesh))


def _absent(forms: Sequence[Form | None], kind: Any, mesh: Mesh, *_: Any, **__: Any) -> Any:
    """Returns one device's results of an op that another stage runs: their shapes, without memory."""
    (coords,) = mesh.own_coords()
    shards = [
        None if form is None else torch.empty(form.layout.local_shape(coords), dtype=form.dtype, device="meta")
        for form in forms
    ]
    return shards[0] if kind is None else shards


def _distinct_devices(mesh: Mesh, fits: LocalFit) -> tuple[list[tuple[int, tuple[int, ...]]], list[int]]:
    """Returns one device per distinct result with its local sizes, and for every device the index of that one."""
    coords = mesh.own_coords()
    first = first_replicas(coords, fits.axes)
    different = list(dict.fromkeys(first))
    return [(d, fits.local_ints(coords[d])) for d in different], [different.index(d) for d in first]
