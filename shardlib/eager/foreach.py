"""Ops over lists of tensors of which those in one place are in the same pieces: one call on the pieces of all.

Optimizers with `foreach` or `fused` call a few of these a step, with all parameters at once; each compares and changes
elements in one place, so it may run on any pieces. What is in other pieces, or shares memory, goes tensor by tensor.
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
from shardlib.core.torch_private import OpOverload, schema_of
from shardlib.distributed.provenance import made, note
from shardlib.distributed.turn_errors import number
from shardlib.eager.arg_slots import numbers_of
from shardlib.eager.prepare import Prepared
from shardlib.sharding.mesh.mesh import Mesh
from shardlib.tensor.eager_cache import Run
from shardlib.tensor.refcounts import Every, counts_alone, is_sole
from shardlib.tensor.sharded_tensor import ShardedTensor, wrap
from shardlib.tensor.tensor_meta import Form, contiguous
from shardlib.tensor.view_aliases import are_apart, assign


def is_step(op: Any) -> bool:
    """Whether it is an optimizer's step for all parameters."""
    return bool(schema_of(op).name.startswith("aten::_fused_"))


def together(op: OpOverload, args: Any, kwargs: dict[str, Any], mesh: Mesh, otherwise: Run) -> Run | None:
    """What runs this call, and all with its key, at once; None where its tensors are not in the same pieces.

    `otherwise` runs calls in which tensors share memory: there each sees what was written before.
    """
    function = functional_form(op) if schema_of(op).is_mutable else op
    forms = _forms(args, mesh)
    lists = [i for i, a in enumerate(args) if forms and _is_list_of(a, forms)]
    rest = [a for i, a in enumerate(args) if i not in lists] + list(kwargs.values())
    names = _written(op, kwargs)
    changes = [i for i, a in enumerate(schema_of(op).arguments) if a.name in names]
    written, read = [i for i in changes if i in lists], [i for i in lists if i not in changes]
    if not _is_elementwise(op) or function is None or not lists or not all(_is_whole(a, mesh) for a in rest):
        return None
    if any(args[i] for i in changes if i not in lists):
        return None
    in_place = is_step(op)  # as a function of values it copies all that it is given
    dense = torch.contiguous_format  # its kernel goes through all of them as through rows of numbers
    if not in_place and not _keeps(Prepared(function, args, kwargs, mesh), forms):
        return None
    digest = number(str(op), "") if mesh.kind == "distributed" else 0

    def run(args: Any, kwargs: Any) -> Any:
        kwargs, tensors = kwargs or {}, list(chain.from_iterable([args[i] for i in lists]))
        changed = list(chain.from_iterable([args[i] for i in written]))
        if written and not are_apart(changed, list(chain.from_iterable([args[i] for i in read]))):
            return otherwise(args, kwargs)
        pieces = {i: [x._locals for x in args[i]] for i in lists}
        calls, where = _calls([*pieces.values()])
        own = {i: _own(args[i], pieces[i], calls) for i in written} if in_place else {}
        operands: list[Any] = []
        for i, a in enumerate(args):
            if i in lists:
                parts = [pieces[i][k][d] for k, d in calls]
                if i in own:
                    parts = [
                        x if alone else x.clone(memory_format=dense) for x, alone in zip(parts, own[i], strict=True)
                    ]
                elif in_place:
                    parts = [x.contiguous() for x in parts]
                operands.append(parts)
            elif isinstance(a, list | tuple) and len(a) == len(where):
                operands.append([_on(a[k], d) for k, d in calls])
            else:
                operands.append(_on(a, 0))
        results = (op if in_place else function)(*operands, **{k: _on(a, 0) for k, a in kwargs.items()})
        numbers = [a for i, a in enumerate(args) if i not in lists]
        origin = made(digest, tensors, list(numbers_of((numbers, kwargs)))) if digest else 0
        lists_made = [operands[i] for i in written] if in_place else [results]
        values = [tuple([parts[c] for c in here]) for parts in lists_made for here in where]
        if not written:
            out = [wrap(form, value) for form, value in zip(forms, values, strict=True)]
            note(origin, out)
            return out
        for i, (x, value) in enumerate(zip(changed, values, strict=True)):
            assign(x, value, value, origin + i if origin else 0)
        torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])
        return None

    return run


