"""Generates Python for the leaves and results of a call, which is faster than loops over them.

The functions are generated once per program, and run in each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardlib.core.torch_internals.torch_private import pytree
from shardlib.distributed.provenance import checksum_sample, hash_origin
from shardlib.sharding.layout import Layout
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.host_offload import move_to_host
from shardlib.tensor.local_shards import place_scalar, split_into_shards
from shardlib.tensor.rank_checks import read_check_policy
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form

Pieces = tuple[torch.Tensor, ...]


def gatherer(
    inputs: Sequence[tuple[int, Layout]], mesh: Mesh, away: Sequence[bool] = ()
) -> Callable[[list[Any]], list[Pieces]]:
    """Returns a function from the leaves of a call to the shards of each input (leaf, layout); some are `away`."""

    def cut(x: torch.Tensor, i: int) -> Pieces:
        return tuple(split_into_shards(place_scalar(x.detach(), mesh), inputs[i][1], mesh))

    parts = [f"x._locals if type(x := leaves[{leaf}]) is kind else cut(x, {i})" for i, (leaf, _) in enumerate(inputs)]
    for i in itertools.compress(range(len(away)), away):
        parts[i] = f"sent(leaves[{inputs[i][0]}])"
    return _function(f"lambda leaves: [{', '.join(parts)}]", {"kind": ShardedTensor, "cut": cut, "sent": move_to_host})


def origins(program: int, tensors: Sequence[int], numbers: Sequence[int]) -> Callable[[list[Any]], int]:
    """Returns a function from the leaves of a call on ranks to the origin of its results."""
    parts = [f"(x._origin if type(x := leaves[{leaf}]) is kind else sample(x))" for leaf in tensors]
    parts += [f"((x := leaves[{leaf}]) == x and x)" for leaf in numbers]  # a NaN has another hash each time
    names = {
        "kind": ShardedTensor,
        "program": program,
        "origin_of": hash_origin,
        "sample": checksum_sample if read_check_policy() != "off" else _unknown,
    }
    return _function(f"lambda leaves: origin_of((program, {', '.join(parts)}))", names)


def _unknown(x: Any) -> int:
    return 0


def wrapper(forms: Sequence[Form | None]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function from the shards of outputs, and possibly more, to ShardedTensors."""
    parts = [f"raw[{i}]" if form is None else f"wrap(form_{i}, raw[{i}])" for i, form in enumerate(forms)]
    names = {f"form_{i}": form for i, form in enumerate(forms)}
    return _function(f"lambda raw: [{', '.join(parts)}]", {"wrap": wrap, **names})


def builder(tree: pytree.TreeSpec, same: Mapping[int, int]) -> Callable[[list[Any]], Any]:
    """Returns `tree_unflatten` for this tree, generated for plain containers; leaf `i` is leaf `same[i]`."""
    names: dict[str, Any] = {}
    places = [same.get(i, i) for i in range(tree.num_leaves)]
    leaves = iter(places)

    def write(node: pytree.TreeSpec) -> str:
        if node.is_leaf():
            return f"x[{next(leaves)}]"
        texts = [write(child) for child in node.children()]
        if node.type is dict:
            keys = [f"k{len(names) + i}" for i in range(len(texts))]
            names.update(zip(keys, node.context, strict=True))
            return f"{{{', '.join(map('{}: {}'.format, keys, texts))}}}"
        inner = "".join(f"{text}, " for text in texts)
        return f"({inner})" if node.type is tuple else f"[{inner}]"

    if not _is_plain(tree):
        return lambda leaves: pytree.tree_unflatten([leaves[i] for i in places], tree)
    return _function(f"lambda x: {write(tree)}", names)


def _is_plain(tree: pytree.TreeSpec) -> bool:
    """True if all nodes are dicts, tuples and lists."""
    return tree.is_leaf() or (tree.type in (dict, tuple, list) and all(map(_is_plain, tree.children())))


def _function(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(text, names)
    return function
