"""All private names of torch that shardlib uses, each with its reason; no other file has any.

They are looked up when this module is imported, and one error lists all names that torch lacks. So an unsupported
version of torch fails here and not inside a call. Names in modules that are expensive to import are looked up on use.
"""

from __future__ import annotations

import inspect
import pkgutil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardlib.core.torch_internals.private_names import PrivateNames

SUPPORTED = ("2.11", "2.12", "2.13")  # of torch
_names = PrivateNames()
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
    CustomOpDef = _torch("torch._library.custom_ops.CustomOpDef", "the result of `torch.library.custom_op`")
    HigherOrderOperator = _torch("torch._ops.HigherOrderOperator", "traced ops that take functions")
    OpOverload = _torch("torch._ops.OpOverload", "nodes call it; rules are registered for it")
    OpOverloadPacket = _torch("torch._ops.OpOverloadPacket", "a rule may be registered for all overloads of an op")
    _FAKE = "torch._subclasses.fake_tensor."
    DataDependentOutputException = _torch(f"{_FAKE}DataDependentOutputException", "an op reads values")
    DynamicOutputShapeException = _torch(f"{_FAKE}DynamicOutputShapeException", "a shape depends on values")
    FakeTensor = _torch(f"{_FAKE}FakeTensor", "tensors of a trace")
    FakeTensorMode = _torch(f"{_FAKE}FakeTensorMode", "shapes without memory")
    Source = _torch("torch._guards.Source", "symbolic numbers of a trace need one")
    pytree = _torch("torch.utils._pytree", "flattens arguments and results; torch has no public one yet")
    TorchDispatchMode = _torch("torch.utils._python_dispatch.TorchDispatchMode", "documented, without a public name")


# --- ops, and what stands between a call and its kernel ---------------------------------------------------------------

c10d_functional = _torch("torch.ops._c10d_functional", "the collectives that compilers and counters recognize")
# Namespaces of collectives and related ops, which are per-rank code.
PER_RANK = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"}
)
c_functions = _torch("torch._C._VariableFunctions", "C functions of torch parse arguments faster than ops")
all_op_names = _torch("torch._C._dispatch_get_all_op_names", "the only list of the _foreach_ ops")
torchs_own_forms = _torch("torch._decomp.get_decompositions", "decompositions of ops into other ops")
schema_of = _attribute("torch.ops.aten.add.Tensor._schema", "which arguments are written, which results are views")
kernel_of = _attribute("torch.ops.aten.add.Tensor._op_dk", "the kernel for one key: _foreach_ ops as single ops")
REASONS["torch._library.custom_ops.CustomOpDef._opoverload"] = (
    "its op, the key of its rule"  # an attribute of instances only
)
op_of_custom = attrgetter("_opoverload")
CUSTOM_OPS: Any = _torch("torch._library.custom_ops.OPDEFS", "the present definition of a custom op")
PACKET = _word("torch.ops.aten.add.Tensor._overloadpacket", "counters of collectives compare it")

keys_below = _torch("torch._C._dispatch_keyset_full_after", "our kernel for a key calls the op below that key")
keys_of = _torch("torch._ops._compute_keyset", "our kernel for a higher-order op calls it below its key")
is_excluded = _torch("torch._C._dispatch_tls_is_dispatch_key_excluded", "code below autograd sees no tangents")
exclude_keys = _torch("torch._C._ExcludeDispatchKeyGuard", "programs run below autograd and autocast")
below_autograd = _torch("torch._C._AutoDispatchBelowAutograd", "a cheaper guard without autocast")
any_autocast = _torch("torch._C._is_any_autocast_enabled", "one check per call instead of one per device")
without_autocast = _torch("torch._C._DisableAutocast", "strides of kernels' results are measured without autocast")

