"""Text of a sequence as its tokens come: what is shown is never taken back, and shows no half of a character."""

from __future__ import annotations

import re
from functools import lru_cache

from hpcdecode.data.prompts.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a character decodes to whose bytes are not all there
_MOST_UNFINISHED = 4  # bytes of a character
_WINDOW = 16  # tokens that are decoded together, if the text of the last ones is complete
_LONGEST_WINDOW = 64  # if it is not
_CONTEXT = 4  # tokens whose text is shown and that are kept, since a token's text may depend on those before it
_CACHED_TOKENS = 1 << 17
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenKinds:
    """Tells the tokens that have no text of their own. It is shared by the sequences of a server.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.is_byte = lru_cache(_CACHED_TOKENS)(self._is_byte)
        self.is_hidden = lru_cache(_CACHED_TOKENS)(self._is_hidden)
        self.text = lru_cache(_CACHED_TOKENS)(self._text)

    def _is_byte(self, token: int) -> bool:
        """Return whether a token is a byte: a run of them decodes to characters only if all of it is valid UTF-8."""
        name = self.tokenizer.backend.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE.fullmatch(name) is not None

    def _is_hidden(self, token: int) -> bool:
        """Return whether a token is left out if special tokens are."""
        return not self.tokenizer.decode([token]) and bool(self.text(token))

    def _text(self, token: int) -> str:
        """Return the text of a token alone."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


class Detokenizer:
    """Decodes the tokens of one sequence, a window of them at a time.

    Args:
        kinds: Of the model's tokens.
        skip_special_tokens: Leave special tokens out.

    Attributes:
        pending: Whether the newest tokens have text that is not complete.
    """

    def __init__(self, kinds: TokenKinds, skip_special_tokens: bool = True) -> None:
        self._kinds, self._skip = kinds, skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # characters of their text
        self.pending = False

    def feed(self, token: int) -> str:
        """Append a token, and return the text that is complete with it."""
        if self._skip and self._kinds.is_hidden(token):
            return ""
        self._ids.append(token)
        if self._kinds.is_byte(token):  # bytes after it may still change what those before it decode to
            self.pending = True
            return ""
        text = self._decode(self._ids)
        end = _complete(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        self.pending = end < len(text)
        if len(self._ids) >= (_LONGEST_WINDOW if self.pending else _WINDOW):
            self._ids = self._ids[-_CONTEXT if not self.pending else -_WINDOW :]
            self._shown = len(self._decode(self._ids)) - (len(text) - self._shown)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._kinds.tokenizer.decode(ids, skip_special_tokens=self._skip)


def _complete(text: str) -> int:
    """Return how many characters of a text no token that follows can change."""
    return max(len(text.rstrip(_UNFINISHED)), len(text) - _MOST_UNFINISHED)
