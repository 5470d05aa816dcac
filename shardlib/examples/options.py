"""Command-line options of the training example."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.examples import model


@dataclass(frozen=True)
class Options:
    """The options of `train_gpt`."""

    out: Path = field(default=Path("runs/gpt"), metadata={"help": "folder for checkpoints, plan, losses and sample"})
    data: int = field(default=2, metadata={"help": "size of the mesh axis `data`"})
    tensor: int = field(default=4, metadata={"help": "size of the mesh axis `tensor`"})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    steps: int = field(default=500, metadata={"help": "step at which training ends"})
    batch: int = field(default=16, metadata={"help": "sequences a step, over all devices"})
    lr: float = field(default=4e-3, metadata={"help": "peak learning rate"})
    warmup: int = field(default=20, metadata={"help": "steps of linear warm-up"})
    layers: int = field(default=2, metadata={"help": "blocks of the model"})
    width: int = field(default=128, metadata={"help": "width of the residual stream"})
    heads: int = field(default=4, metadata={"help": "attention heads"})
    context: int = field(default=64, metadata={"help": "bytes in a sequence"})
    megabytes: float = field(default=4.0, metadata={"help": "text to train on, at most"})
    seed: int = field(default=0, metadata={"help": "seed of the weights, the batches and the sample"})
    save_every: int = field(default=100, metadata={"help": "steps between checkpoints"})
    eval_every: int = field(default=50, metadata={"help": "steps between losses on held-out text"})
    sample: int = field(default=300, metadata={"help": "bytes to generate at the end"})
    temperature: float = field(default=0.7, metadata={"help": "temperature of the sample; 0 takes the likeliest byte"})
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in --out, on any mesh"})

    @staticmethod
    def parse(argv: list[str] | None = None) -> Options:
        """Parses a command line (None: the process's own)."""
        parser = argparse.ArgumentParser(
            prog="python -m shardlib.examples.train_gpt", description="Train a GPT over bytes on a mesh."
        )
        for option in Options.__dataclass_fields__.values():
            flag = "--" + option.name.replace("_", "-")
            if option.name == "resume":
                parser.add_argument(flag, action="store_true", help=option.metadata["help"])
            else:
                help = f"{option.metadata['help']} ({option.default})"
                parser.add_argument(flag, type=type(option.default), default=option.default, help=help)
        return Options(**vars(parser.parse_args(argv)))

    @property
    def config(self) -> model.Config:
        """Returns the model's sizes."""
        return model.Config(self.layers, self.width, self.heads, self.context)
