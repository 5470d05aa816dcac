"""Numbers among a traced function's arguments: inputs where they only enter arithmetic, constants where Python looks.

While a function is traced such a number is a `TracedNumber`: to Python a float or an int, which follows arithmetic.
Where one meets a tensor in an op that takes a scalar, the op's node refers to it (as a `Scalar`). A comparison is
answered, and the trace notes the answer: its program then serves the numbers for which the answer holds. Functions of
`math` follow arithmetic.
Who needs the value (for a size, say) gets it, and the trace notes that it was looked at: its program is for this one.
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
from shardlib.core.fake_tensors import make_shape_env
from shardlib.core.mode_restore import PersistentFunctionMode
from shardlib.core.torch_private import Source
from shardlib.frontend.guards.host_scalars import Hosted
from shardlib.frontend.guards.number_guards import Served, sources

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

COMPARISONS = 32  # whose answers a program is for


class TracedNumber:
    """A number that a call gives, or one computed from such.

    It is of torch's types for numbers of a trace, so that functions of torch take it, and says `float` or `int` where
    Python asks for its class.
    """

    scalar: Scalar
    numbers: Numbers

    @staticmethod
    def of(scalar: Scalar, numbers: Numbers) -> Any:
        """The number of this scalar, as Python code sees it."""
        kind = type(scalar.hint)
        if kind not in _KINDS:
            numbers.look(scalar)
            return scalar.hint
        made = _KINDS[kind].__new__(_KINDS[kind])
        made.__dict__.update(scalar=scalar, numbers=numbers)
        numbers.made.append(weakref.ref(made))
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.scalar.hint)

    def __bool__(self) -> bool:
        return self.numbers.compare(operator.ne, self, 0)

    @property
    def node(self) -> Any:
        """What torch reads where it takes the number as it is."""
        return self.numbers.symbol(self.scalar).node

    def look(self) -> Any:
        """Its value; from now on the program is for this value."""
        self.numbers.look(self.scalar)
        return self.scalar.hint

    def _with(self, op: Any, *args: Any) -> Any:
        if len(args) > 2:
            return pow(*map(plain, args))  # with a modulus
        if any(type(x) not in _OPERANDS for x in args):
            return NotImplemented
        if op is operator.pow and all(isinstance(x, int) for x in args):  # a negative exponent makes it a float
            args = args[0], plain(args[1])
        return TracedNumber.of(Scalar.apply(op, *(x.scalar if is_given(x) else x for x in args)), self.numbers)

    def __divmod__(self, other: Any) -> Any:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return operator.floordiv(other, self), operator.mod(other, self)

    def __hash__(self) -> int:
        return hash(self.look())

    # A copy is the number itself: who looks at it is noted in the same place.

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        return type(self.scalar.hint), (self.look(),)


class GivenFloat(TracedNumber, torch.SymFloat):
    """A float."""

    def __init__(self) -> None:
        pass


class GivenInt(TracedNumber, torch.SymInt):
    """An int."""

    def __init__(self) -> None:
        pass


_KINDS: dict[type, Any] = {float: GivenFloat, int: GivenInt}
_OPERANDS = frozenset({GivenFloat, GivenInt, int, float, bool})


def is_given(x: Any) -> bool:
    """Whether `x` is a number that a call gives."""
    return type(x) is GivenFloat or type(x) is GivenInt


def _forward(op: Any) -> Callable[..., Any]:
    return lambda self, *others: self._with(op, self, *others)


def _reflected(op: Any) -> Callable[..., Any]:
    return lambda self, other: self._with(op, other, self)


def _looking(op: Any) -> Callable[..., Any]:
    return lambda self, *others: op(self.look(), *map(plain, others))


def _comparing(op: Any) -> Callable[..., Any]:
    def compare(self: TracedNumber, other: Any) -> Any:
        return self.numbers.compare(op, self, other) if type(other) in _OPERANDS else op(self.look(), other)

    return compare


def _looking_back(op: Any) -> Callable[..., Any]:
    return lambda self, other: op(plain(other), self.look())


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.look(), name)(*map(plain, others))


def _attribute(name: str) -> Callable[[TracedNumber], Any]:
    return lambda self: getattr(self.look(), name)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(TracedNumber, f"__{_name}__", _forward(getattr(operator, _name)))
    setattr(TracedNumber, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(TracedNumber, f"__{_name}__", _forward(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("index", "and_", "or_", "xor", "invert"):
    setattr(TracedNumber, f"__{_name.rstrip('_')}__", _looking(getattr(operator, _name)))
for _name in ("lshift", "rshift"):
    setattr(TracedNumber, f"__{_name}__", _looking(getattr(operator, _name)))
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(TracedNumber, f"__r{_name.rstrip('_')}__", _looking_back(getattr(operator, _name)))
for _name, _op in (
    *(("int", int), ("float", float), ("complex", complex), ("str", str), ("repr", repr)),
    *(("round", round), ("trunc", math.trunc), ("floor", math.floor), ("ceil", math.ceil)),
    ("format", format),
):
    setattr(TracedNumber, f"__{_name}__", _looking(_op))
for _name in ("is_integer", "as_integer_ratio", "hex", "conjugate", "bit_length", "to_bytes"):
    setattr(TracedNumber, _name, _method(_name))
for _name in ("real", "imag", "numerator", "denominator"):
    setattr(TracedNumber, _name, property(_attribute(_name)))


@dataclass(frozen=True)
class _Number(Source):
    """Where a symbol comes from, for torch."""

    label: str

    @property
    def name(self) -> str:
        return self.label


class Numbers(PersistentFunctionMode):
    """While on, functions of torch take `TracedNumber` numbers; where they are `plain`, only rates are such."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain
        self.looked: dict[int, Any] = {}  # leaf -> value
        self.compared: dict[Scalar, None] = {}  # with answers as hints
        self.last = 0  # leaves of the call, and of
        self.hosted: list[Hosted] = []
        self.made: list[weakref.ref[Any]] = []
        self._hints: dict[int, Any] = {}
        self._symbols: dict[Scalar, Any] = {}
        self._scalars: dict[Any, Scalar] = {}  # by symbol

    @cached_property
    def env(self) -> ShapeEnv:
        """Torch's symbols. (Late: most of torch's compiler comes with them, and a call without numbers needs none.)"""
        made: ShapeEnv = make_shape_env()
        return made

    def give(self, leaf: int, name: str, value: Any, *, rate: bool = False) -> Any:
        """The number at a leaf of the call."""
        self._hints[leaf] = value
        if self.plain and not rate:
            self.looked[leaf] = value
            return value
        return TracedNumber.of(Scalar.from_leaf(leaf, name, value), self)

    def host(self, hosted: Hosted, name: str) -> list[Any]:
        """The numbers that code works out in each call."""
        self.hosted.append(hosted)
        self.last += len(hosted.free)
        return [
            self.give(leaf, f"{name}.step()[{i}]", hosted.made[i], rate=True)
            for leaf, i in enumerate(hosted.free, hosted.first)
        ]

    def look(self, scalar: Scalar) -> None:
        """From now on the program is for the value of this number; of a counter's `n % 4`, for that one of four."""
        if scalar.op is not None and type(scalar.hint) is int and len(self.compared) < COMPARISONS:
            self.compared[Scalar.apply(operator.eq, scalar, scalar.hint)] = None
            return
        for leaf in sources(scalar.leaves(), self.hosted):
            self.looked[leaf] = self._hints[leaf]

    def served(self) -> Served:
        """The calls that the program is for; answers that follow from values are none."""
        rest = (x for x in self.compared if not self.looked.keys() >= set(x.leaves()))
        return Served(self.looked, tuple(self.hosted), tuple(rest))

    def compare(self, op: Any, a: Any, b: Any) -> bool:
        """What `op` says of two numbers; beyond a few such answers, the program is for their values."""
        found = Scalar.apply(op, *(x.scalar if is_given(x) else x for x in (a, b)))
        if len(self.compared) < COMPARISONS:
            self.compared[found] = None
        elif found not in self.compared:
            self.look(found)
        return bool(found.hint)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(_has, args)) or any(map(_has, kwargs.values())):
            top = self._taken_up if getattr(func, "__name__", "") in _ARITHMETIC else TracedNumber.look
            args = tuple(self._taken(x, top) for x in args)
            kwargs = {k: self._taken(x, top) for k, x in kwargs.items()}
        return func(*args, **kwargs)

    def _taken(self, x: Any, top: Callable[[TracedNumber], Any]) -> Any:
        """An argument as torch takes it; in lists stand sizes, or one number for each tensor of a list."""
        if is_given(x):
            return top(x)
        if isinstance(x, list | tuple) and any(map(_has, x)):
            return type(x)([self._taken(y, TracedNumber.look) for y in x])
        return x

    def _taken_up(self, x: TracedNumber) -> Any:
        return self.symbol(x.scalar)

    def symbol(self, scalar: Scalar) -> Any:
        """Torch's symbol for a scalar: an input of the graph, for the time being."""
        found = self._symbols.get(scalar)
        if found is None:
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            hint, source = scalar.hint, _Number(f"number{len(self._symbols)}")
            symbol = self.env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            make = self.env.create_symfloatnode if type(hint) is float else self.env.create_symintnode
            found = self._symbols[scalar] = make(symbol, hint=hint, source=source)
            self._scalars[symbol] = scalar
            mode = get_proxy_mode()
            assert mode is not None, "a function is traced"
            proxy = mode.tracer.create_proxy("placeholder", source.name, (), {})
            proxy.node.meta["scalar"] = scalar
            track_tensor_tree(found, proxy, constant=None, tracer=mode.tracer)
        return found

    def settle(self, gm: fx.GraphModule) -> bool:
        """Write scalars into the arguments of ops, instead of nodes; whether all of them are expressions we know."""
        for guard in self.env.guards:
            for symbol in guard.expr.free_symbols:
                self.look(self._scalars[symbol])
        found: dict[fx.Node, Any] = {}
        for node in list(gm.graph.nodes):
            if "scalar" in node.meta:
                found[node] = node.meta["scalar"]
            elif isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                if node.op != "call_function" or node.target not in OPERATIONS or node.kwargs:
                    return False
                found[node] = Scalar.apply(node.target, *(found.get(x, x) for x in node.args))
                continue
            elif any(type(n) is not int for x in traced_values(node) for n in x.shape):
                return False
            if any(n in found for n in node.all_input_nodes):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: found.get(n, n))
        for node in reversed(found):
            gm.graph.erase_node(node)
        return True


def _has(x: Any) -> bool:
    return is_given(x) or (isinstance(x, list | tuple) and any(map(is_given, x)))


def plain(x: Any) -> Any:
    """A number as it is, for code that keeps it."""
    return x.look() if is_given(x) else x


def scalar_of(x: Any) -> Any:
    """A result of a function: a number that a call gives is what it is computed from."""
    return x.scalar if is_given(x) else x


class NotExpressionsError(Exception):
    """Numbers became more than a program can hold."""


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