_MODES, _FUNCTION_MODES = "torch.utils._python_dispatch.", "torch.overrides."
dispatch_modes = _torch(
    f"{_MODES}_get_current_dispatch_mode_stack", "modes around a call: refused, notified or counting"
)
pop_dispatch_mode = _torch(f"{_MODES}_pop_mode", "counting modes must not see messages between ranks")
push_dispatch_mode = _torch(f"{_MODES}_push_mode", "restores counting modes")
count_dispatch_modes = _torch("torch._C._len_torch_dispatch_stack", "checked in every call")
without_dispatch = _torch("torch._C._DisableTorchDispatch", "makes a fake tensor without calling modes")
without_modes = _torch(f"{_MODES}_disable_current_modes", "computes values outside of the trace")
function_modes = _torch(f"{_FUNCTION_MODES}_get_current_function_mode_stack", "they act on a trace, and are in its key")
pop_function_mode = _torch(f"{_FUNCTION_MODES}_pop_mode", "the caller's modes are disabled in a trace")
push_function_mode = _torch(f"{_FUNCTION_MODES}_push_mode", "restores the caller's modes")
count_function_modes = _torch("torch._C._len_torch_function_stack", "checked in every call")
hears_functions = _torch("torch._C._is_torch_function_enabled", "the traced function runs under the caller's setting")
hears_nothing = _torch("torch._C._is_torch_function_all_disabled", "the same setting, including modes")
function_modes_on = _torch("torch._C._EnableTorchFunction", "the traced function sees modes that the tracer does not")


# --- tensors, memory, fake tensors ------------------------------------------------------------------------------------

make_wrapper = _torch("torch.Tensor._make_wrapper_subclass", "documented: makes a tensor without memory")
no_torch_function = _torch("torch._C._disabled_torch_function_impl", "documented: a class with dispatch only")
version_of = _attribute("torch.Tensor._version", "detects writes to a gradient or a new parameter")
ASKS_VERSION = _torch("torch.Tensor._version.__get__", "a trace cannot return how often a tensor was written")
ASKS_IS_VIEW = _torch("torch.Tensor._is_view", "a trace cannot return whether an argument is a view")
ASKS_BASE = _torch("torch.Tensor._base.__get__", "a trace cannot return the base of an argument")
DATA = _torch("torch._C.TensorBase.data", "a tensor class takes the sizes of another tensor when an op resizes it")
TYPED_STORAGE = _word("torch.Tensor._typed_storage", "a sharded tensor refuses this method")
IS_PARAMETER = "_is_param"  # torch.nn.Parameter sets it on tensors of other classes
memory_of = _attribute("torch.UntypedStorage._cdata", "detects shared memory of tensors without addresses")
memory_uses = _torch("torch._C._storage_Use_Count", "detects other users of memory that will be overwritten")
tensor_uses = _torch("torch.Tensor._use_count", "detects tensors that autograd has saved")
generator_id = _attribute("torch.Generator._cdata", "one generator has several Python objects")
FAKES_LOG = _name("torch._subclasses.fake_tensor", "silences its log: the error has the same text")
node_type = _torch("torch.utils._pytree._get_node_type", "distinguishes leaves as tree_flatten does")


# --- autograd and torch.func ------------------------------------------------------------------------------------------

