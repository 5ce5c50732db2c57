"""Decode steps that are one native call, or are not, whatever is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from hpcdecode.attention.cpu_step import threads_of
from hpcdecode.engine.executors import FusedExecutor
from hpcdecode.model.run.fused_step import FusedStep


class Fused:
    """Counts the fused steps of this process.

    Attributes:
        steps: All of them.
        with_adapters: Those of tokens with adapters among them.
    """

    steps = with_adapters = 0


@contextmanager
def fusing(how: str) -> Iterator[None]:
    """Let steps that only decode be fused always, never, or now and then."""
    draw, run = np.random.default_rng(0), FusedExecutor.run

    def suits(self: FusedStep, lengths: Sequence[int], tokens: int | None = None) -> bool:
        threads = torch.get_num_threads()
        could = threads <= threads_of(self.kv_cache) and self.takes(len(lengths), tokens or len(lengths), threads)
        return could and (how == "always" or (how == "now and then" and draw.random() < 0.5))

    def counted(self, lane, link, inputs):
        Fused.steps += 1
        Fused.with_adapters += inputs.tokens.adapters is not None
        return run(self, lane, link, inputs)

    with patch.object(FusedStep, "suits", suits), patch.object(FusedExecutor, "run", counted):
        yield
