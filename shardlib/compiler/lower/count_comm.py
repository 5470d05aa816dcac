"""Counts the messages inside an op, for one sharding, by emitting its local form into a scratch program.

So the cost model counts the bytes that the plan will show, for the library's local forms and for users'.
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
from shardlib.rules.table import user_rule_text
from shardlib.sharding.mesh.mesh import Mesh

# Messages of the library's local forms, for all plans. The entry holds the rule, because the key has the rule's id.
_LIBRARY_MESSAGES: BoundedCache[Any, tuple[Rule, tuple[Message, ...]]] = BoundedCache(1 << 12)


class MessageCounter:
    """Caches the messages of local forms: the library's for all plans, users' for one plan, since they may change."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._by_key: dict[Any, tuple[Message, ...]] = {}

    def messages(self, propagation: Propagation, op: Op, assignment: Assignment) -> tuple[Message, ...]:
        """Returns the messages of `op` if `assignment` shards its factors."""
        rule = op.rule
        if rule is None or rule.local.emit is None or not any(f in rule.local.factors for f, _ in assignment):
            return ()
        sizes = tuple([(f, *map(propagation.dims.size, leaves)) for f, leaves in propagation.labels[op].items()])
        key = id(rule), sizes, tuple(assignment.items())
        if (messages := self._by_key.get(key)) is None:
            messages = self._by_key[key] = self._cached(rule, key, propagation, op, assignment)
        return messages

    def _cached(
        self, rule: Rule, key: Any, propagation: Propagation, op: Op, assignment: Assignment
    ) -> tuple[Message, ...]:
        if user_rule_text(op.target):
            return self._emitted(propagation, op, assignment)
        key = *key, self.mesh, torch.get_default_dtype(), tuple([v.dtype for v in op.operands])
        if (entry := _LIBRARY_MESSAGES.get(key)) is None:
            entry = _LIBRARY_MESSAGES[key] = rule, self._emitted(propagation, op, assignment)
        return entry[1]

    def _emitted(self, propagation: Propagation, op: Op, assignment: Assignment) -> tuple[Message, ...]:
        rule = op.required_rule
        builder = Builder(self.mesh)
        emitter = Emitter(builder, propagation, counts_messages=True)
        form = LocalForm(emitter, op, assignment, (), {})
        operands = [
            Var(builder.name(v.name), form.layout(labels), v.dtype, v)
            for v, labels in zip(op.operands, rule.operands, strict=True)
        ]
        emitter.op(op, rule, assignment, operands, [None] * len(op.results))
        return tuple((c.kind, c.axes, c.bytes) for step in builder.steps if isinstance(step, Start) for c in step.moves)
