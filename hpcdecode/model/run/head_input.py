"""What the last slice brings to the LM head: logits are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdecode.model.run.bound_slice import BoundStretch
from hpcdecode.model.run.lm_head import Largest, LmHead


class BoundHead(NamedTuple):
    """The last stretch in two: what runs it up to its last GEMM, and that GEMM."""

    before: BoundStretch
    head: LmHead


class LmHeadInput:
    """Where the last slice ends for some tokens: their logits, or the largest of these, are left to compute.

    Of a member of a group they are those of its part of the vocabulary.

    Args:
        last: The stretch that ends with the logits.
        head: The same in two, if the largest logit can be found without all of them.
        values: What the stretch takes.
        logits: Those of no tokens, if there are none.
    """

    def __init__(
        self, last: BoundStretch, head: BoundHead | None, values: Sequence[Tensor], logits: Tensor | None = None
    ):
        self._last, self._head, self._values, self._logits = last, head, values, logits
        self._hidden: Tensor | None = None

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Return the logits [L, vocab]."""
        if self._logits is not None:
            return self._logits
        logits, *hidden = self._last.run(self._values)
        self._note(hidden)
        return logits

    @torch.inference_mode()
    def largest(self) -> Largest | None:
        """Return each token's largest logit, or None if it cannot be found without computing most of them."""
        if self._head is None or self._head.head.pauses():
            return None
        x, *hidden = self._head.before.run(self._values)
        self._note(hidden)
        return self._head.head.largest(x)

    @torch.inference_mode()
    def states(self) -> Tensor:
        """Return the last hidden states [L, hidden] without computing logits, if these can be left out."""
        run = self._last.run if self._head is None else self._head.before.run
        self._note(run(self._values)[1:])
        return self.hidden

    @property
    def hidden(self) -> Tensor:
        """The last hidden states [L, hidden], of a model that was loaded to return them, once its logits are asked."""
        assert self._hidden is not None, "expected logits that have been computed, of a model with hidden states"
        return self._hidden

    def _note(self, hidden: Sequence[Tensor]) -> None:
        if hidden:
            self._hidden = hidden[0].flatten(0, -2)
