"""`shard_map`: per-device code inside a global program, the manual escape hatch.

The body is traced inline: `to_local` in front of it, `from_local` behind it, local values in between. Its arithmetic runs
as it is written, on every device. In a program for one device the body runs on all devices at once, stacked (`stacked.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardlib import stacked
from shardlib.compile import broadcast_prefix, is_spec
from shardlib.errors import ShardingError
from shardlib.grammar import SpecDim
from shardlib.jit import jit
from shardlib.layout import Layout
from shardlib.manual import Body, Door, current_body, entered, from_local, to_local
from shardlib.mesh import Mesh, current_mesh
from shardlib.spec import P, Spec, resolve_many
from shardlib.state import is_single_device, is_tracing
from shardlib.tensor import ShardedTensor


def shard_map(
    fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """A function of global tensors, from `fn`, which says what each device does with its local ones.

    `in_specs` (one entry per argument) and `out_specs` are prefix pytrees of specs. An argument's spec says how it is cut:
    a dim cut over an axis of n devices is n times smaller inside. A result's spec says how the devices' results are put
    together; an axis that it does not name is one along which all devices return the same. Inside, devices talk through
    `psum`, `all_gather`, `ppermute` and the other collectives. Traced into the program inside a jitted function; outside
    it is a program of its own. Differentiable in both; the gradient of an argument is summed over the axes that do not
    cut it.

    Raises `ShardingError` where an axis does not divide a dim (all of them at once), for specs that are left out or open,
    outside any mesh and inside another body.

    Example:
        >>> import shardlib as sl
        >>> def matmul(x, w):  # x: [rows, k / 4], w: [k / 4, columns]
        ...     return sl.psum(x @ w, "tensor")
        >>> with sl.Mesh(tensor=4):
        ...     f = sl.shard_map(matmul, in_specs=("_ k@tensor", "k@tensor _"), out_specs="_ _")
        ...     print(f(torch.ones(2, 8), torch.ones(8, 3)).full_tensor())
        tensor([[8., 8., 8.],
                [8., 8., 8.]])
    """
    return ShardMapped(fn, in_specs, out_specs, mesh)


class ShardMapped:
    """What `shard_map` returns: call it with global tensors."""

    def __init__(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, mesh: Mesh | None) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.in_specs, self.out_specs, self.mesh = fn, in_specs, out_specs, mesh
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self._program = jit(functools.wraps(fn)(lambda *args: self._inline(*args)))
        self._pullback = jit(self._vjp)

    def __call__(self, *args: Any) -> Any:
        mesh = self._mesh(args)
        if is_tracing():
            return self._inline(*args)
        if is_single_device():
            return self._stacked(mesh, *args)
        leaves, tree = pytree.tree_flatten(args)
        with mesh:
            if not any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
                return self._program(*args)
            out_tree: list[pytree.TreeSpec] = []
            flat = _Program.apply(self, tree, out_tree, *leaves)  # type: ignore[no-untyped-call]
            return pytree.tree_unflatten(list(flat), out_tree[0])

    def _mesh(self, args: Sequence[Any]) -> Mesh:
        current = current_mesh()
        mesh = self.mesh or current
        if mesh is None:
            mesh = next((x.mesh for x in pytree.tree_leaves(args) if isinstance(x, ShardedTensor)), None)
        if mesh is None:
            raise ShardingError(
                f"shard_map({self.name}) is outside any mesh",
                rule="its specs name axes of the current mesh",
                remedy="call it inside `with Mesh(data=2, tensor=4):`, or give mesh=",
            )
        if is_tracing() and mesh != current:
            raise ShardingError(
                f"shard_map({self.name}) is on {mesh}, the program on {current}", rule="a program runs on one mesh"
            )
        if current_body() is not None:
            raise ShardingError(
                f"shard_map({self.name}) is inside the body of another shard_map",
                rule="in a body every mesh axis is already manual",
                remedy="call fn itself, on the local tensors",
            )
        return mesh

    # The three ways to run ------------------------------------------------------------------------------------------

    def _inline(self, *args: Any) -> Any:
        mesh = self._mesh(args)
        cuts = self._arguments(args, mesh)
        leaves, tree = pytree.tree_flatten(args)
        local = [x if cut is None else to_local(x, cut.door) for x, cut in zip(leaves, cuts, strict=True)]
        like = next((x for x, cut in zip(local, cuts, strict=True) if cut is not None), None)
        with entered(Body(mesh, like)):
            out = self.fn(*pytree.tree_unflatten(local, tree))
        return self._put_together(out, mesh, lambda x, cut: from_local(x, cut.door))

    def _stacked(self, mesh: Mesh, *args: Any) -> Any:
        cuts = self._arguments(args, mesh)
        leaves, tree = pytree.tree_flatten(args)
        pieces = [stacked.cut(x, cut.layout, mesh) for x, cut in zip(leaves, cuts, strict=True) if cut is not None]
        index = torch.arange(mesh.size, device=pieces[0].device if pieces else None)
        depth, others = stacked.depth(), []

        def body(rank: Tensor, *local: Tensor) -> list[Tensor]:
            feed = iter(local)
            own = [x if cut is None else next(feed) for x, cut in zip(leaves, cuts, strict=True)]
            with entered(Body(mesh, None, rank, depth)):
                flat, out_tree = pytree.tree_flatten(self.fn(*pytree.tree_unflatten(own, tree)))
            others.append((flat, out_tree))
            return [x for x in flat if isinstance(x, Tensor)]

        results = iter(torch.vmap(body, randomness="different")(index, *pieces))
        ((flat, out_tree),) = others
        # The results' shapes on one device are what the specs are read against.
        shaped = [_Stack(next(results)) if isinstance(x, Tensor) else x for x in flat]
        out = pytree.tree_unflatten(shaped, out_tree)
        return self._put_together(out, mesh, lambda x, cut: stacked.join(x.pieces, cut.layout, mesh))

    def _vjp(self, args: tuple[Any, ...], cotangents: dict[int, Tensor]) -> list[Tensor]:
        """The gradients of all floating-point leaves of `args`, for cotangents of the result's leaves."""
        leaves, tree = pytree.tree_flatten(args)
        wanted = [i for i, x in enumerate(leaves) if _differentiable(x)]

        def of(*some: Tensor) -> tuple[Tensor, ...]:
            full = list(leaves)
            for i, x in zip(wanted, some, strict=True):
                full[i] = x
            out = pytree.tree_leaves(self._inline(*pytree.tree_unflatten(full, tree)))
            return tuple(out[i] for i in cotangents)

        _, pull = torch.func.vjp(of, *(leaves[i] for i in wanted))
        return list(pull(tuple(cotangents.values())))

    # Specs ----------------------------------------------------------------------------------------------------------

    def _arguments(self, args: tuple[Any, ...], mesh: Mesh) -> list[_Cut | None]:
        what = f"shard_map({self.name}) in_specs"
        if isinstance(self.in_specs, tuple | list) and len(self.in_specs) != len(args):
            raise ShardingError(
                f"{what} has {len(self.in_specs)} entries, the call has {len(args)} arguments",
                rule="in_specs has one entry per argument",
            )
        return _cuts(args, self.in_specs, mesh, what, "args", lambda shape, ways: shape)

    def _put_together(self, out: Any, mesh: Mesh, door: Callable[[Any, _Cut], Tensor]) -> Any:
        def whole(shape: Sequence[int], ways: Sequence[Sequence[int]]) -> list[int]:
            return [size * math.prod(dim) for size, dim in zip(shape, ways, strict=True)]

        cuts = _cuts(out, self.out_specs, mesh, f"shard_map({self.name}) out_specs", "result", whole)
        leaves, tree = pytree.tree_flatten(out)
        joined = [x if cut is None else door(x, cut) for x, cut in zip(leaves, cuts, strict=True)]
        return pytree.tree_unflatten(joined, tree)


