"""The model's own tokenizer: rows to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcdecode.data.logprobs import Logprobs
from hpcdecode.data.prompts import Row, RowError, row_error
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.model.config import quiet, read_json, text_config
from hpcdecode.sampling.params import SamplingParams
from hpcdecode.sampling.structured import Grammars

# Any one of these groups is enough for transformers to build a tokenizer.
VOCABULARY_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tekken.json",),
)
CHUNK_ROWS = 64  # rows that one tokenizer call takes at most
CHUNK_CHARACTERS = 1 << 20
PROBE_CHARACTERS = 32  # per position; a longer text is first judged by a beginning of this size


class Unfinished(msgspec.Struct, array_like=True):
    """A sequence whose row is not finished: what it has generated so far."""

    line: int
    sample: int
    token_ids: list[int]
    logprobs: Logprobs | None = None  # theirs, where the row asks for them
    prompt_logprobs: Logprobs | None = None


class Prompt(msgspec.Struct):
    """A row that is ready to decode."""

    line: int  # 1-based, through all files
    id: str
    token_ids: list[int]  # at least 1, and at least 1 position less than the model has
    params: SamplingParams
    unfinished: list[Unfinished] = []  # what an earlier run of the job has generated, in any order
    bad_word_ids: list[list[int]] = []  # what params.bad_words forbids as token ids


class Tokenizer:
    """Encodes rows and decodes generated ids; offline, and never with code that lies beside the model.

    eos_token_ids: what ends a sequence, from generation_config.json, else config.json, else the tokenizer.
    vocab_size: token ids are in [0, vocab_size); the model's where config.json says it, else the tokenizer's.
    """

    def __init__(self, backend: Any, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.grammars = Grammars(backend, eos_token_ids, vocab_size)
        self._bad_words: dict[tuple[str, ...], list[list[int]]] = {}

    @classmethod
    def load(cls, model_dir: str | os.PathLike) -> Tokenizer:
        """Raises UserError where tokenizer files are missing, broken, or need code of their own."""
        folder = Path(model_dir)
        _require_files(folder)
        try:
            backend = _backend(folder)
            works = bool(_ids(backend, ["a b"])[0])
        except Exception as e:
            raise UserError(
                f"tokenizer of {folder}: expected files that transformers can load, got: {first_line(e)}"
            ) from e
        if not works:
            raise UserError(f"tokenizer of {folder}: expected a vocabulary, got one that encodes 'a b' as nothing")
        config = text_config(read_json(folder / "config.json"))
        vocab_size = int(config.get("vocab_size") or len(backend))
        return cls(backend, _eos_token_ids(folder, config, backend), vocab_size)

    def encode(self, row: Row) -> list[int]:
        """Token ids of the row, special tokens as the tokenizer (prompt) or the chat template (messages) adds them.

        Raises RowProblem where the row gives no ids, ids outside the vocabulary, or messages that the model's chat
        template does not take.
        """
        if row.prompt_token_ids is not None:
            return self._checked(row.prompt_token_ids)
        if row.messages is not None:
            return self.encode_texts([self.chat_text(row.messages)], add_special_tokens=False)[0]
        return self.encode_texts([row.prompt])[0]

    def encode_last(self, row: Row, count: int) -> list[int]:
        """`encode`, cut to the last `count` tokens; a plain prompt keeps the special tokens around it (as in vLLM)."""
        ids = self.encode(row)
        if len(ids) <= count or row.prompt is None:
            return ids[-count:]
        text = self.encode_texts([row.prompt], add_special_tokens=False)[0]
        begin = next((i for i in range(len(ids) - len(text) + 1) if ids[i : i + len(text)] == text), 0)
        end = begin + len(text)
        return (ids[:begin] + ids[end - max(count - len(ids) + len(text), 0) : end] + ids[end:])[-count:]

    def bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """Token ids of each word, and of the word after a space where only its first token differs (as in vLLM).

        Raises RowProblem where a word has no tokens.
        """
        if words not in self._bad_words:
            self._bad_words = {words: [ids for word in words for ids in self._word_ids(word)]}  # rows repeat the last
        return self._bad_words[words]

    def _word_ids(self, word: str) -> list[list[int]]:
        try:
            plain, spaced = _ids(self._backend, [word.lstrip(), " " + word.lstrip()], add_special_tokens=False)
        except Exception as e:
            raise RowProblem(f"bad_words: the tokenizer refused {word!r}: {first_line(e)}") from e
        if not plain:
            raise RowProblem(f"bad_words: expected words of at least one token, got {word!r}")
        both = len(plain) == len(spaced) and plain[0] != spaced[0]
        return [self._checked(ids) for ids in ([plain, spaced] if both else [plain])]

    def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """One tokenizer call for all texts, each encoded as if alone. Raises RowProblem if any of them is unusable."""
        try:
            encoded = _ids(self._backend, texts, add_special_tokens)
        except Exception as e:
            raise RowProblem(f"the tokenizer refused the text: {first_line(e)}") from e
        return [self._checked(ids) for ids in encoded]

    def chat_text(self, messages: list[dict]) -> str:
        """The messages through the model's chat template, ending where the assistant's answer begins."""
        if not self._backend.chat_template:
            raise RowProblem("messages: expected a model with a chat template, this one has none; use prompt")
        try:
            return self._backend.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as e:
            raise RowProblem(f"messages: the model's chat template refused them: {first_line(e)}") from e

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of generated ids, special tokens left out unless they are asked for, and spaces left as they are."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self._backend.decode(list(ids), **options)

    def check_params(self, params: SamplingParams) -> None:
        """Raise RowProblem where a token id that the row names is not in the vocabulary, or its grammar is no good."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                if token >= self.vocab_size:
                    raise RowProblem(f"{name}: expected token ids in [0, {self.vocab_size}), got {token}")
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RowProblem("expected a prompt of at least one token, got one that encodes to nothing")
        if max(ids) >= self.vocab_size or min(ids) < 0:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RowProblem(f"expected token ids in [0, {self.vocab_size}), got {wrong}")
        return ids


