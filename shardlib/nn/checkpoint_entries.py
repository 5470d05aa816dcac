"""Splits the state of a checkpoint into tensors by path (`opt.state.0.exp_avg`), other values, and facts about both.

Before loading, all facts are compared with the current state.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.jit.shard import shard
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof

Kind = list[Any]  # [shape, dtype] in JSON


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a state by path, and by entry the other values, with paths in the place of tensors."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    if wrong := [repr(name) for name in state if not isinstance(name, str) or not name or "." in name]:
        raise ShardingError(
            "a checkpoint has entries without a name of their own",
            wrong,
            rule="an entry is called by a text without dots, which stand between it and what is in it",
            remedy='save(step, {"model": model, "cache_k": k})',
        )
    for name, x in state.items():
        content = x.state_dict() if hasattr(x, "state_dict") else x
        values[name] = content if is_value(x) else _extract_tensors(name, content, tensors)
    leaves = [(name, y) for name, x in values.items() for y in pytree.tree_leaves(x)]
    if placed := [f"{name} holds {typeof(y)}" for name, y in leaves if isinstance(y, ShardedTensor)]:
        raise ShardingError(
            "a checkpoint is given tensors on a mesh inside of plain values",
            placed,
            rule="modules, optimizers, and tensors of their own name are written in shards, other values whole",
            remedy='give each a name: save(step, {"cache_k": k})',
        )
    return tensors, values


def _extract_tensors(at: str, x: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns a state with paths in the place of tensors; adds the tensors to `tensors`."""
    if isinstance(x, Tensor):
        if at in tensors:
            raise ShardingError(
                f"two tensors of a checkpoint are called {at}",
                [f"{_describe(kind_of(tensors[at]))} and {_describe(kind_of(x))}"],
                rule="a tensor's name is the keys that lead to it, with dots between",
                remedy="give one of the keys in the state_dict another name",
            )
        tensors[at] = x.detach()
        return {_PATH: at}
    if isinstance(x, Mapping):
        return {k: _extract_tensors(f"{at}.{k}", y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(_extract_tensors(f"{at}.{i}", y, tensors) for i, y in enumerate(x))
    return x


def insert_tensors(x: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverts `_extract_tensors`."""
    if isinstance(x, dict):
        if x.keys() == {_PATH}:
            return tensors[x[_PATH]]
        return {k: insert_tensors(y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(insert_tensors(y, tensors) for y in x)
    return x


_PATH = "<tensor>"


def is_value(x: Any) -> bool:
    return not hasattr(x, "load_state_dict") and not isinstance(x, Tensor)


def kind_of(x: Tensor) -> Kind:
    return [list(x.shape), str(x.dtype).removeprefix("torch.")]


def describe_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "entries": sorted(state),
        "tensors": {k: kind_of(x) for k, x in tensors.items()},
        "optimizers": {k: _settings(x, state) for k, x in state.items() if isinstance(x, torch.optim.Optimizer)},
    }


def _settings(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's class, settings, and parameters by group: names in the state's modules, and shapes."""
    modules = {k: x for k, x in state.items() if isinstance(x, nn.Module)}
    names = {id(p): f"{k}.{name}" for k, x in modules.items() for name, p in x.named_parameters()}
    groups = [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    keys = {key for group in optimizer.param_groups for key in group}
    return {"class": type(optimizer).__name__, "settings": sorted(keys - _ADDED), "groups": groups}


_ADDED = {"params", "initial_lr", "param_names"}  # keys of groups that are no settings


def _compare_settings(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns the differences between an optimizer's parameters and settings and the saved ones."""
    if saved["class"] != current["class"] and saved["settings"] != current["settings"]:
        return [f"{name} is {saved['class']} in it, and {current['class']} here"]
    before, now = ([len(group) for group in x["groups"]] for x in (saved, current))
    if before != now:
        return [f"{name} has groups of {_join_sizes(before)} parameters in it, and of {_join_sizes(now)} here"]
    pairs = zip(*([p for group in x["groups"] for p in group] for x in (saved, current)), strict=True)
    return [
        f"{name}: parameter {i} is {first[0] or 'one'} of {first[1]} in it, and {then[0] or 'one'} of {then[1]} here"
        for i, (first, then) in enumerate(pairs)
        if first[1] != then[1] or (first[0] and then[0] and first[0] != then[0])
    ]


def _join_sizes(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def destinations(
    state: Mapping[str, Any], facts: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Returns new tensors to load into, by path: like those of the state, and the moments of a fresh optimizer.

    Raises `ShardingError` with all offenders for a checkpoint of another state.
    """
    saved: dict[str, Kind] = facts["tensors"]
    current, _ = split_state(state)
    wrong = [f"{name} is not in it" for name in state if name not in facts["entries"]]
    wrong += [f"{name} is in it, and nothing takes it" for name in facts["entries"] if name not in state]
    for name, x in state.items():
        if isinstance(x, torch.optim.Optimizer) and name in values:
            if name in facts.get("optimizers", {}):
                wrong += _compare_settings(name, facts["optimizers"][name], _settings(x, state))
            moments = _create_moments(name, x, saved)  # other state of the optimizer is dropped, as in torch
            current = {k: y for k, y in current.items() if k in saved or not k.startswith(f"{name}.state.")} | {
                k: y for k, y in moments.items() if k not in current
            }
    in_entries = {k: x for k, x in current.items() if k.partition(".")[0] in facts["entries"]}
    wrong += [f"{k} of {_describe(kind_of(x))} is not in it" for k, x in in_entries.items() if k not in saved]
    wrong += [
        f"{k} of {_describe(kind)} is in it, and nothing takes it"
        for k, kind in saved.items()
        if k not in current and k.partition(".")[0] in state
    ]
    wrong += [
        f"{k} is {_describe(saved[k])} in it, and {_describe(kind_of(x))} here"
        for k, x in in_entries.items()
        if k in saved and saved[k] != kind_of(x)
    ]
    if wrong:
        raise ShardingError(
            f"the checkpoint {path} is one of something else",
            wrong,
            rule="what is loaded has the names, shapes and dtypes of what was saved",
            remedy="load into the model and the optimizer that the run had, on any mesh",
        )
    return {k: _allocate_like(current[k]) for k in saved}


def _allocate_like(x: Tensor) -> Tensor:
    with x.mesh if isinstance(x, ShardedTensor) else nullcontext():
        return torch.empty_like(x.detach(), memory_format=torch.preserve_format)


def _create_moments(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Kind]) -> dict[str, Tensor]:
    """Returns empty tensors for an optimizer's state: placed like the moments of its parameter, or plain."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments: dict[str, Tensor] = {}
    for at, (shape, dtype_name) in saved.items():
        if not at.startswith(f"{name}.state."):
            continue
        i = int(at.removeprefix(f"{name}.state.").partition(".")[0])
        if i < len(params):
            p, dtype = params[i], getattr(torch, dtype_name)
            moments[at] = torch.empty(shape, dtype=dtype)
            if isinstance(p, ShardedTensor) and list(p.shape) == shape:
                with p.mesh:
                    like = torch.empty_like(p.detach(), dtype=dtype)
                    spec = getattr(p, "moments_at", None)
                    moments[at] = like if spec is None else shard(like, spec)
    return moments


def _describe(kind: Kind) -> str:
    return f"{kind[1]}{kind[0]}"
