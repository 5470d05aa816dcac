"""Moves a graph to other devices than those it was traced on.

All tensors of a program live on its mesh's devices. If only a plan is wanted, arguments may be meta tensors, and the
mesh's GPUs may be absent: then the function is traced on the CPU. The results of each op are computed again for the
mesh's devices, since the dtype of a statistic, or the size of a buffer, depends on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import FakeTensorMode, OpOverload, pytree, schema_of


def can_trace_on(device: torch.device) -> bool:
    """Returns whether a function can be traced on the device: autograd takes only fake tensors of present devices."""
    return device.type == "cpu" or torch.cuda.is_available()


def retarget(gm: fx.GraphModule, device: torch.device) -> None:
    """Makes all tensors of the graph on `device`, with the forms that they have there; the device may be absent.

    Raises `ShardingError` for ops that the device does not have.
    """
    is_absent = not can_trace_on(device)
    with FakeTensorMode():
        for node in gm.graph.nodes:
            if node.op == "call_function":
                results = pytree.tree_leaves(node.meta["val"])
                if not any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in results):
                    node.args, node.kwargs = with_device(node.target, node.args, node.kwargs, device)
                if is_absent:
                    node.meta["val"] = _result(node)
            elif is_absent:
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda x: _like(x, device), node.meta["val"])


def _like(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _result(node: fx.Node) -> Any:
    args, kwargs = replace_by_hints(fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"]))
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError) as error:
        raise ShardingError(
            f"{node.target} cannot be planned for this mesh's devices",
            [f"{node.meta['line']}: {str(error).splitlines()[0]}"],
            rule="without the devices a function is traced on the CPU, which may choose ops that only the CPU has",
            remedy="plan where the devices are, or for the CPU",
        ) from error


def with_device(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, *, from_meta: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments for results on `device`; with `from_meta`, only results on meta move."""
    out = dict(kwargs)
    place, makes = _device_argument(op)
    if place is None:
        return args, out
    i, name = place
    argument = args[i] if i < len(args) else out.get(name)
    if from_meta:
        moves = argument is not None and torch.device(argument).type == "meta"
    else:
        moves = argument is not None or makes
    if not moves:
        return args, out
    if i < len(args):
        return (*args[:i], device, *args[i + 1 :]), out
    return args, out | {name: device}


@cache
def _device_argument(op: Any) -> tuple[tuple[int, str] | None, bool]:
    """Returns the place and name of an op's device argument, and True if an absent one means the default device."""
    if not isinstance(op, OpOverload):
        return None, False
    kinds = [str(a.type) for a in schema_of(op).arguments]
    places = [
        (i, schema_of(op).arguments[i].name) for i, kind in enumerate(kinds) if kind in ("Device", "Optional[Device]")
    ]
    reads_numbers = schema_of(op).name in ("aten::linspace", "aten::logspace")  # from tensors too, wherever these are
    return (places[0] if places else None), reads_numbers or not any("Tensor" in kind for kind in kinds)
