"""Llama 4 while it is traced: its experts by choice, its temperature by position, its chunks of attention.

transformers runs every expert on all tokens, those that were not chosen on zeros, and takes the numbers 0 to T - 1 for
the positions of its queries. Here a token goes to its experts alone, and has the position that it is given. Of a model
with towers its language model is traced.

Layers of the kind CHUNKED attend within chunks of `attention_chunk_size` tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.replaced_names import replaced_methods, replaced_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNKED = "chunked_attention"  # in a config's layer_types
OWN_CHUNK = "own chunk"  # stands for the mask of a layer that attends in chunks


def chunk_size(config: Any) -> int:
    """Return the tokens of a chunk of the language model `config`.

    Raises:
        UserError: If config.json does not say how many there are.
    """
    size = getattr(config, "attention_chunk_size", None)
    if type(size) is not int or size < 1:
        raise UserError(f"config.json: expected attention_chunk_size to be a number of tokens, got {size!r}")
    return int(size)


@contextlib.contextmanager
def tracing_llama4(model: torch.nn.Module) -> Iterator[None]:
    """Let the layers of Llama 4 in `model`, of transformers, be traced as above inside the block."""

    def mask(name: str, _: object) -> object | None:
        return (lambda **_: OWN_CHUNK) if name == "create_chunked_causal_mask" else None

    with replaced_methods(model.modules(), _WRITTEN), replaced_names(model.modules(), mask):
        yield


class GivenPositions:
    """Stands for a cache of earlier tokens, which a layer counts to know the positions of its own.

    Args:
        positions: Of the tokens, [1, T].
    """

    def __init__(self, positions: Tensor):
        self.positions = positions[0]

    def get_seq_length(self, *_: object) -> GivenPositions:
        """Return what is added to 0 .. T - 1."""
        return self

    def __radd__(self, _: Tensor) -> Tensor:
        return self.positions

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this step alone."""
        return key, value


def _with_positions(forward: Callable[..., object]) -> Callable[..., object]:
    """Return the forward of a decoder layer that passes the positions on to its attention."""

    def layer(self: object, hidden_states: Tensor, **kwargs: Any) -> object:
        return forward(self, hidden_states, **{**kwargs, "cache": GivenPositions(kwargs["position_ids"])})

    return layer


def _by_choice(_: Callable[..., object]) -> Callable[..., object]:
    """Return the forward of a layer of experts in which a token goes to the experts that its router chose."""

    def experts(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        x = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(x, self.router.weight)
        best, chosen = torch.topk(logits, self.top_k, dim=1)
        rows = x[:, None] * torch.sigmoid(best.float()).to(x.dtype)[..., None]
        product = torch.ops.hpcdecode.expert_linear
        gate, up = product(rows, chosen, self.experts.gate_up_proj, None, True).chunk(2, dim=-1)
        routed: Tensor = product(self.experts.act_fn(gate) * up, chosen, self.experts.down_proj, None, True)
        return self.shared_expert(x) + routed.sum(1), logits

    return experts


def _of_text(_: Callable[..., object]) -> Callable[..., object]:
    """Return the forward of a model with towers, for text: transformers' ends in an AttributeError without images."""

    def text(self: Any, **kwargs: object) -> object:
        return self.language_model(**kwargs)

    return text


_WRITTEN = {
    "Llama4ForConditionalGeneration": _of_text,
    "Llama4TextDecoderLayer": _with_positions,
    "Llama4TextMoe": _by_choice,
}
