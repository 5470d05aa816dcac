"""Train through lost ranks: `torchrun --max-restarts 3 --nproc-per-node 2 -m shardlib.examples.restarts --out runs`.

After a rank or a machine is lost, torchrun starts the ranks again, on the machines that are left. The script does not
know about it: its mesh takes the ranks that are there, and the run continues from the last checkpoint. `losses.txt` in
the folder has a line per step: the step, its loss, the number of ranks, and the step that these ranks began after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardlib as sl

WIDTH, ROWS = 32, 8


def batch(step: int) -> Tensor:
    """Returns the rows of a step, float32[8, 32]; the position in the data is the step itself."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(folder: Path, steps: int, save_every: int, background: bool) -> None:
    """Trains to the last step from the newest checkpoint in the folder, if there is one."""
    mesh = sl.Mesh(data=-1)
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    model = sl.parallelize(nn.Sequential(*layers), strategy="fsdp", mesh=mesh, verify_every=10)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = sl.Checkpoints(folder / "checkpoints", keep=steps)
    state = {"model": model, "opt": opt}
    first = 0 if checkpoints.newest is None else checkpoints.load(state)["step"]
    for step in range(first + 1, steps + 1):
        rows = batch(step)
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        value = float(loss)
        if mesh.rank == 0:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{step} {value.hex()} {mesh.size} {first}\n")
        if step % save_every == 0:
            checkpoints.save(step, state, background=background)
    checkpoints.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of checkpoints and losses")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--background", action="store_true", help="write checkpoints while training continues")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.out, options.steps, options.save_every, options.background)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
