"""Layers of experts whose forward, in transformers, is a loop over the experts that some token chose.

Such a loop depends on the tokens, so that it cannot be traced. While a model is traced, these forwards give each token
to the experts that its router chose, as `experts.run_experts` does for the models that call transformers' interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcdecode.model.frontend.experts import run_experts

IDENTITIES = "LongcatFlashExperts"  # the last of its experts return their input


class GatedExperts:
    """A module with gate_up_proj [E, 2 * width, hidden] and down_proj [E, hidden, width], as an `ExpertsModule`."""

    has_gate, has_bias, has_post_expert_norm, is_transposed = True, False, False, False

    def __init__(self, module: Any):
        self.gate_up_proj, self.down_proj, self.act_fn = module.gate_up_proj, module.down_proj, module.act_fn
        self._apply_gate = getattr(module, "_apply_gate", self._gated)

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated


def gated_experts(self: Any, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of a token's experts, as `run_experts`; self: a module as GatedExperts takes."""
    module: Any = GatedExperts(self)
    return run_experts(module, hidden_states, chosen, shares)


def with_identities(self: Any, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of a token's experts, as `gated_experts`; those without weights return their input.

    Products of an expert without weights are zeros.
    """
    own = shares.masked_fill(chosen < self.num_routed_experts, 0.0).sum(-1, keepdim=True)
    total: Tensor = gated_experts(self, hidden_states, chosen, shares) + (own * hidden_states).to(hidden_states.dtype)
    return total


def _instead(forward: Callable[..., Tensor]) -> Callable[[object], Callable[..., Tensor]]:
    return lambda _: forward


EXPERT_LOOPS = {IDENTITIES: _instead(with_identities), "Step3p7Experts": _instead(gated_experts)}


def without_identities(model: torch.nn.Module) -> None:
    """Take from a model on the meta device the weights that it has for experts that return their input."""
    for module in (m for m in model.modules() if type(m).__name__ == IDENTITIES):
        own: Tensor = module.gate_up_proj[: module.num_routed_experts]  # type: ignore[index]
        module.gate_up_proj = torch.nn.Parameter(own, requires_grad=False)


def spare_experts(module: object) -> int:
    """Return how many more experts a checkpoint may have weights of than are used: those that return their input."""
    return int(getattr(module, "zero_expert_num", 0)) if type(module).__name__ == IDENTITIES else 0
