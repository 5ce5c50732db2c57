"""Speculative decoding with guesses that are made often: mostly wrong ones, or what a row generates alone.

usage: python -m tests.support.guessing ARGUMENT...     (`hpcdecode`, whose guesses cost nothing)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from hpcdecode.cli import main
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.schedule.draft_price import DraftPrice
from hpcdecode.schedule.model_drafts import ModelDrafts
from hpcdecode.schedule.speculation import Speculation

GUESSES = ("lookup", "wild", "known", "model")
MTP = "mtp"  # by a layer that few checkpoints have
Known = dict[str, list[int]]  # what samples generate, by `name_of`
EAGER = SpeculativeConfig(
    method="suffix",
    num_speculative_tokens=12,
    suffix_decoding_max_tree_depth=3,
    suffix_decoding_min_token_prob=0,
)


class Guessed:
    """Counts the guesses of this process.

    Attributes:
        tokens: All of them.
        right: Those that were confirmed.
    """

    tokens = right = 0


def name_of(line: int, sample: int) -> str:
    """Return the name of a sample."""
    return f"{line} {sample}"


@contextmanager
def guessing(how: str, known: Known) -> Iterator[None]:
    """Let guesses cost nothing.

    `wild` replaces some of their tokens, `known` takes most of them from what is known, `model` and `mtp` leave them
    all to a second model, or a layer for multi-token prediction, which guesses for all sequences.
    """
    draw, draft_of, settle = np.random.default_rng(0), Speculation._draft_of, Speculation.settle

    def most_of(config: SpeculativeConfig, sequence: SequenceState, most: int) -> int:
        left = sequence.request.max_new_tokens - len(sequence.generated) - 1
        return min(config.num_speculative_tokens, left, most) if sequence.beams is None else 0

    def wild(self: Speculation, config: SpeculativeConfig, sequence: SequenceState, *limits: float) -> list[int]:
        found = draft_of(self, config, sequence, *limits)[: draw.integers(1, 12)]
        tokens = [*sequence.given_ids, *sequence.generated]
        found = found or tokens[: min(draw.integers(0, 4), max(most_of(config, sequence, limits[1]), 0))]
        return [token if draw.random() < 0.8 else int(draw.choice(tokens)) for token in found]

    def told(self: Speculation, config: SpeculativeConfig, sequence: SequenceState, *limits: float) -> list[int]:
        found = draft_of(self, config, sequence, *limits)
        whole = known.get(name_of(sequence.prompt.line, sequence.sample), [])
        most = max(most_of(config, sequence, limits[1]), 0)
        right = whole[len(sequence.generated) :][: draw.integers(0, most + 1)]
        return [token if draw.random() < 0.9 else max(token - 1, 0) for token in right] or found

    def left_out(self: Speculation, *arguments: Any) -> list[int]:
        return draft_of(self, *arguments) if self._model is None else []

    def all_of_them(
        self: ModelDrafts, sequences: Sequence[SequenceState], rows: int, left: int
    ) -> list[tuple[SequenceState, int]]:
        depth = min(self._most, left)
        return [(s, depth) for s in sequences[: left // max(depth, 1)]]

    def counted(self: Speculation, sequences: Sequence[SequenceState]) -> None:
        before = self.drafted, self.confirmed
        settle(self, sequences)
        Guessed.tokens += self.drafted - before[0]
        Guessed.right += self.confirmed - before[1]

    with (
        patch.object(
            Speculation, "_draft_of", {"wild": wild, "known": told, "model": left_out, MTP: left_out}.get(how, draft_of)
        ),
        patch.object(ModelDrafts, "choose", all_of_them),
        patch.object(Speculation, "settle", counted),
        patch.object(DraftPrice, "value", 0.0),
    ):
        yield


if __name__ == "__main__":
    with guessing("model" if "draft_model" in str(sys.argv) else "lookup", {}):
        sys.exit(main(sys.argv[1:]))
