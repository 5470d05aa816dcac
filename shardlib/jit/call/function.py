"""A function with its options for `jit`, and the reading of its calls into keys and leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardlib.compiler.memory_options import MemoryOptions
from shardlib.core.errors import ShardingError
from shardlib.core.func_transforms import name_of
from shardlib.core.torch_internals.numpy_bridge import ArrayTensors, convert_arrays
from shardlib.core.torch_internals.torch_private import innermost
from shardlib.frontend.guards.argument_specs import add_positions_and_names
from shardlib.frontend.guards.closure import Closure
from shardlib.frontend.guards.flatten_call import find_aliases, read_arguments, wrap_static
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.guards.torch_modes import ambient
from shardlib.frontend.hazards.memory_queries import owns_memory
from shardlib.jit.call.program_cache import Programs
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor

# Skips the dispatch to `__torch_function__` when tensors' attributes are read, which takes half the time.
_PlainAttributes = torch.DisableTorchFunctionSubclass


class Function:
    """`static` and `donate` are positions and names of arguments."""

    goes_back = False  # refuse at once a call whose results cannot be differentiated
    only_returns = False  # refuse at once a call that writes, or draws random numbers

    def __init__(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        static: frozenset[int | str],
        donate: frozenset[int | str],
        options: MemoryOptions,
    ) -> None:
        self.name: str = name_of(fn)
        self.fn, self.in_specs, self.out_specs = fn, in_specs, out_specs
        self.static, self.donate = add_positions_and_names(fn, static), add_positions_and_names(fn, donate)
        self.options = options

    @functools.cached_property
    def _closure(self) -> Closure:
        return Closure(self.fn)

    def read_call(
        self, mesh: Mesh | None, programs: Programs, state: StateWalk, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Returns the key of a call and its leaves; adds the objects that it finds to `state`.

        The key begins with the mesh; if none is given, with the mesh of the tensors that the call finds.
        """
        leaves: list[Any] = []
        key: list[Any] = [None if kwargs else len(args)]
        if self.static:
            args, kwargs = wrap_static(args, kwargs, self.static)
        with _PlainAttributes():
            read_arguments((args, kwargs) if kwargs else args, leaves, key, state)
            modes = ambient(state)
            self._closure.read(state, key)
        count = len(leaves)
        leaves += state.tensors
        if len(leaves) > 1 and len(set(map(id, leaves))) < len(leaves):
            key += find_aliases(leaves[:count], state.tensors).items()
        if "keys" in vars(state):  # tensors as keys of dicts: their positions among the leaves
            at = {id(x): i for i, x in enumerate(leaves)}
            state.kept.extend(x for x in state.keys if id(x) not in at)
            key.append(tuple(at.get(id(x), -id(x)) for x in state.keys))
        if programs.asks:
            key.append(tuple(map(owns_memory, leaves)))
        if not state.quick:
            leaves += [x for x, _ in state.numbers.values()]
        return (mesh or self._mesh_of(leaves), modes, tuple(key)), leaves

    def _mesh_of(self, leaves: list[Any]) -> Mesh:
        values = map(innermost, leaves)
        meshes: list[Mesh] = list(dict.fromkeys(x.mesh for x in values if isinstance(x, ShardedTensor)))
        if len(meshes) > 1:
            meshes = list(dict.fromkeys(mesh.whole for mesh in meshes))
        if len(meshes) != 1:
            raise ShardingError(
                f"{self.name} is called outside any mesh",
                [f"it finds tensors on {mesh}" for mesh in meshes],
                rule="a jitted function runs on the current mesh, else on that of the tensors that it finds",
                remedy="call it inside `with Mesh(data=2, tensor=4):`",
            )
        return meshes[0]

    def with_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces numpy arrays among the arguments by tensors, but for static ones."""
        label, shown = f"an argument of {self.name}", ArrayTensors()
        return (
            tuple(x if i in self.static else convert_arrays(x, label, shown) for i, x in enumerate(args)),
            {k: x if k in self.static else convert_arrays(x, label, shown) for k, x in kwargs.items()},
        )
