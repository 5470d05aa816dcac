"""Makes the inputs of a transformers model's training step, on the meta device, from its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlib.core.errors import ShardingError


class Sizes(NamedTuple):
    """Sizes of a batch: samples, and tokens of each; 0 tokens if the caller names none."""

    batch: int
    seq: int


def _ids(config: Any, sizes: Sizes) -> Tensor:
    return torch.zeros(sizes.batch, sizes.seq, dtype=torch.long, device="meta")


def _classes(config: Any, sizes: Sizes) -> Tensor:
    return torch.zeros(sizes.batch, dtype=torch.long, device="meta")


def _floats(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="meta")


def _pixels(config: Any, sizes: Sizes) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = _first(vision, ("image_size", "input_size", "img_size"), 224)
    height, width = (size, size) if isinstance(size, int) else size
    channels = _first(vision, ("num_channels", "in_channels", "in_chans"), 3)
    frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
    return _floats(sizes.batch, *frames, channels, height, width)


def _features(config: Any, sizes: Sizes) -> Tensor:
    audio = getattr(config, "audio_config", config)
    if hasattr(audio, "max_source_positions") and hasattr(audio, "num_mel_bins"):  # Whisper halves them
        return _floats(sizes.batch, audio.num_mel_bins, 2 * audio.max_source_positions)
    width = _first(audio, ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins"), 80)
    return _floats(sizes.batch, sizes.seq, width)


def _sound(config: Any, sizes: Sizes) -> Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram
        return _floats(sizes.batch, config.max_length, config.num_mel_bins)
    return _floats(sizes.batch, sizes.seq)


Maker = Callable[[Any, Sizes], Any]

# By argument of `forward`: how to make it from the config.
INPUTS: Mapping[str, Maker] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _sound,
}
# By a part of the class's name: the labels of its loss. Other classes have no `labels` here.
LOSS_LABELS: Mapping[str, Maker] = {
    "CausalLM": _ids, "LMHead": _ids, "MaskedLM": _ids, "ConditionalGeneration": _ids, "DoubleHeads": _ids,
    "TokenClassification": _ids, "ImageClassification": _classes, "SequenceClassification": _classes,
    "AudioClassification": _classes, "VideoClassification": _classes,
}  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "seq_length")


def make_inputs(model: nn.Module, batch: int | None, seq: int | None) -> dict[str, Any]:
    """Returns the keyword arguments of one training call; labels if the model computes its loss from them.

    Raises `ShardingError` for a missing or unfit size, and a model that reads other inputs.
    """
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    names = ["input_ids", "pixel_values"] if "return_loss" in accepted else [main]
    labels = next((make for part, make in LOSS_LABELS.items() if part in type(model).__name__), None)
    labels = labels if "labels" in accepted else None
    if unknown := [name for name in names if name not in INPUTS]:
        raise ShardingError(
            f"{type(model).__name__} reads inputs that the command cannot make",
            [f"{name} of its forward" for name in unknown],
            rule=f"inputs are {', '.join(INPUTS)}",
            remedy="plan your own step, MODULE:FUNCTION",
        )
    makers = {name: INPUTS[name] for name in names}
    if labels is not None:
        makers["labels"] = labels
    elif "return_loss" in accepted:
        makers["return_loss"] = lambda config, sizes: True
    elif "decoder_input_ids" in accepted:
        makers["decoder_input_ids"] = _ids
    _check_sizes(config, type(model).__name__, batch, seq, reads_tokens=_depend_on_seq(config, makers.values()))
    return {name: make(config, Sizes(batch or 0, seq or 0)) for name, make in makers.items()}


def _depend_on_seq(config: Any, makers: Iterable[Maker]) -> bool:
    """Returns True if `--seq` is a size of one of the inputs; fixed sizes come from the config."""
    pairs = ((make(config, Sizes(1, 1)), make(config, Sizes(1, 2))) for make in makers)
    return any(isinstance(x, Tensor) and x.shape != y.shape for x, y in pairs)


def _check_sizes(config: Any, name: str, batch: int | None, seq: int | None, *, reads_tokens: bool) -> None:
    wrong = []
    if batch is None or batch < 1:
        wrong.append("--batch is missing" if batch is None else f"--batch {batch} is no number of samples")
    if reads_tokens and (seq is None or seq < 1):
        wrong.append("--seq is missing" if seq is None else f"--seq {seq} is no number of tokens")
    if seq is not None and not reads_tokens:
        wrong.append(f"--seq {seq} has no use: the config has all sizes of a sample")
    positions = _first(config.get_text_config(), POSITIONS, None) if reads_tokens else None
    most = positions if isinstance(positions, int) and positions > 0 else None  # some configs write -1 for no limit
    if seq is not None and most is not None and most < seq:
        wrong.append(f"--seq {seq} is more than the {most} positions of its config")
    if wrong:
        raise ShardingError(
            f"{name} cannot be called", wrong,
            rule="a step has --batch samples over all devices, of --seq tokens if the model reads tokens",
            remedy="--batch 1024" + f" --seq {min(4096, most or 4096)}" * reads_tokens,
        )  # fmt: skip


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    return next((x for x in (getattr(config, name, None) for name in names) if x is not None), default)
