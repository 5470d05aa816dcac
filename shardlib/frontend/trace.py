"""Trace: a user's function -> one functional graph of ATen ops, with the user's line on every node.

The function runs once, on fake tensors. Python runs as it is written: its ints, floats and flags become constants of
the graph. Attention is caught whole, before torch picks a kernel for some device; in-place writes are rewritten after.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import has_proxy_slot, make_fx

from shardlib.core.context import tracing
from shardlib.core.errors import TraceAnewError
from shardlib.core.func_transforms import name_of
from shardlib.core.mode_restore import with_function_modes
from shardlib.core.plain_types import plain_types
from shardlib.core.source_lines import Line, LineRecorder
from shardlib.core.strided_only import refuse_unstrided
from shardlib.core.torch_private import (
    IS_PARAMETER,
    LOADED_BY_FAKES,
    FakeTensor,
    FakeTensorMode,
    late,
    memory_of,
    pytree,
)
from shardlib.frontend.epilogue import Epilogue
from shardlib.frontend.functionalize import functionalize
from shardlib.frontend.gradient_tags import noted
from shardlib.frontend.guards.flatten_call import (
    FlatCall,
    Static,
    find_aliases,
    flatten_call,
    is_number,
    is_tensor,
    leaf_names,
)
from shardlib.frontend.guards.mappings import register_mappings
from shardlib.frontend.guards.number_guards import NumberGuards
from shardlib.frontend.guards.number_inputs import NumberMode, UnsupportedNumbersError
from shardlib.frontend.guards.object_state import State
from shardlib.frontend.guards.torch_modes import suspend_modes
from shardlib.frontend.hazards import numpy_args
from shardlib.frontend.hazards.default_dtype import given_back, refuse_other_default
from shardlib.frontend.hazards.dtype_checks import refuse_kernels
from shardlib.frontend.hazards.escaped_values import outlived
from shardlib.frontend.hazards.grad_reads import Grads
from shardlib.frontend.hazards.iterators import Iterators
from shardlib.frontend.hazards.memory_queries import Asked, refuse_guests
from shardlib.frontend.hazards.rng_state import Chance
from shardlib.frontend.hazards.threads import refuse_nested
from shardlib.frontend.hazards.unsupported import refusal, refuse_absent, refuse_quantized, refuse_subclasses
from shardlib.frontend.hazards.user_errors import mistake
from shardlib.frontend.hazards.value_inspection import logged
from shardlib.frontend.lazy_graph_module import lazily
from shardlib.frontend.lifted_inputs import Contents, Lifted, flatten_result, refuse_changed_arguments, refuse_opaque
from shardlib.frontend.results import refuse_attributes, repeated, strides_of
from shardlib.frontend.retarget_device import is_here, move
from shardlib.frontend.reuse.loop_replay import backward_mismatches
from shardlib.frontend.reuse.python_loops import LoopReuse
from shardlib.frontend.reuse.subgraph_reuse import SubgraphReuse
from shardlib.frontend.side_effects.mutations import MutationTracker
from shardlib.frontend.torch_flags import switched
from shardlib.frontend.torch_rewrites.attention import AttentionCapture
from shardlib.frontend.torch_rewrites.averaged_model import averaging
from shardlib.frontend.torch_rewrites.composites import Composites
from shardlib.frontend.torch_rewrites.decompositions import DECOMPOSITIONS
from shardlib.frontend.torch_rewrites.first_order_grad import first_order
from shardlib.frontend.torch_rewrites.grad_scaler import scaling
from shardlib.frontend.torch_rewrites.lr_schedulers import scheduling
from shardlib.frontend.torch_rewrites.math_functions import followed
from shardlib.frontend.torch_rewrites.optimizers import counting
from shardlib.frontend.traced_graph import Traced
from shardlib.frontend.tracer import called, called_inside, finish, forget, recorded
from shardlib.ops.set_data import OP as SET_DATA
from shardlib.primitives.random.keys import one_program
from shardlib.tensor.sharded_tensor import user_attributes
from shardlib.tensor.tensor_meta import contiguous_strides


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    static: Collection[int | str] = (),
    device: torch.device | str | None = None,
    state: State | None = None,
    differentiate: bool = False,
    exact: bool = False,
    apart: Collection[int] = (),
    watch: MutationTracker | None = None,
) -> Traced:
    """Trace `fn(*args, **kwargs)`.

    Tensor leaves of the arguments (real, meta, fake or sharded: only shape, strides, dtype, device and `requires_grad`
    are read) and the tensors of `state` become inputs; numbers become inputs where they only enter arithmetic; every
    other leaf is a constant, and so is every argument whose position or name is in `static`. Other real tensors that
    `fn` closes over become constants. Writes to inputs become results. `device` overrides where inputs are thought to
    live; where that is not the CPU, all that the function makes lives there too. With `exact`, all numbers are
    constants. With `differentiate`, the gradients of all inputs that require one are results, given cotangents. One
    tensor in several places of the call is one input, but for the leaves in `apart`. What `fn` leaves where `watch`
    looks is among the results.

    Raises ShardingError, with the user's line, when `fn` needs the value of a tensor, and when a result's shape depends
    on values.

    Example:
        >>> traced = trace(lambda x, n: {"y": x.sin() * n}, (torch.empty(3, device="meta"), 2.0))
        >>> traced.input_names, traced.output_names
        (('x',), ("result['y']",))
        >>> traced.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0].args
        (sin, n)
    """
    late(LOADED_BY_FAKES)  # now, while no frame holds anything of the trace
    call = flatten_call(fn, args, kwargs or {}, static, state)
    what = fn, call, static, device, differentiate, apart, watch

    def traced(numbers: Callable[[], NumberMode | None]) -> Traced:
        once = SubgraphReuse()
        for attempt in itertools.count():
            given, grads = numbers(), Grads(hidden=not call.state.changing.grads)
            failed: list[str] = []
            token = backward_mismatches.set(failed)
            try:
                found, tracked, inputs = _trace(*what, given, once, grads)
                grads.refuse_hidden(call.state.grads)
            except Exception as error:  # whatever the function raises: without pieces it does so again, to the caller
                grads.refuse_hidden(call.state.grads)
                if not once.used or watch is None or isinstance(error, TraceAnewError):
                    raise
            else:
                if not (once.refused or failed):
                    mine = (*once.made, *(() if given is None else given.made))
                    return replace(found, outlived=(*outlived(tracked, inputs), *mine))
            finally:
                backward_mismatches.reset(token)
            assert watch is not None, "only functions that are watched have pieces"
            once = SubgraphReuse(none=attempt == _ATTEMPTS or not once.refused)  # what was refused is not tried again
            watch.restore()
        raise AssertionError("unreachable")

    plain = state is not None and state.exact
    given = watch is not None and watch.before.numbers
    if not exact and (given or (any(map(is_number, call.arguments)) and not plain)):
        try:
            return traced(functools.partial(NumberMode, plain))
        except _NOT_NUMBERS:  # something took a number for more than arithmetic: then it is a constant
            if watch is not None:
                watch.restore()
    return traced(lambda: None)


@given_back()
def _trace(
    fn: Callable[..., Any],
    call: FlatCall,
    static: Collection[int | str],
    device: torch.device | str | None,
    differentiate: bool,
    apart: Collection[int],
    watch: MutationTracker | None,
    numbers: NumberMode | None,
    once: SubgraphReuse,
    grads: Grads,
) -> tuple[Traced, Mapping[Any, Any], set[int]]:
    """The function; the tensors that its tracer knows; which of these were found, or stand for such, by their ids."""
    uncut = [call.state.cut.get(id(x), x) for x in call.state.tensors]
    same = {i: at for i, at in find_aliases(call.arguments, uncut).items() if i not in apart}
    where = tuple(i for i, leaf in enumerate(call.arguments) if is_tensor(leaf) and i not in same)
    names = list(leaf_names(fn, call, range(len(call.leaves))))
    tensors = [call.arguments[i] for i in where]
    refuse_unstrided("the traced function", zip(names, call.leaves, strict=True))
    refuse_subclasses(zip(names, call.leaves, strict=True))
    there = None if device is None else torch.device(device)
    traced_on = there if there is None or is_here(there) else torch.device("cpu")
    env = None if numbers is None else numbers.env
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env, static_shapes=True)
    lines = LineRecorder(_definition(fn))
    lifted = Lifted(call.state, mode, watch)
    ending = Epilogue(call, lifted, where, [names[i] for i in where], grads, strict=numbers is not None)
    asked = Asked(grads)
    tracers: list[Any] = []
    result: list[Any] = []  # what fn returned, as paths, leaves and tree

    @with_function_modes
    def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
        tracer = recorded(lines, [(x, call.arguments[i]) for i, x in zip(where, inputs, strict=True)])
        tracers.append(tracer)
        lifted.enter(tracer, traced_on)
        loops = None
        if watch is not None:
            once.watch_modules(tracer, lines.fallback)
            loops = None if once.none else LoopReuse(once, tracer, lines.fallback)
        named = {id(x): names[i] for i, x in zip(where, inputs, strict=True)}
        asked.explain = lambda error: refusal(error, tracer, named)
        ending.start(inputs)
        leaves = [x.value if isinstance(x, Static) else x for x in call.arguments]
        for i, x in zip(where, inputs, strict=True):
            leaves[i] = x
            if isinstance(call.arguments[i], torch.Tensor):
                if isinstance(call.arguments[i], torch.nn.Parameter):
                    setattr(x, IS_PARAMETER, True)
                x.__dict__.update({k: y for k, y in user_attributes(call.arguments[i]).items() if k not in x.__dict__})
        for i, at in same.items():
            leaves[i] = call.state.tensors[at - len(leaves)] if at >= len(leaves) else leaves[at]
        if numbers is not None:
            numbers.last = len(call.leaves)
            leaves = [numbers.give(i, names[i], x) if is_number(x) else x for i, x in enumerate(leaves)]
        a, k = pytree.tree_unflatten(leaves, call.tree)
        contents = Contents.of((a, k))
        asked.inputs = {id(x): (names[i], call.arguments[i]) for i, x in zip(where, inputs, strict=True)}
        state = call.state
        asked.inputs |= {id(x): (n, state.cut.get(id(x), x)) for n, x in zip(state.names, state.tensors, strict=True)}
        if numbers is not None and watch is not None:
            watch.give(numbers, len(leaves) + len(call.state.tensors))
        known = {} if watch is None else watch.before.owners
        chance, iterators = Chance(call.state.kept), Iterators(call.state.kept)
        with nullcontext() if numbers is None else numbers:
            try:
                around = nullcontext() if watch is None else watch.around()
                with (
                    loops or nullcontext(),
                    asked,
                    users,
                    followed(),
                    chance,
                    around,
                    plain_types(call.state.type_spaces),
                ):
                    found, tree, opaque = flatten_result(register_mappings(called_inside(fn, a, k)), known)
                    if loops is not None:
                        loops.interrupt()
                    chance.refuse_draws(lines.fallback.function)
                    iterators.refuse_steps(lines.fallback.function)
                if (unseen := asked.refusal or lifted.refusal) is not None:  # somebody went on without the value
                    raise unseen
            except Exception as error:
                if lifted.refusal is not None and error is not lifted.refusal:
                    raise lifted.refusal from error
                refused = refusal(error, tracer, named) or mistake(error, named)
                ending.note_lost(refused or error, tracer.graph)
                if refused is not None:
                    raise refused from error
                raise
            refuse_changed_arguments(lines.fallback.function, contents, (a, k))
            standing = {id(x): (names[i], call.arguments[i], x) for i, x in zip(where, inputs, strict=True)}
            made = ((f"result{pytree.keystr(path)}", None, x) for path, x in found if isinstance(x, FakeTensor))
            refuse_attributes([*standing.values(), *(each for each in made if id(each[2]) not in standing)])
            refuse_opaque(opaque)
            returned = lifted.returned([leaf for _, leaf in found])
            own = [f"result{pytree.keystr(path)}" for path, _ in found]
            if watch is not None:
                leaf_of = {id(x): i for i, x in enumerate(call.state.tensors, len(leaves))}
                leaf_of |= {id(x): i for i, x in zip(where, inputs, strict=True)}
                stands = {i: (call.leaves[i], x) for i, x in zip(where, inputs, strict=True)}
                stands |= {leaf_of[id(x)]: (x, y) for x, y in lifted.stand_ins()}
                memory = {memory_of(x.untyped_storage()): (i, of, x) for i, (of, x) in stands.items()}
                if any(node.target is SET_DATA for node in tracer.graph.nodes):
                    memory = {}  # whose memory a view shows, only functionalization finds out
                ending.rebound = watch.rebound(leaf_of, memory, returned, own, lambda x: has_proxy_slot(x, tracer))
            with plain_types(call.state.type_spaces):  # hooks and custom gradients run
                more = ending.finish(returned, inputs, tracer, differentiate=differentiate)
            if watch is not None:
                watch.take_back(gone_back=bool(ending.cotangents))
        result.extend((own, [*returned, *more], tree))
        return [x for x in (*returned, *more) if isinstance(x, torch.Tensor)]

    with (
        suspend_modes() as users,
        _tracing(call.state.generators if call.state.is_read else None, marked=call.state.seeds),
        mode,
        lifted,
        ending,
        lazily(),
        once.on(),
        scheduling(watch, numbers),
        torch.DisableTorchFunction(),  # make_fx reads some attributes of every input
    ):
        inputs = [_fake(x, traced_on, tensors) for x in tensors]
        gm = make_fx(flat, DECOMPOSITIONS, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    forget(tracers[0])
    output_names, returned, out_tree = result
    refuse_other_default(lines.fallback.function, gm.graph)
    if numbers is not None and not numbers.inline_scalars(gm):
        raise UnsupportedNumbersError
    inputs_of = (*where, *(len(call.arguments) + i for i in lifted.prune(gm)), *(-1,) * len(ending.cotangents))
    if asked.line is not None:
        refuse_guests(lines.fallback.function, asked.line, ((names[i], call.leaves[i]) for i in inputs_of if i >= 0))
    input_names = (*(names[i] for i in inputs_of if i >= 0), *ending.names(output_names))
    with mode:
        finish(gm, input_names, returned, lines.fallback, mode, differentiable=call.state.is_read)
    refuse_absent(gm.graph, there)
    refuse_quantized(gm.graph)
    if there is None or there.type == "cpu":  # GPUs have kernels for other dtypes
        named = dict(zip(gm.graph.find_nodes(op="placeholder"), input_names, strict=True))
        refuse_kernels(gm.graph, named)
    numpy_args.refuse_writes(gm, call.state.kept)
    with mode:
        written = functionalize(gm, input_names)
    if there is not None and there.type != "cpu":
        move(gm, there)
    after = ending.after(gm.graph, written, inputs_of)
    traced = Traced(
        gm,
        lines.fallback.function,
        input_names,
        inputs_of,
        tuple(call.paths[i] if 0 <= i < len(call.paths) else None for i in inputs_of),
        tuple(output_names),
        out_tree,
        static,
        after,
        NumberGuards({i: x for i, x in enumerate(call.leaves) if is_number(x)})
        if numbers is None
        else numbers.served(),
        asked.line is not None,
        grads.looked,
        {names[i]: names[at] for i, at in same.items()},
        strides_of(returned, after, call.leaves),
        repeated(returned[: out_tree.num_leaves]),
    )
    return traced, tracers[0].tensor_tracker, {id(x) for pair in lifted.stand_ins() for x in pair}


# What Python and torch raise where a number is not what they expect.
_NOT_NUMBERS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    UnsupportedNumbersError,
)
_ATTEMPTS = 6  # at tracing pieces once
_FAKE_CACHE = 1 << 11
_LOCK = threading.RLock()  # torch's tracing state is global


@contextmanager
def _tracing(generators: Sequence[torch.Generator] | None, *, marked: bool) -> Iterator[None]:
    refuse_nested()
    with _LOCK, switched():
        if len(FakeTensorMode.cache) > _FAKE_CACHE:  # it has no bound of its own
            FakeTensorMode.cache_clear()
        collects = gc.isenabled()
        gc.disable()  # nothing made here is garbage yet, and looking for some took a quarter of the time
        try:
            draws = one_program(traced=True, generators=generators, marked=marked)
            with (
                tracing(),
                AttentionCapture(),
                Composites(),
                first_order(),
                noted(),
                counting(),
                scaling(),
                averaging(),
                numpy_args.shown(),
                called(),
                logged(),
                draws,
            ):
                yield
        finally:
            if collects:
                gc.enable()


def _fake(x: Any, device: torch.device | None, among: Sequence[Any]) -> torch.Tensor:
    if device is None:
        real = (t.device for t in among if t.device.type != "meta")
        device = x.device if x.device.type != "meta" else next(real, torch.device("cpu"))
    requires_grad = bool(getattr(x, "requires_grad", False))
    shape = tuple(x.shape)
    strides = x.stride() if isinstance(x, torch.Tensor) else contiguous_strides(shape)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=device, requires_grad=requires_grad)


def _definition(fn: Callable[..., Any]) -> Line:
    inner = inspect.unwrap(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    name = name_of(fn)
    if code is None:
        return Line("", 0, name, "")
    return Line(code.co_filename, code.co_firstlineno, name, "")
