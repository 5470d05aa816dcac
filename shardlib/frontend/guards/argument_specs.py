"""Assigns the entries of `in_specs` to the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.frontend.guards.flatten_call import NO_NAMES, Static, argument_names, is_tensor, signature_names

_RULE = "in_specs is a tuple with an entry (or None) per positional argument, or a dict by parameter name"


def specs_by_argument(
    fn: Callable[..., Any], name: str, in_specs: Any, positional: int, named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the specs of `(args, named)`: `in_specs` is a tuple with an entry per positional argument, a dict by
    name, or one spec for all.

    Raises `ShardingError` for entries that no argument has.
    """
    plain, everything, optional, *_ = signature_names(fn) or NO_NAMES
    if isinstance(in_specs, Mapping):
        parameters = [*everything, *(k for k in named if k not in everything)]
        if unknown := [key for key in in_specs if key not in parameters]:
            raise ShardingError(
                f"{name}: in_specs do not fit the arguments",
                [f"{key!r} is no parameter; they are {', '.join(parameters) or 'none'}" for key in unknown],
                rule=_RULE,
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
    rest = dict(zip(plain[positional:], specs[positional:], strict=False))  # passed by name in this call
    return (*specs[:positional], *(None,) * (positional - len(specs))), {k: rest.get(k) for k in named}


def refuse_missing_specs(
    fn: Callable[..., Any], name: str, in_specs: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raises `ShardingError` for arguments with tensors behind the last entry of a tuple.

    An argument without tensors needs no entry. Nor does one passed by name to a parameter with a default.
    """
    if not isinstance(in_specs, tuple | list):
        return
    plain, _, optional, *_ = signature_names(fn) or NO_NAMES
    arguments = dict(zip(argument_names(fn, len(args), ()), args, strict=True))
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


def describe_non_tensor(leaf: Any) -> str | None:
    """Describes a leaf that can have no spec; returns None for a leaf that can."""
    if is_tensor(leaf) or leaf is None:
        return None
    if isinstance(leaf, Static):
        return "a static argument"
    return f"{leaf!r}, which is no tensor" if isinstance(leaf, int | float | str) else f"a {type(leaf).__name__}"


def add_positions_and_names(fn: Callable[..., Any], chosen: frozenset[int | str]) -> frozenset[int | str]:
    """Adds the names of arguments chosen by position, and the positions of those chosen by name.

    A caller may pass an argument either way. Raises `ShardingError` for a choice that is no argument of `fn`.
    """
    if not chosen or (names := signature_names(fn)) is None:
        return chosen
    plain = names.plain
    named = {*names.all, *filter(None, (names.rest, names.keywords))}
    wrong = [
        f"{x!r} is no {'parameter' if isinstance(x, str) else 'position'}"
        for x in chosen
        if (isinstance(x, str) and x not in named and names.keywords is None)
        or (isinstance(x, int) and not -len(plain) <= x < len(plain) and names.rest is None)
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


def argument_key(path: Any) -> int | str:
    """Returns the position or name of the argument that holds the leaf at a path."""
    group, first = path[0], path[1]
    return str(first.key) if group.idx == 1 else int(first.idx)
