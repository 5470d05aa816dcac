"""The models of `first_call`: small, with random weights, each with the inputs of one call.

Channels are narrow and images small where the architecture allows it: the number of ops counts, not their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models import w1

from . import peers_dtensor

ROWS = 8  # of the batch
W1 = w1.Config(layers=8, batch=ROWS, seq=16)


def mean_square(output: Any) -> Tensor:
    """The mean square of each floating tensor of a model's output, added up."""
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    if not leaves:
        raise TypeError(f"{type(output).__name__} holds no floating tensor that a tree of torch shows")
    return torch.stack([x.square().mean() for x in leaves]).sum()


def own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Case:
    """A model, the module that it `needs`, the keyword or positional inputs of a call, and the loss of its output."""

    name: str
    needs: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Tensor] | tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor] = mean_square
    w1_modes: tuple[str, str] | None = None  # of `peers_jax`, on one and on two axes


def _image(size: int, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(ROWS, channels, size, size),)


def _tokens(*names: str, vocab: int = 64, length: int = 16) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randint(vocab, (ROWS, length)) for name in names}


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10, **options)
        return model

    return build


def _transformers(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made_of = getattr(transformers, config)(**options)
        built: nn.Module = getattr(transformers, model)(made_of)
        return built

    return build


def _diffusers(model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        built: nn.Module = getattr(diffusers, model)(**options)
        return built

    return build


def _lraspp() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model: nn.Module = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return model


def _fpn() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    model: nn.Module = resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=5)
    return model


def _swin3d() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    model: nn.Module = SwinTransformer3d(
        patch_size=[2, 4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[2, 4, 4], num_classes=10
    )
    return model


def _x_transformers(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=4, heads=4, attn_dim_head=8, **options)
        memory = {"num_memory_tokens": 4} if options.get("rotary_pos_emb") else {}
        model: nn.Module = TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers, **memory)
        return model

    return build


class Tagger(nn.Module):
    """A recurrent network of two layers, in both directions, and a projection."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Cross(nn.Module):
    """A cross attention that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, self.k(x), self.v(x), key_padding_mask=pad, average_attn_weights=False)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(16, 4, 3, 3, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target)


def _gat() -> nn.Module:
    from torch_geometric.nn import GAT

    model: nn.Module = GAT(8, 16, num_layers=3, out_channels=4, heads=4, add_self_loops=False)
    return model


def _rnn(kind: type[nn.RNNBase], steps: int) -> Case:
    name = f"{kind.__name__.lower()}-{steps}"
    return Case(name, "torch", lambda: Tagger(kind), lambda: (torch.randn(ROWS, steps, 8),))


def _w1_tokens() -> tuple[Tensor, ...]:
    return (w1.batch(W1)[0],)


_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "vocab_size": 64, "dropout_rate": 0.0,
    "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 64, "use_cache": False,
    "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM",
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": 10,
}  # fmt: skip
_WHISPER = {
    "d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 16, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_DIT = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 4, "sample_size": 8,
    "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4,
}  # fmt: skip
_UNET = {
    "sample_size": 16, "block_out_channels": (16, 32, 32), "norm_num_groups": 4, "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
_VAE = {
    "block_out_channels": (16, 32), "norm_num_groups": 4, "latent_channels": 4, "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip

_VIT_TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4}
_SWIN = {"img_size": 64, "window_size": 4, "embed_dim": 24}


def _noisy() -> dict[str, Tensor]:
    labels = torch.arange(ROWS)
    return {"hidden_states": torch.randn(ROWS, 4, 8, 8), "timestep": labels, "class_labels": labels.clone()}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": torch.randint(3, 64, (ROWS, 12))}


def _text(name: str, kind: str, model: str, **options: Any) -> Case:
    build = _transformers(f"{kind}Config", f"{kind}{model}", **options)
    return Case(name, "transformers", build, _tokens("input_ids", "labels"), own_loss)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(64, (ROWS, 16)),)


CASES = (
    Case("timm-vit", "timm", _timm("vit_tiny_patch16_224", **_VIT_TINY), _image(32)),
    Case("timm-convnext", "timm", _timm("convnext_tiny", dims=(8, 16, 32, 64)), _image(64)),
    Case("timm-resnet50", "timm", _timm("resnet50", channels=(8, 16, 32, 64)), _image(64)),
    Case("timm-swin", "timm", _timm("swin_tiny_patch4_window7_224", **_SWIN), _image(64)),
    Case("timm-efficientnet", "timm", _timm("efficientnet_b0"), _image(32)),
    Case("timm-mixer", "timm", _timm("mixer_s16_224", img_size=64), _image(64)),
    Case("torchvision-lraspp", "torchvision", _lraspp, _image(64)),
    Case("torchvision-fpn", "torchvision", _fpn, _image(64)),
    Case("torchvision-swin3d", "torchvision", _swin3d, lambda: (torch.randn(ROWS, 3, 4, 32, 32),)),
    Case(
        "diffusers-unet",
        "diffusers",
        _diffusers("UNet2DModel", **_UNET),
        lambda: (torch.randn(ROWS, 3, 16, 16), torch.arange(ROWS)),
    ),
    Case("diffusers-dit", "diffusers", _diffusers("DiTTransformer2DModel", **_DIT), _noisy),
    Case("diffusers-vae", "diffusers", _diffusers("AutoencoderKL", **_VAE), _image(16)),
    Case("x-transformers-rotary", "x_transformers", _x_transformers(rotary_pos_emb=True), _ids),
    Case("x-transformers-alibi", "x_transformers", _x_transformers(alibi_pos_bias=True, alibi_num_heads=4), _ids),
    *(_rnn(kind, steps) for kind in (nn.GRU, nn.LSTM) for steps in (16, 128)),
    Case("nn-transformer", "torch", Seq2Seq, lambda: (torch.randn(ROWS, 8, 16), torch.randn(ROWS, 8, 16))),
    Case("nn-attention", "torch", Cross, lambda: (torch.randn(ROWS, 6, 16), torch.zeros(ROWS, 6, dtype=torch.bool))),
    _text("llama", "Llama", "ForCausalLM", **_LLAMA),
    _text("gpt2", "GPT2", "LMHeadModel", **_GPT2),
    _text("t5", "T5", "ForConditionalGeneration", **_T5),
    _text("mixtral", "Mixtral", "ForCausalLM", **_LLAMA, num_local_experts=4),
    Case(
        "hf-vit",
        "transformers",
        _transformers("ViTConfig", "ViTForImageClassification", **_VIT),
        lambda: {"pixel_values": torch.randn(ROWS, 3, 32, 32)},
    ),
    Case(
        "whisper",
        "transformers",
        _transformers("WhisperConfig", "WhisperForConditionalGeneration", **_WHISPER),
        _speech,
        own_loss,
    ),
    Case("pyg-gat", "torch_geometric", _gat, lambda: (torch.randn(16, 8), torch.randint(16, (2, 40)))),
    Case("w1", "torch", lambda: peers_dtensor.model(w1.init(W1), W1), _w1_tokens, w1_modes=("fsdp8", "fsdp_tp")),
)
BY_NAME = {case.name: case for case in CASES}
