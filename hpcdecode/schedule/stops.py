"""What ends a sequence before max_tokens: end-of-sequence tokens, and its row's stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcdecode.sampling.params import SamplingParams
    from hpcdecode.schedule.sequence import Sequence

Decode = Callable[[list[int], bool], str]  # token ids, and whether to leave special tokens out, to text

_UNFINISHED = "\ufffd"  # what a character decodes to whose bytes are not all there
_WINDOW = 16  # tokens that are decoded together at most


class Stops:
    """eos: the model's end-of-sequence tokens. decode: needed where rows have stop strings."""

    def __init__(self, eos: frozenset[int] = frozenset(), decode: Decode | None = None):
        self.eos, self.decode = eos, decode

    def ends_of(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a sequence."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)

    def at_token(self, sequence: Sequence) -> bool:
        """Whether the newest token ends the sequence; its text is hidden unless include_stop_str_in_output."""
        params, token = sequence.prompt.params, sequence.generated[-1]
        if token in self.ends_of(params):
            sequence.hidden_tokens = 0 if params.include_stop_str_in_output else 1
            return True
        return False

    def at_string(self, sequence: Sequence) -> bool:
        """Whether the newest token's text completes a stop string, at more than min_tokens tokens as in vLLM."""
        params = sequence.prompt.params
        if not params.stop:
            return False
        text = sequence.stop_text
        if text is None:
            text = sequence.stop_text = StopText(params.stop, lambda ids: self.decode(ids, params.skip_special_tokens))
            for token in sequence.generated[:-1]:
                text.feed(token)
        found = text.feed(sequence.generated[-1])
        if found is None or len(sequence.generated) <= params.min_tokens:
            return False
        begin, end = found
        sequence.hidden_characters = end if params.include_stop_str_in_output else begin
        return True


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

    def feed(self, token: int) -> tuple[int, int] | None:
        """The stop string that the token's text completes first, by how many characters of the text so far lie
        behind its begin and behind its end."""
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
        return len(text) - begin, len(text) - end
