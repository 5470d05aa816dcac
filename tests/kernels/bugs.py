"""Planted bugs: one change to a kernel's source, which the checks of that kernel must catch.

A table of `Bug`s stands beside the tests of each kernel. A bug is caught when a check fails: by a wrong result, by a
deadlock, or by something that the hardware forbids. A mutant is compiled for its test, as narrow as `only` makes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from tests.kernels import emulate
from tests.kernels.emulate import Build, Patch


class Bug(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`; `check` names the check that sees it."""

    old: str
    new: str
    check: str
    file: str = ""  # the kernel's own source


def build(source: str, bug: Bug, only: Sequence[Patch] = ()) -> Build:
    """The mutant of a source; `only` are patches that leave out what the check does not need."""
    return Build(source, (Patch(bug.file or source, bug.old, bug.new), *only))


def must_be_caught(mutant: Build, check: Callable[[ctypes.CDLL], None]) -> None:
    """Fails unless `check` fails on the mutant, in one of three orders of events."""
    library = emulate.library(mutant.source, patches=mutant.patches)
    for seed in range(1, 4):
        emulate.configure(library, seed=seed)
        try:
            check(library)
        except AssertionError:
            return
    pytest.fail(f"not caught: {mutant.patches[0].old!r} became {mutant.patches[0].new!r}")
