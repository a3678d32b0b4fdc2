"""Models from a Hugging Face config.json, with random weights and inputs; no downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fp8pass.tools.cli.parsing import Failure, UsageError

BATCH, SEQUENCE = 2, 128


def read(path: str) -> Any:
    """The configuration in a config.json, or in the folder it is in, for training.

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
    """The model of a configuration, in training mode.

    Without `dtype` it has the dtype that the configuration names, else float32.
    """
    with torch.device(device), _default_dtype(dtype or _dtype_of(config) or torch.float32):
        return _class_of(config)(config)


def note_on_dtype(config: Any, dtype: torch.dtype | None) -> str:
    """What to know of the dtype of weights where nobody named one; '' where somebody did."""
    if dtype or _dtype_of(config):
        return ""
    return "Weights are in float32: the config names no dtype. --dtype bfloat16 gives another."


def _class_of(config: Any) -> Any:
    """The class that a configuration names; if it names none, a language model or a base model."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UsageError(
        f"No model for a {type(config).__name__}: name one of transformers' classes under "
        "'architectures' in the config, or give a TARGET module:function."
    )


def example_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Random inputs of a batch of 2, with labels if the model's loss takes them.

    Raises:
        UsageError: the model takes neither tokens nor images.
    """
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
            f"No default inputs for {type(model).__name__}, whose main one is {name}: describe "
            f"them, such as --input {name}=2x80x3000:bfloat16."
        )
    return {name: x, **_labels(model, x)}


def _labels(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
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


def _dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a configuration names: `dtype` in transformers 5, `torch_dtype` in 4."""
    named = config.to_dict()
    name = named.get("dtype") or named.get("torch_dtype")
    return getattr(torch, name) if name else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in `dtype`; unlike a cast, this leaves buffers in fp32 that are made so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
