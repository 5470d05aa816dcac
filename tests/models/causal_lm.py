"""What the models of `transformers` share here: loss and step over a dict of parameters, and specs by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

LEARNING_RATE = 0.1

Params = dict[str, Tensor]


@dataclass(frozen=True)
class CausalLM:
    """A language model of transformers, as it is, and a spec for every parameter by the end of its name."""

    module: nn.Module
    patterns: Mapping[str, str]

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

    def loss(self, params: Params, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token; tokens (batch, sequence)."""
        keywords = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        value: Tensor = functional_call(self.module, params, (), keywords).loss
        return value

    def step(self, params: Params, tokens: Tensor) -> tuple[Tensor, Params]:
        """One step of SGD: the loss, and new parameters."""
        grads, value = torch.func.grad_and_value(self.loss)(params, tokens)
        return value, {name: p - LEARNING_RATE * grads[name] for name, p in params.items()}


def tokens(vocab: int, batch: int, seq: int, seed: int = 1) -> Tensor:
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
