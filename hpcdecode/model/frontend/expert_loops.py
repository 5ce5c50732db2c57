"""Layers of experts whose forward, in transformers, is a loop over the experts that some token chose.

Such a loop depends on the tokens, so that it cannot be traced. While a model is traced, these forwards give each token
to the experts that its router chose, as `experts.run_experts` does for the models that call transformers' interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IDENTITIES = "LongcatFlashExperts"  # the last of its experts return their input


def gated_experts(self: Any, hidden_states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of a token's experts, [T, hidden].

    Args:
        self: Module with gate_up_proj [E, 2 * width, hidden] and down_proj [E, hidden, width].
        hidden_states: Input, [T, hidden].
        chosen: The experts of each token, int64 [T, K].
        shares: Factor of each choice, [T, K].
    """
    import torch

    product = torch.ops.hpcdecode.expert_linear
    both = product(hidden_states[:, None], chosen, self.gate_up_proj, None, False)
    if hasattr(self, "_apply_gate"):
        x = self._apply_gate(both)
    else:
        gate, up = both.chunk(2, dim=-1)
        x = self.act_fn(gate) * up
    y = product(x, chosen, self.down_proj, None, False)
    total: Tensor = (y * shares[..., None]).sum(1).to(hidden_states.dtype)
    return total


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
    import torch

    for module in (m for m in model.modules() if type(m).__name__ == IDENTITIES):
        own: Tensor = module.gate_up_proj[: module.num_routed_experts]  # type: ignore[index]
        module.gate_up_proj = torch.nn.Parameter(own, requires_grad=False)


def spare_experts(module: object) -> int:
    """Return how many more experts a checkpoint may have weights of than are used: those that return their input."""
    return int(getattr(module, "zero_expert_num", 0)) if type(module).__name__ == IDENTITIES else 0
