"""The folder in which compiled libraries are kept, and the lock that lets one process at a time build there.

Beside every file that is kept stands its seal, a digest of its bytes. A file that does not fit its seal, since a disk
was full or somebody wrote to it, is deleted and made again: to load it could end the process.

What lies here becomes code of this process. So folders and files count only if they belong to this user or to root, are
closed to others, and are no symbolic links; and no folder is used whose name others can guess, as one under the
system's temporary directory, unless the user names it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib.build.build_recipe import Missing


def folder() -> Path | Missing:
    """The folder in which libraries are kept: SHARDLIB_CACHE, or one in XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("SHARDLIB_CACHE"):
        return Path(chosen).absolute()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen, "shardlib").absolute()
    try:
        return Path.home() / ".cache" / "shardlib"
    except RuntimeError:
        return Missing("no folder to build in: this user has no home; name one by SHARDLIB_CACHE")


def trusted(folder: Path) -> bool:
    """True if this is a folder, and no link to one, of this user or of root, to which nobody else can write."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and _is_ours(state)


def _is_ours(state: os.stat_result) -> bool:
    return state.st_uid in (os.getuid(), 0) and not state.st_mode & 0o022


def read(path: Path) -> bytes:
    """The bytes of a file that this process may rely on.

    Raises `OSError` if there is none, or it is a symbolic link, another user's or open to others.
    """
    with open(path, "rb", opener=_opened) as file:
        state = os.fstat(file.fileno())
        if not (stat.S_ISREG(state.st_mode) and _is_ours(state)):
            raise PermissionError(errno.EPERM, "it is no file of this user, or open to others", str(path))
        return file.read()


def _opened(path: str, flags: int) -> int:
    """Opens a file, and not what a symbolic link at its place leads to; a pipe does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def seal(path: Path, made: Path) -> None:
    """Give the finished file `made` its place and its seal."""
    mark = made.with_name(made.name + ".seal")
    made.chmod(0o755)
    mark.write_text(_digest(made))
    place(mark, _mark(path))
    made.replace(path)


def place(text: Path, path: Path) -> None:
    """Give a finished text its place; whatever the user's umask, nobody else can write to it."""
    text.chmod(0o644)
    text.replace(path)


def sound(path: Path) -> bool:
    """Whether the file is there as it was sealed; what is not is deleted, if we may."""
    try:
        if read(_mark(path)).decode() == _digest(path):
            return True
    except OSError:
        if not os.path.lexists(path):
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
    return hashlib.sha256(read(path)).hexdigest()


def writable() -> Path | Missing:
    """The folder, which is made if need be, or why nothing can be kept in it."""
    home = folder()
    if isinstance(home, Missing):
        return home
    try:
        if home.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home):
            pass
        fault = "" if trusted(home) else "made by another user, or open to others"
    except OSError as error:
        fault = str(error.strerror)
    return Missing(f"no folder to build in: {home} ({fault}); name one by SHARDLIB_CACHE") if fault else home


def make_inside(part: Path) -> None:
    """Make a folder inside the cache's. Raises `OSError` if something else has its name."""
    part.mkdir(exist_ok=True, mode=0o700)
    if part.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(part))
    part.chmod(0o700)  # an older one may be open to others: their files in it are not read
    if not trusted(part):
        raise PermissionError(errno.EPERM, "it was made by another user", str(part))


@contextlib.contextmanager
def only_one(path: Path, patience: float) -> Iterator[Missing | None]:
    """Hold a lock that ends with the process that holds it; give up after `patience` seconds."""
    end = time.monotonic() + patience
    with open(path, "a+", opener=_opened) as file:
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
