"""The clock names the stage that runs, also while equal layers are folded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.compiler import pipeline
from shardlib.compiler.layer_folding import fold_graph
from shardlib.core.stage_clock import StageClock


def test_every_stage_runs_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = StageClock(), []

    def record(name: str) -> None:
        function = getattr(pipeline, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, clock.stage))
            return function(*args, **kwargs)

        monkeypatch.setattr(pipeline, name, call)

    monkeypatch.setattr(fold_graph, "WORTH", 0)
    for name in ("normalize", "fold", "propagate", "lower_in_parts", "unroll", "_finish"):
        record(name)

    def layers(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            calls.append(("layers", clock.stage))
            x = x + torch.relu(x @ weight)
        return x

    weights = [torch.empty(8, 8, device="meta") for _ in range(12)]
    pipeline.compile_program(
        layers, (torch.empty(4, 8, device="meta"), weights), {}, sl.Mesh.abstract(data=2), clock=clock
    )
    assert list(dict.fromkeys(calls)) == [
        ("layers", "trace"),
        ("normalize", "normalize"),
        ("fold", "propagate"),
        ("propagate", "propagate"),
        ("lower_in_parts", "lower"),
        ("unroll", "lower"),
        ("_finish", "passes"),
    ]
    assert list(clock.seconds) == ["trace", "normalize", "rules", "propagate", "lower", "passes"]
    assert clock.stage == ""