keeps_graph = _torch(
    "torch._C._autograd._get_current_graph_task_keep_graph", "whether tensors of a call can be released"
)
preserved_versions = _torch("torch.autograd._unsafe_preserve_version_counter", "a write that is undone is no write")
running_node = _torch("torch._C._current_autograd_node", "a backward op has the line of its forward op")
last_number = _torch("torch._C._autograd._get_sequence_nr", "sequence numbers relate autograd nodes to lines")
number_of = _attribute("torch.autograd.graph.Node._sequence_nr", "the sequence number of an autograd node")
saved_hooks = _torch("torch._C._autograd._top_saved_tensors_default_hooks", "the caller's hooks for a call's tensors")
pop_saved_hooks = _torch("torch._C._autograd._pop_saved_tensors_default_hooks", "the caller's hooks are off in a trace")
push_saved_hooks = _torch("torch._C._autograd._push_saved_tensors_default_hooks", "restores the caller's hooks")
_ALLOWED = "torch._C._autograd._saved_tensors_hooks_"
saved_hooks_forbidden = _torch(f"{_ALLOWED}get_disabled_error_message", "torch.func forbids the hooks of checkpoints")
allow_saved_hooks = _torch(f"{_ALLOWED}enable", "allows checkpoints in the body of a loop")
forbid_saved_hooks = _torch(f"{_ALLOWED}disable", "forbids them again after the body")
# Modules of tensor functions that are written in Python.
PYTHON_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._tensor"})
TENSOR_HOOKS = (
    _word("torch.Tensor._backward_hooks", "hooks that a trace registers on an argument are removed"),
    _word("torch.Tensor._post_accumulate_grad_hooks", "also hooks on its gradient"),
)
ReentrantCheckpoint = _torch("torch.utils.checkpoint.CheckpointFunction._backward_cls", "its backward calls backward()")
IN_A_FUNCTION = _torch("torch.autograd.Function.apply.__func__.__code__", "recognizes frames of an autograd Function")

