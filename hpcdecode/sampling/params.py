"""What one row asks of the sampler, under the names vLLM's `SamplingParams` uses."""

from __future__ import annotations

import msgspec

from hpcdecode.errors import RowProblem

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Job-wide values come from flags; a row's own fields win over them.

    temperature: 0 is greedy. top_k: 0 or -1 considers every token. top_p: in (0, 1]. max_tokens: tokens to
    generate at most, the end-of-sequence token included.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def check(self) -> SamplingParams:
        """Return self, or raise RowProblem naming the field that is out of range."""
        _require(self.max_tokens >= 1, "max_tokens", "an integer >= 1", self.max_tokens)
        _require(0.0 <= self.temperature < float("inf"), "temperature", "a finite number >= 0", self.temperature)
        _require(self.top_k >= -1, "top_k", "an integer >= 1, or 0 or -1 for all tokens", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "a number in (0, 1]", self.top_p)
        _require(0 <= self.seed <= MAX_SEED, "seed", f"an integer in [0, {MAX_SEED}]", self.seed)
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids >= 0", self.stop_token_ids)
        return self


def _require(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise RowProblem(f"{name}: expected {expected}, got {got!r}")
