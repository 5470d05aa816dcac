"""Names of variables that code may read though no instruction names them: in a text, or as an attribute of a module."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator

from shardlib.frontend.guards.bytecode import ATTRIBUTE, instructions

_FUNCTIONS = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
_ATTRIBUTES = frozenset({"__globals__", "f_globals", "import_module"})


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
    """Whether code calls what finds variables, or modules, by a text."""
    attributes = _ATTRIBUTES | {"modules"} if "sys" in code.co_names else _ATTRIBUTES
    return any(
        step.arg in (attributes if step.does == ATTRIBUTE else _FUNCTIONS)
        for step in instructions(code)
        if step.does.startswith("LOAD") and isinstance(step.arg, str) and step.does != "LOAD_CONST"
    )


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _inside(inner)
