"""What ends a sequence before max_tokens: end-of-sequence tokens, and its row's stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcdecode.requests.params import SamplingParams

Decode = Callable[[list[int], bool], str]  # token ids, and whether to leave special tokens out, to text

_UNFINISHED = "\ufffd"  # what a character decodes to whose bytes are not all there
_WINDOW = 16  # tokens that are decoded together at most


class Stops:
    """What ends the sequences of a model.

    Args:
        eos: the model's end-of-sequence tokens.
        decode: needed if rows have stop strings.
    """

    def __init__(self, eos: frozenset[int] = frozenset(), decode: Decode | None = None):
        self.eos, self.decode = eos, decode

    def ends_of(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a sequence."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)

    def text_of(self, params: SamplingParams, generated: list[int]) -> StopText:
        """Return the text, so far, in which the stop strings of `params` are looked for."""
        decode = self.decode
        if decode is None:
            raise ValueError("stop strings: expected Stops with decode, got one without")
        text = StopText(params.stop, lambda ids: decode(ids, params.skip_special_tokens))
        for token in generated:
            text.feed(token)
        return text


class StopMatch(NamedTuple):
    """A stop string in a text: the characters after its start, and after its end."""

    after_start: int
    after_end: int


class StopText:
    """The newest text of a sequence, decoded a token at a time, in which stop strings are looked for.

    Text is looked at when its characters are complete, and once.
    """

    def __init__(self, stop: tuple[str, ...], decode: Callable[[list[int]], str]):
        self._stop, self._decode = stop, decode
        self._ids: list[int] = []
        self._seen = 0  # characters of their text that have been looked at
        self._tail = ""  # the last of them, in which a stop string may have begun
        self._longest = max(map(len, stop))

    def feed(self, token: int) -> StopMatch | None:
        """Append a token; return the stop string that its text completes first, or None."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED) or len(text) <= self._seen:
            return None
        before, text = len(self._tail), self._tail + text[self._seen :]
        begins = ((text.find(s, max(before - len(s) + 1, 0)), s) for s in self._stop)
        found = [(begin + len(s), begin) for begin, s in begins if begin >= 0]
        self._seen += len(text) - before
        self._tail = text[max(len(text) - self._longest + 1, 0) :]
        if len(self._ids) >= _WINDOW:
            self._ids = self._ids[-1:]
            self._seen = len(self._decode(self._ids))
        if not found:
            return None
        end, begin = min(found)
        return StopMatch(len(text) - begin, len(text) - end)