TransformType = _torch("torch._C._functorch.TransformType", "the kind of a transform")
VmapInterpreter = _torch("torch._C._functorch.CVmapInterpreterPtr", "the randomness setting of a vmap")
transforms = _torch("torch._C._functorch.get_interpreter_stack", "the active transforms of torch.func")
transform_level = _torch("torch._C._functorch.maybe_current_level", "checked in every call")
without_transforms = _torch("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "computes outside")
TRANSFORMS = tuple(  # their files
    _torch(f"{name}.__file__", "recognizes the loop of a Jacobian, which runs an op per column")
    for name in ("torch._functorch.apis", "torch._functorch.eager_transforms", "torch._vmap_internals")
)
is_wrapped = _torch("torch._C._functorch.is_functorch_wrapped_tensor", "recognizes tensors that a transform tracks")
is_batched = _torch("torch._C._functorch.is_batchedtensor", "recognizes examples of a vmap")
level_of = _torch("torch._C._functorch.maybe_get_level", "the transform that tracks a tensor")
unwrapped = _torch("torch._C._functorch.get_unwrapped", "the tensor below a transform")
in_batch = _torch("torch._add_batch_dim", "makes batched cotangents for `is_grads_batched`")
out_of_batch = _torch("torch._remove_batch_dim", "splits batched cotangents")
in_vmap = _torch("torch._C._functorch._add_batch_dim", "makes gradients of all examples of a `torch.func.vmap`")
batch_dim_of = _torch("torch._C._functorch.maybe_get_bdim", "the dim of the examples of a vmap")
forced_keys = _torch("torch._C._ForceDispatchKeyGuard", "disables vmap while an op of a tensor class runs")
included_keys = _torch("torch._C._dispatch_tls_local_include_set", "keeps all other keys")
excluded_keys = _torch("torch._C._dispatch_tls_local_exclude_set", "keeps all other keys")
DispatchKey = _torch("torch._C.DispatchKey", "the keys of torch.func")
_deeper = _torch("torch._C._vmapmode_increment_nesting", "the nesting of batched cotangents")
_back = _torch("torch._C._vmapmode_decrement_nesting", "the nesting of batched cotangents")
follow_tangents = _torch(
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch drops tangents of an outer jvp inside the jvp of a Function",
)
dual_level = _global("torch.autograd.forward_ad._current_level", "detects forward-mode gradients")


def depth_of_batches() -> int:
    """Counts the nested batches of cotangents; torch returns the count only when it changes."""
    depth: int = _deeper() - 1
    _back()
    return depth


def innermost(x: Any) -> Any:
    """Returns the tensor below all transforms of torch.func."""
    while isinstance(x, torch.Tensor) and is_wrapped(x):
        x = unwrapped(x)
    return x


# --- values that a trace, or support for ShardedTensors, replaces -----------------------------------------------------

has_onednn = _torch("torch._C._get_mkldnn_enabled", "oneDNN has ops of its own without rules")
set_onednn = _torch("torch._C._set_mkldnn_enabled", "the public switch fails where tests froze torch's flags")
ONEDNN_LINEAR = _late("torch.ops.mkldnn._linear_pointwise", "its products of float32 matrices, where they are faster")
set_slot = _torch("torch.fx.experimental.proxy_tensor.set_proxy_slot", "maps a tensor to its node")
SLOT = _torch("torch.fx.experimental.proxy_tensor._ProxyTensor", "the content of such a slot")
is_profiling = _global("torch.autograd.profiler._is_profiler_enabled", "programs have profiler ranges only then")
PROFILING = _word("torch.autograd.profiler._is_profiler_enabled", "the same for eager ops, in every call")
PROFILER = vars(torch.autograd.profiler)  # reading a dict is the fastest check
set_frame_evaluation = _torch("torch._C._dynamo.eval_frame.set_eval_frame", "hides our compiler from `torch.compile`")
FX_TRACE = _slot("torch.fx.experimental.proxy_tensor.PythonKeyTracer.trace", "it patches all modules twice per trace")
FX_IS_TRACING = _slot("torch.fx._symbolic_trace._is_fx_tracing_flag", "the flag that FX_TRACE sets")
rename = _torch("torch.fx.Node._rename", "inputs of a graph get the user's names")

is_jit_tracing = _torch("torch._C._is_tracing", "a trace by torch.jit does not see programs")
IS_COMPILING = _slot("torch.compiler.is_compiling.__code__", "returns True in a trace, under every imported name")
COMPILING = _word("torch.compiler._is_compiling_flag", "models read values of masks unless they are compiled")
CHECKS_ALL = _slot("torch._check_tensor_all_with", "checks of values by libraries become an op")
VALIDATES = _slot(
    "torch.distributions.Distribution._validate_args",
    "a trace has no values to validate; the setter would affect all threads",
)
LAZY_GRAPHS = _slot("torch.fx._lazy_graph_module._use_lazy_graph_module_flag", "skips generating unused source")
FUNC_GRAD = _slot("torch._functorch.eager_transforms._autograd_grad", "torch.func.grad records its backward pass")
INTO_GRAD = _slot("torch._functorch.eager_transforms._wrap_for_grad", "tensors that enter a gradient bypass modes")
INTO_VMAP = _slot("torch._functorch.vmap._add_batch_dim", "tensors that enter a vmap bypass modes")
TO_FUNCTION = _slot("torch.autograd.Function.apply", "tensors that enter an autograd Function bypass modes")

_FLEX = "torch.nn.attention.flex_attention."
FLEX_DIRECT = _slot(f"{_FLEX}_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", "dynamo does not support sharded tensors")
FLEX_DEVICES = _slot(f"{_FLEX}_validate_device", "torch's kernel has no gradients on CPU; ours has")
FLEX_IDENTITY = _torch(f"{_FLEX}_identity", "recognizes a missing score_mod")
IN_FLEX = _torch(f"{_FLEX}flex_attention.__code__", "recognizes the call that reads the switch")

INTO_FUNCTION = _slot("torch._functorch.utils.unwrap_dead_wrappers", "marks the start of a user's autograd Function")
ENGINE = _slot("torch.autograd._engine_run_backward", "modes stay active in callbacks of the engine")
CHECKPOINT = _slot(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
    "recomputation needs the contexts of the forward pass",
)
REENTRANT_CHECKPOINT = _slot("torch.utils.checkpoint.CheckpointFunction.forward", "the same for reentrant checkpoints")
CHECKPOINT_COMPILES = _slot("torch.utils.checkpoint._is_compiling", "checkpoints keep their policy in a trace")
MODULE_DICTS = ("_parameters", "_buffers", "_modules")  # the state of a module, by name
MODULE_HOOKS: tuple[dict[int, Any], ...] = tuple(
    _torch(f"torch.nn.modules.module._global_{kind}_hooks", "hooks on all modules act on a trace, and are in its key")
    for kind in (
        *("buffer_registration", "module_registration", "parameter_registration"),
        *("backward_pre", "backward", "forward_pre", "forward"),
    )
)
BatchNormalization = _torch("torch.nn.modules.batchnorm._BatchNorm", "the base class of all batch norms")
parametrized = _global("torch.nn.utils.parametrize._cache", "a cache that must not hold tensors of a trace")
MODULE_ATTRIBUTE = _slot("torch.nn.Module.__getattribute__", "attributes that no code reads do not distinguish layers")
CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of one module
SET_MODULE_STATE = _slot("torch.nn.Module.__setstate__", "the forward of a module's shallow copy reads the copy")
LOAD_WHOLE = _slot("torch.nn.Module.load_state_dict", "a tensor that one load assigns to two names stays one tensor")
LOAD_OWN = _slot("torch.nn.Module._load_from_state_dict", "an assigned tensor gets the layout of the old parameter")
MODULE_APPLY = _slot("torch.nn.Module._apply", "refuses a module conversion in a trace before it starts")
settle_rnn = _torch("torch.nn.RNNBase._init_flat_weights", "recurrent modules have a second list of parameters")
FLATTEN_RNN = _slot("torch.nn.RNNBase.flatten_parameters", "cuDNN wants weights in one memory, which shards lack")
BATCH_NORM = _slot("torch.nn.modules.batchnorm._BatchNorm.forward", "its Python reads a buffer that counts batches")
input_check_of = _attribute("torch.nn.modules.batchnorm._BatchNorm._check_input_dim", "the first step of that forward")
# Functions that update parameters begin with one of these prefixes, in one of these modules.
SINGLY, BY_LISTS, _FUSED = UPDATES = ("_single_tensor_", "_multi_tensor_", "_fused_")
OPTIMIZERS: tuple[str, ...] = ("sgd", "adam", "adamax", "nadam", "radam", "adagrad", "adadelta", "_adafactor")
OPTIMIZERS += ("rmsprop", "rprop", "asgd", "_muon")


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Initializes the state of one of torch's optimizers for the parameters of a group that have a gradient."""
    make: Any = getattr(optimizer, "_init_group", None)
    if make is not None:  # it takes a varying number of lists to fill
        make(group, *([] for _ in list(inspect.signature(make).parameters)[1:]))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer has hooks in front of its steps."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", ()))


