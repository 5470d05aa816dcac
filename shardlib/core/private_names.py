"""Names that torch keeps to itself: looked up for `internals`, remembered with their reasons, replaced."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch


class Slot:
    """A name of torch's that stands for something else for a while, or from now on."""

    def __init__(self, name: str) -> None:
        self._where, _, self.name = name.rpartition(".")

    @cached_property
    def owner(self) -> Any:
        """The module or class that has it, imported when it is first asked for."""
        return pkgutil.resolve_name(self._where)

    @property
    def value(self) -> Any:
        """What torch finds there."""
        return getattr(self.owner, self.name)

    @value.setter
    def value(self, new: Any) -> None:
        setattr(self.owner, self.name, new)

    @contextmanager
    def holding(self, new: Any) -> Iterator[None]:
        """While on, torch finds `new`."""
        is_own, before, self.value = self.name in vars(self.owner), self.value, new
        try:
            yield
        finally:
            if is_own:
                self.value = before
            else:  # a class inherits it
                delattr(self.owner, self.name)


class Names:
    """A list of private names; each method takes one, and what it is for."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # a private name -> what it is for
        self.lates: list[str] = []  # those that are looked up when they are used
        self._lacking: list[str] = []

    def value(self, name: str, why: str) -> Any:
        """What torch has under a name."""
        self.reasons[name] = why
        try:
            return pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            self._lacking.append(name)
            return None

    def late(self, name: str, why: str) -> str:
        """A name that is looked up when it is used."""
        self.reasons[name] = why
        self.lates.append(name)
        return name

    def attribute(self, name: str, why: str) -> Any:
        """What reads an attribute of objects; torch has one such object, or its class has it, by this name."""
        return attrgetter(self.word(name, why))

    def name(self, name: str, why: str) -> str:
        """The name itself, for what is known by it."""
        self.value(name, why)
        return name

    def word(self, name: str, why: str) -> str:
        """The last word of a name, for an attribute that is asked or set by it."""
        return self.name(name, why).rpartition(".")[2]

    def variable(self, name: str, why: str) -> Any:
        """What reads a global variable of one of torch's modules, each time anew."""
        return partial(self.attribute(name, why), pkgutil.resolve_name(name.rpartition(".")[0]))

    def slot(self, name: str, why: str) -> Slot:
        """A name that is going to stand for something else."""
        return Slot(self.name(name, why))

    def late_slot(self, name: str, why: str) -> Slot:
        """The same of a name that is looked up when it is used."""
        return Slot(self.late(name, why))

    def complete(self, supported: Sequence[str]) -> None:
        """Raise one ImportError for all that torch lacks; `supported` are its versions."""
        if not self._lacking:
            return
        lines = "".join(f"\n  * {name}: {self.reasons[name]}" for name in self._lacking)
        raise ImportError(
            f"torch {torch.__version__} lacks {len(self._lacking)} of the names that shardlib uses:{lines}\n"
            f"Rule: shardlib runs on torch {', '.join(supported)}\n"
            f"Remedy: install one of these, or a shardlib for torch {torch.__version__}"
        )
