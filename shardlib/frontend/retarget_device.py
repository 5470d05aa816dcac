"""A graph for devices that are not those it was traced on.

All tensors of a program live on its mesh's devices. Arguments may have been meta tensors, or tensors on the CPU, where
only a plan is wanted, and the mesh's devices may be GPUs that this machine does not have: then the function is traced
on the CPU, and each op's results are worked out again as the mesh's devices have them: which dtype a statistic has,
and how large a buffer is, depends on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from shardlib.core.call_scalar import replace_by_hints
from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import FakeTensorMode, OpOverload, pytree, schema_of


def is_here(device: torch.device) -> bool:
    """Whether a function can be traced on the device: autograd takes fake tensors of real devices only."""
    return device.type == "cpu" or torch.cuda.is_available()


def move(gm: fx.GraphModule, device: torch.device) -> None:
    """Whatever the graph makes, it makes on `device`; values are as there, also where the device is not here.

    Raises `ShardingError` for ops that the device does not have.
    """
    again = not is_here(device)
    with FakeTensorMode():
        for node in gm.graph.nodes:
            if node.op == "call_function":
                made = pytree.tree_leaves(node.meta["val"])
                if not any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in made):
                    node.args, node.kwargs = placed(node.target, node.args, node.kwargs, device)
                if again:
                    node.meta["val"] = _result(node)
            elif again:
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


def placed(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device, *, from_meta: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that makes what it makes on `device`; or `from_meta`, what it would make there.

    Example:
        >>> placed(torch.ops.aten.arange.default, (3,), {}, torch.device("cuda", 0))
        ((3,), {'device': device(type='cuda', index=0)})
    """
    out = dict(kwargs)
    place, makes = _device_argument(op)
    if place is None:
        return args, out
    i, name = place
    given = args[i] if i < len(args) else out.get(name)
    if from_meta:
        moves = given is not None and torch.device(given).type == "meta"
    else:
        moves = given is not None or makes
    if not moves:
        return args, out
    if i < len(args):
        return (*args[:i], device, *args[i + 1 :]), out
    return args, out | {name: device}


@cache
def _device_argument(op: Any) -> tuple[tuple[int, str] | None, bool]:
    """Where an op takes a device, and whether it makes a tensor of nothing: then none given means the default one."""
    if not isinstance(op, OpOverload):
        return None, False
    kinds = [str(a.type) for a in schema_of(op).arguments]
    places = [
        (i, schema_of(op).arguments[i].name) for i, kind in enumerate(kinds) if kind in ("Device", "Optional[Device]")
    ]
    reads_numbers = schema_of(op).name in ("aten::linspace", "aten::logspace")  # from tensors too, wherever these are
    return (places[0] if places else None), reads_numbers or not any("Tensor" in kind for kind in kinds)
