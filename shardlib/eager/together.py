"""Ops over lists of tensors of which those in one place are in the same pieces: one call on the pieces of all.

Optimisers with `foreach` or `fused` call a few of these a step, with all parameters at once; each compares and changes
elements in one place, so it may run on any pieces. What is in other pieces, or shares memory, goes tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch

from shardlib.aten.forms import functional_form
from shardlib.aten.views import written_arguments
from shardlib.eager.prepare import Prepared
from shardlib.eager.slots import numbers_of
from shardlib.internals import OpOverload, schema_of
from shardlib.meshes.mesh import Mesh
from shardlib.ranks.lineage import made, note
from shardlib.ranks.telling import number
from shardlib.tensors.aliases import assign
from shardlib.tensors.form import Form, contiguous
from shardlib.tensors.tensor import ShardedTensor, wrap
from shardlib.tensors.warm import Run


def is_step(op: Any) -> bool:
    """Whether it is an optimiser's step for all parameters."""
    return bool(schema_of(op).name.startswith("aten::_fused_"))


def together(op: OpOverload, args: Any, kwargs: dict[str, Any], mesh: Mesh, otherwise: Run) -> Run | None:
    """What runs this call, and all with its key, at once; None where its tensors are not in the same pieces.

    `otherwise` runs calls in which tensors share memory: there each sees what was written before.
    """
    function = functional_form(op) if schema_of(op).is_mutable else op
    forms = _forms(args, mesh)
    lists = [i for i, a in enumerate(args) if forms and _is_list_of(a, forms)]
    rest = [a for i, a in enumerate(args) if i not in lists] + list(kwargs.values())
    changes = [i for i, a in enumerate(schema_of(op).arguments) if a.name in written_arguments(op)]
    written, read = [i for i in changes if i in lists], [i for i in lists if i not in changes]
    if not _is_elementwise(op) or function is None or not lists or not all(_is_whole(a, mesh) for a in rest):
        return None
    if any(args[i] for i in changes if i not in lists):
        return None
    if not is_step(op) and not _keeps(Prepared(function, args, kwargs, mesh), forms):
        return None
    own = number(str(op), "") if mesh.kind == "distributed" else 0
    devices = range(len(args[lists[0]][0]._locals))

    def run(args: Any, kwargs: Any) -> Any:
        kwargs, tensors = kwargs or {}, list(chain.from_iterable([args[i] for i in lists]))
        changed = list(chain.from_iterable([args[i] for i in written]))
        if written and not _apart(changed, list(chain.from_iterable([args[i] for i in read]))):
            return otherwise(args, kwargs)
        numbers = [a for i, a in enumerate(args) if i not in lists]
        known: dict[tuple[int, ...], list[torch.Tensor]] = {}
        by_device: list[list[torch.Tensor]] = []
        for d in devices:
            pieces = [x._locals[d] for x in tensors]
            if (here := tuple(map(id, pieces))) not in known:  # devices with the same operands share results
                left, others = iter(pieces), iter([_on(a, d) for a in numbers])
                operands = [[next(left) for _ in a] if i in lists else next(others) for i, a in enumerate(args)]
                known[here] = _flat(function(*operands, **{k: _on(a, d) for k, a in kwargs.items()}))
            by_device.append(known[here])
        results: list[tuple[torch.Tensor, ...]] = list(zip(*by_device, strict=True))
        origin = made(own, tensors, list(numbers_of((numbers, kwargs)))) if own else 0
        if not written:
            out = [wrap(form, pieces) for form, pieces in zip(forms, results, strict=True)]
            note(origin, out)
            return out
        for i, (x, value) in enumerate(zip(changed, results, strict=True)):
            assign(x, value, value, origin + i if origin else 0)
        torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])
        return None

    return run


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


def _apart(written: Sequence[ShardedTensor], read: Sequence[ShardedTensor]) -> bool:
    """Whether what is written is all of its memory, and nothing else shows it."""
    owners = {id(x.__dict__.get("_memory") or x) for x in written}
    if len(owners) < len(written) or any(x.__dict__.get("_path") for x in written):
        return False
    return owners.isdisjoint([id(x.__dict__.get("_memory") or x) for x in read])


def _on(x: Any, d: int) -> Any:
    """What one device has of an argument that is no list of parameters."""
    if isinstance(x, list | tuple):
        return [_on(y, d) for y in x]
    if isinstance(x, ShardedTensor):
        return x._locals[d]
    return x.detach() if isinstance(x, torch.Tensor) else x


def _flat(results: Any) -> list[torch.Tensor]:
    """The tensors of one list, or of the lists of several results."""
    return [x for list_ in results for x in (list_ if isinstance(list_, list | tuple) else (list_,))]
