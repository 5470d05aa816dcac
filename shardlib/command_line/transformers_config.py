"""Reads a config of transformers, limits its layers, and builds the model on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardlib.core.errors import ShardingError

# Tasks whose class is built if the config names none: the first that has the model's type. A task is the middle of the
# name of a table in transformers (`MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`).
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION",
)  # fmt: skip
LAYERS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers", "depth", "depths",
}  # fmt: skip


def read_config(path: Path, layers: int | None = None) -> Any:
    """Returns the config in a `config.json`, or in the folder that holds it, with at most `layers` layers per stack.

    Raises `ShardingError` for a missing or broken file, a model type that transformers does not know, and negative
    numbers of layers.
    """
    transformers = _import_transformers()
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShardingError(
            f"--model {path} cannot be read",
            [f"{file}: {error.strerror if isinstance(error, OSError) else error}"],
            rule="it is a config.json of transformers, or a folder that holds one; names of the hub are not fetched",
        ) from error
    kind = str(content.get("model_type", "")) if isinstance(content, Mapping) else ""
    if kind not in transformers.CONFIG_MAPPING:
        close = get_close_matches(kind, list(transformers.CONFIG_MAPPING), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ShardingError(
            f"{file} is of model type {kind!r}" if kind else f"{file} has no model_type",
            [f"transformers {transformers.__version__} has no such type{hint}"],
            rule="the model's code comes from transformers; code beside a config is not run",
            remedy="install the version of transformers that the config is for, or plan your own MODULE:FUNCTION",
        )  # fmt: skip
    if negative := list(_negative_layers(content)):
        raise ShardingError(
            f"{file} has stacks without layers",
            negative,
            rule="numbers of layers are not negative",
            remedy="correct the config",
        )
    config = _build(kind, lambda: transformers.CONFIG_MAPPING[kind].from_dict(dict(content)))
    if layers is None:
        return config
    if layers < 1:
        raise ShardingError(f"--layers {layers} is no number of layers", remedy="--layers 4")
    return _build(kind, lambda: type(config).from_dict(limit_layers(config.to_dict(), layers)))


def _negative_layers(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the negative numbers of layers of a config and its parts: `text_config.num_layers: -1`."""
    for key, x in config.items():
        if isinstance(x, Mapping):
            yield from _negative_layers(x, f"{prefix}{key}.")
        elif key in LAYERS and any(isinstance(n, int) and n < 0 for n in (x if isinstance(x, list) else [x])):
            yield f"{prefix}{key}: {x}"


def limit_layers(config: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Returns a config's content with at most `most` layers per stack, in its parts too.

    Lists with an entry per layer become as short.

    Example:
        >>> limit_layers({"num_hidden_layers": 8, "layer_types": list("abababab"), "text_config": {"n_layer": 6}}, 2)
        {'num_hidden_layers': 2, 'layer_types': ['a', 'b'], 'text_config': {'n_layer': 2}}
    """
    counts = {x for key, x in config.items() if key in LAYERS and isinstance(x, int) and x > most}
    limited: dict[str, Any] = {}
    for key, x in config.items():
        if isinstance(x, Mapping):
            limited[key] = limit_layers(x, most)
        elif key in LAYERS and isinstance(x, list):
            limited[key] = [min(n, most) for n in x]
        elif key in LAYERS and isinstance(x, int):
            limited[key] = min(x, most)
        else:
            limited[key] = x[:most] if isinstance(x, list) and len(x) in counts else x
    return limited


def build_model(config: Any) -> nn.Module:
    """Builds the class that the config names, or its type's class for a common task, in float32 on the meta device.

    Raises `ShardingError` if transformers has none of the named classes.
    """
    cls = _choose_class(config)
    for part in (config, *(x for x in vars(config).values() if hasattr(x, "use_cache"))):
        part.use_cache = False
    with torch.device("meta"):
        model: nn.Module = _build(cls.__name__, lambda: cls(config))
    return model.train()


def _choose_class(config: Any) -> Any:
    transformers = _import_transformers()
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in TASKS]
    tables.append(modeling_auto.MODEL_MAPPING_NAMES)
    of_type = [name for table in tables if isinstance(name := table.get(config.model_type), str)]
    named = config.architectures or ()
    name = next((name for name in named or of_type if isinstance(name, str) and hasattr(transformers, name)), None)
    if name is None and named and of_type:
        raise ShardingError(
            f"transformers has no model {' or '.join(map(repr, named))}",
            rule="the model is the first of the config's architectures that transformers has",
            remedy=f"architectures of the type {config.model_type!r}: {', '.join(dict.fromkeys(of_type))}",
        )
    if name is None:
        raise ShardingError(
            f"transformers has no model for the type {config.model_type!r}",
            remedy='name its class in the config: "architectures": ["LlamaForCausalLM"]',
        )
    return getattr(transformers, name)


def _build(name: str, build: Callable[[], Any]) -> Any:
    """Returns `build()`; reports what transformers raises for values that do not fit as a `ShardingError`."""
    from huggingface_hub import errors

    invalid = getattr(errors, "StrictDataclassError", ValueError)  # earlier versions validate nothing
    try:
        return build()
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError, invalid) as error:
        text = str(error).strip() or type(error).__name__
        raise ShardingError(f"transformers cannot build {name}", [text], remedy="correct the config") from error


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ShardingError("transformers is not installed", remedy="pip install transformers") from error
    return transformers
