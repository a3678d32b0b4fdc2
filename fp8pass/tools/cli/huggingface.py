"""Build models from a Hugging Face config.json: random weights and inputs, no downloads."""

from __future__ import annotations

from typing import Any

import torch

from fp8pass.tools.cli.parsing import Failure, UsageError

BATCH, SEQUENCE = 2, 128
USUAL_BATCH, USUAL_SEQUENCE = 4, 2048


def read(path: str) -> Any:
    """Read a config.json or the config.json of a folder.

    Raises:
        Failure: transformers is not installed.
        OSError, ValueError: transformers cannot read the configuration.
    """
    try:
        import transformers
    except ImportError as error:
        raise Failure(
            "A Hugging Face config needs transformers: pip install 'fp8pass[huggingface]'."
        ) from error
    config = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    config.use_cache = False  # the cache of keys and values is for generation, not for training
    return config


def build(config: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Build the model of a configuration in training mode.

    The default dtype is the dtype of the configuration, or FP32 if it names no dtype.

    Raises:
        UsageError: transformers has no model for the configuration.
    """
    make = _find_class(config)
    before = torch.get_default_dtype()
    # A cast of the built model would also convert buffers that it deliberately creates in FP32.
    torch.set_default_dtype(dtype or _find_dtype(config) or torch.float32)
    try:
        with torch.device(device):
            return make(config)
    finally:
        torch.set_default_dtype(before)


def note_dtype(config: Any, dtype: torch.dtype | None) -> str:
    if dtype or _find_dtype(config):
        return ""
    return "Weights are in float32, because the config names no dtype: pass --dtype to change it."


def _find_class(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UsageError(
        f"transformers has no default model class for a {type(config).__name__}. Name a class "
        "under 'architectures' in the config, or pass a TARGET module:function."
    )


def make_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Make a random batch of 2 inputs, with labels if the model's loss needs them."""
    name, config, device = model.main_input_name, model.config, model.device
    text = config.get_text_config()
    if name == "input_ids" and hasattr(text, "vocab_size"):
        length = min(SEQUENCE, getattr(text, "max_position_embeddings", SEQUENCE))
        x = torch.randint(text.vocab_size, (BATCH, length), device=device)
    elif name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = BATCH, getattr(config, "num_channels", 3), height, width
        x = torch.randn(shape, device=device, dtype=model.dtype)
    else:
        raise UsageError(
            f"{type(model).__name__} has no default inputs. Describe its main input {name}, such "
            f"as --input {name}=2x80x3000:bfloat16."
        )
    return {name: x, **_make_labels(model, x)}


def note_inputs(model: Any, inputs: dict[str, torch.Tensor]) -> str:
    x = next(iter(inputs.values()))
    made = f"{' x '.join(map(str, x.shape))} {'values' if x.is_floating_point() else 'tokens'}"
    usual = " ".join(f"--input {name}={_describe_usual(model, x)}" for name, x in inputs.items())
    return f"The inputs are made up: {made}. Pass the sizes of your training: {usual}"


def _describe_usual(model: Any, x: torch.Tensor) -> str:
    """Describe an input like `x` of realistic size, in the syntax of `--input`."""
    if x.is_floating_point():
        return "x".join(map(str, (USUAL_BATCH, *x.shape[1:])))
    if x.ndim == 1:
        return f"{USUAL_BATCH}:int64:{model.config.num_labels}"
    text = model.config.get_text_config()
    length = min(USUAL_SEQUENCE, getattr(text, "max_position_embeddings", USUAL_SEQUENCE))
    return f"{USUAL_BATCH}x{length}:int64:{text.vocab_size}"


def _make_labels(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    from transformers.models.auto import modeling_auto as auto

    kind = type(model).__name__
    if kind in (
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
    ):
        return {"labels": x}
    if kind in (
        *auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(),
    ):
        return {"labels": torch.randint(model.config.num_labels, (len(x),), device=x.device)}
    return {}


def _find_dtype(config: Any) -> torch.dtype | None:
    """Return the config's dtype: `dtype` in transformers 5, `torch_dtype` in transformers 4."""
    named = config.to_dict()
    name = named.get("dtype") or named.get("torch_dtype")
    return getattr(torch, name) if name else None
