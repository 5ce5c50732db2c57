"""The token in which the memory of an R-rank is counted: what it takes, and what a sequence takes beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.attention.shapes import MixerShape, attention_shapes
from hpcdecode.attention.sizes import ENDLESS_BLOCK, block_tokens_for, bytes_per_token, state_tokens_for


class KvUnit(msgspec.Struct, frozen=True):
    """How sequences count against a capacity in tokens, as jobs count them.

    Attributes:
        token_bytes: Bytes of a token; 0 if they are not known.
        block_tokens: Tokens of a block. In a model whose layers all keep states a block stands for a state, whatever
            the number of tokens; others are counted by the token.
        state_tokens: Tokens that a sequence's state counts as.
    """

    token_bytes: float = 0.0
    block_tokens: int = 1
    state_tokens: int = 0

    @classmethod
    def of(cls, layers: Sequence[MixerShape], kv_dtype: str, share: float = 1.0) -> KvUnit:
        """Return the unit of an R-rank.

        Args:
            layers: Of the model, or of a member of a group.
            kv_dtype: Data type of the KV cache.
            share: Share of these layers that a stage has.
        """
        block = block_tokens_for(layers, kv_dtype)
        each = share * bytes_per_token(layers, kv_dtype, block)
        return cls(each, 1 if attention_shapes(layers) else block, state_tokens_for(layers, kv_dtype, block))

    @property
    def endless(self) -> bool:
        """Return whether sequences of any length take the same: a state and nothing else."""
        return self.block_tokens == ENDLESS_BLOCK

    @property
    def fixed_tokens(self) -> int:
        """Return the tokens that a sequence takes however long it is."""
        return self.block_tokens if self.endless else self.state_tokens

    def capacity(self, nbytes: float) -> int:
        """Return the tokens that `nbytes` hold, 0 if that is negative."""
        return max(int(nbytes / self.token_bytes / self.block_tokens) * self.block_tokens, 0)

    def held(self, tokens: float) -> float:
        """Return what a sequence of `tokens` tokens counts as."""
        return self.fixed_tokens + (0.0 if self.endless else tokens)


TOKENS = KvUnit()  # of models without states
