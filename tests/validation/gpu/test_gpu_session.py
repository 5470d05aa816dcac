"""The GPU session on a machine with none: its parts rehearsed, crashes and hangs survived, its report honest."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from shardlib.ops.attention import cuda as attention_cuda
from shardlib.ops.tuning import Attention
from tests.helpers.ranks import apart, heard
from tests.validation.gpu import (
    check_attention,
    faulty,
    figures,
    records,
    rehearsal,
    report,
    session,
    speed_attention,
    sweeps,
    tools,
    writeback,
)
from tests.validation.gpu.clock import Times, race
from tests.validation.gpu.figures import FIGURES, of_part
from tests.validation.gpu.kernels import find
from tests.validation.gpu.records import NO_TIME, Outcome, Record, Recorder, summed_up
from tests.validation.gpu.session import PARTS, Session

REPORT = Path(session.__file__).with_name("REPORT.md")
NOTEBOOKS = "tests/repository/test_notebooks.py"
NO_GPU = {part.name: "there is no CUDA GPU" for part in PARTS}


# --- parts ------------------------------------------------------------------------------------------------------------

# Figures that a rehearsal leaves out: most of the kinds that are timed, what only CUDA has, and a library that is not
# built for it.
NOT_REHEARSED = re.compile(
    r" (4|8|16)k(, grouped)?$|hd(96|112|128|256) .*4k, general|in a CUDA graph|racecheck|synccheck|cuda/ compiles"
)


def test_every_figure_has_a_part_and_every_part_its_figures() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert {figure.part for figure in FIGURES} == set(names) - {"environment"}
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert all(part.needs in ("", *names[: names.index(part.name)]) for part in PARTS)
    assert all(part.least < part.most for part in PARTS)
    assert session.SECONDS < 600


@pytest.mark.sampled(5)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize("name", [part.name for part in PARTS if part.name not in ("gpu tests", "cpu tests", "waits")])
def test_a_part_rehearsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuda, "get_kernel", attention_cuda.get_kernel)  # restored behind the part
    _rehearsed(name, tmp_path)


@pytest.mark.long
@pytest.mark.ranks
def test_waits_rehearsed(tmp_path: Path) -> None:
    _rehearsed("waits", tmp_path)


def _rehearsed(name: str, tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == name)
    run = Recorder(tmp_path / "records.jsonl", "cpu")
    part.run(run)
    found, facts, _ = records.read(run.path)
    expected = {figure for figure in of_part(name) if not NOT_REHEARSED.search(figure)}
    assert {r.figure for r in found} - {"cuda/ compiles"} == expected
    assert [r for r in found if r.ok is False and r.figure != "cuda/ compiles"] == []
    assert (facts.get("GPU", "none: a rehearsal, no figure counts")) == "none: a rehearsal, no figure counts"
    assert bool(facts) == (name == "environment")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
def test_a_wrong_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(card: str, direction: str) -> object:
        run = rehearsal.kernel(card, direction)

        def wrong(*arguments: object) -> None:
            run(*arguments)
            x = arguments[3 if direction == "forward" else 8]  # o, dk
            assert isinstance(x, torch.Tensor)
            x[-1, -1, -1, -1] += 1

        return wrong

    monkeypatch.setattr(attention_cuda, "get_kernel", attention_cuda.get_kernel)
    real = find(rehearsal=True)
    assert not isinstance(real, str)
    monkeypatch.setattr(check_attention, "find", lambda _: replace(real, kernel=sloppy))
    run = Recorder(tmp_path / "records.jsonl", "cpu")
    check_attention.errors(run, "sm_80")
    found, _, _ = records.read(run.path)
    assert len(found) == 18
    assert all(r.ok is False and r.value is not None and r.value > 1 for r in found)
    assert {r.text.split()[0] for r in found} == {"o", "dk"}


@pytest.mark.parametrize(("error", "ok"), [(1.0, True), (1.01, False), (float("nan"), False), (float("inf"), False)])
def test_an_error_is_measured_against_what_is_allowed(error: float, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("o", 0.5, 1.0), ("lse", error, 1.0), ("dq", 9.0, 1.0)]  # dq is not the forward's
    monkeypatch.setattr(check_attention.attention_cases, "errors", lambda *_, **__: found)
    kernels = find(rehearsal=True)
    assert not isinstance(kernels, str)
    outcome = check_attention.measured("full", "forward", "sm_80", "bf16", kernels)
    assert outcome.ok is ok
    assert outcome.text.startswith("lse: 1.00" if ok else "lse is ")


@pytest.mark.parametrize(("direction", "outputs"), [("forward", {3, 4}), ("backward", {7, 8, 9})])
def test_outputs_are_poisoned(direction: str, outputs: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuda, "get_kernel", attention_cuda.get_kernel)
    seen: set[int] = set()

    def look(*tensors: torch.Tensor) -> None:
        seen.update(i for i, x in enumerate(tensors) if x.isnan().all())

    kernels = find(rehearsal=True)
    assert not isinstance(kernels, str)
    replace(kernels, kernel=lambda card, direction: look).install(poison=True)
    attention_cuda.get_kernel("sm_80", direction)(*(torch.zeros(2) for _ in range(10)))
    assert seen == outputs


# --- crashes and hangs ------------------------------------------------------------------------------------------------


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Session]:
    """A session whose parts are those of faulty.py."""
    with (tmp_path / "session.log").open("w") as log:
        yield Session(
            tmp_path / "records.jsonl", log, time.monotonic() + 100, False, "cpu", "tests.validation.gpu.faulty"
        )


@pytest.mark.slow
def test_a_part_goes_on_behind_what_ended_its_process(faults: Session, tmp_path: Path) -> None:
    assert faults.run(PART) == ""
    found, _, _ = records.read(faults.path)
    said = {r.case: (r.ok, r.text) for r in found}
    assert said == {
        "good": (True, "equal"),
        "crash": (False, "the process ended: SIGSEGV"),
        "hang": (False, "did not end within 1 s"),
        "wrong": (False, "an illegal memory access"),
        "unforeseen": (False, "the process ended: exit status 1, see session.log"),
        "good too": (True, "equal"),
    }
    outcome = summed_up(found)
    assert outcome is not None
    assert outcome.ok is False
    assert outcome.text.startswith("2 of 6 cases pass; worst 0.50 (good too); crash: the process ended: SIGSEGV; hang:")
    assert outcome.text.endswith("; and 2 more")
    assert "nobody thought of this" in (tmp_path / "session.log").read_text()


PART = session.Part("faults", faulty.faults, 500, 20)


def _ends(faults: Session, monkeypatch: pytest.MonkeyPatch, *lives: tuple[int, str]) -> list[int]:
    """Processes of a part that write this and end so, one after the other; the statuses of those that were begun."""
    begun: list[int] = []

    def process(self: Session, part: session.Part, end: float) -> int:
        code, written = lives[len(begun)]
        begun.append(code)
        with self.path.open("a") as file:
            file.write(written)
        return code

    monkeypatch.setattr(Session, "_process", process)
    return begun


def _line(case: str, ok: bool | None, *, began: bool = False) -> str:
    return json.dumps(asdict(Record("faults", case, ok, "", began=began))) + "\n"


def test_a_part_that_is_late_keeps_what_it_has(faults: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    life = _line("good", None, began=True) + _line("good", True) + _line("long", None, began=True)
    begun = _ends(faults, monkeypatch, (-signal.SIGKILL, life))
    soon = replace(faults, end=time.monotonic() + 4)
    assert soon.run(replace(PART, least=1)) == NO_TIME
    assert begun == [-signal.SIGKILL]
    assert summed_up(records.read(faults.path)[0]) == Outcome(None, "1 of 2 cases pass, 1 not reached")


def test_a_part_that_cannot_begin_is_not_tried_again(faults: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = _ends(faults, monkeypatch, (1, ""), (0, ""))
    assert faults.run(PART) == "its process ended: exit status 1, see session.log"
    assert begun == [1]


def test_a_part_is_begun_again_only_so_often(faults: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [(-signal.SIGSEGV, _line(str(i), None, began=True)) for i in range(20)]
    begun = _ends(faults, monkeypatch, *lives)
    assert faults.run(PART) == f"its process ended {session.RESTARTS} times"
    assert len(begun) == session.RESTARTS
    assert {r.text for r in records.read(faults.path)[0]} == {"the process ended: SIGSEGV"}


@pytest.mark.long
def test_a_part_out_of_time_is_killed_with_what_it_started(faults: Session) -> None:
    sleeper = session.Part("sleeper", faulty.faults, 500, 20)
    start = time.monotonic()
    assert faults._process(sleeper, time.monotonic() + 0.5) == -signal.SIGKILL
    assert time.monotonic() - start < 50  # it sleeps for 60


def test_without_time_a_part_does_not_begin(faults: Session) -> None:
    assert re.fullmatch(r"(100|9\d) s were left, it needs 200", faults.run(replace(PART, least=200)))
    assert not faults.path.exists()


def test_no_case_begins_behind_the_end(tmp_path: Path) -> None:
    run = Recorder(tmp_path / "records.jsonl", "cpu", end=time.monotonic() - 1)
    run.attempt("a", "b", lambda: Outcome(True, "ran"))
    assert records.read(run.path)[0] == [Record("a", "b", None, NO_TIME)]
    assert summed_up(records.read(run.path)[0]) is None


def test_a_line_cut_off_is_passed_over(tmp_path: Path) -> None:
    run = Recorder(tmp_path / "records.jsonl", "cpu")
    run.note("a", True, "fine")
    with run.path.open("a") as file:
        file.write('{"figure": "b", "ca')
    records.close(run.path, "gone")
    assert [r.figure for r in records.read(run.path)[0]] == ["a"]


# --- call after call --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_next_call_goes_on_where_time_ran_out(faults: Session, tmp_path: Path) -> None:
    records.join(faults.path, "a card", [])
    late = Recorder(faults.path, "cpu")
    for case in faulty.ENDINGS.keys() - {"good too"}:
        late.attempt("faults", case, lambda: Outcome(True, "in the first call"))
    late.end = time.monotonic() - 1
    late.attempt("faults", "good too", lambda: Outcome(True, "never"))
    assert faults._hurried(PART) is False  # these are no figures of a part of the session
    assert faults.run(PART) == ""
    said = {r.case: r.text for r in records.read(faults.path)[0]}
    assert said["good"] == "in the first call"
    assert said["good too"] == "equal"
    assert records.ended(faults.path) == {"faults"}
    before = faults.path.read_text()
    assert faults.run(PART) == ""  # the third call has nothing to do
    assert faults.path.read_text() == before


def test_a_part_that_left_cases_out_runs_again(faults: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    (figure, *_) = of_part("rings")
    part = next(part for part in PARTS if part.name == "rings")
    records.join(faults.path, "a card", [])
    life = json.dumps(asdict(Record(figure, "", None, NO_TIME))) + "\n"
    begun = _ends(faults, monkeypatch, (0, life), (0, life.replace(NO_TIME, "1.00x")), (0, ""))
    assert [faults.run(part) for _ in range(3)] == ["", "", ""]
    assert begun == [0, 0]


def test_records_of_several_calls_are_merged(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("records", "second", "other")]
    for file, identity, text in zip(
        files, ("a card", "a card", "another card"), ("first", "second", "third"), strict=True
    ):
        assert records.join(file, identity, []) == ""
        run = Recorder(file, "cpu")
        run.note(f"of {identity}", True, text)
        run.note(text, True, text)
    assert (
        records.join(files[0], "a card", files[1:]) == f"{files[2]} is left out: it is of another card, not of a card"
    )
    found = {r.figure: r.text for r in records.read(files[0])[0]}
    assert found == {"of a card": "second", "first": "first", "second": "second"}
    before = files[0].read_text()
    assert records.join(files[0], "a card", [files[1]]) == ""  # once more changes nothing
    assert files[0].read_text() == before


def test_records_of_another_card_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.join(path, "a card", [])
    Recorder(path, "cpu").note("a", True, "fine")
    assert records.join(path, "a newer card", []) == f"{path} is left out: it is of a card, not of a newer card"
    assert records.read(path)[0] == []
    assert [r.figure for r in records.read(tmp_path / "records.old.jsonl")[0]] == ["a"]


def _collected(pipe: Connection, options: list[str]) -> None:
    """Collect tests where notebooks' libraries cannot be imported: the exit status, and what was printed."""
    os.chdir(tools.ROOT)
    sys.modules.update(nbformat=None, nbclient=None)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(options)
    pipe.send((int(status), said.getvalue()))


