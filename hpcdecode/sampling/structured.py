"""Structured output: text that a JSON schema, a regular expression, a choice or a grammar allows, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import numpy as np

from hpcdecode.errors import RowProblem

_KEPT = 64  # compiled grammars
_MAX_PROBLEM_CHARACTERS = 300


class Matcher:
    """How far one sequence has come in its grammar."""

    def __init__(self, state: Any):
        self._state = state
        self._taken = 0

    def allowed(self, generated: Seq[int], vocabulary: int) -> np.ndarray:
        """Whether each token may come after `generated`, bool [vocabulary]; end-of-sequence alone once all is said."""
        if not self._state.is_stopped():
            self._state.consume_tokens(generated[self._taken :])
        self._taken = len(generated)
        bits = np.zeros(-(-vocabulary // 32), np.int32)
        self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return np.unpackbits(bits.view(np.uint8), count=vocabulary, bitorder="little").astype(bool)


class Grammars:
    """What rows ask for by `structured_outputs`, compiled for one tokenizer and kept; may be used by several threads.

    backend: a fast tokenizer of transformers. eos: end-of-sequence tokens. vocab_size: of the model.
    """

    def __init__(self, backend: Any, eos: frozenset[int], vocab_size: int):
        self._backend, self._eos, self._vocab_size = backend, eos, vocab_size
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._compiled: dict[bytes, Any] = {}

    def check(self, asked: dict[str, Any]) -> None:
        """Raise RowProblem where the grammar cannot be used, or llguidance is not installed."""
        self._state(asked)

    def matcher(self, asked: dict[str, Any]) -> Matcher:
        """At the beginning of the grammar. Raises RowProblem."""
        return Matcher(self._state(asked).deep_copy())

    def _state(self, asked: dict[str, Any]) -> Any:
        key = msgspec.json.encode(asked)
        with self._lock:
            state = self._compiled.pop(key, None) or self._compile(asked)
            self._compiled[key] = state
            if len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
        return state

    def _compile(self, asked: dict[str, Any]) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as e:
            raise RowProblem(
                "structured_outputs: needs llguidance, which is not installed: pip install 'hpcdecode[structured]'"
            ) from e
        if not self._eos:
            raise RowProblem("structured_outputs: expected a model with an end-of-sequence token, this one has none")
        try:
            self._tokenizer = self._tokenizer or llguidance.hf.from_tokenizer(
                self._backend, n_vocab=max(self._vocab_size, len(self._backend)), eos_token=sorted(self._eos)
            )
            state = llguidance.LLMatcher(self._tokenizer, llguidance.grammar_from(*_grammar(asked)), log_level=0)
        except ValueError as e:
            raise _refused(e) from e
        if state.is_error():
            raise _refused(state.get_error())
        return state


def _grammar(asked: dict[str, Any]) -> tuple[str, str]:
    """llguidance's name of the kind, and the text."""
    ((name, value),) = asked.items()
    if name == "json_object":
        return "json_schema", '{"type": "object"}'
    if name == "choice":
        return "lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if name == "json":
        return "json_schema", value if isinstance(value, str) else json.dumps(value)
    return name, value


def _refused(problem: object) -> RowProblem:
    text = " ".join(str(problem).split())[:_MAX_PROBLEM_CHARACTERS]
    return RowProblem(f"structured_outputs: expected what llguidance can compile, got: {text}")
