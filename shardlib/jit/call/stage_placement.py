"""Moves parameters and state to the stages of a pipeline that use them, before the first run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardlib.compiler.pipeline import Compiled
from shardlib.compiler.program.steps import Program, Var, reads
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form


def move_shared(compiled: Compiled, leaves: Sequence[Any]) -> bool:
    """Gives each parameter that several stages read an owner, the first of them; returns whether any moved.

    The program that was planned must then be planned again, as the others receive the parameter.
    """
    return _move_all({id(x): (x, min(users)) for x, users in _uses(compiled, leaves) if len(users) > 1})


def move_state(compiled: Compiled, leaves: Sequence[Any]) -> bool:
    """Moves parameters, and tensors that the program writes to, to the one stage that uses them.

    Returns whether any moved.
    """
    return _move_all({id(x): (x, min(users)) for x, users in _uses(compiled, leaves) if len(users) == 1})


def _uses(compiled: Compiled, leaves: Sequence[Any]) -> Iterator[tuple[ShardedTensor, set[int]]]:
    """Yields parameters and written tensors that are on all stages, with the stages that use them."""
    staged, traced = compiled.staged, compiled.traced
    if staged is None:
        return
    read = [_read(p) for p in staged.programs]
    written = dict(traced.after.written)
    for i, leaf in enumerate(traced.input_leaves):
        x = leaves[leaf] if leaf >= 0 else None
        if not isinstance(x, ShardedTensor) or x.mesh.stage is not None or not x.is_leaf or x.__dict__.get("_path"):
            continue
        users = {stage for stage, p in enumerate(staged.programs) if p.inputs[i] in read[stage]}
        if leaf in written and (owner := staged.output_stages[written[leaf]]) is not None:
            users.add(owner)
        if leaf in written or isinstance(x, torch.nn.Parameter):
            yield x, users


def _move_all(moves: Mapping[int, tuple[ShardedTensor, int]]) -> bool:
    for x, stage in moves.values():
        _move(x, x.mesh.on_stage(stage))
    return bool(moves)


def _read(program: Program) -> set[Var]:
    return {v for step in program.steps for v in reads(step)}


def _move(x: ShardedTensor, mesh: Mesh) -> None:
    form = x._form
    to = Form.intern(form.layout, mesh, form.dtype, form.device, form.names, form.strides)
    shards = tuple(torch.empty_like(s, device="meta") for s in x._locals) if mesh.is_elsewhere else x._locals
    x.data = wrap(to, shards)
    if x.grad is not None and isinstance(x.grad, ShardedTensor) and x.grad.mesh.stage is None:
        _move(x.grad, mesh)
