"""The channel number of each group of ranks. All ranks keep equal tables without communication."""

from __future__ import annotations

from collections import defaultdict

Group = tuple[int, ...]  # ranks, in group order


class ChannelNumbers:
    """Numbers of channels, below `limit`, by group. Groups without a common member may share a number."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.groups: dict[Group, int] = {}
        self._taken: defaultdict[int, set[int]] = defaultdict(set)  # by rank

    def take(self, group: Group) -> int | None:
        """Returns the group's number: its present one, or the first that is free on all members, or None."""
        if group not in self.groups:
            if (number := self.reserve(group)) is None:
                return None
            self.groups[group] = number
        return self.groups[group]

    def reserve(self, ranks: Group) -> int | None:
        """Takes the first number that is free on all these ranks, for good, and returns it; None if there is none."""
        taken = set[int]().union(*(self._taken[rank] for rank in ranks))
        number = next((k for k in range(self.limit) if k not in taken), None)
        if number is not None:
            for rank in ranks:
                self._taken[rank].add(number)
        return number

    def drop(self, group: Group) -> None:
        """Frees the number of a closed group."""
        number = self.groups.pop(group)
        for rank in group:
            self._taken[rank].remove(number)
