"""Traces a function once: runs it on tensors without values, and makes a functional graph of the ops that it calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import has_proxy_slot, make_fx

from shardlib.core.func_transforms import name_of
from shardlib.core.mode_restore import with_function_modes
from shardlib.core.plain_types import plain_types
from shardlib.core.source_lines import Line, LineRecorder
from shardlib.core.torch_internals.strided_only import refuse_unstrided
from shardlib.core.torch_internals.torch_private import IS_PARAMETER, FakeTensor, FakeTensorMode, memory_of, pytree
from shardlib.frontend.epilogue import Epilogue
from shardlib.frontend.functionalize import Written, functionalize
from shardlib.frontend.guards.flatten_call import FlatCall, Static, find_aliases, is_number, is_tensor, leaf_names
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.guards.number_guards import NumberGuards
from shardlib.frontend.guards.number_inputs import NumberMode, UnsupportedNumbersError
from shardlib.frontend.guards.torch_modes import suspend_modes
from shardlib.frontend.hazards.default_dtype import refuse_changed_default
from shardlib.frontend.hazards.dtype_checks import refuse_kernels
from shardlib.frontend.hazards.grad_reads import GradReads
from shardlib.frontend.hazards.iterators import IteratorPositions
from shardlib.frontend.hazards.memory_queries import TensorQueryMode, refuse_offset_inputs
from shardlib.frontend.hazards.numpy_args import refuse_writes
from shardlib.frontend.hazards.rng_state import RandomStates
from shardlib.frontend.hazards.unsupported import explain_refusal, refuse_absent, refuse_quantized, refuse_subclasses
from shardlib.frontend.hazards.user_errors import explain_mistake
from shardlib.frontend.lifted_inputs import (
    Contents,
    LiftedInputs,
    flatten_result,
    refuse_changed_arguments,
    refuse_opaque,
)
from shardlib.frontend.results import find_repeats, output_strides, refuse_attributes
from shardlib.frontend.retarget_device import can_trace_on, retarget
from shardlib.frontend.reuse.python_loops import LoopReuse
from shardlib.frontend.reuse.subgraph_reuse import SubgraphReuse
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.frontend.torch_rewrites.lr_schedulers import trace_schedulers
from shardlib.frontend.torch_rewrites.math_functions import trace_math
from shardlib.frontend.traced_graph import TracedFunction
from shardlib.frontend.tracer import call_in_own_module, finish_graph, instrument_tracer, release_constants
from shardlib.frontend.tracing_scope import skip_graph_source, tracing_scope
from shardlib.ops.set_data import OP as SET_DATA
from shardlib.tensor.sharded_tensor import user_attributes
from shardlib.tensor.tensor_meta import contiguous_strides

_Result = tuple[list[tuple[Any, Any]], pytree.TreeSpec, list[str]]  # as `flatten_result` returns it


@dataclass(frozen=True)
class TraceRequest:
    """A function, one call of it, and the options of `trace`."""

    fn: Callable[..., Any]
    call: FlatCall
    static: Collection[int | str]
    device: torch.device | None
    differentiate: bool
    apart: Collection[int]
    watch: MutationTracker | None


class TraceAttempt:
    """One run of the function, under one assumption about its numbers and its reusable modules.

    `numbers` makes inputs of numbers; None takes them as constants. `once` holds the modules that are traced once.
    """

    tracer: Any  # set when the function runs, as are the names, the leaves and the tree of its result
    result_names: list[str]
    result: list[Any]
    result_tree: pytree.TreeSpec

    def __init__(
        self, request: TraceRequest, numbers: NumberMode | None, once: SubgraphReuse, grads: GradReads
    ) -> None:
        call, device = request.call, request.device
        self.request, self.call, self.watch = request, call, request.watch
        self.numbers, self.once, self.grads = numbers, once, grads
        uncut = [call.state.cut.get(id(x), x) for x in call.state.tensors]
        self.twins = {i: at for i, at in find_aliases(call.arguments, uncut).items() if i not in request.apart}
        self.where = tuple(i for i, x in enumerate(call.arguments) if is_tensor(x) and i not in self.twins)
        self.names = list(leaf_names(request.fn, call, range(len(call.leaves))))
        refuse_unstrided("the traced function", zip(self.names, call.leaves, strict=True))
        refuse_subclasses(zip(self.names, call.leaves, strict=True))
        self.traced_on = device if device is None or can_trace_on(device) else torch.device("cpu")
        env = None if numbers is None else numbers.env
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
        self.lines = LineRecorder(_definition_line(request.fn))
        self.lifted = LiftedInputs(call.state, self.mode, self.watch)
        names = [self.names[i] for i in self.where]
        self.epilogue = Epilogue(call, self.lifted, self.where, names, grads, strict=numbers is not None)
        self.queries = TensorQueryMode(grads)

    def run(self) -> TracedFunction:
        """Runs the function under the tracer, and returns its functional graph."""
        state = self.call.state

        @with_function_modes
        def run_function(*inputs: Tensor) -> list[Tensor]:
            return self._run_function(inputs, users_modes)

        with (
            suspend_modes() as users_modes,
            tracing_scope(state.generators if state.is_read else None, marked=state.seeds),
            self.mode,
            self.lifted,
            self.epilogue,
            skip_graph_source(),
            self.once.on(),
            trace_schedulers(self.watch, self.numbers),
            torch.DisableTorchFunction(),  # make_fx reads some attributes of every input
        ):
            tensors = [self.call.arguments[i] for i in self.where]
            inputs = [_make_input(x, self.traced_on, tensors) for x in tensors]
            gm = make_fx(run_function, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        release_constants(self.tracer)
        return self._make_traced(gm)

    # --- the function runs ----------------------------------------------------------------------------------------

    def _run_function(self, inputs: Sequence[Tensor], users_modes: Any) -> list[Tensor]:
        """Calls the user's function; returns the tensors of its result, then those of the extra outputs."""
        call, state = self.call, self.call.state
        with_arguments = [(x, call.arguments[i]) for i, x in zip(self.where, inputs, strict=True)]
        names = {id(x): self.names[i] for i, x in zip(self.where, inputs, strict=True)}
        self.tracer = tracer = instrument_tracer(self.lines, with_arguments)
        self.lifted.enter(tracer, self.traced_on)
        loops = None
        if self.watch is not None:
            self.once.watch_modules(tracer, self.lines.fallback)
            loops = None if self.once.none else LoopReuse(self.once, tracer, self.lines.fallback)
        self.queries.explain = lambda error: explain_refusal(error, tracer, names)
        self.epilogue.start(inputs)
        args, kwargs = arguments = pytree.tree_unflatten(self._replace_leaves(inputs), call.tree)
        contents = Contents.read(arguments)
        self.queries.inputs = {id(x): (names[id(x)], original) for x, original in with_arguments}
        named_state = zip(state.names, state.tensors, strict=True)
        self.queries.inputs |= {id(x): (name, state.cut.get(id(x), x)) for name, x in named_state}
        if self.numbers is not None and self.watch is not None:
            self.watch.give(self.numbers, len(call.arguments) + len(state.tensors))
        with nullcontext() if self.numbers is None else self.numbers:
            try:
                result = self._call(args, kwargs, loops, users_modes)
            except Exception as error:
                if self.lifted.refusal is not None and error is not self.lifted.refusal:
                    raise self.lifted.refusal from error
                refused = explain_refusal(error, tracer, names) or explain_mistake(error, names)
                self.epilogue.note_lost_writes(refused or error, tracer.graph)
                if refused is not None:
                    raise refused from error
                raise
            refuse_changed_arguments(self.lines.fallback.function, contents, arguments)
            return self._collect_outputs(inputs, *result)

    def _replace_leaves(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Returns the leaves of the arguments with stand-ins for tensors and numbers."""
        leaves = [x.value if isinstance(x, Static) else x for x in self.call.arguments]
        for i, x in zip(self.where, inputs, strict=True):
            original, leaves[i] = leaves[i], x
            if isinstance(original, Tensor):
                if isinstance(original, torch.nn.Parameter):
                    setattr(x, IS_PARAMETER, True)
                x.__dict__.update({k: y for k, y in user_attributes(original).items() if k not in x.__dict__})
        for i, at in self.twins.items():
            leaves[i] = self.call.state.tensors[at - len(leaves)] if at >= len(leaves) else leaves[at]
        if self.numbers is not None:
            self.numbers.leaf_count = len(self.call.leaves)
            leaves = [self.numbers.wrap_leaf(i, self.names[i], x) if is_number(x) else x for i, x in enumerate(leaves)]
        return leaves

    def _call(self, args: Any, kwargs: Any, loops: LoopReuse | None, users_modes: Any) -> _Result:
        """Calls the function where queries of tensors are answered; refuses draws, and steps of iterators."""
        state, name = self.call.state, self.lines.fallback.function
        objects: Mapping[int, Any] = {} if self.watch is None else self.watch.before.owners
        random_states, iterators = RandomStates(state.kept), IteratorPositions(state.kept)
        around = nullcontext() if self.watch is None else self.watch.around()
        with (
            loops or nullcontext(),
            self.queries,
            users_modes,
            trace_math(),
            random_states,
            around,
            plain_types(state.type_spaces),
        ):
            result = flatten_result(register_mappings(call_in_own_module(self.request.fn, args, kwargs)), objects)
            if loops is not None:
                loops.interrupt()
            random_states.refuse_draws(name)
            iterators.refuse_steps(name)
        if (refused := self.queries.refusal or self.lifted.refusal) is not None:  # the function caught it
            raise refused
        return result

    def _collect_outputs(
        self, inputs: Sequence[Tensor], leaves: Sequence[tuple[Any, Any]], tree: pytree.TreeSpec, opaque: Sequence[str]
    ) -> list[Tensor]:
        """Returns the tensors of the result and of the extra outputs; refuses results that no call can return."""
        stand_ins = {id(x): (self.names[i], self.call.arguments[i], x) for i, x in zip(self.where, inputs, strict=True)}
        computed = ((f"result{pytree.keystr(path)}", None, x) for path, x in leaves if isinstance(x, FakeTensor))
        refuse_attributes([*stand_ins.values(), *(each for each in computed if id(each[2]) not in stand_ins)])
        refuse_opaque(opaque)
        returned = self.lifted.returned([leaf for _, leaf in leaves])
        self.result_names = [f"result{pytree.keystr(path)}" for path, _ in leaves]
        if self.watch is not None:
            self._find_mutations(self.watch, inputs, returned)
        with plain_types(self.call.state.type_spaces):  # hooks and custom gradients run
            extra = self.epilogue.finish(returned, inputs, self.tracer, differentiate=self.request.differentiate)
        if self.watch is not None:
            self.watch.take_back(gone_back=bool(self.epilogue.backward.cotangents))
        self.result, self.result_tree = [*returned, *extra], tree
        return [x for x in self.result if isinstance(x, Tensor)]

    def _find_mutations(self, watch: MutationTracker, inputs: Sequence[Tensor], returned: list[Any]) -> None:
        """Notes the places that hold other values now; new tensors in them join `returned` and the result's names."""
        leaf_of = {id(x): leaf for leaf, x in self.epilogue.state.items()}
        leaf_of |= {id(x): i for i, x in zip(self.where, inputs, strict=True)}
        pairs = {i: (self.call.leaves[i], x) for i, x in zip(self.where, inputs, strict=True)}
        pairs |= {leaf_of[id(x)]: (x, y) for x, y in self.lifted.stand_ins()}
        memory = {memory_of(x.untyped_storage()): (i, original, x) for i, (original, x) in pairs.items()}
        if any(node.target is SET_DATA for node in self.tracer.graph.nodes):
            memory = {}  # only functionalization finds out whose memory a view shows
        self.epilogue.rebound = watch.rebound(
            leaf_of, memory, returned, self.result_names, lambda x: has_proxy_slot(x, self.tracer)
        )

    # --- the graph ------------------------------------------------------------------------------------------------

    def _make_traced(self, gm: fx.GraphModule) -> TracedFunction:
        """Finishes the graph, and describes its inputs and outputs."""
        call, numbers = self.call, self.numbers
        refuse_changed_default(self.lines.fallback.function, gm.graph)
        if numbers is not None and not numbers.inline_scalars(gm):
            raise UnsupportedNumbersError
        first, count = len(call.arguments), len(self.epilogue.backward.cotangents)
        leaves = (*self.where, *(first + i for i in self.lifted.prune(gm)), *(-1,) * count)
        input_names = (*(self.names[i] for i in leaves if i >= 0), *self.epilogue.name_cotangents(self.result_names))
        if self.queries.line is not None:
            named = ((self.names[i], call.leaves[i]) for i in leaves if i >= 0)
            refuse_offset_inputs(self.lines.fallback.function, self.queries.line, named)
        written = self._functionalize(gm, input_names)
        after = self.epilogue.place_outputs(gm.graph, written, leaves)
        plain = NumberGuards({i: x for i, x in enumerate(call.leaves) if is_number(x)})
        return TracedFunction(
            gm,
            self.lines.fallback.function,
            input_names,
            leaves,
            tuple(call.paths[i] if 0 <= i < len(call.paths) else None for i in leaves),
            tuple(self.result_names),
            self.result_tree,
            static=self.request.static,
            after=after,
            served=plain if numbers is None else numbers.guards(),
            asks_memory=self.queries.line is not None,
            looked=self.grads.looked,
            twins={self.names[i]: self.names[at] for i, at in self.twins.items()},
            strides=output_strides(self.result, after, call.leaves),
            same=find_repeats(self.result[: self.result_tree.num_leaves]),
        )

    def _functionalize(self, gm: fx.GraphModule, input_names: Sequence[str]) -> Written:
        """Names the graph's inputs, refuses ops that the device lacks, and makes in-place ops functional."""
        device, state = self.request.device, self.call.state
        with self.mode:
            line, differentiable = self.lines.fallback, state.is_read
            finish_graph(gm, input_names, self.result, line, self.mode, differentiable=differentiable)
        refuse_absent(gm.graph, device)
        refuse_quantized(gm.graph)
        if device is None or device.type == "cpu":  # GPUs have kernels for other dtypes
            placeholders = gm.graph.find_nodes(op="placeholder")
            refuse_kernels(gm.graph, dict(zip(placeholders, input_names, strict=True)))
        refuse_writes(gm, state.kept)
        with self.mode:
            written = functionalize(gm, input_names)
        if device is not None and device.type != "cpu":
            retarget(gm, device)
        return written


def _make_input(x: Any, device: torch.device | None, among: Sequence[Any]) -> Tensor:
    """Returns an empty tensor like `x` on `device`; None: where `x` is, or else the first of `among` not on meta."""
    if device is None:
        real = (t.device for t in among if t.device.type != "meta")
        device = x.device if x.device.type != "meta" else next(real, torch.device("cpu"))
    requires_grad = bool(getattr(x, "requires_grad", False))
    shape = tuple(x.shape)
    strides = x.stride() if isinstance(x, Tensor) else contiguous_strides(shape)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=device, requires_grad=requires_grad)


def _definition_line(fn: Callable[..., Any]) -> Line:
    inner = inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    name = name_of(fn)
    if code is None:
        return Line("", 0, name, "")
    return Line(code.co_filename, code.co_firstlineno, name, "")
