"""What a program does on a GPU, op by op: on which device, what makes the host wait, what is in flight.

`watching()` looks at every generated program that runs inside it, and at its variables; `Watch` at the ops of one call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib.compiler.codegen import codegen
from shardlib.compiler.codegen.codegen import Generator, Source

# Ops that read values on the host: each makes it wait for the GPU.
READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "bincount"),
        *("masked_select", "unique_dim", "unique_consecutive", "_unique", "_unique2", "_linalg_check_errors"),
    }
)


@dataclass
class Seen:
    """What was seen: faults in words, how many programs, ops, collectives and waits."""

    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    program: str = ""
    known: set[str] = field(default_factory=set)  # ops that make the host wait when the plain program calls them
    plain: Counter[str] = field(default_factory=Counter)  # the same, how often

    def fault(self, text: str) -> None:
        self.faults.append(f"{self.program}: {text}" if self.program else text)


class Watch(TorchDispatchMode):
    """Notes faults of the ops that are called while it is on; in `mine`, numbers on the CPU are the user's own."""

    def __init__(self, seen: Seen, *, mine: bool = False) -> None:
        super().__init__()
        self.seen, self.mine = seen, mine
        self.flying: dict[int, dict[int, StorageWeakRef]] = {}  # memory of a result -> memories that are being sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.__name__ == "ShardedTensor" for t in types):
            return NotImplemented
        self.seen.counts["ops"] += 1
        given = _tensors((args, kwargs))
        self._reads(func, args, kwargs, given)
        out = func(*args, **kwargs)
        made = _tensors(out)
        if self.mine and all(x.device.type == "cpu" and not x.dim() for x in (*given, *made)):
            return out
        self._devices(func, args, given, made)
        self._flight(func, given, made)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.flying and not error[0]:
            self.seen.fault(f"{len(self.flying)} collectives are never waited for")

    def _reads(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        name = func._schema.name.split("::")[-1]
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        counts = name == "repeat_interleave" and func._overloadname != "self_int" and not kwargs.get("output_size")
        filled = masks and name != "index" and args[2].numel() == 1 and args[2].device.type == "cpu"  # by the mask
        if not (name in READS or counts or (masks and not filled)):
            return
        if str(func) in self.seen.known:
            self.seen.plain[str(func)] += 1
        else:
            self.seen.fault(f"{func} makes the host wait for values")

    def _devices(self, func: Any, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        here = {x.device.type for x in made}
        if wrong := sorted(here - {"cuda"}):
            self.seen.fault(f"{func} makes a tensor on {', '.join(wrong)}")
        # A number among the operands is a CPU scalar, which travels with the kernel; any other tensor is copied.
        others = [x for x in given if x.device.type != "cuda" and x.dim()]
        if others:
            self.seen.fault(f"{func} reads {[list(x.shape) for x in others]} from {others[0].device}")

    def _flight(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        name = func._schema.name
        if name == "_c10d_functional::wait_tensor":
            self.seen.counts["waits"] += 1
            sent = self.flying.pop(_memory(given[0]), None)
            if sent is None:
                self.seen.fault("a wait for what is not in flight")
            elif any(ref.expired() for ref in sent.values()):
                self.seen.fault("memory is given up while a collective reads it")
            return
        for x in given:
            if _memory(x) in self.flying:
                self.seen.fault(f"{func} reads the result of a collective before it is waited for")
        writes = [x for x, a in zip(_arguments(func, given), func._schema.arguments, strict=False) if _written(a)]
        busy = {memory for sent in self.flying.values() for memory in sent}
        if any(isinstance(x, Tensor) and _memory(x) in busy for x in writes):
            self.seen.fault(f"{func} writes to memory that a collective reads")
        if name.startswith("_c10d_functional::"):
            self.seen.counts["collectives"] += 1
            refs = {_memory(x): StorageWeakRef(x.untyped_storage()) for x in given}
            self.flying |= {_memory(y): refs for y in made}


def _arguments(func: Any, given: list[Tensor]) -> list[Any]:
    return given if func._schema.is_mutable else []


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _tensors(x: Any) -> list[Tensor]:
    return [y for y in pytree.tree_leaves(x) if isinstance(y, Tensor)]


@contextmanager
def watching(seen: Seen) -> Iterator[Seen]:
    """Every generated program that is made inside is watched when it runs."""
    compiled, rendered = Source.compile, Generator._render

    def compile_(source: Source) -> Any:
        function = compiled(source)

        def program(pieces: Any, leaves: Any = ()) -> Any:
            seen.counts["programs"] += 1
            with Watch(seen):
                return function(pieces, leaves)

        return program

    def render(generator: Generator) -> Any:
        look = generator.bind(_looker(generator, seen), "look")
        for i, line in enumerate(generator.lines):
            left, is_made, _ = line.partition(" = ")
            names = [name for name in re.findall(r"\w+", left) if name != "_"] if is_made else []
            generator.lines[i] += "".join(f"; {look}({name!r}, {name})" for name in names)
        return rendered(generator)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Source, "compile", compile_))
        stack.enter_context(mock.patch.object(codegen.Generator, "_render", render))
        yield seen


def _looker(generator: Generator, seen: Seen) -> Any:
    """Compares a variable of a program with what the program says of it."""
    said: dict[str, Any] = {}
    for (var, where), name in generator._names.items():
        axes = generator.varies.get(var, ())
        there = [c for c in generator.devices if tuple(a.coord(c) for a in axes) == where]
        said.setdefault(name, (var, there[0] if there else generator.devices[0]))

    def look(name: str, value: Any) -> None:
        if name not in said or not isinstance(value, Tensor):
            return
        seen.counts["variables"] += 1
        var, coords = said[name]
        if value.dtype != var.dtype:
            seen.fault(f"{name} is {value.dtype}, the program says {var.dtype}")
        if value.device.type != ("cpu" if var.host else generator.program.mesh.device):
            seen.fault(f"{name} is on {value.device}")
        if var.layout is not None and not var.layout.pending:
            shape = tuple(var.layout.local_shape(coords))
            if var.value is not None and not var.value.manual and shape != tuple(value.shape):
                seen.fault(f"{name} is {tuple(value.shape)}, the program says {shape}")

    return look
