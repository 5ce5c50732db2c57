"""The chunks of prompts that a step prefills, and the rows of a plan that say what it prefills and decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcdecode.requests.prefix import Prefix, remaining
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.step import Chunk

Prompts = Sequence["SequenceState | Prefix"]  # that are prefilled: prefixes before those that begin with them


def next_chunks(prefilling: Prompts, budget: int) -> list[Chunk]:
    """Return the next chunks of prompts, of at most `budget` tokens together."""
    chunks = []
    for sequence in _first(prefilling):
        count = min(remaining(sequence), budget)
        if count == 0:
            break
        chunks.append(Chunk(sequence, sequence.prefilled, count))
        budget -= count
    return chunks


def tokens_first(prefilling: Prompts) -> int:
    """Return the tokens that are left to prefill of prefixes, or else of the sequences."""
    return sum(map(remaining, _first(prefilling)))


def forked_prefixes(chunks: Iterable[Chunk]) -> list[tuple[int, int, int]]:
    """Return (R-rank, slot, new slot) of the chunks that begin behind a prefix."""
    begun = [(c.sequence, c.sequence.prefix) for c in chunks if c.begins and c.sequence.prefix]
    return [(rank, prefix.slot, s.slot) for s, prefix in begun for rank in s.ranks]


def decode_places(sequences: Iterable[SequenceState]) -> list[tuple[int, int]]:
    """Return (R-rank, slot) of each row of sequences that decode: one, and one for each token of the draft."""
    return [(s.rank, s.slot) for s in sequences for _ in range(1 + len(s.draft.tokens))]


def places_of(chunks: Iterable[Chunk], row: int) -> list[tuple[int, int, int, int]]:
    """Return (R-rank, slot, first row, tokens) of chunks whose rows begin at `row`."""
    places = []
    for chunk in chunks:
        places += [(rank, chunk.sequence.slot, row, chunk.count) for rank in chunk.sequence.ranks]
        row += chunk.count
    return places


def _first(prefilling: Prompts) -> Prompts:
    """Return the prefixes that are left to prefill, or else the sequences."""
    return [p for p in prefilling if isinstance(p, Prefix)] or prefilling
