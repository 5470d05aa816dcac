"""Every architecture of transformers that says how its weights are cut: sharded by `parallelize(model)`, nothing said,
against one device.

python -m tests.validation.pretrained [--only llama qwen3] [--workers 2] [--report]

Each is built small from its own configuration, in a process of its own: forward, loss and gradients are compared, and
the plan says which weights that the table cuts are gathered whole.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "shared_expert_intermediate_size": 16, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_shared_experts": 1, "moe_num_experts": 4,
    "moe_k": 2, "use_cache": False, "attn_implementation": "eager", "dropout": 0.0, "attention_dropout": 0.0,
    "num_layers": 2, "d_model": 32, "ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "n_layers": 2, "n_heads": 4, "moe_topk": 2,
    "num_mem_blocks": 1, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "laurel_rank": 8, "partial_rotary_factor": 1.0,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 1, "mlp_ffn_hidden_size": 48,
}  # fmt: skip
AXES = {"data": 2, "tensor": 2}


def architectures() -> Iterator[str]:
    """Model types whose configuration has a table."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in sorted(CONFIG_MAPPING.keys()):
        if getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None):
            yield kind


SMALLER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "pad_token_id",
           "bos_token_id", "eos_token_id")  # fmt: skip
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3, "pixel_shuffle_ratio": 0.5}
PROJECTED = {"out_hidden_size": 32, "projector_hidden_size": 32}
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"all": True}, {"all": True, "num_key_value_heads": 4}, {"num_key_value_heads": 4}, {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None}, {"mrope": True}, VISION,
    {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}, {"layer_types": None},
    {"only": SMALLER}, {"only": (*SMALLER, "num_key_value_heads", "head_dim")},
    {"only": ("num_hidden_layers", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    {"parts": True}, {"parts": True, **PROJECTED},
    {"num_key_value_heads": 4, "shared_experts_intermediate_size": 16, "num_experts": 8, "n_routed_experts": 8},
)  # fmt: skip


def configured(kind: str, variant: Mapping[str, Any]) -> Any:
    """A small configuration: `SIZES`, or some of them, as far as it has such fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return small(CONFIG_MAPPING[kind], variant)


def small(config_type: Any, variant: Mapping[str, Any]) -> Any:
    """A small configuration of a type; with small ones of its parts, where the variant says so."""
    known = config_type().to_dict()
    more = {name: value for name, value in variant.items() if name not in ("only", "all", "mrope", "parts")}
    sizes = {name: SIZES[name] for name in variant.get("only", SIZES)} | more
    has = known if "all" in variant else {name for name, x in known.items() if x is not None}
    given = {name: x for name, x in sizes.items() if x is not None and name in has}
    if isinstance(known.get("layer_types"), list) and "layer_types" not in more:
        kinds = list(dict.fromkeys(known["layer_types"]))
        given["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        given["num_hidden_layers"] = len(given["layer_types"])
    if "parts" in variant:
        given |= {name: small(part, variant).to_dict() for name, part in config_type.sub_configs.items()}
    config = config_type(**given)
    rope = getattr(config, "rope_parameters", None)
    if "mrope" in variant and isinstance(rope, dict):
        rope["mrope_section"] = [2, 1, 1]
    config.use_cache = False
    config._attn_implementation = "eager"
    return config


def classes(config: Any) -> list[type]:
    """The models that a configuration is of: those that have a head first."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    found = [
        x for name, x in vars(module).items()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == module.__name__
        and x.config_class is type(config) and not name.endswith("PreTrainedModel")
    ]  # fmt: skip
    return sorted(found, key=lambda x: ("ForCausalLM" not in x.__name__, "ConditionalGeneration" not in x.__name__,
                                        not x.__name__.endswith("Model")))  # fmt: skip


def _faults() -> tuple[type[Exception], ...]:
    """What configurations, models and torch raise of sizes that do not go together."""
    from huggingface_hub.errors import StrictDataclassError

    plain = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    return (*plain, StrictDataclassError)