@pytest.mark.long
@pytest.mark.ranks
def test_gpu_tests_are_collected_without_notebooks_libraries() -> None:
    files = tools.gpu_files()
    assert "tests/validation/gpu/test_cuda.py" in files
    assert "tests/repository/test_notebooks.py" not in files
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", *files, NOTEBOOKS]
    process, pipe = apart(_collected, options)
    status, said = heard(pipe, 120)
    process.join()
    assert status == 0, said[-2000:]
    assert " tests collected" in said


# --- what is written back ---------------------------------------------------------------------------------------------


RIGHT = Record(figures.error_of("forward", "sm_80", "bf16"), "full", True, "o: 0.50", 0.5)


def _speeds(direction: str, ratio: float, **changed: float) -> list[Record]:
    return [
        Record(case.name, "", None, "", changed.get(f"hd{case.width}", ratio)) for case in figures.speeds(direction)
    ]


def test_speeds_are_kept_by_what_was_timed() -> None:
    found = writeback.attention([RIGHT, *_speeds("forward", 1.5, hd96=0.8), *_speeds("backward", 1.257)[:-1]], "a card")
    assert found[Attention("a card", "forward", 64, general=False, grouped=True)] == 1.5
    assert found[Attention("a card", "forward", 96, general=True, grouped=False)] == 0.8
    assert found[Attention("a card", "backward", 256, general=False, grouped=True)] == 1.25
    untimed = Attention("a card", "backward", 256, general=True, grouped=True)  # its last figure
    assert untimed not in found
    assert len(found) == 2 * 5 * 2 * 2 - 1


