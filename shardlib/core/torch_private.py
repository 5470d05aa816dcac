"""Private names of torch: all that shardlib uses, each with its reason, and in no other file.

They are looked up when this module is imported. What torch lacks is one error, which names all of it: a version that
shardlib does not know fails here, and not in the middle of somebody's call. Names of modules that nobody should have to
import are looked up when they are used.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.private_names import Names

SUPPORTED = ("2.11", "2.12", "2.13")  # of torch
_names = Names()
REASONS, LATE = _names.reasons, _names.lates
_torch, _attribute, _global = _names.value, _names.attribute, _names.variable
_name, _word, _late = _names.name, _names.word, _names.late
_slot, _late_slot = _names.slot, _names.late_slot


# --- types, which annotations name, too -------------------------------------------------------------------------------

if TYPE_CHECKING:
    import torch.utils._pytree
    from torch._guards import Source as Source
    from torch._library.custom_ops import CustomOpDef as CustomOpDef
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    pytree = torch.utils._pytree
else:
    CustomOpDef = _torch(
        "torch._library.custom_ops.CustomOpDef", "what `torch.library.custom_op` gives, which lists it not"
    )
    HigherOrderOperator = _torch("torch._ops.HigherOrderOperator", "nodes of a trace that take functions")
    OpOverload = _torch("torch._ops.OpOverload", "what nodes call, and rules are for")
    OpOverloadPacket = _torch("torch._ops.OpOverloadPacket", "a rule may be given to an op by its name alone")
    _FAKE = "torch._subclasses.fake_tensor."
    DataDependentOutputException = _torch(f"{_FAKE}DataDependentOutputException", "an op looks at values")
    DynamicOutputShapeException = _torch(f"{_FAKE}DynamicOutputShapeException", "values say what shape a result has")
    FakeTensor = _torch(f"{_FAKE}FakeTensor", "the values of a trace")
    FakeTensorMode = _torch(f"{_FAKE}FakeTensorMode", "shapes without memory")
    Source = _torch("torch._guards.Source", "where a number of a trace comes from: its symbols ask for one")
    pytree = _torch("torch.utils._pytree", "arguments and results as leaves; torch has no public one yet")
    TorchDispatchMode = _torch("torch.utils._python_dispatch.TorchDispatchMode", "documented there, and only there")


# --- ops, and what stands between a call and its kernel ---------------------------------------------------------------

c10d_functional = _torch("torch.ops._c10d_functional", "the collectives that compilers and counters know")
# Namespaces of ops that communicate, or belong to those who do: per-rank code.
PER_RANK = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"}
)
c_functions = _torch("torch._C._VariableFunctions", "C functions of torch, which parse arguments faster than ops")
all_op_names = _torch("torch._C._dispatch_get_all_op_names", "families of ops (_foreach_) that nothing else lists")
torchs_own_forms = _torch("torch._decomp.get_decompositions", "ops that torch itself writes as other ops")
schema_of = _attribute("torch.ops.aten.add.Tensor._schema", "arguments of an op: what is written, what is a view")
kernel_of = _attribute("torch.ops.aten.add.Tensor._op_dk", "an op by the kernel of one key: _foreach_ as single ops")
REASONS["torch._library.custom_ops.CustomOpDef._opoverload"] = "its op, by which rules are kept"  # only objects have it
op_of_custom = attrgetter("_opoverload")
CUSTOM_OPS: Any = _torch("torch._library.custom_ops.OPDEFS", "what defines the op of a name now: it may be another one")
PACKET = _word("torch.ops.aten.add.Tensor._overloadpacket", "by which counters of collectives know an op")

keys_below = _torch("torch._C._dispatch_keyset_full_after", "ops caught at a key go on below it")
keys_of = _torch("torch._ops._compute_keyset", "an operator that takes functions goes on below our kernel for it")
is_excluded = _torch("torch._C._dispatch_tls_is_dispatch_key_excluded", "who runs below autograd sees no tangents")
exclude_keys = _torch("torch._C._ExcludeDispatchKeyGuard", "programs run below autograd and autocast")
below_autograd = _torch("torch._C._AutoDispatchBelowAutograd", "a cheaper guard, where no autocast is on")
any_autocast = _torch("torch._C._is_any_autocast_enabled", "asked in every call: one question, not one a device")
without_autocast = _torch("torch._C._DisableAutocast", "kernels are asked for strides, whatever is switched on")

_MODES, _FUNCTION_MODES = "torch.utils._python_dispatch.", "torch.overrides."
dispatch_modes = _torch(f"{_MODES}_get_current_dispatch_mode_stack", "modes around a call: refused, told, or counting")
pop_dispatch_mode = _torch(f"{_MODES}_pop_mode", "modes that count do not see what ranks say to each other")
push_dispatch_mode = _torch(f"{_MODES}_push_mode", "modes that count are put back")
count_dispatch_modes = _torch("torch._C._len_torch_dispatch_stack", "asked in every call: whether such modes are on")
without_dispatch = _torch("torch._C._DisableTorchDispatch", "a fake tensor is made without a way through all modes")
without_modes = _torch(f"{_MODES}_disable_current_modes", "values of our own are computed beside the trace")
function_modes = _torch(f"{_FUNCTION_MODES}_get_current_function_mode_stack", "they act on a trace, and are in its key")
pop_function_mode = _torch(f"{_FUNCTION_MODES}_pop_mode", "the caller's modes are set aside in a trace")
push_function_mode = _torch(f"{_FUNCTION_MODES}_push_mode", "the caller's modes are put above, and back")
count_function_modes = _torch("torch._C._len_torch_function_stack", "asked in every call: whether such modes are on")
hears_functions = _torch("torch._C._is_torch_function_enabled", "the traced function is called as its caller is")
hears_nothing = _torch("torch._C._is_torch_function_all_disabled", "so it is, modes included")
function_modes_on = _torch("torch._C._EnableTorchFunction", "the traced function sees modes that the tracer does not")


# --- tensors, memory, fake tensors ------------------------------------------------------------------------------------

make_wrapper = _torch("torch.Tensor._make_wrapper_subclass", "documented: a tensor that has no memory")
no_torch_function = _torch("torch._C._disabled_torch_function_impl", "documented: a class that only dispatches")
version_of = _attribute("torch.Tensor._version", "whether a gradient, or a new parameter, was written to")
ASKS_VERSION = _torch("torch.Tensor._version.__get__", "a trace does not say how often a tensor was written to")
ASKS_IS_VIEW = _torch("torch.Tensor._is_view", "a trace does not say whether an argument is a view")
ASKS_BASE = _torch("torch.Tensor._base.__get__", "a trace does not say what an argument is a view of")
DATA = _torch("torch._C.TensorBase.data", "a tensor class whose sizes an op changes takes those of another tensor")
TYPED_STORAGE = _word("torch.Tensor._typed_storage", "a method that a tensor in pieces refuses")
IS_PARAMETER = "_is_param"  # what torch.nn.Parameter puts on tensors of other classes
memory_of = _attribute("torch.UntypedStorage._cdata", "whether two tensors share memory, where there are no addresses")
memory_uses = _torch("torch._C._storage_Use_Count", "whether anybody else holds memory that is written over")
tensor_uses = _torch("torch.Tensor._use_count", "whether autograd has saved a tensor whose memory is written over")
generator_id = _attribute("torch.Generator._cdata", "one generator has several objects in Python")
FAKES_LOG = _name("torch._subclasses.fake_tensor", "it logs what fake tensors refuse, and the error says it")
node_type = _torch("torch.utils._pytree._get_node_type", "a leaf or not, as tree_flatten decides, namedtuples included")


# --- autograd and torch.func ------------------------------------------------------------------------------------------

keeps_graph = _torch("torch._C._autograd._get_current_graph_task_keep_graph", "a call may be let go when it is done")
preserved_versions = _torch(
    "torch.autograd._unsafe_preserve_version_counter", "what is written to, and then as it was, is not written to"
)
running_node = _torch("torch._C._current_autograd_node", "the line of a backward op is that of its forward op")
last_number = _torch("torch._C._autograd._get_sequence_nr", "autograd numbers its nodes: which line made which")
number_of = _attribute("torch.autograd.graph.Node._sequence_nr", "the number of a node of autograd")
saved_hooks = _torch("torch._C._autograd._top_saved_tensors_default_hooks", "the caller's are for what a call saves")
pop_saved_hooks = _torch("torch._C._autograd._pop_saved_tensors_default_hooks", "the caller's are set aside in a trace")
push_saved_hooks = _torch("torch._C._autograd._push_saved_tensors_default_hooks", "the caller's are put back")
_ALLOWED = "torch._C._autograd._saved_tensors_hooks_"
saved_hooks_forbidden = _torch(f"{_ALLOWED}get_disabled_error_message", "torch.func forbids what checkpoints use")
allow_saved_hooks = _torch(f"{_ALLOWED}enable", "a checkpoint in the body of a loop runs all the same")
forbid_saved_hooks = _torch(f"{_ALLOWED}disable", "behind the body they are forbidden again")
# Modules of the functions of tensors that torch has in Python.
PYTHON_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._tensor"})
TENSOR_HOOKS = (
    _word("torch.Tensor._backward_hooks", "what a trace hooks on an argument is undone"),
    _word("torch.Tensor._post_accumulate_grad_hooks", "what a trace hooks on its gradient, too"),
)
ReentrantCheckpoint = _torch("torch.utils.checkpoint.CheckpointFunction._backward_cls", "its backward calls backward()")
IN_A_FUNCTION = _torch("torch.autograd.Function.apply.__func__.__code__", "a frame of a Function that a user wrote")

TransformType = _torch("torch._C._functorch.TransformType", "gradients, jvps, vmaps: what a transform around is")
VmapInterpreter = _torch("torch._C._functorch.CVmapInterpreterPtr", "what a vmap says of randomness")
transforms = _torch("torch._C._functorch.get_interpreter_stack", "the transforms of torch.func around")
transform_level = _torch("torch._C._functorch.maybe_current_level", "asked in every call: whether transforms are on")
without_transforms = _torch(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "values beside transforms"
)
TRANSFORMS = tuple(  # the files of those in Python
    _torch(f"{name}.__file__", "an op runs once for every column of a Jacobian, and nobody can write that otherwise")
    for name in ("torch._functorch.apis", "torch._functorch.eager_transforms", "torch._vmap_internals")
)
is_wrapped = _torch("torch._C._functorch.is_functorch_wrapped_tensor", "a tensor that a transform follows")
is_batched = _torch("torch._C._functorch.is_batchedtensor", "a tensor that is an example of a vmap")
level_of = _torch("torch._C._functorch.maybe_get_level", "which transform follows a tensor")
unwrapped = _torch("torch._C._functorch.get_unwrapped", "the tensor that a transform follows")
in_batch = _torch("torch._add_batch_dim", "gradients of several cotangents at once, by `is_grads_batched`")
out_of_batch = _torch("torch._remove_batch_dim", "a cotangent of several, by itself")
in_vmap = _torch("torch._C._functorch._add_batch_dim", "the gradients of all examples of a `torch.func.vmap`")
batch_dim_of = _torch("torch._C._functorch.maybe_get_bdim", "which dim of a cotangent are the examples of a vmap")
forced_keys = _torch("torch._C._ForceDispatchKeyGuard", "an op of a tensor class is a vmap, switched off where it runs")
included_keys = _torch("torch._C._dispatch_tls_local_include_set", "the other keys stay as they are meanwhile")
excluded_keys = _torch("torch._C._dispatch_tls_local_exclude_set", "the other keys stay as they are meanwhile")
DispatchKey = _torch("torch._C.DispatchKey", "the keys of torch.func")
_deeper = _torch("torch._C._vmapmode_increment_nesting", "how many such batches are around")
_back = _torch("torch._C._vmapmode_decrement_nesting", "how many such batches are around")
follow_tangents = _torch(
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "in the jvp of a Function torch loses the tangents of a jvp around",
)
dual_level = _global("torch.autograd.forward_ad._current_level", "whether forward-mode gradients are on")


def fake_of(
    mode: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, memory: Any = None, offset: int = 0
) -> Any:
    """A fake tensor of a mode, in the memory of another one or in its own, which no mode sees being made."""
    with without_dispatch():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if memory is not None:
            empty.set_(memory, offset, shape, stride)
    return FakeTensor(mode, empty, device)


def fake_like(x: Any) -> Any:
    """Another fake tensor of the same shape, strides, dtype and device, which no mode sees."""
    return fake_of(x.fake_mode, x.shape, x.stride(), x.dtype, x.fake_device)


def depth_of_batches() -> int:
    """How many batches of cotangents are around: only who goes one deeper is told."""
    depth: int = _deeper() - 1
    _back()
    return depth


def innermost(x: Any) -> Any:
    """What all transforms of torch.func that follow a tensor have wrapped."""
    while isinstance(x, torch.Tensor) and is_wrapped(x):
        x = unwrapped(x)
    return x


# --- what a trace, or teaching a ShardedTensor to torch, puts in the place of something -------------------------------

has_onednn = _torch("torch._C._get_mkldnn_enabled", "oneDNN has ops of its own, for which there are no rules")
set_onednn = _torch("torch._C._set_mkldnn_enabled", "the public switch is refused where tests froze torch's flags")
ONEDNN_LINEAR = _late("torch.ops.mkldnn._linear_pointwise", "its products of float32 matrices, where they are faster")
set_slot = _torch("torch.fx.experimental.proxy_tensor.set_proxy_slot", "a tensor is a node, and its shape is known")
SLOT = _torch("torch.fx.experimental.proxy_tensor._ProxyTensor", "what such a slot holds")
is_profiling = _global("torch.autograd.profiler._is_profiler_enabled", "a program with ranges runs where one looks")
PROFILING = _word("torch.autograd.profiler._is_profiler_enabled", "and an eager op, which asks in each call")
PROFILER = vars(torch.autograd.profiler)  # a look at a dict is the fastest way to ask
set_frame_evaluation = _torch("torch._C._dynamo.eval_frame.set_eval_frame", "what compiles is not compiled itself")
FX_TRACE = _slot(
    "torch.fx.experimental.proxy_tensor.PythonKeyTracer.trace", "it patches all modules twice, and undoes it, per trace"
)
FX_IS_TRACING = _slot("torch.fx._symbolic_trace._is_fx_tracing_flag", "what that trace says while it is on")
rename = _torch("torch.fx.Node._rename", "inputs of a graph have the names that the user gave them")

is_jit_tracing = _torch("torch._C._is_tracing", "a trace by torch.jit sees no program of shardlib")
IS_COMPILING = _slot("torch.compiler.is_compiling.__code__", "in a trace it says True, by whatever name it is called")
COMPILING = _word("torch.compiler._is_compiling_flag", "models look at values of masks but where they are compiled")
CHECKS_ALL = _slot("torch._check_tensor_all_with", "what libraries check of values is an op")
VALIDATES = _slot(
    "torch.distributions.Distribution._validate_args", "values are not seen; the setter is for all threads"
)
LAZY_GRAPHS = _slot("torch.fx._lazy_graph_module._use_lazy_graph_module_flag", "source nobody reads is not written")
FUNC_GRAD = _slot("torch._functorch.eager_transforms._autograd_grad", "torch.func.grad records its pass in any case")
INTO_GRAD = _slot("torch._functorch.eager_transforms._wrap_for_grad", "what enters a gradient passes by modes")
INTO_VMAP = _slot("torch._functorch.vmap._add_batch_dim", "what enters a vmap passes by modes, too")
TO_FUNCTION = _slot("torch.autograd.Function.apply", "what a Function in a body is applied to passes by modes, too")

_FLEX = "torch.nn.attention.flex_attention."
FLEX_DIRECT = _slot(f"{_FLEX}_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "dynamo knows no tensors in pieces")
FLEX_DEVICES = _slot(f"{_FLEX}_validate_device", "on a CPU torch's kernel has no gradients; ours has")
FLEX_IDENTITY = _torch(f"{_FLEX}_identity", "there is no score_mod")
IN_FLEX = _torch(f"{_FLEX}flex_attention.__code__", "the call that asks the switch, whose tensors say whose it is")

INTO_FUNCTION = _slot("torch._functorch.utils.unwrap_dead_wrappers", "a Function of somebody's begins with it")
ENGINE = _slot("torch.autograd._engine_run_backward", "modes stay on in what the engine calls back")
CHECKPOINT = _slot("torch.utils.checkpoint._checkpoint_without_reentrant_generator", "what it keeps to run it again")
REENTRANT_CHECKPOINT = _slot("torch.utils.checkpoint.CheckpointFunction.forward", "so does the other kind")
CHECKPOINT_COMPILES = _slot("torch.utils.checkpoint._is_compiling", "in a trace checkpoints follow their policy")
MODULE_DICTS = ("_parameters", "_buffers", "_modules")  # what a module holds, by name
MODULE_HOOKS: tuple[dict[int, Any], ...] = tuple(
    _torch(f"torch.nn.modules.module._global_{kind}_hooks", "hooks on all modules act on a trace, and are in its key")
    for kind in (
        *("buffer_registration", "module_registration", "parameter_registration"),
        *("backward_pre", "backward", "forward_pre", "forward"),
    )
)
BatchNormalization = _torch("torch.nn.modules.batchnorm._BatchNorm", "what all modules that normalize batches are")
parametrized = _global("torch.nn.utils.parametrize._cache", "it keeps tensors of a trace, which is said as such")
MODULE_ATTRIBUTE = _slot("torch.nn.Module.__getattribute__", "layers are one if they differ in what no code reads")
CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of one module
SET_MODULE_STATE = _slot("torch.nn.Module.__setstate__", "the forward of a module's shallow copy reads the copy")
LOAD_WHOLE = _slot("torch.nn.Module.load_state_dict", "what is assigned to two names in one load stays one tensor")
LOAD_OWN = _slot("torch.nn.Module._load_from_state_dict", "a tensor that is assigned lives where a parameter did")
MODULE_APPLY = _slot("torch.nn.Module._apply", "a module that a trace converts is refused before it is half done")
settle_rnn = _torch("torch.nn.RNNBase._init_flat_weights", "recurrent modules list their parameters a second time")
FLATTEN_RNN = _slot("torch.nn.RNNBase.flatten_parameters", "cuDNN wants weights in one memory, which pieces have not")
BATCH_NORM = _slot("torch.nn.modules.batchnorm._BatchNorm.forward", "Python reads a buffer that counts batches")
input_check_of = _attribute("torch.nn.modules.batchnorm._BatchNorm._check_input_dim", "what that forward does first")
# What updates parameters has one of these names in one of these modules, which nobody has to have imported.
SINGLY, BY_LISTS, _FUSED = UPDATES = ("_single_tensor_", "_multi_tensor_", "_fused_")
OPTIMIZERS: tuple[str, ...] = ("sgd", "adam", "adamax", "nadam", "radam", "adagrad", "adadelta", "_adafactor")
OPTIMIZERS += ("rmsprop", "rprop", "asgd", "_muon")


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Let one of torch's optimizers make what it keeps of the parameters of a group that have a gradient."""
    make: Any = getattr(optimizer, "_init_group", None)
    if make is not None:  # it fills lists, whose number is its own
        make(group, *([] for _ in list(inspect.signature(make).parameters)[1:]))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody registered what runs in front of its steps."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", ()))


