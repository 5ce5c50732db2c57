"""What holds the numbers of a weight of a checkpoint in fewer bits than activations have.

The names are those of `model/lower/few_bits.py`.
"""

from __future__ import annotations

from typing import NamedTuple

BFLOAT16, FLOAT16 = AS_STORED = "bfloat16", "float16"  # weights of that type, where activations are float32


class Held(NamedTuple):
    """What holds the numbers of a weight in few bits, or None. It depends on which of its dimensions counts inputs.

    Attributes:
        by_row: What does for a weight [out, in], or one of experts, [E, out, in].
        by_column: What does for a weight [in, out] or [E, in, out].
    """

    by_row: str | None
    by_column: str | None

    @property
    def either(self) -> str | None:
        """Return what does in one of the two cases, or None."""
        return self.by_row or self.by_column


NOT_HELD = Held(None, None)
HELD_AS_STORED = {"BF16": Held(BFLOAT16, BFLOAT16), "F16": Held(FLOAT16, FLOAT16)}  # by names of safetensors
