"""Inkling, Inkling 2 and its form with loops while they are traced: biases by distance, sinks of tokens, convolutions.

Every token and head mixes learned profiles over distances into its biases. transformers makes a tensor of all biases;
here attention takes what mixes the profiles (`ScoreRows`). Queries of Inkling have the positions that they are given,
not those from 0 on.

The convolutions of keys and values are one, so that they take one exchange. What a convolution adds to its input is
added by its newest tap. Where the taps are a token's own, the convolution brings the earlier tokens, and the sum is
made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcdecode.model.frontend.indexers import traced_positions
from hpcdecode.model.frontend.score_rows import ScoreRows

if TYPE_CHECKING:
    from torch import Tensor

SLIDING = "hybrid_sliding"  # in a config's layer_types: a window, and convolutions


def _attention(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention of Inkling."""

    def attend(self: Any, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        shape = hidden_states.shape[:-1]
        q, mixes = self.q_proj(hidden_states), self.r_proj(hidden_states)
        rows = [project(hidden_states) for project in (self.k_proj, self.v_proj)]
        k, v = _convolved(rows, [_taps(self.k_sconv), _taps(self.v_sconv)], self.num_key_value_heads)
        q, k = self.q_norm(q.view(*shape, -1, self.head_dim)), self.k_norm(k.view(*shape, -1, self.head_dim))
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            mixes = mixes.view(*shape, self.num_heads, -1)
            q, mixes = (_log_scaled(x, self.config) for x in (q, mixes))
        scores = ScoreRows(self.rel_logits_proj.proj, mixes.reshape(shape[-1], -1))
        o = _attended(self, q, k, v.view(*shape, -1, self.head_dim), position_bias=scores)
        return self.o_proj(o), None

    return attend


def _attention_2(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention of Inkling 2."""

    def attend(
        self: Any,
        hidden_states: Tensor,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        x, shape = hidden_states, hidden_states.shape[:-1]
        sources = [x if own is None else own for own in (key_hidden_states, value_hidden_states)]
        projections = self.k_proj, self.v_proj
        rows = [own.linear(source) for own, source in zip(projections, sources, strict=True)]
        convolutions = [own.sconv for own in projections]
        if hasattr(convolutions[0], "weight_proj"):
            rows = _own_taps(rows, convolutions, sources)
        else:
            rows = _convolved(rows, [_taps(own, scaled=True) for own in convolutions], self.num_key_value_heads)
        k, v = (own.norm(r.view(*shape, -1, self.head_dim)) for own, r in zip(projections, rows, strict=True))
        q = self.q_proj(x, position_ids).transpose(1, 2)
        scores = self.relative_position_bias(x, None, position_ids)
        o = _attended(self, q, k, v, position_bias=scores, sinks=self.sink_proj(x)[0])
        return self.o_proj(o, x), None

    return attend


def _attended(self: Any, q: Tensor, k: Tensor, v: Tensor, **scores: object) -> Tensor:
    """Return the attention [1, T, q_heads * v_dim] of q, k and v, [1, T, heads, dim]; self: the attention's module."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    run = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    about = {"scaling": self.scaling, "sliding_window": self.sliding_window}
    o, _ = run(self, *(x.transpose(1, 2) for x in (q, k, v)), None, **about, **scores)
    attended: Tensor = o.reshape(*q.shape[:2], -1)
    return attended


def _log_scaled(x: Tensor, config: Any) -> Tensor:
    """Return x [1, T, heads, n] times a number that grows with a token's position."""
    import torch

    count = (traced_positions() + 1).float() / config.log_scaling_n_floor
    scale = 1.0 + config.log_scaling_alpha * torch.log(count.clamp(min=1.0))
    scaled: Tensor = (x.float() * scale[:, None, None]).to(x.dtype)
    return scaled


def _score_rows(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of what makes biases in Inkling 2."""

    def rows(self: Any, hidden_states: Tensor, _: object, position_ids: Tensor) -> ScoreRows:
        mixes = self.linear(hidden_states).view(*hidden_states.shape[:-1], self.num_heads, -1)
        return ScoreRows(self.proj, self.norm(mixes, position_ids).flatten(2)[0])

    return rows


def _convolution(_: Callable[..., Any], scaled: bool = False) -> Callable[..., Any]:
    """Return the forward of a short convolution; scaled: of Inkling 2."""

    def convolve(self: Any, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        (y,) = _convolved([hidden_states], [_taps(self, scaled)], 1)
        return y

    return convolve


def _convolved(rows: Sequence[Tensor], taps: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return the convolutions, as one, of rows [1, T, columns] by taps [columns, taps].

    Their columns lie side by side head by head, so that heads can be dealt out to the members of a group.
    """
    import torch

    both = torch.stack([x.unflatten(-1, (heads, -1)) for x in rows], -2).flatten(-3)
    joined = torch.stack([x.unflatten(0, (heads, -1)) for x in taps], 1).flatten(0, 2)
    convolved = torch.ops.hpcdecode.causal_conv(both[0], joined, None, False)[None]
    parts = convolved.unflatten(-1, (heads, len(rows), -1))
    return [parts[..., i, :].flatten(-2) for i in range(len(rows))]


def _taps(convolution: Any, scaled: bool = False) -> Tensor:
    """Return the taps of each channel, float32 [channels, taps], with what adds the input to the result."""
    import torch

    taps: Tensor = convolution.conv1d.weight[:, 0].float()
    taps = taps + torch.nn.functional.pad(torch.ones(1), (taps.shape[1] - 1, 0))
    return taps / (taps.shape[1] + 1) ** 0.5 if scaled else taps


def _own_taps(rows: Sequence[Tensor], convolutions: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor]:
    """Return the convolutions of rows [1, T, columns] by taps of channels plus those of each token and head.

    Args:
        rows: Inputs.
        convolutions: Modules.
        sources: What the taps of tokens are projections of, [1, T, hidden].
    """
    import torch

    count, heads = convolutions[0].conv_kernel_size, convolutions[0].num_heads
    lags = torch.eye(count)[:-1].flip(0)  # the newest of the earlier tokens first
    columns = rows[0].shape[-1]
    parts = [row for _ in lags for row in rows]
    earlier = _convolved(parts, [lag.expand(columns, -1) for lag in lags for _ in rows], heads)
    made = []
    for i, (row, convolution, source) in enumerate(zip(rows, convolutions, sources, strict=True)):
        own = convolution.weight_proj(source).float().unflatten(-1, (heads, count))
        total = row.float().unflatten(-1, (heads, -1))
        for lag, past in enumerate([row, *earlier[i :: len(rows)]]):
            static = convolution.static_weight[lag].float().view(heads, -1)
            total = total + past.float().unflatten(-1, (heads, -1)) * (static + own[..., lag, None])
        made.append((total.flatten(2) / (2 * count + 1) ** 0.5).to(row.dtype))
    return made


def _residual(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of an attention over what blocks of layers have given, for each token by itself."""

    def mix(self: Any, block_states: Tensor, partial_block_states: Tensor) -> list[Tensor]:
        return _mixed(self, self.query, block_states, partial_block_states)

    return mix


def _messages(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of the same, over what the pass before through layers that loop has given."""

    def mix(self: Any, block_states: Tensor, partial_block_states: Tensor, loop_layer_idx: int) -> Tensor:
        import torch

        return torch.stack(_mixed(self, self.query[loop_layer_idx], block_states, partial_block_states), -2)

    return mix


def _mixed(self: Any, queries: Tensor, block_states: Tensor, partial_block_states: Tensor) -> list[Tensor]:
    """Return for each query, [hidden] each, the attention over the states of blocks, [1, T, hidden]."""
    import torch

    states = self.norm(torch.cat([block_states, partial_block_states.unsqueeze(-2)], -2).float())
    size, mixed = states.shape[-1], []
    for query in queries.float().view(-1, size):
        weights = ((states * query).sum(-1) * size**-0.5).softmax(-1)
        mixed.append((states * weights[..., None]).sum(-2))
    return mixed


def _shared_experts(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of the experts that every token has, side by side as one."""

    def experts(self: Any, hidden_states: Tensor, gammas: Tensor) -> Tensor:
        from torch.nn.functional import linear

        gate, up = (linear(hidden_states, w.flatten(0, 1)) for w in (self.gate_proj, self.up_proj))
        inner = (self.act_fn(gate) * up).unflatten(-1, (self.n_shared_experts, -1)) * gammas[..., None]
        return linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))

    return experts


def _named(kind: str) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return what stands in for the forwards of Inkling 2's classes; kind: what their names have behind Inkling2."""
    return {
        f"Inkling2{kind}SlidingAttention": _attention_2,
        f"Inkling2{kind}FullAttention": _attention_2,
        f"Inkling2{kind}RelativePositionBias": _score_rows,
        f"Inkling2{kind}ShortConvolution": lambda forward: _convolution(forward, scaled=True),
        f"Inkling2{kind}BlockAttentionResidual": _residual,
        f"Inkling2{kind}MessageAttentionResidual": _messages,
    }


INKLING = {
    "InklingAttention": _attention,
    "InklingShortConvolution": _convolution,
    "InklingSharedExperts": _shared_experts,
    **_named(""),
    **_named("Loop"),
}
