"""Random programs: what `test_fuzz` runs on one device and on random meshes, and compares.

A program is text, line by line, so that one that fails prints as a script. Lines are tried out on one device while they
are drawn, so the templates below may be careless: what torch refuses is drawn again.

    python -m tests.validation.programs --examples 2000   a recorded campaign; failures print the smallest script found
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.validation.programs.templates import TEMPLATES, Template

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
MOST_DEVICES = 16
MOST_ELEMENTS = 4000
WORD = re.compile(r"\b[a-z]\d+\b")


@dataclass(frozen=True)
class Input:
    """One argument: floats, or integers below `high`."""

    name: str
    shape: tuple[int, ...]
    high: int = 0
    spec: str | None = None

    def make(self) -> Tensor:
        g = torch.Generator().manual_seed(sum(map(ord, self.name)))
        if self.high:
            return torch.randint(0, self.high, self.shape, generator=g)
        return torch.randn(self.shape, dtype=torch.float64, generator=g)

    @property
    def text(self) -> str:
        if self.high:
            return f"{self.name} = torch.randint(0, {self.high}, {list(self.shape)})"
        return f"{self.name} = torch.randn({list(self.shape)}, dtype=torch.float64)"


@dataclass(frozen=True)
class Program:
    """A mesh, arguments with their specs, the lines of a function, and what it returns."""

    mesh: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    out_specs: tuple[str | None, ...]
    grad: bool
    grads_like_inputs: bool = False

    @property
    def wanted(self) -> tuple[int, ...]:
        """Arguments whose gradients are taken."""
        return tuple(i for i, x in enumerate(self.inputs) if not x.high) if self.grad else ()

    @property
    def specs(self) -> Any:
        """`out_specs` for `jit`."""
        if not self.grad:
            return self.out_specs
        grads = tuple(self.inputs[i].spec for i in self.wanted) if self.grads_like_inputs else None
        return ((None, self.out_specs), grads)

    @property
    def function(self) -> str:
        """The source of `program`."""
        names = ", ".join(x.name for x in self.inputs)
        body = [f"def forward({names}):", *(f"    {line}" for line in self.lines)]
        outs = "".join(f"{o}, " for o in self.outputs).strip()
        if not self.grad:
            return "\n".join([*body, f"    return ({outs})"]).replace("def forward", "def program")
        body.append(f"    outs = ({outs})")
        body.append("    return sum((o * torch.cos(o)).sum() for o in outs if o.is_floating_point()), outs")
        body.append(f"def program({names}):")
        body.append(f"    return sl.value_and_grad(forward, {self.wanted}, has_aux=True)({names})")
        return "\n".join(body)

    @property
    def script(self) -> str:
        """All of it, runnable."""
        sizes = ", ".join(f"{k}={n}" for k, n in self.mesh)
        names = ", ".join(x.name for x in self.inputs)
        return "\n".join(
            [
                "import torch, torch.nn.functional as F, shardlib as sl",
                "from shardlib import Mesh, shard",
                self.function,
                "torch.manual_seed(0)",
                *(x.text for x in self.inputs),
                f"in_specs = {tuple(x.spec for x in self.inputs)!r}",
                f"with Mesh({sizes}):",
                f"    step = sl.jit(program, in_specs=in_specs, out_specs={self.specs!r})",
                f"    print(step.plan({names}))",
                f"    print(sl.check(program, {names}, in_specs=in_specs, out_specs={self.specs!r}, rtol=1e-10))",
            ]
        )


def draw(rng: random.Random, length: int | None = None) -> Program:
    """A random program."""
    return Drawing(rng).program(length or rng.randint(3, 30))


class Drawing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes = [rng.choice(SIZES) for _ in range(rng.randint(2, 4))]
        self.mesh = self._mesh()
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.env: dict[str, Tensor] = {}
        self.namespace: dict[str, Any] = {"torch": torch, "F": F, "shard": lambda x, spec: x}
        self.count = 0

    def program(self, length: int) -> Program:
        rng = self.rng
        self.input([self.size() for _ in range(rng.choice([1, 2, 2, 3, 3, 4]))])
        for _ in range(20 * length):
            if len(self.lines) >= length:
                break
            self.line(rng.choice(TEMPLATES))
        made = [n for n in self.env if n.startswith("v")] or list(self.env)
        outputs = tuple(dict.fromkeys([made[-1], *(rng.choice(made) for _ in range(rng.randint(0, 2)))]))
        grad = rng.random() < 0.75 and any(self.env[o].is_floating_point() for o in outputs)
        specs = tuple(self.spec(self.env[o].shape) if rng.random() < 0.3 else None for o in outputs)
        return Program(self.mesh, tuple(self.inputs), tuple(self.lines), outputs, specs, grad, rng.random() < 0.3)

    # Choices --------------------------------------------------------------------------------------------------------

    def _mesh(self) -> tuple[tuple[str, int], ...]:
        sizes: list[int] = []
        for _ in range(self.rng.choice([1, 1, 2, 2, 2, 3, 4])):
            sizes.append(self.rng.choice([1, 2, 2, 2, 2, 3, 3, 4, 4, 6, 8]))
            if math.prod(sizes) > MOST_DEVICES:
                sizes.pop()
        return tuple(zip("abcd", sizes, strict=False))

    def size(self) -> int:
        return self.rng.choice(self.sizes)

    def input(self, shape: Any, high: int = 0) -> str:
        name = f"{'i' if high else 'x'}{len(self.inputs)}"
        x = Input(name, tuple(shape), high, self.spec(shape) if self.rng.random() < 0.6 else None)
        self.inputs.append(x)
        self.env[name] = self.namespace[name] = x.make()
        return name

    def spec(self, shape: Any) -> str:
        rng, axes = self.rng, [name for name, _ in self.mesh]
        rng.shuffle(axes)

        def some() -> str:
            n = 0 if not axes else rng.choice([0, 0, 1, 1, 1, 2])
            taken = [axes.pop() for _ in range(min(n, len(axes)))]
            return f"@{taken[0]}" if len(taken) == 1 else f"@({' '.join(taken)})" if taken else ""

        dims: list[str] = []
        for size in shape:
            divisors = [k for k in range(2, size) if size % k == 0]
            if divisors and rng.random() < 0.2:
                k = rng.choice(divisors)
                dim = f"(_={k}{some()} _={size // k}{some()})"
            else:
                dim = f"_{some()}"
            dims.append(dim + "?" * (rng.random() < 0.15))
        order = list(range(len(dims)))
        return " ".join(dims[i] for i in order)

    def pick(self, rank: int | None = None, least: int = 0) -> str:
        """A floating-point value, a recent one more often."""
        fit = [
            n for n, v in self.env.items()
            if v.is_floating_point() and v.dim() >= least and (rank is None or v.dim() == rank)
        ]  # fmt: skip
        if not fit:
            return self.input([self.size() for _ in range(rank or max(least, 2))])
        return fit[-1 - int(min(self.rng.expovariate(0.4), len(fit) - 1))]  # which may draw infinity

    def like(self, shape: Any) -> str:
        """Another value of this shape."""
        fit = [n for n, v in self.env.items() if v.is_floating_point() and tuple(v.shape) == tuple(shape)]
        return self.rng.choice(fit) if fit and self.rng.random() < 0.8 else self.input(shape)

    def dim(self, name: str) -> int:
        return self.rng.randrange(max(1, self.env[name].dim())) - self.rng.choice([0, self.env[name].dim()])

    def shape(self, name: str) -> list[int]:
        return list(self.env[name].shape)

    # Lines ----------------------------------------------------------------------------------------------------------

    def line(self, template: Template) -> None:
        inputs, env = list(self.inputs), dict(self.env)
        text = template(self)
        if text is not None and self._accept(text):
            return
        self.inputs, self.env = inputs, env  # undo the arguments that the template asked for

    def _accept(self, text: str) -> bool:
        """Write `text` (its `{0}`, `{1}` are names of results) down, if torch runs it."""
        places = sorted(set(re.findall(r"\{(\d)\}", text)))
        names = [f"v{self.count + i}" for i in range(len(places))]
        text = text.format(*names)
        try:
            exec(text, self.namespace)
        except (RuntimeError, IndexError, ValueError):
            return False
        values = [self.namespace[n] for n in names]
        if any(v.numel() > MOST_ELEMENTS or v.numel() == 0 or not _tame(v) for v in values):
            return False
        self.count += len(names)
        self.env |= zip(names, values, strict=True)
        self.lines.append(text)
        return True


def _tame(v: Tensor) -> bool:
    return not v.is_floating_point() or (bool(v.isfinite().all()) and float(v.detach().abs().max()) < 1e3)
