"""Whether two traces are one program: what was decided for one then holds for the other, and is not decided again.

A function that is traced again, because something is another than before (a setting that its first call makes, an
object that was made anew), often comes to the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardlib.compiler.graph.ir import Graph
from shardlib.compiler.program.steps import Var
from shardlib.core.strided_only import as_bytes
from shardlib.frontend.guards.value_kinds import PLAIN
from shardlib.frontend.side_effects.compare_values import is_value
from shardlib.frontend.traced_graph import Traced
from shardlib.sharding.placement import FixedLayout

Said = Mapping[int, FixedLayout]  # by position


def is_same(a: Traced, b: Traced, graphs: tuple[Graph, Graph], inputs: tuple[Said, Said]) -> bool:
    """Whether two normalized traces differ in what they find, and leave, of a call alone; `graphs` are what was read of
    them, `inputs` what is said of theirs."""
    return (
        inputs[0] == inputs[1]
        and _facts(a) == _facts(b)
        and [v.again for v in graphs[0].values()] == [v.again for v in graphs[1].values()]
        and _is_same_graph(a.graph, b.graph)
    )


def is_there(said: Said, before: Said, outputs: Sequence[Any]) -> bool:
    """Whether the outputs of a program, of which that was said `before`, are where something else is said to be: what
    nobody had said a word of may be found where it was put."""
    for i in said.keys() | before.keys():
        now, var = said.get(i), outputs[i]
        if now == before.get(i):
            continue
        if now is None or i in before or now.spec is not None or any(now.open):
            return False
        if not isinstance(var, Var) or var.layout != now.layout or var.host:
            return False
    return True


def _facts(x: Traced) -> tuple[Any, ...]:
    """What stages read of a trace beside its graph; leaves of the call are what inputs they are, if they are some."""
    after, at = x.after, {leaf: i for i, leaf in enumerate(x.input_leaves) if leaf >= 0}
    pairs = [[(at.get(leaf), i) for leaf, i in of] for of in (after.grads, after.written, after.data, after.gradients)]
    takes = [(at.get(leaf), what, at.get(other)) for leaf, what, other in after.takes]
    back = after.cotangents, after.within, after.reached, after.leaves, after.refused
    given = x.name, x.input_names, x.input_paths, [leaf < 0 for leaf in x.input_leaves], x.static
    return *given, x.result_names, x.strides, x.same, pairs, takes, back


def _is_same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    if len(a.graph.nodes) != len(b.graph.nodes):
        return False
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
        if x.op == "output" and not _are_results(x.args, y.args):
            return False
        if (x.op, x.name) != (y.op, y.name) or not _is_like((x.args, dict(x.kwargs)), (y.args, dict(y.kwargs))):
            return False
        if x.op == "get_attr":
            if not _is_same_constant(*(operator.attrgetter(str(of.target))(gm) for of, gm in ((x, a), (y, b)))):
                return False
        elif x.target != y.target:
            return False
        if not _is_like(*({k: z for k, z in of.meta.items() if k not in _NOTES} for of in (x, y))):
            return False
    return True


def _are_results(a: Any, b: Any) -> bool:
    """Whether results that are no tensors are the same: of objects, it matters which."""
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(_are_results, a, b))
    return a is b or isinstance(a, fx.Node | torch.Tensor) or (type(a) is type(b) and (type(a) in PLAIN or is_value(a)))


def _is_same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    plain = type(a) is torch.Tensor and type(b) is torch.Tensor and not a.is_meta and a.numel() <= _LARGE
    return plain and _form(a) == _form(b) and torch.equal(as_bytes(a), as_bytes(b))  # -0.0 is another zero


def _is_like(a: Any, b: Any) -> bool:
    """Whether two arguments, or notes on nodes, say the same; nodes go by their names, tensors by their forms."""
    kind = type(a)
    if kind is not type(b):
        return False
    if isinstance(a, fx.Node):
        return bool(a.name == b.name)
    if isinstance(a, torch.Tensor):
        return _form(a) == _form(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_like(x, b[k]) for k, x in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_is_like, a, b))
    if isinstance(a, slice):
        return _is_like((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return repr(a) == repr(b) if kind is float or kind is complex else bool(a == b)


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


_NOTES = frozenset({"eager_input_vals", "tensor_meta"})  # torch's own, which no stage reads
_LARGE = 1 << 20  # elements of a constant; larger ones are not compared