def test_the_least_ratio_counts() -> None:
    timed = _speeds("forward", 1.5)
    name = next(case.name for case in figures.speeds("forward") if case.width == 112 and case.sequence == 16384)
    timed = [replace(r, value=0.7) if r.figure == name else r for r in timed]
    assert (
        writeback.attention([RIGHT, *timed], "c")[Attention("c", "forward", 112, general=False, grouped=False)] == 0.7
    )


@pytest.mark.parametrize("ok", [False, None])
def test_kernels_that_are_not_right_are_not_kept(ok: bool | None) -> None:
    other = Record(figures.error_of("backward", "sm_80", "fp16"), "causal", ok, "")
    assert writeback.attention([*_speeds("forward", 1.5)], "a card") == {}
    assert writeback.attention([RIGHT, other, *_speeds("forward", 1.5)], "a card") == {}


def _sweep(figure: str, values: dict[int, float | None]) -> list[Record]:
    return [Record(figure, str(n), None if v else False, "", v) for n, v in values.items()]


def test_tuning_is_what_the_sweeps_found() -> None:
    ctas = _sweep(figures.CTAS_SWEEP, {4: 100.0, 8: 390.0, 16: 400.0})
    packets = _sweep(figures.PACKETS_SWEEP, {1024: 2.0, 2048: 1.2, 4096: 0.9})
    assert writeback.tuning([*ctas, *packets]) == {"ctas": 8}, "links decide about packets, and none were there"
    assert writeback.tuning([*_sweep(figures.CTAS_SWEEP, {4: 100.0, 8: None}), *packets]) == {}


