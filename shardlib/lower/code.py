"""Local forms that are torch code: run on tensors without values, and written down as steps.

Devices whose pieces have the same sizes take the same steps, so the code runs once for every kind of device. Where the
whole numbers differ that it passes to torch, the steps' arguments are `Sym`s; whatever else differs is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardlib.aten.calls import FILLED
from shardlib.aten.traits import has
from shardlib.errors import ShardingError
from shardlib.internals import TorchDispatchMode, memory_of, pytree, schema_of, without_modes
from shardlib.manual.body import Body, Piece, entered
from shardlib.meshes.axis import Axis, Coords
from shardlib.program.device import REFUSALS, Local
from shardlib.program.steps import Var
from shardlib.program.sym import Sym, apart, everywhere, here, of_member, place_in

if TYPE_CHECKING:
    from shardlib.lower.local import LocalForm

_META = torch.device("meta")


def code(local: LocalForm, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The values of the program that `function` gives for these arguments; see `rules.rule.Local.run`."""
    flat, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    axes = apart(a for f in local.rule.sizes for a in local.axes(f))
    kinds: dict[str, _Run] = {}
    runs: list[_Run] = []  # of each device
    for coords in everywhere(axes):
        given = [x.layout.local_shape(coords) if isinstance(x, Var) and x.layout else here(x, coords) for x in flat]
        key = repr(given)
        if key not in kinds or kinds[key].asked:
            kinds[key] = _Run(local, coords).of(function, flat, given, tree)
        runs.append(kinds[key])
    _check(local, list({id(run): run for run in runs}.values()))
    return _write(local, flat, axes, runs)


@dataclass(frozen=True)
class _Ref:
    """A tensor of the code: the n-th that there was."""

    n: int


