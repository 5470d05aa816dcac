"""Collects, at the end of a trace, the effects of a function beside its results: `.grad`s, writes, gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx

from shardlib.core.aten.schemas import find_written_nodes
from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import without_function_modes
from shardlib.frontend.functionalize import Written
from shardlib.frontend.gradients.autograd_history import AutogradState
from shardlib.frontend.gradients.gradient_tags import tag_gradient
from shardlib.frontend.gradients.joint_backward import BackwardOutputs, trace_backward
from shardlib.frontend.gradients.saved_inputs import find_saved_inputs
from shardlib.frontend.guards.flatten_call import FlatCall
from shardlib.frontend.hazards.grad_reads import GradReads
from shardlib.frontend.lifted_inputs import LiftedInputs
from shardlib.frontend.side_effects.mutation_values import Mutation
from shardlib.frontend.traced_graph import ExtraOutputs

_LISTED = 8  # inputs in a note about lost writes


class _WatchedGrad(NamedTuple):
    """A tensor of the call as the trace sees it, its leaf, and its `.grad` before the function runs."""

    leaf: int
    tensor: Tensor
    grad: Tensor | None


class Epilogue:
    """The effects of one traced function; as a context, it gives the call's tensors back their autograd state.

    `where` are the leaves of the arguments that are inputs, and `names` what errors call them.
    """

    def __init__(
        self,
        call: FlatCall,
        lifted: LiftedInputs,
        where: Sequence[int],
        names: Sequence[str],
        grads: GradReads,
        *,
        strict: bool,
    ) -> None:
        self.call, self.lifted, self.where, self.grads = call, lifted, where, grads
        self.strict = strict  # a result without a derivative fails at once
        self.result_leaves = 0
        self.rebound: Sequence[Mutation] = ()
        self.backward = BackwardOutputs()
        self.state = dict(enumerate(call.state.tensors, len(call.arguments)))  # leaf -> tensor
        self.names = dict(zip((*where, *self.state), (*names, *call.state.names), strict=True))  # by leaf
        self._watched: list[_WatchedGrad] = []
        self._new_grads: list[tuple[int, bool]] = []  # leaf, True if it has a `.grad` now
        self._takes: list[tuple[int, str, int]] = []
        self._leaf_results: list[tuple[int, bool]] = []
        self._states = [AutogradState.read(x) for x in call.state.tensors]
        self._input_states: list[AutogradState] = []
        self._handles: list[Any] = []  # of hooks that refuse a backward pass into a history outside

    def __enter__(self) -> Epilogue:
        return self

    @without_function_modes
    def __exit__(self, *_: object) -> None:
        grads = {id(x): grad for x, grad in self.call.state.grads}
        for x in self.call.state.tensors:
            if (x.is_leaf or id(x) in grads) and x.grad is not grads.get(id(x)):
                x.grad = grads.get(id(x))
        for x, before in zip(self.call.state.tensors, self._states, strict=True):
            before.restore(x)
        for handle in self._handles:
            handle.remove()

    @without_function_modes
    def start(self, inputs: Sequence[Tensor]) -> None:
        """Gives the `inputs` of the trace the `.grad` and the hooks of the caller's tensors; then the function runs."""
        state = self.call.state
        leaves = {id(x): leaf for leaf, x in self.state.items()}
        stand_ins = {id(x): x for x in state.tensors}
        for leaf, x in zip(self.where, inputs, strict=True):
            leaves[id(self.call.arguments[leaf])], stand_ins[id(self.call.arguments[leaf])] = leaf, x
        for x, own_grad in state.grads:
            grad, stand_in = None if self.grads.hidden else own_grad, stand_ins[id(x)]
            self._watched.append(_WatchedGrad(leaves[id(x)], stand_in, grad))
            if stand_in is not x or grad is not own_grad:
                stand_in.grad = grad
            if stand_in is not x:
                AutogradState.read(x).lend_hooks(stand_in)
        self._input_states = [AutogradState.read(x) for x in inputs]
        with_grad = {watched.leaf for watched in self._watched}
        for i, leaf in leaves.items():
            stand_in = stand_ins[i]
            if leaf not in with_grad and stand_in.is_leaf and id(stand_in) not in state.cut:
                self._watched.append(_WatchedGrad(leaf, stand_in, None))
        for watched in self._watched:
            self.grads.watch(watched.tensor)
        for leaf, x in self.state.items():
            if x.requires_grad and not x.is_leaf:
                refuse = partial(_refuse_history_outside, self.names[leaf])
                handle = Tensor.register_hook(x, refuse)  # type: ignore[no-untyped-call] # torch has no types
                self._handles.append(handle)

    def finish(
        self, result: Sequence[Any], inputs: Sequence[Tensor], tracer: Any, *, differentiate: bool
    ) -> list[Tensor]:
        """Returns the new `.grad`s and, with `differentiate`, the gradients, after the function has run."""
        out = self._collect_grads(result, inputs)
        if not differentiate:
            return out
        self.backward, gradients = trace_backward(
            result,
            dict(zip(self.where, inputs, strict=True)) | self.state,
            self.names,
            self.lifted,
            tracer,
            first_state=len(self.call.arguments),
            skip={i for i, _ in self._leaf_results},
            strict=self.strict,
        )
        return out + gradients

    @without_function_modes
    def _collect_grads(self, result: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the new `.grad`s; refuses every other change of the inputs' autograd state."""
        self.result_leaves = len(result)
        self.grads.finish()
        for handle in self._handles:
            handle.remove()
        for leaf, x in self.state.items():
            if id(x) in self.call.state.cut and x.grad is not None:
                _refuse_history_outside(self.names[leaf])
        self._refuse_changes(inputs)
        self._leaf_results = list(self._find_leaf_results(result, inputs))
        out: list[Tensor] = []
        leaf_of = {id(x): leaf for leaf, x in zip(self.where, inputs, strict=True)}
        leaf_of |= {id(x): leaf for leaf, x in self.state.items()}
        for leaf, x, before in self._watched:
            if (now := x.grad) is not before and id(now) in leaf_of:
                self._takes.append((leaf, "grad", leaf_of[id(now)]))
            elif now is not before:
                self._new_grads.append((leaf, now is not None))
                tag_gradient(now, x)
                out += [] if now is None else [self.lifted.seen(now)]
            elif id(x) in self.grads.dropped:
                self._new_grads.append((leaf, False))
        return out

    def _find_leaf_results(self, result: Sequence[Any], inputs: Sequence[Tensor]) -> Iterator[tuple[int, bool]]:
        """Yields results that require a gradient because the function says so; True with parameters."""
        input_ids = set(map(id, (*inputs, *self.call.state.tensors)))
        input_ids |= {id(self.lifted.seen(x)) for x in self.call.state.tensors}
        for i, x in enumerate(result):
            if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and id(x) not in input_ids:
                if x.grad is not None:
                    raise ShardingError(
                        f"result {i} has a gradient that backward() left inside the traced function",
                        rule="of results, the values come back; .grad comes back of what the function is given",
                        remedy="return x.grad beside it",
                    )
                yield i, isinstance(x, torch.nn.Parameter)

    def note_lost_writes(self, error: Exception, graph: fx.Graph) -> None:
        """Adds a note to an error of the function: one device would have kept the writes before it."""
        inputs = dict(zip(graph.find_nodes(op="placeholder"), self.names.values(), strict=False))
        lost = [inputs[node] for node in find_written_nodes(graph) if node in inputs]
        lost += [f"{self.names[leaf]}.grad" for leaf, x, before in self._watched if x.grad is not before]
        if lost:
            more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
            names = ", ".join(lost[:_LISTED])
            error.add_note(f"Not written: {names}{more}. A jitted function writes when it has returned.")

    def _refuse_changes(self, inputs: Sequence[Tensor]) -> None:
        """Refuses changes of the inputs' autograd state, except `.grad`: a program returns only values."""
        tensors, states = (*inputs, *self.call.state.tensors), (*self._input_states, *self._states)
        wrong = [
            f"{name} {change}"
            for name, x, before in zip(self.names.values(), tensors, states, strict=True)
            if (change := before.describe_change(x))
        ]
        grads = {id(x): grad for _, x, grad in self._watched}
        for leaf, x in zip(self.where, inputs, strict=True):
            argument = self.call.arguments[leaf]
            has_history = isinstance(argument, Tensor) and argument.requires_grad and not argument.is_leaf
            if has_history and x.grad is not grads.get(id(x)):
                wrong.append(f"{self.names[leaf]} is a result of other ops, and backward() goes back into it")
        if wrong:
            raise ShardingError(
                "the traced function changes what autograd knows of its inputs",
                wrong,
                rule="a program returns values, and .grad of leaves; an input's history, hooks and flags stay",
                remedy="write under torch.no_grad() or of detach()ed values; requires_grad_() and register_hook() "
                "before the call; return the loss, and call backward() outside",
            )

    def name_cotangents(self, results: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the cotangents, given those of the results."""
        return tuple(f"gradient of {results[i]}" for i in self.backward.cotangents)

    def place_outputs(self, graph: fx.Graph, written: Written, leaves: Sequence[int]) -> ExtraOutputs:
        """Returns all extra outputs, and puts the graph's outputs in their order.

        `leaves` are those of the graph's inputs. The values that `written` describes are the graph's last outputs; they
        go in front of the gradients.
        """
        output = graph.output_node()
        outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        at = self.result_leaves
        grads: list[tuple[int, int | None]] = []
        for leaf, has_grad in self._new_grads:
            grads.append((leaf, at if has_grad else None))
            at += has_grad
        changed = [leaves[i] for i in (*written.values, *written.data)]
        last = len(outs) - len(changed)
        output.args = ((*outs[:at], *outs[last:], *outs[at:last]),)
        new = tuple((leaf, at + i) for i, leaf in enumerate(changed))
        at += len(changed)
        backward = self.backward
        return ExtraOutputs(
            grads=tuple(grads),
            written=new[: len(written.values)],
            data=new[len(written.values) :],
            takes=(*self._takes, *((leaves[i], "data", leaves[j]) for i, j in written.others)),
            gradients=tuple((leaf, at + i) for i, leaf in enumerate(backward.gradients)),
            cotangents=backward.cotangents,
            within=backward.within,
            rebound=tuple(self.rebound),
            reached=backward.reached,
            read=find_saved_inputs(graph, leaves, len(backward.gradients)) if backward.gradients else (),
            leaves=tuple(self._leaf_results),
            refused=backward.refused,
            root=backward.root,
            why=backward.why,
        )


def _refuse_history_outside(name: str, _: Tensor | None = None) -> NoReturn:
    raise ShardingError(
        "the traced function calls backward() through a result of other ops",
        [f"{name} has a history outside the function"],
        rule="a program returns values, and .grad of leaves; it does not go on into a history outside",
        remedy="return the loss, and call backward() outside; or detach() the tensor",
    )
