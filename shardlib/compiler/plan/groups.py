"""Groups the tensors and the collectives of a plan by module: equal layers are one group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from shardlib.core.name_patterns import join_words, restore_indices, star

INPUT, STATE, OUTPUT = "input", "optimizer state", "output"


@dataclass(frozen=True)
class Item:
    """One tensor or one collective of a plan.

    `phase` is one of `phases.PHASES` for a collective, and says of a tensor whether it is an input, state or an output.
    `path` names a tensor (`is_tensor`), or the module or source line whose value moves. `role` is the part that a
    tensor plays: "weight", "gradient", "new value" or "". `kind` is a type (`f32[8, 4]`) or a collective
    (`all_reduce[data]`), `note` a layout or a reason. `bytes` are held or sent by one device; `seconds` are simulated.
    `position` counts the plan's inputs, outputs or collectives, from 0.
    """

    phase: str
    path: str
    role: str
    kind: str
    note: str
    bytes: float
    position: int
    seconds: float = 0.0
    is_tensor: bool = True

    @property
    def pattern(self) -> str:
        """The path with stars; the place in a tuple of results stays: `result[0].layers[*].w`."""
        root = _ROOT.match(self.path) if self.phase == OUTPUT else None
        return star(self.path) if root is None else root[0] + star(self.path[root.end() :])


@dataclass(frozen=True)
class Group:
    """Items of one phase, role, kind and note, whose paths have one `pattern`."""

    pattern: str
    items: tuple[Item, ...]
    is_joined: bool = False  # the pattern names all its tensors
    names: tuple[str, ...] = ()  # all names of the plan that fit the pattern

    @property
    def first(self) -> Item:
        """The first item; the others equal it but for indices."""
        return self.items[0]

    @property
    def times(self) -> int:
        """The number of items."""
        return len(self.items)

    @cached_property
    def bytes(self) -> float:
        """The sum of the items' bytes."""
        return sum(item.bytes for item in self.items)

    @cached_property
    def seconds(self) -> float:
        """The sum of the items' seconds."""
        return sum(item.seconds for item in self.items)

    @property
    def cost(self) -> float:
        """Seconds, or bytes where nothing was simulated."""
        return self.seconds or self.bytes

    @cached_property
    def path(self) -> str:
        """The pattern with indices where a single item or some layers have them: `layers.3.attn`, `layers.{1,2}`."""
        return self.pattern if self.is_joined else self._restore(self.pattern)

    @property
    def name(self) -> str:
        """`layers.*.attn`; of tensors also `layers.*: 9 gradients`, `lm_head.weight: gradient`."""
        if self.is_joined:
            return self.pattern
        role = self.first.role
        tensors = self.tensors
        if len(tensors) > 1:
            return f"{self.path}: {len(tensors)} {role or 'tensor'}s"
        path = self._restore(tensors[0]) if tensors else self.path
        return f"{path}: {role}" if tensors and role not in ("", "weight") else path

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The patterns of its tensors: more than one, if `pattern` is cut."""
        return tuple(dict.fromkeys(item.pattern for item in self.items if item.is_tensor))

    def _restore(self, pattern: str) -> str:
        return restore_indices(pattern, self.paths, [self.names])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the items."""
        return tuple(item.path for item in self.items)


def group(items: Iterable[Item], cut: Callable[[Item], str] = lambda item: item.pattern) -> tuple[Group, ...]:
    """Groups items, in the order of their first ones; `cut` returns the pattern of an item.

    Example:
        >>> layers = (Item("forward", f"h.{i}.mlp", "", "all_reduce[tensor]", "sum over ff", 8.0, i) for i in range(4))
        >>> [(g.pattern, g.times, g.bytes) for g in group(layers)]
        [('h.*.mlp', 4, 32.0)]
    """
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        groups.setdefault((item.phase, item.role, item.kind, item.note, cut(item)), []).append(item)
    return tuple(Group(pattern, tuple(members)) for (*_, pattern), members in groups.items())


def set_apart(groups: Sequence[Group], names: Iterable[str] = ()) -> list[Group]:
    """Returns the groups; those without all layers get names with indices.

    The layers are those of all groups, and of more `names` of the plan that begin with the pattern of a group.

    Example:
        >>> items = [Item("input", f"h.{i}.w", "", f"f32[{8 if i < 3 else 4}]", "", 8.0, i) for i in range(5)]
        >>> [g.name for g in set_apart(group(items))]
        ['h.{0-2}.w', 'h.{3,4}.w']
        >>> [g.name for g in set_apart(group(items[:3]), ["h.3.w.scale"])]
        ['h.{0-2}.w']
    """
    names = {*names, *(path for g in groups for path in g.paths)}
    return [replace(g, names=tuple(filter(_prefix(g.pattern).match, names))) for g in groups]


