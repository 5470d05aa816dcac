"""All rules in one table, and the look-up."""

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
from shardlib.core.torch_private import CUSTOM_OPS, CustomOpDef, OpOverload, OpOverloadPacket, op_of_custom, schema_of
from shardlib.rules.dtype_sums import fitted
from shardlib.rules.iteration_space import tensor_arguments
from shardlib.rules.notation import REDUCED, Pattern, argument, other, parse, reach
from shardlib.rules.out_variants import full_name, op_named, writers
from shardlib.rules.patterns import pattern
from shardlib.rules.rule import Call, Local, Rule, RuleFn
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
    """Ops that are written as other ops while a function is traced: `DECOMPOSED` of the families, by overload."""
    found: dict[Any, Callable[..., Any]] = {}
    written: dict[Any, Callable[..., Any]] = {}
    for family in FAMILIES:
        for name, form in getattr(family, "DECOMPOSED", {}).items():
            assert full_name(name) not in TABLE, f"{name} has a rule and a decomposition"
            op = op_named(name)
            found[op] = form
            written.update(writers(op, form))
    return written | found


TABLE: dict[str, RuleFn] = _table()
DECOMPOSITIONS = _decompositions()
_BY_TAG = pointwise.pointwise()
_CACHE: BoundedCache[Any, Rule | None] = BoundedCache(1 << 11)


def rule_for(call: Call) -> Rule | None:
    """The rule of one call; None if there is none: the op then runs replicated."""
    other = has_trait(call.target, "device_shapes")  # a plan for GPUs and one for CPUs may be made in one process
    key = (call.key, call.results) if other else call.key
    try:
        return _CACHE[key]
    except KeyError:
        pass
    found = row(call.target)
    rule = found(call) if found else None
    _CACHE[key] = rule = fitted(rule, call) if rule else None
    return rule


def row(target: Any) -> RuleFn | None:
    """The row of the table that covers an op."""
    if not isinstance(target, OpOverload):
        return None
    name = _name(target)
    if name in _OWN and not text_of(target):
        return None
    return TABLE.get(name) or (_BY_TAG if pointwise.is_pointwise(target) else None)


def _name(target: OpOverload) -> str:
    return str(target.name())  # type: ignore[no-untyped-call]


_OWN: dict[str, tuple[str, Any]] = {}  # rules of users, and the definitions of ops that they are for


def own_rules(targets: Iterable[Any]) -> list[str]:
    """The users' rules among those of some ops."""
    ops = [_name(x) for x in targets if isinstance(x, OpOverload)]
    return [f"{name}, {_OWN[name][0]!r}" for name in dict.fromkeys(ops) if name in _OWN]


def text_of(target: Any) -> str:
    """The rule that a user wrote for an op; empty where there is none, or the op has been defined again since."""
    name = _name(target)
    text, definition = _OWN.get(name, ("", None))
    return text if definition is _definition(name) else ""


def _definition(name: str) -> Any:
    """What defines an op of this name now, if `torch.library.custom_op` does."""
    return CUSTOM_OPS.get(name.partition(".")[0])


@overload
def rule(text: str, /, *, local: Callable[..., Any] | None = None) -> Callable[[Op], Op]: ...


@overload
def rule(op: Any, /) -> str: ...


