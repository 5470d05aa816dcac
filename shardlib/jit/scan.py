"""`scan`: one function over the layers of a stack, or the steps of a sequence, with JAX's signature."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib.core.aten.op_traits import has_trait
from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.source_lines import Line, user_line
from shardlib.core.torch_internals.forward_mode import is_forward_mode
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.hazards.loop_effects import refuse_counts
from shardlib.frontend.reuse.loop_body import trace_body
from shardlib.frontend.reuse.loop_replay import Body
from shardlib.primitives.body import current_body
from shardlib.tensor.tensor_meta import short_dtype


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Runs `carry, y = fn(carry, x)` for every `x` along the first dim of `xs`; returns the carry and the stacked `y`s.

    Carry, `xs` and `ys` are pytrees of tensors, or None (numbers in `init` become tensors); the carry keeps its
    structure, shapes and dtypes. `length` is the number of steps if `xs` is None. With `reverse` the last step
    comes first, and every `y` stays at the position of its `x`.

    Inside `jit` the Python of `fn` runs once, for any number of steps. Its ops are unrolled, so the plan grows with the
    steps. The stacked dim stays whole, other dims are sharded as in a loop. It is differentiable any number of times
    (`fn` is traced once more for each derivative after the first), also for tensors that `fn` closes over. Outside
    `jit`, and under `torch.func.jvp`, `jacfwd` and `hessian`, it is a plain loop.

    Raises `ShardingError` if `fn` does not return a pair, the carry changes its form, or lengths differ, and inside
    `jit` if `fn` draws random numbers.

    Example:
        >>> layers = {"w": torch.ones(3, 2, 2), "b": torch.arange(3.0)}
        >>> def layer(h, p):
        ...     h = h @ p["w"] + p["b"]
        ...     return h, h.sum()
        >>> h, sums = scan(layer, torch.ones(1, 2), layers)
        >>> h, sums
        (tensor([[12., 12.]]), tensor([ 4., 10., 24.]))
    """
    init = pytree.tree_map(lambda x: x if isinstance(x, Tensor | None) else torch.as_tensor(x), register_mappings(init))
    steps = _length(xs, length)
    leaves, tree = _flat(xs)
    rows: list[Sequence[Tensor]] = [x.unbind(0) for x in leaves]
    body = current_body()
    if is_tracing() and not is_forward_mode() and (body is None or not body.stacked):
        step = _traced(fn, init, [row[0] for row in rows], tree)
    else:
        step = _plain(fn, tree)
    carry, kept = _flat(init)
    ys: list[list[Tensor]] = [[]] * steps
    shape: Any = None
    for i in reversed(range(steps)) if reverse else range(steps):
        out, now, y, shape = step(carry, [row[i] for row in rows], kept)
        _refuse_change(fn, init, out, now)
        carry, ys[i] = out, y
    return kept.filled(carry), shape.filled([torch.stack(column) for column in zip(*ys, strict=True)])


@dataclass(frozen=True)
class _Tree:
    """The structure of a pytree of tensors and Nones."""

    spec: pytree.TreeSpec
    nothing: tuple[bool, ...]

    @property
    def leaves(self) -> int:
        return self.nothing.count(False)

    def filled(self, leaves: Sequence[Any]) -> Any:
        feed = iter(leaves)
        return pytree.tree_unflatten([None if nothing else next(feed) for nothing in self.nothing], self.spec)

    def __str__(self) -> str:
        return str(self.filled(["*"] * self.leaves))


def _flat(tree: Any) -> tuple[list[Any], _Tree]:
    leaves, spec = pytree.tree_flatten(register_mappings(tree))
    return [x for x in leaves if x is not None], _Tree(spec, tuple(x is None for x in leaves))


def _paths(name: str, tree: Any) -> dict[str, Any]:
    leaves, _ = flatten_with_path(register_mappings(tree))
    return {f"{name}{pytree.keystr(path)}": x for path, x in leaves if x is not None}


