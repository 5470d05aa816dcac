"""Recipes of shardlib's two libraries: their sources, compiler and flags. `library.py` runs them.

The key of a source depends only on the files that it includes: a changed header recompiles the sources that include it,
and torch's version matters to the binding alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[1] / "cuda"  # the wheel's folder, or the tree's link to its top folder cuda/

# CUDA sources and the cards that they are for; the first line that matches counts. "90a" is Hopper and nothing else,
# "80" every card from Ampere on: code for it, and PTX that the driver translates for later ones.
CARDS: list[tuple[str, tuple[str, ...]]] = [
    ("*sm80*.cu", ("80",)),
    ("attention_delta.cu", ("80", "90a")),
    ("attention_*.cu", ("90a",)),
    ("*.cu", ("80", "90a")),
]

# Where torch's stable ABI begins for us: a library made for 2.11 runs with later versions too.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason why something is missing, for the user; `log` is the compiler's output."""

    reason: str
    log: Path | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Unit:
    """One source, the command that compiles it (`-c source -o object` follows), and digests.

    `text` is the digest of the source and its includes, `key` also of the command and the compiler.
    """

    source: Path
    command: tuple[str, ...]
    text: str
    key: str

    def changed(self) -> bool:
        """Returns whether the source has changed since `key` was computed."""
        return _text(self.source) != self.text


@dataclass(frozen=True, slots=True)
class Recipe:
    """A library: its units, and the command that links their objects (in front of `libraries`).

    `key` is a digest of sources and flags, `tool` of the compiler; without a compiler, `tool` is the reason.
    """

    name: str
    units: tuple[Unit, ...]
    link: tuple[str, ...]
    libraries: tuple[str, ...]
    key: str
    tool: str | Missing


def make_recipe(name: str, folder: Path = SOURCES) -> Recipe | Missing:
    """Returns the recipe of "host" (collectives in shared memory) or "cuda" (kernels and binding) for `folder`."""
    if sys.platform != "linux":
        return Missing(f"shardlib's {name} kernels are for Linux, and this is {sys.platform}")
    return {"host": _host, "cuda": _cuda}[name](folder)


def _host(folder: Path) -> Recipe | Missing:
    # Random numbers must be equal on all devices: no fused operations. No errno, so that sqrt vectorizes.
    exact = ("-ffp-contract=off", "-fno-math-errno")
    flags = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", *exact)
    compiler = _first(shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"])
    if isinstance(compiler, Missing):
        compiler = Missing("no C++ compiler: CXX names none, and there is no c++, g++ or clang++ on PATH")
    units = [(path, flags) for path in sorted(folder.glob("*.cpp")) if path.name != "binding.cpp"]
    return assemble("host", folder, units, compiler, (*flags, "-shared"), ("-lrt",))


def _cuda(folder: Path) -> Recipe | Missing:
    home = Path(torch.__file__).parent
    common = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
    binding = (*common, STABLE_ABI, f"-I{home / 'include'}")
    units: list[tuple[Path, tuple[str, ...]]] = [
        (path, (*common, *_cards(path))) for path in sorted(folder.glob("*.cu"))
    ]
    units += [(path, binding) for path in folder.glob("binding.cpp")]
    link = ("--shared", "--cudart", "static", "-Xcompiler", "-fPIC", f"-L{home / 'lib'}", "-Xlinker", "--no-as-needed")
    return assemble("cuda", folder, units, _nvcc(), link, ("-ltorch",))


def _cards(source: Path) -> Iterable[str]:
    for card in next(cards for pattern, cards in CARDS if source.match(pattern)):
        code = f"[sm_{card},compute_{card}]" if card.isdecimal() else f"sm_{card}"
        yield f"-gencode=arch=compute_{card},code={code}"


def _nvcc() -> list[str] | Missing:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    compiler = _first(
        *([str(Path(home, "bin", "nvcc"))] for home in homes if home), ["nvcc"], ["/usr/local/cuda/bin/nvcc"]
    )
    if isinstance(compiler, Missing):
        return Missing("no CUDA compiler: CUDA_HOME names none, there is no nvcc on PATH nor in /usr/local/cuda")
    return compiler


def _first(*commands: list[str]) -> list[str] | Missing:
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    return Missing("not found")


def assemble(
    name: str,
    folder: Path,
    sources: Sequence[tuple[Path, tuple[str, ...]]],
    compiler: list[str] | Missing,
    link: tuple[str, ...],
    libraries: tuple[str, ...],
) -> Recipe | Missing:
    """Assembles the recipe of sources with their flags, a compiler (or why there is none) and link flags."""
    if not sources:
        return Missing(f"there are no sources of the {name} kernels in {folder}")
    tool = compiler if isinstance(compiler, Missing) else _identity(compiler)
    command = () if isinstance(compiler, Missing) else tuple(compiler)
    units, keys = [], []
    for source, flags in sources:
        text = _text(source)
        keys.append(digest(platform.machine(), *flags, text))
        units.append(Unit(source, (*command, *flags), text, digest(keys[-1], tool if isinstance(tool, str) else "")))
    return Recipe(name, tuple(units), (*command, *link), libraries, digest(*keys, *link, *libraries), tool)


_COMPILER_VARIABLES = ("NVCC_", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


def _identity(compiler: list[str]) -> str | Missing:
    """Returns a digest of the versions of the compiler, and of the host compiler behind nvcc."""
    commands = [compiler, ["g++"]] if Path(compiler[0]).name == "nvcc" else [compiler]
    # The user's flags (CXX="g++ -march=native"), and the environment variables of compilers.
    parts = [
        *compiler[1:],
        *(value for name, value in sorted(os.environ.items()) if name.startswith(_COMPILER_VARIABLES)),
    ]
    for command in commands:
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        except OSError as error:
            return Missing(f"{command[0]} does not start: {error.strerror}")
        parts.append(done.stdout)
    return digest(*parts)


def _text(source: Path) -> str:
    """Returns a digest of a source and our files that it includes, and of torch's version if any includes torch."""
    seen: dict[Path, str] = {}
    ahead = [source]
    while ahead:
        path = ahead.pop()
        if path not in seen and path.is_file():
            seen[path] = path.read_text()
            names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', seen[path], re.MULTILINE)
            ahead += [path.parent / name for name in reversed(names)]
    version = torch.__version__ if any("#include <torch/" in text for text in seen.values()) else ""
    return digest(version, *(part for path, text in seen.items() for part in (path.name, text)))


def digest(*parts: str) -> str:
    """Returns a digest of strings, 16 hex digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
