"""Renders conversations with the model's chat template, in a process of its own that is bounded in time and memory."""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import msgspec

from hpcdecode.data.prompts.messages import ChatOptions
from hpcdecode.data.prompts.renderer import MEMORY_BYTES, SECONDS, Conversation, TemplateSource
from hpcdecode.data.prompts.unknown import warn
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.requests.values import printable
from hpcdecode.system.confined import Answer, Confined

_MAX_FAILURES = 8  # conversations beyond the limits, if none was within them; no more are tried after that
_MAX_WARNINGS = 8
_LIMITS = f"{SECONDS} s of computing and {MEMORY_BYTES >> 30} GiB"
_COMMAND = ("-m", "hpcdecode.data.prompts.renderer")


class ChatTemplate:
    """Renders conversations; may be used by several threads. Its process starts with the first conversation.

    Args:
        source: The template, in jinja2's language.
        special_tokens: Text of the tokenizer's special tokens by name, which are variables of the template.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any]):
        self._setup = _encoded(TemplateSource(source, special_tokens))
        self._lock = threading.Lock()
        self._renderer: Confined | None = None
        self._variables: frozenset[str] = frozenset()
        self._warned: set[str] = set()
        self._problem: str | None = None  # the reason why no conversation can be rendered
        self._rendered = False
        self._exceeded = 0  # conversations beyond the limits

    def render(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        """Return the text of a conversation, as transformers' `apply_chat_template(tokenize=False)` does.

        Raises:
            RowProblem: The template refuses it, fails, or exceeds the limits.
            UserError: The renderer cannot be started.
        """
        request = _encoded(
            Conversation(
                messages,
                options.add_generation_prompt,
                options.continue_final_message,
                options.variables,
                options.tools,
            )
        )
        with self._lock:
            answer = self._ask(request)
            self._warn_unused(options.variables)
            if answer.kind != "text":
                raise RowProblem(self._refusal(answer))
            self._rendered = True
            text: str = answer.value
            return text

    def _ask(self, request: bytes) -> Answer:
        """Return the renderer's answer; a renderer that was ended from outside is replaced once."""
        renderer = self._opened()
        answer = renderer.ask(request)
        if answer.kind == "ended":
            self._renderer = None
            renderer = self._opened()
            answer = renderer.ask(request)
        if answer.kind in ("ended", "time", "memory"):
            renderer.close()
            self._renderer = None
        return answer

    def _opened(self) -> Confined:
        """Return the renderer; start it if there is none."""
        if self._problem is not None:
            raise RowProblem(self._problem)
        if self._renderer is None:
            renderer = Confined(_COMMAND, "chat templates")
            answer = renderer.ask(self._setup)
            if answer.kind != "variables":
                renderer.close()
                self._give_up(answer)
            self._variables = frozenset(answer.value)
            self._renderer = renderer
        return self._renderer

    def _give_up(self, answer: Answer) -> NoReturn:
        """Raise UserError if the renderer cannot run, and RowProblem, now and later, if it refused the template."""
        if answer.kind in ("unusable", "ended"):
            got = printable(answer.value)
            raise UserError(f"chat template: expected a process that renders it ({sys.executable}), got: {got}")
        got = answer.value if answer.kind in ("failed", "refused") else f"one that takes more than {_LIMITS}"
        self._problem = f"messages: expected a model whose chat template jinja2 can compile, got {got}; use prompt"
        raise RowProblem(self._problem)

    def _refusal(self, answer: Answer) -> str:
        """Return the reason why there is no text."""
        if answer.kind == "refused":
            return f"messages: the model's chat template refused them: {answer.value}"
        if answer.kind == "failed":
            return f"messages: expected what the model's chat template can render, it failed with {answer.value}"
        got = "no answer in time" if answer.kind == "time" else "a need for more memory"
        problem = f"messages: expected the model's chat template to render them within {_LIMITS}"
        if answer.kind == "ended":
            return f"{problem}, its process ended: {answer.value}"
        self._exceeded += 1
        if self._exceeded == _MAX_FAILURES and not self._rendered:
            self._problem = f"{problem}, as it did for none of {_MAX_FAILURES} rows; this one was not tried"
        return f"{problem}, got {got}"

    def _warn_unused(self, variables: dict[str, Any]) -> None:
        """Warn once about each variable that the template does not read."""
        for name in sorted(variables.keys() - self._variables - self._warned):
            self._warned.add(name)
            if len(self._warned) <= _MAX_WARNINGS:
                warn(f"chat_template_kwargs: the model's chat template reads no {name[:60]!r}; it is ignored")


def _encoded(request: TemplateSource | Conversation) -> bytes:
    try:
        return msgspec.msgpack.encode(request)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RowProblem(f"messages: expected text, numbers, lists and objects, got {error}") from error
