"""How far collectives run ahead of what waits for them: what a user states of it, as a value that prints and parses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardlib.core.byte_sizes import nbytes
from shardlib.core.errors import ShardingError
from shardlib.core.repr_literals import format_call, parse_call

SAVED = "saved"  # all that the forward pass keeps for the backward one
MOMENTS, PARAMETERS = STATE = "moments", "parameters"  # what optimizers keep, and what they train

# How far messages of a program run ahead, the furthest first, which holds most memory: rows in parts; no parts; no call
# moves for a message; nothing is gathered ahead; nothing moves.
AHEAD = ("parts", "whole", "calls stay", "gathers stay", "all stay")


@dataclass(frozen=True)
class Schedule:
    """How a program hides its messages behind its arithmetic; None leaves a field to the machine of the mesh.

    Weights that are gathered for a layer (what the program repeats; without repetition, what makes a message) start
    to be gathered `prefetch` layers before it, are held till their last reader, and travel in messages of up to
    `bucket` bytes, as gradients do that are reduced. While more than `cap` bytes of gathered weights would be held,
    nothing is gathered ahead. Sizes are bytes or texts with a unit.

    `offload` moves what is saved for the backward pass to the host's memory: `"saved"`, all of it; names of ops
    (`"mm"`, `["mm", "tanh"]`), what these make. It comes back `prefetch` layers before it is read, so that at most
    `1 + prefetch` layers' saved values are on the device. `"moments"`, what optimizers keep, and `"parameters"` live
    there between calls: they are copied in as many layers before they are read, and out when they are new. Whoever
    reads them outside brings them back. Several are a list; values are the same.

    `parts` is in how many parts a device works on its rows, in turn: while what one part sends is in flight it
    computes another, so that sums which the next step waits for (of tensor parallelism) are hidden as well. With a
    machine that says what calls take to begin there are 2 where its clock says that this takes less; 1: never.

    Raises `ShardingError` for a negative distance, sizes and names that are none, naming all of them.

    Example:
        >>> how = Schedule(prefetch=1, cap="2GiB")
        >>> how
        Schedule(prefetch=1, cap='2GiB')
        >>> Schedule.parse(str(how)) == how
        True
    """

    prefetch: int | None = None
    bucket: int | str | None = None
    cap: int | str | None = None
    offload: str | Sequence[str] | None = None
    parts: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if isinstance(self.offload, list) or (isinstance(self.offload, str) and self.offload not in ("", SAVED)):
            said: tuple[Any, ...] = (self.offload,) if isinstance(self.offload, str) else tuple(self.offload)
            object.__setattr__(self, "offload", said)
        ahead = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
            faults.append(f"prefetch={ahead!r} is no number of layers, 0 or more")
        if self.parts is not None and (type(self.parts) is not int or self.parts < 1):
            faults.append(f"parts={self.parts!r} is no number of parts, 1 or more")
        for what in ("bucket", "cap"):
            try:
                self.nbytes(what)
            except ShardingError as error:
                faults.append(str(error).splitlines()[0].rstrip(":"))
        names = self.offload if isinstance(self.offload, tuple) else ()
        if self.offload not in (None, SAVED) and not (names and all(isinstance(x, str) and x for x in names)):
            words = ", ".join(map(repr, (SAVED, *STATE)))
            faults.append(f"offload={self.offload!r} is none of {words}, and no names of ops")
        if faults:
            rule = "a distance is a count, a size a number of bytes or a text with a unit"
            remedy = 'Schedule(prefetch=1, bucket="25MiB", cap="2GiB")'
            raise ShardingError("Schedule cannot be made", faults, rule=rule, remedy=remedy)

    @property
    def state(self) -> tuple[str, ...]:
        """Which state lives in the host's memory between calls."""
        return tuple(word for word in STATE if word in (self.offload or ()))

    @property
    def saved(self) -> str | tuple[str, ...] | None:
        """What of the saved values does between the forward and the backward pass: all, what ops of such names make, or
        nothing."""
        if self.offload is None or SAVED in self.offload:
            return None if self.offload is None else SAVED
        return tuple(name for name in self.offload if name not in STATE) or None

    def nbytes(self, what: str) -> int | None:
        """The bytes of a field."""
        size = getattr(self, what)
        return None if size is None else nbytes(size, what)

    def __repr__(self) -> str:
        return format_call(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule of a text, as `repr` prints it.

        Example:
            >>> Schedule.parse("Schedule(prefetch=0)")
            Schedule(prefetch=0)
        """
        try:
            found = parse_call(str(text), Schedule)
            if not isinstance(found, Schedule):
                raise TypeError(found)
        except ShardingError:
            raise
        except (SyntaxError, ValueError, TypeError) as error:
            raise ShardingError(
                f"{text!r} cannot be read as a schedule",
                rule=f"it has fields by name ({', '.join(f.name for f in fields(Schedule))}) of numbers and texts",
                remedy='Schedule(prefetch=1, bucket="25MiB")',
            ) from error
        return found

    @staticmethod
    def of(what: Any) -> Schedule:
        """A schedule, the one of a text, or the default."""
        if what is None:
            return DEFAULT
        if isinstance(what, str):
            return Schedule.parse(what)
        if isinstance(what, Schedule):
            return what
        raise ShardingError(f"schedule={what!r} is no schedule", remedy="schedule=sl.Schedule(prefetch=1)")


DEFAULT = Schedule()
