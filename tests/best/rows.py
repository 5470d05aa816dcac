"""All rows of the table."""

from __future__ import annotations

from tests.best import Row, constants, experts, matrices, moves, tables, training

ROWS: list[Row] = [
    *constants.ROWS,
    *tables.ROWS,
    *moves.ROWS,
    *matrices.ROWS,
    *experts.ROWS,
    *training.ROWS,
]
