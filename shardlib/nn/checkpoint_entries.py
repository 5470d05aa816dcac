"""What a checkpoint holds: the tensors of a state by path (`opt.state.0.exp_avg`), other values, facts about both.

What is loaded is compared with what is there first, as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.core.errors import ShardingError
from shardlib.core.torch_private import pytree
from shardlib.jit.shard import shard
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof

Kind = list[Any]  # [shape, dtype], as JSON has it


def taken(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state by path (`optimizer.state.0.exp_avg`), and what else is in it, by entry."""
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
        held = x.state_dict() if hasattr(x, "state_dict") else x
        values[name] = held if is_value(x) else _emptied(name, held, tensors)
    cut = [f"{name} holds {typeof(y)}" for name, x in values.items() for y in _placed(x)]
    if cut:
        raise ShardingError(
            "a checkpoint is given tensors on a mesh inside of plain values",
            cut,
            rule="modules, optimizers, and tensors of their own name are written in pieces; other values as they are",
            remedy='give each a name: save(step, {"cache_k": k})',
        )
    return tensors, values


def _placed(x: Any) -> list[ShardedTensor]:
    return [y for y in pytree.tree_leaves(x) if isinstance(y, ShardedTensor)]


def _emptied(at: str, x: Any, tensors: dict[str, Tensor]) -> Any:
    """The same, in which paths stand for the tensors."""
    if isinstance(x, Tensor):
        if at in tensors:
            raise ShardingError(
                f"two tensors of a checkpoint are called {at}",
                [f"{_said(kind_of(tensors[at]))} and {_said(kind_of(x))}"],
                rule="a tensor's name is the keys that lead to it, with dots between",
                remedy="give one of the keys in the state_dict another name",
            )
        tensors[at] = x.detach()
        return {_PATH: at}
    if isinstance(x, Mapping):
        return {k: _emptied(f"{at}.{k}", y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple) and type(x) in (list, tuple):
        return type(x)(_emptied(f"{at}.{i}", y, tensors) for i, y in enumerate(x))
    return x


def filled(x: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(x, dict):
        if x.keys() == {_PATH}:
            return tensors[x[_PATH]]
        return {k: filled(y, tensors) for k, y in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(filled(y, tensors) for y in x)
    return x


_PATH = "<tensor>"


def is_value(x: Any) -> bool:
    return not hasattr(x, "load_state_dict") and not isinstance(x, Tensor)


def kind_of(x: Tensor) -> Kind:
    return [list(x.shape), str(x.dtype).removeprefix("torch.")]


def facts_of(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a checkpoint says of itself, as JSON has it."""
    return {
        "entries": sorted(state),
        "tensors": {k: kind_of(x) for k, x in tensors.items()},
        "optimizers": {k: _settings(x, state) for k, x in state.items() if isinstance(x, torch.optim.Optimizer)},
    }


def _settings(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Which optimizer it is, and of which parameters, group by group: names in the state's modules, and shapes."""
    modules = {k: x for k, x in state.items() if isinstance(x, nn.Module)}
    names = {id(p): f"{k}.{name}" for k, x in modules.items() for name, p in x.named_parameters()}
    groups = [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    keys = {key for group in optimizer.param_groups for key in group}
    return {"class": type(optimizer).__name__, "settings": sorted(keys - _ADDED), "groups": groups}


_ADDED = {"params", "initial_lr", "param_names"}  # in groups; the latter two by whoever else uses them


def _other_settings(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What the parameters and settings of an optimizer differ in from those that were saved."""
    if saved["class"] != here["class"] and saved["settings"] != here["settings"]:
        return [f"{name} is {saved['class']} in it, and {here['class']} here"]
    before, now = ([len(group) for group in x["groups"]] for x in (saved, here))
    if before != now:
        return [f"{name} has groups of {_counted(before)} parameters in it, and of {_counted(now)} here"]
    pairs = zip(*([p for group in x["groups"] for p in group] for x in (saved, here)), strict=True)
    return [
        f"{name}: parameter {i} is {first[0] or 'one'} of {first[1]} in it, and {then[0] or 'one'} of {then[1]} here"
        for i, (first, then) in enumerate(pairs)
        if first[1] != then[1] or (first[0] and then[0] and first[0] != then[0])
    ]


def _counted(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes))


def destinations(
    state: Mapping[str, Any], facts: Mapping[str, Any], values: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Tensors to load into, by path: as those of the state, and what a fresh optimizer has yet to make.

    None of them is one of the state. Raises `ShardingError`, with all offenders, for a checkpoint of something else.
    """
    saved: dict[str, Kind] = facts["tensors"]
    here, _ = taken(state)
    wrong = [f"{name} is not in it" for name in state if name not in facts["entries"]]
    wrong += [f"{name} is in it, and nothing takes it" for name in facts["entries"] if name not in state]
    for name, x in state.items():
        if isinstance(x, torch.optim.Optimizer) and name in values:
            if name in facts.get("optimizers", {}):
                wrong += _other_settings(name, facts["optimizers"][name], _settings(x, state))
            made = _moments(name, x, saved)  # what it holds beyond is forgotten, as torch does
            here = {k: y for k, y in here.items() if k in saved or not k.startswith(f"{name}.state.")} | {
                k: y for k, y in made.items() if k not in here
            }
    known = {k: x for k, x in here.items() if k.partition(".")[0] in facts["entries"]}
    wrong += [f"{k} of {_said(kind_of(x))} is not in it" for k, x in known.items() if k not in saved]
    wrong += [
        f"{k} of {_said(kind)} is in it, and nothing takes it"
        for k, kind in saved.items()
        if k not in here and k.partition(".")[0] in state
    ]
    wrong += [
        f"{k} is {_said(saved[k])} in it, and {_said(kind_of(x))} here"
        for k, x in known.items()
        if k in saved and saved[k] != kind_of(x)
    ]
    if wrong:
        raise ShardingError(
            f"the checkpoint {path} is one of something else",
            wrong,
            rule="what is loaded has the names, shapes and dtypes of what was saved",
            remedy="load into the model and the optimizer that the run had, on any mesh",
        )
    return {k: _beside(here[k]) for k in saved}


def _beside(x: Tensor) -> Tensor:
    """Memory for a tensor like this one."""
    with x.mesh if isinstance(x, ShardedTensor) else nullcontext():
        return torch.empty_like(x.detach(), memory_format=torch.preserve_format)


def _moments(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Kind]) -> dict[str, Tensor]:
    """What a fresh optimizer is to hold: as large as a parameter, and where its moments live, or whole and plain."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    made: dict[str, Tensor] = {}
    for at, (shape, said) in saved.items():
        if not at.startswith(f"{name}.state."):
            continue
        i = int(at.removeprefix(f"{name}.state.").partition(".")[0])
        if i < len(params):
            p, dtype = params[i], getattr(torch, said)
            made[at] = torch.empty(shape, dtype=dtype)
            if isinstance(p, ShardedTensor) and list(p.shape) == shape:
                with p.mesh:
                    like = torch.empty_like(p.detach(), dtype=dtype)
                    home = getattr(p, "moments_at", None)
                    made[at] = like if home is None else shard(like, home)
    return made


def _said(kind: Kind) -> str:
    return f"{kind[1]}{kind[0]}"
