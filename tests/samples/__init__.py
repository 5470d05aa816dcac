"""Sample calls for the rows of the rule tables, a module per family; `tests.rule_samples` collects them."""

from __future__ import annotations

from tests.samples import (
    activation,
    bags,
    convolution,
    cumulative,
    fft,
    linalg,
    matrix,
    ordering,
    pooling,
    random,
    resample,
    scattering,
)

SAMPLES = tuple(
    sample
    for family in (
        activation,
        bags,
        convolution,
        cumulative,
        fft,
        linalg,
        matrix,
        ordering,
        pooling,
        random,
        resample,
        scattering,
    )
    for sample in family.SAMPLES
)
