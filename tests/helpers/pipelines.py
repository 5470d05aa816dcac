"""Pipelined training of small models against one device, for every combination of schedule, axes and entry point."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.compiler.stages.staged import Staged

INSIDE: Mapping[str, tuple[dict[str, int], str | None]] = {
    "none": ({}, None),
    "ddp": ({"data": 2}, "ddp"),
    "fsdp": ({"data": 2}, "fsdp"),
    "tensor": ({"tensor": 2}, None),
    "data x tensor": ({"data": 2, "tensor": 2}, "ddp"),
}


class Example(NamedTuple):
    """A model with its loss, a function that draws a batch, and its stages: blocks by name, from first to last."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    blocks: tuple[str, ...]
    tensor: Mapping[str, str] | None = None  # specs over the axis "tensor"; None: the model's own
    tolerance: float = 1e-10

    def patterns(self, stages: int) -> dict[str, int]:
        """Returns a table that spreads the blocks over stages."""
        return {name: i * stages // len(self.blocks) for i, name in enumerate(self.blocks)}


BLOCK = {"*up.weight": "hidden@tensor _", "*up.bias": "hidden@tensor", "*down.weight": "_ hidden@tensor"}

CONVOLUTION = {"*.weight": "out@tensor _ _"}
FLOAT32 = 1e-5  # of models that compute norms (T5, Llama) and rotary angles (Llama) in float32, in any dtype


def _tokens(rows: int, length: int = 6, vocab: int = 16) -> Tensor:
    return torch.randint(0, vocab, (rows, length))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Blocks between an embedding and a tied head; with `stages`, the code names the stage of each block."""

    def __init__(self, layers: int, stages: int | None = None, width: int = 8, vocab: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.stages = stages

    def forward(self, tokens: Tensor) -> Tensor:
        if self.stages is None:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)
        with sl.stage(0):
            x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            with sl.stage(i * self.stages // len(self.layers)):
                x = layer(x)
        with sl.stage(self.stages - 1):
            return self.head(x)


class Checkpointed(nn.Module):
    """Computes the values of a module again in the backward pass, by torch's own checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def next_token_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def mlp(layers: int, stages: int | None = None) -> Example:
    return Example(Mlp(layers, stages), next_token_loss, _tokens, tuple(f"layers.{i}" for i in range(layers)), BLOCK)


def checkpointed(layers: int, stages: int | None = None) -> Example:
    example = mlp(layers, stages)
    blocks = example.model.layers
    example.model.layers = nn.ModuleList(map(Checkpointed, blocks))  # type: ignore[arg-type]
    return example


class UNet(nn.Module):
    """Levels down and up with a skip connection each."""

    def __init__(self, levels: int, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(nn.Conv1d(2 * width, width, 3, padding=1) for _ in range(levels))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            skips.append(x)
            x = torch.tanh(layer(x))
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], 1)))
        return x


def unet(layers: int, stages: int | None = None) -> Example:
    half = layers // 2
    names = (*(f"down.{i}" for i in range(half)), *(f"up.{i}" for i in range(half)))
    return Example(UNet(half), _reconstruction_loss, lambda rows: torch.randn(rows, 4, 6), names, CONVOLUTION)


def _reconstruction_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square().mean()


class TwoTower(nn.Module):
    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block(width) for _ in range(layers))
        self.right = nn.ModuleList(Block(width) for _ in range(layers))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        for layer in self.left:
            a = layer(a)
        for layer in self.right:
            b = layer(b)
        return self.scale * nn.functional.normalize(a) @ nn.functional.normalize(b).T


def two_tower(layers: int, stages: int | None = None) -> Example:
    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(*pair)
        want = torch.arange(scores.shape[0])
        return cross_entropy(scores, want) + cross_entropy(scores.T, want)

    half = layers // 2
    names = (*(f"left.{i}" for i in range(half)), *(f"right.{i}" for i in range(half)))
    return Example(TwoTower(half), loss, lambda rows: (torch.randn(rows, 8), torch.randn(rows, 8)), names, BLOCK)


class DecoderBlock(nn.Module):
    """Attends to the encoder's value in front of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.block = nn.Linear(width, width), Block(width)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        scores = self.attend(target) @ source.transpose(1, 2)
        out: Tensor = self.block(target + scores.softmax(-1) @ source)
        return out


class EncoderDecoder(nn.Module):
    """Each block of the decoder reads the encoder's last value."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(width) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width) for _ in range(layers))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.encoder:
            source = layer(source)
        for layer in self.decoder:
            target = layer(target, source)
        return target


def encoder_decoder(layers: int, stages: int | None = None) -> Example:
    half = layers // 2
    names = [f"encoder.{i}" for i in range(half)] + [f"decoder.{i}" for i in range(half)]
    return Example(
        EncoderDecoder(half),
        lambda model, pair: (model(*pair) - pair[1].roll(1, 1)).square().mean(),
        lambda rows: (torch.randn(rows, 5, 8), torch.randn(rows, 4, 8)),
        tuple(names),
        BLOCK,
    )


def gpt2(layers: int, stages: int | None = None) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = GPT2Config(n_embd=8, n_layer=layers, n_head=2, vocab_size=16, n_positions=16, **off)
    names = tuple(f"transformer.h.{i}" for i in range(layers))
    specs = {"*c_fc.weight": "_ hidden@tensor", "*c_fc.bias": "hidden@tensor", "*mlp.c_proj.weight": "hidden@tensor _"}
    return Example(GPT2LMHeadModel(config), _loss_of_logits, _tokens, names, specs)


