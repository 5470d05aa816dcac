"""Random programs: what `test_fuzz` runs on one device and on random meshes, and compares.

A program is text, line by line, so that one that fails prints as a script. Lines are tried out on one device while they
are drawn, so the templates below may be careless: what torch refuses is drawn again.

    python -m tests.programs --examples 2000        a recorded campaign; failures print the smallest script found
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    return _Drawing(rng).program(length or rng.randint(3, 30))


class _Drawing:
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
        return fit[-1 - min(int(self.rng.expovariate(0.4)), len(fit) - 1)]

    def like(self, shape: Any) -> str:
        """Another value of this shape."""
        fit = [n for n, v in self.env.items() if v.is_floating_point() and tuple(v.shape) == tuple(shape)]
        return self.rng.choice(fit) if fit and self.rng.random() < 0.8 else self.input(shape)

    def dim(self, name: str) -> int:
        return self.rng.randrange(max(1, self.env[name].dim())) - self.rng.choice([0, self.env[name].dim()])

    def shape(self, name: str) -> list[int]:
        return list(self.env[name].shape)

    # Lines ----------------------------------------------------------------------------------------------------------

    def line(self, template: Callable[[_Drawing], str | None]) -> None:
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


# Templates ------------------------------------------------------------------------------------------------------------

Template = Callable[[_Drawing], str | None]


def unary(d: _Drawing) -> str:
    f = d.rng.choice(
        ["torch.tanh({x})", "torch.sin({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})", "-{x}", "{x} * 0.5",
         "{x} + 1", "1 - {x}", "{x}.square()", "F.relu({x})", "{x}.clone()", "torch.exp(-{x}.abs())", "{x}.detach()",
         "{x} / 3.0", "torch.where({x} > 0, {x}, 0.1 * {x})", "F.softplus({x})", "{x}.clamp(min=-0.5)"]
    )  # fmt: skip
    return f"{{0}} = {f.format(x=d.pick())}"


def binary(d: _Drawing) -> str:
    x = d.pick()
    shape = d.shape(x)
    if d.rng.random() < 0.6:
        y = d.like(shape)
    else:  # broadcast
        small = [n if d.rng.random() < 0.6 else 1 for n in shape][d.rng.randint(0, len(shape)) :]
        y = d.like(small)
    x, y = (x, y) if d.rng.random() < 0.5 else (y, x)
    f = d.rng.choice(["{x} + {y}", "{x} + {y}", "{x} - {y}", "{x} * {y}", "torch.maximum({x}, {y})",
                      "{x} / (1 + {y}.square())", "torch.add({x}, {y}, alpha=2)"])  # fmt: skip
    return f"{{0}} = {f.format(x=x, y=y)}"


def matmul(d: _Drawing) -> str:
    x = d.pick(least=1)
    k, n = d.shape(x)[-1], d.size()
    kind = d.rng.randrange(4)
    if kind == 0:
        return f"{{0}} = {x} @ {d.like([k, n])} / {k}"
    if kind == 1:
        return f"{{0}} = F.linear({x}, {d.like([n, k])}, {d.like([n])}) / {k}"
    if kind == 2:
        return f"{{0}} = F.linear({x}, {d.like([n, k])}) / {k}"
    y = d.pick(least=2)
    return f"{{0}} = {y} @ {d.like([d.shape(y)[-1], d.size()])} / {d.shape(y)[-1]}"


def bmm(d: _Drawing) -> str:
    x = d.pick(least=3)
    *b, m, k = d.shape(x)
    kind = d.rng.randrange(3)
    if kind == 0:
        return f"{{0}} = {x} @ {d.like([*b, k, d.size()])} / {k}"
    if kind == 1:
        return f"{{0}} = {x} @ {d.like([*b, m, k])}.transpose(-1, -2) / {k}"
    return f"{{0}} = torch.einsum('...ik,...jk->...ij', {x}, {d.like([*b, d.size(), k])}) / {k}"


def meets_itself(d: _Drawing) -> str:
    x = d.pick(least=2)
    f = d.rng.choice(["{x} + {x}.transpose(-1, -2)", "{x} @ {x}.transpose(-1, -2) / 8", "{x} * {x}.mT",
                      "{x}.unsqueeze(-1) * {x}.unsqueeze(-2)", "{x}.mT @ {x} / 8",
                      "{x}.unsqueeze(1) - {x}.unsqueeze(0)"])  # fmt: skip
    return f"{{0}} = {f.format(x=x)}"


def reduction(d: _Drawing) -> str:
    x = d.pick(least=1)
    keep = d.rng.choice(["", ", keepdim=True"])
    rank = len(d.shape(x))
    dims: Any = d.dim(x) if d.rng.random() < 0.7 else sorted(d.rng.sample(range(rank), d.rng.randint(1, rank)))
    f = d.rng.choice(["sum", "mean", "amax", "sum", "mean", "amin", "logsumexp", "var"])
    if d.rng.random() < 0.1:
        return f"{{0}} = {x}.{d.rng.choice(['sum', 'mean', 'max'])}()"
    if f == "var":
        return f"{{0}} = {x}.var({dims}, correction=0{keep})"
    return f"{{0}} = {x}.{f}({dims}{keep})" + (" / 4" if f == "sum" else "")


def along(d: _Drawing) -> str:
    x = d.pick(least=1)
    f = d.rng.choice(["F.softmax({x}, {k})", "F.log_softmax({x}, {k})", "{x}.cumsum({k}) / 4", "{x}.flip({k})",
                      "{x}.max({k}).values", "{x}.roll(1, {k})", "F.normalize({x}, dim={k})",
                      "{x}.sort({k}).values"])  # fmt: skip
    return f"{{0}} = {f.format(x=x, k=d.dim(x))}"


def layer_norm(d: _Drawing) -> str:
    x = d.pick(least=1)
    n = d.shape(x)[-1]
    weight = d.rng.choice(["", f", {d.like([n])}", f", {d.like([n])}, {d.like([n])}"])
    return f"{{0}} = F.layer_norm({x}, ({n},){weight})"


def view(d: _Drawing) -> str:
    x = d.pick(least=1)
    shape = d.shape(x)
    i = d.rng.randrange(len(shape))
    divisors = [k for k in range(2, shape[i]) if shape[i] % k == 0] or [1]
    k = d.rng.choice(divisors)
    kinds = [f".unflatten({i}, ({k}, {shape[i] // k}))", f".unsqueeze({d.rng.randint(0, len(shape))})", ".flatten()"]
    if len(shape) > 1:
        j = min(i, len(shape) - 2)
        order = list(range(len(shape)))
        d.rng.shuffle(order)
        kinds += [f".flatten({j}, {j + 1})"] * 2 + [f".permute({order})", ".transpose(0, -1)", ".mT"]
    if len(shape) == 4:
        kinds += [".flatten(2)", ".flatten(0, 1)", ".transpose(1, 2).flatten(2)"]
    numel = math.prod(shape)
    a = d.rng.choice([k for k in range(1, numel + 1) if numel % k == 0])
    kinds += [f".reshape({a}, {numel // a})", ".squeeze()", f".reshape({shape[-1]}, -1)"]
    return f"{{0}} = {x}{d.rng.choice(kinds)}"


def expand(d: _Drawing) -> str:
    x = d.pick()
    n, rank = d.size(), len(d.shape(x))
    i = d.rng.randint(0, rank)
    grown = [-1] * rank
    grown.insert(i, n)
    f = d.rng.choice([f".unsqueeze({i}).expand({grown})", f".unsqueeze({i}).expand({grown}).flatten(0, 1)",
                      f".repeat({[d.rng.choice([1, 1, 2]) for _ in range(rank)]})",
                      f".repeat_interleave(2, {d.dim(x)})", f".expand({[n, *[-1] * rank]})"])  # fmt: skip
    return f"{{0}} = {x}{f}"


def part(d: _Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    n = d.shape(x)[i]
    start = d.rng.randint(0, n - 1)
    stop = d.rng.randint(start + 1, n)
    ix = f"{':, ' * i}{start}:{stop}"
    f = d.rng.choice([f"[{ix}]", f"[{ix}]", f".select({i}, {start})", f".narrow({i}, {start}, {stop - start})",
                      f"[{':, ' * i}::2]", f"[{':, ' * i}{start}]"])  # fmt: skip
    return f"{{0}} = {x}{f}"


def parts(d: _Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    n = d.shape(x)[i]
    if d.rng.random() < 0.7:
        count = d.rng.choice([2, 3])
        names = ", ".join(f"{{{k}}}" for k in range(count))
        return f"{names} = {x}.chunk({count}, {i})"
    a = d.rng.randint(1, max(1, n - 1))
    return f"{{0}}, {{1}} = {x}.split([{a}, {n - a}], {i})"


def together(d: _Drawing) -> str:
    x = d.pick(least=1)
    shape, k = d.shape(x), d.dim(x)
    other = list(shape)
    kind = d.rng.randrange(4)
    if kind == 0:
        return f"{{0}} = torch.stack([{x}, {d.like(shape)}], {k})"
    if kind == 1:
        other[k] = d.size()
    if kind == 2:
        return f"{{0}} = F.pad({x}, ({d.rng.randint(0, 2)}, {d.rng.randint(0, 3)}))"
    return f"{{0}} = torch.cat([{x}, {d.like(other)}{', ' + x if d.rng.random() < 0.2 else ''}], {k})"


def masked(d: _Drawing) -> str:
    x = d.pick(least=1)
    n = d.shape(x)[-1]
    mask = d.rng.choice([f"torch.arange({n}) < {n // 2}", f"{d.like([n])} > 0", f"torch.arange({n}) % 2 == 0",
                         f"{d.like(d.shape(x))} > 0.3"])  # fmt: skip
    f = d.rng.choice(["torch.where({m}, {x}, 0.5)", "{x}.masked_fill({m}, 0.25)", "{x} * ({m})",
                      "torch.where({m}, {x}, {y})"])  # fmt: skip
    return f"{{0}} = {f.format(m=mask, x=x, y=d.like(d.shape(x)))}"


def triangle(d: _Drawing) -> str:
    x = d.pick(least=2)
    m, n = d.shape(x)[-2:]
    f = d.rng.choice([f"{x}.tril()", f"{x}.triu(1)", f"{x}.masked_fill(torch.ones({m}, {n}).triu(1).bool(), -1.0)",
                      f"torch.where(torch.arange({m})[:, None] >= torch.arange({n}), {x}, 0.0)"])  # fmt: skip
    return f"{{0}} = {f}"


def lookup(d: _Drawing) -> str:
    x = d.pick(least=1)
    shape = d.shape(x)
    i = d.rng.randrange(len(shape))
    kind = d.rng.randrange(6)
    if kind == 0:
        return f"{{0}} = {x}.index_select({i}, {d.input([d.size()], shape[i])})"
    if kind == 1:
        index = [n if k != i else d.size() for k, n in enumerate(shape)]
        return f"{{0}} = {x}.gather({i}, {d.input(index, shape[i])})"
    if kind == 2:
        return f"{{0}} = {x}[{':, ' * i}{d.input([d.size()], shape[i])}]"
    if kind == 3:
        return f"{{0}} = {x}.index_add({i}, {d.input([d.size()], shape[i])}, {x}.sum({i}, keepdim=True).detach())"
    if kind == 4:
        return f"{{0}} = torch.zeros({shape}, dtype=torch.float64).scatter_add({i}, {d.input(shape, shape[i])}, {x})"
    table = d.pick(rank=2)
    ids = d.input([d.size() for _ in range(d.rng.randint(1, 2))], d.shape(table)[0])
    return f"{{0}} = F.embedding({ids}, {table})"


def loss(d: _Drawing) -> str:
    x = d.pick(rank=2)
    rows, classes = d.shape(x)
    target = d.input([rows], classes)
    more = d.rng.choice(["", ", reduction='sum'", ", reduction='none'", ", ignore_index=1", ", label_smoothing=0.1"])
    return f"{{0}} = F.cross_entropy({x}, {target}{more})"


def attention(d: _Drawing) -> str:
    q = d.pick(rank=4)
    b, h, s, k = d.shape(q)
    groups = d.rng.choice([g for g in range(1, h + 1) if h % g == 0])
    t = d.rng.choice([s, d.size()])
    gqa = "" if groups == h else ", enable_gqa=True"
    mask = d.rng.choice(["", "", ", is_causal=True", f", attn_mask={d.like([s, t])}",
                         f", attn_mask=torch.ones({s}, {t}, dtype=torch.bool).tril()"])  # fmt: skip
    kv = d.like([b, groups, t, k]), d.like([b, groups, t, k])
    return f"{{0}} = F.scaled_dot_product_attention({q}, {', '.join(kv)}{mask}{gqa})"


def heads(d: _Drawing) -> str | None:
    """Attention over heads that come out of a dim."""
    x = d.pick(rank=3)
    b, s, e = d.shape(x)
    h = d.rng.choice([g for g in range(1, e + 1) if e % g == 0])
    split = f"{x}.unflatten(-1, ({h}, {e // h})).transpose(1, 2)"
    causal = d.rng.choice(["", ", is_causal=True"])
    return f"{{0}} = F.scaled_dot_product_attention({split}, {split}, {split}{causal}).transpose(1, 2).flatten(2)"


def in_place(d: _Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    at = d.rng.randrange(d.shape(x)[i])
    f = d.rng.choice(["{0}.mul_(2)", f"{{0}} += {d.like(d.shape(x))}", f"{{0}}[{':, ' * i}{at}] = 0.5",
                      f"{{0}}[{':, ' * i}{at}:] *= 2", "{0}.tanh_()", "{0}.zero_().add_(1)",
                      f"{{0}}.select({i}, {at}).copy_({{0}}.mean({i}))"])  # fmt: skip
    return f"{{0}} = {x} * 1.5; {f}"


def constant(d: _Drawing) -> str:
    x = d.pick(least=1)
    shape = d.shape(x)
    n = shape[-1]
    f = d.rng.choice([f"{x} + torch.arange({n})", f"{x} * torch.ones({shape}, dtype=torch.float64)",
                      f"{x} + torch.zeros_like({x})", f"{x} - torch.full(({n},), 0.5)", f"{x} @ torch.eye({n}).double()",
                      f"{x} + {x}.new_ones({n})", f"{x} * torch.linspace(0, 1, {n}, dtype=torch.float64)",
                      f"{x} + torch.arange({math.prod(shape)}).view({shape}) / 100",
                      f"torch.arange({n}) * 0.1 + torch.zeros({shape}, dtype=torch.float64)"])  # fmt: skip
    return f"{{0}} = {f}"


def annotate(d: _Drawing) -> str:
    """An annotation; one of an annotated value would be refused, so it is of something made of it."""
    x = d.pick()
    f = d.rng.choice(["{x}", "{x} * 1.5", "torch.tanh({x})"]) if x.startswith("v") else "{x} * 1.5"
    return f"{{0}} = shard({f.format(x=x)}, {d.spec(d.shape(x))!r})"


def residual(d: _Drawing) -> str:
    x = d.pick(least=1)
    k, n = d.shape(x)[-1], d.size()
    return f"{{0}} = {x} + torch.tanh({x} @ {d.like([k, n])} / {k}) @ {d.like([n, k])} / {n}"


TEMPLATES: list[Template] = [
    unary, unary, binary, binary, binary, matmul, matmul, bmm, meets_itself, reduction, reduction, along, layer_norm,
    view, view, view, expand, part, part, parts, together, together, masked, triangle, lookup, lookup, loss, attention,
    heads, in_place, constant, annotate, annotate, annotate, residual, residual,
]  # fmt: skip


if __name__ == "__main__":
    from tests.campaign import main

    main()
