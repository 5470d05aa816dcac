"""Looks up private names of torch for `torch_private`, records their reasons, and replaces their values."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch


class Slot:
    """A name of torch whose value can be replaced, for a while or for good."""

    def __init__(self, name: str) -> None:
        self._where, _, self.name = name.rpartition(".")

    @cached_property
    def owner(self) -> Any:
        """The module or class with the name, imported on first use."""
        return pkgutil.resolve_name(self._where)

    @property
    def value(self) -> Any:
        """The present value of the name."""
        return getattr(self.owner, self.name)

    @value.setter
    def value(self, new: Any) -> None:
        setattr(self.owner, self.name, new)

    @contextmanager
    def holding(self, new: Any) -> Iterator[None]:
        """Replaces the value by `new` inside the context."""
        is_own, before, self.value = self.name in vars(self.owner), self.value, new
        try:
            yield
        finally:
            if is_own:
                self.value = before
            else:  # a class inherited it
                delattr(self.owner, self.name)


class PrivateNames:
    """A registry of private names; each method takes a name and the reason for its use."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # by private name
        self.lates: list[str] = []  # names that are looked up on use
        self._lacking: list[str] = []

    def value(self, name: str, why: str) -> Any:
        """Looks up the value of a name."""
        self.reasons[name] = why
        try:
            return pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            self._lacking.append(name)
            return None

    def late(self, name: str, why: str) -> str:
        """Registers a name that is looked up on use."""
        self.reasons[name] = why
        self.lates.append(name)
        return name

    def attribute(self, name: str, why: str) -> Any:
        """Returns a getter of an attribute; `name` is the attribute of a class or of one object."""
        return attrgetter(self.word(name, why))

    def name(self, name: str, why: str) -> str:
        """Registers a name and returns it."""
        self.value(name, why)
        return name

    def word(self, name: str, why: str) -> str:
        """Registers a name and returns its last word, for getattr and setattr."""
        return self.name(name, why).rpartition(".")[2]

    def variable(self, name: str, why: str) -> Any:
        """Returns a getter of a global variable of one of torch's modules."""
        return partial(self.attribute(name, why), pkgutil.resolve_name(name.rpartition(".")[0]))

    def slot(self, name: str, why: str) -> Slot:
        """Returns the slot of a name."""
        return Slot(self.name(name, why))

    def late_slot(self, name: str, why: str) -> Slot:
        """Returns the slot of a name that is looked up on use."""
        return Slot(self.late(name, why))

    def complete(self, supported: Sequence[str]) -> None:
        """Raises one ImportError for all names that torch lacks; `supported` are its versions."""
        if not self._lacking:
            return
        lines = "".join(f"\n  * {name}: {self.reasons[name]}" for name in self._lacking)
        raise ImportError(
            f"torch {torch.__version__} lacks {len(self._lacking)} of the names that shardlib uses:{lines}\n"
            f"Rule: shardlib runs on torch {', '.join(supported)}\n"
            f"Remedy: install one of these, or a shardlib for torch {torch.__version__}"
        )
