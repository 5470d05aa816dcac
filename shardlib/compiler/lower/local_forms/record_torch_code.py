"""Records local forms that are torch code: runs them on tensors without values.

Devices with shards of the same sizes take the same steps, so the code runs once for each kind of device. Integers that
differ by device become `Sym`s in the recording. Any other difference is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardlib.compiler.lower.local_forms.recording import JoinedCall, Recording, Ref, local_form_error
from shardlib.compiler.program.abstract_device import REFUSALS, Local, frozen, results_of
from shardlib.compiler.program.steps import Var
from shardlib.compiler.program.sym_int import Sym, apart, everywhere, local_value, table
from shardlib.core.aten.op_names import PAD, SLICE
from shardlib.core.aten.op_traits import has_trait, returns_list
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import TorchDispatchMode, pytree, schema_of, without_modes
from shardlib.primitives.body import Body, enter_body
from shardlib.primitives.form_dims import Piece
from shardlib.rules.rule import Rule
from shardlib.rules.table import user_rule_text
from shardlib.sharding.mesh.axis import Axis, Coords

if TYPE_CHECKING:
    from shardlib.compiler.lower.local_forms.local_builder import LocalForm

# Code of the library's local forms, for all plans. The entry holds the rule, because the key has the rule's id.
_LIBRARY_CODE: BoundedCache[Any, tuple[Rule, Recording]] = BoundedCache(1 << 10)


def record_code(local: LocalForm, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Emits the calls of `function` with these arguments; returns its results. See `rules.rule.Local.run`."""
    flat, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    key = None if user_rule_text(local.call.target) else (*local.key, *map(_argument_key, flat), tree)
    if key is None or (entry := _LIBRARY_CODE.get(key)) is None:
        entry = local.rule, _record(local, function, flat, tree)
        if key is not None and not local.counts_messages:
            _LIBRARY_CODE[key] = entry
    return entry[1].write(local, flat)


def _argument_key(x: Any) -> Any:
    if isinstance(x, Var):
        return x.layout, x.dtype
    return (type(x), repr(x)) if isinstance(x, int | float | complex) else x


def _record(local: LocalForm, function: Callable[..., Any], flat: Sequence[Any], tree: Any) -> Recording:
    """Runs the code once for each kind of device; returns what all of them do."""
    uneven = [f for f in local.rule.sizes if isinstance(local.size(f), Sym)]
    differ = {a for f in uneven for a in local.axes(f)} | {a for x in flat if isinstance(x, Sym) for a in x.axes}
    kinds: dict[Any, _Run] = {}
    on: dict[tuple[int, ...], _Run] = {}  # by device
    queried: dict[Sym, None] = {}  # numbers that the code queried, in order
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        if local.counts_messages:
            first = _Run(local, local.origin).record(function, flat, _on_device(flat, local.origin), tree)
            if not any(has_trait(call.op, "per_device") for call in first.calls):
                return _join_runs((), [first])  # other devices send nothing either
        while True:
            axes, runs = apart([*differ, *(a for n in queried for a in n.axes)]), []
            for at in everywhere(axes):
                coords = {**local.origin, **at}
                inputs = _on_device(flat, coords)
                numbers = [local_value(n, coords) for n in queried]
                key, device = repr((inputs, numbers)), tuple(coords.values())
                if key not in kinds:
                    if device not in on:
                        on[device] = _Run(local, coords).record(function, flat, inputs, tree)
                    kinds[key] = on[device]
                runs.append(kinds[key])
                if not runs[-1].queried.keys() <= queried.keys():
                    break  # new numbers may divide the devices into more kinds
            else:
                break
            queried |= runs[-1].queried
    _check(local, list({id(run): run for run in runs}.values()))
    return _join_runs(axes, runs)


def _on_device(flat: Sequence[Any], coords: Coords) -> list[Any]:
    """Returns the arguments on one device, with shapes in place of variables."""
    return [x.layout.local_shape(coords) if isinstance(x, Var) and x.layout else local_value(x, coords) for x in flat]


