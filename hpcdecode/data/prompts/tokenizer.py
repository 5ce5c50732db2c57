"""Encodes rows with the model's own tokenizer, and decodes generated token ids."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

from hpcdecode.data.prompts.chat import ChatTemplate
from hpcdecode.data.prompts.rows import Row
from hpcdecode.data.prompts.thinking import check_budget, thinking_of
from hpcdecode.data.prompts.vocabulary import NoTokenizer, eos_of, load_backend, require_files, template_of
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.model.frontend.config import read_config, stated_config
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.requests.output_parser import NONE, OutputParser, chosen_parsers
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.thinking import Thinking
from hpcdecode.sampling.grammars import Grammars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Backend


class Tokenizer:
    """A model's tokenizer. It works offline and never runs code from the model's directory.

    Attributes:
        backend: The tokenizer of transformers, or NoTokenizer, with which rows are token ids and texts are empty.
        eos_token_ids: End-of-sequence tokens.
        vocab_size: Token ids are in [0, vocab_size). It is the model's if config.json states it, else the tokenizer's.
        grammars: Compiles the grammars that rows ask for.
        output_parser: Splits generated texts into their parts; None leaves them whole.
    """

    def __init__(self, backend: Backend, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        # llguidance refuses a tokenizer that is not a fast one, and then the rows with grammars are errors.
        self.grammars = Grammars(backend, eos_token_ids, vocab_size)
        self.output_parser: OutputParser | None = None
        self._chat: ChatTemplate | None = None  # made for the first row with messages
        self._bad_words: dict[tuple[str, ...], list[list[int]]] = {}  # of the last row

    @classmethod
    def load(cls, model_dir: str | os.PathLike[str], *, skip: bool = False) -> Tokenizer:
        """Load the tokenizer of a model directory.

        Args:
            model_dir: Directory or GGUF file.
            skip: Whether to do without it.

        Raises:
            UserError: Files are missing or broken, or need code of their own.
        """
        folder = model_folder(model_dir)
        if skip:
            config = stated_config(folder)
            vocab_size = int(config.get("vocab_size") or read_config(folder).get_text_config().vocab_size)
            none = cast("Backend", NoTokenizer())
            return cls(none, eos_of(folder, config, none, vocab_size), vocab_size)
        require_files(folder)
        config = stated_config(folder)
        try:
            backend = load_backend(folder)
            works = bool(_ids(backend, ["a b"])[0])
        except Exception as e:
            raise UserError(
                f"tokenizer of {folder}: expected files that transformers can load, got: {first_line(e)}"
            ) from e
        if not works:
            raise UserError(f"tokenizer of {folder}: expected a vocabulary, got one that encodes 'a b' as nothing")
        vocab_size = int(config.get("vocab_size") or len(backend))
        return cls(backend, eos_of(folder, config, backend, vocab_size), vocab_size)

    def encode(self, row: Row) -> list[int]:
        """Return all token ids of a row.

        The tokenizer adds special tokens to a prompt, the chat template to messages.

        Raises:
            RowProblem: There are no ids, ids outside the vocabulary, or messages that the chat template refuses.
        """
        if row.prompt_token_ids is not None:
            return self.checked(row.prompt_token_ids)
        return self.encode_texts([self.text(row)], add_special_tokens=row.messages is None)[0]

    def encode_last(self, row: Row, count: int) -> list[int]:
        """Return the last `count` token ids of a row. As in vLLM, a plain prompt keeps the special tokens around it."""
        ids = self.encode(row)
        if len(ids) <= count or row.prompt is None:
            return ids[-count:]
        text = self.encode_texts([row.prompt], add_special_tokens=False)[0]
        begin = next((i for i in range(len(ids) - len(text) + 1) if ids[i : i + len(text)] == text), 0)
        end = begin + len(text)
        return (ids[:begin] + ids[end - max(count - len(ids) + len(text), 0) : end] + ids[end:])[-count:]

    def bad_word_ids(self, words: tuple[str, ...]) -> list[list[int]]:
        """Return the token ids of each word, at the start of a text and after a space.

        As in vLLM, the second are left out unless they are as many as the first and differ in the first token.

        Raises:
            RowProblem: A word has no tokens.
        """
        if words not in self._bad_words:
            self._bad_words = {words: [ids for word in words for ids in self._word_ids(word)]}
        return self._bad_words[words]

    def _word_ids(self, word: str) -> list[list[int]]:
        try:
            plain, spaced = _ids(self.backend, [word.lstrip(), " " + word.lstrip()], add_special_tokens=False)
        except Exception as e:
            raise RowProblem(f"bad_words: the tokenizer refused {word!r}: {first_line(e)}") from e
        if not plain:
            raise RowProblem(f"bad_words: expected words of at least one token, got {word!r}")
        both = len(plain) == len(spaced) and plain[0] != spaced[0]
        return [self.checked(ids) for ids in ([plain, spaced] if both else [plain])]

    def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text by one call of the tokenizer.

        Raises:
            RowProblem: One of the texts cannot be encoded, or encodes to nothing.
        """
        return [self.checked(ids) for ids in self.encode_any(texts, add_special_tokens)]

    def encode_any(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text by one call of the tokenizer, which may be none.

        Raises:
            RowProblem: One of the texts cannot be encoded.
        """
        try:
            encoded = _ids(self.backend, texts, add_special_tokens)
        except Exception as e:
            raise RowProblem(f"the tokenizer refused the text: {first_line(e)}") from e
        return [ids and self.checked(ids) for ids in encoded]

    def text(self, row: Row) -> str:
        """Return the prompt of a row as text, its messages rendered with the model's chat template.

        Raises:
            RowProblem: The template refuses the messages, or there is none.
            UserError: The process that renders templates cannot be started.
        """
        if row.messages is None:
            assert row.prompt is not None, "a row without text has token ids"
            return row.prompt
        if self._chat is None:
            self._chat = ChatTemplate(template_of(self.backend), self.backend.special_tokens_map)
        row.rendered = self._chat.render(row.messages, row.chat)
        return row.rendered

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of generated ids, with special tokens if they are not skipped. Spaces are not changed."""
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        text = self.backend.decode(list(ids), **options)
        assert isinstance(text, str), "the tokenizer returns one text for one list of ids"
        return text

    def parse_output(self, reasoning: str, tool_calls: str) -> tuple[str, str]:
        """Set `output_parser` as options say, and return the names of the two parsers that are used."""
        try:
            template = template_of(self.backend)
        except RowProblem:
            template = ""
        chosen = chosen_parsers(reasoning, tool_calls, template)
        self.output_parser = None if chosen == (NONE, NONE) else OutputParser(*chosen, self.backend.all_special_tokens)
        return chosen

    def check_params(self, params: SamplingParams) -> None:
        """Raise RowProblem if the parameters name what is not in the vocabulary, or an unusable grammar."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(params, name):
                if token >= self.vocab_size:
                    raise RowProblem(f"{name}: expected token ids in [0, {self.vocab_size}), got {token}")
        if (width := params.beam_width or 1) > self.vocab_size:
            raise RowProblem(f"beam_width: expected at most {self.vocab_size}, the vocabulary's tokens, got {width}")
        if params.stop and isinstance(self.backend, NoTokenizer):
            raise RowProblem("stop: expected no texts, by --skip-tokenizer-init; use stop_token_ids")
        check_budget(params, self.output_parser)
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)

    def thinking(self, params: SamplingParams, prompt: list[int]) -> Thinking | None:
        """Return how the reasoning after a prompt begins and ends; None if the row does not bound its length."""
        decode = partial(self.decode, skip_special_tokens=False)
        encode = partial(self.encode_texts, add_special_tokens=False)
        return thinking_of(params, prompt, self.output_parser, encode, decode)

    def checked(self, ids: list[int]) -> list[int]:
        """Return token ids. Raises RowProblem if there are none, or some are outside the vocabulary."""
        if not ids:
            raise RowProblem("expected a prompt of at least one token, got one that encodes to nothing")
        if max(ids) >= self.vocab_size or min(ids) < 0:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RowProblem(f"expected token ids in [0, {self.vocab_size}), got {wrong}")
        return ids


def _ids(backend: Backend, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
    options = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False}
    ids: list[list[int]] = backend(texts, add_special_tokens=add_special_tokens, **options)["input_ids"]
    return ids