class _Stack:
    """A result of all devices, stacked, which shows the shape that one device sees."""

    def __init__(self, pieces: Tensor) -> None:
        self.pieces, self.shape = pieces, pieces.shape[1:]


class _Program(torch.autograd.Function):
    """A shard_map outside any trace, as one differentiable function of its leaves."""

    @staticmethod
    def forward(mapped: ShardMapped, tree: pytree.TreeSpec, out_tree: list[pytree.TreeSpec], *leaves: Any) -> Any:
        plain = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        flat, spec = pytree.tree_flatten(mapped._program(*pytree.tree_unflatten(plain, tree)))
        out_tree.append(spec)
        return tuple(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mapped, ctx.tree, _, *leaves = inputs
        where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        ctx.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.where = where
        ctx.save_for_backward(*(leaves[i] for i in where))
        ctx.mark_non_differentiable(*(x for x in output if isinstance(x, Tensor) and not _differentiable(x)))
        ctx.mesh = current_mesh()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = list(ctx.leaves)
        for i, x in zip(ctx.where, ctx.saved_tensors, strict=True):
            leaves[i] = x.detach()
        cotangents = {i: g for i, g in enumerate(grads) if isinstance(g, Tensor) and _differentiable(g)}
        with ctx.mesh:
            found = iter(ctx.mapped._pullback(pytree.tree_unflatten(leaves, ctx.tree), cotangents))
        return (None, None, None, *(next(found) if _differentiable(x) else None for x in leaves))


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


@dataclass(frozen=True)
class _Cut:
    """How one global tensor lies on the devices, for the compiler and in full."""

    door: Door
    layout: Layout


def _cuts(
    tree: Any,
    specs: Any,
    mesh: Mesh,
    what: str,
    root: str,
    whole: Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[int]],
) -> list[_Cut | None]:
    """A cut per leaf of `tree` (None for leaves that are no tensors); `whole` gives a leaf's global shape."""
    flat = broadcast_prefix(specs, tree, what)
    paths = [(root + pytree.keystr(path), x) for path, x in pytree.tree_flatten_with_path(tree)[0]]
    faults, found = [], []
    for (name, x), spec in zip(paths, flat, strict=True):
        if not isinstance(x, Tensor | _Stack):
            found.append(None)
            continue
        if spec is None or any(isinstance(dim, SpecDim) and dim.open for dim in Spec.of(spec).dims):
            said = "has no spec" if spec is None else f"has the open spec {str(spec)!r}"
            faults.append(f"{name} of shape {list(x.shape)} {said}")
            found.append(None)
            continue
        axes = _axes(Spec.of(spec), len(x.shape), mesh)
        ways = [[mesh.axes.get(a, 1) for factor in dim for a in factor] for dim in axes]
        fits = len(ways) == len(x.shape)  # otherwise resolving says what is wrong
        found.append((name, tuple(whole(x.shape, ways)) if fits else tuple(x.shape), spec, axes))
    if faults:
        raise ShardingError(
            f"{what} leave something open",
            faults,
            rule="per-device code needs to know the shapes that it works on",
            remedy='write P() (or `_` per dim) for a tensor that every device has whole, "name@axis" for a cut dim',
        )
    items = [item for item in found if item is not None]
    resolved = resolve_many([(name, shape, spec, None) for name, shape, spec, _ in items], mesh, what=what) if items else []
    uneven: list[str] = []
    cuts = []
    for (name, shape, spec, axes), r in zip(items, resolved, strict=True):
        local = []
        for d, (dim, factors) in enumerate(zip(r.layout.dims, axes, strict=True)):
            sizes = []
            for factor, names in zip(dim, factors, strict=True):
                n = math.prod(mesh.axes[a] for a in names)
                if factor.size % n:
                    part = f"dim {d}" if len(dim) == 1 else f"a factor of dim {d}"
                    uneven.append(
                        f"{name} of shape {list(shape)} with spec {str(spec)!r}: {part} has size {factor.size}, "
                        f"{' x '.join(names)} has {n} devices"
                    )
                sizes.append(factor.size // n)
            local.append(math.prod(sizes))
        used = {a for dim in axes for names in dim for a in names}
        unmentioned = tuple(a for a in mesh.axis_names if a not in used)
        copies = math.prod(mesh.axes[a] for a in unmentioned)
        cuts.append(_Cut(Door(str(r.spec), shape, tuple(local), unmentioned, copies), r.layout))
    if uneven:
        raise ShardingError(
            f"{what} do not divide the tensors",
            uneven,
            rule="every device runs the same code on the same shapes, so axes must divide what they cut",
            remedy="pad the tensor to a multiple, or leave that dim whole",
        )
    each = iter(cuts)
    return [None if item is None else next(each) for item in found]


def _axes(spec: Spec, rank: int, mesh: Mesh) -> list[list[tuple[str, ...]]]:
    """The mesh axes that a spec asks for, per dim and factor, as it says and whatever the sizes are."""

    def dims() -> Iterator[list[tuple[str, ...]]]:
        for dim in spec.dims:
            if isinstance(dim, SpecDim):
                yield [_named(f.name, mesh) if f.axes is None else f.axes for f in dim.factors]
            else:
                yield from [[()]] * (rank - len(spec.dims) + 1)

    return list(dims())


def _named(name: str | None, mesh: Mesh) -> tuple[str, ...]:
    to = mesh.rules.get(name) if name else None
    return (to,) if isinstance(to, str) else tuple(to or ())


