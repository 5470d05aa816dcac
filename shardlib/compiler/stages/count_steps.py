"""Computes the step counters of Adam apart from its updates.

Every stage needs the counters of all parameters. The update of a parameter runs on one stage, which would have to send
the counter to the others; each stage adds one by itself instead.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardlib.ops.adam import ADAM

_STEP, _NEW_STEP = 4, 3  # positions of the counter among the operands and the results


def count_steps(graph: fx.Graph) -> None:
    """Replaces the counters that updates return."""
    for node in list(graph.nodes):
        if node.target is not operator.getitem or node.args[1] != _NEW_STEP or node.args[0].target is not ADAM:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.aten.add.Tensor, (node.args[0].args[_STEP], 1))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
