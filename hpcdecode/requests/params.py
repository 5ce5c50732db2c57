"""What one row asks of the sampler, under the names vLLM's `SamplingParams` uses."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from math import isfinite
from typing import Any

import msgspec

from hpcdecode.errors import ParamsProblem, RowProblem
from hpcdecode.requests.field_types import typed
from hpcdecode.requests.values import suggestion

MAX_SEED = 2**63 - 1
MAX_SAMPLES = 2**16 - 1
MAX_LOGPROBS = 20
MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 32.0  # a power of any length that a float holds
MAX_ELEMENTS = 10_000  # of a list or an object that every step goes through


class _CheckedWhenMade(msgspec.StructMeta):
    """Makes sampling parameters of values that were checked as those of rows are."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        kinds = sampling_kinds()
        for name in values.keys() - kinds.keys():
            meant = suggestion(name, kinds) or f": expected some of {', '.join(kinds)}"
            raise TypeError(f"sampling parameter {name!r} is not known{meant}")
        try:
            own = {name: typed(name, kinds[name], _keys(value)) for name, value in values.items() if value is not None}
            made = super().__call__(*args, **own)
            return made.check() if own else made
        except RowProblem as problem:
            raise ParamsProblem(str(problem)) from None


class SamplingParams(msgspec.Struct, metaclass=_CheckedWhenMade, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Job-wide values come from flags; a row's own fields win over them.

    Values are checked when it is made: ParamsProblem, a ValueError, names the one that is out of range or of a wrong
    type; an unknown name is a TypeError. None stands for the default.

    Attributes:
        n: samples of the row, each with random numbers of its own.
        max_tokens, min_tokens: tokens to generate at most and at least, the end-of-sequence token included.
        temperature: 0 is greedy.
        top_k: tokens considered; 0 or -1 considers every token.
        top_p: share of the probability considered, in (0, 1].
        min_p: the least probability considered, as a share of the greatest, in [0, 1].
        presence_penalty, frequency_penalty: in [-2, 2], taken off the logit of a generated token once, or each time.
        repetition_penalty: > 0, divides positive and multiplies other logits of tokens in the prompt or generated.
        logit_bias: token id to what is added to its logit, in [-100, 100].
        bad_words: texts that are not generated.
        seed: of the random numbers.
        ignore_eos: whether end-of-sequence tokens end nothing.
        stop_token_ids: tokens that end a sequence.
        stop: strings that end a sequence. Its text ends before the first of them.
        include_stop_str_in_output: whether the text shows the stop string or stop token.
        skip_special_tokens: whether the text leaves special tokens out.
        truncate_prompt_tokens: keeps so many of the prompt's last tokens; -1 keeps what the context has room for.
        structured_outputs: what the text must follow: json (a schema), json_object, regex, choice or grammar.
        logprobs: keeps the log-probability of every generated token, and those of so many of the most likely ones.
            They are the model's own, before anything above changes them.
        prompt_logprobs: the same of the prompt's tokens, kept with sample 0.
        thinking_token_budget: most tokens of the reasoning, which is then ended as the model would end it.
        beam_width: searches for so many likeliest continuations, which become the row's samples, best first. Nothing
            else may change logits or end a sequence but end-of-sequence and stop tokens.
        length_penalty: the score of a beam is its log-probability over its length to this power, in [-32, 32].
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0

    def check(self) -> SamplingParams:
        """Return self, or raise RowProblem naming the field that is out of range."""
        most, kept = self.max_tokens, self.truncate_prompt_tokens
        _require(1 <= self.n <= MAX_SAMPLES, "n", f"an integer in [1, {MAX_SAMPLES}]", self.n)
        _require(most >= 1, "max_tokens", "an integer >= 1", most)
        _require(0 <= self.min_tokens <= most, "min_tokens", f"an integer in [0, {most} (max_tokens)]", self.min_tokens)
        _require(0.0 <= self.temperature < float("inf"), "temperature", "a finite number >= 0", self.temperature)
        _require(self.top_k >= -1, "top_k", "an integer >= 1, or 0 or -1 for all tokens", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "a number in (0, 1]", self.top_p)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "a number in [0, 1]", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, "a number in [-2, 2]", getattr(self, name))
        repetition = self.repetition_penalty
        _require(repetition > 0 and isfinite(repetition), "repetition_penalty", "a finite number > 0", repetition)
        for name in ("logit_bias", "bad_words", "stop", "stop_token_ids"):
            count = len(getattr(self, name))
            _require(count <= MAX_ELEMENTS, name, f"at most {MAX_ELEMENTS} elements", count)
        _require(all(t >= 0 for t in self.logit_bias), "logit_bias", "token ids >= 0", list(self.logit_bias))
        for bias in self.logit_bias.values():
            _require(-100.0 <= bias <= 100.0, "logit_bias", "numbers in [-100, 100]", bias)
        _require(all(self.bad_words), "bad_words", "strings that are not empty", self.bad_words)
        _require(0 <= self.seed <= MAX_SEED, "seed", f"an integer in [0, {MAX_SEED}]", self.seed)
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids >= 0", self.stop_token_ids)
        _require(all(self.stop), "stop", "strings that are not empty", self.stop)
        truncates = kept is None or kept == -1 or kept >= 1
        _require(truncates, "truncate_prompt_tokens", "an integer >= 1, or -1 for what the context has room for", kept)
        budget = self.thinking_token_budget
        _require(budget is None or budget >= 0, "thinking_token_budget", "an integer >= 0", budget)
        if self.structured_outputs is not None:
            _require(budget is None, "thinking_token_budget", "no structured_outputs beside it", budget)
            _check_asked(self.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            held = getattr(self, name)
            expected = f"an integer in [0, {MAX_LOGPROBS}]"
            _require(held is None or 0 <= held <= MAX_LOGPROBS, name, expected, held)
        penalty, width = self.length_penalty, self.beam_width
        expected = f"a number in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        _require(abs(penalty) <= MAX_LENGTH_PENALTY, "length_penalty", expected, penalty)
        expected = f"an integer in [1, {MAX_BEAMS}]"
        _require(width is None or 1 <= width <= MAX_BEAMS, "beam_width", expected, width)
        _require(width is None or not self._beside_beams, "beam_width", f"no {self._beside_beams} beside it", width)
        return self

    @property
    def samples(self) -> int:
        """Return the number of sequences of the row."""
        return self.beam_width or self.n

    @property
    def _beside_beams(self) -> str:
        """Return a field that is set and has no meaning in a beam search, or an empty string."""
        default = SamplingParams()
        same: tuple[str, ...] = (
            "n",
            "min_tokens",
            "temperature",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        same += ("logit_bias", "bad_words", "stop", "structured_outputs", "logprobs", "prompt_logprobs")
        same += ("thinking_token_budget",)
        return next((name for name in same if getattr(self, name) != getattr(default, name)), "")

    @property
    def plain_greedy(self) -> bool:
        """Return whether a token is the argmax of the logits as the model made them."""
        return self.temperature == 0 and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """Return whether logits are changed before a token is chosen from them."""
        changed = self.min_tokens or self.logit_bias or self.bad_words or self.penalizes or self.structured_outputs
        return bool(changed) or self.thinking_token_budget is not None

    @property
    def penalizes(self) -> bool:
        """Return whether it has a penalty."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@functools.cache
def sampling_kinds() -> dict[str, Any]:
    """Return the types of the fields of SamplingParams by their names."""
    return typing.get_type_hints(SamplingParams)


def _keys(value: Any) -> Any:
    """Return a dict with its keys as text, as JSON has them; other values as they are."""
    return {str(key): element for key, element in value.items()} if isinstance(value, dict) else value


def _require(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise RowProblem(f"{name}: expected {expected}, got {got!r}")


def _check_asked(asked: dict[str, Any]) -> None:
    """Raise RowProblem unless `asked` has one known key with a value of its type; grammars are not looked into."""
    if len(asked) != 1 or next(iter(asked)) not in _KINDS:
        got = ", ".join(map(str, asked)) or "none"
        raise RowProblem(f"structured_outputs: expected one of {', '.join(_KINDS)}, got {got[:100]}")
    ((name, value),) = asked.items()
    expected, fits = _KINDS[name]
    if not fits(value):
        raise RowProblem(f"structured_outputs.{name}: expected {expected}, got {type(value).__name__}")


def _is_choice(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(v, str) and v for v in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "json": ("a JSON schema, as an object or as text", lambda value: isinstance(value, dict) or _is_text(value)),
    "json_object": ("true", lambda value: value is True),
    "regex": ("a string that is not empty", _is_text),
    "choice": ("a list of strings that are not empty", _is_choice),
    "grammar": ("a string that is not empty", _is_text),
}
