"""Kernels are compiled once, found again, made anew when anything changes, and missed with a reason."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardlib.build import build_cache, ptxas_report
from shardlib.build import library as build_library
from shardlib.build.build_recipe import Missing, Recipe, make_recipe
from shardlib.build.library import Built, build_or_load
from shardlib.ops import native_libs

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs Linux and a C++ compiler on PATH"
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A host library of two sources; one of them reads a header, which reads another one."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "deep.h").write_text("#define ANSWER 42\n")
    (folder / "near.h").write_text('#include "deep.h"\n')
    (folder / "answer.cpp").write_text('#include "near.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "other.cpp").write_text('extern "C" int other() { return 7; }\n')
    (folder / "unread.h").write_text("nobody reads this\n")
    return folder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own, and no answers from earlier tests."""
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHARDLIB_BUILD", raising=False)
    monkeypatch.setattr(build_library, "_answers", {})
    return tmp_path / "cache"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Let a script stand before the compiler; what was compiled or linked since, in order."""
    script, log = tmp_path / "compiler", tmp_path / "calls"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo "$*" >> {log}; sleep 0.1; }}\nexec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))

    def taken() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(re.search(r"(\w+)\.cpp", line)[1] if " -c " in line else "link" for line in lines)  # type: ignore[index]

    return taken


def host(folder: Path) -> Recipe:
    wanted = make_recipe("host", folder)
    assert isinstance(wanted, Recipe)
    return wanted


def answer(built: Built | Missing) -> int:
    assert isinstance(built, Built), built
    value: int = ctypes.CDLL(str(built.path)).answer()
    return value


def test_built_once_with_one_line_and_then_found_silently(
    sources: Path, store: Path, calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = build_or_load(host(sources))
    assert answer(first) == 42
    assert calls() == ["answer", "link", "other"]
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"shardlib: building host kernels \(2 files, once\) \.\.\. \d+\.\d s\n", said.err)
    second = build_or_load(host(sources))
    assert second == Built(first.path)  # type: ignore[union-attr]
    assert calls() == []
    assert capsys.readouterr() == ("", "")
    assert list(store.glob("building-*")) == []


@pytest.mark.parametrize(
    ("name", "text", "compiled"),
    [
        ("answer.cpp", 'extern "C" int answer() { return 5; }\n', ["answer", "link"]),
        ("near.h", "#define ANSWER 5\n", ["answer", "link"]),
        ("deep.h", "#define ANSWER 5\n", ["answer", "link"]),
        ("third.cpp", "int third;\n", ["link", "third"]),
        ("unread.h", "#define ANSWER 5\n", []),  # the twin: no source reads it
        ("answer.cu", "not for this library\n", []),
        ("binding.cpp", "nor this\n", []),
    ],
)
def test_a_change_compiles_what_reads_it_and_nothing_else(
    name: str, text: str, compiled: list[str], sources: Path, store: Path, calls: Callable[[], list[str]]
) -> None:
    build_or_load(host(sources))
    calls()
    (sources / name).write_text(text)
    assert answer(build_or_load(host(sources))) == (5 if "answer" in compiled else 42)
    assert calls() == compiled


def test_another_compiler_or_another_flag_makes_another_library(
    sources: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host(sources)
    script = tmp_path / "newer"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 99.0 || exec {COMPILER} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    newer = host(sources)
    assert (newer.key, newer.units[0].key != first.units[0].key) == (first.key, True)
    assert newer.tool != first.tool
    monkeypatch.setenv("CXX", f"{script} -DMORE")
    assert "-DMORE" in host(sources).units[0].command


def test_flags_and_torch_count_where_they_are_used(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(name: str = "cuda") -> tuple[str, ...]:
        wanted = make_recipe(name, sources)
        assert isinstance(wanted, Recipe)
        return (wanted.key, *(unit.key for unit in wanted.units))

    (sources / "kernel.cu").write_text("// no torch here\n")
    (sources / "binding.cpp").write_text("#include <torch/csrc/stable/library.h>\n")
    library, kernel, binding = keys()
    on_host = keys("host")
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "2.99.0")
        assert keys()[1] == kernel
        assert keys()[0] != library
        assert keys()[2] != binding
        assert keys("host") == on_host
    with monkeypatch.context() as patch:
        patch.setattr("shardlib.build.build_recipe.CARDS", [("*.cu", ("90a",))])
        assert keys()[1] != kernel
        assert keys()[2] == binding
        assert keys("host") == on_host


def _process(code: str, **more: str) -> subprocess.Popen[str]:
    """Another Python with its own import of shardlib."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_processes_that_want_it_at_once_build_it_once(
    sources: Path, store: Path, calls: Callable[[], list[str]]
) -> None:
    code = (
        "from pathlib import Path; from shardlib.build.library import build_or_load; "
        "from shardlib.build.build_recipe import make_recipe;"
        f"print(build_or_load(make_recipe('host', Path({str(sources)!r}))).path)"
    )
    processes = [_process(code) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum("building host kernels" in err for _, err in outputs) == 1
    assert calls() == ["answer", "link", "other"]


def test_threads_that_want_it_at_once_build_it_once(
    sources: Path, store: Path, calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(build_library.get_library, ["host"] * 4))
    assert len(set(answers)) == 1
    assert answer(answers[0]) == 42
    assert calls() == ["answer", "link", "other"]


def test_a_builder_that_takes_too_long_is_named(sources: Path, store: Path) -> None:
    store.mkdir()
    with (store / "host.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 123 on elsewhere")
        file.flush()
        missing = build_or_load(host(sources), patience=0.1)
    lock = store / "host.lock"
    said = f"process 123 on elsewhere has been building for more than 0.1 s (lock file {lock})"
    assert str(missing) == said
    assert answer(build_or_load(host(sources), patience=0.1)) == 42


def test_a_builder_that_was_killed_blocks_nobody(sources: Path, store: Path) -> None:
    store.mkdir()
    lock = str(store / "host.lock")
    code = (
        f"import fcntl, time; f = open({lock!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(60)"
    )
    (store / "building-host-left").mkdir()
    process = _process(code)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert isinstance(build_or_load(host(sources), patience=0.1), Missing)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert answer(build_or_load(host(sources), patience=5)) == 42
    assert list(store.glob("building-*")) == []


def test_without_a_compiler_there_is_a_reason(sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    said = "no C++ compiler: CXX names none, and there is no c++, g++ or clang++ on PATH"
    assert build_or_load(host(sources)) == Missing(said)
    assert not store.exists()


def test_without_a_compiler_a_library_that_was_made_before_serves(
    sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_or_load(host(sources))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert build_or_load(host(sources)) == Built(made.path)  # type: ignore[union-attr]
    (sources / "deep.h").write_text("#define ANSWER 5\n")
    assert isinstance(build_or_load(host(sources)), Missing)


def test_a_failure_says_where_and_is_not_repeated_until_something_changes(
    sources: Path, store: Path, calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "other.cpp").write_text("int other() { return nothing; }\n")
    missing = build_or_load(host(sources))
    assert isinstance(missing, Missing)
    assert re.fullmatch(
        r"compiler could not make other\.cpp: \S+other\.cpp:1:\S+ error: .*nothing.*"
        r" \(all of it is in \S+\.log; once that is mended: python -m shardlib\.build host\)",
        str(missing),
    )
    assert missing.log is not None
    assert "nothing" in missing.log.read_text()
    assert re.fullmatch(r"shardlib: building .* \.\.\. failed after \d+\.\d s\n", capsys.readouterr().err)
    assert calls() == ["answer", "other"]
    assert build_or_load(host(sources)) == missing
    assert calls() == []
    assert build_or_load(host(sources), again=True) == missing
    assert calls() == ["other"]
    (sources / "other.cpp").write_text("int other() { return 1; }\n")
    assert answer(build_or_load(host(sources))) == 42


def test_a_source_that_changes_under_the_compiler_is_not_kept(sources: Path, store: Path) -> None:
    wanted = host(sources)
    before = (sources / "deep.h").read_text()
    (sources / "deep.h").write_text("#define ANSWER 5\n")
    assert "answer.cpp: error: changed while it was compiled" in str(build_or_load(wanted))
    assert answer(build_or_load(host(sources))) == 5
    (sources / "deep.h").write_text(before)
    assert answer(build_or_load(host(sources), again=True)) == 42


def test_a_failure_to_link_says_so(sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{COMPILER} -Wl,--no-undefined")
    (sources / "other.cpp").write_text("int missing(); int other() { return missing(); }\n")
    said = str(build_or_load(host(sources)))
    assert "could not make the library (linking): " in said
    assert "undefined" in said


@pytest.mark.parametrize("chosen", ["SHARDLIB_CACHE", "XDG_CACHE_HOME"])
def test_a_folder_that_cannot_be_written_is_not_replaced(
    chosen: str, sources: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all by one under the system's temporary directory, where another user may have been before."""
    file, spare = tmp_path / "file", tmp_path / "spare"
    spare.mkdir()
    built = build_or_load(host(sources))
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    planted = spare / f"shardlib-{os.getuid()}"
    shutil.copytree(store, planted)
    planted.chmod(0o700)
    file.write_text("")
    monkeypatch.delenv("SHARDLIB_CACHE")
    monkeypatch.setenv(chosen, str(file))
    folder, reason = (file, "File exists") if chosen == "SHARDLIB_CACHE" else (file / "shardlib", "Not a directory")
    assert (
        str(build_or_load(host(sources))) == f"no folder to build in: {folder} ({reason}); name one by SHARDLIB_CACHE"
    )
    monkeypatch.setenv("SHARDLIB_CACHE", str(planted))  # the user's choice
    assert build_or_load(host(sources)) == Built(planted / built.path.name)  # type: ignore[union-attr]


def test_a_user_without_a_home(sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SHARDLIB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert str(build_or_load(host(sources))) == (
        "no folder to build in: this user has no home; name one by SHARDLIB_CACHE"
    )


def test_a_folder_that_is_a_link_is_refused(sources: Path, store: Path, tmp_path: Path) -> None:
    """Its owner is not that of the folder that it leads to, which may be another one at the next look."""
    build_or_load(host(sources))
    store.rename(tmp_path / "real")
    store.symlink_to(tmp_path / "real")
    assert f"no folder to build in: {store} (a symbolic link)" in str(build_or_load(host(sources)))
    assert build_library.look_up(host(sources)) is None


def test_a_library_that_is_a_link_is_made_again(sources: Path, store: Path, tmp_path: Path) -> None:
    built = build_or_load(host(sources))
    assert isinstance(built, Built)
    for path in (built.path, *(store / "objects").glob("*.o")):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert build_library.look_up(host(sources)) is None
    again = build_or_load(host(sources))
    assert answer(again) == 42
    assert again.seconds is not None  # type: ignore[union-attr]
    assert not built.path.is_symlink()
    assert (tmp_path / built.path.name).exists()


@pytest.mark.parametrize("name", ["host.lock", "objects"])
def test_a_link_is_not_followed_where_something_is_written(
    name: str, sources: Path, store: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    if name == "objects":
        victim.mkdir()
    else:
        victim.write_text("precious")
    store.mkdir(mode=0o700)
    (store / name).symlink_to(victim)
    assert "symbolic link" in str(build_or_load(host(sources)))
    assert list(victim.iterdir()) == [] if name == "objects" else victim.read_text() == "precious"


def test_a_file_to_which_others_may_write_is_made_again(sources: Path, store: Path) -> None:
    """Files are closed to others, whatever the umask."""
    before = os.umask(0o002)
    try:
        built = build_or_load(host(sources))
    finally:
        os.umask(before)
    assert isinstance(built, Built)
    assert not built.path.stat().st_mode & 0o022
    assert build_or_load(host(sources)) == Built(built.path)
    built.path.chmod(0o775)
    assert build_library.look_up(host(sources)) is None
    assert build_or_load(host(sources)).seconds is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_library_or_object_that_was_cut_short_is_made_again(size: int, sources: Path, store: Path) -> None:
    made = build_or_load(host(sources))
    for path in (made.path, *(store / "objects").glob("*.o")):  # type: ignore[union-attr]
        path.write_bytes(path.read_bytes()[:size])
    assert build_library.look_up(host(sources)) is None
    again = build_or_load(host(sources))
    assert answer(again) == 42
    assert again.seconds is not None  # type: ignore[union-attr]
    assert build_library.look_up(host(sources)) == Built(again.path)  # type: ignore[union-attr]


def test_a_library_that_does_not_load_is_built_once_more(
    sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    made = build_library.get_library("host")
    assert isinstance(made, Built)
    made.path.write_bytes(b"no library")
    made.path.with_name(made.path.name + ".seal").write_text(build_cache._digest(made.path))
    assert native_libs._host.__wrapped__().answer() == 42


def test_a_compiler_that_was_killed_is_tried_again(
    sources: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, sick = tmp_path / "compiler", tmp_path / "sick"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || [ ! -e {sick} ] || kill -9 $$\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    sick.write_text("")
    monkeypatch.setenv("CXX", str(script))
    assert "the compiler was ended by signal 9" in str(build_or_load(host(sources)))
    sick.unlink()
    assert answer(build_or_load(host(sources))) == 42


def test_flags_of_the_compiler_count(sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = set()
    for flags in ("", " -O0", " -g"):
        monkeypatch.setenv("CXX", f"{COMPILER}{flags}")
        tools.add(host(sources).tool)
    monkeypatch.setenv("CPATH", "/elsewhere")
    tools.add(host(sources).tool)
    assert len(tools) == 4


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_never_used(mode: int, sources: Path, store: Path) -> None:
    made = build_or_load(host(sources))
    store.chmod(mode)
    assert "(made by another user, or open to others)" in str(build_or_load(host(sources)))
    store.chmod(0o755)
    assert build_or_load(host(sources)) == Built(made.path)  # type: ignore[union-attr]


@pytest.mark.parametrize(("platform", "reason"), [("linux", "there are no sources"), ("darwin", "are for Linux")])
def test_nothing_to_build(platform: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    for name in build_library.NAMES:
        assert reason in str(make_recipe(name, tmp_path))


def test_building_can_be_turned_off(sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    monkeypatch.setenv("SHARDLIB_BUILD", "0")
    assert build_library.get_library("host") == Missing("SHARDLIB_BUILD=0, and none is built")
    assert not store.exists()
    monkeypatch.setenv("SHARDLIB_BUILD", "1")
    made = build_library.get_library("host")
    assert answer(made) == 42
    monkeypatch.setenv("SHARDLIB_BUILD", "0")
    monkeypatch.setattr(build_library, "_answers", {})
    assert build_library.get_library("host") == Built(made.path)  # type: ignore[union-attr]


def test_a_process_asks_once(
    sources: Path, store: Path, calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "other.cpp").write_text("broken\n")
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    missing = build_library.get_library("host")
    calls()
    (sources / "other.cpp").write_text("int mended;\n")
    assert build_library.get_library("host") is missing
    assert calls() == []


def test_the_host_library_is_loaded_or_says_why(
    sources: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = native_libs._host.__wrapped__  # not `host`, which would keep this library for the tests to come
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    assert load().answer() == 42
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(build_library, "get_library", lambda name: Built(damaged))
    assert str(load()).startswith(f"the host kernels do not load: {damaged}: ")
    assert not damaged.exists()
    monkeypatch.setattr(build_library, "get_library", lambda name: Missing("SHARDLIB_BUILD=0"))
    assert load() == Missing("SHARDLIB_BUILD=0")


@pytest.mark.parametrize("broken", [False, True])
def test_the_command(
    broken: bool, sources: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_library, "make_recipe", lambda name: make_recipe(name, sources))
    if broken:
        (sources / "other.cpp").write_text("broken;\n")

    def run(*arguments: str) -> tuple[int, str]:
        code = build_library.main(list(arguments))
        return code, capsys.readouterr().out

    assert run("host", "--check") == (1, "host: none: not built yet\n")
    code, text = run("host")
    if broken:
        assert code == 1
        assert re.match(r"host: none: \S+ could not make other\.cpp: .*error: ", text)
        assert run("host", "--check") == (1, text)
        assert " -c " in run("host", "--verbose")[1]
        return
    assert code == 0
    assert re.fullmatch(
        r"host: built in \d+\.\d s, 0\.\d\d MB: \S+\.so\n  answer\.cpp: \d\.\d CPU-s\n  other\.cpp: \d\.\d CPU-s\n",
        text,
    )
    code, text = run("host", "--check")
    assert code == 0
    assert text.startswith("host: was there, 0.")
    assert " -c " in run("host", "--verbose")[1]
    assert run("all", "--check")[0] == 1  # these sources have no CUDA kernels


@pytest.mark.long
def test_the_command_runs_as_a_module(store: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "shardlib.build", "host", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("host: none: ")


def test_kernels_of_a_log() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_14copyILi3ELb1EEEvPi' for 'sm_90a'
ptxas info    : Function properties for _ZN12_GLOBAL__N_14copyILi3ELb1EEEvPi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    128 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for helper
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers
"""
    first, second = ptxas_report.parse_kernels(log)
    assert (first.card, first.registers, first.stack, first.spills, first.shared) == ("sm_90a", 168, 0, 0, 1024)
    assert second == ptxas_report.Kernel("plain", "sm_80", 255, 144, 12, 0)
    assert first.name == ("copy<3, true>" if shutil.which("c++filt") else "_ZN12_GLOBAL__N_14copyILi3ELb1EEEvPi")
    assert ptxas_report.parse_kernels("") == []
