"""Runs a module's forward on resharded or cast copies of its arguments, and writes changes back to the originals.

Containers are not copied. While the forward runs, the caller's own lists, dicts and objects hold the copies, so an item
that the forward appends stays there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.core.context import is_tracing
from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.strided_only import as_bytes
from shardlib.core.torch_internals.torch_private import (
    MODULE_DICTS,
    innermost,
    is_wrapped,
    memory_of,
    node_type,
    pytree,
    version_of,
)
from shardlib.core.torch_internals.traced_nodes import last_node, node_of
from shardlib.core.tree_paths import flatten_with_path
from shardlib.frontend.guards.children import attributes, items
from shardlib.frontend.side_effects.containers import put
from shardlib.frontend.side_effects.graph_writes import owner_of, values_read_since, written_since
from shardlib.tensor.sharded_tensor import ShardedTensor, user_attributes


@contextmanager
def counting_writes() -> Iterator[None]:
    """Creates tensors that count writes, which tensors of inference mode do not."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def run_on_copies(
    name: str,
    module: nn.Module,
    run: Callable[..., Any],
    call: Any,
    copy: Callable[[Tensor], Tensor | None],
    reachable: Callable[[], Iterable[Tensor]] = tuple,
) -> Any:
    """Returns `run(*args, **kwargs)` of the call `(args, kwargs)` with copies of tensors; repeats writes to them.

    `copy` returns a tensor's copy, or None if the tensor stays. One tensor has one copy, with the same attributes.
    An argument that `run` returns, or sets as an attribute of the module, is the caller's own. `reachable` returns the
    tensors that the code reaches beside its arguments.

    Raises `ShardingError` for a write that the code or another argument would see by another name, for one that changes
    a shape, and for an argument that begins to require gradients.
    """
    tensors = {id(x): (path, x) for path, x in flatten_with_path(call)[0] if isinstance(x, Tensor)}
    copies = [_Copy(path, x, y) for path, x in tensors.values() if (y := copy(x)) is not None and y is not x]
    if not copies:
        args, kwargs = call
        return run(*args, **kwargs)
    start, held = last_node(), list(_attribute_tensors(module))
    entry = _Exchange({id(c.original): c.copy for c in copies})
    returns = False
    try:
        args, kwargs = entry(call)
        out = run(*args, **kwargs)
        returns = True
    finally:
        old = {id(c.copy): c.original for c in copies} | {id(new): old for old, new, _ in entry.rebuilt}
        restore = _Exchange(old)
        for container in (*entry.containers, *map(vars, module.modules())):
            restore(container)
        nodes = written_since(start)
        written = [c for c in copies if c.is_written(nodes)]
        if not returns:  # plain code would have written before it raised
            for c in written:
                if not c.has_new_shape():
                    c.write_back()
    entry.refuse_changes(name)
    if written:
        arguments = [x for _, x in tensors.values()]
        now_held = {id(x) for x in _attribute_tensors(module)}
        others = () if is_tracing() else (*held, *(x for x in reachable() if id(x) not in now_held))
        kept = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor) and id(x) not in tensors]
        _refuse_aliases(name, written, arguments, others, kept, values_read_since(start))
    _refuse_metadata_changes(name, written, copies)
    for c in copies:
        c.return_attributes()
    for c in written:
        c.write_back()
    return restore(out)


