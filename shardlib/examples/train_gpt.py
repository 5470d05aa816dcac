"""Train a GPT over bytes on a mesh: `python -m shardlib.examples.train_gpt`.

In a plain process the devices are virtual; under `torchrun --nproc-per-node 4 -m shardlib.examples.train_gpt --data 2
--tensor 2` they are its ranks, and the losses are the same. The model (`model.py`) and the optimiser (`adamw.py`) are
plain torch for one device; all that is said about devices is in `make_step` below and in the names of `model.py`.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import shardlib as sl
from shardlib.examples import adamw, checkpoint, data, model, report
from shardlib.examples.interrupt import Interrupt
from shardlib.examples.options import Options
from shardlib.jit import Jitted

Tree = dict[str, Tensor]
Moments = dict[str, Tree]
PROMPT = b"def "


def make_step(config: model.Config, hyper: adamw.Hyper) -> Jitted:
    """The jitted training step: (params, moments, tokens, targets, step, lr) -> (params, moments, loss, gradient norm).

    Weights and batch are annotated; the layouts of gradients, moments and everything between are inferred.
    """

    def train_step(
        params: Tree, moments: Moments, tokens: Tensor, targets: Tensor, step: Tensor, lr: Tensor
    ) -> tuple[Tree, Moments, Tensor, Tensor]:
        def objective(params: Tree) -> Tensor:
            return model.loss(params, tokens, targets, config, annotate=sl.shard)

        grads, loss = torch.func.grad_and_value(objective)(params)
        grads, norm = adamw.clipped(grads, hyper.clip)
        params, moments = adamw.update(params, grads, moments, step, lr, hyper)
        return params, moments, loss, norm

    specs = {name: model.spec(name) for name in config.shapes()}
    in_specs = (specs, None, model.BATCH_SPEC, model.BATCH_SPEC, sl.P(), sl.P())
    step: Jitted = sl.jit(train_step, in_specs=in_specs, donate_argnums=(0, 1))
    return step


def make_evaluate(config: model.Config) -> Jitted:
    """The jitted loss: (params, tokens, targets) -> loss."""

    def evaluate(params: Tree, tokens: Tensor, targets: Tensor) -> Tensor:
        return model.loss(params, tokens, targets, config, annotate=sl.shard)

    specs = {name: model.spec(name) for name in config.shapes()}
    jitted: Jitted = sl.jit(evaluate, in_specs=(specs, model.BATCH_SPEC, model.BATCH_SPEC))
    return jitted


@dataclass
class Run:
    """The state of one training run; on a distributed mesh every rank has one, and rank 0 speaks and writes."""

    options: Options
    mesh: sl.Mesh
    corpus: data.Corpus
    params: Tree = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    done: int = 0
    losses: report.Losses = field(default_factory=report.Losses)

    def __post_init__(self) -> None:
        self.config = self.options.config
        self.step = make_step(self.config, adamw.Hyper())
        self.evaluate = make_evaluate(self.config)

    @property
    def folder(self) -> Path:
        """Where the checkpoints go."""
        return self.options.out / "checkpoints"

    def say(self, text: str) -> None:
        """Print once, not once a rank."""
        if self.mesh.rank == 0:
            print(text, flush=True)

    def begin(self) -> None:
        """Place fresh weights and moments; a former run in the same folder is moved aside."""
        if self.mesh.rank == 0 and checkpoint.steps(self.folder):
            aside = next(p for i in range(1, 10_000) if not (p := Path(f"{self.options.out}.{i}")).exists())
            self.options.out.rename(aside)
            self.say(f"a former run is now in {aside} (--resume would have gone on with it)")
        params = model.init(self.config, self.options.seed)
        self.params = self._placed(params)
        self.moments = {key: self._placed(tree) for key, tree in adamw.zeros(params).items()}

    def resume(self) -> None:
        """Load the last checkpoint, whatever mesh wrote it."""
        done = checkpoint.steps(self.folder)
        if not done:
            raise SystemExit(f"nothing to resume: there is no checkpoint in {self.folder}")
        facts = checkpoint.facts(self.folder, done[-1])
        if facts["model"] != asdict(self.config):
            raise SystemExit(f"the checkpoint holds another model: {facts['model']}; asked for {asdict(self.config)}")
        params = {name: torch.zeros(shape) for name, shape in self.config.shapes().items()}
        blank = {key: self._placed(params) for key in ("params", *adamw.zeros({}))}
        state = checkpoint.load(self.folder, facts["step"], _flat(blank), self.mesh)
        trees = _nested(state)
        self.params, self.moments = trees.pop("params"), trees
        self.done, self.losses = facts["step"], report.Losses(**facts["losses"])
        self.say(f"resumed from step {self.done}, written on {facts['mesh']}")

    def save(self) -> None:
        """Write a checkpoint of this moment, and the losses so far."""
        facts = {"model": asdict(self.config), "losses": self.losses.to_dict(), "mesh": str(self.mesh)}
        state = _flat({"params": self.params, **self.moments})
        checkpoint.save(self.folder, self.done, state, facts, self.mesh)
        if self.mesh.rank == 0:
            report.write_losses(self.options.out, self.losses)

    def arguments(self) -> tuple[Any, ...]:
        """What the next step is called with."""
        o, number = self.options, self.done + 1
        tokens, targets = data.batch(self.corpus.train, number, o.batch, o.context, o.seed)
        lr = adamw.cosine(number, o.steps, o.lr, o.warmup)
        # 0-d tensors: their arithmetic, the powers of the betas too, is in float32 as everything else.
        return self.params, self.moments, tokens, targets, torch.tensor(float(number)), torch.tensor(lr)

    def plan(self) -> None:
        """Print the plan of a step in short, and write it in full."""
        plan = self.step.plan(*self.arguments())
        if self.mesh.rank == 0:
            report.write_text(self.options.out / "plan.txt", f"{plan}\n")
        self.say(f"{plan.summary()}\nthe whole plan is in {self.options.out / 'plan.txt'}\n")

    def advance(self) -> float:
        """One step; returns its loss."""
        self.params, self.moments, loss, _ = self.step(*self.arguments())
        value = float(loss)
        if not math.isfinite(value):
            raise SystemExit(f"the loss of step {self.done + 1} is {value}: try a smaller --lr")
        self.losses.train.append(value)
        self.done += 1
        return value

    def validate(self, batches: int = 4) -> float:
        """The mean loss on some held-out batches, the same ones each time."""
        o, total = self.options, 0.0
        for i in range(batches):
            total += float(self.evaluate(self.params, *data.batch(self.corpus.validation, i, o.batch, o.context)))
        self.losses.validation.append((self.done, total / batches))
        return total / batches

    def train(self) -> bool:
        """Steps until the end, or until Ctrl-C; returns whether the end was reached."""
        o = self.options
        bar = tqdm(
            total=o.steps,
            initial=self.done,
            disable=self.mesh.rank != 0,
            unit="step",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
        )
        with bar, Interrupt() as interrupt:
            start, first, held_out = time.perf_counter(), self.done, ""
            while self.done < o.steps:
                value = self.advance()
                if self.done == first + 1:  # the first step of a process includes building the program
                    start = time.perf_counter()
                stop = interrupt.anywhere(self.mesh)
                if not stop and (self.done % o.eval_every == 0 or self.done == o.steps):
                    held_out = f"{self.validate():.3f}"
                rate = (self.done - first - 1) * o.batch * o.context / (time.perf_counter() - start)
                bar.set_postfix(loss=f"{value:.3f}", validation=held_out, tokens_per_s=f"{rate:,.0f}", refresh=False)
                bar.update()
                if stop or self.done == o.steps or self.done % o.save_every == 0:
                    self.save()
                if stop:
                    return self.done == o.steps
        return True

    def sample(self) -> str:
        """Text by the trained model, on one device with whole weights. All ranks must call this."""
        o = self.options
        whole = {name: p.full_tensor() for name, p in self.params.items() if isinstance(p, sl.ShardedTensor)}
        if self.mesh.rank != 0:
            return ""
        text = model.generate(whole, PROMPT, o.sample, self.config, temperature=o.temperature, seed=o.seed)
        return (PROMPT + text).decode("utf-8", errors="replace")

    def _placed(self, tree: Tree) -> Tree:
        return {name: sl.shard(t, model.spec(name)) for name, t in tree.items()}


def _flat(trees: dict[str, Tree]) -> Tree:
    return {f"{key}/{name}": t for key, tree in trees.items() for name, t in tree.items()}


def _nested(state: Tree) -> dict[str, Tree]:
    trees: dict[str, Tree] = {}
    for path, t in state.items():
        key, name = path.split("/")
        trees.setdefault(key, {})[name] = t
    return trees


def train(options: Options) -> Run:
    """The whole job; returns the run, for tests."""
    mesh = sl.Mesh(data=options.data, tensor=options.tensor, rules=model.RULES, device=options.device)
    text = data.standard_library(int(options.megabytes * 1e6))
    run = Run(options, mesh, data.Corpus.of(text))
    count = sum(math.prod(shape) for shape in run.config.shapes().values())
    devices = "virtual devices in this process" if mesh.kind == "virtual" else "ranks of torch.distributed"
    run.say(f"{count / 1e6:.1f} million parameters, {len(text) / 1e6:.1f} MB of text, {mesh.size} {devices}\n{mesh}\n")
    with mesh:
        if options.resume:
            run.resume()
        else:
            run.begin()
        run.plan()
        if not run.train():
            run.say(f"stopped after step {run.done}; the checkpoint is in {run.folder}")
            run.say("to go on, give the same command again with --resume")
        else:
            sample = run.sample()
            validation = f", {run.losses.validation[-1][1]:.3f} on held-out text" if run.losses.validation else ""
            loss = f"loss {run.losses.train[-1]:.3f} nats per byte{validation}" if run.losses.train else "no step"
            run.say(f"\n{loss}; losses, curve, plan and checkpoints are in {options.out}")
            run.say(f"\n--- the model goes on from {PROMPT.decode()!r}:\n{sample}\n---")
    return run


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    train(Options.parse(argv))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
