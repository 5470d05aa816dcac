"""The cache folder of compiled libraries, and the lock that lets one process at a time build there.

Every file has a seal next to it, a digest of its bytes. A file that does not match its seal, because the disk was full
or the file was overwritten, is deleted and rebuilt: loading it could crash the process.

Files here become code of this process. So folders and files count only if they belong to this user or to root, are not
writable by others, and are no symbolic links. The default is never a folder whose name others can guess, such as one
in the system's temporary directory.
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
    """Returns the cache folder: SHARDLIB_CACHE, else shardlib in XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("SHARDLIB_CACHE"):
        return Path(chosen).absolute()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen, "shardlib").absolute()
    try:
        return Path.home() / ".cache" / "shardlib"
    except RuntimeError:
        return Missing("no folder to build in: this user has no home; name one by SHARDLIB_CACHE")


def is_trusted(folder: Path) -> bool:
    """Returns whether this is a folder, no link, of this user or of root, and not writable by others."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and _is_ours(state)


def _is_ours(state: os.stat_result) -> bool:
    return state.st_uid in (os.getuid(), 0) and not state.st_mode & 0o022


def read(path: Path) -> bytes:
    """Reads a file that others cannot have written.

    Raises `OSError` if there is none, or if it is a symbolic link, another user's, or writable by others.
    """
    with open(path, "rb", opener=_opened) as file:
        state = os.fstat(file.fileno())
        if not (stat.S_ISREG(state.st_mode) and _is_ours(state)):
            raise PermissionError(errno.EPERM, "it is no file of this user, or open to others", str(path))
        return file.read()


def _opened(path: str, flags: int) -> int:
    """Opens a file without following a symbolic link, and without blocking on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def seal(path: Path, temporary: Path) -> None:
    """Moves a finished file to `path`, and writes its seal."""
    mark = temporary.with_name(temporary.name + ".seal")
    temporary.chmod(0o755)
    mark.write_text(_digest(temporary))
    place(mark, _seal_path(path))
    temporary.replace(path)


def place(text: Path, path: Path) -> None:
    """Moves a finished text file to `path`, writable only by the user whatever the umask."""
    text.chmod(0o644)
    text.replace(path)


def is_intact(path: Path) -> bool:
    """Returns whether a file exists and matches its seal; deletes it otherwise, if permitted."""
    try:
        if read(_seal_path(path)).decode() == _digest(path):
            return True
    except OSError:
        if not os.path.lexists(path):
            return False
    discard(path)
    return False


def discard(path: Path) -> None:
    """Deletes a file and its seal."""
    for each in (path, _seal_path(path)):
        with contextlib.suppress(OSError):  # such as a read-only folder
            each.unlink(missing_ok=True)


def _seal_path(path: Path) -> Path:
    return path.with_name(path.name + ".seal")


def _digest(path: Path) -> str:
    return hashlib.sha256(read(path)).hexdigest()


def writable_folder() -> Path | Missing:
    """Returns the cache folder, created if missing, or why it cannot be used."""
    home = folder()
    if isinstance(home, Missing):
        return home
    try:
        if home.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home):
            pass
        fault = "" if is_trusted(home) else "made by another user, or open to others"
    except OSError as error:
        fault = str(error.strerror)
    return Missing(f"no folder to build in: {home} ({fault}); name one by SHARDLIB_CACHE") if fault else home


def make_subfolder(part: Path) -> None:
    """Makes a folder inside the cache. Raises `OSError` if its name is taken."""
    part.mkdir(exist_ok=True, mode=0o700)
    if part.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(part))
    part.chmod(0o700)  # an older one may be open to others; their files in it are ignored
    if not is_trusted(part):
        raise PermissionError(errno.EPERM, "it was made by another user", str(part))


@contextlib.contextmanager
def hold_lock(path: Path, patience: float) -> Iterator[Missing | None]:
    """Holds a lock that ends with its process; yields the reason if another holds it for `patience` seconds."""
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
