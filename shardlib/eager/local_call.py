"""Calls of one op on the pieces as they are, written out as a function: what is left of a warm eager op.

The text says only which argument is what, so that a few functions serve all ops; whatever belongs to one call (the op,
constants, the form of its results) is bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardlib.core.torch_private import make_wrapper
from shardlib.distributed.provenance import origin_of
from shardlib.eager.arg_slots import Slot
from shardlib.tensor.eager_cache import Run
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import assign

Put = dict[tuple[Any, ...], int]  # path of an integer that is a local size -> which of a device's integers it is


def caller(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    sharded: Sequence[bool],
    results: Sequence[Form | None],
    kind: Any,
    ints: Put,
    devices: Sequence[tuple[int, tuple[int, ...]]],
    spread: Sequence[int],
    loose: bool,
    write: bool = False,
    program: int = 0,
) -> Run:
    """A function of a call's `(args, kwargs)`.

    `args` and `kwargs` have a `Slot` where a tensor stands (`sharded` says which of them is). `devices` are those that
    compute something different, each with its integers; `spread` says for every device of this process whose result is
    its own. `kind` is the type of the result: None for one tensor, else tuple or list. With `write`, the result
    is the new value of the first argument. On ranks, `program` is the number of the op, for the origin of its results.
    """
    bound: dict[str, Any] = {"f": target, "make": make_wrapper, "strided": torch.strided}
    pieces: list[str] = []
    made_of: list[str] = []

    def text(x: Any, where: str, path: tuple[Any, ...]) -> str:
        if path in ints:
            return f"n[{ints[path]}]" if len(devices) > 1 else _bind(bound, devices[0][1][ints[path]])
        if isinstance(x, Slot):
            made_of.extend([f"{where}._origin"] if sharded[x.index] else [])
            if not sharded[x.index]:
                return f"{where}.detach()"
            if len(devices) == 1:
                return f"{where}._locals[{_bind(bound, devices[0][0])}]" if devices[0][0] else f"{where}._locals[0]"
            pieces.append(f"{where}._locals")
            return f"p{len(pieces) - 1}[d]"
        if isinstance(x, list | tuple):
            if _static(x) and not any(p[: len(path)] == path for p in ints):
                return _bind(bound, list(x))
            return "[" + ", ".join(text(y, f"{where}[{i}]", (*path, i)) for i, y in enumerate(x)) + "]"
        if loose and type(x) in (int, float, complex):
            made_of.append(f"({where} == {where} and {where})")  # a NaN has another hash each time
            return where
        return "None" if x is None else _bind(bound, x)

    call = [text(x, f"args[{i}]", (i,)) for i, x in enumerate(args)]
    call += [f"{k}={text(x, f'kwargs[{k!r}]', (k,))}" for k, x in kwargs.items()]
    one = f"f({', '.join(call)})"
    lines = [f"p{i} = {piece}" for i, piece in enumerate(pieces)]
    n = len(spread)
    if len(devices) == 1:
        lines.append(f"r = {one}")
    else:
        bound["devices"], bound["spread"] = tuple(devices), tuple(spread)
        loop = "for d, n in devices" if ints else "for d, _ in devices"
        lines.append(f"r = [{one} {loop}]")
    if program:
        bound["program"], bound["origin_of"] = program, origin_of
        lines.append(f"origin = origin_of((program, {', '.join(made_of)}))")
    else:
        bound["origin"] = 0
    if write:
        bound["assign"] = assign
        lines += ["x = args[0]", f"v = {_located('r', '', n, len(devices))}", "assign(x, v, v, origin)"]
        lines.append("return x")
    elif kind is None:
        lines += [*_wrapped(bound, "r", "", results[0], 0, n, len(devices)), "return x0"]
    else:
        for i, form in enumerate(results):
            lines += _wrapped(bound, "r", f"[{i}]", form, i, n, len(devices))
        names = "".join(f"x{i}, " for i in range(len(results)))
        lines.append(f"return ({names})" if kind is tuple else f"return [{names}]")
    body = "\n".join(f"        {line}" for line in lines)
    run: Run = _factory(f"def factory({', '.join(bound)}):\n    def run(args, kwargs):\n{body}\n    return run\n")(
        **bound
    )
    return run


def _static(x: Any) -> bool:
    return type(x) is int or (not isinstance(x, Slot) and (not isinstance(x, list | tuple) or all(map(_static, x))))


def _bind(bound: dict[str, Any], value: Any) -> str:
    name = f"c{len(bound)}"
    bound[name] = value
    return name


def _located(name: str, item: str, n: int, devices: int) -> str:
    """The text of the pieces of one result."""
    if devices > 1:
        return f"tuple([{name}[i]{item} for i in spread])"
    return f"({name}{item},)" if n == 1 else f"({name}{item},) * {n}"


def _wrapped(bound: dict[str, Any], name: str, item: str, form: Form | None, i: int, n: int, devices: int) -> list[str]:
    if form is None:
        return [f"x{i} = {name}{'[0]' if devices > 1 else ''}{item}"]
    parts = (ShardedTensor, form.shape, form.strides, form.offset, None, form.dtype)
    arguments = ", ".join("None" if p is None else _bind(bound, p) for p in parts)
    return [
        f"x{i} = make({arguments}, strided, {_bind(bound, form.device)})",
        f"x{i}._form = {_bind(bound, form)}",
        f"x{i}._locals = {_located(name, item, n, devices)}",
        f"x{i}._origin = origin{f' + {i}' if i else ''}",
    ]


@lru_cache(maxsize=1024)
def _factory(text: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(text, "<shardlib eager op>", "exec"), namespace)
    factory: Callable[..., Any] = namespace["factory"]
    return factory