def build(kind: str) -> tuple[Any, dict[str, Any], Any]:
    """A small model of this type, what it is called with, and what it gives; the first that plain torch runs."""
    import torch

    faults: dict[str, None] = {}
    for variant in VARIANTS:
        try:
            config = configured(kind, variant)
            for model_type in classes(config):
                refuse_large(model_type, copy.deepcopy(config))
                torch.manual_seed(0)
                model = model_type(copy.deepcopy(config)).train(False)
                for p in model.parameters():  # some stay as `empty` made them
                    torch.nn.init.normal_(p, std=0.05)
                args = batch(model)
                out = model(**args, return_dict=False)[0]
                if isinstance(out, torch.Tensor) and out.requires_grad and out.isfinite().all():
                    return model, args, out
        except _faults() as fault:
            faults[f"{type(fault).__name__}: {str(fault).strip().splitlines()[-1] if str(fault) else ''}"[:160]] = None
    raise SystemExit(f"no small one runs on one device: {'; '.join(list(faults)[:3])}")


def refuse_large(model_type: type, config: Any) -> None:
    """Raise ValueError of a model that is not small: before it takes memory, if it can be made without any."""
    import torch

    try:
        with torch.device("meta"):
            model = model_type(copy.deepcopy(config))
    except _faults():
        model = model_type(config)
    if sum(p.numel() for p in model.parameters()) > 20_000_000:
        raise ValueError("it is not small")


def batch(model: Any) -> dict[str, Any]:
    """Two arguments at most: tokens, for a decoder, too, or pictures."""
    import torch

    g = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 16)
        return {"pixel_values": torch.randn(4, 3, size, size, generator=g)}
    tokens = torch.randint(3, 60, (4, 8), generator=g)
    args = {"input_ids": tokens}
    if "use_cache" in inspect.signature(model.forward).parameters:
        args["use_cache"] = False
    if model.config.is_encoder_decoder:
        args["decoder_input_ids"] = tokens.flip(1)
    return args


def outcome(kind: str) -> dict[str, Any]:
    """What became of one architecture."""
    import torch

    import shardlib as sl

    torch.set_num_threads(1)
    model, args, out = build(kind)

    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))  # a square of what is normed is constant

    def loss_of(model: Any) -> Any:
        out = model(**args, return_dict=False)[0]
        return out, (out.float() * probe).mean()

    plain = copy.deepcopy(model)
    want, loss = loss_of(plain)
    loss.backward()
    with sl.Mesh(AXES):
        sl.parallelize(model)
    got, mine = loss_of(model)
    mine.backward()

    def whole(x: Any) -> Any:
        x = x.detach()
        return x.full_tensor() if isinstance(x, sl.ShardedTensor) else x

    def off(a: Any, b: Any) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) if b.numel() else 0.0

    theirs = dict(plain.named_parameters())
    largest = max((float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None), default=1.0)
    errors = {"forward": off(whole(got), want.detach()), "loss": off(whole(mine), loss.detach())}
    for name, p in model.named_parameters():
        want_grad = theirs[name].grad
        if (p.grad is None) != (want_grad is None):
            errors[name] = float("inf")
        elif want_grad is not None:
            scale = max(float(want_grad.abs().max()), 1e-3 * largest)
            errors[name] = float((whole(p.grad) - want_grad).abs().max()) / scale
    worst = max(errors, key=lambda k: errors[k])
    cut = [name for name, p in model.named_parameters() if "@tensor" in sl.typeof(p)]
    found = {"kind": kind, "worst": errors[worst], "at": worst, "parameters": len(theirs), "cut": len(cut)}
    if model.forward.version.eager:
        return found | {"eager": "its Python asks for values, so its ops run one by one"}
    plan = model.forward.plan(**args, return_dict=False)
    gathered = sorted({str(c.value) for c in plan.collectives if c.kind == "all_gather" and "tensor" in c.axes})
    return found | {
        "gathered": [g.removeprefix("self.") for g in gathered if any(g.endswith(name) for name in cut)],
        "whole": [str(op) for op in plan.replicated_ops],
    }
