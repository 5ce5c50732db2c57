"""Workloads of the simulator: rows with their lengths and the times at which they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
        shared: Tokens that a row begins with as the row before it, int64 [rows]; None if rows share nothing.
    """

    prompt: Tokens
    new: Tokens
    most: Tokens
    arrival: NDArray[np.float64]
    shared: Tokens | None = None

    def __len__(self) -> int:
        return len(self.prompt)

    def head(self, count: int) -> Lengths:
        """Return the first rows."""
        shared = None if self.shared is None else self.shared[:count]
        return Lengths(self.prompt[:count], self.new[:count], self.most[:count], self.arrival[:count], shared)

    def part(self, index: int, count: int) -> Lengths:
        """Return every `count`-th row, from row `index` on."""
        rows, shared = slice(index, None, count), self.shared
        if shared is not None:  # with the row `count` before, whatever each of those between shares
            shared = np.minimum.reduce([np.roll(shared, i) for i in range(count)])[rows]
        return Lengths(self.prompt[rows], self.new[rows], self.most[rows], self.arrival[rows], shared)

    @property
    def mean_shared(self) -> float:
        """Return the mean of `shared`."""
        return 0.0 if self.shared is None else float(self.shared.mean())


def fixed(rows: int, prompt: int, new: int) -> Lengths:
    """Return rows of one length that run to their max_tokens."""
    return _all_there(np.full(rows, prompt), np.full(rows, new), new)


def of(prompt: Sequence[int], new: Sequence[int], shared: Sequence[int] | None = None) -> Lengths:
    """Return rows that run to their max_tokens; see `Lengths.shared`."""
    begun = None if shared is None else np.array(shared)
    return replace(_all_there(np.array(prompt), np.array(new), np.array(new)), shared=begun)


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
    return replace(lengths, arrival=np.cumsum(gaps))


def behind(prefix: int, lengths: Lengths, shared: bool = True) -> Lengths:
    """Return rows of such lengths behind a prefix of so many tokens, which they share."""
    begun = None
    if shared:
        begun = np.full(len(lengths), prefix) if lengths.shared is None else lengths.shared + prefix
        begun[0] = 0
    return replace(lengths, prompt=lengths.prompt + prefix, shared=begun)


def of_file(path: str, model: str, max_tokens: int, prefix_sharing: bool = True) -> Lengths:
    """Return the rows of a prompt file as `hpcdecode generate` would run them; they run to their max_tokens.

    Args:
        path: Of the prompt file.
        model: Model directory, for its tokenizer.
        max_tokens: Of rows that do not say.
        prefix_sharing: Whether rows are put in order by their beginnings, which they share.

    Raises:
        UserError: If the file or the tokenizer cannot be read, or no row can be used.
    """
    prompts = list(_prompts(path, model, max_tokens, prefix_sharing))
    if not prompts:
        raise UserError(f"{path}: expected at least one row that can be used, got none")
    prompt, new, shared = zip(*prompts, strict=True)
    return of(prompt, new, shared if any(shared) else None)


def _prompts(path: str, model: str, max_tokens: int, ordered: bool) -> Iterator[tuple[int, int, int]]:
    """Yield prompt tokens, max_tokens and what is shared with the row before of every row that can be used."""
    from hpcdecode.data.prompts.encoding import tokenized
    from hpcdecode.data.prompts.files import resolve
    from hpcdecode.data.prompts.order import in_order
    from hpcdecode.data.prompts.rows import RowError, read_rows
    from hpcdecode.data.prompts.tokenizer import Tokenizer
    from hpcdecode.requests.params import SamplingParams
    from hpcdecode.schedule.spread import shared_tokens

    rows = read_rows(resolve((path,)), SamplingParams(max_tokens=max_tokens), adapters=None)
    before = None
    for prompt in tokenized(in_order(rows, None) if ordered else rows, Tokenizer.load(model), 1 << 40):
        if not isinstance(prompt, RowError):
            yield len(prompt.token_ids), prompt.params.max_tokens, shared_tokens(before, prompt) if before else 0
            before = prompt if ordered else None


def _all_there(prompt: Tokens, new: Tokens, most: int | Tokens) -> Lengths:
    """Return rows that have all arrived at the start."""
    return Lengths(prompt, new, np.broadcast_to(most, new.shape), np.zeros(len(new)))
