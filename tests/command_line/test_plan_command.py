"""`shardlib plan`: what it prints, and what it says about bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl
from shardlib.command_line.main import main
from shardlib.command_line.plan_command import parse_axes
from shardlib.command_line.shell_words import in_shell_words
from tests.command_line.transformers_configs import CASES

HERE = "tests.command_line.plan_targets"
MESH = ("--mesh", "data=2,tensor=4")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of `shardlib plan`."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as error:  # of argparse
        status = int(error.code or 0)
    text = capsys.readouterr()
    return status, text.out, text.err


@pytest.mark.parametrize("name", ["product", "planned"])
def test_function(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, err = run(capsys, f"{HERE}:{name}", *MESH, "--machine", "h100")
    assert (status, err) == (0, "")
    assert "batch@data 512" in out
    assert "memory per device" in out
    assert "simulated step on h100: " in out


def test_plain_function(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, f"{HERE}:plain", "--mesh", "data=4")
    assert (status, err) == (0, "")
    assert "relu on data=4 (4 devices, abstract)" in out
    assert "simulated" not in out


def test_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert run(capsys, f"{HERE}:product", *MESH, "--html", str(path))[0] == 0
    assert "batch=64@data" in path.read_text()


def write_config(folder: Path, content: Any, name: str = "config.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


TINY = CASES["llama"].config(is_tiny=True)
SIZES = ("--batch", "8", "--seq", "16")

# Arguments, in which {folder} is a folder with config.json (a tiny Llama) and other configs, and parts of the message.
BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mesh without sizes": (
        (f"{HERE}:product", "--mesh", "data,tensor=4x"),
        (
            "--mesh 'data,tensor=4x' is no mesh",
            "* 'data' is no axis",
            "* 'tensor=4x' is no axis",
            "--mesh data=512,tensor=8",
        ),
    ),
    "axis twice": ((f"{HERE}:product", "--mesh", "data=2,data=4"), ("'data' stands there 2 times",)),
    "axis of size 0": (
        (f"{HERE}:product", "--mesh", "data=0"),
        ("--mesh 'data=0' is no mesh", "* 'data' has size 0, not 1 or more", "Remedy: --mesh data=512,tensor=8"),
    ),
    "mesh without the spec's axis": ((f"{HERE}:product", "--mesh", "data=2"), ("tensor", "the mesh has")),
    "machine": (
        (f"{HERE}:product", *MESH, "--machine", "h10"),
        (
            "'h10' is no machine; did you mean 'h100'?\n",
            "Rule: known are node, h100, h200, a100-40, cpu",
            "Remedy: --machine h100\n",
        ),
    ),
    "page in no folder": (
        (f"{HERE}:product", *MESH, "--html", "{folder}/none/plan.html"),
        ("shardlib: --html '{folder}/none/plan.html' cannot be written:", "none does not exist", "--html plan.html"),
    ),
    "page that is a folder": (
        (f"{HERE}:product", *MESH, "--html", "{folder}"),
        ("--html '{folder}' cannot be written", "it is a folder"),
    ),
    "page in a folder without files": (
        ("--model", "{folder}/none", *MESH, *SIZES, "--html", "/proc/plan.html"),
        ("--html '/proc/plan.html' cannot be written", "this process cannot write there"),
    ),
    "no colon": (("train.py", *MESH), ("'train.py' is not MODULE:FUNCTION", "def small()")),
    "a path": (("../train:small", *MESH), ("'../train:small' is not MODULE:FUNCTION",)),
    "an argument": ((f"{HERE}:needs", *MESH), (":needs is called with no arguments: missing a required argument",)),
    "too few arguments": ((f"{HERE}:lacks", *MESH), ("the step of", "is called with 1 argument: missing", "'w'")),
    "options of models": (
        (f"{HERE}:product", *MESH, "--batch", "4", "--strategy", "fsdp"),
        ("--batch, --strategy with a function", "leave them out"),
    ),
    "no module": (("tests.nowhere:f", *MESH), ("there is no module 'tests.nowhere'", "neither installed nor in")),
    "no function": ((f"{HERE}:produkt", *MESH), ("has no function 'produkt'; did you mean 'product'?",)),
    "no function but a number": ((f"{HERE}:number", *MESH), ("has no function 'number'",)),
    "another result": ((f"{HERE}:nothing", *MESH), (":nothing returns NoneType", "(step, *args), or a plan")),
    "no program": (MESH, ("shardlib plan is given no program", "MODULE:FUNCTION, or --model CONFIG")),
    "two programs": ((f"{HERE}:product", "--model", "{folder}", *MESH), ("is given two programs",)),
    "no config": (("--model", "{folder}/none", *MESH, *SIZES), ("cannot be read", "No such file", "are not fetched")),
    "broken config": (("--model", "{folder}/broken.json", *MESH, *SIZES), ("broken.json cannot be read", "line 1")),
    "no model type": (("--model", "{folder}/typeless.json", *MESH, *SIZES), ("has no model_type",)),
    "unknown model type": (
        ("--model", "{folder}/unknown.json", *MESH, *SIZES),
        ("unknown.json is of model type 'lama'", "has no such type; did you mean 'llama'?", "MODULE:FUNCTION"),
    ),
    "unfit config": (
        ("--model", "{folder}/unfit.json", *MESH, *SIZES),
        ("transformers cannot build", "correct the config"),
    ),
    "strategy": (
        ("--model", "{folder}", *MESH, *SIZES, "--strategy", "fsdpp"),
        ("--strategy fsdpp is no strategy", "Remedy: one of ddp, zero1, zero2, fsdp, hsdp (fsdp is ZeRO-3)\n"),
    ),
    "strategy without its axes": (
        ("--model", "{folder}", "--mesh", "tensor=4", *SIZES),
        ("the strategy does not fit the mesh (tensor=4)", "as above: --mesh data=512,tensor=8"),
    ),
    "axis without use": (
        ("--model", "{folder}", "--mesh", "data=2,other=4", *SIZES),
        ("not sharded over all axes", "* other=4", "weights over tensor, model, tp"),
    ),
    "step whose plan is none": (
        (f"{HERE}:planless", *MESH),
        ("the method plan of the step of", "returns str", "as jitted functions do"),
    ),
    "no sizes of a config without a limit": (
        ("--model", "{folder}/endless.json", *MESH),
        ("--batch is missing", "--seq is missing", "--batch 1024 --seq 4096"),
    ),
    "no sizes": (("--model", "{folder}", *MESH), ("--batch is missing", "--seq is missing", "--batch 1024 --seq")),
    "sizes below 1": (
        ("--model", "{folder}", *MESH, "--batch", "0", "--seq", "-1"),
        ("--batch 0 is no number of samples", "--seq -1 is no number of tokens"),
    ),
    "too many positions": (
        ("--model", "{folder}", *MESH, "--batch", "8", "--seq", "16384"),
        ("--seq 16384 is more than the 8192 positions of its config",),
    ),
    "shares that differ": (
        ("--model", "{folder}", "--mesh", "replica=2,data=3,seq=4", "--batch", "8", "--seq", "18"),
        (
            "* --batch 8 is no multiple of replica=2 x data=3 = 6\n",
            "* --seq 18 is no multiple of seq=4\n",
            "Remedy: --batch 6 or 12, --seq 16 or 20\n",
        ),
    ),
    "layers below 0 of a config": (
        ("--model", "{folder}/negative.json", *MESH, *SIZES),
        ("negative.json has stacks without layers", "* num_hidden_layers: -3\n", "* text_config.depth: [2, -1]\n"),
    ),
    "unknown architecture": (
        ("--model", "{folder}/nameless.json", *MESH, *SIZES),
        ("transformers has no model 'NoSuch'\n", "of the type 'llama': LlamaForCausalLM, "),
    ),
    "tokens of images": (
        ("--model", "{folder}/images.json", "--mesh", "data=2", *SIZES),
        ("* --seq 16 has no use: the config has all sizes of a sample\n", "Remedy: --batch 1024\n"),
    ),
    "layers": (("--model", "{folder}", *MESH, *SIZES, "--layers", "0"), ("--layers 0 is no number of layers",)),
    "inputs of another kind": (
        ("--model", "{folder}/series.json", "--mesh", "data=2", *SIZES),
        ("cannot make", "past_values of its forward"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    write_config(tmp_path, TINY)
    write_config(tmp_path, "{", "broken.json")
    write_config(tmp_path, {"hidden_size": 32}, "typeless.json")
    write_config(tmp_path, TINY | {"max_position_embeddings": -1}, "endless.json")
    write_config(tmp_path, {"model_type": "lama"}, "unknown.json")
    write_config(tmp_path, TINY | {"num_hidden_layers": -3, "text_config": {"depth": [2, -1]}}, "negative.json")
    write_config(tmp_path, TINY | {"architectures": ["NoSuch"]}, "nameless.json")
    write_config(tmp_path, CASES["vit"].config(is_tiny=True), "images.json")
    write_config(tmp_path, TINY | {"hidden_size": "wide"}, "unfit.json")
    write_config(tmp_path, {"model_type": "time_series_transformer", "prediction_length": 4}, "series.json")
    arguments, parts = BAD[case]
    status, out, err = run(capsys, *(text.replace("{folder}", str(tmp_path)) for text in arguments))
    assert (status, out) == (2, ""), err
    assert err.startswith("shardlib: ")
    assert [part for part in parts if part.replace("{folder}", str(tmp_path)) not in err] == [], err


@pytest.mark.parametrize(
    ("text", "has_model", "words"),
    [
        ("a step on Mesh.abstract(data=2, tensor=4)", False, "a step on --mesh data=2,tensor=4"),
        ('Mesh.abstract(data=2, tensor=4, machine="h100")', False, "--mesh data=2,tensor=4"),
        ("with Mesh(data=2):", False, "with Mesh(data=2):"),
        ("Mesh(data=2, tensor=4, rules={'m': 'data'})", False, "Mesh(data=2, tensor=4, rules={'m': 'data'})"),
        ('Mesh(stage=2, ..., stages="stage")', False, 'Mesh(stage=2, ..., stages="stage")'),
        ('machine="h100", or an sl.Machine', False, "--machine h100"),
        ('weights over data, strategy="fsdp"', True, "weights over data, --strategy fsdp"),
        ('weights over data, strategy="fsdp"', False, 'weights over data, strategy="fsdp"'),
        ('remat="full"; precision=torch.bfloat16', True, "--remat full; --precision bfloat16"),
    ],
)
def test_words_of_the_shell(text: str, has_model: bool, words: str) -> None:
    """Arguments that a function of the user passes itself keep their names, as do its own meshes."""
    error = in_shell_words(sl.ShardingError(text, [text], rule=text, remedy=text), MESH[1], has_model=has_model)
    assert str(error) == f"{words}:\n  * {words}\nRule: {words}\nRemedy: {words}"


def test_help_lists_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert "for seconds: node, h100, h200, a100-40, cpu" in " ".join(out.split())


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, f"{HERE}:product")
    assert status == 2
    assert "required: --mesh" in err


def test_axes() -> None:
    assert parse_axes(" data = 512, tensor=8") == {"data": 512, "tensor": 8}


@pytest.mark.long
def test_modules_of_the_current_folder(tmp_path: Path) -> None:
    """A process whose path lacks the current folder, as that of a console script, still sees its modules."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef f():\n    return torch.relu, torch.empty(8, device='meta')\n"
    )
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[0] = {root!r}; from shardlib.command_line.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "plan", "mine:f", "--mesh", "data=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "relu on data=2" in done.stdout