def tokenized(rows: Iterable[Row | RowError], tokenizer: Tokenizer, max_positions: int) -> Iterator[Prompt | RowError]:
    """Encode rows in order, a few ahead of what is taken (1 at first, then up to CHUNK_ROWS).

    A row that cannot be encoded, or leaves no room for a new token in `max_positions`, is yielded as a RowError.
    """
    for chunk in _chunks(rows):
        encoded = _encode_together(chunk, tokenizer, max_positions)
        for row in chunk:
            yield row if isinstance(row, RowError) else _prompt(row, encoded.get(row.line), tokenizer, max_positions)


def _chunks(rows: Iterable[Row | RowError]) -> Iterator[list[Row | RowError]]:
    chunk, size, limit = [], 0, 1
    for row in rows:
        chunk.append(row)
        size += len(row.prompt or "") if isinstance(row, Row) else 0
        if len(chunk) >= limit or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size, limit = [], 0, min(2 * limit, CHUNK_ROWS)
    if chunk:
        yield chunk


def _encode_together(chunk: list[Row | RowError], tokenizer: Tokenizer, max_positions: int) -> dict[int, list[int]]:
    """Token ids by line for the plain prompts of a chunk; none where one of them is bad: each is then tried alone."""
    plain = [row for row in chunk if isinstance(row, Row) and row.prompt is not None]
    plain = [r for r in plain if r.params.truncate_prompt_tokens is None and not _needs_probe(r.prompt, max_positions)]
    if len(plain) < 2:
        return {}
    try:
        encoded = tokenizer.encode_texts([row.prompt for row in plain])
    except RowProblem:
        return {}
    return {row.line: ids for row, ids in zip(plain, encoded, strict=True)}


def _prompt(row: Row, ids: list[int] | None, tokenizer: Tokenizer, max_positions: int) -> Prompt | RowError:
    try:
        tokenizer.check_params(row.params)
        ids = _encode_alone(row, tokenizer, max_positions) if ids is None else ids
        _require_room(len(ids), "", max_positions)
        bad_word_ids = tokenizer.bad_word_ids(row.params.bad_words)
    except RowProblem as e:
        return row_error(row.line, row.id, e)
    return Prompt(line=row.line, id=row.id, token_ids=ids, params=row.params, bad_word_ids=bad_word_ids)


def _encode_alone(row: Row, tokenizer: Tokenizer, max_positions: int) -> list[int]:
    count = row.params.truncate_prompt_tokens
    if count is not None:
        return tokenizer.encode_last(row, _room(row.params.max_tokens, max_positions) if count == -1 else count)
    if row.prompt is not None and _needs_probe(row.prompt, max_positions):
        _probe(row.prompt, tokenizer, max_positions)
    return tokenizer.encode(row)


def _room(max_tokens: int, max_positions: int) -> int:
    if max_tokens >= max_positions:
        raise RowProblem(
            f"truncate_prompt_tokens: expected room for a prompt, got a context of {max_positions} tokens and "
            f"max_tokens {max_tokens}; lower max_tokens"
        )
    return max_positions - max_tokens


def _needs_probe(text: str, max_positions: int) -> bool:
    return len(text) > PROBE_CHARACTERS * max_positions


def _probe(text: str, tokenizer: Tokenizer, max_positions: int) -> None:
    """Refuse a text by its beginning alone, where that is twice too long already: megabytes take minutes to encode."""
    beginning = tokenizer.encode_texts([text[: PROBE_CHARACTERS * max_positions]])[0]
    if len(beginning) >= 2 * max_positions:
        _require_room(len(beginning), "more than ", max_positions)


def _require_room(length: int, qualifier: str, max_positions: int) -> None:
    if length >= max_positions:
        raise RowProblem(
            f"prompt too long: expected at most {max_positions - 1} tokens (the model's context of {max_positions}"
            f" less one new token), got {qualifier}{length}"
        )


def _backend(folder: Path) -> Any:
    """transformers' tokenizer; where its class is stated, without the model's own config: that takes long to import."""
    from transformers import AutoTokenizer, PreTrainedConfig

    stated, options = read_json(folder / "tokenizer_config.json"), {}
    if stated.get("tokenizer_class") and "auto_map" not in stated:
        with quiet():
            options["config"] = PreTrainedConfig.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)


def _ids(backend: Any, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    return backend(texts, add_special_tokens=add_special_tokens, **options)["input_ids"]


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"model {folder}: expected a directory with a Hugging Face model, found none")
    if not any(all((folder / name).is_file() for name in group) for group in VOCABULARY_FILES):
        expected = ", or ".join(" and ".join(group) for group in VOCABULARY_FILES)
        raise UserError(f"tokenizer of {folder}: expected {expected}, found none; copy the tokenizer's files there")


def _eos_token_ids(folder: Path, config: dict[str, Any], backend: Any) -> frozenset[int]:
    generation = read_json(folder / "generation_config.json")
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), backend.eos_token_id):
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
