"""`shardlib doctor`: what it finds, and that nothing that it runs can hold it up."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
import tomllib
from pathlib import Path

import pytest

from shardlib.command_line import doctor, self_test
from shardlib.command_line.finding import FAULT, OK, PREFIX, WARNING, Finding
from shardlib.command_line.main import main


def test_a_test_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time, pathlib;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid)); time.sleep(600)"
    )
    (finding,) = doctor.run_tests("ranks", ("-c", code), 5.0)
    assert (finding.name, finding.level) == ("ranks", FAULT)
    assert finding.text == "no result after 5 s; the test was ended"
    if child.exists():  # the child had started
        end = time.monotonic() + 60
        while is_running(int(child.read_text())) and time.monotonic() < end:
            time.sleep(0.01)
        assert not is_running(int(child.read_text()))


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit('no disk')", "the test ended with status 1\nno disk"),
        ("import os; os.kill(os.getpid(), 9)", "the test ended with status -9"),
        ("print('nothing')", "the test ended with status 0"),
    ],
)
def test_a_test_that_fails(code: str, text: str) -> None:
    (finding,) = doctor.run_tests("GPU", ("-c", code), 60.0)
    assert finding.level == FAULT
    assert finding.text.strip() == text
    assert finding.remedy


def test_findings_of_a_test() -> None:
    wanted = [{"name": "GPU 0", "level": WARNING, "text": "old", "remedy": "new"}]
    code = f"print('[W1130 a warning]'); print({PREFIX + json.dumps(wanted)!r}); print('[I1130 a note]')"
    assert doctor.run_tests("GPU", ("-c", code), 60.0) == [Finding("GPU 0", WARNING, "old", "new")]


@pytest.mark.parametrize(
    ("package", "oldest", "level", "part"),
    [
        ("torch", "2.11", OK, "2."),
        ("torch", "99.1", FAULT, "is older than 99.1"),
        ("nothing-like-it", "1.0", WARNING, "it is not installed; plots need it"),
    ],
)
def test_packages(monkeypatch: pytest.MonkeyPatch, package: str, oldest: str, level: str, part: str) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"nothing-like-it": "plots need it"})
    finding = doctor.check_package(package, oldest)
    assert finding.level == level
    assert part in finding.text
    assert (level == OK) == (finding.remedy == "")


def test_packages_are_those_of_the_project_file(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = [f'{x}; extra == "{extra}"' for extra, names in project["optional-dependencies"].items() for x in names]
    requirements = [*project["dependencies"], *extras]
    monkeypatch.setattr(importlib.metadata, "requires", {"shardlib": requirements}.get)
    names = [finding.name for finding in doctor.check_packages("shardlib")]
    assert names == [*(x.partition(">=")[0] for x in project["dependencies"]), "transformers"]


def test_packages_of_a_source_tree() -> None:
    (finding,) = doctor.check_packages("nothing-like-it")
    assert (finding.level, finding.text.partition(",")[0]) == (WARNING, "it is not installed")


@pytest.mark.parametrize(("level", "status"), [(OK, 0), (WARNING, 0), (FAULT, 1)])
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, status: int
) -> None:
    monkeypatch.setattr(doctor, "check_all", lambda: iter([Finding("x", OK, "y"), Finding("z", level, "w", "v")]))
    assert main(["doctor"]) == status
    assert capsys.readouterr().out.splitlines()[-1] == f"{status} fault{'s' * (status != 1)}"


@pytest.mark.parametrize("name", ["kernels", "shared-memory", "virtual"])
def test_checks_in_this_process(name: str) -> None:
    findings = list(self_test.CHECKS[name]())
    assert findings
    assert all(x.level == OK for x in findings), findings


def test_a_wrong_step_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "TOLERANCE", -1.0)
    (finding,) = self_test.CHECKS["virtual"]()
    assert (finding.name, finding.level) == ("4 virtual devices", FAULT)
    assert finding.text.startswith("two training steps differ from one device by ")


@pytest.mark.ranks
@pytest.mark.long
def test_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, lines
    assert any(line.startswith("ok       2 ranks") for line in lines), lines
