"""`shardlib plan`: prints the plan of a function or of a transformers model's training step, on an abstract mesh."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.command_line.function_target import plan_function
from shardlib.command_line.shell_words import in_shell_words
from shardlib.command_line.training_step import plan_training_step
from shardlib.compiler.memory_options import WORDS
from shardlib.compiler.plan.memory_table import memory_table
from shardlib.compiler.plan.page.write_page import check_writable
from shardlib.compiler.plan.plan import Plan
from shardlib.compiler.simulate.simulated import clock
from shardlib.core.errors import ShardingError
from shardlib.nn.strategies import NAMED
from shardlib.sharding.mesh.machine import PRESETS, Machine
from shardlib.sharding.mesh.mesh import Mesh

_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*")
# Options that describe the step of --model, with their defaults.
_OF_MODELS = {"batch": None, "seq": None, "strategy": "fsdp", "layers": None, "remat": "none", "precision": "bfloat16"}

DESCRIPTION = """\
Prints the plan of one call on an abstract mesh of any size. No device is touched, and no tensor takes memory.

MODULE:FUNCTION names a function without arguments, which runs inside the mesh and returns a function and its arguments,
(step, *args), or a plan. Arguments may be meta tensors; step may be jitted, with specs. For example, in train.py:

    def small():
        x, w = torch.empty(64, 512, device="meta"), torch.empty(512, 512, device="meta")
        return sl.jit(lambda x, w: torch.relu(x @ w), in_specs=("batch@data _", "_ ff@tensor")), x, w

    shardlib plan train:small --mesh data=4,tensor=2 --machine h100

--model plans a whole training step with AdamW of a transformers model instead: forward, backward and update. Parameters
and moments are in float32, and the model computes in bfloat16. The loss is the model's own; for a model without one,
such as LlamaModel, it is the mean square of each output, added up.

    shardlib plan --model config.json --mesh data=512,tensor=8 --machine h100 --batch 1024 --seq 4096 --strategy fsdp
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="print the plan of a function or of a transformers model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", metavar="MODULE:FUNCTION", help="the function that returns (step, *args)")
    parser.add_argument("--mesh", required=True, metavar="AXES", help="axes and their sizes: data=512,tensor=8")
    parser.add_argument("--machine", metavar="NAME", help=f"the devices' kind, for seconds: {', '.join(PRESETS)}")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the plan as a page")
    parser.add_argument("--full", action="store_true", help="print every input, step and output")
    model = parser.add_argument_group("a transformers model")
    model.add_argument("--model", metavar="CONFIG", type=Path, help="its config.json, or the folder that holds it")
    model.add_argument(
        "--batch", type=int, metavar="B", default=argparse.SUPPRESS, help="samples of one step, over all devices"
    )
    model.add_argument(
        "--seq", type=int, metavar="S", default=argparse.SUPPRESS, help="tokens of a sample (elements, of raw audio)"
    )
    model.add_argument("--strategy", default=argparse.SUPPRESS, metavar="NAME", help=f"{', '.join(NAMED)} (fsdp)")
    model.add_argument(
        "--layers", type=int, metavar="N", default=argparse.SUPPRESS, help="plan at most N layers of each stack"
    )
    model.add_argument(
        "--remat", default=argparse.SUPPRESS, choices=WORDS, help="what the backward pass recomputes (none)"
    )
    model.add_argument("--precision", default=argparse.SUPPRESS, choices=("bfloat16", "float16", "float32"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan, the memory per device, and seconds where a machine is named; returns the exit status 0.

    Raises `ShardingError` in the words of the shell.
    """
    try:
        _print_plan(options)
    except ShardingError as error:
        mesh = re.sub(r"\s", "", options.mesh)
        raise in_shell_words(error, mesh, has_model=options.model is not None) from error
    return 0


def _print_plan(options: argparse.Namespace) -> None:
    machine = Machine.preset(options.machine) if options.machine is not None else None
    mesh = Mesh.abstract(parse_axes(options.mesh), machine=machine)
    if options.html is not None:
        check_writable(options.html)
    if (options.target is None) == (options.model is None):
        raise ShardingError(
            "shardlib plan is given " + ("no program" if options.model is None else "two programs"),
            remedy="name one: MODULE:FUNCTION, or --model CONFIG",
        )
    if options.model is None and (named := [name for name in _OF_MODELS if name in options]):
        raise ShardingError(
            f"{', '.join(f'--{name}' for name in named)} with a function",
            rule="these options describe the step of --model; a function has its own batch and strategy",
            remedy="leave them out, and say it in the function",
        )
    options = argparse.Namespace(**(_OF_MODELS | vars(options)))
    counts: Mapping[str, int] = {}
    labels: Mapping[str, str] = {}
    if options.model is not None:
        step = plan_training_step(mesh, options)
        plan, counts, labels = step.plan, step.counts, step.labels
        print(*step.facts, "", sep="\n")
    else:
        plan = plan_function(options.target, mesh)
    if options.html is not None:
        plan.html(options.html, machine=machine)
    print(plan.full if options.full else plan)
    print("", *memory_table(plan, labels), sep="\n")
    if machine is not None:
        print("", *_time_lines(plan, machine, counts), sep="\n")


def parse_axes(text: str) -> dict[str, int]:
    """Parses `data=512,tensor=8`. Raises `ShardingError` with all parts that are no axis.

    Example:
        >>> parse_axes("data=512,tensor=8")
        {'data': 512, 'tensor': 8}
    """
    parts = text.split(",")
    matches = [_AXIS.fullmatch(part) for part in parts]
    wrong = [f"{part.strip()!r} is no axis" for part, match in zip(parts, matches, strict=True) if match is None]
    names = [match[1] for match in matches if match is not None]
    wrong += [
        f"{name!r} stands there {names.count(name)} times" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    wrong += [f"{match[1]!r} has size 0, not 1 or more" for match in matches if match is not None and not int(match[2])]
    if wrong:
        raise ShardingError(
            f"--mesh {text!r} is no mesh",
            wrong,
            rule="a mesh is a list of axes with their sizes, the axis of neighboring devices last",
            remedy="--mesh data=512,tensor=8",
        )
    return {match[1]: int(match[2]) for match in matches if match is not None}


def _time_lines(plan: Plan, machine: Machine, counts: Mapping[str, int]) -> list[str]:
    """Returns the simulated seconds of a step, and the rates of `counts`, by their unit."""
    step = plan.simulate(machine)
    lines = [
        f"simulated step on {machine}: {clock(step.seconds)}, of which communication is exposed for "
        f"{clock(step.exposed)}; utilization {step.utilization.model:.1%}"
    ]
    if counts and step.seconds:
        rates = (f"{float(f'{count / step.seconds:.3g}'):,.0f} {unit}/s" for unit, count in counts.items())
        lines.append(f"simulated rate: {', '.join(rates)}")
    return lines
