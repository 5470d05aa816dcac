"""Numbers among a traced function's arguments: inputs while they only enter arithmetic, else constants.

During a trace such a number is a `TracedNumber`: a float or an int to Python, which records arithmetic and functions of
`math`. In an op of a tensor and a scalar, the op's node refers to the number as a `Scalar`. A comparison returns its
result, and the program then serves only numbers with the same result. Code that needs the value, for a size say, gets
the value, and the program then serves only this value.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from shardlib.core.aten.schemas import traced_values
from shardlib.core.call_scalar import OPERATIONS, Scalar
from shardlib.core.mode_restore import PersistentFunctionMode
from shardlib.core.torch_internals.fake_tensors import make_shape_env
from shardlib.core.torch_internals.torch_private import Source
from shardlib.frontend.guards.host_scalars import HostStep
from shardlib.frontend.guards.number_guards import NumberGuards, source_leaves

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

COMPARISONS = 32  # guards by comparison in one program; further ones guard values


class TracedNumber:
    """A number among the leaves of a call, or one computed from such numbers.

    It has torch's types for symbolic numbers, so that torch functions take it. Its `__class__` is `float` or `int`.
    """

    scalar: Scalar
    numbers: NumberMode

    @staticmethod
    def wrap(scalar: Scalar, numbers: NumberMode) -> Any:
        """Wraps a scalar as the number that Python code sees."""
        kind = type(scalar.hint)
        if kind not in _KINDS:
            numbers.specialize(scalar)
            return scalar.hint
        number = _KINDS[kind].__new__(_KINDS[kind])
        number.__dict__.update(scalar=scalar, numbers=numbers)
        numbers.wrapped.append(weakref.ref(number))
        return number

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.scalar.hint)

    def __bool__(self) -> bool:
        return self.numbers.compare(operator.ne, self, 0)

    @property
    def node(self) -> Any:
        """Returns the symbolic node that torch reads when it takes the number unchanged."""
        return self.numbers.symbol(self.scalar).node

    def specialize(self) -> Any:
        """Returns the value; from now on the program serves only this value."""
        self.numbers.specialize(self.scalar)
        return self.scalar.hint

    def _with(self, op: Any, *args: Any) -> Any:
        if len(args) > 2:
            return pow(*map(specialize, args))  # with a modulus
        if any(type(x) not in _OPERANDS for x in args):
            return NotImplemented
        if op is operator.pow and all(isinstance(x, int) for x in args):  # a negative exponent makes it a float
            args = args[0], specialize(args[1])
        return TracedNumber.wrap(Scalar.apply(op, *map(to_scalar, args)), self.numbers)

    def __divmod__(self, other: Any) -> Any:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return operator.floordiv(other, self), operator.mod(other, self)

    def __hash__(self) -> int:
        return hash(self.specialize())

    # A copy is the number itself, so that a read of the copy is recorded, too.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        return type(self.scalar.hint), (self.specialize(),)


class TracedFloat(TracedNumber, torch.SymFloat):
    """A traced float."""

    def __init__(self) -> None:
        pass


class TracedInt(TracedNumber, torch.SymInt):
    """A traced int."""

    def __init__(self) -> None:
        pass


_KINDS: dict[type, Any] = {float: TracedFloat, int: TracedInt}
_OPERANDS = frozenset({TracedFloat, TracedInt, int, float, bool})


def is_traced_number(x: Any) -> bool:
    """Returns whether `x` is a traced number."""
    return type(x) is TracedFloat or type(x) is TracedInt


def _forward(op: Any) -> Callable[..., Any]:
    return lambda self, *others: self._with(op, self, *others)


def _reflected(op: Any) -> Callable[..., Any]:
    return lambda self, other: self._with(op, other, self)


def _specializing(op: Any) -> Callable[..., Any]:
    return lambda self, *others: op(self.specialize(), *map(specialize, others))


def _comparing(op: Any) -> Callable[..., Any]:
    def compare(self: TracedNumber, other: Any) -> Any:
        return self.numbers.compare(op, self, other) if type(other) in _OPERANDS else op(self.specialize(), other)

    return compare


def _specializing_reflected(op: Any) -> Callable[..., Any]:
    return lambda self, other: op(specialize(other), self.specialize())


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.specialize(), name)(*map(specialize, others))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(TracedNumber, f"__{_name}__", _forward(getattr(operator, _name)))
    setattr(TracedNumber, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(TracedNumber, f"__{_name}__", _forward(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("index", "and_", "or_", "xor", "invert", "lshift", "rshift"):
    setattr(TracedNumber, f"__{_name.rstrip('_')}__", _specializing(getattr(operator, _name)))
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(TracedNumber, f"__r{_name.rstrip('_')}__", _specializing_reflected(getattr(operator, _name)))
for _name, _op in (
    *(("int", int), ("float", float), ("complex", complex), ("str", str), ("repr", repr)),
    *(("round", round), ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)),
    ("format", format),
):
    setattr(TracedNumber, f"__{_name}__", _specializing(_op))
for _name in ("is_integer", "as_integer_ratio", "hex", "conjugate", "bit_length", "to_bytes"):
    setattr(TracedNumber, _name, _method(_name))
for _name in ("real", "imag", "numerator", "denominator"):
    setattr(TracedNumber, _name, property(_specializing(operator.attrgetter(_name))))


@dataclass(frozen=True)
class _Number(Source):
    """The source of a symbol, as torch requires it."""

    label: str

    @property
    def name(self) -> str:
        return self.label


class NumberMode(PersistentFunctionMode):
    """While on, torch functions take traced numbers; with `only_rates`, only learning rates are traced."""

    def __init__(self, only_rates: bool = False) -> None:
        super().__init__()
        self.only_rates = only_rates
        self.specialized: dict[int, Any] = {}  # leaf -> value that Python has read
        self.compared: dict[Scalar, None] = {}  # comparisons, with results as hints
        self.leaf_count = 0  # leaves of the call and of host steps
        self.host_steps: list[HostStep] = []
        self.wrapped: list[weakref.ref[Any]] = []
        self._hints: dict[int, Any] = {}
        self._symbols: dict[Scalar, Any] = {}
        self._scalars: dict[Any, Scalar] = {}  # by symbol

    @cached_property
    def env(self) -> ShapeEnv:
        """Creates torch's symbols lazily: they import most of torch's compiler, which calls without numbers spare."""
        env: ShapeEnv = make_shape_env()
        return env

    def wrap_leaf(self, leaf: int, name: str, value: Any, *, rate: bool = False) -> Any:
        """Returns the number that stands for a leaf of the call during the trace."""
        self._hints[leaf] = value
        if self.only_rates and not rate:
            self.specialized[leaf] = value
            return value
        return TracedNumber.wrap(Scalar.from_leaf(leaf, name, value), self)

    def add_host_step(self, step: HostStep, name: str) -> list[Any]:
        """Adds a host step; returns the numbers that it computes in each call."""
        self.host_steps.append(step)
        self.leaf_count += len(step.varying)
        return [
            self.wrap_leaf(leaf, f"{name}.step()[{i}]", step.results[i], rate=True)
            for leaf, i in enumerate(step.varying, step.first)
        ]

    def specialize(self, scalar: Scalar) -> None:
        """Guards the value of this number; for an int like `n % 4`, the value of the expression only."""
        if scalar.op is not None and type(scalar.hint) is int and len(self.compared) < COMPARISONS:
            self.compared[Scalar.apply(operator.eq, scalar, scalar.hint)] = None
            return
        for leaf in source_leaves(scalar.leaves(), self.host_steps):
            self.specialized[leaf] = self._hints[leaf]

    def guards(self) -> NumberGuards:
        """Returns the guards; comparisons that follow from guarded values are left out."""
        rest = (x for x in self.compared if not self.specialized.keys() >= set(x.leaves()))
        return NumberGuards(self.specialized, tuple(self.host_steps), tuple(rest))

    def compare(self, op: Any, a: Any, b: Any) -> bool:
        """Compares two numbers and guards the result; beyond `COMPARISONS` results, guards the values."""
        comparison = Scalar.apply(op, to_scalar(a), to_scalar(b))
        if len(self.compared) < COMPARISONS:
            self.compared[comparison] = None
        elif comparison not in self.compared:
            self.specialize(comparison)
        return bool(comparison.hint)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(_has_number, args)) or any(map(_has_number, kwargs.values())):
            convert = self._to_symbol if getattr(func, "__name__", "") in _ARITHMETIC else TracedNumber.specialize
            args = tuple(self._convert(x, convert) for x in args)
            kwargs = {k: self._convert(x, convert) for k, x in kwargs.items()}
        return func(*args, **kwargs)

    def _convert(self, x: Any, convert: Callable[[TracedNumber], Any]) -> Any:
        """Converts an argument for torch; numbers in lists, which are sizes or one per tensor, become constants."""
        if is_traced_number(x):
            return convert(x)
        if isinstance(x, list | tuple) and any(map(_has_number, x)):
            return type(x)([self._convert(y, TracedNumber.specialize) for y in x])
        return x

    def _to_symbol(self, x: TracedNumber) -> Any:
        return self.symbol(x.scalar)

    def symbol(self, scalar: Scalar) -> Any:
        """Returns torch's symbol for a scalar: an input of the graph until `inline_scalars`."""
        number = self._symbols.get(scalar)
        if number is None:
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            hint, source = scalar.hint, _Number(f"number{len(self._symbols)}")
            symbol = self.env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            make = self.env.create_symfloatnode if type(hint) is float else self.env.create_symintnode
            number = self._symbols[scalar] = make(symbol, hint=hint, source=source)
            self._scalars[symbol] = scalar
            mode = get_proxy_mode()
            assert mode is not None, "a function is traced"
            proxy = mode.tracer.create_proxy("placeholder", source.name, (), {})
            proxy.node.meta["scalar"] = scalar
            track_tensor_tree(number, proxy, constant=None, tracer=mode.tracer)
        return number

    def inline_scalars(self, gm: fx.GraphModule) -> bool:
        """Replaces symbol nodes by scalars in the arguments of ops; returns whether all are supported expressions."""
        for guard in self.env.guards:
            for symbol in guard.expr.free_symbols:
                self.specialize(self._scalars[symbol])
        scalars: dict[fx.Node, Any] = {}
        for node in list(gm.graph.nodes):
            if "scalar" in node.meta:
                scalars[node] = node.meta["scalar"]
            elif isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                if node.op != "call_function" or node.target not in OPERATIONS or node.kwargs:
                    return False
                scalars[node] = Scalar.apply(node.target, *(scalars.get(x, x) for x in node.args))
                continue
            elif any(type(n) is not int for x in traced_values(node) for n in x.shape):
                return False
            if any(n in scalars for n in node.all_input_nodes):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: scalars.get(n, n))
        for node in reversed(scalars):
            gm.graph.erase_node(node)
        return True


