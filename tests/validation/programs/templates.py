"""The lines that random programs are made of: each template draws one line, in which `{0}`, `{1}` are its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.helpers.versions import HAS_AMINMAX_GRADIENT

if TYPE_CHECKING:
    from tests.validation.programs import Drawing

Template = Callable[["Drawing"], "str | None"]


def unary(d: Drawing) -> str:
    f = d.rng.choice(
        ["torch.tanh({x})", "torch.sin({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})", "-{x}", "{x} * 0.5",
         "{x} + 1", "1 - {x}", "{x}.square()", "F.relu({x})", "{x}.clone()", "torch.exp(-{x}.abs())", "{x}.detach()",
         "{x} / 3.0", "torch.where({x} > 0, {x}, 0.1 * {x})", "F.softplus({x})", "{x}.clamp(min=-0.5)"]
    )  # fmt: skip
    return f"{{0}} = {f.format(x=d.pick())}"


def binary(d: Drawing) -> str:
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


def matmul(d: Drawing) -> str:
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


def bmm(d: Drawing) -> str:
    x = d.pick(least=3)
    *b, m, k = d.shape(x)
    kind = d.rng.randrange(3)
    if kind == 0:
        return f"{{0}} = {x} @ {d.like([*b, k, d.size()])} / {k}"
    if kind == 1:
        return f"{{0}} = {x} @ {d.like([*b, m, k])}.transpose(-1, -2) / {k}"
    return f"{{0}} = torch.einsum('...ik,...jk->...ij', {x}, {d.like([*b, d.size(), k])}) / {k}"


def meets_itself(d: Drawing) -> str:
    x = d.pick(least=2)
    f = d.rng.choice(["{x} + {x}.transpose(-1, -2)", "{x} @ {x}.transpose(-1, -2) / 8", "{x} * {x}.mT",
                      "{x}.unsqueeze(-1) * {x}.unsqueeze(-2)", "{x}.mT @ {x} / 8",
                      "{x}.unsqueeze(1) - {x}.unsqueeze(0)"])  # fmt: skip
    return f"{{0}} = {f.format(x=x)}"


def reduction(d: Drawing) -> str:
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


def along(d: Drawing) -> str:
    x = d.pick(least=1)
    f = d.rng.choice(["F.softmax({x}, {k})", "F.log_softmax({x}, {k})", "{x}.cumsum({k}) / 4", "{x}.flip({k})",
                      "{x}.max({k}).values", "{x}.roll(1, {k})", "F.normalize({x}, dim={k})",
                      "{x}.sort({k}).values"])  # fmt: skip
    return f"{{0}} = {f.format(x=x, k=d.dim(x))}"


def layer_norm(d: Drawing) -> str:
    x = d.pick(least=1)
    n = d.shape(x)[-1]
    weight = d.rng.choice(["", f", {d.like([n])}", f", {d.like([n])}, {d.like([n])}"])
    return f"{{0}} = F.layer_norm({x}, ({n},){weight})"


def view(d: Drawing) -> str:
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


def expand(d: Drawing) -> str:
    x = d.pick()
    n, rank = d.size(), len(d.shape(x))
    i = d.rng.randint(0, rank)
    grown = [-1] * rank
    grown.insert(i, n)
    f = d.rng.choice([f".unsqueeze({i}).expand({grown})", f".unsqueeze({i}).expand({grown}).flatten(0, 1)",
                      f".repeat({[d.rng.choice([1, 1, 2]) for _ in range(rank)]})",
                      f".repeat_interleave(2, {d.dim(x)})", f".expand({[n, *[-1] * rank]})"])  # fmt: skip
    return f"{{0}} = {x}{f}"


def part(d: Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    n = d.shape(x)[i]
    start = d.rng.randint(0, n - 1)
    stop = d.rng.randint(start + 1, n)
    ix = f"{':, ' * i}{start}:{stop}"
    f = d.rng.choice([f"[{ix}]", f"[{ix}]", f".select({i}, {start})", f".narrow({i}, {start}, {stop - start})",
                      f"[{':, ' * i}::2]", f"[{':, ' * i}{start}]"])  # fmt: skip
    return f"{{0}} = {x}{f}"


def parts(d: Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    n = d.shape(x)[i]
    if d.rng.random() < 0.7:
        count = d.rng.choice([2, 3])
        names = ", ".join(f"{{{k}}}" for k in range(count))
        return f"{names} = {x}.chunk({count}, {i})"
    a = d.rng.randint(1, max(1, n - 1))
    return f"{{0}}, {{1}} = {x}.split([{a}, {n - a}], {i})"


def shown(d: Drawing) -> str:
    """Pointwise arithmetic on what shows another value's memory, by views whose schema says so and by those that hide
    it: none of it may be done over memory that is read again."""
    x = d.pick(least=1)
    shape = d.shape(x)
    i = d.rng.randrange(len(shape))
    n = shape[i]
    a = d.rng.randint(1, n)
    f = d.rng.choice([f"torch.unsafe_chunk({x}, 2, {i})[0]", f"torch.unsafe_split({x}, {a}, {i})[-1]",
                      f"torch.unsafe_split_with_sizes({x}, [{a}, {n - a}], {i})[0]",
                      f"torch.ops.aten.lift({x}.detach())",
                      f"torch.unsafe_chunk({x}, 1, {i})[0]", f"{x}.view({x}.shape)", f"{x}.select({i}, {a - 1})",
                      f"{x}.expand_as({x})", f"{x}.contiguous()", f"{x}.unfold({i}, {a}, 1)"])  # fmt: skip
    then = d.rng.choice(["{f} * 2", "{f} + 1", "({f} + 1).tanh()", "-{f}", "{f}.sin() + {x}.sum()", "{f} * 0.5 + {f}"])
    return f"{{0}} = {then.format(f=f, x=x)}"


def written_through(d: Drawing) -> str:
    """A write that another name of the same memory must show."""
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    f = d.rng.choice([f"torch.unsafe_chunk({{0}}, 2, {i})[0]", f"torch.unsafe_split({{0}}, 1, {i})[-1]",
                      "torch.ops.aten.lift({0})", f"{{0}}.chunk(2, {i})[-1]", "{0}.view({0}.shape)"])  # fmt: skip
    return f"{{0}} = {x}.detach() * 1.5; {f}.{d.rng.choice(['mul_(2)', 'add_(1)', 'tanh_()', 'zero_()'])}"


def together(d: Drawing) -> str:
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


def masked(d: Drawing) -> str:
    x = d.pick(least=1)
    n = d.shape(x)[-1]
    mask = d.rng.choice([f"torch.arange({n}) < {n // 2}", f"{d.like([n])} > 0", f"torch.arange({n}) % 2 == 0",
                         f"{d.like(d.shape(x))} > 0.3"])  # fmt: skip
    f = d.rng.choice(["torch.where({m}, {x}, 0.5)", "{x}.masked_fill({m}, 0.25)", "{x} * ({m})",
                      "torch.where({m}, {x}, {y})"])  # fmt: skip
    return f"{{0}} = {f.format(m=mask, x=x, y=d.like(d.shape(x)))}"


def triangle(d: Drawing) -> str:
    x = d.pick(least=2)
    m, n = d.shape(x)[-2:]
    f = d.rng.choice([f"{x}.tril()", f"{x}.triu(1)", f"{x}.masked_fill(torch.ones({m}, {n}).triu(1).bool(), -1.0)",
                      f"torch.where(torch.arange({m})[:, None] >= torch.arange({n}), {x}, 0.0)"])  # fmt: skip
    return f"{{0}} = {f}"


def lookup(d: Drawing) -> str:
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


def loss(d: Drawing) -> str:
    x = d.pick(rank=2)
    rows, classes = d.shape(x)
    target = d.input([rows], classes)
    more = d.rng.choice(["", ", reduction='sum'", ", reduction='none'", ", ignore_index=1", ", label_smoothing=0.1"])
    return f"{{0}} = F.cross_entropy({x}, {target}{more})"


def attention(d: Drawing) -> str:
    q = d.pick(rank=4)
    b, h, s, k = d.shape(q)
    groups = d.rng.choice([g for g in range(1, h + 1) if h % g == 0])
    t = d.rng.choice([s, d.size()])
    gqa = "" if groups == h else ", enable_gqa=True"
    mask = d.rng.choice(["", "", ", is_causal=True", f", attn_mask={d.like([s, t])}",
                         f", attn_mask=torch.ones({s}, {t}, dtype=torch.bool).tril()"])  # fmt: skip
    kv = d.like([b, groups, t, k]), d.like([b, groups, t, k])
    return f"{{0}} = F.scaled_dot_product_attention({q}, {', '.join(kv)}{mask}{gqa})"


def heads(d: Drawing) -> str | None:
    """Attention over heads that come out of a dim."""
    x = d.pick(rank=3)
    e = d.shape(x)[-1]
    h = d.rng.choice([g for g in range(1, e + 1) if e % g == 0])
    split = f"{x}.unflatten(-1, ({h}, {e // h})).transpose(1, 2)"
    causal = d.rng.choice(["", ", is_causal=True"])
    return f"{{0}} = F.scaled_dot_product_attention({split}, {split}, {split}{causal}).transpose(1, 2).flatten(2)"


def in_place(d: Drawing) -> str:
    x = d.pick(least=1)
    i = d.rng.randrange(len(d.shape(x)))
    at = d.rng.randrange(d.shape(x)[i])
    f = d.rng.choice(["{0}.mul_(2)", f"{{0}} += {d.like(d.shape(x))}", f"{{0}}[{':, ' * i}{at}] = 0.5",
                      f"{{0}}[{':, ' * i}{at}:] *= 2", "{0}.tanh_()", "{0}.zero_().add_(1)",
                      f"{{0}}.select({i}, {at}).copy_({{0}}.mean({i}))"])  # fmt: skip
    return f"{{0}} = {x} * 1.5; {f}"


def constant(d: Drawing) -> str:
    x = d.pick(least=1)
    shape = d.shape(x)
    n = shape[-1]
    f = d.rng.choice([f"{x} + torch.arange({n})", f"{x} * torch.ones({shape}, dtype=torch.float64)",
                      f"{x} + torch.zeros_like({x})", f"{x} - torch.full(({n},), 0.5)",
                      f"{x} @ torch.eye({n}).double()",
                      f"{x} + {x}.new_ones({n})", f"{x} * torch.linspace(0, 1, {n}, dtype=torch.float64)",
                      f"{x} + torch.arange({math.prod(shape)}).view({shape}) / 100",
                      f"torch.arange({n}) * 0.1 + torch.zeros({shape}, dtype=torch.float64)"])  # fmt: skip
    return f"{{0}} = {f}"


def annotate(d: Drawing) -> str:
    """An annotation; one of an annotated value would be refused, so it is of something made of it."""
    x = d.pick()
    f = d.rng.choice(["{x}", "{x} * 1.5", "torch.tanh({x})"]) if x.startswith("v") else "{x} * 1.5"
    return f"{{0}} = shard({f.format(x=x)}, {d.spec(d.shape(x))!r})"


def residual(d: Drawing) -> str:
    x = d.pick(least=1)
    k, n = d.shape(x)[-1], d.size()
    return f"{{0}} = {x} + torch.tanh({x} @ {d.like([k, n])} / {k}) @ {d.like([n, k])} / {n}"


def convolution(d: Drawing) -> str:
    """With any of batch, channels and space annotated; odd sizes, strides and dilations."""
    x = d.pick(rank=d.rng.choice([3, 4]))
    shape = d.shape(x)
    c, rank = shape[1], len(shape) - 2
    kernel = [d.rng.randint(1, min(3, n)) for n in shape[2:]]
    groups = d.rng.choice([g for g in (1, 1, 2, c) if c % g == 0])
    how = f"stride={d.rng.choice([1, 1, 2])}, padding={d.rng.choice([0, 1])}, groups={groups}"
    out = groups * d.rng.choice([1, 2])
    if d.rng.random() < 0.3:
        weight = d.like([c, out // groups, *kernel])
        return f"{{0}} = F.conv_transpose{rank}d({x}, {weight}, {how}) / {c}"
    bias = d.rng.choice(["None", d.like([out])])
    how += f", dilation={d.rng.choice([1, 1, 2])}"
    return f"{{0}} = F.conv{rank}d({x}, {d.like([out, c // groups, *kernel])}, {bias}, {how}) / {c}"


def pooling(d: Drawing) -> str:
    x = d.pick(rank=d.rng.choice([3, 4]))
    rank = len(d.shape(x)) - 2
    k, stride = d.rng.choice([1, 2, 2, 3]), d.rng.choice([1, 2, 2])
    f = d.rng.choice(["F.avg_pool{r}d({x}, {k}, {s})", "F.max_pool{r}d({x}, {k}, {s})", "F.interpolate({x}, None, 2)",
                      "F.avg_pool{r}d({x}, 3, {s}, padding=1)", "F.max_pool{r}d({x}, 3, {s}, padding=1)",
                      "F.adaptive_avg_pool{r}d({x}, {k})", "F.pad({x}, {p}, mode='replicate')",
                      "F.pad({x}, {p}, mode='reflect')"])  # fmt: skip
    return f"{{0}} = {f.format(r=rank, x=x, k=k, s=stride, p=[1, 0] * rank)}"


def channel_norm(d: Drawing) -> str:
    x = d.pick(rank=d.rng.choice([2, 3, 4]))
    c = d.shape(x)[1]
    groups = d.rng.choice([g for g in range(1, c + 1) if c % g == 0])
    if math.prod(d.shape(x)[1:]) == groups:  # single elements have a variance of 0, and rounding decides what they give
        groups = 1
    weight = d.rng.choice(["", f", weight={d.like([c])}", f", weight={d.like([c])}, bias={d.like([c])}"])
    f = d.rng.choice([f"F.batch_norm({x}, None, None, training=True{weight})", f"F.group_norm({x}, {groups}{weight})"])
    if len(d.shape(x)) > 3 and 1 in d.shape(x):
        # A transpose's strides may be channels-last too; then torch's own CPU kernel gets batch norm's gradient wrong.
        f = f"F.group_norm({x}, {groups}{weight})"
    return f"{{0}} = {f}"


def ordering(d: Drawing) -> str:
    x = d.pick(least=1)
    k = d.dim(x)
    n = d.rng.randint(1, d.shape(x)[k])
    f = d.rng.choice([f"{x}.topk({n}, {k}).values", f"{x}.kthvalue({n}, {k}).values", f"{x}.median({k}).values",
                      f"{x}.cumprod({k})", f"{x}.logcumsumexp({k})", f"{x}.cummax({k}).values",
                      f"{x}.gather({k}, {x}.argsort({k}))", f"{x}.gather({k}, {x}.argmax({k}, keepdim=True))",
                      f"{x}.unfold({k}, {n}, 1)", f"{x}.diff(dim={k})",
                      f"{x}.aminmax(dim={k}).max" if HAS_AMINMAX_GRADIENT else f"{x}.amax({k})"])  # fmt: skip
    return f"{{0}} = {f}"


def matrices(d: Drawing) -> str:
    x = d.pick(least=2)
    n = d.shape(x)[-2]
    gram = f"({x} @ {x}.mT / {d.shape(x)[-1]} + torch.eye({n}, dtype=torch.float64))"
    f = d.rng.choice([f"torch.linalg.solve({gram}, {x})", f"torch.linalg.cholesky({gram})", f"torch.linalg.inv({gram})",
                      f"torch.linalg.slogdet({gram}).logabsdet", f"torch.fft.rfft({x}).abs()",
                      f"torch.fft.ifft({x} * 1j).imag", f"{x}.diagonal(dim1=-2, dim2=-1)", f"torch.cdist({x}, {x} + 1)",
                      f"{x}.diag_embed()", f"F.glu({x}, {d.dim(x)})"])  # fmt: skip
    return f"{{0}} = {f}"


def written(d: Drawing) -> str:
    x = d.pick(least=1)
    shape = d.shape(x)
    i = d.rng.randrange(len(shape))
    index = d.input(shape, shape[i])
    how = d.rng.choice(["sum", "mean", "amax", "amin"])
    f = d.rng.choice([f"{x}.scatter_reduce({i}, {index}, {d.like(shape)}, '{how}')",
                      f"{x}.index_fill({i}, {d.input([d.size()], shape[i])}, 0.5)",
                      f"{x}.index_copy({i}, torch.arange({shape[i]}).flip(0), {d.like(shape)})",
                      f"{x}.take({d.input([d.size()], math.prod(shape))})"])  # fmt: skip
    return f"{{0}} = {f}"


def regression(d: Drawing) -> str:
    x = d.pick()
    y = d.like(d.shape(x))
    f = d.rng.choice(["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss"])
    more = d.rng.choice(["", "", ", reduction='sum'", ", reduction='none'"])
    return f"{{0}} = F.{f}({x}, {y}.detach(){more})"


TEMPLATES: list[Template] = [
    unary, unary, binary, binary, binary, matmul, matmul, bmm, meets_itself, reduction, reduction, along, layer_norm,
    view, view, view, expand, part, part, parts, together, together, masked, triangle, lookup, lookup, loss, attention,
    heads, in_place, constant, annotate, annotate, annotate, residual, residual,
    convolution, pooling, channel_norm, ordering, ordering, matrices, written, regression, shown, shown,
    written_through,
]  # fmt: skip
