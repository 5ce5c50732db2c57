"""What is decided of a message while it is generated: reasoning and content are shown once no later token moves them.

Calls of tools come at the end, whole, and so does all that follows their first sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpcdecode.requests.output_parser import NONE, OutputParser
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.serve.detokenizer import Detokenizer, TokenKinds
from hpcdecode.serve.text_stream import TextStream, Words

_CALL_SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}  # before which all is content
_PYTHON_TAG = "<|python_tag|>"


class PartStream:
    """The message of one choice, as its tokens come. Without a parser all text is content.

    Args:
        kinds: Of the model's tokens.
        prompt: Of the row.
    """

    def __init__(self, kinds: TokenKinds, prompt: Prompt) -> None:
        self._stream = TextStream(kinds, prompt.params)

    def feed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Append tokens, and return what the message goes on with; nothing if that is not decided."""
        text = self._stream.feed(token_ids)
        return {"content": text} if text else {}

    def rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return what has not been shown of a finished message."""
        text = self._stream.rest(message["content"])
        return {"content": text} if text else {}


def part_stream(kinds: TokenKinds, prompt: Prompt) -> PartStream | ParsedStream:
    """Return the message of a choice, with parts if the tokenizer's output parser tells them apart."""
    parser = kinds.tokenizer.output_parser
    return PartStream(kinds, prompt) if parser is None else ParsedStream(kinds, prompt, parser)