def _loss_of_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the loss in the dtype of the logits; that of transformers for next tokens is in float32."""
    return next_token_loss(lambda tokens: model(input_ids=tokens).logits, tokens)


def _own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens.contiguous()).loss  # type: ignore[no-any-return]


def bert(layers: int, stages: int | None = None) -> Example:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    size = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    config = BertConfig(num_hidden_layers=layers, max_position_embeddings=16, **size, **off)
    names = tuple(f"bert.encoder.layer.{i}" for i in range(layers))
    specs = {"*intermediate.dense.weight": "hidden@tensor _", "*intermediate.dense.bias": "hidden@tensor"}
    return Example(BertForMaskedLM(config), _own_loss, _tokens, names, specs)


def t5(layers: int, stages: int | None = None) -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_heads": 2, "vocab_size": 16}
    half = layers // 2
    config = T5Config(num_layers=half, num_decoder_layers=half, dropout_rate=0, decoder_start_token_id=0, **size)
    names = [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(half)]
    specs = {"*.wi.weight": "hidden@tensor _", "*.wo.weight": "_ hidden@tensor"}
    return Example(T5ForConditionalGeneration(config), _own_loss, _tokens, tuple(names), specs, FLOAT32)


def llama(layers: int, stages: int | None = None) -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    names = tuple(f"model.layers.{i}" for i in range(layers))
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=16, **size)
    return Example(LlamaForCausalLM(config), _loss_of_logits, _tokens, names, tolerance=FLOAT32)


MODELS: Mapping[str, Callable[[int, int | None], Example]] = {
    "mlp": mlp,
    "checkpointed": checkpointed,
    "unet": unet,
    "two_tower": two_tower,
    "encoder_decoder": encoder_decoder,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llama": llama,
}


@dataclass(frozen=True)
class Case:
    """One combination.

    `named` says what names the stages: code, patterns, or an automatic cut. Gradients are taken by a jitted step inside
    or around the function of microbatches, or by the user's own loop.
    """

    model: str = "mlp"
    stages: int = 2
    n: int = 4
    schedule: Any = "1f1b"
    inside: str = "none"
    door: str = "inside"
    named: str = "patterns"
    options: Mapping[str, Any] = field(default_factory=dict)  # of `jit`
    parallel: Mapping[str, Any] = field(default_factory=dict)  # of `parallelize`

    def __str__(self) -> str:
        more = "".join(f"-{k}={v}" for k, v in self.options.items())
        schedule = self.schedule if isinstance(self.schedule, str) else "own"
        return f"{self.model}-{self.stages}x{self.n}-{schedule}-{self.inside}-{self.door}-{self.named}{more}"

    @property
    def chain(self) -> int:
        """The number of parts of the model."""
        return self.stages * (2 if self.schedule in ("zb_v", "interleaved_1f1b") else 1)


class Outcome(NamedTuple):
    """The largest differences of losses and parameters from one device, and the programs (None: the user's loop)."""

    loss: float
    parameters: float
    staged: Staged | None
    tolerance: float


def train(case: Case, steps: int = 3, rows: int = 16) -> Outcome:
    """Trains with Adam and clipping on virtual devices and on one device, with the same microbatches."""
    torch.manual_seed(0)
    example = MODELS[case.model](max(2, case.chain), case.chain if case.named == "code" else None)
    model = example.model.double()
    reference = copy.deepcopy(model)
    data = [_double(example.batch(rows)) for _ in range(steps)]
    expected = _train_on_one_device(case, example, reference, data)
    axes, strategy = INSIDE[case.inside]
    patterns = example.patterns(case.chain) if case.named == "patterns" else None
    with sl.Mesh(stage=case.stages, stages="stage", **axes):
        specs = example.tensor if "tensor" in axes else None
        model = sl.parallelize(model, specs, strategy=strategy, stages=patterns, **dict(case.parallel))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        step = _step(case, example)
        if case.door != "loop":
            step = sl.jit(step, **case.options)
        losses = [_number(step(model, optimizer, batch)) for batch in data]
        staged = None if case.door == "loop" else step.plan(model, optimizer, data[0]).compiled.staged
    loss = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return Outcome(loss, max(float((_full(p) - q).detach().abs().max()) for p, q in pairs), staged, example.tolerance)


def _step(case: Case, example: Example) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()

        def forward_backward(rows: Any) -> Tensor:
            loss = example.loss(model, rows)
            if case.door == "inside":
                (loss / case.n).backward()
                return loss.detach()
            return loss

        loss = sl.microbatch(forward_backward, batch, n=case.n, schedule=case.schedule)
        if case.door != "inside":
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def _train_on_one_device(case: Case, example: Example, model: nn.Module, data: list[Any]) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        total = 0.0
        for m in range(case.n):
            rows = tuple(x[m :: case.n] for x in batch) if isinstance(batch, tuple) else batch[m :: case.n]
            loss = example.loss(model, rows) / case.n
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses


def _double(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return tuple(_double(x) for x in batch)
    return batch.double() if batch.is_floating_point() else batch


def _full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def _number(x: Any) -> float:
    return float(_full(x))
