"""The stage and the microbatch that the user's code is in, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Microbatches:
    """One call of `sl.microbatch`: the number of microbatches, and the schedule, as a value that can be compared."""

    n: int
    schedule: Any


class FragmentTag(NamedTuple):
    """The stage and the microbatch of a traced node; None where the code names none.

    The cut into stages completes the tags of fragments: `stage` is the position in the chain, `kind` is F, B or W.
    """

    stage: int | None = None
    microbatch: int | None = None
    microbatches: Microbatches | None = None
    kind: Literal["F", "B", "W"] | None = None

    def inside(self, outer: FragmentTag) -> FragmentTag:
        """Returns the tag of code with this tag that runs inside code with another one."""
        return FragmentTag(
            outer.stage if self.stage is None else self.stage,
            outer.microbatch if self.microbatch is None else self.microbatch,
            outer.microbatches if self.microbatches is None else self.microbatches,
        )


NO_TAG = FragmentTag()
_current: ContextVar[FragmentTag] = ContextVar("shardlib_fragment_tag", default=NO_TAG)


def current_tag() -> FragmentTag:
    return _current.get()


@contextmanager
def tagged(tag: FragmentTag) -> Iterator[None]:
    """Gives nodes that are traced inside this tag, where code further inside names no other one."""
    before = enter_tag(tag)
    try:
        yield
    finally:
        leave_tag(before)


def enter_tag(tag: FragmentTag) -> FragmentTag:
    """Begins a tag as `tagged` does; returns the one before, for `leave_tag`."""
    before = _current.get()
    _current.set(tag.inside(before))
    return before


def leave_tag(before: FragmentTag) -> None:
    """Returns to an earlier tag: all that began since then ends."""
    _current.set(before)


@contextmanager
def untagged() -> Iterator[None]:
    """Traces a function that is called at several places: each call tags its own copy of the nodes."""
    token = _current.set(NO_TAG)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def outside_microbatches() -> Iterator[None]:
    """Traces a program that the user's own loop calls once per microbatch: it is a pipeline of one microbatch.

    A schedule, but for one that lists the fragments of all microbatches, still says how many parts a stage has.
    """
    tag = _current.get()
    how = None if tag.microbatches is None else tag.microbatches.schedule
    once = Microbatches(1, how) if isinstance(how, str) or callable(how) else None
    token = _current.set(FragmentTag(tag.stage, None, once))
    try:
        yield
    finally:
        _current.reset(token)
