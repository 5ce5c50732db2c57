"""What a sequence takes of a KV cache.

Layers whose windows let tokens go are in groups, as `_attn_cpu.layer_groups` says; all other layers are in groups that
keep all tokens. Each group has blocks of its own of a sequence. A token that every group keeps counts once for each of
them, in group tokens; where all layers keep all there is one group, and these are the tokens of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Length = TypeVar("Length", int, NDArray[np.int64])
ENDLESS = 1 << 40  # tokens of a sequence that takes no more, however long it is
_STEP = 64  # tokens: kWindowStep of native/kv/block_table.h


class Footprint(msgspec.Struct, frozen=True):
    """How sequences count against the capacity of a KV cache.

    Attributes:
        block_tokens: Tokens of a block.
        state_tokens: Tokens that a sequence's recurrent state counts as.
        whole: Groups that keep all tokens.
        windows: (groups, most blocks that each of them holds of a sequence) of the others.
    """

    block_tokens: int = 1
    state_tokens: int = 0
    whole: int = 1
    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_groups(
        cls, groups: Sequence[tuple[int, bool]], block_tokens: int, state_tokens: int = 0, lookahead: int = 0
    ) -> Footprint:
        """Return the footprint of groups with windows (tokens, or 0 for all; chunked), as `most_blocks` has them."""
        most = [most_blocks(tokens, chunked, block_tokens, lookahead) for tokens, chunked in groups if tokens]
        windows = tuple((most.count(blocks), blocks) for blocks in sorted(set(most)))
        return cls(block_tokens, state_tokens, len(groups) - len(most), windows)

    @property
    def groups(self) -> int:
        """Return the number of groups."""
        return self.whole + sum(count for count, _ in self.windows)

    def tokens(self, length: Length, shared: Length | int = 0) -> Length:
        """Return the most group tokens that a sequence takes until it has `length` tokens, its state included.

        Args:
            length: Tokens of the sequence, or int64 [n] of as many.
            shared: Of its first ones, those in whole blocks that are counted elsewhere, by `of_blocks`.
        """
        return self.of_blocks(self.rounded(length) - shared) + self.groups * self.state_tokens

    def rounded(self, tokens: Length) -> Length:
        """Return the tokens of the blocks that hold so many."""
        blocks: Length = -(-tokens // self.block_tokens)
        return blocks * self.block_tokens

    def of_blocks(self, tokens: Length) -> Length:
        """Return the most group tokens of so many tokens, in whole blocks, that one or several sequences hold."""
        held: Length = self.whole * tokens
        for count, most in self.windows:
            end = most * self.block_tokens
            held += count * (min(tokens, end) if isinstance(tokens, int) else np.minimum(tokens, end))
        return held

    @property
    def by_token(self) -> Footprint:
        """Return the same in blocks of one token."""
        windows = tuple((count, most * self.block_tokens) for count, most in self.windows)
        return Footprint(1, self.state_tokens, self.whole, windows)

    def held(self, length: float) -> float:
        """Return the tokens of all groups that a sequence of `length` tokens counts as, not rounded to blocks."""
        return self.state_tokens + self.kept(length)

    def kept(self, length: float) -> float:
        """Return the same without its state: `length` if there are no windows."""
        windows = sum(count * min(length, most * self.block_tokens) for count, most in self.windows)
        return (self.whole * length + windows) / self.groups if self.windows else length

    def longest(self, capacity: int) -> int:
        """Return how long a sequence may be that a capacity in tokens of all groups holds, or less; ENDLESS for any."""
        windows = sum(count * most * self.block_tokens for count, most in self.windows)
        room = (capacity - self.state_tokens) * self.groups - windows
        if not self.windows or room < 0:
            return capacity
        return max(room // self.whole, capacity) if self.whole else ENDLESS


WHOLE = Footprint()  # of layers that keep all tokens, which are counted one by one


def most_blocks(window: int, chunked: bool, block_tokens: int, lookahead: int = 0) -> int:
    """Return the most blocks that hold what a token sees in a window, from a multiple of `_STEP` tokens on.

    Args:
        window: Tokens.
        chunked: Whether it begins at a multiple of as many.
        block_tokens: Tokens of a block.
        lookahead: Tokens by which the sequence may be truncated; what is seen then is held, too.
    """
    held = window + lookahead
    if chunked and window % _STEP == 0 and window % block_tokens == 0:
        return -(-held // block_tokens)
    span = held if block_tokens % _STEP == 0 else held + _STEP - 1
    return (span + block_tokens - 2) // block_tokens + 1


def largest(footprints: Iterable[Footprint]) -> Footprint:
    """Return the footprint of those whose sequences take most, at any length, of a capacity in tokens.

    If there is no such one, all tokens count in all groups.
    """
    found = list(dict.fromkeys(footprints))
    ends = [most * one.block_tokens for one in found for _, most in one.windows]
    for one in found:
        slopes = [one.whole * other.groups >= other.whole * one.groups for other in found]  # behind all windows
        if all(slopes) and all(one.held(at) >= other.held(at) for at in ends for other in found):
            return one
    return Footprint(found[0].block_tokens, max(one.state_tokens for one in found))