def test_the_fastest_tile_is_taken_where_all_were_tried() -> None:
    plain, wide = figures.tiles_of(128, False), figures.tiles_of(256, False)
    found = _sweep(plain, {96: 500.0, 128: 600.0, 176: None}) + _sweep(wide, {80: 400.0})
    assert writeback.tiles(found) == {(128, False): 128}


def test_what_was_measured_is_written_back(tmp_path: Path) -> None:
    measured, table = tmp_path / "measured.json", tmp_path / sweeps.TABLE
    measured.write_text(writeback.MEASURED.read_text())
    table.write_text(writeback.TILE_TABLE.read_text())
    found = [RIGHT, *_speeds("forward", 1.5)] + _sweep(figures.CTAS_SWEEP, {4: 100.0, 8: 390.0})
    found += _sweep(figures.tiles_of(256, True), {32: 90.0, 48: 80.0})
    for card in ("a card", "another card", "a card"):  # twice: its rows are replaced
        writeback.write(found, card, measured, table)
    before, after = (json.loads(path.read_text()) for path in (writeback.MEASURED, measured))
    row = Attention("a card", "forward", 112, general=False, grouped=True)
    assert (Attention.parse("a card", row.text), after["a card"]["attention"][row.text]) == (row, 1.5)
    assert [len(after[card]["attention"]) for card in ("a card", "another card")] == [20, 20]
    assert after["a card"]["tuning"] == after["another card"]["tuning"] == {"ctas": 8}
    assert before.items() <= after.items()  # those of other cards stay
    assert sweeps.row(256, True, "32") in table.read_text()
    assert sweeps.row(64, True, "64") in table.read_text()


