"""Which line of the user's source a traced node comes from, backward nodes too.

A forward node belongs to the innermost frame that is not the library's or torch's. A backward node has no such frame:
it runs inside the autograd engine. But every autograd node has a sequence number, handed out in forward order, so the
line that was current when a number was handed out is the line of everything that autograd node computes later.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import typing_extensions
from torch import fx

from shardlib.core.bounded_cache import Bounded
from shardlib.core.torch_private import last_number, number_of, running_node


class Line(NamedTuple):
    """One line of the user's program."""

    file: str
    lineno: int
    function: str
    text: str
    section: tuple[str, ...] = ()  # the `record_function`s around it, from the outermost on

    def __str__(self) -> str:
        return f"{self.file}:{self.lineno} in {self.function}: {self.text}"


class Module(NamedTuple):
    """A module: its path from the outermost one that was called, and its class."""

    path: str
    kind: str


class Modules(NamedTuple):
    """The modules whose forward runs, from the outermost on; `names` are the paths of all under the first, by id."""

    entries: tuple[Module, ...] = ()
    names: Mapping[int, str] | None = None
    innermost: Any = None

    def entered(self, m: Any) -> Modules:
        """With one more, a `torch.nn.Module`."""
        names = {id(x): name for name, x in m.named_modules()} if self.names is None else self.names
        return Modules((*self.entries, Module(names.get(id(m), ""), type(m).__name__)), names, m)

    def apart(self) -> Modules:
        """None, with paths from the innermost one on."""
        m = self.innermost
        return Modules((), None if m is None else {id(x): name for name, x in m.named_modules()}, m)

    def around(self, entries: tuple[Module, ...]) -> tuple[Module, ...]:
        """What was called `apart`, called in here."""
        prefix = self.entries[-1].path if self.entries else ""
        return (*self.entries, *(Module(".".join(filter(None, (prefix, x.path))), x.kind) for x in entries))


modules: ContextVar[Modules] = ContextVar("shardlib_modules", default=Modules())  # noqa: B039 it is frozen

# The line of what is written out again from a graph, where no frame of the user's has it.
replayed: ContextVar[Line | None] = ContextVar("shardlib_replayed", default=None)


def spot(line: Line | None) -> str:
    """`w1.py:106`: the same in whatever folder a process runs."""
    return (
        "the results" if line is None or not line.file else f"{_cell(line.file) or Path(line.file).name}:{line.lineno}"
    )


def place(line: Line | None) -> str:
    """`tests/models/w1.py:106`: relative to the installed libraries, or to the folder that the program runs in."""
    if line is None or not line.file:
        return "the results"  # what moves where no op stands: an argument that is returned elsewhere
    path = _cell(line.file) or line.file
    for root in (*_ROOTS, str(Path.cwd())):
        if path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    return f"{path}:{line.lineno}"


def _cell(path: str) -> str | None:
    """What a notebook's cell is called, whose file is one of its kernel's process."""
    return "cell" if Path(path).parent.name.startswith("ipykernel_") else None


class LineRecorder:
    """Writes `meta["line"]` (and `meta["backward"]`) of a node at the moment it is made, for about 5 us a node.

    Also the default dtype of that moment, as `meta["default"]`."""

    def __init__(self, fallback: Line) -> None:
        self.fallback = fallback
        self._by_sequence: dict[int, Line] = {}
        self._seen = last_number()
        self._section: tuple[str, ...] = ()

    def record(self, node: fx.Node) -> None:
        line = None
        running = running_node()
        if running is not None:
            node.meta["backward"] = True
            line = self._by_sequence.get(number_of(running)())
        line = replayed.get() or line
        if line is None:
            line = user_line(sys._getframe(1)) or self.fallback
            if is_mark(node):
                self._section = (
                    (*self._section, str(node.args[0])) if "enter" in str(node.target) else self._section[:-1]
                )
            if self._section:
                line = line._replace(section=self._section)
        node.meta.update(line=line, default=torch.get_default_dtype())
        if (inside := modules.get().entries) and running is None:
            node.meta["modules"] = inside
        # Numbers handed out since the last node are this one's: autograd makes its node just before the op runs.
        upto = last_number()
        for number in range(self._seen, upto):
            self._by_sequence[number] = line
        self._seen = max(self._seen, upto)


def is_mark(node: fx.Node) -> bool:
    """Whether a node only begins or ends a `torch.profiler.record_function`."""
    return getattr(node.target, "namespace", "") == "profiler"


def user_line(frame: FrameType | None) -> Line | None:
    """The innermost line, from `frame` outwards, that a user wrote (or a model library, such as transformers)."""
    found = user_frame(frame)
    return None if found is None else line_at(found.f_code, found.f_lineno)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of that line."""
    while frame is not None:
        file = frame.f_code.co_filename
        internal = _internal.get(file)
        if internal is None:
            internal = _internal[file] = is_internal(file)
        if not internal and (file != "<string>" or "__name__" in frame.f_globals):  # a trace evaluates a text, too
            return frame
        frame = frame.f_back
    return None


def caller_at(frame: FrameType | None) -> tuple[str, int]:
    """Returns the file and the number of the line that a user wrote, from `frame` outwards: where a warning points."""
    caller = user_frame(frame)
    return ("<unknown>", 0) if caller is None else (caller.f_code.co_filename, caller.f_lineno)


def line_at(code: CodeType, lineno: int) -> Line:
    """The line `lineno` of a function's code."""
    line = _lines.get((code, lineno))
    if line is None:
        text = linecache.getline(code.co_filename, lineno).strip()
        line = _lines[code, lineno] = Line(code.co_filename, lineno, code.co_qualname, text)
    return line


def error_line(error: BaseException) -> Line | None:
    """The user's line that an exception passed through last."""
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_internal(code.co_filename):
            found = line_at(code, step.tb_lineno)
        step = step.tb_next
    return found


_internal: Bounded[str, bool] = Bounded(1 << 14)  # by file
_lines: Bounded[tuple[CodeType, int], Line] = Bounded(1 << 14)


def is_internal(file: str) -> bool:
    if file.startswith(_EXAMPLES):
        return False
    return file.startswith(("<frozen", *_LIBRARIES)) or (file.startswith(_STDLIB) and "site-packages" not in file)


_HERE = Path(__file__).absolute().parents[1]
_EXAMPLES = f"{_HERE / 'examples'}{os.sep}"
_STDLIB = f"{Path(os.__file__).parent}{os.sep}"
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (_HERE, (_HERE / "ops").resolve(), Path(torch.__file__).parent))
_LIBRARIES += (typing_extensions.__file__,)  # torch marks functions as deprecated by wrappers of it
_ROOTS = sorted({str(Path(torch.__path__[0]).parent), sysconfig.get_paths()["purelib"]}, key=len, reverse=True)
