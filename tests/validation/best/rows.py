"""All rows of the table."""

from __future__ import annotations

from tests.validation.best import Row
from tests.validation.best.blocks import chains, experts, fused, layers, meshes, mixers, recommenders, tables
from tests.validation.best.grids import borders, boundaries, fields, images, moves, stencils, transforms
from tests.validation.best.numerics import constants, estimators, matrices, sketches, statistics
from tests.validation.best.steps import (
    contrasts,
    features,
    kinds,
    objectives,
    practice,
    scores,
    tasks,
    training,
    updates,
)

ROWS: list[Row] = [
    *constants.ROWS,
    *tables.ROWS,
    *recommenders.ROWS,
    *moves.ROWS,
    *borders.ROWS,
    *boundaries.ROWS,
    *chains.ROWS,
    *transforms.ROWS,
    *matrices.ROWS,
    *experts.ROWS,
    *training.ROWS,
    *fused.ROWS,
    *layers.ROWS,
    *objectives.ROWS,
    *practice.ROWS,
    *features.ROWS,
    *estimators.ROWS,
    *images.ROWS,
    *fields.ROWS,
    *statistics.ROWS,
    *mixers.ROWS,
    *contrasts.ROWS,
    *updates.ROWS,
    *meshes.ROWS,
    *tasks.ROWS,
    *kinds.ROWS,
    *scores.ROWS,
    *stencils.ROWS,
    *sketches.ROWS,
]