class ParsedStream:
    """The message of one choice whose parts a parser tells apart.

    Args:
        kinds: Of the model's tokens.
        prompt: Of the row.
        parser: Of the finished text.
    """

    def __init__(self, kinds: TokenKinds, prompt: Prompt, parser: OutputParser) -> None:
        self._source = _RawText(kinds, prompt.params, parser)
        self._parser = parser
        self._opened = parser.opened(prompt.token_ids, lambda ids: kinds.tokenizer.decode(ids, False))
        self._text = ""  # that is not shown
        self._shown = {"reasoning": 0, "content": 0}  # characters
        self._ends = Words(parser.markers.ends if parser.markers else ())
        self._sign = _CALL_SIGNS.get(parser.tool_calls, "")
        self._signs = Words([self._sign] if self._sign else ())
        self._strips = False  # white space is left out before the content
        self._stage = self._open
        if parser.markers is None:
            self._stage = self._content if parser.reasoning == NONE else self._hold

    def feed(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Append tokens, and return what the message goes on with; nothing if that is not decided."""
        self._text += self._source.feed(token_ids)
        if self._source.spelled:
            self._stage = self._hold
        delta: dict[str, str] = {}
        stage = None
        while stage != self._stage:
            stage = self._stage
            for part, text in stage():
                delta[part] = delta.get(part, "") + text
        return self._delta({part: text for part, text in delta.items() if text})

    def rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return what has not been shown of a finished message; calls of tools have numbers in a stream."""
        delta = self._delta({part: (message.get(part) or "")[shown:] for part, shown in self._shown.items()})
        if message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
        return delta

    def _delta(self, parts: dict[str, str]) -> dict[str, Any]:
        """Return parts of a message that are shown; reasoning has both names that there are for it."""
        for part, text in parts.items():
            self._shown[part] += len(text)
        made: dict[str, Any] = {part: text for part, text in parts.items() if text}
        return {"reasoning_content": made["reasoning"], **made} if "reasoning" in made else made

    def _hold(self) -> Iterable[tuple[str, str]]:
        """Show nothing more before the end."""
        return ()

    def _open(self) -> Iterable[tuple[str, str]]:
        """Find out whether the text begins with reasoning."""
        markers = self._parser.markers
        assert markers is not None, "expected a parser with markers"
        if (found := markers.begin.match(self._text)) is not None:
            self._text, self._stage = self._text[found.end() :], self._reasoning
        elif not any(word.startswith(self._text.lstrip()) for word in markers.begins):
            if self._opened or (self._opened is None and markers.implied):
                self._stage = self._reasoning
            else:  # an end may still say that all before it was reasoning
                self._stage = self._hold if markers.certain and self._opened is None else self._content
        return ()

    def _reasoning(self) -> Iterable[tuple[str, str]]:
        """Show reasoning, without white space around it, up to what may be its end."""
        markers = self._parser.markers
        assert markers is not None, "expected a parser with markers"
        found = markers.end.search(self._text)
        end = self._ends.begun(self._text) if found is None else found.start()
        text = self._text[:end] if self._shown["reasoning"] else self._text[:end].lstrip()
        shown = text.rstrip()
        if found is not None:
            self._text, self._stage, self._strips = self._text[found.end() :], self._content, True
        else:
            self._text = text[len(shown) :] + self._text[end:]
        yield "reasoning", shown

    def _content(self) -> Iterable[tuple[str, str]]:
        """Show content up to what may be the sign of a call."""
        if self._strips:
            self._text = self._text.lstrip()
            self._strips = not self._text
        calls = self._parser.tool_calls
        if calls == NONE:
            yield "content", self._take(len(self._text))
        elif calls == "llama3_json":
            self._stage = self._hold if self._may_be_json() else self._all
        elif self._sign:
            yield "content", self._before_call()
        else:
            self._stage = self._hold

    def _all(self) -> Iterable[tuple[str, str]]:
        """Show all text as content."""
        yield "content", self._take(len(self._text))

    def _may_be_json(self) -> bool:
        """Return whether the text may be calls of `llama3_json`, which are all of it."""
        text = self._text.lstrip()
        return text.startswith((_PYTHON_TAG, "{")) or _PYTHON_TAG.startswith(text)

    def _before_call(self) -> str:
        """Return what is before the sign of a call; white space around it goes away if there is a call."""
        if not self._shown["content"] and self._text[:1].isspace():
            return ""
        at = self._text.find(self._sign)
        end = self._signs.begun(self._text) if at < 0 else at
        if at >= 0:
            self._stage = self._hold
        return self._take(len(self._text[:end].rstrip()))

    def _take(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        return text


class _RawText:
    """The text that a parser reads: with the special tokens that are markers, and without what a stop may hide.

    A stop string is looked for in the text without special tokens, so as much is held back as it may hide at most.

    Args:
        kinds: Of the model's tokens.
        params: Of the row.
        parser: Says which special tokens are left out.

    Attributes:
        spelled: Whether other tokens have spelled a special token, which the parser will leave out, too.
    """

    def __init__(self, kinds: TokenKinds, params: SamplingParams, parser: OutputParser) -> None:
        self._kinds, self._text = kinds, Detokenizer(kinds, skip_special_tokens=False)
        self._hidden = Words(parser.hidden if params.skip_special_tokens else ())
        self._hidden_tokens = frozenset(parser.hidden if params.skip_special_tokens else ())
        self._ends = frozenset(params.stop_token_ids)
        self._ends |= frozenset() if params.ignore_eos else kinds.tokenizer.eos_token_ids
        self._lag = max(map(len, params.stop), default=1) - 1
        self._stops = bool(params.stop)
        self._held = ""
        self._certain = 0  # characters of it that the newest token, if it ends the text, does not add to
        self.spelled = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return the text that no stop can hide any more."""
        shown = []
        for token in token_ids:
            if token in self._ends:
                break
            whole = not self._text.pending
            self._certain = len(self._held) if whole else self._certain
            new, name = self._text.feed(token), self._kinds.text(token)
            self._held += new.removesuffix(name) if name in self._hidden_tokens else new
            self.spelled = self.spelled or self._hidden.inside(self._held)
            shown.append(self._take())
        return "".join(shown)

    def _take(self) -> str:
        end = self._hidden.begun(self._held)
        if self._stops:
            end = min(end, max(self._certain - self._lag, 0))
        text, self._held = self._held[:end], self._held[end:]
        self._certain = max(self._certain - end, 0)
        return text
