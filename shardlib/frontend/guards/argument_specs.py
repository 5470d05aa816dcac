"""Which spec is which argument's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.frontend.guards.flatten_call import Static, arguments_of, is_tensor

_RULE = "in_specs is a tuple with an entry (or None) per positional argument, or a dict by parameter name"


def by_argument(
    fn: Callable[..., Any], name: str, in_specs: Any, positional: int, named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the specs of `(args, named)`: `in_specs` is a tuple with an entry per positional argument, a dict by
    name, or one spec of all.

    Raises `ShardingError` for entries of no argument.
    """
    plain, everything, optional = _parameters(fn)
    if isinstance(in_specs, dict):
        known = [*everything, *(k for k in named if k not in everything)]
        if unknown := [key for key in in_specs if key not in known]:
            raise ShardingError(
                f"{name}: in_specs do not fit the arguments",
                [f"{key!r} is no parameter; they are {', '.join(known) or 'none'}" for key in unknown],
                rule="in_specs is a tuple with an entry per positional argument, or a dict by parameter name",
                remedy="in_specs=({...},) for a first argument that is a dict itself",
            )
        first = tuple(in_specs.get(plain[i]) if i < len(plain) else None for i in range(positional))
        return first, {k: in_specs.get(k) for k in named}
    if not isinstance(in_specs, tuple | list):
        return (in_specs,) * positional, dict.fromkeys(named, in_specs)
    specs = tuple(in_specs)
    total = positional + len(named)
    left_out = [x for x in plain[positional : len(specs)] if x in optional and x not in named]
    if len(specs) > (most := total + len(left_out)):
        raise ShardingError(
            f"{name}: in_specs has {len(specs)} entries, the call has {total} argument{'s' * (total != 1)}",
            [f"{i}: {spec!r}" for i, spec in enumerate(specs[most:], most)],
            rule=_RULE,
            remedy="a spec is one string, 'batch seq', not a tuple of names; in_specs=('batch seq',) for one argument",
        )
    rest = dict(zip(plain[positional:], specs[positional:], strict=False))  # given by name this time
    return (*specs[:positional], *(None,) * (positional - len(specs))), {k: rest.get(k) for k in named}


def refuse_left_out(
    fn: Callable[..., Any], name: str, in_specs: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raises `ShardingError` for arguments with tensors behind the last entry of a tuple.

    An argument without tensors needs no entry, nor does one that is given by name to a parameter with a default.
    """
    if not isinstance(in_specs, tuple | list):
        return
    plain, _, optional = _parameters(fn)
    arguments = dict(zip(arguments_of(fn, len(args), ()), args, strict=True))
    arguments |= {x: named[x] for x in plain[len(args) :] if x in named and x not in optional}
    entries = len(in_specs)
    tensors = {x: [leaf for leaf in pytree.tree_leaves(value) if is_tensor(leaf)] for x, value in arguments.items()}
    if left_out := {x: leaves for x, leaves in [*tensors.items()][entries:] if leaves}:
        raise ShardingError(
            f"{name}: in_specs has {entries} entr{'y' if entries == 1 else 'ies'}, "
            f"the call has {len(arguments)} arguments",
            [
                f"{x} "
                + (f"of shape {list(leaves[0].shape)}" if arguments[x] is leaves[0] else f"with {len(leaves)} tensors")
                + " has no entry"
                for x, leaves in left_out.items()
            ],
            rule=_RULE,
            remedy="write None where the layout is to be inferred: in_specs=('batch seq', None); in a dict, "
            "in_specs={'x': 'batch seq'}, arguments may be left out",
        )


def _parameters(fn: Callable[..., Any]) -> tuple[list[str], list[str], list[str]]:
    """Names of the parameters that may be given by position, of all, and of those with a default."""
    try:
        parameters = list(inspect.signature(_code(fn)).parameters.values())
    except (ValueError, TypeError):  # a builtin
        return [], [], []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variadic]
    plain = [p.name for p in named if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return plain, [p.name for p in named], [p.name for p in named if p.default is not p.empty]


def _code(fn: Any) -> Callable[..., Any]:
    """What has the parameters: of a module, its `forward`."""
    return fn.forward if isinstance(fn, torch.nn.Module) else fn


def describe(leaf: Any) -> str | None:
    """What a leaf is, if it can have no spec."""
    if is_tensor(leaf) or leaf is None:
        return None
    if isinstance(leaf, Static):
        return "a static argument"
    return f"{leaf!r}, which is no tensor" if isinstance(leaf, int | float | str) else f"a {type(leaf).__name__}"


def by_position_and_name(fn: Callable[..., Any], chosen: frozenset[int | str]) -> frozenset[int | str]:
    """Arguments that are chosen by position, also by their names, and the other way round; they may be passed either
    way."""
    if not chosen:
        return chosen
    try:
        parameters = list(inspect.signature(_code(fn)).parameters.values())
    except (ValueError, TypeError):  # a builtin
        return chosen
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    plain = [p.name for p in parameters if p.kind in kinds]
    named = {p.name for p in parameters}
    variadic = {p.kind for p in parameters}
    wrong = [
        f"{x!r} is no {'parameter' if isinstance(x, str) else 'position'}"
        for x in chosen
        if (isinstance(x, str) and x not in named and inspect.Parameter.VAR_KEYWORD not in variadic)
        or (
            isinstance(x, int)
            and not -len(plain) <= x < len(plain)
            and inspect.Parameter.VAR_POSITIONAL not in variadic
        )
    ]
    if wrong:
        raise ShardingError(
            "static or donated arguments are none of the function's",
            sorted(wrong),
            rule=f"they are chosen by name or position among {', '.join(sorted(named)) or 'no parameters'}",
        )
    chosen |= {i + len(plain) for i in chosen if isinstance(i, int) and i < 0}
    chosen |= {plain[i] for i in chosen if isinstance(i, int) and 0 <= i < len(plain)}
    return chosen | {i for i, name in enumerate(plain) if name in chosen}


def argument_of(path: Any) -> int | str:
    """The position or name of the argument that a leaf is in."""
    group, first = path[0], path[1]
    return str(first.key) if group.idx == 1 else int(first.idx)
