"""Functions for `shardlib plan MODULE:FUNCTION`."""

from __future__ import annotations

from typing import Any

import torch

import shardlib as sl

number = 3


def product() -> Any:
    x, w = torch.empty(64, 512, device="meta"), torch.empty(512, 256, device="meta")
    return sl.jit(lambda x, w: torch.relu(x @ w), in_specs=("batch@data _", "_ ff@tensor")), x, w


def planned() -> sl.Plan:
    step, *args = product()
    return step.plan(*args)


def plain() -> Any:
    return torch.relu, torch.empty(8, device="meta")


class Planless:
    def __call__(self) -> None: ...

    def plan(self) -> str:
        return "none"


def planless() -> Any:
    return (Planless(),)


def nothing() -> None:
    return None


def needs(x: torch.Tensor) -> Any:
    return torch.relu, x


def lacks() -> Any:
    return lambda x, w: x @ w, torch.empty(4, 4)
