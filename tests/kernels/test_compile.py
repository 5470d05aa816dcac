"""Gates that need a CUDA compiler but no GPU: every kernel compiles without spills, to the intended instructions.

A source file of cuda/ has one row here: what its machine code must contain, as regular expressions, by card.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from shardlib.build import library, ptxas_report
from shardlib.build.build_recipe import CARDS, SOURCES, Missing, Recipe, make_recipe

MEGABYTES = 15  # of the whole library

# Tensor memory accelerator in, warpgroup matmuls, registers handed from the producer to the consumers.
WARP_SPECIALIZED = {"sm_90a": (r"UTMALDG", r"HGMMA", r"USETMAXREG")}
# Asynchronous copies to shared memory, matmuls of a warp.
AMPERE = {"sm_80": (r"LDGSTS\.E.*\.128", r"HMMA\.16816\.F32", r"LDSM")}
# 16 bytes a thread, and flags with release and acquire that other GPUs see.
PEERS = dict.fromkeys(("sm_80", "sm_90a"), (r"LD\S*\.128", r"ST\S*\.128", r"\.STRONG\.SYS"))

EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "all_gather.cu": PEERS,
    "all_to_all.cu": PEERS,
    "attention_backward.cu": WARP_SPECIALIZED,
    "attention_delta.cu": dict.fromkeys(("sm_80", "sm_90a"), (r"LDG\.E\.128",)),
    "attention_forward.cu": WARP_SPECIALIZED,
    "attention_sm80_backward.cu": AMPERE,
    "attention_sm80_forward.cu": AMPERE,
    "reduce_scatter.cu": PEERS,
}

KERNELS = [path.name for path in sorted(SOURCES.glob("*.cu"))]
WANTED = make_recipe("cuda")
pytestmark = [
    pytest.mark.skipif(isinstance(WANTED, Missing), reason=str(WANTED)),
    pytest.mark.skipif(isinstance(WANTED, Recipe) and isinstance(WANTED.tool, Missing), reason="no CUDA compiler"),
]


@functools.cache
def _built() -> tuple[Path, dict[str, Path]]:
    """The library, and the object of every source by its name; compiled only where the cache has none."""
    assert isinstance(WANTED, Recipe)
    built = library.build_or_load(WANTED)
    assert isinstance(built, library.Built), str(built)
    objects = built.path.parent / "objects"
    return built.path, {unit.source.name: library.object_of(unit, objects) for unit in WANTED.units}


def _log(name: str) -> str:
    return _built()[1][name].with_suffix(".log").read_text()


def _cards(name: str) -> list[str]:
    return [f"sm_{card}" for card in next(cards for pattern, cards in CARDS if Path(name).match(pattern))]


def test_every_source_has_a_row_here() -> None:
    assert [name for name in KERNELS if name not in EXPECTED] == []


@pytest.mark.parametrize("name", KERNELS)
def test_registers_hold_everything(name: str) -> None:
    kernels = ptxas_report.parse_kernels(_log(name))
    assert sorted({kernel.card for kernel in kernels}) == sorted(_cards(name))
    assert [str(kernel) for kernel in kernels if kernel.spills or kernel.stack] == []


@pytest.mark.parametrize("name", [*KERNELS, "binding.cpp"])
def test_the_compiler_has_nothing_to_remark(name: str) -> None:
    """Among the remarks are wgmma that was serialized and setmaxnreg that was ignored: both cost most of the speed."""
    remarks = [line for line in _log(name).splitlines() if re.search("warning|serialized|ignored", line, re.IGNORECASE)]
    assert remarks == []


def test_the_library_is_small() -> None:
    """What compiling costs, `python -m shardlib.build` prints: on a loaded machine twice what it costs alone."""
    path, objects = _built()
    assert all(library.cpu_seconds(_log(name)) > 0 for name in objects)
    assert path.stat().st_size <= MEGABYTES * 1e6


@pytest.mark.parametrize("name", KERNELS)
def test_machine_code_is_the_intended_one(name: str) -> None:
    tool = _cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump on PATH, beside nvcc or in a triton wheel")
    for card, patterns in EXPECTED[name].items():
        done = subprocess.run(
            [tool, "-sass", "-arch", card, str(_built()[1][name])], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert [pattern for pattern in patterns if not re.search(pattern, done.stdout)] == [], card


def _cuobjdump() -> str | None:
    assert isinstance(WANTED, Recipe)
    triton = Path(sysconfig.get_path("purelib"), "triton", "backends", "nvidia", "bin")
    for place in (None, Path(WANTED.link[0]).parent, triton):
        found = shutil.which("cuobjdump", path=None if place is None else str(place))
        if found:
            return found
    return None


def test_one_file_reads_torch_and_of_it_only_the_stable_abi() -> None:
    reading = {
        path.name: re.findall(r"#\s*include\s*<((?:torch|ATen|c10)/[^>]+)>", path.read_text())
        for path in SOURCES.rglob("*.*")
        if path.suffix in {".cu", ".cuh", ".cpp", ".h"}
    }
    assert [name for name, headers in reading.items() if headers] == ["binding.cpp"]
    assert [h for h in reading["binding.cpp"] if not re.match(r"torch/(csrc/stable|headeronly)/", h)] == []


def test_the_library_asks_torch_for_nothing_but_c_functions() -> None:
    """C++ names would tie it to one version of torch; the one function that only CUDA builds have must be weak."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm on PATH")
    done = subprocess.run([nm, "-D", "--undefined-only", str(_built()[0])], capture_output=True, text=True, check=True)
    asked = [line.split() for line in done.stdout.splitlines()]
    of_torch = {name: kind for kind, name in asked if re.search(r"torch|c10|_ZNK?2at", name)}
    assert [name for name in of_torch if not re.match(r"(aoti_)?torch_\w+$", name)] == []
    assert [name for name, kind in of_torch.items() if kind == "w"] == ["aoti_torch_get_current_cuda_stream"]
    assert of_torch["aoti_torch_library_init_def"] == "U"  # the twin


@pytest.mark.long
def test_the_gates_see_a_stack_and_a_remark(tmp_path: Path) -> None:
    """An array that is indexed at run time goes to the stack; a variable that nobody reads is remarked upon."""
    source = tmp_path / "attention_bad.cu"
    source.write_text(
        "__global__ void bad(int* x) { int a[64] = {}, unread;"
        " for (int i = 0; i < x[0]; i++) a[x[i] & 63] += a[x[i + 1] & 63] + i; x[0] = a[x[1] & 63]; }\n"
    )
    wanted = make_recipe("cuda", tmp_path)
    assert isinstance(wanted, Recipe)
    command = [*wanted.units[0].command, "-c", str(source), "-o", str(tmp_path / "bad.o")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (kernel,) = ptxas_report.parse_kernels(done.stdout)
    assert (kernel.card, kernel.stack) == ("sm_90a", 256)
    assert "warning" in done.stdout
