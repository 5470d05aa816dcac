"""Reads the instructions of code, alike in all versions of Python, and the names that stand in its texts.

From 3.12 on `super().x` is one; from 3.13 on one may read two variables, and cells are read as variables are; from 3.14
on variables may be borrowed, and an item is an operator.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

ITEM = "BINARY_SUBSCR"  # x[k]
ATTRIBUTE = "LOAD_ATTR"
READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", ATTRIBUTE)

_LEFT_OUT = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")
_CLOSURE = "LOAD_CLOSURE"  # for a function that is made
_SUPER = "LOAD_SUPER_ATTR"
_ATTRIBUTES = ("LOAD_METHOD", _SUPER)  # read one, too


class Instruction(NamedTuple):
    """One instruction: its name in `dis`, its argument, and the line."""

    does: str
    arg: Any
    line: int


@functools.lru_cache(1 << 12)
def instructions(code: types.CodeType) -> tuple[Instruction, ...]:
    """The instructions of code, without those of functions that it defines.

    Example:
        >>> [(x.does, x.arg) for x in instructions((lambda a, b: a.shape[b]).__code__) if x.does.startswith("LOAD")]
        [('LOAD_FAST', 'a'), ('LOAD_ATTR', 'shape'), ('LOAD_FAST', 'b')]
    """
    found, line = list[Instruction](), code.co_firstlineno
    cells = {("LOAD_FAST", x) for x in (*code.co_cellvars, *code.co_freevars)}  # their values are read otherwise
    for step in dis.get_instructions(code):
        line = (step.positions.lineno if step.positions else None) or line
        if step.opname == _SUPER and found[-2][:2] == ("LOAD_DEREF", "__class__"):
            del found[-2]  # the compiler added it
        if step.opname not in _LEFT_OUT:
            found += [Instruction(_CLOSURE if (does, arg) in cells else does, arg, line) for does, arg in _apart(step)]
    return tuple(found)


def _apart(step: dis.Instruction) -> list[tuple[str, Any]]:
    """The one thing, or the two, that an instruction does."""
    name = step.opname.replace("_BORROW", "").replace("_CHECK", "")
    if isinstance(step.argval, tuple) and name.count("_FAST") == 2:
        first, second = name.split("_FAST_")
        return [*zip((f"{first}_FAST", second), step.argval, strict=True)]
    if name in _ATTRIBUTES:
        return [(ATTRIBUTE, step.argval)]
    if name == "BINARY_OP" and step.argrepr == "[]":
        return [(ITEM, None)]
    return [(name, step.argval)]


_FINDING_FUNCTIONS = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
_FINDING_ATTRIBUTES = frozenset({"__globals__", "f_globals", "import_module"})


@functools.lru_cache(1 << 12)
def words(code: types.CodeType) -> tuple[str, ...]:
    """All words of code that comes to variables by another way than their names; none of other code.

    Example:
        >>> words((lambda: globals()["scale"]).__code__), words((lambda model: model.eval()["scale"]).__code__)
        (('globals', 'scale'), ())
    """
    every = list(_inside(code))
    if not any(map(_finds, every)):
        return ()
    texts = (x for one in every for x in (*one.co_names, *one.co_consts) if isinstance(x, str))
    return tuple(dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text)))


def _finds(code: types.CodeType) -> bool:
    """Returns whether code calls a function that finds variables or modules by a text."""
    attributes = _FINDING_ATTRIBUTES | {"modules"} if "sys" in code.co_names else _FINDING_ATTRIBUTES
    return any(
        step.arg in (attributes if step.does == ATTRIBUTE else _FINDING_FUNCTIONS)
        for step in instructions(code)
        if step.does.startswith("LOAD") and isinstance(step.arg, str) and step.does != "LOAD_CONST"
    )


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _inside(inner)
