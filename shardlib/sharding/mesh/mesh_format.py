"""Formats, parses and validates meshes."""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from shardlib.core.errors import ShardingError
from shardlib.sharding.mesh.axis import Axis, parse_axis

Kind = Literal["virtual", "distributed", "abstract"]
MeshAxes = str | tuple[str, ...] | None  # a rule maps a logical name to these
Axes = str | Iterable[str] | None  # the same, as the user writes it
Rules = Mapping[str, Axes] | Iterable[tuple[str, Axes]]  # a dict, or pairs as flax and t5x write them

_REMEDIES = {  # by a part of the fault
    "not a whole number of 1 or more": "sizes of 1 or more: Mesh(data=2, tensor=4)",
    "is given twice: ": "shardlib.integrations.logical_axes.logical_to_mesh(specs, rules, mesh) takes lists with "
    "several rules for a name",
}


def remedy_of(faults: Iterable[str]) -> str:
    """Returns what to do about the faults of a mesh, or a mesh as an example."""
    remedies = [remedy for part, remedy in _REMEDIES.items() if any(part in fault for fault in faults)]
    return "; ".join(remedies) or 'write it as Mesh(data=2, tensor=4, rules={"batch": "data"})'


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns `"; did you mean 'tensor'?"` for the closest candidate; "" if none is close."""
    close = get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def normalize_axes(to: str | Iterable[str] | None) -> MeshAxes:
    """Converts the axes of a rule to None, a name, or a tuple of several names."""
    if to is None or isinstance(to, str):
        return to
    names = tuple(to)
    return names if len(names) > 1 else names[0] if names else None


def normalize_rules(rules: Rules | None) -> tuple[dict[str, MeshAxes], list[str]]:
    """Returns the rules by name, normalized, and the faults of the others."""
    tidy: dict[str, MeshAxes] = {}
    faults = []
    for pair in list(rules.items()) if isinstance(rules, Mapping) else list(rules or ()):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Hashable):
            faults.append(f"rule {pair!r} is not a pair of a logical name and what it maps to")
            continue
        name, to = pair
        if not (to is None or isinstance(to, str | Iterable)):
            faults.append(f"rule {name!r} -> {to!r}: {to!r} is not a mesh axis")
        elif name in tidy and tidy[name] != normalize_axes(to):
            faults.append(f"rule {name!r} is given twice: {tidy[name]!r} and {normalize_axes(to)!r}")
        else:
            tidy[name] = normalize_axes(to)
    return tidy, faults


def infer_size(sizes: list[tuple[str, int]], ranks: int | None) -> tuple[list[tuple[str, int]], list[str]]:
    """Replaces the size -1 of one axis, so that the mesh has a device for every rank; returns the sizes, and faults.

    Without ranks (None) the size is 1. After a fault, too.

    Example:
        >>> infer_size([("data", -1), ("tensor", 4)], 8)
        ([('data', 2), ('tensor', 4)], [])
    """
    inferred = [name for name, size in sizes if type(size) is int and size == -1]
    others = [size for name, size in sizes if name not in inferred]
    faults, devices = [], 1
    if len(inferred) > 1:
        faults = [f"the axes {', '.join(map(repr, inferred))} have size -1: one size at most can be inferred"]
    elif inferred and ranks is not None and all(type(size) is int and size > 0 for size in others):
        devices, rest = divmod(ranks, math.prod(others))
        if rest or not devices:
            product = " * ".join(map(str, others))
            faults = [f"axis {inferred[0]!r} has size -1, and the other axes ({product}) do not divide {ranks} ranks"]
    return [(name, max(devices, 1) if name in inferred else size) for name, size in sizes], faults


def find_faults(sizes: list[tuple[str, int]], rules: Mapping[str, MeshAxes], stages: str | None = None) -> list[str]:
    """Lists the faults in names and sizes of axes, in rules, and in the name of the axis of stages."""
    faults = [] if sizes else ["it has no axis"]
    if stages is not None and stages not in dict(sizes):
        faults.append(f"stages={stages!r} names no axis")
    names: set[str] = set()
    for name, size in sizes:
        if not _is_name(name):
            faults.append(f"axis {name!r} is not an identifier")
        if name in names:
            faults.append(f"axis {name!r} is given twice")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            faults.append(f"axis {name!r} has size {size!r}, not a whole number of 1 or more")
        names.add(name)
    listing = ", ".join(f"{name}={size}" for name, size in sizes)
    for logical, to in rules.items():
        if not (isinstance(logical, str) and logical.isidentifier()) or logical == "_":
            faults.append(f"rule {logical!r} is not a logical name")
        axes = (to,) if isinstance(to, str) else to or ()
        if len(set(axes)) < len(axes):
            faults.append(f"rule {logical!r} -> {to!r} uses an axis twice")
        for text in axes:
            name, _, part = str(text).partition(":")
            if name == stages:
                faults.append(f"rule {logical!r} -> {to!r}: {name!r} is the axis of stages, which shards no tensor")
            elif name not in names:
                hint = did_you_mean(name, sorted(names))
                faults.append(f"rule {logical!r} -> {to!r}: the mesh ({listing}) has no axis {name!r}{hint}")
            elif part and not _is_part(str(text), dict(sizes)[name]):
                faults.append(f"rule {logical!r} -> {to!r}: {text} is no part of {name!r} of size {dict(sizes)[name]}")
    return faults


def _is_part(text: str, size: int) -> bool:
    name, pre, part_size = parse_axis(text)
    return part_size is not None and Axis(name, size).part(pre, part_size) is not None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def format_mesh(
    kind: Kind,
    sizes: list[tuple[str, int]],
    rules: Mapping[str, MeshAxes],
    device: str,
    strict: bool = False,
    machine: str = "",
    stages: str | None = None,
) -> str:
    """Formats a mesh as the Python call that makes it."""
    words = [f"{name}={size!r}" for name, size in sizes]
    if {name for name, _ in sizes} & {"rules", "device", "strict", "machine", "stages"} or not all(
        _is_name(name) for name, _ in sizes
    ):
        words = [repr(dict(sizes))]
    if rules:
        words.append(f"rules={dict(rules)!r}")
    if device != "cpu":
        words.append(f"device={device!r}")
    if strict:
        words.append("strict=True")
    if machine:
        words.append(f"machine={machine!r}")
    if stages is not None:
        words.append(f"stages={stages!r}")
    return f"{'Mesh.abstract' if kind == 'abstract' else 'Mesh'}({', '.join(words)})"


def parse_mesh(text: str) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Parses the text of a mesh: `Mesh` or `Mesh.abstract`, its arguments and keyword arguments, and those of `.at`."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        stage: dict[str, Any] = {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "at":
            stage = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            call = call.func.value
        if not isinstance(call, ast.Call) or len(call.args) > 1 or any(w.arg is None for w in call.keywords):
            raise ValueError(text)
        if (kind := ast.unparse(call.func)) not in ("Mesh", "Mesh.abstract"):
            raise ValueError(text)
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return kind, [ast.literal_eval(arg) for arg in call.args], words, stage
    except (SyntaxError, ValueError) as error:
        raise ShardingError(
            f"{text!r} cannot be read as a mesh", remedy='write Mesh(data=2, tensor=4, rules={"batch": "data"})'
        ) from error


def list_axes(mappings: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Merges the axes that a call of `Mesh` passes as a mapping and by name."""
    if len(mappings) > 1 or not all(isinstance(mapping, Mapping) for mapping in mappings):
        raise ShardingError(
            f"Mesh({', '.join(map(repr, mappings))}) does not name the axes of a mesh",
            rule="axes are keywords, or one dict from names to sizes",
            remedy='write Mesh(data=2, tensor=4), or Mesh({"data": 2, "tensor": 4})',
        )
    return [item for mapping in (*mappings, sizes) for item in mapping.items()]
