"""The folder in which compiled libraries are kept, and the lock that lets one process at a time build there.

Beside every file that is kept stands its seal, a digest of its bytes. A file that does not fit its seal, since a disk
was full or somebody wrote to it, is deleted and made again: to load it could end the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib.build.build_recipe import Missing


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
    """Whether the folder is there, made by us or by root, and closed to others: its libraries become our code."""
    try:
        state = folder.stat()
    except OSError:
        return False
    return state.st_uid in (os.getuid(), 0) and not state.st_mode & 0o022


def seal(path: Path, made: Path) -> None:
    """Give the finished file `made` its place and its seal."""
    mark = made.with_name(made.name + ".seal")
    mark.write_text(_digest(made))
    mark.replace(_mark(path))
    made.replace(path)


def sound(path: Path) -> bool:
    """Whether the file is there as it was sealed; what is not is deleted, if we may."""
    try:
        if _mark(path).read_text() == _digest(path):
            return True
    except OSError:
        if not path.exists():
            return False
    discard(path)
    return False


def discard(path: Path) -> None:
    """Delete a file and its seal."""
    for each in (path, _mark(path)):
        with contextlib.suppress(OSError):  # a folder that is read-only: others will say the same of the file
            each.unlink(missing_ok=True)


def _mark(path: Path) -> Path:
    return path.with_name(path.name + ".seal")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
