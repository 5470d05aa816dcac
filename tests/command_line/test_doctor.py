"""`shardlib doctor`: what it finds, and that nothing that it runs can hold it up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shardlib.command_line import doctor, self_test
from shardlib.command_line.finding import FAULT, OK, WARNING, Finding
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
    code = f"print('a warning'); print({json.dumps(wanted)!r})"
    assert doctor.run_tests("GPU", ("-c", code), 60.0) == [Finding("GPU 0", WARNING, "old", "new")]


@pytest.mark.parametrize(
    ("package", "oldest", "is_needed", "level", "part"),
    [
        ("torch", "2.11", True, OK, "2."),
        ("torch", "99.1", True, FAULT, "is older than 99.1"),
        ("nothing-like-it", "1.0", True, FAULT, "it is not installed; plots need it"),
        ("nothing-like-it", "1.0", False, WARNING, "it is not installed; plots need it"),
    ],
)
def test_packages(package: str, oldest: str, is_needed: bool, level: str, part: str) -> None:
    finding = doctor.check_package(package, oldest, is_needed, "plots need it")
    assert finding.level == level
    assert part in finding.text
    assert (level == OK) == (finding.remedy == "")


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
