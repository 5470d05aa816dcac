"""Torch code as recorded on all devices, and how it is written into the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardlib.compiler.lower.local_forms import emit_halo
from shardlib.compiler.program.abstract_device import Local
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import Sym, of_member, place_in
from shardlib.core.aten.op_names import FILLED, VIEW
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import schema_of
from shardlib.sharding.mesh.axis import Axis, group_size

if TYPE_CHECKING:
    from shardlib.compiler.lower.local_forms.local_builder import LocalForm

_HALOS = {"fetch": emit_halo.fetch, "give_back": emit_halo.give_back}


@dataclass(frozen=True)
class Ref:
    """The n-th tensor that the code created."""

    n: int


@dataclass(frozen=True)
class JoinedCall:
    """One call of all devices: tensors are references, and integers that differ by device are `Sym`s."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[Local | None, ...]  # on the first device
    returns_operand: bool = False  # a full slice, or an empty pad
    shape: tuple[Sym | int, ...] = ()  # of what a collective sends
    nbytes: int = 0  # of a collective's result, on the device that holds most


@dataclass(frozen=True)
class Recording:
    """The calls of the code, and its results. It depends on no variable, so equal ops share one."""

    calls: tuple[JoinedCall, ...]
    results: Any

    def write(self, local: LocalForm, flat: Sequence[Any]) -> Any:
        """Emits the calls, with the variables among the arguments `flat`; returns the results."""
        values: list[Any] = [x for x in flat if isinstance(x, Var)]
        values += values[:1]  # the tensor `like` of a body

        def resolve(x: Any) -> Any:
            if isinstance(x, Ref):
                return values[x.n]
            if isinstance(x, list):
                return [*map(resolve, x)]
            return {k: resolve(y) for k, y in x.items()} if isinstance(x, dict) else x

        for call in self.calls:
            args, kwargs = resolve(call.args), resolve(call.kwargs)
            if call.returns_operand:
                values.append(args[0])
            elif has_trait(call.op, "per_device"):
                values.append(_communicate(local, call, args))
            else:
                values += _write_call(local, call, args, kwargs)
        return resolve(self.results)


def _write_call(local: LocalForm, call: JoinedCall, args: list[Any], kwargs: dict[str, Any]) -> list[Var]:
    """Emits a call; returns its results that are tensors."""
    write = partial(local.emit, call.op, tuple(args), kwargs, call.results)
    if call.op is VIEW:  # equal views of a value are one view, so that ops on them share its borders
        source, shape = args
        results = tuple(map(local.now, local.once((VIEW, local.now(source), tuple(shape)), write)))
    else:
        results = write()
    return [x for x, form in zip(results, call.results, strict=True) if form is not None]


def _communicate(local: LocalForm, call: JoinedCall, args: list[Any]) -> Var:
    """Emits a collective along factors of the rule, over the axes that shard them."""
    source: Var = args[0]
    names, *rest = args[1:]
    axes = Axis.merge(a for f in names for a in local.axes(f))
    kind, n = schema_of(call.op).name.removeprefix("shardlib::manual_"), group_size(axes)
    if kind in _HALOS:
        dim, *ranges, name = rest
        rows = emit_halo.Slab(local, names[0], dim, name, source, call.shape)
        pairs = (
            [local.calc(lambda low, high: (low, high), *r) for r in zip(n[::2], n[1::2], strict=True)] for n in ranges
        )
        return _HALOS[kind](rows, *pairs)
    if kind == "axis_index":
        index: tuple[Any, ...] = source, [], place_in(axes)
        return local.emit(FILLED, index, {"dtype": torch.int64}, [Local.dense((), torch.int64)])[0]
    if n == 1 and (kind != "ppermute" or rest[0]):
        return source  # to itself
    members = [[of_member(size, axes, i) for i in range(n)] for size in call.shape]
    if kind == "gather":
        return local.communicate("all_gather", names, source, members, rest, call.nbytes)
    if wrong := [m for m in members if len(set(m)) > 1]:
        offenders = [f"of a dim they have {', '.join(map(str, sizes))}" for sizes in wrong]
        raise local_form_error(local, f"hands pieces that differ in size to {kind}", offenders, "pad them to one size")
    return local.communicate(kind, names, source, members, rest, call.nbytes)


def local_form_error(local: LocalForm, fault: str, offenders: Sequence[str], remedy: str = "") -> ShardingError:
    return ShardingError(
        f"the local form of {local.call.target} {fault}",
        offenders,
        rule="it is torch code for one device, which makes the pieces of the results, and takes the same steps on all",
        remedy=remedy or "let nothing but arguments and shapes decide what it does; it never sees values",
    )
