"""What a program does beside returning its results: `.grad` that it sets, inputs that it writes to, gradients it has.

With gradients, one joint graph holds forward and backward: cotangents of the results are inputs, too, and gradients of
whatever requires one are results. It is decided as a whole, and split into two programs when it is lowered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from shardlib.core.aten.schemas import find_written_nodes
from shardlib.core.errors import ShardingError
from shardlib.core.mode_restore import without_function_modes
from shardlib.frontend import gradient_tags as cotangents
from shardlib.frontend.autograd_history import Autograd, end, hooks_of, is_within, origins, pulled
from shardlib.frontend.functionalize import Written
from shardlib.frontend.guards.flatten_call import FlatCall
from shardlib.frontend.hazards.grad_reads import Grads
from shardlib.frontend.hazards.unsupported import refusal
from shardlib.frontend.lifted_inputs import Lifted, placeholder
from shardlib.frontend.saved_inputs import read_back
from shardlib.frontend.side_effects.mutation_values import Mutation
from shardlib.tensor.sharded_tensor import typeof

_NAMED = 8  # of what an error says that was not written


@dataclass(frozen=True)
class ExtraOutputs:
    """Results of a graph behind those that the function returns, in this order; leaves are those of the call.

    `grads`: (leaf, position of its new `.grad`, None where it is dropped); `written`: (leaf, position of its new
    value); `data`: (leaf, position of what its memory is then); `takes`: (leaf, `grad` or `data`, the leaf which is its
    gradient, or whose memory it has, then); `gradients`: (leaf, position of its gradient); `cotangents`: the results
    that have gradients, by position; `within`: those of them that another one is made of.
    `rebound`: places that hold other values after a call; those that are results follow the function's own.
    `reached`: for each gradient, from which of `cotangents` torch's own history leads to it: zeros are a gradient, too.
    `read`: leaves that the way back reads as they are.
    `leaves`: results at which the caller's history begins, and whether one is a parameter: the function made it so.
    `refused`: results that nobody can go back through, though they depend on an input that requires a gradient (at
    `root`), and torch's reason.
    """

    grads: tuple[tuple[int, int | None], ...] = ()
    written: tuple[tuple[int, int], ...] = ()
    data: tuple[tuple[int, int], ...] = ()
    takes: tuple[tuple[int, str, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    cotangents: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    rebound: tuple[Mutation, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    read: tuple[int, ...] = ()
    leaves: tuple[tuple[int, bool], ...] = ()
    refused: tuple[int, ...] = ()
    root: int = -1
    why: str = ""

    @property
    def writes(self) -> bool:
        """Whether a call does anything to its inputs."""
        return bool(self.written or self.data or self.takes or self.grads)


class Epilogue:
    """Collects, at the end of a trace, what the function did beside returning a value."""

    def __init__(
        self, call: FlatCall, lifted: Lifted, where: Sequence[int], names: Sequence[str], grads: Grads, *, strict: bool
    ) -> None:
        self.argument_names, self.grads = names, grads
        self.call, self.lifted, self.where = call, lifted, where
        self.returned = 0  # leaves of the function's result
        self.cotangents: list[int] = []
        self._watched: list[tuple[int, Tensor, Tensor | None]] = []  # leaf, what the trace sees of it, its `.grad`
        self._grads: list[tuple[int, bool]] = []
        self._takes: list[tuple[int, str, int]] = []
        self._gradients: list[int] = []
        self.rebound: Sequence[Mutation] = ()
        self._reached: tuple[frozenset[int], ...] = ()
        self._within: tuple[int, ...] = ()
        self._leaves: list[tuple[int, bool]] = []
        self._refused: tuple[tuple[int, ...], int, str] = ((), -1, "")
        self.strict = strict  # what cannot be differentiated fails at once
        self._before = [Autograd.of(x) for x in call.state.tensors]
        self._given: list[Autograd] = []  # the same of what stands for the arguments
        self._passages: list[Any] = []  # hooks on closed-over results of other ops

    def __enter__(self) -> Epilogue:
        return self

    @without_function_modes
    def __exit__(self, *_: object) -> None:
        grads = {id(x): grad for x, grad in self.call.state.grads}
        for x in self.call.state.tensors:
            if (x.is_leaf or id(x) in grads) and x.grad is not grads.get(id(x)):
                x.grad = grads.get(id(x))
        for x, was in zip(self.call.state.tensors, self._before, strict=True):
            was.restore(x)
        for handle in self._passages:
            handle.remove()

    @without_function_modes
    def start(self, inputs: Sequence[Tensor]) -> None:
        """Before the function runs: arguments have the `.grad` that is theirs."""
        arguments, state = self.call.arguments, self.call.state.tensors
        leaves = {id(x): len(arguments) + i for i, x in enumerate(state)}
        seen = {id(x): x for x in state}
        for i, x in zip(self.where, inputs, strict=True):
            leaves[id(arguments[i])], seen[id(arguments[i])] = i, x
        for x, found in self.call.state.grads:
            grad, stands = None if self.grads.hidden else found, seen[id(x)]
            self._watched.append((leaves[id(x)], stands, grad))
            if stands is not x or grad is not found:
                stands.grad = grad
            if stands is not x:
                Autograd.of(x).lend_hooks(stands)
        self._given = [Autograd.of(x) for x in inputs]
        given = {leaf for leaf, _, _ in self._watched}
        cut = self.call.state.cut
        self._watched += [
            (leaf, seen[i], None)
            for i, leaf in leaves.items()
            if leaf not in given and seen[i].is_leaf and id(seen[i]) not in cut
        ]
        for _, stands, _ in self._watched:
            self.grads.watch(stands)
        for name, x in zip(self.call.state.names, state, strict=True):
            if x.requires_grad and not x.is_leaf:
                refuse = partial(_refuse_passage, name)
                hooked = Tensor.register_hook(x, refuse)  # type: ignore[no-untyped-call] # torch has no types
                self._passages.append(hooked)

    def finish(
        self, result: Sequence[Any], inputs: Sequence[Tensor], tracer: Any, *, differentiate: bool
    ) -> list[Tensor]:
        """After it has run: what follows its own results."""
        out = self._written(result, inputs)
        return out + (self._backward(result, inputs, tracer) if differentiate else [])

    @without_function_modes
    def _written(self, result: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The new values of gradients; whatever else it did to autograd's part of what it was given is refused."""
        self.returned = len(result)
        self.grads.finish()
        for handle in self._passages:
            handle.remove()
        for name, x in zip(self.call.state.names, self.call.state.tensors, strict=True):
            if id(x) in self.call.state.cut and x.grad is not None:
                _refuse_passage(name)
        self._refuse_changes(inputs)
        self._leaves = list(self._made(result, inputs))
        out: list[Tensor] = []
        given = {id(x): leaf for leaf, x in zip(self.where, inputs, strict=True)}
        given |= {id(x): i for i, x in enumerate(self.call.state.tensors, len(self.call.arguments))}
        for leaf, x, grad in self._watched:
            if (now := x.grad) is not grad and id(now) in given:
                self._takes.append((leaf, "grad", given[id(now)]))
            elif now is not grad:
                self._grads.append((leaf, now is not None))
                cotangents.note(now, x)
                out += [] if now is None else [self.lifted.seen(now)]
            elif id(x) in self.grads.dropped:
                self._grads.append((leaf, False))
        return out

    def _made(self, result: Sequence[Any], inputs: Sequence[Tensor]) -> Iterator[tuple[int, bool]]:
        """Results that require a gradient because the function says so."""
        given = set(map(id, (*inputs, *self.call.state.tensors)))
        given |= {id(self.lifted.seen(x)) for x in self.call.state.tensors}
        for i, x in enumerate(result):
            if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and id(x) not in given:
                if x.grad is not None:
                    raise ShardingError(
                        f"result {i} has a gradient that backward() left inside the traced function",
                        rule="of results, the values come back; .grad comes back of what the function is given",
                        remedy="return x.grad beside it",
                    )
                yield i, isinstance(x, torch.nn.Parameter)

    def note_lost(self, error: Exception, graph: fx.Graph) -> None:
        """Say in an error of the function's what it wrote before: on one device that would have happened."""
        every = (*self.argument_names, *self.call.state.names)
        inputs = dict(zip(graph.find_nodes(op="placeholder"), every, strict=False))
        lost = [inputs[node] for node in find_written_nodes(graph) if node in inputs]
        first = len(self.call.arguments)
        places = (*self.where, *range(first, first + len(self.call.state.tensors)))
        of = dict(zip(places, every, strict=True))
        lost += [f"{of[leaf]}.grad" for leaf, x, grad in self._watched if x.grad is not grad]
        if lost:
            more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
            names = ", ".join(lost[:_NAMED])
            error.add_note(f"Not written: {names}{more}. A jitted function writes when it has returned.")

    def _refuse_changes(self, inputs: Sequence[Tensor]) -> None:
        """Refuse what the function did to autograd's part of its inputs: a program returns values."""
        arguments = [self.call.arguments[i] for i in self.where]
        names = [*self.argument_names, *self.call.state.names]
        wrong = [
            f"{name} {change}"
            for name, x, old in zip(
                names, (*inputs, *self.call.state.tensors), (*self._given, *self._before), strict=True
            )
            if (change := old.change(x))
        ]
        grads = {id(x): grad for _, x, grad in self._watched}
        for name, x, given in zip(self.argument_names, inputs, arguments, strict=True):
            results = isinstance(given, Tensor) and given.requires_grad and not given.is_leaf
            if results and x.grad is not grads.get(id(x)):
                wrong.append(f"{name} is a result of other ops, and backward() goes back into it")
        if wrong:
            raise ShardingError(
                "the traced function changes what autograd knows of its inputs",
                wrong,
                rule="a program returns values, and .grad of leaves; an input's history, hooks and flags stay",
                remedy="write under torch.no_grad() or of detach()ed values; requires_grad_() and register_hook() "
                "before the call; return the loss, and call backward() outside",
            )

    def _backward(self, result: Sequence[Any], inputs: Sequence[Tensor], tracer: Any) -> list[Tensor]:
        made = {i for i, _ in self._leaves}
        outs = [i for i, x in enumerate(result) if isinstance(x, Tensor) and x.requires_grad and i not in made]
        owners = dict(zip(self.where, inputs, strict=True))
        owners |= {len(self.call.arguments) + i: x for i, x in enumerate(self.call.state.tensors)}
        wanted = {leaf: x for leaf, x in owners.items() if x.requires_grad}
        if not outs or not wanted:
            return []
        self._refuse_history(wanted)
        for x in owners.values():  # hooks run where the gradients go on: outside
            for hooks, _ in hooks_of(x).values():
                hooks.clear()  # in place: the history of a result knows the dict, too
        before = set(tracer.graph.nodes)
        cotangents = [placeholder(tracer, self.lifted.mode, result[i], snapshot=True) for i in outs]
        try:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                found = pulled([result[i] for i in outs], list(wanted.values()), [c.value for c in cotangents])
        except (RuntimeError, ShardingError) as error:  # as torch has it, the way back is refused when somebody goes it
            if self.strict and FREED not in str(error):
                raise
            for node in reversed(tracer.graph.nodes):
                if node not in before:
                    tracer.graph.erase_node(node)
            known = refusal(error, tracer, {})
            why = f"{known.what}, at {known.offenders[0]}" if known else str(error).partition("\n")[0]
            self._refused = tuple(outs), next(iter(wanted)), why
            error.__traceback__ = None  # whose frames, once looked at, hold values of the trace
            return []
        self.cotangents = outs
        self._within = tuple(itertools.compress(outs, is_within([result[i] for i in outs])))
        _refuse_retained([x for i in outs if (x := result[i]).retains_grad])
        if all(x is None for x in found):  # the results have a history all the same: one zero that nobody reaches
            leaf, x = next(iter(wanted.items()))
            self._gradients, self._reached = [leaf], (frozenset(),)
            return [torch.zeros_like(self.lifted.seen(x))]
        self._gradients = [leaf for leaf, x in zip(wanted, found, strict=True) if x is not None]
        # A Function may have a gradient that no cotangent counts in, such as that of an auxiliary loss.
        ways = [origins([result[i] for i in outs], through=through) for through in (False, True)]
        ends = [end(wanted[leaf]) for leaf in self._gradients]
        self._reached = tuple(ways[0].get(at) or ways[1].get(at, frozenset()) for at in ends)
        return [self.lifted.seen(x) for x in found if x is not None]

    def _refuse_history(self, wanted: Mapping[int, Tensor]) -> None:
        """Refuse results of ops outside that could not be cut off where they come from another input."""
        ends = {end(x): leaf for leaf, x in wanted.items()}
        called = dict(zip(self.where, self.argument_names, strict=True))
        called |= dict(enumerate(self.call.state.names, len(self.call.arguments)))
        for leaf, x in wanted.items():
            if x.grad_fn is None or leaf < len(self.call.arguments):
                continue
            behind = {at for at in origins([x]) if at in ends and ends[at] != leaf}
            if behind:
                raise ShardingError(
                    f"{called[leaf]} comes from {called[ends[behind.pop()]]}, and the traced function reads both",
                    rule="an input has no history inside; this one is held by something that cannot hold another for "
                    "the time of the trace (a tuple, a default argument, or it is an argument, too)",
                    remedy="keep it without its history (self.h = tuple(x.detach() for x in h)), compute it inside, or "
                    "pass it as an argument",
                )

    def names(self, results: Sequence[str]) -> tuple[str, ...]:
        """What the cotangents are called, given the names of the results."""
        return tuple(f"gradient of {results[i]}" for i in self.cotangents)

    def after(self, graph: fx.Graph, written: Written, leaves: Sequence[int]) -> ExtraOutputs:
        """All of it; what is `written`, to inputs that are these leaves, is last in the graph, and goes first."""
        output = graph.output_node()
        outs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        at = self.returned
        grads: list[tuple[int, int | None]] = []
        for leaf, there in self._grads:
            grads.append((leaf, at if there else None))
            at += there
        changed = [leaves[i] for i in (*written.values, *written.data)]
        last = len(outs) - len(changed)
        output.args = ((*outs[:at], *outs[last:], *outs[at:last]),)
        new = tuple((leaf, at + i) for i, leaf in enumerate(changed))
        at += len(changed)
        gradients = tuple((leaf, at + i) for i, leaf in enumerate(self._gradients))
        return ExtraOutputs(
            tuple(grads),
            new[: len(written.values)],
            new[len(written.values) :],
            (*self._takes, *((leaves[i], "data", leaves[j]) for i, j in written.others)),
            gradients,
            tuple(self.cotangents),
            self._within,
            tuple(self.rebound),
            self._reached,
            read_back(graph, leaves, len(gradients)) if gradients else (),
            tuple(self._leaves),
            *self._refused,
        )


FREED = "backward through the graph a second time"  # a loss that is returned after its backward()


def _refuse_retained(results: Sequence[Tensor]) -> None:
    """Refuse results that expect the gradient of what follows them inside: outside, they are results side by side."""
    if results:
        raise ShardingError(
            "the traced function returns tensors that retain their gradient",
            [typeof(x) for x in results],
            rule="going back from one result of a program gives gradients to its inputs, not to its other results",
            remedy="call backward() inside and return h.grad; or add a zero that is an argument, h = h + zero, with "
            "requires_grad=True: its gradient is that of h",
        )


def _refuse_passage(name: str, _: Tensor | None = None) -> NoReturn:
    raise ShardingError(
        "the traced function calls backward() through a result of other ops",
        [f"{name} has a history outside the function"],
        rule="a program returns values, and .grad of leaves; it does not go on into a history outside",
        remedy="return the loss, and call backward() outside; or detach() the tensor",
    )


def move_inputs_first(graph: fx.Graph) -> None:
    """Inputs that were found on the way stand in front of all ops."""
    ops = [n for n in graph.nodes if n.op != "placeholder"]
    first = ops[0]
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        first.prepend(node)