def _has_number(x: Any) -> bool:
    return is_traced_number(x) or (isinstance(x, list | tuple) and any(map(is_traced_number, x)))


def specialize(x: Any) -> Any:
    """Returns the value of a traced number, which becomes a constant; other values unchanged."""
    return x.specialize() if is_traced_number(x) else x


def to_scalar(x: Any) -> Any:
    """Returns the scalar of a traced number; other values unchanged."""
    return x.scalar if is_traced_number(x) else x


class UnsupportedNumbersError(Exception):
    """A graph computes with numbers in a way that programs do not support."""


_NAMES = ("add", "sub", "mul", "div", "truediv", "true_divide", "pow", "eq", "ne", "lt", "le", "gt", "ge", "rsub")
_FOREACH = ("add", "sub", "mul", "div", "pow", "addcmul", "addcdiv", "lerp")
_ARITHMETIC = frozenset(
    {
        *_NAMES,
        *(f"{name}_" for name in _NAMES),
        *(f"__{sign}{name}__" for name in _NAMES for sign in ("", "r", "i")),
        *("multiply", "multiply_", "divide", "divide_", "subtract", "subtract_"),
        *("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"),
        *("addcmul", "addcmul_", "addcdiv", "addcdiv_", "lerp", "lerp_", "where", "masked_fill", "masked_fill_"),
        *("fill_", "full_like", "full", "adam.default"),
        *(f"_foreach_{name}{end}" for name in _FOREACH for end in ("", "_")),
    }
)
