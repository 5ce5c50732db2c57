"""What a decode step reads of a sequence, by which R-ranks are kept level.

A layer with a window, or with an indexer, reads a part of the tokens of a long sequence. A length is weighed as the
tokens that would take as long if all layers read all of them: each layer has its share of a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.attention.shapes import LayerShape, MixerShape, attention_shapes

Length = TypeVar("Length", int, NDArray[np.int64])
Tokens = float | NDArray[np.float64]


class Reach(msgspec.Struct, frozen=True):
    """How many tokens decode steps read of a sequence.

    Attributes:
        whole: Share of a token that is read of all tokens.
        windows: (share, most) that is read of the last `most` tokens, or of as many that are chosen; of all in shorter
            sequences.
        state: Tokens that take as long as a sequence's recurrent state takes.
    """

    whole: float = 1.0
    windows: tuple[tuple[float, int], ...] = ()
    state: float = 0.0

    def over(self, first: Length, last: Length) -> Tokens:
        """Return the tokens that are read in the steps from the one with `first` tokens to that with `last`; 0 if none.

        Args:
            first: Tokens of the sequence in the first step, its own included; or int64 [n] of as many.
            last: Of the last step, as many.
        """
        steps = np.maximum(last - first + 1, 0)
        tokens: Tokens = steps * ((first + last) / 2 * self.whole + self.state)
        for share, most in self.windows:
            tokens = tokens + share * np.where(steps, _summed(last, most) - _summed(first - 1, most), 0)
        return tokens


ALL_TOKENS = Reach()


def reach_of(layers: Sequence[MixerShape], state: float = 0.0) -> Reach:
    """Return the reach of a model's layers.

    Layers count by the elements of K and V that are read, and by products where these are latents, which all query
    heads share.

    Args:
        layers: Of the model, or of a member of a group.
        state: Tokens that take as long as a sequence's recurrent states take.
    """
    whole, windows = 0.0, defaultdict[int, float](float)
    for s in attention_shapes(layers):
        each, chosen = _weight(s), s.indexer
        if chosen:
            whole += _index_weight(s) / s.key_tokens
        if s.compress_rate:
            entry = each / s.compress_rate
            windows[s.window or 1] += each
            if chosen:
                windows[chosen.most_seen * s.compress_rate] += entry
            else:
                whole += entry
        elif chosen:
            windows[min(chosen.most_seen, s.window or chosen.most_seen)] += each
        elif s.window is None:
            whole += each
        else:
            windows[(s.window + 1) // 2 if s.chunked else s.window] += each  # of a chunk half, in the mean
    total = whole + sum(windows.values())
    if not total:
        return Reach(state=state)
    return Reach(whole / total, tuple((own / total, most) for most, own in sorted(windows.items())), state)


def _summed(length: Length, most: int) -> Tokens:
    """Return the sum of min(n, most) for all n up to a length."""
    within = np.clip(length, 0, most)
    summed: Tokens = within * (within + 1) / 2 + (length - within) * float(most)
    return summed


def _weight(s: LayerShape) -> float:
    return float((s.q_heads if s.latent else s.kv_heads) * (s.k_dim + s.v_dim))


def _index_weight(s: LayerShape) -> float:
    """Return what scoring an index key weighs; one that another layer has scored is not scored again."""
    assert s.indexer is not None, "expected a layer with an indexer"
    return float(s.indexer.heads * (s.indexer.dim + 1) if s.latent else bool(s.indexer.heads) * s.indexer.dim)
