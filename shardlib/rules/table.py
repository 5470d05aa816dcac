"""The table of all rules, its lookup, and the registration of users' rules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar, overload

from shardlib import rules
from shardlib.core.aten.op_traits import has_trait
from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.context import rule_registrations
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import (
    CUSTOM_OPS,
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    op_of_custom,
    schema_of,
)
from shardlib.rules.dtype_sums import drop_inexact_sums
from shardlib.rules.iteration_space import tensor_arguments
from shardlib.rules.notation import REDUCED, Pattern, parse
from shardlib.rules.out_variants import full_name, op_named, writers
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Rule, RuleFn
from shardlib.rules.tensor_ops import pointwise
from shardlib.tensor.eager_cache import PROGRAMS


def _modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(rules.__path__, "shardlib.rules."):
        if module.name != __name__ and not module.ispkg:
            yield importlib.import_module(module.name)


FAMILIES = [module for module in _modules() if hasattr(module, "ROWS")]

Op = TypeVar("Op")


def _table() -> dict[str, RuleFn]:
    table: dict[str, RuleFn] = {}
    for family in FAMILIES:
        for name, row in family.ROWS.items():
            assert full_name(name) not in table, f"two rules for {name}"
            table[full_name(name)] = pattern(row) if isinstance(row, str) else row
    return table


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the ops that are traced as other ops: `DECOMPOSED` of the families, with in-place and out= variants."""
    forms: dict[Any, Callable[..., Any]] = {}
    variants: dict[Any, Callable[..., Any]] = {}
    for family in FAMILIES:
        for name, form in getattr(family, "DECOMPOSED", {}).items():
            assert full_name(name) not in TABLE, f"{name} has a rule and a decomposition"
            op = op_named(name)
            forms[op] = form
            variants.update(writers(op, form))
    return variants | forms


TABLE: dict[str, RuleFn] = _table()
DECOMPOSITIONS = _decompositions()
_POINTWISE_ROW = pointwise.pointwise()
_CACHE: BoundedCache[Any, Rule | None] = BoundedCache(1 << 11)


def rule_for(call: Call) -> Rule | None:
    """Returns the rule of one call; None if there is none, and the op runs replicated."""
    by_device = has_trait(call.target, "device_shapes")  # one process may plan for GPUs and for CPUs
    key = (call.key, call.results) if by_device else call.key
    try:
        return _CACHE[key]
    except KeyError:
        pass
    function = row(call.target)
    rule = function(call) if function else None
    _CACHE[key] = rule = drop_inexact_sums(rule, call) if rule else None
    return rule


def row(target: Any) -> RuleFn | None:
    """Returns the row of the table that covers an op."""
    if not isinstance(target, OpOverload):
        return None
    name = _name(target)
    if name in _USER_RULES and not user_rule_text(target):
        return None
    return TABLE.get(name) or (_POINTWISE_ROW if pointwise.is_pointwise(target) else None)


def _name(target: OpOverload) -> str:
    return str(target.name())  # type: ignore[no-untyped-call]


_USER_RULES: dict[str, tuple[str, Any]] = {}  # op -> the text of the user's rule, and the definition that it belongs to


def user_rules(targets: Iterable[Any]) -> list[str]:
    """Returns the names and texts of users' rules for these ops."""
    ops = [_name(x) for x in targets if isinstance(x, OpOverload)]
    return [f"{name}, {_USER_RULES[name][0]!r}" for name in dict.fromkeys(ops) if name in _USER_RULES]


def user_rule_text(target: Any) -> str:
    """Returns the text of the user's rule for an op; empty if there is none, or the op has been defined again since."""
    name = _name(target)
    text, definition = _USER_RULES.get(name, ("", None))
    return text if definition is _definition(name) else ""


def _definition(name: str) -> Any:
    """Returns the current definition of an op, if `torch.library.custom_op` made it."""
    return CUSTOM_OPS.get(name.partition(".")[0])


@overload
def rule(text: str, /, *, local: Callable[..., Any] | None = None) -> Callable[[Op], Op]: ...


@overload
def rule(op: Any, /) -> str: ...


