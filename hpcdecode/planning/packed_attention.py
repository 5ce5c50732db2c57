"""How evenly the threads of a process share the attention of a step with prompts (FluidInfer 4.2, packing).

The attention of prompts and of decode rows of a layer is one parallel region. Its items are cut, and taken by threads,
as jobs have it (`native/attn_cpu/region.h`): each thread takes the longest item left when it is idle. Here each item
takes what the cost model says of its bytes, or products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from hpcdecode import _attn_cpu
from hpcdecode.attention.base import native_shapes
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.planning.cost import Cost


class PackedAttention(msgspec.Struct, frozen=True):
    """The attention of all layers of a process of both roles.

    Attributes:
        shapes: Of the layers.
        kv_dtype: Data type of the KV cache.
        block_tokens: Tokens of a block.
        threads: Of the process.
        together: Whether prompts and decode rows of a layer are one region, as without rotation of groups.
    """

    shapes: list[LayerShape]
    kv_dtype: str
    block_tokens: int
    threads: int
    together: bool = True

    def stretch(self, cost: Cost, lengths: Sequence[int], chunks: Sequence[tuple[int, int]]) -> float:
        """Return how many times as long the attention of a step takes as with all threads busy to its end.

        Args:
            cost: Of the process.
            lengths: Cached tokens of the sequences that decode, with the new ones.
            chunks: First token and tokens of every chunk of a prompt.
        """
        ends = work = 0.0
        for shape, count in Counter(self.shapes).items():
            spans = self._play(cost, shape, lengths, chunks)
            ends += count * max((end for begin, end in spans), default=0.0)
            work += count * sum(end - begin for begin, end in spans)
        return self.threads * ends / work if work > 0 else 1.0

    def _play(
        self, cost: Cost, shape: LayerShape, lengths: Sequence[int], chunks: Sequence[tuple[int, int]]
    ) -> list[tuple[float, float]]:
        """Return begin and end of every item of a layer."""
        products = sum(s.q_heads * (s.k_dim + s.v_dim) for s in self.shapes)
        (native,) = native_shapes([shape], _attn_cpu.LayerShape)
        items = _attn_cpu.play_region(
            native,
            self.kv_dtype,
            self.block_tokens,
            list(lengths),
            list(chunks),
            self.threads,
            self.threads
            * cost.attend_seconds_per_cached_token
            / bytes_per_token(self.shapes, self.kv_dtype, self.block_tokens),
            self.threads * cost.prefill_seconds_per_pair / products,
            self.threads * cost.append_seconds_per_prompt_token / sum(s.kv_heads for s in self.shapes),
            self.together,
        )
        return [(begin, end) for _, _, begin, end in items]
