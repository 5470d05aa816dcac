"""`microbatch`: one function on the microbatches of a batch, with their results combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shardlib.compiler.stages.schedules import SCHEDULES, Comparator
from shardlib.core.errors import ShardingError
from shardlib.core.fragment_tag import FragmentTag, Microbatches, tagged
from shardlib.core.func_transforms import name_of
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.core.tree_paths import flatten_with_path
from shardlib.frontend.guards.mappings import register_mappings

Reduce = Literal["mean", "sum", "cat"]


def microbatch(
    fn: Callable[[Any], Any],
    batch: Any,
    n: int,
    schedule: str | Comparator | Sequence[Sequence[str]] = "1f1b",
    reduce: Reduce = "mean",
) -> Any:
    """Returns the results of `fn` on `n` microbatches of `batch`, combined by mean, sum or concatenation.

    `batch` is a pytree. Of each of its tensors, microbatch m has the rows m, m + n, m + 2n, ... along dim 0, so that
    every device keeps its part of a sharded batch. Everything else in it goes to every call. `fn` returns a pytree.
    Tensors in it are added up (`"sum"`), and divided by `n` (`"mean"`), or put together along dim 0 in the order of the
    batch's rows (`"cat"`; a tensor without dims becomes one of `n` elements). So gradients may be taken inside `fn` or
    around the call. Gradients that `fn` adds to `.grad` by itself are not divided.

    At most the values that one microbatch saves for its backward pass are held at once, if `fn` takes the gradients.
    `schedule` orders the work of the stages on a mesh that has some; on others it has no effect.

    Raises `ShardingError` if `n` does not divide dim 0 of every tensor, and if results cannot be combined.

    Example:
        >>> x = torch.arange(8.0).view(4, 2)
        >>> microbatch(lambda rows: rows.sum(), x, n=2)
        tensor(14.)
        >>> torch.equal(microbatch(lambda rows: rows * 2, x, n=2, reduce="cat"), x * 2)
        True
    """
    leaves, tree = pytree.tree_flatten(register_mappings(batch))
    _refuse_arguments(batch, n, schedule, reduce)
    total: list[Any] = []
    first: Any = None
    how = Microbatches(n, schedule if isinstance(schedule, str) or callable(schedule) else tuple(map(tuple, schedule)))
    rows = [_rows(x, n) if isinstance(x, Tensor) else (x,) * n for x in leaves]
    for m in range(n):
        with tagged(FragmentTag(microbatch=m, microbatches=how)):
            piece = pytree.tree_unflatten([x[m] for x in rows], tree)
            results, out = pytree.tree_flatten(register_mappings(fn(piece)))
        first = out if m == 0 else first
        if out != first:
            raise ShardingError(
                f"microbatch cannot combine what {name_of(fn)} returns",
                [f"microbatch 0: {first}", f"microbatch {m}: {out}"],
                rule="the function returns the same structure for every microbatch",
            )
        total = [_add(fn, parts, x, reduce) for parts, x in zip(total or [[]] * len(results), results, strict=True)]
    return pytree.tree_unflatten([_combine(parts, n, reduce) for parts in total], first)


def _rows(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """Returns the rows of each microbatch: row m and every n-th one behind it, a view of each device's own rows."""
    return x.view(x.shape[0] // n, n, *x.shape[1:]).unbind(1)


def _add(fn: Callable[[Any], Any], parts: list[Any], x: Any, reduce: Reduce) -> list[Any]:
    """Adds a result to those of earlier microbatches, which hold one item if they are summed."""
    if not parts or not isinstance(x, Tensor | int | float | complex):
        return [*parts, x]
    before, now = (tuple(y.shape) if isinstance(y, Tensor) else () for y in (parts[0], x))
    if before != now:
        raise ShardingError(
            f"microbatch cannot combine what {name_of(fn)} returns",
            [f"one microbatch has a result of shape {list(before)}, another one of {list(now)}"],
            rule="a result has one shape for all microbatches",
        )
    return [*parts, x] if reduce == "cat" else [parts[0] + x]


def _combine(parts: list[Any], n: int, reduce: Reduce) -> Any:
    x = parts[0]
    if not isinstance(x, Tensor | int | float | complex):
        if any(other is not x and other != x for other in parts):
            raise ShardingError(
                "microbatch cannot combine results that are no tensors or numbers",
                [f"{part!r}" for part in parts],
                rule="everything else that the function returns is equal for all microbatches",
                remedy="return tensors",
            )
        return x
    if reduce == "cat":
        tensors = [torch.as_tensor(part) for part in parts]
        return torch.stack(tensors) if not tensors[0].dim() else torch.stack(tensors, 1).flatten(0, 1)
    return x / n if reduce == "mean" else x


def _refuse_arguments(batch: Any, n: Any, schedule: Any, reduce: Any) -> None:
    """Raises `ShardingError` for arguments of `microbatch` that do not fit, naming all of them."""
    faults = []
    if type(n) is not int or n < 1:
        faults.append(f"n={n!r} is no number of microbatches, 1 or more")
    if reduce not in get_args(Reduce):
        faults.append(f"reduce={reduce!r} is none of {', '.join(map(repr, get_args(Reduce)))}")
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        faults.append(f"schedule={schedule!r} is none of {', '.join(map(repr, SCHEDULES))}")
    if faults:
        raise ShardingError("microbatch has arguments that do not fit", faults)
    paths = flatten_with_path(register_mappings(batch))[0]
    tensors = [(f"batch{pytree.keystr(path)}", x) for path, x in paths if isinstance(x, Tensor)]
    faults = [] if tensors else ["batch has no tensor"]
    faults += [f"{name} has no dim" for name, x in tensors if not x.dim()]
    sizes = {f"{name} of shape {list(x.shape)}": x.shape[0] for name, x in tensors if x.dim()}
    faults += [f"{name}: {n} does not divide {rows}" for name, rows in sizes.items() if rows % n]
    if len({*sizes.values()}) > 1:
        faults += [f"{name} has {rows} rows" for name, rows in sizes.items()]
    if faults:
        raise ShardingError(
            "the batch cannot be divided into microbatches",
            faults,
            rule="all tensors of the batch have the same number of rows along dim 0, and n divides it",
            remedy="choose another n; a tensor that every microbatch reads whole is passed by the function's closure",
        )
