"""Makes inputs of the tensors that a traced function reads from modules, closures and objects.

The tracer knows such a tensor by itself, so code that holds it need not change. An op computes with its stand-in, a
fake: `_StandIns` replaces plain tensors, `run_on_stand_ins` ShardedTensors.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from shardlib.core.errors import ShardingError
from shardlib.core.torch_internals.fake_tensors import make_fake
from shardlib.core.torch_internals.torch_private import (
    SLOT,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    set_slot,
)
from shardlib.core.tree_paths import flatten_with_path, walk_tree
from shardlib.frontend.guards.children import children, instance_dict
from shardlib.frontend.guards.place_names import format_place
from shardlib.frontend.guards.state_walk import StateWalk
from shardlib.frontend.results import ObjectResult
from shardlib.frontend.retarget_device import with_device
from shardlib.frontend.side_effects.leaks import holds_trace
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.tensor.hooks import tensor_hooks
from shardlib.tensor.sharded_tensor import ShardedTensor, typeof

_current: ContextVar[LiftedInputs | None] = ContextVar("shardlib_lifted", default=None)


class LiftedInputs:
    """The tensors of a call's state while its function is traced, each with its node and its stand-in."""

    def __init__(self, state: StateWalk, mode: FakeTensorMode, watch: MutationTracker | None = None) -> None:
        self.state, self.mode, self.watch = state, mode, watch
        self.nodes: list[fx.Node] = []
        self.refusal: ShardingError | None = None  # an error that the function may have caught
        self.is_over = False
        self.not_meta: torch.device | None = None  # device of the stand-ins for tensors on meta
        self._stand_ins: dict[int, Tensor] = {}
        self._exit = ExitStack()

    def __enter__(self) -> LiftedInputs:
        token = _current.set(self)
        self._exit.callback(lambda: _current.reset(token))
        self._exit.callback(self._forget)
        if any(x.is_meta or not isinstance(x, ShardedTensor) for x in self.state.tensors):
            self._exit.enter_context(_StandIns(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _forget(self) -> None:
        self.is_over = True
        for x in self.state.tensors:  # the tracer notes the last write to a tensor on it
            x.__dict__.pop("proxy", None)

    def enter(self, tracer: Any, device: torch.device | str | None) -> None:
        """Makes an input of every tensor."""
        for x in self.state.tensors:
            stand_in = Placeholder(tracer, self.mode, x, device)
            self.nodes.append(stand_in.node)
            if x.is_meta:
                self.not_meta = stand_in.value.device
            with disable_proxy_modes_tracing():
                self._stand_ins[id(x)] = stand_in.value
                if not isinstance(x, ShardedTensor):
                    set_slot(x, tracer, SLOT(stand_in.proxy, None))
                    # A whole tensor without a gradient decides no layout.
                    stand_in.node.meta["constant"] = not x.requires_grad

    def seen(self, x: Any) -> Any:
        """Returns the stand-in of a ShardedTensor; the tracer knows other tensors themselves."""
        if not isinstance(x, ShardedTensor):
            return x
        if (stand_in := self._stand_ins.get(id(x))) is not None:
            return stand_in
        raise ShardingError(
            f"a traced function closes over {typeof(x)}",
            ["it is neither an argument nor found in the function's variables, modules or objects"],
            rule="tensors that live on a mesh enter a program as arguments, or with what the function closes over",
            remedy="make it an argument of the function",
        )

    def stand_in(self, x: Tensor) -> Tensor:
        """Returns the tensor that ops of the trace compute with in place of another."""
        return self._stand_ins.get(id(x), x)

    @staticmethod
    def current() -> LiftedInputs | None:
        """Returns the instance of the running trace; None outside a trace."""
        return _current.get()

    def stand_ins(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the tensors, each with its stand-in."""
        return ((x, self._stand_ins[id(x)]) for x in self.state.tensors)

    def is_own(self, x: Tensor) -> bool:
        """Returns whether a tensor is a value of this trace, or an input of it."""
        return isinstance(x, FakeTensor | ShardedTensor) or id(x) in self._stand_ins

    def returned(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves of a result as the trace knows them, with their history; equal leaves stay one object."""
        known_as: dict[int, Any] = {}
        for x in leaves:
            if id(x) not in known_as:
                has_gradient = isinstance(x, ShardedTensor) and x.requires_grad and id(x) in self._stand_ins
                with torch.enable_grad():
                    known_as[id(x)] = x.view_as(x) if has_gradient else self.seen(x)
        return [known_as[id(x)] for x in leaves]

    def prune(self, gm: fx.GraphModule) -> list[int]:
        """Drops the inputs that no op reads; returns the positions of the others."""
        for node in self.nodes:
            if not node.users:
                gm.graph.erase_node(node)
        alive = set(gm.graph.nodes)
        return [i for i, node in enumerate(self.nodes) if node in alive]


class _StandIns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces tensors by their stand-ins, between the tracer and torch's fake tensors.

    An op on the device of a tensor on meta makes its result on the device of the stand-in.
    """

    supports_higher_order_operators = True

    def __init__(self, lifted: LiftedInputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lifted = lifted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.lifted.not_meta is not None:
            args, kwargs = with_device(func, args, kwargs or {}, self.lifted.not_meta, from_meta=True)
        return func(*map(self._replace, args), **{k: self._replace(x) for k, x in (kwargs or {}).items()})

    def _replace(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.lifted.stand_in(x)
        return [self._replace(y) for y in x] if type(x) is list else x


class Placeholder:
    """A new input of the graph that is being traced: its `proxy`, its `node`, and the `value` in the trace.

    With `snapshot`, `meta["val"]` is another tensor of the same form, so the node does not keep the value alive.
    """

    def __init__(
        self, tracer: Any, mode: Any, x: Tensor, device: torch.device | str | None = None, *, snapshot: bool = False
    ) -> None:
        with disable_proxy_modes_tracing(), torch.DisableTorchFunction():
            where = device or ("cpu" if x.is_meta else x.device)
            form = tuple(x.shape), x.stride(), x.dtype, torch.device(where)
            self.value = make_fake(mode, *form)
            self.proxy = tracer.create_proxy("placeholder", "input", (), {})
            self.node: fx.Node = self.proxy.node
            self.node.meta["val"] = make_fake(mode, *form) if snapshot else self.value
            set_slot(self.value, tracer, SLOT(self.proxy, None))


def run_on_stand_ins(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an op of a traced function on the stand-ins of its ShardedTensors."""
    lifted = _current.get() or LiftedInputs(StateWalk(), FakeTensorMode())
    args, kwargs = pytree.tree_map_only(ShardedTensor, lifted.seen, (args, kwargs))
    return op(*args, **kwargs)


@dataclass(frozen=True)
class Contents:
    """The leaves of a call's arguments, and the attributes of the objects that hold them, before the function runs."""

    leaves: list[Any]
    tree: Any
    objects: list[tuple[tuple[Any, ...], Any, dict[str, Any]]]

    @staticmethod
    def read(arguments: Any) -> Contents:
        nodes = ((path, x, instance_dict(x)) for path, x, is_leaf in walk_tree(arguments) if not is_leaf)
        objects = [(path, x, dict(own)) for path, x, own in nodes if isinstance(own, dict)]
        return Contents(*pytree.tree_flatten(arguments), objects)


def refuse_changed_arguments(name: str, before: Contents, now: Any) -> None:
    """Refuses new values in containers and objects among the arguments: the caller's own would not change."""
    leaves, tree = flatten_with_path(now)
    old_ids = {id(x) for x in before.leaves}
    changed = tree != before.tree or any(x is not y for (_, x), y in zip(leaves, before.leaves, strict=True))
    new = [pytree.keystr(path[1:]) for path, x in leaves if changed and id(x) not in old_ids]
    attributes_set = [
        f"{pytree.keystr(path[1:])}.{key}"
        for path, x, old in before.objects
        for key, value in instance_dict(x).items()
        if old.get(key, before) is not value
    ]
    if not changed and not attributes_set:
        return
    paths = dict.fromkeys((*new, *attributes_set))
    raise ShardingError(
        f"{name} changes a container among its arguments",
        [f"argument {path} is another value now" for path in paths] or ["it has other items now"],
        rule="a traced function gets the containers of a call as copies: only what it writes to tensors comes back",
        remedy="return the new value, or write to the tensor in place: state['m'].copy_(new); or jit the function that "
        "makes the container",
    )


def flatten_result(result: Any, existing: Mapping[int, Any]) -> tuple[list[tuple[Any, Any]], Any, list[str]]:
    """Flattens a result into leaves, each with its path, and a tree; objects that hold tensors are taken apart.

    Objects from before the call are `existing`, by id. The strings describe the objects that cannot be taken apart.
    """
    leaves, tree = flatten_with_path(result)
    parts, opaque = list[Any](), list[str]()
    for path, x in leaves:
        is_new = not isinstance(x, Tensor) and existing.get(id(x)) is not x
        holding = [format_place(name, ()) or key for key, name, y in children(x) if holds_trace(y)] if is_new else []
        is_lazy = is_new and isinstance(x, _LAZY)
        carried = ObjectResult.take_apart(x, existing) if holding and not is_lazy else None
        if carried is None and (holding or is_lazy):
            tensors = f", with tensors in {', '.join(holding)}" if holding else ""
            opaque.append(f"result{pytree.keystr(path)} is a {type(x).__name__}{tensors}")
        parts.append(carried or x)
    return *flatten_with_path(pytree.tree_unflatten(parts, tree)), opaque


def refuse_opaque(opaque: Sequence[str]) -> None:
    """Refuses results that would carry values of the trace out, where no call puts the real ones in their place."""
    if opaque:
        raise ShardingError(
            "the traced function returns objects that jit cannot look into",
            opaque,
            rule="a result is a pytree, or an object that pickle can take apart",
            remedy="move a class out of the function that defines it; return list(...) of a generator",
        )


_LAZY = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, map, filter, zip)


tensor_hooks.trace_op = run_on_stand_ins
