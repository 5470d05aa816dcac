"""Finds the line of the user's source that a traced node comes from, backward nodes too.

A forward node belongs to the innermost frame outside of shardlib and torch. A backward node has no such frame: it runs
inside the autograd engine. But every autograd node has a sequence number, handed out in forward order. The line that
was current when the number was handed out is the line of all nodes that the autograd node's backward makes.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import typing_extensions
from torch import fx

from shardlib.core.bounded_cache import BoundedCache
from shardlib.core.fragment_tag import NO_TAG, FragmentTag, current_tag
from shardlib.core.torch_internals.torch_private import last_number, number_of, running_node


class Line(NamedTuple):
    """One line of the user's program."""

    file: str
    lineno: int
    function: str
    text: str
    section: tuple[str, ...] = ()  # the `record_function`s around it, from the outermost on
    tag: FragmentTag = NO_TAG  # the stage and the microbatch that it runs for

    def __str__(self) -> str:
        return f"{self.file}:{self.lineno} in {self.function}: {self.text}"

    @property
    def untagged(self) -> Line:
        """The same line of any stage and microbatch."""
        return self if self.tag is NO_TAG else self._replace(tag=NO_TAG)


@dataclass(frozen=True)
class Module:
    """A module: its path from the outermost called module, and its class; `instance` is its id during the trace."""

    path: str
    kind: str
    instance: int = field(default=0, repr=False, compare=False)


class Modules(NamedTuple):
    """The modules whose forward runs, outermost first; `names` are the paths of all modules in the first one, by id."""

    entries: tuple[Module, ...] = ()
    names: Mapping[int, str] | None = None
    innermost: Any = None

    def entered(self, m: Any) -> Modules:
        """Adds a `torch.nn.Module`."""
        names = {id(x): name for name, x in m.named_modules()} if self.names is None else self.names
        return Modules((*self.entries, Module(names.get(id(m), ""), type(m).__name__, id(m))), names, m)

    def apart(self) -> Modules:
        """Starts an empty list whose paths begin at the innermost module."""
        m = self.innermost
        return Modules((), None if m is None else {id(x): name for name, x in m.named_modules()}, m)

    def around(self, entries: tuple[Module, ...]) -> tuple[Module, ...]:
        """Prepends these modules to entries that were recorded `apart`."""
        prefix = self.entries[-1].path if self.entries else ""
        return (*self.entries, *(Module(".".join(filter(None, (prefix, x.path))), x.kind, x.instance) for x in entries))


modules: ContextVar[Modules] = ContextVar("shardlib_modules", default=Modules())  # noqa: B039 the default is frozen

# The line for nodes that are copied from a graph, which no frame of the user makes.
replayed: ContextVar[Line | None] = ContextVar("shardlib_replayed", default=None)


def format_file_line(line: Line | None) -> str:
    """Formats a line as `w1.py:106`, the same in every working folder."""
    return (
        "the results" if line is None or not line.file else f"{_cell(line.file) or Path(line.file).name}:{line.lineno}"
    )


def format_path_line(line: Line | None) -> str:
    """Formats a line as `tests/models/w1.py:106`, relative to the installed libraries or the working folder."""
    if line is None or not line.file:
        return "the results"  # such as an argument that is returned with another layout
    path = _cell(line.file) or line.file
    for root in (*_ROOTS, str(Path.cwd())):
        if path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    return f"{path}:{line.lineno}"


def _cell(path: str) -> str | None:
    """Returns "cell" for the temporary file of a notebook's cell."""
    return "cell" if Path(path).parent.name.startswith("ipykernel_") else None