def test_every_tile_of_the_table_is_among_those_tried() -> None:
    text = writeback.TILE_TABLE.read_text()
    for (width, general), candidates in figures.TILES.items():
        assert any(sweeps.row(width, general, str(keys)) in text for keys in candidates)
    assert text.count("template <> constexpr int") == len(figures.TILES)


# --- times ------------------------------------------------------------------------------------------------------------


def test_medians_and_quartiles() -> None:
    times = Times.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert times == Times(3.0, 2.0, 4.0)
    assert times.rate(12e12, 1e12) == "4 (3-6)"


def test_a_race_is_by_turns_and_leaves_the_warmup_out() -> None:
    order: list[str] = []
    found = race({name: functools.partial(order.append, name) for name in "ab"}, "cpu", rounds=4, warmup=2, calls=3)
    assert list(found) == ["a", "b"]
    assert "".join(order) == "aaabbb bbbaaa".replace(" ", "") * 3
    assert all(0 < t.low <= t.median <= t.high < 1 for t in found.values())


def test_the_warmup_does_not_count() -> None:
    slow_ones = [0.03, 0.03, 0.03]
    found = race({"a": lambda: time.sleep(slow_ones.pop() if slow_ones else 0)}, "cpu", rounds=3, warmup=3)
    assert found["a"].high < 0.02


def test_a_slow_call_is_slow() -> None:
    found = race({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, "cpu", rounds=5)
    assert found["slow"].low >= 0.02
    assert found["fast"].median < 0.01


@pytest.mark.parametrize(
    ("direction", "ratios", "met"),
    [
        ("forward", {"flash": 1.3, "cuDNN": 0.85}, True),
        ("forward", {"flash": 1.29, "cuDNN": 0.9}, False),
        ("forward", {"flash": 1.4, "cuDNN": 0.84}, False),
        ("forward", {"flash": 1.4}, None),
        ("forward", {"cuDNN": 0.5}, False),
        ("backward", {"flash": 1.2, "cuDNN": 0.5}, True),
        ("backward", {"flash": 1.19, "cuDNN": 1.0}, False),
        ("backward", {}, None),
    ],
)
def test_targets_of_speed(direction: str, ratios: dict[str, float], met: bool | None) -> None:
    assert speed_attention.judged(direction, ratios) is met


def test_a_wrong_result_is_not_timed() -> None:
    x = torch.randn(100)
    speed_attention._agree((x,), (x + 0.001,))
    for other in (x + 0.1, x * float("nan")):
        with pytest.raises(AssertionError, match="not timed: the result is off by"):
            speed_attention._agree((x,), (other,))


# --- compute-sanitizer ------------------------------------------------------------------------------------------------

SAID = {
    "========= ERROR SUMMARY: 0 errors\nran 9 cases": (0, True, "0 errors; 9 cases"),
    "ran 9 cases\n========= ERROR SUMMARY: 0 errors": (5, False, "0 errors; 9 cases"),
    "========= Invalid __global__ write of 4 bytes\n=========   at f\n========= ERROR SUMMARY: 2 errors\nran 9 cases": (
        9, False, "2 errors; 9 cases; first: Invalid __global__ write of 4 bytes"),
    "ran 3 cases\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)": (
        0, False, "1 hazard displayed (0 errors, 1 warning); 3 cases"),
    "========= ERROR SUMMARY: 0 errors": (0, False, "0 errors; the program did not end"),
    "========= Error: Device not supported\n========= ERROR SUMMARY: 1 error": (
        1, None, "compute-sanitizer does not support this device"),
}  # fmt: skip


@pytest.mark.parametrize("said", SAID)
def test_what_the_sanitizer_says(said: str) -> None:
    code, ok, text = SAID[said]
    program = f"import sys; print({said!r}); sys.exit({code})"
    assert tools._sanitized(["env", sys.executable, "-c", program]) == Outcome(ok, text)


def test_a_sanitizer_that_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="exit status 1: cannot do that"):
        tools._sanitized([sys.executable, "-c", "import sys; print('cannot do that'); sys.exit(1)"])


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().out == f"not measured: there is no CUDA GPU (torch {torch.__version__})\n"
    page = (tmp_path / "REPORT.md").read_text()
    assert page.count("not measured: there is no CUDA GPU | not measured |") == len(FIGURES)
    assert [path.name for path in tmp_path.iterdir()] == ["REPORT.md"]