HAS_STEPPED, WARNS_OF_ORDER = "_opt_called", "_wrapped_by_lr_sched"  # set by a schedule
LAST_RATES = "_last_lr"  # the attribute of a schedule
SINGLE_ADAM = _slot("torch.optim.adam._single_tensor_adam", "torch's multi-tensor step supports only its own tensors")
LOADED_STATE = _slot("torch.optim.Optimizer._process_value_according_to_param_policy", "loaded state gets its layout")
LOAD_OPTIMIZER = _slot("torch.optim.Optimizer.load_state_dict", "keeps the order of settings")
SCALER_CHECKS = _slot("torch.amp.GradScaler._unscale_grads_", "in a trace, a sum counts infinite values")
SCALE_BEGINS = _word("torch.amp.GradScaler._lazy_init_scale_growth_tracker", "makes the scale before a program runs")
SCALE, SCALE_GROWTH = "_scale", "_growth_tracker"  # its results; None before
SCALER_STEPS = _slot("torch.amp.GradScaler._maybe_opt_step", "in a trace, a skipped step changes nothing")
AVERAGES = _slot("torch.optim.swa_utils.AveragedModel.update_parameters", "in a trace, `n_averaged` is a value")
UPDATES_SCALE = _torch("torch._amp_update_scale_", "the op of gradient scalers")

