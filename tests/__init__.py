"""Tests of shardlib; README.md says where each stands."""

from pathlib import Path

# `python -m tests.best` still finds tests/validation/best: scripts outside of the tree call such names. Imports inside
# of it name the folder, so that no module is loaded twice.
__path__.append(str(Path(__file__).with_name("validation")))
