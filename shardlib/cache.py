"""The folder in which compiled libraries are kept, and the lock that lets one process at a time build there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib.recipe import Missing


def folders() -> Iterator[Path]:
    """Folders in which libraries are looked for; the first that can be written to gets new ones."""
    if chosen := os.environ.get("SHARDLIB_CACHE"):
        yield Path(chosen).absolute()
        return
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        yield Path(chosen, "shardlib").absolute()
    else:
        with contextlib.suppress(RuntimeError):  # a user without a home
            yield Path.home() / ".cache" / "shardlib"
    yield Path(tempfile.gettempdir(), f"shardlib-{os.getuid()}")


def trusted(folder: Path) -> bool:
    """Whether the folder is there and, where anyone may make one, was made by us and is closed to others."""
    try:
        state = folder.stat()
    except OSError:
        return False
    return folder.parent != Path(tempfile.gettempdir()) or (state.st_uid == os.getuid() and not state.st_mode & 0o022)


def writable() -> Path | Missing:
    """The first of the folders that can be written to; it is made if need be."""
    said = []
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            said.append(f"{folder} ({error.strerror})")
            continue
        if trusted(folder):
            return folder
        said.append(f"{folder} (made by another user, or open to others)")
    return Missing(f"no folder to build in: {', '.join(said)}; name one by SHARDLIB_CACHE")


@contextlib.contextmanager
def only_one(path: Path, patience: float) -> Iterator[Missing | None]:
    """Hold a lock that ends with the process that holds it; give up after `patience` seconds."""
    end = time.monotonic() + patience
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    yield Missing(f"{holder} has been building for more than {patience:g} s (lock file {path})")
                    return
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield None
