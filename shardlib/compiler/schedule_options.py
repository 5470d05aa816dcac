"""The user's schedule of messages: how far collectives run ahead of their readers, and what is offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardlib.core.byte_sizes import nbytes
from shardlib.core.errors import ShardingError
from shardlib.core.repr_literals import format_call, parse_call

SAVED = "saved"  # all that the forward pass keeps for the backward one
MOMENTS, PARAMETERS = STATE = "moments", "parameters"  # the state of optimizers, and the tensors that they train

# How far messages run ahead, the furthest first, which takes the most memory: rows in parts; no parts; no call moves
# for a message; nothing is gathered ahead; nothing moves.
AHEAD = ("parts", "whole", "calls stay", "gathers stay", "all stay")


@dataclass(frozen=True)
class Schedule:
    """The way in which a program hides messages behind arithmetic; None leaves a field to the machine of the mesh.

    The weights of a layer are gathered `prefetch` layers ahead, and held until their last reader. (Layers are what the
    program repeats; without repetition, each message counts as one.) Gathers and gradient reductions travel in messages
    of up to `bucket` bytes. Nothing is gathered ahead while more than `cap` bytes of gathered weights would be held.
    Sizes are bytes or texts with a unit.

    `offload` moves values that are saved for the backward pass to the host's memory: `"saved"` all of them, names of
    ops (`"mm"`, `["mm", "tanh"]`) their results. They return `prefetch` layers before they are read, so that at most
    `1 + prefetch` layers' saved values are on the device. `"moments"` (the state of optimizers) and `"parameters"` live
    in the host's memory between calls: they are copied in as many layers before they are read, and out when they are
    updated. Reading them outside brings them back. A list combines several. Results do not change.

    `parts` is the number of parts in which a device works on its rows. While the message of one part is in flight, the
    device computes another, so that sums on the critical path (of tensor parallelism) are hidden, too. If the machine
    knows the launch time of calls, the default is 2 where its clock predicts a gain; 1 turns this off.

    Raises `ShardingError` for a negative distance and invalid sizes and names, naming all of them.

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
            names: tuple[Any, ...] = (self.offload,) if isinstance(self.offload, str) else tuple(self.offload)
            object.__setattr__(self, "offload", names)
        ahead = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
            faults.append(f"prefetch={ahead!r} is no number of layers, 0 or more")
        if self.parts is not None and (type(self.parts) is not int or self.parts < 1):
            faults.append(f"parts={self.parts!r} is no number of parts, 1 or more")
        for field in ("bucket", "cap"):
            try:
                self.nbytes(field)
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
        """The kinds of state that live in the host's memory between calls."""
        return tuple(word for word in STATE if word in (self.offload or ()))

    @property
    def saved(self) -> str | tuple[str, ...] | None:
        """The saved values that wait in the host's memory: all, those of ops with these names, or None."""
        if self.offload is None or SAVED in self.offload:
            return None if self.offload is None else SAVED
        return tuple(name for name in self.offload if name not in STATE) or None

    def nbytes(self, field: str) -> int | None:
        """Returns a field in bytes."""
        size = getattr(self, field)
        return None if size is None else nbytes(size, field)

    def __repr__(self) -> str:
        return format_call(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads the text of a schedule, as `repr` prints it."""
        try:
            schedule = parse_call(str(text), Schedule)
            if not isinstance(schedule, Schedule):
                raise TypeError(schedule)
        except ShardingError:
            raise
        except (SyntaxError, ValueError, TypeError) as error:
            raise ShardingError(
                f"{text!r} cannot be read as a schedule",
                rule=f"it has fields by name ({', '.join(f.name for f in fields(Schedule))}) of numbers and texts",
                remedy='Schedule(prefetch=1, bucket="25MiB")',
            ) from error
        return schedule

    @staticmethod
    def convert(schedule: Any) -> Schedule:
        """Returns a schedule, reads the text of one, or returns the default for None."""
        if schedule is None:
            return DEFAULT
        if isinstance(schedule, str):
            return Schedule.parse(schedule)
        if isinstance(schedule, Schedule):
            return schedule
        raise ShardingError(f"schedule={schedule!r} is no schedule", remedy="schedule=sl.Schedule(prefetch=1)")


DEFAULT = Schedule()
