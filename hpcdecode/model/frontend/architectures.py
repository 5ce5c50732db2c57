"""Which class of transformers a model is built from: of text alone, or of text with towers for images and sounds.

A model with towers is traced as a whole, on token ids alone, so that its embeddings, its head and the mapping of its
checkpoint's keys are transformers' own. Nothing that is traced uses the towers, so that their weights are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcdecode.model.frontend.own_attentions import known_as

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def has_towers(config: PreTrainedConfig) -> bool:
    """Return whether the language model of `config` is one part of it, beside towers."""
    return text_of(config) is not config


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model in `config`."""
    return config.get_text_config()


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of the model of `config` that computes logits, or None if transformers has none.

    Of a model with towers it is the one with towers, since the classes for its text alone may leave out a factor or a
    tied head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tables = [AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping]
    for table in reversed(tables) if has_towers(config) else tables:
        if type(config) in table:
            found: Any = table[type(config)]
            kind: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
            return kind
    return None


def type_by_architectures(stated: Mapping[str, Any]) -> str | None:
    """Return the model type that a config.json means whose own `model_type` transformers does not know, or None.

    It is that of the class which `architectures` names: kimi_k2, say, is loaded by DeepseekV3ForCausalLM.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if stated.get("model_type") in CONFIG_MAPPING:
        return None
    names = [name for name in stated.get("architectures") or [] if isinstance(name, str)]
    tables: list[Mapping[str, str | tuple[str, ...]]] = [
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ]
    for table in tables:
        for model_type, classes in table.items():
            if any(name == classes or (isinstance(classes, tuple) and name in classes) for name in names):
                return model_type
    return None


def build(config: PreTrainedConfig, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Return the model of `config` on the default device.

    Args:
        config: Config of the model.
        dtype: Dtype of the parameters.
        attention: Implementation of attention in its language model; None for a default.

    Raises:
        ValueError: If transformers has no class for it.
    """
    kind = model_class(config)
    if kind is None:
        raise ValueError("transformers has no class for it")
    make: Callable[..., PreTrainedModel] = kind._from_config
    if attention is None or has_towers(config):
        model = make(config, dtype=dtype)
    else:
        with known_as(attention, kind):
            model = make(config, dtype=dtype, attn_implementation=attention)
    if attention is not None and has_towers(config):
        decoder_of(model).set_attn_implementation(attention)
    return model


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model in `model`, without its head."""
    decoder: Callable[[], PreTrainedModel] = model.get_decoder
    return decoder()