_STATE_DICT = "torch.distributed.checkpoint.state_dict."
GATHER_STATE_DICT = _late_slot(f"{_STATE_DICT}_gather_state_dict", "saves whole state dicts")
FILL_STATE_DICT = (
    _late_slot(f"{_STATE_DICT}_distribute_state_dict", "loads whole state dicts"),
    _late_slot(f"{_STATE_DICT}_broadcast_state_dict", "loads whole state dicts from rank 0"),
)
STAGED_COPY = _late_slot(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
    "copies that are saved in the background",
)
STAGED_MEMORY = _late_slot("torch.distributed.checkpoint.staging._create_cpu_state_dict", "memory for blocking copies")
_TRACKER = "torch.distributed.tensor.debug._comm_mode._CommModeModuleTracker."
TRACKER_HOOKS = tuple(
    _late_slot(f"{_TRACKER}{name}", "modes that count by module must not see a trace")
    for name in ("_fw_pre_hook", "_fw_post_hook", "_fw_set_module_hook", "_bw_hook")
)
C10D = "torch.distributed.distributed_c10d"
_OF_TENSORS = "_check_single_tensor", "_check_tensor_list"
_OF_OTHERS = "_object_to_tensor", "_check_not_self_rank", "_new_group_with_tag", "_new_process_group_helper"
C10D_CHECKS = tuple(_slot(f"{C10D}.{x}", "c10d calls it with tensors, maybe sharded ones") for x in _OF_TENSORS)
C10D_STEPS = tuple(_slot(f"{C10D}.{x}", "calls of c10d without tensors are refused in a trace") for x in _OF_OTHERS)
SCRIPT, EXPORT = "torch.jit._script", "torch.export._trace"
SCRIPTS = _slot(f"{SCRIPT}._script_impl", "torch.jit.script of a sharded module is refused")
EXPORTS = _late_slot(f"{EXPORT}._export", "torch.export of a sharded module is refused")
FSDP_PARAMETERS = _late("torch.distributed.fsdp._fully_shard._fsdp_param", "fully_shard of sharded tensors is refused")
SKIPPED_FILES = "torch._dynamo.trace_rules"  # that `torch.compile` skips
SKIP_RULES = _late(f"{SKIPPED_FILES}._recompile_re", "adds shardlib's files")
COMPILED_VALUES = "torch._dynamo.variables.builder"
STATIC_INPUT = _late_slot(f"{COMPILED_VALUES}.VariableBuilder.mark_static_input", "sharded tensors have no address")
LOADED_BY_FAKES = _late("torch._dynamo.config", "imported early: some of it keeps the frames that import it")
SYMBOL_FRAME = _late("torch.fx.experimental.symbolic_shapes.ShapeEnv._get_user_frame", "it would import torch.export")


# --- torch.distributed ------------------------------------------------------------------------------------------------

_C10D = f"{C10D}."
default_store = _torch(f"{_C10D}_get_default_store", "ranks use the store of torch's process group")
default_timeout = _torch(f"{_C10D}_get_default_timeout", "detects a timeout that the user set")
backend_of = _attribute("torch.distributed.ProcessGroup._get_backend", "the timeout of a group is its backend's")
devices_of = _attribute("torch.distributed.ProcessGroup._device_types", "a group has a backend for each device type")
timeout_of = _attribute("torch._C._distributed_c10d.Backend.Options._timeout", "the timeout of a group")
gather_of = _attribute("torch.distributed.ProcessGroup._allgather_base", "compares calls without torch's log")
SYMMETRIC_MEMORY = _late("torch.distributed._symmetric_memory", "memory that GPUs of one machine share")


def late(name: str) -> Any:
    return pkgutil.resolve_name(name)


_names.complete(SUPPORTED)
if torch.__version__.startswith("2.11."):
    # A CUDA build without a GPU keeps a pointer into the thread that first enters a fake mode, and reads it even after
    # that thread has ended. So let the importing thread be the first.
    with FakeTensorMode():
        pass
