"""All rows of the table."""

from __future__ import annotations

from tests.best import (
    Row,
    borders,
    chains,
    constants,
    estimators,
    experts,
    features,
    fused,
    layers,
    matrices,
    moves,
    objectives,
    recommenders,
    tables,
    training,
    transforms,
)

ROWS: list[Row] = [
    *constants.ROWS,
    *tables.ROWS,
    *recommenders.ROWS,
    *moves.ROWS,
    *borders.ROWS,
    *chains.ROWS,
    *transforms.ROWS,
    *matrices.ROWS,
    *experts.ROWS,
    *training.ROWS,
    *fused.ROWS,
    *layers.ROWS,
    *objectives.ROWS,
    *features.ROWS,
    *estimators.ROWS,
]
