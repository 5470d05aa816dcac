"""Groups the tensors and the collectives of a plan by module: equal layers are one group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

INPUT, STATE, OUTPUT = "input", "optimizer state", "output"
FORWARD, BACKWARD, OPTIMIZER = PHASES = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class Item:
    """One tensor or one collective of a plan.

    `phase` is one of `PHASES` for a collective, and says of a tensor whether it is an input, state or an output.
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


@dataclass(frozen=True)
class Group:
    """Items of one phase, role, kind and note, whose paths have one `pattern`."""

    pattern: str
    items: tuple[Item, ...]

    @property
    def first(self) -> Item:
        """The item that the others are like."""
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
    def name(self) -> str:
        """`layers.*.attn`; of tensors also `layers.*: 9 gradients`, `lm_head.weight: gradient`."""
        role = self.first.role
        tensors = list(dict.fromkeys(star(item.path) for item in self.items if item.is_tensor))
        if len(tensors) > 1:
            return f"{self.pattern}: {len(tensors)} {role or 'tensor'}s"
        return f"{tensors[0]}: {role}" if tensors and role not in ("", "weight") else (tensors or [self.pattern])[0]


def star(path: str) -> str:
    """Returns a path with a star for every index.

    Example:
        >>> star("model.layers.3.wq"), star("params.layers[3].wq"), star("0.weight")
        ('model.layers.*.wq', 'params.layers[*].wq', '*.weight')
    """
    return _INDEX.sub("*", path)


def group(items: Iterable[Item], cut: Callable[[Item], str] = lambda item: star(item.path)) -> tuple[Group, ...]:
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


def group_to_fit(items: Sequence[Item], limit: int) -> tuple[Group, ...]:
    """Groups items into at most `limit` groups, if their paths can be cut so far.

    Tensors are grouped by layer, and values by the module in a layer; then both by layer; then by the first two words.
    """
    groups: tuple[Group, ...] = ()
    for inside, most in ((1, 99), (0, 99), (0, 2)):
        groups = group(items, partial(_cut, inside=inside, most=most))
        if len(groups) <= limit:
            break
    return groups


def _cut(item: Item, inside: int, most: int) -> str:
    """Cuts a path `inside` words behind its first index (a tensor's: at the index), and behind `most` names."""
    words = _WORD.findall(star(item.path))
    layer = next((i for i, word in enumerate(words) if "*" in word), len(words))
    names = [i for i, word in enumerate(words) if "*" not in word]
    end = layer + 1 + (0 if item.is_tensor else inside)
    if len(names) > most:
        end = min(end, names[most])
    return "".join(words[:end])


_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=[.\]]|$)|^\d+(?=\.|$)")
_WORD = re.compile(r"\.?[^.\[\]]+|\[[^\]]*\]")
