"""Workloads of the simulator: rows with their lengths and the times at which they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpcdecode.errors import UserError

# Kwon et al. 2023 (vLLM), figure 11: mean tokens of prompts and answers. The spread of the logarithm is assumed.
SHAREGPT = (161.31, 337.99)
_SIGMA = 1.0


@dataclass(frozen=True)
class Lengths:
    """Of rows, int64 and float64 [rows]. new: tokens that a row generates; most: its max_tokens; arrival: seconds."""

    prompt: np.ndarray
    new: np.ndarray
    most: np.ndarray
    arrival: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt)

    def part(self, index: int, count: int) -> Lengths:
        """Every `count`th row."""
        return Lengths(*(getattr(self, name)[index::count] for name in self.__dataclass_fields__))


def fixed(rows: int, prompt: int, new: int) -> Lengths:
    return _all_there(np.full(rows, prompt), np.full(rows, new), new)


def of(prompt: list[int], new: list[int]) -> Lengths:
    """Rows that run to their max_tokens."""
    return _all_there(np.array(prompt), np.array(new), np.array(new))


def lognormal(rows: int, prompt: float, new: float, most: int, seed: int) -> Lengths:
    """prompt, new: means. most: max_tokens of every row, at which answers end, and where prompts are cut."""
    draw = np.random.default_rng(seed)

    def lengths(mean: float) -> np.ndarray:
        drawn = draw.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, rows)
        return np.clip(drawn.round(), 1, most).astype(np.int64)

    return _all_there(lengths(prompt), lengths(new), most)


def poisson(lengths: Lengths, rate: float, seed: int) -> Lengths:
    """The same rows, so many a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return Lengths(lengths.prompt, lengths.new, lengths.most, np.cumsum(gaps))


def of_file(path: str, model: str, max_tokens: int) -> Lengths:
    """Of a prompt file, as `hpcdecode generate` would read it; rows generate their max_tokens.

    Raises UserError where the file or the model's tokenizer cannot be read, or no row can be used.
    """
    prompts = list(_prompts(path, model, max_tokens))
    if not prompts:
        raise UserError(f"{path}: expected at least one row that can be used, got none")
    new = np.array([n for _, n in prompts])
    return _all_there(np.array([p for p, _ in prompts]), new, new)


def _prompts(path: str, model: str, max_tokens: int) -> Iterator[tuple[int, int]]:
    from hpcdecode.data.prompts.files import resolve
    from hpcdecode.data.prompts.rows import RowError, read_rows
    from hpcdecode.data.prompts.tokenizer import Tokenizer, tokenized
    from hpcdecode.requests.params import SamplingParams

    rows = read_rows(resolve((path,)), SamplingParams(max_tokens=max_tokens))
    for prompt in tokenized(rows, Tokenizer.load(model), 1 << 40):
        if not isinstance(prompt, RowError):
            yield len(prompt.token_ids), prompt.params.max_tokens


def _all_there(prompt: np.ndarray, new: np.ndarray, most: int | np.ndarray) -> Lengths:
    return Lengths(prompt, new, np.broadcast_to(most, new.shape), np.zeros(len(new)))
