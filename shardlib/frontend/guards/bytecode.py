"""Reads the instructions of code in one form for all versions of Python, and the words in its string constants.

From 3.12 on `super().x` is one instruction. From 3.13 on an instruction may read two variables, and cells are read like
variables. From 3.14 on variables may be borrowed, and `x[k]` is a binary operator.
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
_CLOSURE = "LOAD_CLOSURE"  # reads a cell to build a function
_SUPER = "LOAD_SUPER_ATTR"
_ATTRIBUTES = ("LOAD_METHOD", _SUPER)  # these read an attribute, too


class Instruction(NamedTuple):
    """One instruction: its name in `dis`, its argument and its line."""

    does: str
    arg: Any
    line: int


@functools.lru_cache(1 << 12)
def instructions(code: types.CodeType) -> tuple[Instruction, ...]:
    """Returns the instructions of code, without those of the functions that it defines."""
    steps, line = list[Instruction](), code.co_firstlineno
    cells = {("LOAD_FAST", x) for x in (*code.co_cellvars, *code.co_freevars)}  # LOAD_DEREF reads their values
    for step in dis.get_instructions(code):
        line = (step.positions.lineno if step.positions else None) or line
        if step.opname == _SUPER and steps[-2][:2] == ("LOAD_DEREF", "__class__"):
            del steps[-2]  # Python's compiler added it
        if step.opname not in _LEFT_OUT:
            steps += [Instruction(_CLOSURE if (does, arg) in cells else does, arg, line) for does, arg in _split(step)]
    return tuple(steps)


def _split(step: dis.Instruction) -> list[tuple[str, Any]]:
    """Returns the one or two steps of an instruction, each with its argument."""
    name = step.opname.replace("_BORROW", "").replace("_CHECK", "")
    if isinstance(step.argval, tuple) and name.count("_FAST") == 2:
        first, second = name.split("_FAST_")
        return [*zip((f"{first}_FAST", second), step.argval, strict=True)]
    if name in _ATTRIBUTES:
        return [(ATTRIBUTE, step.argval)]
    if name == "BINARY_OP" and step.argrepr == "[]":
        return [(ITEM, None)]
    return [(name, step.argval)]


_LOOKUP_FUNCTIONS = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
_LOOKUP_ATTRIBUTES = frozenset({"__globals__", "f_globals", "import_module"})


@functools.lru_cache(1 << 12)
def words(code: types.CodeType) -> tuple[str, ...]:
    """Returns all words of code that looks variables up by text; nothing for other code."""
    codes = list(_nested_codes(code))
    if not any(map(_looks_up_by_text, codes)):
        return ()
    texts = (x for inner in codes for x in (*inner.co_names, *inner.co_consts) if isinstance(x, str))
    return tuple(dict.fromkeys(word for text in texts for word in re.findall(r"\w+", text)))


def _looks_up_by_text(code: types.CodeType) -> bool:
    """Returns whether code uses a function or attribute that finds variables or modules by a text."""
    attributes = _LOOKUP_ATTRIBUTES | {"modules"} if "sys" in code.co_names else _LOOKUP_ATTRIBUTES
    return any(
        step.arg in (attributes if step.does == ATTRIBUTE else _LOOKUP_FUNCTIONS)
        for step in instructions(code)
        if step.does.startswith("LOAD") and isinstance(step.arg, str) and step.does != "LOAD_CONST"
    )


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _nested_codes(inner)
