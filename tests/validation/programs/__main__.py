"""Runs a recorded campaign of random programs: `python -m tests.validation.programs`."""

from __future__ import annotations

from tests.validation.programs.record import main

if __name__ == "__main__":
    main()
