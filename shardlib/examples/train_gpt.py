"""Train a GPT over bytes on a mesh: `python -m shardlib.examples.train_gpt`.

In a plain process the devices are virtual. Under `torchrun --nproc-per-node 4 -m shardlib.examples.train_gpt --data 2
--tensor 2` the devices are ranks, and the losses are the same. Model, optimizer, schedule and loop are plain torch for
one device. Only `model.py`, and `parallelize`, `jit` and `Checkpoints` below, deal with devices.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import shardlib as sl
from shardlib.examples import data, report
from shardlib.examples.interrupt import Interrupt
from shardlib.examples.model import GPT, RULES, WEIGHTS, generate
from shardlib.examples.options import Options

PROMPT = b"def "
TIMED_STEPS = 3  # the steps after the first that the estimate of the run's time is measured on
NEXT = """\
next: the same command with more options, as in make demo ARGS="--resume --steps {more}"
  --data {axes[0]} --tensor {axes[1]}: another mesh, the same losses by another plan
  --resume --steps {more}: go on from the last checkpoint, on any mesh
and to read: {out}/plan.html, the plan's page, in a browser; notebooks/01_first_steps.ipynb"""


def train_step(model: nn.Module, opt: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Runs one step (forward, backward, clipping, update), jitted below; returns the loss."""
    loss: Tensor = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss


def make_optimizer(model: nn.Module, options: Options) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Returns AdamW with weight decay for matrices, and a schedule: warm-up, then a cosine to a tenth of the peak."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.99))

    def lr_factor(done: int) -> float:
        if done < options.warmup:
            return (done + 1) / options.warmup
        progress = (done + 1 - options.warmup) / max(1, options.steps - options.warmup)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    return opt, torch.optim.lr_scheduler.LambdaLR(opt, lr_factor)


class Run:
    """One training run. On a distributed mesh every rank has a `Run`, and only rank 0 prints and writes."""

    def __init__(self, options: Options, mesh: sl.Mesh, corpus: data.Corpus) -> None:
        self.options, self.mesh, self.corpus = options, mesh, corpus
        torch.manual_seed(options.seed)
        self.model = sl.parallelize(GPT(options.config).to(options.device), WEIGHTS, mesh=mesh)
        self.opt, self.schedule = make_optimizer(self.model, options)
        self.step = sl.jit(train_step)
        self.done, self.losses = 0, report.Losses()
        self.checkpoints = sl.Checkpoints(options.out / "checkpoints")

    def say(self, text: str) -> None:
        """Prints on rank 0, above a progress bar."""
        if self.mesh.rank == 0:
            with tqdm.external_write_mode():
                print(text, flush=True)

    def begin(self) -> None:
        """Renames the folder of an earlier run."""
        if self.mesh.rank == 0 and self.checkpoints.steps:
            renamed = next(p for i in range(1, 10_000) if not (p := Path(f"{self.options.out}.{i}")).exists())
            self.options.out.rename(renamed)
            self.say(f"a former run is now in {renamed} (--resume would have gone on with it)")

    def resume(self) -> None:
        """Continues from the last checkpoint, which any mesh may have written."""
        try:
            facts = self.checkpoints.load(self.state)["run"]
        except sl.ShardingError as error:
            raise SystemExit(f"cannot resume: {error}") from None
        if facts["model"] != (requested := asdict(self.options.config)):  # no weight's shape shows heads and context
            raise SystemExit(f"the checkpoint holds another model: {facts['model']}; asked for {requested}")
        self.done, self.losses = len(facts["losses"]["train"]), report.Losses(**facts["losses"])
        self.say(f"resumed from step {self.done}, written on {facts['mesh']}")

    @property
    def state(self) -> dict[str, Any]:
        """Returns the contents of a checkpoint."""
        facts = {"model": asdict(self.options.config), "losses": asdict(self.losses), "mesh": str(self.mesh)}
        return {"model": self.model, "opt": self.opt, "schedule": self.schedule, "run": facts}

    def save(self) -> None:
        """Writes a checkpoint, and the losses so far."""
        self.checkpoints.save(self.done, self.state)
        if self.mesh.rank == 0:
            report.write_losses(self.options.out, self.losses)

    def batch(self, part: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of a batch on the device."""
        o = self.options
        tokens, targets = data.batch(part, number, o.batch, o.context, o.seed)
        return tokens.to(o.device), targets.to(o.device)

    def plan(self) -> None:
        """Prints the plan of a step and writes its page."""
        plan = self.step.plan(self.model, self.opt, *self.batch(self.corpus.train, self.done + 1))
        if self.mesh.rank == 0:
            report.write(self.options.out / "plan.html", plan.html)
        self.say(f"{plan}\n")

    def advance(self) -> float:
        """Runs one step; returns its loss."""
        value = float(self.step(self.model, self.opt, *self.batch(self.corpus.train, self.done + 1)))
        self.schedule.step()
        if not math.isfinite(value):
            raise SystemExit(f"the loss of step {self.done + 1} is {value}: try a smaller --lr")
        self.losses.train.append(value)
        self.done += 1
        return value

    def validate(self, batches: int = 4) -> float:
        """Returns the mean loss on the first held-out batches."""
        with torch.no_grad():
            each = [float(self.model(*self.batch(self.corpus.validation, i))) for i in range(batches)]
        self.losses.validation.append((self.done, sum(each) / batches))
        return sum(each) / batches

    def train(self) -> bool:
        """Trains until the last step or Ctrl-C; returns True if the last step was reached."""
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
                if self.done == first + 1 + TIMED_STEPS:
                    seconds = (time.perf_counter() - start) / TIMED_STEPS
                    remaining = o.steps - self.done
                    self.say(f"{remaining} steps to go, {seconds:.2f} s each: about {remaining * seconds:.0f} s")
                stop = interrupt.is_requested_on_any_rank(self.mesh)
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
        """Generates text on one device with gathered weights and writes it. All ranks must call this."""
        o = self.options
        whole = {name: x.full_tensor().cpu() for name, x in self.model.state_dict().items()}
        if self.mesh.rank != 0:
            return ""
        model = GPT(o.config)
        model.load_state_dict(whole)
        continuation = generate(model, PROMPT, o.sample, temperature=o.temperature, seed=o.seed)
        text = (PROMPT + continuation).decode("utf-8", errors="replace")
        report.write_text(o.out / "sample.txt", f"{text}\n")
        return text


def train(options: Options) -> Run:
    """Runs the whole job; returns the run, for tests."""
    mesh = sl.Mesh(data=options.data, tensor=options.tensor, rules=RULES, device=options.device)
    text = data.standard_library(int(options.megabytes * 1e6))
    run = Run(options, mesh, data.Corpus.from_text(text))
    count = sum(p.numel() for p in run.model.parameters())
    devices = "virtual devices in this process" if mesh.kind == "virtual" else "ranks of torch.distributed"
    run.say(f"{count / 1e6:.1f} million parameters, {len(text) / 1e6:.1f} MB of text, {mesh.size} {devices}\n{mesh}\n")
    with mesh:
        if options.resume:
            run.resume()
        else:
            run.begin()
        run.plan()
        if not run.train():
            run.say(f"stopped after step {run.done}; the checkpoint is in {run.checkpoints.folder}")
            run.say("to go on, give the same command again with --resume")
        else:
            sample = run.sample()
            validation = f", {run.losses.validation[-1][1]:.3f} on held-out text" if run.losses.validation else ""
            curve = [f"{value:.3f}" for value in run.losses.train]
            loss = f"loss {curve[0]} -> {curve[-1]} nats per byte{validation}" if curve else "no step"
            run.say(f"\n--- the model goes on from {PROMPT.decode()!r}:\n{sample}\n---")
            run.say(f"\n{loss}; sample, curve, losses, plan and checkpoints are in {options.out}\n")
            axes = (mesh.size, 1) if options.tensor > 1 else (1, mesh.size)
            run.say(NEXT.format(more=2 * options.steps, axes=axes, out=options.out))
    return run


def main(argv: list[str] | None = None) -> int:
    options = Options.parse(argv)
    if "OMP_NUM_THREADS" not in os.environ:  # more threads wait in a busy loop for one that another process delays
        torch.set_num_threads(1)
    train(options)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