def _written(op: OpOverload, kwargs: dict[str, Any]) -> set[str]:
    """The arguments that this call writes to: gradients only where they are unscaled."""
    scaled = kwargs.get("grad_scale") is not None
    return {name for name in written_arguments(op) if scaled or not is_step(op) or name != "grads"}


@cache
def _is_elementwise(op: OpOverload) -> bool:
    """Whether it is a step, or what it is called after is an op by element in torch: `_foreach_mul_` is of `mul`."""
    packet = getattr(torch.ops.aten, schema_of(op).name.removeprefix("aten::_foreach_").rstrip("_"), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return is_step(op) or any(torch.Tag.pointwise in single.tags for single in overloads)


def _forms(args: Sequence[Any], mesh: Mesh) -> list[Form]:
    """The forms of the first list of tensors, if pieces there lie as those of contiguous tensors do."""
    for a in args:
        if isinstance(a, list | tuple) and a and all(isinstance(x, ShardedTensor) for x in a):
            forms = [x._form for x in a]
            plain = (f.mesh == mesh and not f.layout.pending and f.strides == contiguous(f.shape) for f in forms)
            return forms if all(plain) else []
    return []


def _is_list_of(x: Any, forms: Sequence[Form]) -> bool:
    """Whether it is a list of tensors in these forms."""
    return (
        isinstance(x, list | tuple)
        and len(x) == len(forms)
        and all(isinstance(y, ShardedTensor) and y._form is form for y, form in zip(x, forms, strict=True))
    )


def _is_whole(x: Any, mesh: Mesh) -> bool:
    """Whether every device of the mesh has it as it is: numbers, also in tensors, and lists of them."""
    if isinstance(x, list | tuple):
        return all(_is_whole(y, mesh) for y in x)
    if isinstance(x, ShardedTensor):
        return not x.dim() and x._form.mesh == mesh and not x._form.layout.pending
    return not isinstance(x, torch.Tensor) or (not x.dim() and x.device.type == "cpu")


def _keeps(call: Prepared, forms: Sequence[Form]) -> bool:
    """Whether results have the shapes, strides and dtypes of the lists."""
    results = call.meta()
    return isinstance(results, list | tuple) and all(
        (x.shape, x.dtype, x.stride()) == (form.shape, form.dtype, form.strides)
        for x, form in zip(results, forms, strict=True)
    )


def _calls(lists: Sequence[Every]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """The parts of one call, as indices of tensors and devices: devices with the same operands share one. And which
    part is that of every device, tensor by tensor."""
    if len(lists[0][0]) == 1:
        return [(k, 0) for k in range(len(lists[0]))], [[k] for k in range(len(lists[0]))]
    calls: list[tuple[int, int]] = []
    where: list[list[int]] = []
    for k, here in enumerate(zip(*lists, strict=True)):
        known: dict[tuple[int, ...], int] = {}
        for d, operands in enumerate(zip(*here, strict=True)):
            if known.setdefault(tuple(map(id, operands)), len(calls)) == len(calls):
                calls.append((k, d))
        where.append([known[tuple(map(id, operands))] for operands in zip(*here, strict=True)])
    return calls, where


def _own(tensors: Sequence[ShardedTensor], pieces: Every, calls: Sequence[tuple[int, int]]) -> list[bool]:
    """For each part of a call, whether its piece is held by this tensor alone, part of no other part, and in order."""
    base, memories = counts_alone(), [x.__dict__.get("_memory") for x in tensors]
    parts = Counter([id(pieces[k][d]) for k, d in calls])
    found = []
    for k, d in calls:
        if (memory := memories[k]) is not None:
            memory.forget(but=tensors[k])  # they look at it again, behind this
        times = sum(x is pieces[k][d] for x in pieces[k])
        alone = is_sole(pieces, k, ((d, times),), 2 + (memory is not None), base)
        found.append(alone and parts[id(pieces[k][d])] == 1 and pieces[k][d].is_contiguous())
    return found


def _on(x: Any, d: int) -> Any:
    """What one device has of an argument that is no list of parameters."""
    if isinstance(x, list | tuple):
        return [_on(y, d) for y in x]
    if isinstance(x, ShardedTensor):
        return x._locals[d]
    return x.detach() if isinstance(x, torch.Tensor) else x