HAS_STEPPED, WARNS_OF_ORDER = "_opt_called", "_wrapped_by_lr_sched"  # what a schedule puts on an optimizer and its step
LAST_RATES = "_last_lr"  # the attribute of a schedule
SINGLE_ADAM = _slot("torch.optim.adam._single_tensor_adam", "torch steps several parameters at once on its own tensors")
LOADED_STATE = _slot(
    "torch.optim.Optimizer._process_value_according_to_param_policy", "what is loaded of a parameter lives as that does"
)
LOAD_OPTIMIZER = _slot("torch.optim.Optimizer.load_state_dict", "settings are in the order in which they were before")
SCALER_CHECKS = _slot("torch.amp.GradScaler._unscale_grads_", "in a trace, what is not finite is counted by a sum")
SCALE_BEGINS = _word("torch.amp.GradScaler._lazy_init_scale_growth_tracker", "a scale is made in front of a program")
SCALE, SCALE_GROWTH = "_scale", "_growth_tracker"  # what that makes; None before
SCALER_STEPS = _slot("torch.amp.GradScaler._maybe_opt_step", "in a trace, a step that is skipped changes nothing")
AVERAGES = _slot(
    "torch.optim.swa_utils.AveragedModel.update_parameters", "in a trace, whether it is the first is a value"
)
UPDATES_SCALE = _torch("torch._amp_update_scale_", "what a gradient scaler calls")

