"""The layer for multi-token prediction (MTP) that checkpoints of some models have beside the model.

From the hidden state that the model has of a token, and from the token behind it, it predicts the one after that
(DeepSeek-V3, arXiv:2412.19437, section 2.2). Its modules are transformers' own (`MtpModel`). Of several such layers the
first is taken; what it made of a token is a hidden state that it goes on from, as with those of the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.architectures import text_of
from hpcdecode.model.frontend.export import Exported, exported
from hpcdecode.model.frontend.indexers import INDEXED, trace_positions
from hpcdecode.model.frontend.skeleton import settle, skeleton
from hpcdecode.model.frontend.sources import MatchedKeys, Sources, chosen_sources, held_name, match_keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_layers import MtpModel

_OWN = re.compile(r"(?:.*\.)?mtp(?:_layers)?\..*")  # keys of models that have such layers apart
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_ATTENDS = "full_attention"


def mtp_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the layer for multi-token prediction, as a model of that layer alone.

    Where nothing is stated it attends to all tokens, if any layer of the model does, and else is as the last one.

    Args:
        config: Config of the model.
    """
    own: PreTrainedConfig = with_mtp_layer(config).get_mtp_config()
    return own


def with_mtp_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of `config` whose language model states one such layer, and of which kind it is."""
    stated = copy.deepcopy(config)
    text: Any = text_of(stated)
    text.num_mtp_layers = 1
    for kinds, own in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if (of_model := getattr(text, kinds, None)) is not None:
            likely = _ATTENDS if {_ATTENDS, *INDEXED} & {*of_model} else of_model[-1]
            with suppress(AttributeError):  # of a config that derives it from the number of such layers
                setattr(text, own, (getattr(text, own, None) or [likely])[:1])
    return stated


def is_mtp_key(key: str, layers: int) -> bool:
    """Return whether a tensor of a checkpoint belongs to a layer for multi-token prediction.

    Args:
        key: Key of the tensor.
        layers: Number of layers of the model: those for multi-token prediction are apart, or behind them.
    """
    if _OWN.fullmatch(key):
        return True
    found = _LAYER.fullmatch(key)
    return found is not None and int(found[1]) >= layers


def require_mtp(keys: Iterable[str], layers: int | None) -> None:
    """Raise UserError unless a checkpoint has a layer for multi-token prediction.

    Args:
        keys: Keys of its tensors.
        layers: Number of layers of the model, or None.
    """
    if layers is None or not any(is_mtp_key(key, layers) for key in keys):
        raise UserError(
            "method 'mtp': expected a model whose checkpoint has a layer for multi-token prediction, as DeepSeek-V3, "
            "GLM-4.5 or Qwen3-Next have, got one without; leave the method out, or name a second model"
        )


class Skeletons(NamedTuple):
    """A model without its weights, and its layer for multi-token prediction, with the model's embeddings and head."""

    main: PreTrainedModel
    mtp: MtpModel


def mtp_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> Skeletons:
    """Return the model of `config` and its layer for multi-token prediction on the meta device.

    Args:
        config: Config of the model.
        dtype: Dtype of the parameters.
    """
    from transformers.modeling_layers import MtpModel

    main, default = skeleton(with_mtp_layer(config), dtype), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            made: MtpModel = MtpModel(main, 1)
    finally:
        torch.set_default_dtype(default)
    made.set_experts_implementation(ops.NAME)
    settle(made, main._get_dtype_plan(dtype))
    block: Any = made.layers[0].mtp_block
    block.forward = partial(_hidden_of, block.forward)
    return Skeletons(main, made)


def _hidden_of(forward: Callable[..., Tensor | tuple[Tensor, ...]], *args: object, **kwargs: object) -> Tensor:
    """Return the hidden states that a layer returns; some return more, such as what their indexers chose."""
    made = forward(*args, **kwargs)
    return made[0] if isinstance(made, tuple) else made


class FlatMtp(torch.nn.Module):
    """A layer for multi-token prediction over the tokens of all sequences side by side, as `Flat`."""

    def __init__(self, model: MtpModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits [L, vocab].

        Args:
            ids: Token ids, int64 [T].
            positions: Positions of the tokens, int64 [T].
            keep: Indices of the tokens whose logits are computed, int64 [L].
            hidden: What the model's head takes of the tokens before these, [T, hidden].
        """
        check: Callable[[bool], None] = torch._check
        check(ids.shape[0] == positions.shape[0])
        check(ids.shape[0] == hidden.shape[0])
        trace_positions(positions)
        made = self.model.forward_layer(0, hidden[None], positions[None], None, input_ids=ids[None])
        logits: Tensor = self.model._project_to_logits(made[:, keep])[0]
        return logits


def export_mtp(config: PreTrainedConfig, dtype: torch.dtype) -> Exported:
    """Export the layer for multi-token prediction of the model of `config`. Raise whatever the exporter raises."""
    model = mtp_skeleton(config, dtype).mtp
    return exported(model, FlatMtp(model), dtype, (text_of(config).hidden_size, dtype))


def mtp_sources(
    config: PreTrainedConfig, dtype: torch.dtype, keys: Iterable[str], wanted: Iterable[str], stackable: Iterable[str]
) -> Sources:
    """Return where the weights of the layer come from in a checkpoint, as `find_sources`.

    Embeddings and head are those of the model, whatever the checkpoint has of them for the layer.
    """
    keys, layers = list(keys), text_of(config).num_hidden_layers
    main, own = mtp_skeleton(config, dtype)
    shared = {id(tensor): name for name, tensor in main.named_parameters(remove_duplicate=False)}
    matched = match_keys([k for k in keys if is_mtp_key(k, layers)], own, own.get_weight_conversions(main))
    of_main = match_keys([k for k in keys if not is_mtp_key(k, layers)], main)
    plain = {name: key for name, key in matched.plain.items() if name.startswith("layers.")}
    for name, tensor in own.named_parameters(remove_duplicate=False):
        held = held_name(shared[id(tensor)], of_main.names(), main) if id(tensor) in shared else None
        if held is not None and held in of_main.plain:
            plain[name] = of_main.plain[held]
    return chosen_sources(own, MatchedKeys(plain, matched.conversions), wanted, stackable)
