"""Workloads of the simulator: rows with their lengths and the times at which they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcdecode.errors import UserError

Tokens = NDArray[np.int64]

# Kwon et al. 2023 (vLLM), figure 11: mean tokens of prompts and answers. The spread of the logarithm is assumed.
SHAREGPT = (161.31, 337.99)
_SIGMA = 1.0


@dataclass(frozen=True)
class Lengths:
    """Lengths and arrivals of rows.

    Attributes:
        prompt: Prompt tokens, int64 [rows].
        new: Tokens that each row generates, int64 [rows].
        most: max_tokens of each row, int64 [rows].
        arrival: Seconds, ascending, float64 [rows].
    """

    prompt: Tokens
    new: Tokens
    most: Tokens
    arrival: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.prompt)

    def head(self, count: int) -> Lengths:
        """Return the first rows."""
        return Lengths(self.prompt[:count], self.new[:count], self.most[:count], self.arrival[:count])

    def part(self, index: int, count: int) -> Lengths:
        """Return every `count`-th row, from row `index` on."""
        rows = slice(index, None, count)
        return Lengths(self.prompt[rows], self.new[rows], self.most[rows], self.arrival[rows])


def fixed(rows: int, prompt: int, new: int) -> Lengths:
    """Return rows of one length that run to their max_tokens."""
    return _all_there(np.full(rows, prompt), np.full(rows, new), new)


def of(prompt: Sequence[int], new: Sequence[int]) -> Lengths:
    """Return rows that run to their max_tokens."""
    return _all_there(np.array(prompt), np.array(new), np.array(new))


def lognormal(rows: int, prompt: float, new: float, most: int, seed: int) -> Lengths:
    """Return rows of lognormal lengths.

    Args:
        rows: Number of rows.
        prompt: Mean prompt tokens before they are cut.
        new: Mean generated tokens before they are cut.
        most: Where prompts are cut and answers end; max_tokens of every row.
        seed: Of the random numbers.
    """
    draw = np.random.default_rng(seed)

    def lengths(mean: float) -> Tokens:
        drawn = draw.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, rows)
        tokens: Tokens = np.clip(drawn.round(), 1, most).astype(np.int64)
        return tokens

    return _all_there(lengths(prompt), lengths(new), most)


def poisson(lengths: Lengths, rate: float, seed: int) -> Lengths:
    """Return the same rows, arriving as a Poisson process of `rate` rows a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return Lengths(lengths.prompt, lengths.new, lengths.most, np.cumsum(gaps))


def of_file(path: str, model: str, max_tokens: int) -> Lengths:
    """Return the rows of a prompt file as `hpcdecode generate` would read it; they run to their max_tokens.

    Args:
        path: Of the prompt file.
        model: Model directory, for its tokenizer.
        max_tokens: Of rows that do not say.

    Raises:
        UserError: If the file or the tokenizer cannot be read, or no row can be used.
    """
    prompts = list(_prompts(path, model, max_tokens))
    if not prompts:
        raise UserError(f"{path}: expected at least one row that can be used, got none")
    prompt, new = zip(*prompts, strict=True)
    return of(prompt, new)


def _prompts(path: str, model: str, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield prompt tokens and max_tokens of every row that can be used."""
    from hpcdecode.data.prompts.encoding import tokenized
    from hpcdecode.data.prompts.files import resolve
    from hpcdecode.data.prompts.rows import RowError, read_rows
    from hpcdecode.data.prompts.tokenizer import Tokenizer
    from hpcdecode.requests.params import SamplingParams

    rows = read_rows(resolve((path,)), SamplingParams(max_tokens=max_tokens), adapters=None)
    for prompt in tokenized(rows, Tokenizer.load(model), 1 << 40):
        if not isinstance(prompt, RowError):
            yield len(prompt.token_ids), prompt.params.max_tokens


def _all_there(prompt: Tokens, new: Tokens, most: int | Tokens) -> Lengths:
    """Return rows that have all arrived at the start."""
    return Lengths(prompt, new, np.broadcast_to(most, new.shape), np.zeros(len(new)))