def test_the_committed_report_has_every_figure() -> None:
    lines = REPORT.read_text().splitlines()
    for figure in FIGURES:
        assert any(
            line.startswith(f"| {figure.name} | {figure.target.replace('|', chr(92) + '|')} |") for line in lines
        )
    never = report.page(report.rows([], {}, NO_GPU), {}, lines[2].split(":")[0])
    assert ("| GPU |" in REPORT.read_text()) or REPORT.read_text() == never  # measured, or it says that nothing was


def test_a_report_keeps_what_was_measured_before() -> None:
    """Of each card the last; nobody who measures a part loses the rest."""
    (first, second, third, *_), page = of_part("collectives"), ""
    calls = [
        ("a card", "2026-01-01", [Record(first, "", True, "1 | 2"), Record(second, "", True, "3")]),
        ("another card", "2026-02-02", [Record(first, "", False, "4")]),
        ("a card", "2026-03-03", [Record(first, "", True, "5")]),
    ]
    for card, day, found in calls:
        facts = {"GPU": card, report.DIGEST: "0123456789"}
        page = report.page(report.kept(report.rows(found, {}, {}), facts, day, page), facts, day)
    rows = [(row.measured, row.verdict, row.of) for row in report._read(page) if row.figure in (first, second)]
    assert rows == [
        ("5", "met", "a card, 2026-03-03, 01234567"),
        ("4", "missed", "another card, 2026-02-02, 01234567"),
        ("3", "met", "a card, 2026-01-01, 01234567"),
    ]
    assert f"| {third} | equal | not measured: its part ended before it | not measured |  |" in page
    assert "1 | 2" not in page


def test_verdicts() -> None:
    found = [
        Record(figures.error_of("forward", "sm_80", "bf16"), "full", True, "o: 0.50", 0.5),
        Record("cuda/ compiles", "", False, "not built: no nvcc"),
        Record("bf16 matmul 8192^3", "", None, "700 (690-710) TFLOP/s"),
        Record("something else", "", None, "7"),
        Record("forward bf16 hd64 full 2k", "", None, "300 (290-310) TFLOP/s"),  # a card for which there is no target
    ]
    table = report.rows(found, {"copy_ of 1 GiB, read + write": "for a reason"}, {"gpu tests": "no time"})
    by_name = {row.figure: (row.measured, row.verdict) for row in table}
    assert by_name[found[0].figure] == ("1 of 1 cases pass; worst 0.50 (full)", "met")
    assert by_name["cuda/ compiles"] == ("not built: no nvcc", "missed")
    assert by_name["bf16 matmul 8192^3"] == ("700 (690-710) TFLOP/s", "")
    assert by_name["forward bf16 hd64 full 2k"] == ("300 (290-310) TFLOP/s", "")
    assert by_name["copy_ of 1 GiB, read + write"] == ("not measured: for a reason", "not measured")
    assert by_name["pytest -m gpu"] == ("not measured: no time", "not measured")
    assert by_name["something else"] == ("7", "")
    assert len(table) == len(FIGURES) + 1
    text = report.text(table, {"GPU": "a card"})
    assert text.startswith("GPU: a card\nMISS cuda/ compiles")
    assert text.endswith(f"1 met, 1 missed, {len(table) - 5} not measured")
    page = report.page(table, {"GPU": "a card"}, "2026-01-31")
    assert "Measured on 2026-01-31 on one a card." in page
    assert "| cuda/ compiles | 0 bytes spilled, <= 15 MB | not built: no nvcc | missed |" in page


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(tmp_path / "REPORT.md", "old")

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            report.write(tmp_path / "REPORT.md", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"REPORT.md": "old"}
    report.write(tmp_path / "REPORT.md", "new")
    assert (tmp_path / "REPORT.md").read_text() == "new"


def test_what_builds_on_a_failed_build_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(self: Session, part: session.Part) -> str:
        ran.append(part.name)
        if part.name == "build":
            Recorder(self.path).note("cuda/ compiles", False, "not built: no nvcc")
        return ""

    monkeypatch.setattr(Session, "run", run)
    with (tmp_path / "log").open("w") as log:
        skipped = session._all_parts(Session(tmp_path / "records", log, 0, False, "cuda"), [])
    assert ran == [part.name for part in PARTS if not part.needs]
    assert skipped["errors sm_80"] == "build: it failed"
