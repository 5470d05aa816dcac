"""Runs the command line: `python -m shardlib`."""

import sys

from shardlib.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