class _Call(NamedTuple):
    """One recorded call; tensors among its arguments and results are references."""

    op: Any
    args: Any
    kwargs: Any
    out: Any


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of the code on one device."""

    def __init__(self, local: LocalForm, coords: Coords) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.local, self.coords = local, coords
        self.calls: list[_Call] = []
        self.held: list[Local] = []  # forms of all tensors
        self.results: Any = None
        self.guesses = False  # True if a form in `held` comes from the rule, not from torch
        self.queried: dict[Sym, None] = {}  # numbers that differ by device, and that the code queried
        self._refs: dict[int, tuple[Ref, Tensor]] = {}

    def record(self, function: Callable[..., Any], flat: Sequence[Any], inputs: Sequence[Any], tree: Any) -> _Run:
        """Runs the code; `inputs` has shapes in place of the variables in `flat`."""
        pairs = zip(flat, inputs, strict=True)
        leaves = [self.new(Local.dense(n, x.dtype)) if isinstance(x, Var) else n for x, n in pairs]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        ways = {f: self.local.ways(f) for f in self.local.factors}
        like = self.new(Local.dense((), torch.int64))
        with enter_body(Body(None, tuple(ways), like, form=self, dims=ways)), self:
            try:
                results = function(*args, **kwargs)
            except ShardingError:
                raise
            except REFUSALS as error:
                raise self.fault("fails", [f"{type(error).__name__}: {error}"]) from error
        self.results = self.noted(results)
        return self

    def piece(self, name: str) -> Piece:
        return Piece(self._query(self.local.offset(name)), self.share(name), self.local.rule.sizes.get(name, 1))

    def share(self, name: str) -> int:
        return self._query(self.local.size(name))

    def shares(self, name: str) -> list[int]:
        return self.local.shares(name)

    def place(self, name: str) -> int:
        return self._query(self.local.position(name))

    def _query(self, n: Sym | int) -> int:
        if isinstance(n, Sym):
            self.queried[n] = None
        return int(local_value(n, self.coords))

    def new(self, x: Local) -> Tensor:
        """Returns a new tensor without values."""
        tensor = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
        self._refs[id(tensor)] = Ref(len(self.held)), tensor
        self.held.append(x)
        return tensor

    def noted(self, x: Any) -> Any:
        """Returns an argument with references in place of tensors."""
        if isinstance(x, Tensor):
            if id(x) not in self._refs:
                offender = f"a tensor of shape {list(x.shape)} is no operand, and not made of any"
                raise self.fault("reads what no program has", [offender], "pass it to the op, or use numbers")
            return self._refs[id(x)][0]
        if isinstance(x, list | tuple):
            return [*map(self.noted, x)]
        if isinstance(x, dict):
            return {k: self.noted(y) for k, y in x.items()}
        return self.local.device if isinstance(x, torch.device) else x

    def local_value(self, x: Any) -> Any:
        return self.held[x.n] if isinstance(x, Ref) else frozen(x, self.local_value)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if schema_of(op).is_mutable:
            raise self.fault("writes to a tensor", [str(op)], "use the op that returns a new one")
        if torch.Tag.nondeterministic_seeded in op.tags and not has_trait(op, "per_device"):
            raise self.fault("draws random numbers", [str(op)], "draw them outside, and pass them to the op")
        args, kwargs = self.noted(args), self.noted(kwargs or {})
        results: Sequence[Local | None] = results_of(op, self.local_value(args), self.local_value(kwargs))
        if not results:
            results, self.guesses = self._unknown(op), True
        out = [None if x is None else self.new(x) for x in results] if schema_of(op).returns else []
        self.calls.append(_Call(op, args, kwargs, self.noted(out)))
        if returns_list(op):
            return out
        return tuple(out) if len(out) > 1 else out[0] if out else None

    def _unknown(self, op: Any) -> Sequence[Local | None]:
        """Returns the forms of results without a meta kernel: for the op itself, the rule knows the shapes."""
        if op is not self.local.call.target:
            raise NotImplementedError(f"{op} has no form for tensors without values: torch.library.register_fake")
        every = enumerate(self.local.call.results)
        return [None if m is None else Local.dense(_shape(self.local, self.coords, i), m.dtype) for i, m in every]

    def fault(self, fault: str, offenders: Sequence[str], remedy: str = "") -> ShardingError:
        return local_form_error(self.local, fault, offenders, remedy)


def _shape(local: LocalForm, coords: Coords, result: int) -> tuple[int, ...]:
    """Returns the shape of a device's shard of a result."""
    return tuple(math.prod(local_value(local.size(f), coords) for f in dim) for dim in local.rule.results[result])


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(local: LocalForm, runs: Sequence[_Run]) -> None:
    """Checks that all devices take the same steps, and that results are shards of the rule's results."""
    for k, calls in enumerate(zip(*(run.calls for run in runs), strict=False)):
        if len({(len(c.args), *c.kwargs) for c in calls}) > 1:  # torch omits arguments that equal their defaults
            for run in runs:
                run.calls[k] = _with_defaults(run.calls[k])
    first, *rest = runs
    mine = _steps(first) if rest else []
    for run in rest:
        for a, b in zip(mine, _steps(run), strict=False):
            if a != b:
                raise local_form_error(
                    local, "takes other steps on other devices", [f"{a} on the first", f"{b} on another"]
                )
        if len(run.calls) != len(first.calls):
            raise local_form_error(
                local, "takes more steps on some devices", [f"{len(first.calls)} and {len(run.calls)}"]
            )
    wrong = [fault for run in runs for fault in _unlike(local, run)]
    if wrong:
        raise local_form_error(local, "makes other results than the rule says", list(dict.fromkeys(wrong)))