def _prefix(pattern: str) -> re.Pattern[str]:
    """Returns what fits the first words of a path: `h.*` those of `h.3` and `h.12.w`."""
    return re.compile(re.escape(pattern).replace(r"\*", r"(?:\d+|\*)") + r"(?![^.\[\]])")


def group_to_fit(items: Sequence[Item], limit: int, names: Iterable[str] = ()) -> tuple[Group, ...]:
    """Groups items by ever shorter paths, until `limit` groups hold all but 2 % of the seconds (or bytes).

    Tensors are grouped by layer, and values by a module behind the last index of their paths; then by one behind the
    first index; then by layer, as tensors; then both by the first three names. `names` are those of `set_apart`.
    """
    groups: tuple[Group, ...] = ()
    for cut in _CUTS:
        groups = group(items, cut)
        costs = sorted((g.cost for g in groups), reverse=True)
        if len(groups) <= limit or sum(costs[: limit - 1]) >= _MOST * sum(costs):
            break
    return tuple(set_apart(groups, names))


def largest(groups: Sequence[Group], limit: int) -> tuple[list[Group], list[Group]]:
    """Returns the groups that cost most, in their order, and the others.

    At most `limit` are kept: `limit - 1` if some are left out, so that a line on them fits.
    """
    ranked = sorted(range(len(groups)), key=lambda i: -groups[i].cost)
    kept = {*ranked[: limit if len(groups) <= limit else max(limit - 1, 0)]}
    return [g for i, g in enumerate(groups) if i in kept], [g for i, g in enumerate(groups) if i not in kept]


def _cut(item: Item, *, last: bool = False, names: int = 0, most: int = 99) -> str:
    """Cuts a path at its first index (a value's: `names` names behind its first or `last` one), or at `most` names."""
    words = _WORD.findall(item.pattern)
    layers = [i for i, word in enumerate(words) if "*" in word]
    if item.is_tensor:
        last, names = False, 0
    end = layers[-1 if last else 0] + 1 if layers else len(words)
    more = [i + 1 for i, word in enumerate(words) if i >= end and "*" not in word]
    if names and more:
        end = more[names - 1]
    whole = [i for i, word in enumerate(words) if "*" not in word]
    end = min(end, whole[most]) if len(whole) > most else end
    while end < len(words) and "*" in words[end]:
        end += 1
    return "".join(words[:end])


_CUTS = (
    partial(_cut, last=True, names=1),
    partial(_cut, names=1),
    _cut,
    partial(_cut, most=3),
)
_MOST = 0.98  # of the cost


def join_siblings(groups: Sequence[Group]) -> list[Group]:
    """Joins groups of one kind, note and size whose patterns differ in one word: `attn.{wq,wk}.weight`.

    Example:
        >>> names = [f"h.{i}.{name}" for i in range(2) for name in ("wq", "wk")]
        >>> items = [Item("input", name, "", "f32[8, 8]", "whole", 256.0, i) for i, name in enumerate(names)]
        >>> [(g.name, g.times) for g in join_siblings(group(items))]
        [('h.*.{wq,wk}', 4)]
    """
    joined = list(groups)
    for i in range(max((g.path.count(".") for g in groups), default=0), -1, -1):
        alike: dict[tuple[object, ...], list[Group]] = {}
        for g in joined:
            words = g.path.split(".")
            rest = (*words[:i], *words[i + 1 :]) if i < len(words) else (g.path,)
            alike.setdefault((g.first.kind, g.first.note, g.times, len(words), rest), []).append(g)
        joined = [_joined(same, i) if len(same) > 1 else same[0] for same in alike.values()]
    return joined


def _joined(groups: Sequence[Group], i: int) -> Group:
    first, *_ = words = [g.path.split(".") for g in groups]
    both = join_words([w[i] for w in words])
    return Group(".".join([*first[:i], both, *first[i + 1 :]]), tuple(item for g in groups for item in g.items), True)


_ROOT = re.compile(r"\w+(\[\d+\])*")  # `result[0]`
_WORD = re.compile(r"\.?[^.\[\]]+|\[[^\]]*\]")
