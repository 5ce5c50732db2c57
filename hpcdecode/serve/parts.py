"""What is decided of a message while it is generated: its content, and its reasoning if it is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.detokenizer import TokenKinds
from hpcdecode.serve.text_stream import TextStream


class PartStream:
    """The message of one choice, as its tokens come. Without a parser all text is content.

    Args:
        kinds: Of the model's tokens.
        prompt: Of the row.
    """

    def __init__(self, kinds: TokenKinds, prompt: Prompt) -> None:
        self._stream = TextStream(kinds, prompt.params)

    @classmethod
    def of(cls, kinds: TokenKinds, prompt: Prompt) -> PartStream:
        """Return what suits the tokenizer's output parser."""
        return (cls if kinds.tokenizer.output_parser is None else ParsedStream)(kinds, prompt)

    def feed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Append tokens, and return what the message goes on with; nothing if that is not decided."""
        text = self._stream.feed(token_ids)
        return {"content": text} if text else {}

    def rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return what has not been shown of a finished message."""
        text = self._stream.rest(message["content"])
        return {"content": text} if text else {}


class ParsedStream(PartStream):
    """The message of one choice whose parts are told apart when it is finished."""

    def feed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return nothing: what the tokens are may depend on those that follow."""
        return {}

    def rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the whole message; calls of tools have numbers in a stream."""
        delta = {name: value for name, value in message.items() if value}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        return delta
