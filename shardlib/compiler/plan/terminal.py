"""Prints a plan on a terminal: its width, and colors by rich."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, ClassVar

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.text import Text
from rich.theme import Theme

from shardlib.compiler.plan.summary import WIDTH

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan


class _Highlighter(RegexHighlighter):
    base_style = "plan."
    highlights: ClassVar[list[str]] = [
        r"(?m)^(?P<heading>\S.*)$",
        r"(?P<collective>\b\w+\[[\w ():]+\])",
        r"(?m)^ +(?P<warning>! .*)$",
        r"(?P<axes>@\w+)",
    ]


_THEME = Theme(
    {"plan.heading": "bold", "plan.collective": "yellow", "plan.warning": "red", "plan.axes": "cyan"}, inherit=False
)


def text_width() -> int:
    """Returns the columns of the terminal that stdout writes to, at most 120; 120 for other streams."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def show(plan: Plan) -> None:
    """Prints the brief text of a plan; in color if stdout is a terminal."""
    console = Console(theme=_THEME, width=None if sys.stdout.isatty() else WIDTH)
    text = Text(plan.text(width=min(WIDTH, console.width)))
    _Highlighter().highlight(text)
    console.print(text, soft_wrap=True)
