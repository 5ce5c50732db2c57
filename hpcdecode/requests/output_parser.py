"""Splits generated text into reasoning, content and calls of tools, by the markers of the model's family.

Sources: the chat templates of DeepSeek-R1, Qwen3 (`deepseek_r1`, `qwen3`), Magistral (`mistral`) and Granite 3.2
(`granite`). The names are vLLM's.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypedDict

from hpcdecode.requests import harmony
from hpcdecode.requests.tool_calls import Call, Extract, hermes, llama3_json, mistral

NONE, AUTO = "none", "auto"
_PROMPT_TOKENS = 16  # at the end of a prompt, in which it may open the reasoning


class Markers(NamedTuple):
    """What begins and ends the reasoning.

    Attributes:
        begin: The begin, at the begin of a text.
        end: The end.
        certain: Whether an end alone tells that there was reasoning before it.
        begins: All texts that are a begin, but for white space before it.
        ends: All texts that are an end.
        implied: Whether texts begin with reasoning whatever they begin with, as those of DeepSeek-R1 do.
    """

    begin: re.Pattern[str]
    end: re.Pattern[str]
    certain: bool = True
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    implied: bool = False

    def split(self, text: str, opened: bool | None) -> tuple[str, str]:
        """Return reasoning and content of a text.

        Args:
            text: The text.
            opened: Whether the prompt has begun the reasoning; False if it has ended it, too; None if it says nothing.
        """
        begin, start = self.begin.match(text), 0
        if begin is not None:
            start = begin.end()
        end = self.end.search(text, start)
        if begin is None and not self._goes_on(text, end, opened):
            return "", text
        if end is None:  # the tokens did not suffice
            return text[start:].strip(), ""
        return text[start : end.start()].strip(), text[end.end() :].lstrip()

    def _goes_on(self, text: str, end: re.Match[str] | None, opened: bool | None) -> bool:
        """Return whether a text that does not begin the reasoning goes on with it."""
        if opened is not None or self.implied:
            return opened is not False
        return self.certain and end is not None and not self.begin.search(text, 0, end.start())

    def opens(self, prompt: str) -> bool | None:
        """Return True if a prompt ends with the begin of the reasoning, False if with its end, None if with neither."""
        for value, mark in ((True, self.begin), (False, self.end)):
            found = list(mark.finditer(prompt))
            if found and not prompt[found[-1].end() :].strip():
                return value
        return None


def _tags(begin: str, end: str, implied: bool = False) -> Markers:
    return Markers(re.compile(rf"\s*{re.escape(begin)}"), re.compile(re.escape(end)), True, (begin,), (end,), implied)


TAGS = {  # what begins and ends the reasoning, as models write it
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
MARKERS: dict[str, Markers | None] = {
    **{name: _tags(*TAGS[name], implied=name == "deepseek_r1") for name in ("deepseek_r1", "qwen3", "mistral")},
    "granite": Markers(
        re.compile(r"\s*Here(?:'s| is) my thought process:"),
        re.compile(r"Here(?:'s| is) my response:"),
        certain=False,
        begins=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    "openai_gptoss": None,  # messages in channels
}
EXTRACTS: dict[str, Extract] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "openai": harmony.tool_calls,  # of gpt-oss
}
REASONING_PARSERS = (NONE, AUTO, *MARKERS)
TOOL_CALL_PARSERS = (NONE, AUTO, *EXTRACTS)
_MARKER_TOKENS = frozenset(
    (
        *("<think>", "</think>", "[THINK]", "[/THINK]"),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"),
    )
)
_REASONING_SIGNS = {  # in a chat template, the first of which there is counts
    "<|channel|>analysis": "openai_gptoss",
    "[THINK]": "mistral",
    "<think>": "qwen3",  # which content alone may follow
    "</think>": "qwen3",
    "my thought process": "granite",
}
_CALL_SIGNS = {
    "<|channel|>commentary": "openai",
    "[TOOL_CALLS]": "mistral",
    "<function=": NONE,  # Qwen3-Coder has other calls between the same tags
    "<arg_key>": NONE,  # as has GLM-4.5
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '{"name": function name, "parameters":': "llama3_json",
}


class CalledFunction(TypedDict):
    """A function that is called, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool in the form of the OpenAI API."""

    id: str
    type: str
    function: CalledFunction


class Parsed(NamedTuple):
    """The parts of a generated text; empty ones are not there.

    Attributes:
        reasoning: What the model thought.
        content: What it said.
        tool_calls: Calls in the form of the OpenAI API, with ids and arguments as JSON text.
    """

    reasoning: str
    content: str
    tool_calls: list[ToolCall]


class OutputParser:
    """Parses finished texts. A text's parts depend on nothing but it, its prompt and its place.

    Args:
        reasoning: A key of MARKERS, or NONE.
        tool_calls: A key of EXTRACTS, or NONE.
        special: Texts of the tokenizer's special tokens, which are left out unless they are markers.

    Attributes:
        tags: What begins and ends the reasoning; None if it is not split.
        reasoning: Name of the parser of the reasoning.
        tool_calls: Name of the parser of the calls.
        markers: Of the reasoning; None if it is not split by markers.
        hidden: Texts of special tokens that are left out.
    """

    def __init__(self, reasoning: str, tool_calls: str, special: Iterable[str] = ()) -> None:
        self.reasoning, self.tool_calls, self._extract = reasoning, tool_calls, EXTRACTS.get(tool_calls)
        self.hidden = [token for token in special if token and token not in _MARKER_TOKENS]
        self.markers, self.tags = MARKERS.get(reasoning), TAGS.get(reasoning)

    def __call__(
        self,
        text: str,
        prompt_tokens: list[int],
        place: str,
        decode: Callable[[list[int]], str],
        skip_special_tokens: bool = True,
    ) -> Parsed:
        """Return the parts of a text.

        Args:
            text: The text, with special tokens.
            prompt_tokens: Tokens of its prompt.
            place: What tells this text from others of the job with the same prompt, for the ids of calls.
            decode: Returns the text of tokens, with special tokens.
            skip_special_tokens: Leave out special tokens that are no markers.
        """
        for token in self.hidden if skip_special_tokens else ():
            text = text.replace(token, "")
        reasoning, content = "", text
        if self.markers is not None:
            reasoning, content = self.markers.split(text, self.opened(prompt_tokens, decode))
        elif self.reasoning != NONE:
            reasoning, content = harmony.reasoning(text)
        content, calls = self._extract(content) if self._extract else (content, [])
        if not calls:
            return Parsed(reasoning, content, [])
        source = f"{place} {_prompt_digest(prompt_tokens)}"
        return Parsed(reasoning, content, [_with_id(call, f"{source} {i}") for i, call in enumerate(calls)])

    def opened(self, prompt_tokens: list[int], decode: Callable[[list[int]], str]) -> bool | None:
        """Return True if a prompt ends with the begin of the reasoning, False if with its end, None if with neither."""
        end = decode(prompt_tokens[-_PROMPT_TOKENS:])
        if self.markers is not None:
            return self.markers.opens(end)
        return (self.tags is not None and end.rstrip().endswith(self.tags[0])) or None

    def begins_reasoning(self, prompt_tokens: list[int], decode: Callable[[list[int]], str]) -> bool:
        """Return whether what follows a prompt is reasoning from its first token on, if it begins with no marker."""
        opened = self.opened(prompt_tokens, decode)
        return bool(opened) or (opened is None and self.markers is not None and self.markers.implied)


def chosen_parsers(reasoning: str, tool_calls: str, template: str) -> tuple[str, str]:
    """Return the names of both parsers, in place of AUTO those that a model's chat template speaks of, else NONE.

    Args:
        reasoning: One of REASONING_PARSERS.
        tool_calls: One of TOOL_CALL_PARSERS.
        template: Source of the template; empty for none.
    """
    return (
        _sign(_REASONING_SIGNS, template) if reasoning == AUTO else reasoning,
        _sign(_CALL_SIGNS, template) if tool_calls == AUTO else tool_calls,
    )


def _sign(signs: dict[str, str], template: str) -> str:
    return next((name for sign, name in signs.items() if sign in template), NONE)


def _prompt_digest(token_ids: list[int]) -> str:
    """Return what tells a prompt from others: turns of a conversation have ids of calls of their own."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def _with_id(call: Call, source: str) -> ToolCall:
    digest = hashlib.sha256(f"{source}\0{call.name}\0{call.arguments}".encode()).hexdigest()
    return {
        "id": call.id or f"call_{digest[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