def rule(text: Any, /, *, local: Callable[..., Any] | None = None) -> Any:
    """Register the sharding rule of a custom op, in the notation of `shardlib.rules.notation`.

    `op` is what `torch.library.custom_op` returns, or an `OpOverload`; it is handed back. A factor that a result lacks
    stays whole unless the rule says how it is reduced (`k:sum`). `sl.prove(op, *args)` proves it. Given an op instead
    of a text, it returns the rule that this has, or says what to write.

    `local` is what a device runs instead of the op while a dim marked `:local` is cut: torch code that takes the op's
    arguments, with pieces in place of tensors, and returns the pieces of its results. It communicates along the names
    of dims, by `sl.psum(x, "k")` and the like; `sl.piece("k")` says which elements are here.

    Raises:
        ShardingError: the text is not in the notation, or has not as many operands as the op has tensor arguments;
            a dim is marked `:local` and there is no local form, or the reverse.

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
        return _guide(overload_of(text))
    parsed = parse(text)

    def register(op: Op) -> Op:
        overload = overload_of(op)
        schema = schema_of(overload)
        wrong = []
        tensors = tensor_arguments(overload)
        if tensors is None:
            wrong.append("it takes a list of tensors")
        elif len(tensors) != len(parsed.operands):
            wrong.append(f"it takes {len(tensors)} tensors, the rule has {len(parsed.operands)} operands")
        if any("List[" in str(r.type) for r in schema.returns):
            wrong.append("it returns a list of tensors")
        if len(schema.returns) != len(parsed.results):
            wrong.append(f"it returns {len(schema.returns)} values, the rule has {len(parsed.results)} results")
        if schema.is_mutable:
            wrong.append("it writes to an argument")
        marked = [f for f, kind in parsed.notes if kind == "local"]
        if marked and local is None:
            wrong.append(f"`{marked[0]}:local` needs a local form: sl.rule(text, local=function)")
        if local is not None and not marked:
            wrong.append("it has a local form, and no dim is marked for it: `k:local`")
        read = [(f"`{f}:{kind}`", argument(kind)) for f, kind in parsed.notes]
        read += [(f"`{f}:{k}`", n) for f, k in parsed.notes for n in reach(k) or () if not n.isdecimal()]
        read += [(f"`[{parsed.named}]`", parsed.named)]
        names = {a.name for a in schema.arguments}
        wrong += [
            f"{what} reads an argument that it has not"
            for what, n in dict.fromkeys(read)
            if n and n.partition(".")[0] not in names
        ]
        tied = [(f, kind) for f, kind in parsed.notes if other(kind) and not argument(kind)]
        wrong += [f"`{f}:{kind}` is for the library's own rules" for f, kind in tied]
        kinds = {kind for _, kind in parsed.notes if kind in REDUCED}
        wrong += _idle(parsed)
        if len(kinds) > 1:
            wrong.append(f"it reduces by {' and '.join(sorted(kinds))}: what a result owes is of one kind")
        if wrong:
            raise ShardingError(
                f"rule({text!r}) does not fit {_name(overload)}",
                wrong,
                rule="one term for every tensor argument and every result of an op without side effects",
            )
        TABLE[_name(overload)] = pattern(text, local=local and _calling(local), unasked=False)
        _OWN[_name(overload)] = text, _definition(_name(overload))
        _CACHE.clear()
        PROGRAMS.clear()
        rule_registrations.again()
        return op

    return register


def _idle(rule: Pattern) -> Iterator[str]:
    """What has no effect: a reduction of what every result has, a local form for what is never cut."""
    reduced = {f for f, kind in rule.notes if kind in (*REDUCED, "none")}
    for f, kind in rule.notes:
        is_held = [f in t.names for t in rule.results]
        if kind in (*REDUCED, "none") and all(is_held):
            yield f"`{f}:{kind}` is of a dim that every result has: nothing is left to reduce"
        elif kind == "local" and not all(is_held) and f not in reduced:
            yield f"`{f}:local` is never cut: a result lacks it, and no `{f}:sum` or `{f}:none` says what becomes of it"


def _calling(function: Callable[..., Any]) -> Callable[[Local], Any]:
    return lambda local: local.run(function, *local.args, **local.kwargs)


def _guide(target: OpOverload) -> str:
    """The rule that a user wrote for an op, or what to write."""
    if said := text_of(target):
        return said
    operands = ", ".join(f"<dims of {a.name}>" for a in schema_of(target).arguments if "Tensor" in str(a.type))
    results = ", ".join(f"<dims of {r.name or f'result {i}'}>" for i, r in enumerate(schema_of(target).returns))
    return (
        f'@sl.rule("{operands} -> {results}"), where each dim has a name, and one name is one dim. What no result has '
        "is reduced (| k:sum, k:max, k:min) or stays whole; k:halo(n) is read n elements to both sides; {0} says that "
        "the op is linear in operand 0; _ is a dim that nobody cuts, ... are leading dims of any number"
    )


def overload_of(op: Any, what: str = "given a rule") -> OpOverload:
    """The op that is meant by a custom op, a packet with one overload, or itself."""
    if isinstance(op, CustomOpDef):
        op = op_of_custom(op)
    if isinstance(op, OpOverloadPacket) and list(op) == ["default"]:
        op = op.default
    if not isinstance(op, OpOverload):
        raise ShardingError(
            f"{op!r} cannot be {what}",
            rule="rules belong to ops of torch.library",
            remedy='put `@sl.rule("...")` above `@torch.library.custom_op(...)`, or pass torch.ops.<name>.<op>.default',
        )
    return op
