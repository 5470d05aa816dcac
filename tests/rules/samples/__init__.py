"""Sample calls for the rows of the rule tables, a module per family; `tests.rules.rule_samples` collects them."""

from __future__ import annotations

from tests.rules.samples import (
    activation,
    bags,
    convolution,
    counting,
    cumulative,
    diagonals,
    fft,
    linalg,
    loss,
    matrix,
    norm,
    ordering,
    pooling,
    random,
    recurrence,
    resample,
    scattering,
    shifting,
)

SAMPLES = tuple(
    sample
    for family in (
        activation,
        bags,
        convolution,
        counting,
        cumulative,
        diagonals,
        fft,
        linalg,
        loss,
        matrix,
        norm,
        ordering,
        pooling,
        random,
        recurrence,
        resample,
        scattering,
        shifting,
    )
    for sample in family.SAMPLES
)
