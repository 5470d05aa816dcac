"""A function as `jit` is given it: its specs, which arguments are static or donated, and how one call of it is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardlib.compiler.memory_options import Keeping
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.numpy_bridge import ArrayTensors, convert_arrays
from shardlib.core.torch_private import innermost
from shardlib.frontend.guards.argument_specs import by_position_and_name
from shardlib.frontend.guards.closure import Closure
from shardlib.frontend.guards.flatten_call import read, twins, wrapped
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.hazards.memory_queries import at_home
from shardlib.jit.call.program_cache import Programs
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor

# What a tensor says of itself is read without a look for its `__torch_function__`: that takes half the time.
_PlainAttributes = torch.DisableTorchFunctionSubclass


class Function:
    """`static` and `donate` are positions and names of arguments."""

    goes_back = False  # whether a call whose results cannot be differentiated is refused at once
    only_returns = False  # whether a call that writes, or draws random numbers, is refused at once

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        keeping: Keeping,
    ) -> None:
        self.name: str = name_of(fn)
        self.fn, self.in_specs, self.out_specs = fn, in_specs, out_specs
        self.static, self.donate = by_position_and_name(fn, static), by_position_and_name(fn, donate)
        self.keeping = keeping

    @functools.cached_property
    def _closure(self) -> Closure:
        return Closure(self.fn)

    def read_call(
        self, mesh: Mesh | None, programs: Programs, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """The key of a call and its leaves; what comes with it is added to `state`.

        The key begins with the mesh: where none is given, that on which all that the call finds lives.
        """
        leaves: list[Any] = []
        known: list[Any] = [None if kwargs else len(args)]
        if self.static:
            args, kwargs = wrapped(args, kwargs, self.static)
        with _PlainAttributes():
            read((args, kwargs) if kwargs else args, leaves, known, state)
            modes = ambient(state)
            self._closure.read(state, known)
        count = len(leaves)
        leaves += state.tensors
        if len(leaves) > 1 and len(set(map(id, leaves))) < len(leaves):
            known += twins(leaves[:count], state.tensors).items()
        if "keys" in vars(state):  # which of them they are
            at = {id(x): i for i, x in enumerate(leaves)}
            state.kept.extend(x for x in state.keys if id(x) not in at)
            known.append(tuple(at.get(id(x), -id(x)) for x in state.keys))
        if programs.asks:
            known.append(tuple(map(at_home, leaves)))
        if not state.quick:
            leaves += [x for x, _ in state.numbers.values()]
        return (mesh or self._found(leaves), modes, tuple(known)), leaves

    def _found(self, leaves: list[Any]) -> Mesh:
        values = map(innermost, leaves)
        meshes: list[Mesh] = list(dict.fromkeys(x.mesh for x in values if isinstance(x, ShardedTensor)))
        if len(meshes) != 1:
            raise ShardingError(
                f"{self.name} is called outside any mesh",
                [f"it finds tensors on {mesh}" for mesh in meshes],
                rule="a jitted function runs on the current mesh, else on that of the tensors that it finds",
                remedy="call it inside `with Mesh(data=2, tensor=4):`",
            )
        return meshes[0]

    def with_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors for numpy's arrays, but for the static ones."""
        said, shown = f"an argument of {self.name}", ArrayTensors()
        return (
            tuple(x if i in self.static else convert_arrays(x, said, shown) for i, x in enumerate(args)),
            {k: x if k in self.static else convert_arrays(x, said, shown) for k, x in kwargs.items()},
        )
