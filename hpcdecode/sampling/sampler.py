"""The next token of every sequence, from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.requests.sequence import SequenceState
from hpcdecode.sampling.adjust import adjust
from hpcdecode.sampling.draw import draw
from hpcdecode.sampling.grammars import Grammars
from hpcdecode.sampling.philox import uniform
from hpcdecode.sampling.rows import rows_of

_BLOCK = 256  # tokens whose largest logits are compared first
_PART = 1 << 21  # logits that are adjusted at once, so that they stay in the cache


def sample(
    logits: Tensor,
    sequences: Sequence[SequenceState],
    eos: frozenset[int] = frozenset(),
    grammars: Grammars | None = None,
) -> list[int]:
    """Return the next token of each sequence.

    Sampling parameters apply in the order of vLLM's V1 sampler: bad_words, min_tokens, logit_bias, repetition,
    frequency and presence penalty. Then a greedy request takes its largest logit. Others go on with temperature, min_p,
    top_k (which keeps all that equal the k-th) and top_p. A draw depends on (seed, line, sample, position) alone: the
    same logits give the same token however the job is split.

    Args:
        logits: [n, vocab], of any float dtype; left as they are.
        sequences: [n].
        eos: End-of-sequence tokens, which min_tokens holds back beside a request's own stop tokens.
        grammars: Needed if a request has structured_outputs.

    Returns:
        Token ids [n].
    """
    if all(s.prompt.params.plain_greedy for s in sequences):
        greedy: list[int] = argmax(logits).tolist()
        return greedy
    plain = [row for row, s in enumerate(sequences) if not s.prompt.params.adjusts]
    chosen = _placed(plain, _choose(logits, plain, [sequences[row] for row in plain]))
    adjusted = [row for row, s in enumerate(sequences) if s.prompt.params.adjusts]
    count = max(_PART // logits.shape[1], 1)
    work = torch.empty(count, logits.shape[1], device=logits.device)  # reused: fresh pages cost more than the sums
    for part in (adjusted[i : i + count] for i in range(0, len(adjusted), count)):
        own, beside = work[: len(part)], [sequences[row] for row in part]
        own.copy_(rows_of(logits, part))
        adjust(own, beside, eos, grammars)
        chosen += _placed(part, _choose(own, range(len(part)), beside))
    tokens = [0] * len(sequences)
    rows = [row for of, _ in chosen for row in of]
    for row, token in zip(rows, torch.cat([ids for _, ids in chosen]).tolist(), strict=True):
        tokens[row] = token
    return tokens


class SampledTokens(NamedTuple):
    """Tokens of some sequences: their places, and the ids, int64 [n]."""

    places: list[int]
    ids: Tensor


def _placed(rows: Sequence[int], chosen: list[SampledTokens]) -> list[SampledTokens]:
    """Return the same tokens by rows of all sequences, given the rows that these are."""
    return [SampledTokens([rows[i] for i in places], ids) for places, ids in chosen]


def foresee(logits: Tensor, sequences: Sequence[SequenceState], ahead: Sequence[int]) -> list[int]:
    """Return a guess at a token to come of each sequence, from another model's logits.

    It is drawn as the token itself will be, by the same random number, but that penalties and other adjustments do not
    apply: the more alike the logits are, the more guesses are right.

    Args:
        logits: [n, vocab], of any float dtype.
        sequences: [n].
        ahead: [n], how many tokens are to come before the guessed one.

    Returns:
        Token ids [n].
    """
    tokens = [0] * len(sequences)
    for places, ids in _choose(logits, range(len(sequences)), list(sequences), ahead):
        for place, token in zip(places, ids.tolist(), strict=True):
            tokens[place] = token
    return tokens


def _choose(
    logits: Tensor, rows: Sequence[int], sequences: list[SequenceState], ahead: Sequence[int] = ()
) -> list[SampledTokens]:
    """Return the tokens of sequences from these rows of logits, which have been adjusted, by places in `rows`.

    Args:
        logits: [m, vocab].
        rows: [n].
        sequences: [n].
        ahead: [n], as `foresee` takes it; nothing for the next token of each.
    """
    chosen = []
    greedy = [i for i, s in enumerate(sequences) if s.prompt.params.temperature == 0]
    if greedy:
        chosen.append(SampledTokens(greedy, argmax(rows_of(logits, [rows[i] for i in greedy]))))
    drawn = [i for i, s in enumerate(sequences) if s.prompt.params.temperature > 0]
    if drawn:
        own = [sequences[i] for i in drawn]
        places = [len(sequences[i].generated) + (ahead[i] if ahead else 0) for i in drawn]
        columns = [
            (s.prompt.params.seed, s.prompt.draw_line, s.sample, place) for s, place in zip(own, places, strict=True)
        ]
        uniforms = torch.from_numpy(uniform(*np.array(columns, dtype=np.int64).T))
        ids = draw(logits, [rows[i] for i in drawn], [s.prompt.params for s in own], uniforms)
        chosen.append(SampledTokens(drawn, ids))
    return chosen


def argmax(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row [n, vocab], int64 [n].

    `torch.argmax` gives the same and is many times slower on a CPU. Here a block of tokens is chosen by its largest
    logit, then a token in it. The last block overlaps the one before.
    """
    vocabulary = logits.shape[1]
    if vocabulary <= _BLOCK:
        return logits.argmax(dim=-1)
    whole = vocabulary // _BLOCK
    largest = logits[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).amax(dim=-1)
    largest = torch.cat([largest, logits[:, -_BLOCK:].amax(dim=-1, keepdim=True)], dim=1)
    begin = (largest.argmax(dim=-1, keepdim=True) * _BLOCK).clamp_(max=vocabulary - _BLOCK)
    block = logits.gather(1, begin + torch.arange(_BLOCK, device=logits.device))
    return (begin + block.argmax(dim=-1, keepdim=True)).squeeze(1)