_STATE_DICT = "torch.distributed.checkpoint.state_dict."
GATHER_STATE_DICT = _late_slot(f"{_STATE_DICT}_gather_state_dict", "whole state dicts out")
FILL_STATE_DICT = (
    _late_slot(f"{_STATE_DICT}_distribute_state_dict", "whole state dicts in"),
    _late_slot(f"{_STATE_DICT}_broadcast_state_dict", "whole state dicts in, from rank 0"),
)
STAGED_COPY = _late_slot(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor", "copies saved in the background"
)
STAGED_MEMORY = _late_slot("torch.distributed.checkpoint.staging._create_cpu_state_dict", "memory for blocking copies")
_TRACKER = "torch.distributed.tensor.debug._comm_mode._CommModeModuleTracker."
TRACKER_HOOKS = tuple(
    _late_slot(f"{_TRACKER}{name}", "a trace is no call of a module, for modes that count by modules")
    for name in ("_fw_pre_hook", "_fw_post_hook", "_fw_set_module_hook", "_bw_hook")
)
C10D = "torch.distributed.distributed_c10d"
_OF_TENSORS = "_check_single_tensor", "_check_tensor_list"
_OF_OTHERS = "_object_to_tensor", "_check_not_self_rank", "_new_group_with_tag", "_new_process_group_helper"
C10D_CHECKS = tuple(_slot(f"{C10D}.{x}", "c10d's functions ask it of tensors, maybe placed ones") for x in _OF_TENSORS)
C10D_STEPS = tuple(_slot(f"{C10D}.{x}", "calls of c10d without tensors are refused in a trace") for x in _OF_OTHERS)
SCRIPT, EXPORT = "torch.jit._script", "torch.export._trace"
SCRIPTS = _slot(f"{SCRIPT}._script_impl", "torch.jit.script of a placed module is refused")
EXPORTS = _late_slot(f"{EXPORT}._export", "torch.export of a placed module is refused")
FSDP_PARAMETERS = _late("torch.distributed.fsdp._fully_shard._fsdp_param", "fully_shard on what is placed is refused")
SKIPPED_FILES = "torch._dynamo.trace_rules"  # which `torch.compile` lets alone
SKIP_RULES = _late(f"{SKIPPED_FILES}._recompile_re", "files of shardlib are added to them")
COMPILED_VALUES = "torch._dynamo.variables.builder"
STATIC_INPUT = _late_slot(f"{COMPILED_VALUES}.VariableBuilder.mark_static_input", "placed ones have no address")
LOADED_BY_FAKES = _late("torch._dynamo.config", "some of it keeps the frames that load it: those of a trace, else")
SYMBOL_FRAME = _late("torch.fx.experimental.symbolic_shapes.ShapeEnv._get_user_frame", "asked, it loads torch.export")