def rule(text: Any, /, *, local: Callable[..., Any] | None = None) -> Any:
    """Registers the sharding rule of a custom op, in the notation of `shardlib.rules.notation`.

    The decorated op is a result of `torch.library.custom_op` or an `OpOverload`, and is returned. A factor that a
    result lacks stays whole unless the rule says how it is reduced (`k:sum`). `sl.prove(op, *args)` proves the rule.
    With an op instead of a text, the function returns the op's rule, or a hint on what to write.

    `local` is torch code that a device runs instead of the op while a dim marked `:local` is sharded. It takes the op's
    arguments, with shards for tensors, and returns the shards of its results. It communicates along the names of dims,
    by `sl.psum(x, "k")` and the like; `sl.piece("k")` returns the range of this device's elements.

    Raises:
        ShardingError: the text is not in the notation, or does not fit the op's schema; a dim is marked `:local` and
            there is no local form, or the reverse.

    Example:
        >>> import torch
        >>> @rule("... m k, k n -> ... m n | k:sum {0} {1}")
        ... @torch.library.custom_op("docs::product", mutates_args=())
        ... def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ...     return a @ b
        >>> rule(product)
        '... m k, k n -> ... m n | k:sum {0} {1}'
    """
    if not isinstance(text, str) and local is None:
        return _rule_or_hint(overload_of(text))
    parsed = parse(text)

    def register(op: Op) -> Op:
        overload = overload_of(op)
        if wrong := [*_schema_faults(overload, parsed), *_note_faults(overload, parsed, local)]:
            raise ShardingError(
                f"rule({text!r}) does not fit {_name(overload)}",
                wrong,
                rule="one term for every tensor argument and every result of an op without side effects",
            )
        emit = local and (lambda builder: builder.run(local, *builder.args, **builder.kwargs))
        TABLE[_name(overload)] = pattern(text, emit=emit, skips_empty_results=False)
        _USER_RULES[_name(overload)] = text, _definition(_name(overload))
        _CACHE.clear()
        PROGRAMS.clear()
        rule_registrations.again()
        return op

    return register


def _schema_faults(op: OpOverload, rule: Pattern) -> Iterator[str]:
    schema, tensors = schema_of(op), tensor_arguments(op)
    if tensors is None:
        yield "it takes a list of tensors"
    elif len(tensors) != len(rule.operands):
        yield f"it takes {len(tensors)} tensors, the rule has {len(rule.operands)} operands"
    if any("List[" in str(r.type) for r in schema.returns):
        yield "it returns a list of tensors"
    if len(schema.returns) != len(rule.results):
        yield f"it returns {len(schema.returns)} values, the rule has {len(rule.results)} results"
    if schema.is_mutable:
        yield "it writes to an argument"


def _note_faults(op: OpOverload, rule: Pattern, local: Callable[..., Any] | None) -> Iterator[str]:
    marked = [note for note in rule.notes if note.word == "local"]
    if marked and local is None:
        yield f"`{marked[0]}` needs a local form: sl.rule(text, local=function)"
    if local is not None and not marked:
        yield "it has a local form, and no dim is marked for it: `k:local`"
    read = [(f"`{note}`", note.argument) for note in rule.notes]
    read += [(f"`{note}`", n) for note in rule.notes for n in note.extent or () if not n.isdecimal()]
    read += [(f"`[{rule.named}]`", rule.named)]
    names = {a.name for a in schema_of(op).arguments}
    for text, n in dict.fromkeys(read):
        if n and n.partition(".")[0] not in names:
            yield f"{text} names no argument of the op"
    for note in rule.notes:
        if note.other:
            yield f"`{note}` is for the library's own rules"
    yield from _idle_notes(rule)
    kinds = {note.word for note in rule.notes if note.word in REDUCED}
    if len(kinds) > 1:
        yield f"it reduces by {' and '.join(sorted(kinds))}: a result has one kind of partial sum"


def _idle_notes(rule: Pattern) -> Iterator[str]:
    """Yields the notes without effect: a reduction of a dim that every result has, and a local form never used."""
    reduced = {note.factors for note in rule.notes if note.word in (*REDUCED, "none")}
    for note in rule.notes:
        f = note.factors
        is_held = [f in t.names for t in rule.results]
        if note.word in (*REDUCED, "none") and all(is_held):
            yield f"`{note}` is of a dim that every result has: nothing is left to reduce"
        elif note.word == "local" and not all(is_held) and f not in reduced:
            yield f"`{note}` is never sharded: a result lacks it, and there is no `{f}:sum` or `{f}:none`"


def _rule_or_hint(target: OpOverload) -> str:
    """Returns the user's rule for an op, or a hint on what to write."""
    if text := user_rule_text(target):
        return text
    operands = ", ".join(f"<dims of {a.name}>" for a in schema_of(target).arguments if "Tensor" in str(a.type))
    results = ", ".join(f"<dims of {r.name or f'result {i}'}>" for i, r in enumerate(schema_of(target).returns))
    return (
        f'@sl.rule("{operands} -> {results}"), where each dim has a name, and one name is one dim. A dim that no '
        "result has is reduced (| k:sum, k:max, k:min) or stays whole; k:halo(n) is read n elements to both sides; {0} "
        "says that the op is linear in operand 0; _ is a dim that stays whole, ... are leading dims of any number"
    )


def overload_of(op: Any, purpose: str = "given a rule") -> OpOverload:
    """Returns the overload of a custom op, or of a packet with one overload."""
    if isinstance(op, CustomOpDef):
        op = op_of_custom(op)
    if isinstance(op, OpOverloadPacket) and list(op) == ["default"]:
        op = op.default
    if not isinstance(op, OpOverload):
        raise ShardingError(
            f"{op!r} cannot be {purpose}",
            rule="rules belong to ops of torch.library",
            remedy='put `@sl.rule("...")` above `@torch.library.custom_op(...)`, or pass torch.ops.<name>.<op>.default',
        )
    return op
