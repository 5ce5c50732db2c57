"""The transformers model of a config without its weights, as it is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.architectures import build, decoder_of
from hpcdecode.model.frontend.expert_loops import without_identities
from hpcdecode.model.frontend.rotary import fix_frequencies

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the transformers model of `config` on the meta device.

    Its parameters are in `dtype`, but for those that the model keeps in float32.
    """
    ops.register()
    with torch.device("meta"):
        model = build(config, dtype, ops.NAME)
    decoder = decoder_of(model)
    if hasattr(decoder, "set_experts_implementation"):
        decoder.set_experts_implementation(ops.NAME)
    settle(model, model._get_dtype_plan(dtype))
    return model


def settle(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Let a model be as it is when it runs; `dtypes`: those of tensors that keep their own, by a pattern of names."""
    from transformers.core_model_loading import build_glob_alternation

    model.train(False)
    without_identities(model)
    if dtypes:
        pattern, key_of_group, _ = build_glob_alternation(list(dtypes))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (match := pattern.search(name)) and match.lastgroup is not None:
                tensor.data = tensor.data.to(dtypes[key_of_group[match.lastgroup]])


def real_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the values of the buffers that checkpoints leave out, such as rotary frequencies.

    They are set as transformers sets them when it loads a model, and do not change as it runs.
    """
    absent = dict(model.named_non_persistent_buffers())
    for name, buffer in absent.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.empty_like(buffer, device="cpu"))
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    initialize: Callable[[], None] = model.initialize_weights
    with torch.no_grad():
        initialize()
    return {**{name: model.get_buffer(name) for name in absent}, **fix_frequencies(model)}