# --- torch.distributed ------------------------------------------------------------------------------------------------

_C10D = f"{C10D}."
default_store = _torch(f"{_C10D}_get_default_store", "ranks meet where torch's process group met")
default_timeout = _torch(f"{_C10D}_get_default_timeout", "whether a user has set another")
backend_of = _attribute("torch.distributed.ProcessGroup._get_backend", "the timeout of a group is its backend's")
devices_of = _attribute("torch.distributed.ProcessGroup._device_types", "a group has a backend for each")
timeout_of = _attribute("torch._C._distributed_c10d.Backend.Options._timeout", "the timeout of a group")
gather_of = _attribute("torch.distributed.ProcessGroup._allgather_base", "who compares calls leaves torch's log alone")
SYMMETRIC_MEMORY = _late("torch.distributed._symmetric_memory", "memory that GPUs of one machine reach")


def late(name: str) -> Any:
    """What torch has under one of these names, imported now.

    Example:
        >>> late(SYMMETRIC_MEMORY).empty.__name__
        'empty'
    """
    return pkgutil.resolve_name(name)


def symbols() -> Any:
    """Returns what makes symbols of numbers, for a trace; where they come from, only messages say that nobody sees.

    It makes none of values of tensors, or of shapes that depend on them: printed, `zuf0` would look like a value.
    """
    kind = late("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    env = kind(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    setattr(env, SYMBOL_FRAME.rpartition(".")[2], sys._getframe)
    return env


_names.complete(SUPPORTED)
if torch.__version__.startswith("2.11."):
    # A CUDA build without a GPU keeps a pointer into the thread that first enters a fake mode, and reads it when that
    # thread is gone: let it be the thread that imports this.
    with FakeTensorMode():
        pass
