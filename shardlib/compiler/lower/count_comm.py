"""What an op sends while it runs, if it is cut in some way: its local form is written down for that, and asked.

So what decisions pay is what the plan will say, whatever the op, and users' local forms count as the library's own.
"""

from __future__ import annotations

from typing import Any

import torch

from shardlib.compiler.graph.ir import Op
from shardlib.compiler.lower.builder import Builder
from shardlib.compiler.lower.emit import Emitter
from shardlib.compiler.lower.local_forms.local_builder import LocalForm
from shardlib.compiler.program.steps import Start, Var
from shardlib.compiler.propagate.propagation import Assignment, Message, Propagation
from shardlib.core.bounded_cache import BoundedCache
from shardlib.rules.rule import Rule
from shardlib.rules.table import text_of
from shardlib.sharding.mesh.mesh import Mesh

# What the library's own forms answered, in whatever plan, each with its rule, whose id is part of the key.
_ANSWERS: BoundedCache[Any, tuple[Rule, tuple[Message, ...]]] = BoundedCache(1 << 12)


class Senders:
    """Asks local forms, each question once; those of users once in every plan, since they may have changed."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[Any, tuple[Message, ...]] = {}

    def messages(self, propagation: Propagation, op: Op, assignment: Assignment) -> tuple[Message, ...]:
        """What `op` sends, message by message, if its factors are cut as in `assignment`."""
        rule = op.rule
        if rule is None or rule.local.emit is None or not any(f in rule.local.factors for f, _ in assignment):
            return ()
        sizes = tuple([(f, *map(propagation.dims.size, leaves)) for f, leaves in propagation.labels[op].items()])
        key = id(rule), sizes, tuple(assignment.items())
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._found(rule, key, propagation, op, assignment)
        return known

    def _found(
        self, rule: Rule, key: Any, propagation: Propagation, op: Op, assignment: Assignment
    ) -> tuple[Message, ...]:
        if text_of(op.target):
            return self._asked(propagation, op, assignment)
        key = *key, self.mesh, torch.get_default_dtype(), tuple([v.dtype for v in op.operands])
        if (known := _ANSWERS.get(key)) is None:
            known = _ANSWERS[key] = rule, self._asked(propagation, op, assignment)
        return known[1]

    def _asked(self, propagation: Propagation, op: Op, assignment: Assignment) -> tuple[Message, ...]:
        assert op.rule is not None
        builder = Builder(self.mesh)
        emitter = Emitter(builder, propagation)
        form = LocalForm(emitter, op, assignment, (), {})
        operands = [
            Var(builder.name(v.name), form.layout(labels), v.dtype, v)
            for v, labels in zip(op.operands, op.rule.operands, strict=True)
        ]
        emitter.op(op, op.rule, assignment, operands, [None] * len(op.results))
        return tuple((c.kind, c.axes, c.bytes) for step in builder.steps if isinstance(step, Start) for c in step.moves)
