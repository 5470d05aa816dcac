"""Compiles a kernel source for the host emulation and calls it with torch tensors.

A source of `cuda/` is compiled by g++ with `cuda/emulation` behind its primitives, into a library that is kept by the
hash of everything that went in. Patches make mutants of it; a driver adds code after it. Its `extern "C"` launchers are
then called as they are on a GPU: they return 0, or a code whose text is raised as an `EmulationError`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

CUDA = Path(__file__).resolve().parents[2] / "cuda"
FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=fast", "-fPIC", "-w", "-pipe")


class EmulationError(AssertionError):
    """A launcher's error: a refused argument, a deadlock, or something that the hardware forbids."""


class BuildError(RuntimeError):
    """The host compiler refused a kernel source."""


class Patch(NamedTuple):
    """One planted change: `old` occurs exactly once in `file` (a name in cuda/, in no folder) and becomes `new`."""

    file: str
    old: str
    new: str


class Build(NamedTuple):
    """What is compiled: a source of cuda/ with patches and macros, and code that follows it."""

    source: str
    patches: tuple[Patch, ...] = ()
    defines: tuple[str, ...] = ()
    driver: str = ""


def compiler() -> str:
    """The host compiler; skips the test that needs it when there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        pytest.skip("the emulation needs a C++17 compiler (g++, or the one that CXX names)")
    return found


def library(
    source: str, *, patches: Sequence[Patch] = (), defines: Sequence[str] = (), driver: str = ""
) -> ctypes.CDLL:
    """The emulated library of one kernel source, compiled when its cache has none."""
    return _load(Build(source, tuple(patches), tuple(defines), driver))


def prepare(builds: Iterable[Build]) -> None:
    """Compiles several libraries at once, as many as there are processors."""
    compiler()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_compile, builds))


@functools.cache
def _load(build: Build) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(_compile(build)))
    loaded.shardlib_last_error.restype = ctypes.c_char_p
    configure(loaded)
    return loaded


def configure(loaded: ctypes.CDLL, *, seed: int = 1, resident: int = 2, multiprocessors: int = 3) -> None:
    """The order of events, the CTAs of an ordinary launch that live at once, and the SMs that host code is told of."""
    loaded.shardlib_emulation_configure(ctypes.c_uint64(seed), resident, multiprocessors)


def call(loaded: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Calls a launcher: tensors go as their addresses, ints as 64-bit, floats as float, structures by reference."""
    if getattr(loaded, name)(*map(_argument, arguments)) != 0:
        raise EmulationError(loaded.shardlib_last_error().decode())


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.byref(value) if isinstance(value, ctypes.Structure) else value


class Memory:
    """Tensors with guard zones around them: `check` fails when a kernel wrote outside the tensor that it was given."""

    GUARD = 512  # bytes on either side, all ones: NaN in every float format

    def __init__(self) -> None:
        self._kept: list[tuple[str, Tensor, int, int]] = []

    def tensor(self, like: Tensor, name: str = "a tensor") -> Tensor:
        """A copy of `like` with its strides, in guarded memory that is aligned to 256 bytes."""
        extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        size = extent * like.element_size()
        raw = torch.full((size + 2 * self.GUARD + 256,), 0xFF, dtype=torch.uint8)
        start = self.GUARD + -(raw.data_ptr() + self.GUARD) % 256
        self._kept.append((name, raw, start, start + size))
        storage = raw[start : start + size].view(like.dtype) if size else torch.empty(0, dtype=like.dtype)
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in like.stride()]  # of what is expanded
        new = storage.as_strided(like.shape, like.stride())
        new[tuple(once)] = like[tuple(once)]
        return new

    def empty(self, *shape: int, dtype: torch.dtype, name: str = "an output") -> Tensor:
        """A guarded output, all ones: an element that nobody writes stays NaN."""
        out = self.tensor(torch.empty(shape, dtype=dtype), name)
        if out.numel():
            out.view(-1).view(torch.uint8).fill_(0xFF)
        return out

    def check(self) -> None:
        for name, raw, start, end in self._kept:
            if not bool((raw[:start] == 0xFF).all()) or not bool((raw[end:] == 0xFF).all()):
                raise EmulationError(f"the kernel wrote outside {name}")


# --- compiling --------------------------------------------------------------------------------------------------------


@functools.cache
def cache() -> Path:
    """Where what was compiled is kept."""
    home = os.environ.get("SHARDLIB_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home else Path(tempfile.gettempdir()) / f"shardlib-{os.getuid()}"
    folder = folder / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@functools.cache
def _sources(source: str) -> dict[str, bytes]:
    """A source and every header that it includes for the host, by their names in cuda/."""
    found: dict[str, bytes] = {}
    todo = [source]
    while todo:
        name = todo.pop()
        if name in found or name.startswith("device/"):
            continue
        found[name] = (CUDA / name).read_bytes()
        todo += [_inside(name, included) for included in _INCLUDE.findall(found[name].decode())]
    return dict(sorted(found.items()))


def _inside(name: str, included: str) -> str:
    return included if included.startswith(("device/", "emulation/")) else str(Path(name).parent / included)


@functools.cache
def _version() -> bytes:
    return subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout


def hashed(*parts: bytes) -> str:
    """A name for what the compiler makes of these parts."""
    digest = hashlib.sha256()
    for part in (_version(), " ".join(FLAGS).encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _run(arguments: Sequence[str], target: Path) -> None:
    """Compiles into a file of its own, then moves it to its name: another process may do the same."""
    partial = target.with_suffix(f".{os.getpid()}.{os.urandom(4).hex()}")
    done = subprocess.run([compiler(), *FLAGS, *arguments, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{target.name}: " + done.stderr[-4000:])
    partial.replace(target)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Who makes a library makes it alone: another thread or process waits, and finds it."""
    with target.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _machine() -> Path:
    """The emulated machine as one object file, compiled once for all kernels."""
    files = sorted((CUDA / "emulation").iterdir())
    target = cache() / f"machine-{hashed(*(file.read_bytes() for file in files))}.o"
    with _alone(target):
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix="shardlib-") as folder:
                whole = Path(folder) / "machine.cpp"
                whole.write_text("".join(f'#include "{file}"\n' for file in files if file.suffix == ".cpp"))
                _run(["-O3", "-c", str(whole)], target)
    return target


def _compile(build: Build) -> Path:
    changed = dict(_sources(build.source))
    for file, old, new in build.patches:
        text = changed[file].decode()
        if text.count(old) != 1:
            raise BuildError(f"{file} holds {old!r} {text.count(old)} times; a patch needs it once")
        changed[file] = text.replace(old, new).encode()
    machine = _machine()
    rest = (machine.name, *build.defines, build.driver)
    key = hashed(*changed.values(), *(part.encode() for part in rest))
    target = cache() / f"{build.source.split('.')[0]}-{key}.so"
    with _alone(target), tempfile.TemporaryDirectory(prefix="shardlib-") as name:
        if target.exists():
            return target
        folder = Path(name)
        (folder / "emulation").symlink_to(CUDA / "emulation")
        for file, data in changed.items():
            if "/" not in file:
                (folder / file).write_bytes(data)
        (folder / "all.cpp").write_text(f'#include "{build.source}"\n{build.driver}\n')
        defines = [f"-D{d}" for d in build.defines]
        _run([*defines, "-shared", str(folder / "all.cpp"), str(machine)], target)
    return target
