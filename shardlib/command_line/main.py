"""Parses the command line and runs a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardlib.command_line import doctor, plan_command
from shardlib.core.errors import ShardingError

BAD_INPUT = 2  # the exit status, as argparse's own


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; `argv` defaults to the process's own arguments.

    The status is 2 for input that shardlib refuses, with the reason on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="shardlib", description="Plans sharded PyTorch programs, and checks an installation."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    plan_command.add_to(commands)
    doctor.add_to(commands)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
    except ShardingError as error:
        print(f"shardlib: {error}", file=sys.stderr)
        return BAD_INPUT
    return status
