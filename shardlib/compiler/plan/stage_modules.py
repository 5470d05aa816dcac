"""The modules that each stage runs in its forward pass, as short ranges: `emb`, `layers.0-3`, `part of layers.4`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

from shardlib.compiler.program.steps import Compute
from shardlib.compiler.stages.staged import Staged


def stage_modules(staged: Staged) -> list[tuple[str, ...]]:
    """Returns the names of each stage's modules, in the order in which they run."""
    calls = [(s for s in p.steps if isinstance(s, Compute) and not s.backward and s.inside) for p in staged.programs]
    blocks = [list(dict.fromkeys(_block(s.inside[-1].path) for s in some if s.inside[-1].path)) for some in calls]
    stages = Counter(name for names in blocks for name in names)
    return [tuple(_ranges(names, {name for name in names if stages[name] > 1})) for names in blocks]


def _block(path: str) -> str:
    """Returns the path up to its first number: `h.0` for `h.0.attn`.

    Example:
        >>> [_block(path) for path in ("h.0.attn", "emb.table", "")]
        ['h.0', 'emb.table', '']
    """
    words = path.split(".")
    head = list(takewhile(lambda word: not word.isdecimal(), words))
    return ".".join(words[: len(head) + 1])


def _ranges(names: Sequence[str], shared: set[str]) -> Iterable[str]:
    """Merges names with successive numbers; names in `shared` run on other stages, too.

    Example:
        >>> list(_ranges(["emb", "h.0", "h.1", "h.2", "ln"], {"h.2"}))
        ['emb', 'h.0-1', 'part of h.2', 'ln']
    """

    def key(item: tuple[int, str]) -> tuple[str, int, bool]:
        i, name = item
        stem, _, number = name.rpartition(".")
        return (stem, int(number) - i, name in shared) if number.isdecimal() else (name, 0, name in shared)

    for (_, _, is_part), items in groupby(enumerate(names), key):
        first, *more = (name for _, name in items)
        last = f"-{more[-1].rpartition('.')[2]}" if more else ""
        yield f"{'part of ' * is_part}{first}{last}"
