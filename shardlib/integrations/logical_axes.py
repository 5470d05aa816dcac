"""Maps logical names of dims to mesh axes by the rules of Flax and MaxText."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.torch_private import pytree
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.sharding.partition_spec import is_partition_spec
from shardlib.sharding.spec import P

Rules = Sequence[tuple[str, str | Sequence[str] | None]]


def logical_to_mesh(tree: Any, rules: Rules, mesh: Mesh | None = None) -> Any:
    """Converts a pytree of PartitionSpecs with logical names to one of specs with mesh axes, as flax does.

    Rules are pairs of a logical name and a mesh axis, several, or None, in the order of precedence. A name may have
    several rules: the first one holds whose axes no other dim of the tensor has. A name without such a rule stays
    whole. An entry that is a tuple names mesh axes and stays; no rule adds these axes to another dim. With `mesh`, axes
    that it does not have are left out of the rules; MaxText's rules name some twenty.

    Leaves may be PartitionSpecs of JAX or `P`s; None stays None. Raises `ShardingError` for rules that are no pairs,
    for other leaves, and for a spec that names a dim twice.

    Source: `flax.linen.logical_to_mesh`.

    Example:
        >>> rules = [("batch", "data"), ("embed", "data"), ("embed", None), ("mlp", "tensor")]
        >>> logical_to_mesh({"x": P("batch", "embed"), "up": P("embed", "mlp")}, rules)
        {'x': P('data', None), 'up': P('data', 'tensor')}
        >>> logical_to_mesh(P("batch"), [("batch", ("data", "fsdp"))], Mesh.abstract(fsdp=8))
        P('fsdp')
    """
    pairs = _read_rules(rules, mesh)
    leaves, structure = pytree.tree_flatten_with_path(tree, is_leaf=_is_spec)
    wrong = [f"tree{pytree.keystr(path)}: {x!r}" for path, x in leaves if x is not None and not _is_spec(x)]
    if wrong:
        raise ShardingError(
            "these leaves are no specs", wrong,
            rule="a leaf is a PartitionSpec, a P or None; a plain tuple or list of names is a container",
            remedy='write P("embed", "mlp") for ("embed", "mlp")',
        )  # fmt: skip
    return structure.unflatten(leaf if leaf is None else _resolve(leaf, pairs) for _, leaf in leaves)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P) or is_partition_spec(x)


def _read_rules(rules: Rules, mesh: Mesh | None) -> list[tuple[str, tuple[str, ...]]]:
    items = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    wrong = [
        f"{rule!r}"
        for rule in items
        if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str))
        or not (rule[1] is None or isinstance(rule[1], str | Iterable))
    ]
    if wrong:
        raise ShardingError(
            "these are no rules",
            wrong,
            rule="a rule is a pair of a logical name and mesh axes, or None",
            remedy='write ("embed", "tensor"), ("batch", ("data", "fsdp")) or ("norm", None)',
        )
    pairs = [(name, (to,) if isinstance(to, str) else tuple(to or ())) for name, to in items]
    return [(name, tuple(a for a in axes if mesh is None or a in mesh.axes)) for name, axes in pairs]


def _resolve(spec: Any, rules: Sequence[tuple[str, tuple[str, ...]]]) -> P:
    names = list(spec)
    texts = [name for name in names if isinstance(name, str)]
    if twice := sorted({name for name in texts if texts.count(name) > 1}):
        raise ShardingError(
            f"{spec!r} names a dim twice",
            twice,
            rule="the dims of a tensor have distinct logical names",
            remedy="another name for one of the dims, with a rule of its own; None leaves it whole",
        )
    axes: dict[str, tuple[str, ...]] = {}
    used = {axis for entry in names if isinstance(entry, tuple) for axis in entry}
    for name, to in rules:
        if name in texts and name not in axes and used.isdisjoint(to):
            axes[name] = to
            used.update(to)
    return P(*(axes.get(name, ()) if isinstance(name, str) else name for name in names))
