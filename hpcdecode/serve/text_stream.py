"""What may be shown of a sequence that is being generated: its text, but for what a stop may still hide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpcdecode.requests.params import SamplingParams
from hpcdecode.serve.detokenizer import Detokenizer, TokenKinds


class Words:
    """Words whose begins are looked for at the end of texts.

    Args:
        words: None of them empty.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(words)
        self._first = frozenset(word[0] for word in self._words)
        self._longest = max(map(len, self._words), default=0)
        self._any = re.compile("|".join(map(re.escape, self._words)) or r"(?!)")

    def begun(self, text: str) -> int:
        """Return where the longest end of a text begins that is the begin of a word, or the length of the text."""
        for begin in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[begin] in self._first and any(word.startswith(text[begin:]) for word in self._words):
                return begin
        return len(text)

    def inside(self, text: str) -> bool:
        """Return whether a text has one of the words."""
        return self._any.search(text) is not None


class HeldText:
    """Holds back the end of a text that is, or may become, a stop string.

    A stop string that is complete stays back until a token comes after it: then it has ended nothing, as it is with one
    that comes before min_tokens.

    Args:
        stop: The stop strings.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop, self._begins = stop, Words(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""  # the newest text, of which _shown characters have been shown
        self._shown = 0
        self._passed = 0  # characters of it in which no stop string may end any more

    def feed(self, new: str, whole: bool) -> str:
        """Append the text of a token, which may be empty, and return what can be shown.

        Args:
            new: The text.
            whole: Whether it is all the text that the tokens so far have.
        """
        if not self._stop:
            return new
        self._held += new
        begin = min(self._complete(), max(self._begins.begun(self._held), self._shown))
        shown = self._held[self._shown : begin]
        self._shown = max(self._shown, begin)
        if whole:
            self._passed = len(self._held)
        self._forget()
        return shown

    def _complete(self) -> int:
        """Return where the first stop string begins that is complete, or the length of the text."""
        found = (self._held.find(s, max(self._passed - len(s) + 1, 0)) for s in self._stop)
        return min((begin for begin in found if begin >= 0), default=len(self._held))

    def _forget(self) -> None:
        """Drop what has been shown and is too far back to belong to a stop string."""
        gone = min(self._shown, max(self._passed - self._longest + 1, 0))
        self._held = self._held[gone:]
        self._shown -= gone
        self._passed -= gone


class TextStream:
    """The text of one sample, as its tokens come. What it returns, joined, begins the text of the result.

    Args:
        kinds: Of the model's tokens.
        params: Of the row.
        skip_special_tokens: Leave special tokens out; None for what the row says.
    """

    def __init__(self, kinds: TokenKinds, params: SamplingParams, skip_special_tokens: bool | None = None) -> None:
        skip = params.skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        self._ends = frozenset(params.stop_token_ids)
        self._ends |= frozenset() if params.ignore_eos else kinds.tokenizer.eos_token_ids
        self._text = Detokenizer(kinds, skip)
        self._held = HeldText(params.stop)
        self._length = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return the text that can be shown. The last token's text may be missing at the end."""
        shown = []
        for token in token_ids:
            if token in self._ends:
                break  # the result says whether it is shown
            new = self._text.feed(token)
            shown.append(self._held.feed(new, not self._text.pending))
        text = "".join(shown)
        self._length += len(text)
        return text

    def rest(self, text: str) -> str:
        """Return what has not been shown of the text of the result."""
        return text[self._length :]
