"""MiniMax's lightning attention as a recurrence, while a model is traced.

The state of a head decays by a factor of the head and the layer, and takes up every token: S = exp(-slope) S + k v^T,
o = S^T q (Lightning Attention-2, arXiv 2401.04658, section 3). transformers computes it in blocks, in a loop whose
length is the number of tokens, so that it cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def by_recurrence(_: object) -> Callable[..., object]:
    """Return the forward of a layer of lightning attention that calls `hpcdecode::recur`."""

    def lightning(self: Any, hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        import torch

        heads = self.num_attention_heads
        x = self.act_fn(self.qkv_proj(hidden_states[0]))
        q, k, v = (part.flatten(1) for part in x.unflatten(-1, (heads, -1)).chunk(3, dim=-1))
        decay = torch.zeros_like(x[:, :heads], dtype=torch.float32) - self.slope_rate.flatten()
        o = torch.ops.hpcdecode.recur(q, k, v, decay, None, None, None, heads, heads, False, False, 1.0)
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * self.norm(o)), None

    return lightning


LIGHTNING = {"MiniMaxLightningAttention": by_recurrence}
