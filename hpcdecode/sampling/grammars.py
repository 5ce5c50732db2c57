"""Structured output: text that a JSON schema, a regular expression, a choice or a grammar allows, by llguidance."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec

from hpcdecode.errors import RowProblem
from hpcdecode.requests.matcher import Matcher, shortened
from hpcdecode.sampling.grammar_process import MEMORY_BYTES, SECONDS
from hpcdecode.system.confined import Confined

_KEPT = 64  # compiled grammars, and as many that cannot be
_COMMAND = ("-m", "hpcdecode.sampling.grammar_process")


class Grammars:
    """What rows ask for by `structured_outputs`, compiled for one tokenizer and kept; may be used by several threads.

    backend: a fast tokenizer of transformers. eos: end-of-sequence tokens. vocab_size: of the model.
    """

    def __init__(self, backend: Any, eos: frozenset[int], vocab_size: int):
        self._backend, self._eos, self._vocab_size = backend, eos, vocab_size
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._tokenizer: Any = None
        self._compiler: Confined | None = None
        self._compiled: dict[bytes, Any] = {}  # states, the last used at the end
        self._refused: dict[bytes, str] = {}

    def check(self, asked: dict[str, Any]) -> None:
        """Raise RowProblem where the grammar cannot be used, or llguidance is not installed."""
        self._state(asked)

    def matcher(self, asked: dict[str, Any]) -> Matcher:
        """At the beginning of the grammar. Raises RowProblem."""
        return Matcher(self._state(asked).deep_copy())

    def _state(self, asked: dict[str, Any]) -> Any:
        key = msgspec.json.encode(asked)
        state = self._known(key)
        if state is None:
            with self._compiling:  # not the lock: steps look up what is compiled meanwhile
                state = self._known(key) or self._added(key, asked)
        return state

    def _known(self, key: bytes) -> Any:
        """Return a state compiled before, or None. Raises RowProblem for what could not be compiled before."""
        with self._lock:
            if key in self._refused:
                raise RowProblem(self._refused[key])
            if key in self._compiled:
                self._compiled[key] = self._compiled.pop(key)
            return self._compiled.get(key)

    def _added(self, key: bytes, asked: dict[str, Any]) -> Any:
        try:
            state, kept = self._compile(asked), self._compiled
        except RowProblem as problem:
            state, kept = problem, self._refused
        with self._lock:
            kept[key] = str(state) if kept is self._refused else state
            if len(kept) > _KEPT:
                del kept[next(iter(kept))]
        if isinstance(state, RowProblem):
            raise state
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
        kind, text = _grammar(asked)
        self._try_apart(kind, text)
        try:
            self._tokenizer = self._tokenizer or llguidance.hf.from_tokenizer(
                self._backend, n_vocab=max(self._vocab_size, len(self._backend)), eos_token=sorted(self._eos)
            )
            state = llguidance.LLMatcher(self._tokenizer, llguidance.grammar_from(kind, text), log_level=0)
        except ValueError as e:
            raise _problem(e) from e
        if state.is_error():
            raise _problem(state.get_error())
        return state

    def _try_apart(self, kind: str, text: str) -> None:
        """Raise RowProblem for a grammar that does not compile within bounds, in a process that it may end."""
        self._compiler = self._compiler or Confined(_COMMAND, "structured outputs")
        answer = self._compiler.ask(msgspec.msgpack.encode([kind, text]))
        if answer.kind == "compiled":
            return
        if answer.kind in ("time", "memory", "ended"):
            self._compiler.close()
            self._compiler = None
        raise _problem(_BEYOND.get(answer.kind, answer.value))


_BEYOND = {
    "time": f"one that takes more than {SECONDS} s to compile",
    "memory": f"one that takes more than {MEMORY_BYTES >> 30} GiB to compile",
    "ended": "one that ends the process that compiles it; it may be nested too deeply",
}


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


def _problem(problem: object) -> RowProblem:
    return RowProblem(f"structured_outputs: expected what llguidance can compile, got: {shortened(problem)}")
