"""Prints a plan on a terminal: its width, and colors by rich."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shardlib.compiler.plan.brief_text import WIDTH

if TYPE_CHECKING:
    from shardlib.compiler.plan.plan import Plan

_STYLES = {
    r"(?m)^\S.*$": "bold",  # headings, and totals
    r"\b\w+\[[\w ():]+\]  ": "yellow",  # collectives
    r"(?m)^ +! .*$": "red",  # warnings
    r"@[\w:()]+": "cyan",  # mesh axes
}


def text_width() -> int:
    """Returns the columns of the terminal that stdout writes to, at most 120; 120 for other streams."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def highlight(text: str) -> Text:
    """Returns the text of a plan with styles."""
    styled = Text(text)
    for pattern, style in _STYLES.items():
        styled.highlight_regex(pattern, style)
    return styled


def show(plan: Plan) -> None:
    """Prints the brief text of a plan; in color if stdout is a terminal."""
    Console().print(highlight(plan.text()), soft_wrap=True)