def _length(xs: Any, length: int | None) -> int:
    """Returns the number of steps, which must be the same everywhere."""
    by_path = _paths("xs", xs)
    wrong = [f"{name} is {x!r}, no tensor" for name, x in by_path.items() if not isinstance(x, Tensor)]
    wrong += [f"{name} has no dim" for name, x in by_path.items() if isinstance(x, Tensor) and not x.dim()]
    sizes: dict[str, int] = (
        {} if wrong else {f"{name} of shape {list(x.shape)}": x.shape[0] for name, x in by_path.items()}
    )
    if length is not None:
        sizes["length"] = length
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        wrong += [f"{name}: {n} steps" for name, n in sizes.items()]
        raise ShardingError(
            "scan does not know how many steps there are",
            wrong,
            rule="every tensor in xs has the steps, at least one, as its first dim; without xs, length= says how many",
            remedy="stack the layers: torch.stack([...]), a dim in front",
        )
    return next(iter(sizes.values()))


def _plain(fn: Callable[..., Any], xs: _Tree) -> Callable[..., Any]:
    def step(carry: list[Tensor], x: list[Tensor], tree: _Tree) -> Any:
        out, y = _pair(fn, fn(tree.filled(carry), xs.filled(x)))
        return *_flat(out), *_flat(y)

    return step


def _traced(fn: Callable[..., Any], init: Any, first: list[Tensor], xs: _Tree) -> Callable[..., Any]:
    leaves, tree = _flat(init)
    names = [*_paths("carry", init), *_paths("x", xs.filled(first))]

    def flat(*tensors: Tensor) -> Any:
        carry, x = tensors[: len(leaves)], tensors[len(leaves) :]
        with refuse_counts(fn):
            out, y = _pair(fn, fn(tree.filled(carry), xs.filled(x)))
        (ends, now), (ys, shape) = _flat(out), _flat(y)
        structures[:] = [now, shape]
        return [*ends, *ys]

    structures: list[_Tree] = []
    line = user_line(sys._getframe(2)) or Line(inspect.getfile(scan), 0, "scan", "")
    body = trace_body(flat, [*leaves, *first], names, line, len(leaves))
    _refuse_draws(body)
    now, shape = structures

    def step(carry: list[Tensor], x: list[Tensor], _: _Tree) -> Any:
        out = body(*carry, *x)
        return out[: now.leaves], now, out[now.leaves :], shape

    return step


def _refuse_draws(body: Body) -> None:
    for node in (*body.forward, *body.backward):
        name = str(node.target)
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "shardlib.draw" in name
        if draws and not has_trait(node.target, "per_device"):  # ops of shard_map bodies carry the tag, too
            raise ShardingError(
                "the body of scan draws random numbers",
                [str(node.meta["line"])],
                rule="a scanned body is traced once: every step would draw the same numbers",
                remedy="draw them outside, with the steps as the first dim, and pass them in as part of xs",
            )


def _pair(fn: Callable[..., Any], out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ShardingError(
            f"scan({name_of(fn)}) does not return a pair",
            [f"it returns {_kind(out)}"],
            rule="fn(carry, x) returns (carry, y)",
            remedy="return carry, None where there is no y",
        )
    wrong = [f"{x!r}, a {type(x).__name__}" for x in _flat(out)[0] if not isinstance(x, Tensor)]
    if wrong:
        raise ShardingError(
            f"scan({name_of(fn)}) returns what is no tensor",
            wrong,
            rule="the carry and the result of a step are pytrees of tensors",
            remedy="return torch.tensor(...), or leave it out",
        )
    return out[0], out[1]


def _refuse_change(fn: Callable[..., Any], init: Any, carry: list[Tensor], now: _Tree) -> None:
    tree = _flat(init)[1]
    wrong = []
    if now != tree:
        wrong.append(f"its structure is {tree}, then {now}")
    else:
        wrong += [
            f"{name} comes in as {_type(a)}, goes out as {_type(b)}"
            for (name, a), b in zip(_paths("carry", init).items(), carry, strict=True)
            if (a.shape, a.dtype) != (b.shape, b.dtype)
        ]
    if wrong:
        raise ShardingError(
            f"scan({name_of(fn)}) changes its carry",
            wrong,
            rule="the carry has one structure, and each of its tensors one shape and dtype, at every step",
            remedy="start from what the body makes: init.to(dtype), init.expand(shape)",
        )


def _type(x: Tensor) -> str:
    return f"{short_dtype(x.dtype)}{list(x.shape)}"


def _kind(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple | list) else "")
