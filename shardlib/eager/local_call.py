"""Generates the function that runs a cached eager call: one op on the local shards, without resharding.

The text describes only the roles of the arguments, so that a few functions serve all ops. The op, constants, and the
forms of results are bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import make_wrapper
from shardlib.distributed.provenance import hash_origin
from shardlib.eager.arg_slots import Slot
from shardlib.tensor.eager_cache import Runner
from shardlib.tensor.sharded_tensor import ShardedTensor
from shardlib.tensor.tensor_meta import Form
from shardlib.tensor.view_aliases import assign_shards

Path = tuple[int | str, ...]  # of a value in `(args, kwargs)`


@dataclass
class LocalCall:
    """Writes the text of a local call; `bound` holds the values that the text refers to by name.

    `sharded` tells which tensors are sharded. `devices` are those with distinct results, each with its local sizes;
    `ints` maps the path of an integer argument to its number among these. `spread` maps every device of this process to
    the number of its result. `loose` numbers are arguments, not constants. With `elsewhere` the shards are those of
    another stage, without values; so plain tensors take part without theirs.
    """

    target: Callable[..., Any]
    sharded: Sequence[bool]
    ints: Mapping[Path, int]
    devices: Sequence[tuple[int, tuple[int, ...]]]
    spread: Sequence[int]
    loose: bool
    elsewhere: bool = False

    def __post_init__(self) -> None:
        self.bound: dict[str, Any] = {"f": self.target, "make": make_wrapper, "strided": torch.strided}
        self.shard_tuples: list[str] = []
        self.lineage: list[str] = []  # values that the origin of the results depends on

    def build(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        results: Sequence[Form | None],
        kind: Any,
        write: bool = False,
        program: int = 0,
    ) -> Runner:
        """Returns a function of a call's `(args, kwargs)` that calls `target` on the local shards.

        `args` and `kwargs` have a `Slot` for each tensor. `kind` is the type of the result: None for one tensor, else
        tuple or list. With `write`, the result is the new value of the first argument. On ranks, `program` is the
        number of the op, for the origin of its results.
        """
        call = [self.argument(x, f"args[{i}]", (i,)) for i, x in enumerate(args)]
        call += [f"{k}={self.argument(x, f'kwargs[{k!r}]', (k,))}" for k, x in kwargs.items()]
        lines = self.call_lines(f"f({', '.join(call)})", program)
        if write:
            self.bound["assign"] = assign_shards
            lines += ["x = args[0]", f"v = {self.result_shards('')}", "assign(x, v, v, origin)", "return x"]
        elif kind is None:
            lines += [*self.wrap_lines(results[0], 0, ""), "return x0"]
        else:
            lines += [line for i, form in enumerate(results) for line in self.wrap_lines(form, i, f"[{i}]")]
            names = "".join(f"x{i}, " for i in range(len(results)))
            lines.append(f"return ({names})" if kind is tuple else f"return [{names}]")
        body = "\n".join(f"        {line}" for line in lines)
        text = f"def factory({', '.join(self.bound)}):\n    def run(args, kwargs):\n{body}\n    return run\n"
        run: Runner = _factory(text)(**self.bound)
        return run

    def bind(self, value: Any) -> str:
        name = f"c{len(self.bound)}"
        self.bound[name] = value
        return name

    def argument(self, x: Any, where: str, path: Path) -> str:
        """Returns the text of an argument; `where` is the text of the caller's argument."""
        device, sizes = self.devices[0]
        is_single = len(self.devices) == 1
        if path in self.ints:
            number = self.ints[path]
            return self.bind(sizes[number]) if is_single else f"n[{number}]"
        if isinstance(x, Slot):
            if not self.sharded[x.index]:
                return f"{where}.detach().to('meta')" if self.elsewhere else f"{where}.detach()"
            self.lineage.append(f"{where}._origin")
            if is_single:
                return f"{where}._locals[{self.bind(device)}]" if device else f"{where}._locals[0]"
            self.shard_tuples.append(f"{where}._locals")
            return f"p{len(self.shard_tuples) - 1}[d]"
        if isinstance(x, list | tuple):
            if _is_constant(x) and not any(p[: len(path)] == path for p in self.ints):
                return self.bind(list(x))
            return "[" + ", ".join(self.argument(y, f"{where}[{i}]", (*path, i)) for i, y in enumerate(x)) + "]"
        if self.loose and type(x) in (int, float, complex):
            self.lineage.append(f"({where} == {where} and {where})")  # every NaN has another hash
            return where
        return "None" if x is None else self.bind(x)

    def call_lines(self, call: str, program: int) -> list[str]:
        """Returns lines that set `r` to the result, or to the list of the devices' results, and `origin`."""
        lines = [f"p{i} = {text}" for i, text in enumerate(self.shard_tuples)]
        if len(self.devices) == 1:
            lines.append(f"r = {call}")
        else:
            self.bound.update(devices=tuple(self.devices), spread=tuple(self.spread))
            lines.append(f"r = [{call} for d, {'n' if self.ints else '_'} in devices]")
        if program:
            self.bound.update(program=program, origin_of=hash_origin)
            lines.append(f"origin = origin_of((program, {', '.join(self.lineage)}))")
        else:
            self.bound["origin"] = 0
        return lines

    def result_shards(self, item: str) -> str:
        """Returns the text of one result's shards; `item` indexes the result of a call."""
        if len(self.devices) > 1:
            return f"tuple([r[i]{item} for i in spread])"
        return f"(r{item},)" if len(self.spread) == 1 else f"(r{item},) * {len(self.spread)}"

    def wrap_lines(self, form: Form | None, i: int, item: str) -> list[str]:
        """Returns lines that set `x{i}` to result i, as a ShardedTensor if it has a form."""
        if form is None:
            return [f"x{i} = r{'[0]' if len(self.devices) > 1 else ''}{item}"]
        parts = (ShardedTensor, form.shape, form.strides, form.offset, None, form.dtype)
        arguments = ", ".join("None" if p is None else self.bind(p) for p in parts)
        return [
            f"x{i} = make({arguments}, strided, {self.bind(form.device)})",
            f"x{i}._form = {self.bind(form)}",
            f"x{i}._locals = {self.result_shards(item)}",
            f"x{i}._origin = origin{f' + {i}' if i else ''}",
        ]


def _is_constant(x: Any) -> bool:
    """True for an argument without tensors."""
    return type(x) is int or (
        not isinstance(x, Slot) and (not isinstance(x, list | tuple) or all(map(_is_constant, x)))
    )


@lru_cache(maxsize=1024)
def _factory(text: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(text, "<shardlib eager op>", "exec"), namespace)
    factory: Callable[..., Any] = namespace["factory"]
    return factory