class _Made(NamedTuple):
    """One call: its arguments, and the results, as references."""

    op: Any
    args: Any
    kwargs: Any
    out: Any


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What the code does on one device."""

    def __init__(self, local: LocalForm, coords: Coords) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.local, self.coords = local, coords
        self.calls: list[_Made] = []
        self.tensors: list[Tensor] = []
        self.results: Any = None
        self.asked = False  # where its pieces lie
        self._known: dict[int, _Ref] = {}

    def of(self, function: Callable[..., Any], flat: Sequence[Any], given: Sequence[Any], tree: Any) -> _Run:
        """Run it on operands of the shapes in `given`."""
        given = [
            torch.empty(n, dtype=x.dtype, device=_META) if isinstance(x, Var) else _moved(n, _META)
            for x, n in zip(flat, given, strict=True)
        ]
        for x in given:
            self.made(x)
        args, kwargs = pytree.tree_unflatten(given, tree)
        ways = {f: self.local.ways(f) for f in self.local.factors}
        like = torch.empty((), device=_META)
        body = Body(None, tuple(ways), like, piece=self.piece, dims=ways)
        self.made(like)
        with without_modes(), torch.no_grad(), entered(body), _META, self:
            try:
                found = function(*args, **kwargs)
            except ShardingError:
                raise
            except REFUSALS as error:
                raise self.fault("fails", [f"{type(error).__name__}: {error}"]) from error
        self.results = pytree.tree_map(self.reference, found)
        return self

    def piece(self, name: str) -> Piece:
        self.asked = True
        size, offset = (here(n, self.coords) for n in (self.local.size(name), self.local.offset(name)))
        return Piece(offset, size, self.local.rule.sizes.get(name, 1))

    def made(self, x: Any) -> Any:
        """The reference of what is there from now on."""
        if not isinstance(x, Tensor):
            return x
        self.tensors.append(x)
        self._known[id(x)] = ref = _Ref(len(self.tensors) - 1)
        return ref

    def reference(self, x: Any) -> Any:
        """The reference of what is there."""
        if not isinstance(x, Tensor):
            return _moved(x, self.local.device) if x == _META else x
        if id(x) not in self._known:
            what = [f"a tensor of shape {list(x.shape)} is no operand, and not made of any"]
            raise self.fault("reads what no program has", what, "pass it to the op, or use numbers")
        return self._known[id(x)]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if schema_of(op).is_mutable:
            raise self.fault("writes to a tensor", [str(op)], "use the op that returns a new one")
        given = pytree.tree_map(self.reference, (list(args), dict(kwargs or {})))
        try:
            out = op(*args, **(kwargs or {}))
        except NotImplementedError:
            if op is not self.local.call.target:
                raise
            out = self._expected()  # for the op itself, on pieces, the rule says it
        self.calls.append(_Made(op, given[0], given[1], pytree.tree_map(self.made, out)))
        return out

    def _expected(self) -> Any:
        """The pieces of the results."""
        found = [
            None if m is None else torch.empty(_shape(self.local, self.coords, i), dtype=m.dtype, device=_META)
            for i, m in enumerate(self.local.call.results)
        ]
        return tuple(found) if len(found) > 1 else found[0]

    def fault(self, what: str, offenders: Sequence[str], remedy: str = "") -> ShardingError:
        return _fault(self.local, what, offenders, remedy)


def _shape(local: LocalForm, coords: Coords, result: int) -> tuple[int, ...]:
    """What a device has of a result."""
    return tuple(math.prod(here(local.size(f), coords) for f in dim) for dim in local.rule.results[result])


def _moved(x: Any, device: torch.device) -> Any:
    return device if isinstance(x, torch.device) else x


def _fault(local: LocalForm, what: str, offenders: Sequence[str], remedy: str = "") -> ShardingError:
    return ShardingError(
        f"the local form of {local.call.target} {what}",
        offenders,
        rule="it is torch code for one device, which makes the pieces of the results, and takes the same steps on all",
        remedy=remedy or "sl.prove(op, *args) proves it",
    )


# --- what has to be the same ------------------------------------------------------------------------------------------


def _check(local: LocalForm, runs: Sequence[_Run]) -> None:
    """The same steps on all devices, and results that are pieces."""
    for k, calls in enumerate(zip(*(run.calls for run in runs), strict=False)):
        if len({(len(c.args), *c.kwargs) for c in calls}) > 1:  # torch leaves out an argument that has its default
            for run in runs:
                run.calls[k] = _whole(run.calls[k])
    first, *rest = runs
    mine = _steps(first)
    for run in rest:
        for a, b in zip(mine, _steps(run), strict=False):
            if a != b:
                raise _fault(local, "takes other steps on other devices", [f"{a} on the first", f"{b} on another"])
        if len(run.calls) != len(first.calls):
            raise _fault(local, "takes more steps on some devices", [f"{len(first.calls)} and {len(run.calls)}"])
    wrong = [fault for run in runs for fault in _unlike(local, run)]
    if wrong:
        raise _fault(local, "makes other results than the rule says", list(dict.fromkeys(wrong)))


def _whole(call: _Made) -> _Made:
    """The call with all its arguments."""
    args, kwargs = list(call.args), {}
    for a in schema_of(call.op).arguments[len(args) :]:
        value = call.kwargs.get(a.name, a.default_value)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return call._replace(args=args, kwargs=kwargs)


def _steps(run: _Run) -> list[str]:
    """Its calls and results, with `n` for every whole number."""

    def said(x: Any) -> str:
        if isinstance(x, _Ref):
            return f"%{x.n}"
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(said, x))}]"
        if isinstance(x, dict):
            return f"[{', '.join(f'{k}={said(v)}' for k, v in x.items())}]"
        return "n" if type(x) is int else repr(x)

    every = [f"{c.op}({said(c.args)}, {said(c.kwargs)}) -> {said(c.out)}" for c in run.calls]
    return [*every, f"return {said(run.results)}"]


def _unlike(local: LocalForm, run: _Run) -> Iterator[str]:
    if has(local.call.target, "other shapes"):
        return  # whose results are what the device says
    found = run.results if isinstance(run.results, tuple | list) else [run.results]
    wanted = local.call.results
    if len(found) != len(wanted):
        yield f"{len(found)} results, not {len(wanted)}"
        return
    for i, (ref, meta) in enumerate(zip(found, wanted, strict=True)):
        if meta is None:
            continue
        if not isinstance(ref, _Ref):
            yield f"result {i} is {ref!r}, no tensor"
            continue
        x = run.tensors[ref.n]
        shape = _shape(local, run.coords, i)
        if tuple(x.shape) != shape or x.dtype != meta.dtype:
            yield f"result {i} is {list(x.shape)} of {x.dtype}, not {list(shape)} of {meta.dtype}"


# --- steps ------------------------------------------------------------------------------------------------------------


def _write(local: LocalForm, flat: Sequence[Any], axes: tuple[Axis, ...], runs: Sequence[_Run]) -> Any:
    """Write what all of them do; `runs` has one for every position along `axes`."""
    values: list[Any] = [x for x in flat if isinstance(x, Var)]
    values += values[:1]  # what stands for the device

    def joined(each: Sequence[Any]) -> Any:
        """An argument, as it is on each device."""
        first = each[0]
        if isinstance(first, _Ref):
            return values[first.n]
        if isinstance(first, list | tuple):
            return [joined(x) for x in zip(*each, strict=True)]
        if isinstance(first, dict):
            return {k: joined([x[k] for x in each]) for k in first}
        return first if type(first) is not int or len(set(each)) == 1 else Sym("at", (axes, tuple(each)))

    for calls in zip(*(run.calls for run in runs), strict=True):
        call, tensors = calls[0], runs[0].tensors
        args, kwargs = joined([c.args for c in calls]), joined([c.kwargs for c in calls])
        made = [tensors[ref.n] for ref in _refs(call.out)]
        if has(call.op, "per device"):
            before, after = ([tuple(run.tensors[ref.n].shape) for run in runs] for ref in (call.args[0], call.out))
            nbytes = max(map(math.prod, after)) * made[0].element_size()
            values.append(_communicate(local, call.op, args, joined(before), nbytes))
        else:
            operands = {memory_of(tensors[ref.n].untyped_storage()) for ref in _refs((call.args, call.kwargs))}
            values += local.emit(call.op, tuple(args), kwargs, [Local.of(x, operands) for x in made])
    return joined([run.results for run in runs])


def _refs(tree: Any) -> list[_Ref]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, _Ref)]


def _communicate(local: LocalForm, op: Any, args: Sequence[Any], before: Sequence[Sym | int], nbytes: int) -> Var:
    """Write a collective along dims of the rule, over the axes that cut them here."""
    source: Var = args[0]
    names, *rest = args[1:]
    axes = Axis.merge(a for f in names for a in local.axes(f))
    kind, n = schema_of(op).name.removeprefix("shardlib::manual_"), math.prod(a.size for a in axes)
    if kind == "axis_index":
        args = source, [], place_in(axes)
        return local.emit(FILLED, args, {"dtype": torch.int64}, [Local.dense((), torch.int64)])[0]
    if n == 1 and (kind != "ppermute" or rest[0]):
        return source  # to itself
    members = [[of_member(size, axes, i) for i in range(n)] for size in before]
    if wrong := [m for m in members if len(set(m)) > 1]:
        what = [f"of a dim they have {', '.join(map(str, sizes))}" for sizes in wrong]
        raise _fault(local, f"hands pieces that differ in size to {kind}", what, "pad them to one size")
    return local.communicate(kind, names, source, members, rest, nbytes)