def _attribute_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors among the attributes of a module and of the modules in it, and in containers there."""
    for inner in module.modules():
        values = {key: value for key, value in vars(inner).items() if key not in MODULE_DICTS}
        yield from (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))


@dataclass
class _Copy:
    """A tensor among the arguments and its copy."""

    path: tuple[Any, ...]
    original: Tensor
    copy: Tensor

    def __post_init__(self) -> None:
        self.attributes = user_attributes(self.original)
        self.copy.__dict__.update(self.attributes)
        self.before = _state(self.original), _state(self.copy)
        self.node = node_of(self.copy)
        self.shards = self.copy._locals if isinstance(self.copy, ShardedTensor) else None

    def __str__(self) -> str:
        group, *path = self.path
        return f"argument {('args', 'kwargs')[group.idx]}{pytree.keystr(tuple(path))} of {list(self.original.shape)}"

    def begins_to_require_grad(self) -> bool:
        return self.copy.requires_grad and self.copy.is_leaf and not self.original.requires_grad

    def has_new_shape(self) -> bool:
        return _state(self.copy)[1:] != self.before[1][1:]

    def is_written(self, written_nodes: Collection[Any]) -> bool:
        """True if the forward wrote to the copy, also through its `data`, whose writes torch does not count.

        `written_nodes` are the values that the running trace wrote to.
        """
        new = self.copy
        if _state(new) != self.before[1]:
            return True
        if isinstance(new, ShardedTensor):
            return new._locals is not self.shards
        if is_tracing() or new.is_meta or is_wrapped(new):
            return self.node in written_nodes
        return not torch.equal(as_bytes(new), as_bytes(self.original.detach().to(new.dtype)))

    def is_stale(self) -> bool:
        """True if the original was written to by another name while the forward read the copy."""
        return _state(self.original) != self.before[0]

    def return_attributes(self) -> None:
        for key, value in user_attributes(self.copy).items():
            if value is not self.attributes.get(key, self):
                setattr(self.original, key, value)

    def write_back(self) -> None:
        new = self.copy
        if isinstance(new, ShardedTensor) and not isinstance(self.original, ShardedTensor):
            new = new.full_tensor()
        if new.dtype != self.original.dtype and not new.requires_grad:  # unchanged elements keep all digits
            before = self.original.to(new.dtype)
            new = torch.where((new == before) | (new.isnan() & before.isnan()), self.original, new)
        self.original.copy_(new)


def _state(x: Tensor) -> tuple[Any, ...]:
    """Returns the number of writes to a tensor so far, its shape and its strides."""
    return None if x.is_inference() else version_of(x), x.shape, x.stride()


class _Exchange:
    """Replaces tensors in containers, in place; immutable containers are rebuilt."""

    def __init__(self, new: Mapping[int, Any]) -> None:
        self.new = dict(new)
        self.containers: list[Any] = []
        self.rebuilt: list[tuple[Any, Any, list[Any]]] = []

    def __call__(self, x: Any) -> Any:
        if id(x) in self.new:
            return self.new[id(x)]
        kind = node_type(x)
        if isinstance(x, Tensor) or kind not in pytree.SUPPORTED_NODES:
            return x
        self.containers.append(x)
        self.new[id(x)] = x
        self._replace_inside(x)
        node = pytree.SUPPORTED_NODES[kind]
        old, context = node.flatten_fn(x)
        children = [self(child) for child in old]
        if any(child is not before for child, before in zip(children, old, strict=True)):
            self.new[id(x)] = new = node.unflatten_fn(children, context)
            self.rebuilt.append((x, new, children))
        return self.new[id(x)]

    def _replace_inside(self, x: Any) -> None:
        for key, _, value in attributes(x) + (items(x) if isinstance(x, list | deque | dict) else []):
            if (new := self(value)) is not value:
                put(x, key, new)

    def refuse_changes(self, name: str) -> None:
        """Refuses changes of a rebuilt container, which the original would not show."""
        wrong = [
            f"a {type(old).__name__} has other items now"
            for old, new, children in self.rebuilt
            if [*map(id, pytree.SUPPORTED_NODES[node_type(new)].flatten_fn(new)[0])] != [*map(id, children)]
        ]
        if wrong:
            raise ShardingError(
                f"{name} changes a container among its arguments",
                wrong,
                rule="a container that keeps its items neither as items nor in attributes is handed over as a copy",
                remedy="return the new value, or write to the tensor in place",
            )


def _refuse_metadata_changes(name: str, written: Sequence[_Copy], copies: Sequence[_Copy]) -> None:
    """Refuses changes of an argument besides its values, and writes by another name."""
    changed = [f"{c} has the shape {list(c.copy.shape)} now" for c in written if c.has_new_shape()]
    changed += [f"{c} requires gradients now" for c in copies if c.begins_to_require_grad()]
    if changed:
        raise ShardingError(
            f"{name} changes an argument",
            changed,
            rule="a module's forward runs on resharded or cast copies of its arguments; only values are written back",
            remedy="make a new tensor with a name of its own: y = x.t(), y = x.detach().requires_grad_()",
        )
    if stale := [f"{c} is written to by another name" for c in copies if c.is_stale()]:
        raise _shared_memory_error(name, stale)


def _refuse_aliases(
    name: str,
    written: Sequence[_Copy],
    arguments: Sequence[Tensor],
    others: Sequence[Tensor],
    kept: Sequence[Tensor],
    read: Collection[Any],
) -> None:
    """Refuses writes that another name of the memory would show.

    `others` are tensors that the code reaches by other names, `kept` those that it put into the caller's containers,
    and `read` the values that the running trace read meanwhile.
    """
    wrong = []
    for c in written:
        if any(x is not c.original and _overlap(c.original, x) for x in arguments):
            wrong.append(f"{c} is written to, and shares memory with another argument")
        elif owner_of(c.original) in read or any(_overlap(c.original, x) for x in others):
            wrong.append(f"{c} is written to, and the module reaches it by another name")
        elif any(_overlap(c.copy, x) for x in kept):
            wrong.append(f"{c} is written to, and a container keeps a view of it")
    if wrong:
        raise _shared_memory_error(name, wrong)


def _shared_memory_error(name: str, wrong: Sequence[str]) -> ShardingError:
    return ShardingError(
        f"{name} writes to memory that one of its arguments shares",
        wrong,
        rule="a module's forward runs on resharded or cast copies of its arguments, which share no memory",
        remedy="pass a clone: m(x, x.view(-1).clone()); or write to a copy inside of the forward",
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, ShardedTensor) or isinstance(b, ShardedTensor):
        memory = a.__dict__.get("_memory")
        return memory is not None and memory is b.__dict__.get("_memory")
    a, b = innermost(a), innermost(b)
    if not a.numel() or not b.numel() or memory_of(a.untyped_storage()) != memory_of(b.untyped_storage()):
        return False
    (start, end), (other_start, other_end) = map(_bytes, (a, b))
    return start < other_end and other_start < end


def _bytes(x: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start * x.element_size(), (start + reach + 1) * x.element_size()
