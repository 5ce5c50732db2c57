"""Structured output by llguidance: grammars that a text must follow, compiled and kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.errors import RowProblem
from hpcdecode.requests.matcher import Matcher, shortened
from hpcdecode.sampling.grammar_process import MEMORY_BYTES, SECONDS, GrammarFormat
from hpcdecode.system.confined import Confined

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MASK_BITS = 32  # of a mask's word
_MANY_THREADS = 4  # from which on llguidance's own are of use: those of the step before may still spin
_KEPT = 64  # compiled grammars, and as many that cannot be compiled
_COMMAND = ("-m", "hpcdecode.sampling.grammar_process")


class Grammars:
    """The grammars of requests' `structured_outputs`, compiled for one tokenizer. Several threads may use it.

    Args:
        backend: The tokenizer; llguidance refuses one that is not fast.
        eos: End-of-sequence tokens.
        vocab_size: Number of the model's tokens.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, eos: frozenset[int], vocab_size: int) -> None:
        self._backend, self._eos, self._vocab_size = backend, eos, vocab_size
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiler: Confined | None = None
        self._compiled: dict[bytes, LLMatcher] = {}  # at the beginning of the grammar; the last used at the end
        self._refused: dict[bytes, str] = {}

    def check(self, asked: dict[str, Any]) -> None:
        """Check that a grammar can be used.

        Args:
            asked: `SamplingParams.structured_outputs`.

        Raises:
            RowProblem: If it does not compile, or llguidance is not installed.
        """
        self._state(asked)

    def matcher(self, asked: dict[str, Any]) -> Matcher:
        """Return a matcher at the beginning of a grammar.

        Args:
            asked: `SamplingParams.structured_outputs`.

        Raises:
            RowProblem: If it does not compile, or llguidance is not installed.
        """
        state = self._state(asked)
        assert self._tokenizer is not None, "what is compiled has a tokenizer"
        return Matcher(state.deep_copy())

    def allowed(self, matchers: Sequence[Matcher], vocabulary: int, threads: int = 1) -> NDArray[np.uint32]:
        """Return which tokens may come next by each of some matchers, and note in them what is wrong.

        Only end-of-sequence tokens may come once a grammar is complete. A tokenizer may have more tokens than the
        model has logits; if none but those may come, that is a problem.

        Args:
            matchers: All different, at least one.
            vocabulary: Tokens of the model.
            threads: Number of threads to compute with.

        Returns:
            Masks, uint32 [n, words]: bit i % 32 of word i // 32 is set if token i may come.
        """
        assert self._tokenizer is not None, "matchers have a tokenizer"
        masks = np.zeros((len(matchers), -(-self._tokenizer.vocab_size // MASK_BITS)), np.uint32)
        if threads >= _MANY_THREADS and len(matchers) > 1:
            places = [(matcher.state, place) for place, matcher in enumerate(matchers)]
            self._executor_of(threads).unsafe_compute_mask_ptr(places, masks.ctypes.data, masks[0].nbytes, len(masks))
        else:
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        beyond = masks.any(axis=1) & ~_within(masks, vocabulary)
        for matcher, none_left in zip(matchers, beyond.tolist(), strict=True):
            matcher.note_error()
            if matcher.problem is None and none_left:
                matcher.problem = f"none of the model's {vocabulary} tokens may come next"
        return masks

    def _executor_of(self, threads: int) -> LLExecutor:
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(num_threads=threads)
        return self._executor

    def _state(self, asked: dict[str, Any]) -> LLMatcher:
        """Return the compiled grammar; compile it at its first use."""
        key = msgspec.json.encode(asked)
        state = self._known(key)
        if state is None:
            with self._compiling:  # not the lock: steps look up what is compiled meanwhile
                state = self._known(key) or self._added(key, asked)
        return state

    def _known(self, key: bytes) -> LLMatcher | None:
        """Return a grammar compiled before, or None. Raise RowProblem for one that did not compile before."""
        with self._lock:
            if key in self._refused:
                raise RowProblem(self._refused[key])
            if key in self._compiled:
                self._compiled[key] = self._compiled.pop(key)
            return self._compiled.get(key)

    def _added(self, key: bytes, asked: dict[str, Any]) -> LLMatcher:
        """Compile a grammar and keep it, or its problem."""
        try:
            state = self._compile(asked)
        except RowProblem as problem:
            with self._lock:
                self._refused[key] = str(problem)
                _bound(self._refused)
            raise
        with self._lock:
            self._compiled[key] = state
            _bound(self._compiled)
        return state

    def _compile(self, asked: dict[str, Any]) -> LLMatcher:
        """Return a compiled grammar. Raise RowProblem if that fails."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as e:
            raise RowProblem(
                "structured_outputs: needs llguidance, which is not installed: pip install 'hpcdecode[structured]'"
            ) from e
        if not self._eos:
            raise RowProblem("structured_outputs: expected a model with an end-of-sequence token, this one has none")
        form, text = _grammar(asked)
        self._try_apart(form, text)
        try:
            if self._tokenizer is None:
                fast = cast("PreTrainedTokenizerFast", self._backend)  # ValueError for another
                vocab_size = max(self._vocab_size, len(fast))
                self._tokenizer = llguidance.hf.from_tokenizer(fast, n_vocab=vocab_size, eos_token=sorted(self._eos))
            state = llguidance.LLMatcher(self._tokenizer, llguidance.grammar_from(form, text), log_level=0)
        except ValueError as e:
            raise _problem(e) from e
        if state.is_error():
            raise _problem(state.get_error())
        return state

    def _try_apart(self, form: GrammarFormat, text: str) -> None:
        """Compile in a process that the grammar may end. Raise RowProblem if it does not compile within bounds."""
        self._compiler = self._compiler or Confined(_COMMAND, "structured outputs")
        answer = self._compiler.ask(msgspec.msgpack.encode([form, text]))
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


def _within(masks: NDArray[np.uint32], vocabulary: int) -> NDArray[np.bool_]:
    """Return whether masks [n, words] allow any of the first `vocabulary` tokens, bool [n]."""
    whole, rest = divmod(vocabulary, MASK_BITS)
    kept = masks[:, : whole + 1].copy()
    kept[:, whole:] &= (1 << rest) - 1
    found: NDArray[np.bool_] = kept.any(axis=1)
    return found


def _bound(kept: dict[bytes, str] | dict[bytes, LLMatcher]) -> None:
    """Drop the oldest of more than _KEPT entries."""
    if len(kept) > _KEPT:
        del kept[next(iter(kept))]


def _grammar(asked: dict[str, Any]) -> tuple[GrammarFormat, str]:
    """Return the format and the text of a grammar, as llguidance takes them."""
    ((name, value),) = asked.items()
    if name == "json_object":
        return "json_schema", '{"type": "object"}'
    if name == "choice":
        return "lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if name == "json":
        return "json_schema", value if isinstance(value, str) else json.dumps(value)
    return ("regex" if name == "regex" else "grammar"), value


def _problem(problem: object) -> RowProblem:
    """Return the error of a grammar that llguidance refuses."""
    return RowProblem(f"structured_outputs: expected what llguidance can compile, got: {shortened(problem)}")