class LineRecorder:
    """Writes `meta["line"]`, `meta["modules"]`, `meta["backward"]` and `meta["default"]` (the default dtype) of a node.

    A backward node has the modules of its line. Takes about 5 us a node.
    """

    def __init__(self, fallback: Line) -> None:
        self.fallback = fallback
        self._by_sequence: dict[int, tuple[Line, tuple[Module, ...]]] = {}
        self._seen = last_number()
        self._section: tuple[str, ...] = ()

    def record(self, node: fx.Node) -> None:
        line, inside = None, modules.get().entries
        running = running_node()
        if running is not None:
            node.meta["backward"] = True
            line, inside = self._by_sequence.get(number_of(running)(), (None, ()))
        if (copied := replayed.get()) is not None:
            line = tag_line(copied, current_tag())
        if line is None:
            line = user_line(sys._getframe(1)) or self.fallback
            if is_mark(node):
                self._section = (
                    (*self._section, str(node.args[0])) if "enter" in str(node.target) else self._section[:-1]
                )
            if self._section:
                line = line._replace(section=self._section)
            line = tag_line(line, current_tag())
        node.meta.update(line=line, default=torch.get_default_dtype())
        if inside:
            node.meta["modules"] = inside
        # Numbers handed out since the last node belong to this one: autograd makes its node just before the op runs.
        upto = last_number()
        for number in range(self._seen, upto):
            self._by_sequence[number] = line, inside
        self._seen = max(self._seen, upto)


def tag_line(line: Line, outer: FragmentTag) -> Line:
    """Returns a line that runs inside code with this tag."""
    tag = line.tag.inside(outer)
    return line if tag == line.tag else line._replace(tag=tag)


def is_mark(node: fx.Node) -> bool:
    """Returns whether a node only begins or ends a `torch.profiler.record_function`."""
    return getattr(node.target, "namespace", "") == "profiler"


def user_line(frame: FrameType | None) -> Line | None:
    """Returns the innermost line, from `frame` outwards, of the user or of a model library such as transformers."""
    own = user_frame(frame)
    return None if own is None else line_at(own.f_code, own.f_lineno)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame, from `frame` outwards, of the user or of a model library."""
    while frame is not None:
        file = frame.f_code.co_filename
        internal = _internal.get(file)
        if internal is None:
            internal = _internal[file] = is_internal(file)
        if not internal and (file != "<string>" or "__name__" in frame.f_globals):  # torch compiles texts, too
            return frame
        frame = frame.f_back
    return None


def caller_at(frame: FrameType | None) -> tuple[str, int]:
    """Returns the file and the number of the line that a user wrote, from `frame` outwards: where a warning points."""
    caller = user_frame(frame)
    return ("<unknown>", 0) if caller is None else (caller.f_code.co_filename, caller.f_lineno)


def line_at(code: CodeType, lineno: int) -> Line:
    """Returns the line `lineno` of a function's code."""
    line = _lines.get((code, lineno))
    if line is None:
        text = linecache.getline(code.co_filename, lineno).strip()
        line = _lines[code, lineno] = Line(code.co_filename, lineno, code.co_qualname, text)
    return line


def error_line(error: BaseException) -> Line | None:
    """Returns the innermost line of the user in the traceback of an exception."""
    line, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_internal(code.co_filename):
            line = line_at(code, step.tb_lineno)
        step = step.tb_next
    return line


_internal: BoundedCache[str, bool] = BoundedCache(1 << 14)  # by file
_lines: BoundedCache[tuple[CodeType, int], Line] = BoundedCache(1 << 14)


def is_internal(file: str) -> bool:
    if file.startswith(_EXAMPLES):
        return False
    return file.startswith(("<frozen", *_LIBRARIES)) or (file.startswith(_STDLIB) and "site-packages" not in file)


_HERE = Path(__file__).absolute().parents[1]
_EXAMPLES = f"{_HERE / 'examples'}{os.sep}"
_STDLIB = f"{Path(os.__file__).parent}{os.sep}"
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (_HERE, (_HERE / "ops").resolve(), Path(torch.__file__).parent))
_LIBRARIES += (typing_extensions.__file__,)  # torch marks functions as deprecated by wrappers of it
_LIBRARY_FOLDERS = (str(Path(torch.__path__[0]).parent), sysconfig.get_paths()["purelib"], str(_HERE.parent))
_ROOTS = sorted({*_LIBRARY_FOLDERS}, key=len, reverse=True)
