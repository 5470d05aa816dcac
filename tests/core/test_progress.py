"""One line of progress on a terminal, for work that takes long."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.core import progress


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.01)
    monkeypatch.setattr(progress, "_EVERY", 0.01)


@pytest.mark.usefixtures("at_once")
def test_a_checkpoint_shows_the_bytes_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The files are there before the last of them is renamed, which takes long here."""
    terminal = Stream(is_terminal=True)
    monkeypatch.setattr("sys.stderr", terminal)
    finish = sl.Checkpoints._finish

    def finish_late(*args: Any) -> None:
        end = time.monotonic() + 100
        while terminal.getvalue().count("\r") < 2 and time.monotonic() < end:
            time.sleep(0.01)
        finish(*args)

    monkeypatch.setattr(sl.Checkpoints, "_finish", finish_late)
    sl.Checkpoints(tmp_path).save(3, {"x": torch.ones(4096)})
    text = terminal.getvalue()
    assert re.search(r"\rshardlib saves step-000003: [1-9][0-9.]* kB, [0-9]+ s", text), text
    assert text.count("\n") == 1


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("is_terminal", "variables"),
    [(True, {"SHARDLIB_PROGRESS": "0"}), (True, {"RANK": "1"}), (False, {"SHARDLIB_PROGRESS": "1", "RANK": "0"})],
)
def test_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str]) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with progress.show_progress(lambda: "waits"):
        time.sleep(0.1)
    assert stream.getvalue() == ""
