"""What the models of `transformers` share here: loss and step over a dict of parameters, and specs by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .wide import Wide

LEARNING_RATE = 0.1

Params = dict[str, Tensor]
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class CausalLM:
    """A language model of transformers, as it is, and a spec for every parameter by the end of its name."""

    module: nn.Module
    patterns: Mapping[str, str]
    keywords: Mapping[str, object] = field(default_factory=lambda: {"use_cache": False})

    def params(self) -> Params:
        """Its parameters by name; tied ones once."""
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def specs(self) -> dict[str, str]:
        return {name: self._spec(name) for name, _ in self.module.named_parameters()}

    def _spec(self, name: str) -> str:
        found = [spec for pattern, spec in self.patterns.items() if re.search(rf"(^|\.)({pattern})$", name)]
        if len(found) != 1:
            raise KeyError(f"{name} matches {len(found)} patterns")
        return found[0]

    def loss(self, params: Params, batch: Tensor | Batch) -> Tensor:
        """The model's own loss: mean cross-entropy of the next token; `batch` is tokens (B, S), or all its inputs.

        With parameters in float64 nothing is computed in less.
        """
        inputs = {"input_ids": batch, "labels": batch} if isinstance(batch, Tensor) else dict(batch)
        wide = next(iter(params.values())).dtype == torch.float64
        with Wide() if wide else contextlib.nullcontext():
            value: Tensor = functional_call(self.module, params, (), {**inputs, **self.keywords}).loss
        return value

    def step(self, params: Params, tokens: Tensor) -> tuple[Tensor, Params]:
        """One step of SGD: the loss, and new parameters."""
        grads, value = torch.func.grad_and_value(self.loss)(params, tokens)
        return value, {name: p - LEARNING_RATE * grads[name] for name, p in params.items()}


def tokens(vocab: int, batch: int, seq: int, seed: int = 1) -> Tensor:
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
