"""Runs ops over lists of tensors in one call on all shards.

Optimizers with `foreach` or `fused` call a few of these ops per step, with all parameters at once. Each op works by
element, so it may run on any shards, if tensors of the same position have the same layout. Tensors in other layouts, or
with shared memory, are processed one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch

from shardlib.core.aten.functional_forms import functional_form
from shardlib.core.aten.schemas import written_arguments
from shardlib.core.torch_internals.torch_private import OpOverload, schema_of
from shardlib.distributed.provenance import record_origin, result_origin
from shardlib.distributed.turn_errors import hash_texts
from shardlib.eager.arg_slots import iterate_numbers
from shardlib.eager.prepare import PreparedCall
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.eager_cache import Runner
from shardlib.tensor.refcounts import ShardTuples, is_sole_owner, measure_sole_owner
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form, contiguous_strides
from shardlib.tensor.view_aliases import assign_shards, have_separate_memory


def is_optimizer_step(op: Any) -> bool:
    return bool(schema_of(op).name.startswith("aten::_fused_"))


def split_by_mesh(op: OpOverload, args: Any) -> Runner | None:
    """Returns a runner of this call that runs the op once for the tensors of each mesh; None if there is one mesh."""
    count = next((len(a) for a in args if isinstance(a, list | tuple)), 0)
    lists = [i for i, a in enumerate(args) if isinstance(a, list | tuple) and len(a) == count]
    groups: dict[Any, list[int]] = {}
    for k in range(count):
        key = tuple(x._form.mesh if isinstance(x := args[i][k], ShardedTensor) else None for i in lists)
        groups.setdefault(key, []).append(k)
    if len(groups) < 2:
        return None

    def run(args: Any, kwargs: Any) -> Any:
        results: dict[int, Any] = {}
        for ks in groups.values():
            part = [[a[k] for k in ks] if i in lists else a for i, a in enumerate(args)]
            results.update(zip(ks, op(*part, **(kwargs or {})) or (), strict=False))
        return [results[k] for k in range(count)] if results else None

    return run


def fuse_lists(op: OpOverload, args: Any, kwargs: dict[str, Any], mesh: Mesh, otherwise: Runner) -> Runner | None:
    """Returns a runner of this call, and of all with its key, on all shards at once; None if layouts differ.

    `otherwise` runs calls whose tensors share memory, in which each op sees the writes before it.
    """
    function = functional_form(op) if schema_of(op).is_mutable else op
    forms = _forms(args, mesh)
    lists = [i for i, a in enumerate(args) if forms and _is_list_of(a, forms)]
    rest = [a for i, a in enumerate(args) if i not in lists] + list(kwargs.values())
    names = _written_names(op, kwargs)
    changes = [i for i, a in enumerate(schema_of(op).arguments) if a.name in names]
    written, read = [i for i in changes if i in lists], [i for i in lists if i not in changes]
    if not _is_elementwise(op) or function is None or not lists or not all(_is_replicated(a, mesh) for a in rest):
        return None
    if any(args[i] for i in changes if i not in lists):
        return None
    in_place = is_optimizer_step(op)  # the functional form would copy all operands
    if not in_place and not _keeps_metadata(PreparedCall(function, args, kwargs, mesh), forms):
        return None
    digest = hash_texts(str(op), "") if mesh.kind == "distributed" else 0

    def run(args: Any, kwargs: Any) -> Any:
        kwargs, tensors = kwargs or {}, list(chain.from_iterable([args[i] for i in lists]))
        changed = list(chain.from_iterable([args[i] for i in written]))
        if written and not have_separate_memory(changed, list(chain.from_iterable([args[i] for i in read]))):
            return otherwise(args, kwargs)
        shards = {i: [x._locals for x in args[i]] for i in lists}
        calls, call_of_device = _distinct_calls([*shards.values()])
        writable = {i: _are_writable(args[i], shards[i], calls) for i in written} if in_place else {}
        operands: list[Any] = []
        for i, a in enumerate(args):
            if i in lists:
                parts = [shards[i][k][d] for k, d in calls]
                if i in writable:
                    pairs = zip(parts, writable[i], strict=True)
                    parts = [x if is_writable else x.clone(memory_format=_DENSE) for x, is_writable in pairs]
                elif in_place:
                    parts = [x.contiguous() for x in parts]
                operands.append(parts)
            elif isinstance(a, list | tuple) and len(a) == len(call_of_device):
                operands.append([_on_device(a[k], d) for k, d in calls])
            else:
                operands.append(_on_device(a, 0))
        results = operands[lists[0]]  # on ranks of other stages, which have shapes alone
        if not mesh.is_elsewhere:
            results = (op if in_place else function)(*operands, **{k: _on_device(a, 0) for k, a in kwargs.items()})
        numbers = [a for i, a in enumerate(args) if i not in lists]
        origin = result_origin(digest, tensors, list(iterate_numbers((numbers, kwargs)))) if digest else 0
        outputs = [operands[i] for i in written] if in_place else [results]
        values = [tuple([parts[c] for c in indices]) for parts in outputs for indices in call_of_device]
        if not written:
            out = [wrap(form, value) for form, value in zip(forms, values, strict=True)]
            record_origin(origin, out)
            return out
        for i, (x, value) in enumerate(zip(changed, values, strict=True)):
            assign_shards(x, value, value, origin + i if origin else 0)
        torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])
        return None

    return run


_DENSE = torch.contiguous_format  # the kernel of a step takes contiguous operands


def _written_names(op: OpOverload, kwargs: dict[str, Any]) -> set[str]:
    """Returns the arguments that this call writes to; a step writes to gradients only to unscale them."""
    scaled = kwargs.get("grad_scale") is not None
    return {name for name in written_arguments(op) if scaled or not is_optimizer_step(op) or name != "grads"}


@cache
def _is_elementwise(op: OpOverload) -> bool:
    """True for a step, and for the list form of an elementwise op: `_foreach_mul_` of `mul`."""
    packet = getattr(torch.ops.aten, schema_of(op).name.removeprefix("aten::_foreach_").rstrip("_"), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return is_optimizer_step(op) or any(torch.Tag.pointwise in single.tags for single in overloads)


def _forms(args: Sequence[Any], mesh: Mesh) -> list[Form]:
    """Returns the forms of the first list of tensors, if these are contiguous and complete; else an empty list."""
    for a in args:
        if isinstance(a, list | tuple) and a and all(isinstance(x, ShardedTensor) for x in a):
            forms = [x._form for x in a]
            plain = (
                f.mesh == mesh and not f.layout.pending and f.strides == contiguous_strides(f.shape) for f in forms
            )
            return forms if all(plain) else []
    return []


def _is_list_of(x: Any, forms: Sequence[Form]) -> bool:
    return (
        isinstance(x, list | tuple)
        and len(x) == len(forms)
        and all(isinstance(y, ShardedTensor) and y._form is form for y, form in zip(x, forms, strict=True))
    )


def _is_replicated(x: Any, mesh: Mesh) -> bool:
    """True for a value that every device has: numbers, also in tensors, and lists of these."""
    if isinstance(x, list | tuple):
        return all(_is_replicated(y, mesh) for y in x)
    if isinstance(x, ShardedTensor):
        return not x.dim() and x._form.mesh == mesh and not x._form.layout.pending
    return not isinstance(x, torch.Tensor) or (not x.dim() and x.device.type == "cpu")


def _keeps_metadata(call: PreparedCall, forms: Sequence[Form]) -> bool:
    """True if results have the shapes, strides and dtypes of the lists."""
    results = call.meta()
    return isinstance(results, list | tuple) and all(
        (x.shape, x.dtype, x.stride()) == (form.shape, form.dtype, form.strides)
        for x, form in zip(results, forms, strict=True)
    )


def _distinct_calls(lists: Sequence[ShardTuples]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Returns the (tensor, device) pairs to compute, and for each tensor the number of every device's pair.

    Devices with the same operands share a pair.
    """
    if len(lists[0][0]) == 1:
        return [(k, 0) for k in range(len(lists[0]))], [[k] for k in range(len(lists[0]))]
    calls: list[tuple[int, int]] = []
    call_of_device: list[list[int]] = []
    for k, tuples in enumerate(zip(*lists, strict=True)):
        numbers: dict[tuple[int, ...], int] = {}
        row = []
        for d, operands in enumerate(zip(*tuples, strict=True)):
            key = tuple(map(id, operands))
            if key not in numbers:
                numbers[key] = len(calls)
                calls.append((k, d))
            row.append(numbers[key])
        call_of_device.append(row)
    return calls, call_of_device


def _are_writable(
    tensors: Sequence[ShardedTensor], shards: ShardTuples, calls: Sequence[tuple[int, int]]
) -> list[bool]:
    """Returns for each shard of a call whether only this tensor holds it, and it is contiguous."""
    base, memories = measure_sole_owner(), [x.__dict__.get("_memory") for x in tensors]
    uses = Counter([id(shards[k][d]) for k, d in calls])
    writable = []
    for k, d in calls:
        if (memory := memories[k]) is not None:
            memory.forget(but=tensors[k])  # the others restore their shards later
        times = sum(x is shards[k][d] for x in shards[k])
        is_sole = is_sole_owner(shards, k, ((d, times),), 2 + (memory is not None), base)
        writable.append(is_sole and uses[id(shards[k][d])] == 1 and shards[k][d].is_contiguous())
    return writable


def _on_device(x: Any, d: int) -> Any:
    """Returns one device's value of an argument that is no list of parameters."""
    if isinstance(x, list | tuple):
        return [_on_device(y, d) for y in x]
    if isinstance(x, ShardedTensor):
        return x._locals[d]
    return x.detach() if isinstance(x, torch.Tensor) else x
