"""The token in which the memory of an R-rank is counted: what it takes, and what a sequence takes beside its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcdecode.attention.footprint import WHOLE, Footprint
from hpcdecode.attention.reach import ALL_TOKENS, Reach, reach_of
from hpcdecode.attention.shapes import MixerShape, attention_shapes
from hpcdecode.attention.sizes import ENDLESS_BLOCK, block_tokens_for, bytes_per_token, footprint_for, state_tokens_for


class KvUnit(msgspec.Struct, frozen=True):
    """How sequences count against a capacity in tokens, as jobs count them.

    Attributes:
        token_bytes: Bytes of a token that all layers keep; 0 if they are not known.
        footprint: What a sequence takes. In a model whose layers all keep states a block stands for a state, whatever
            the number of tokens; others are counted by the token.
        reach: What decode steps read of a sequence.
    """

    token_bytes: float = 0.0
    footprint: Footprint = WHOLE
    reach: Reach = ALL_TOKENS

    @classmethod
    def of(cls, layers: Sequence[MixerShape], kv_dtype: str, share: float = 1.0, windowed: bool = False) -> KvUnit:
        """Return the unit of an R-rank.

        Args:
            layers: Of the model, or of a member of a group.
            kv_dtype: Data type of the KV cache.
            share: Share of these layers that a stage has.
            windowed: Whether sequences give up what leaves windows.
        """
        block = block_tokens_for(layers, kv_dtype)
        each = share * bytes_per_token(layers, kv_dtype, block, windowed)
        own = footprint_for(layers, kv_dtype, block, state_tokens_for(layers, kv_dtype, block), windowed)
        made = cls(each, own.by_token if attention_shapes(layers) else own)
        return msgspec.structs.replace(made, reach=reach_of(layers, 2 * made.fixed_tokens))

    @property
    def state_tokens(self) -> int:
        """Return the tokens that a sequence's state counts as."""
        return self.footprint.state_tokens

    @property
    def endless(self) -> bool:
        """Return whether sequences of any length take the same: a state and nothing else."""
        return self.footprint.block_tokens == ENDLESS_BLOCK

    @property
    def fixed_tokens(self) -> int:
        """Return the tokens that a sequence takes however long it is."""
        return ENDLESS_BLOCK if self.endless else self.state_tokens

    def capacity(self, nbytes: float) -> int:
        """Return the tokens that `nbytes` hold, 0 if that is negative."""
        block = self.footprint.block_tokens
        return max(int(nbytes / self.token_bytes / block) * block, 0)

    def held(self, tokens: float) -> float:
        """Return what a sequence of `tokens` tokens counts as."""
        return ENDLESS_BLOCK if self.endless else self.footprint.held(tokens)


TOKENS = KvUnit()  # of models without states