def _with_defaults(call: _Call) -> _Call:
    """Returns the call with all its arguments."""
    args, kwargs = list(call.args), {}
    for a in schema_of(call.op).arguments[len(args) :]:
        value = call.kwargs.get(a.name, a.default_value)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return call._replace(args=args, kwargs=kwargs)


def _steps(run: _Run) -> list[str]:
    """Returns the calls and results as text, with `n` for every integer."""

    def text(x: Any) -> str:
        if isinstance(x, Ref):
            return f"%{x.n}"
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(text, x))}]"
        return "n" if type(x) is int else repr(x)

    def called(c: _Call) -> str:
        arguments = [*map(text, c.args), *(f"{k}={text(v)}" for k, v in c.kwargs.items())]
        return f"{c.op}({', '.join(arguments)}) -> {', '.join(map(text, c.out))}"

    return [*map(called, run.calls), f"return {text(run.results)}"]


def _unlike(local: LocalForm, run: _Run) -> Iterator[str]:
    if has_trait(local.call.target, "device_shapes"):
        return  # the device decides the shapes of the results
    results = run.results if isinstance(run.results, tuple | list) else [run.results]
    wanted = local.call.results
    if len(results) != len(wanted):
        yield f"{len(results)} results, not {len(wanted)}"
        return
    for i, (ref, meta) in enumerate(zip(results, wanted, strict=True)):
        if meta is None:
            continue
        if not isinstance(ref, Ref):
            yield f"result {i} is {ref!r}, no tensor"
            continue
        x = run.held[ref.n]
        shape = _shape(local, run.coords, i)
        if x.shape != shape or x.dtype != meta.dtype:
            yield f"result {i} is {list(x.shape)} of {x.dtype}, not {list(shape)} of {meta.dtype}"


# --- joined runs ------------------------------------------------------------------------------------------------------


def _join_runs(axes: tuple[Axis, ...], runs: Sequence[_Run]) -> Recording:
    """Joins the runs, one for every position along `axes`; all take the same steps."""

    def joined(each: Sequence[Any]) -> Any:
        """Merges an argument of all devices; integers that differ become `Sym`s."""
        first = each[0]
        if isinstance(first, list | tuple):
            return [joined(x) for x in zip(*each, strict=True)]
        if isinstance(first, dict):
            return {k: joined([x[k] for x in each]) for k in first}
        return table(axes, each) if type(first) is int else first

    joined_calls = []
    for calls in zip(*(run.calls for run in runs), strict=True):
        op, out = calls[0].op, calls[0].out
        shape, nbytes = (), 0
        if has_trait(op, "per_device"):
            before, after = ([run.held[ref.n] for run in runs] for ref in (calls[0].args[0], out[0]))
            shape = tuple(joined([x.shape for x in before]))
            nbytes = max(math.prod(x.shape) for x in after) * after[0].dtype.itemsize
        joined_calls.append(
            JoinedCall(
                op,
                joined([c.args for c in calls]),
                joined([c.kwargs for c in calls]),
                tuple(ref and runs[0].held[ref.n] for ref in out),
                all(map(_returns_operand, runs, calls)),
                shape,
                nbytes,
            )
        )
    return Recording(tuple(joined_calls), joined([run.results for run in runs]))


def _returns_operand(run: _Run, call: _Call) -> bool:
    if run.guesses:
        return False
    if call.op is SLICE:
        before, after = (run.held[ref.n].shape for ref in (call.args[0], call.out[0]))
        return bool(before == after)
    return call.op is PAD and not any(call.args[1])
