"""A model's chat template, rendered by a process of its own: bounded in time and memory, and apart from the job."""

from __future__ import annotations

import sys
import threading
from typing import Any

import msgspec

from hpcdecode.data.prompts.messages import ChatOptions
from hpcdecode.data.prompts.renderer import MEMORY_BYTES, SECONDS
from hpcdecode.data.prompts.unknown import warn
from hpcdecode.data.prompts.values import printable
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.system.confined import Answer, Confined

_HOPELESS = 8  # conversations beyond the limits, and none within, after which no more are tried
_MAX_WARNINGS = 8
_LIMITS = f"{SECONDS} s of computing and {MEMORY_BYTES >> 30} GiB"
_COMMAND = ("-m", "hpcdecode.data.prompts.renderer")


class ChatTemplate:
    """Renders conversations; may be used by several threads. The process starts with the first of them.

    Args:
        source: the template, in jinja2's language.
        special_tokens: the tokenizer's, text by name; variables of the template.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any]):
        self._setup = _encoded([source, special_tokens])
        self._lock = threading.Lock()
        self._renderer: Confined | None = None
        self._variables: frozenset[str] = frozenset()
        self._warned: set[str] = set()
        self._problem: str | None = None  # why no conversation can be rendered
        self._rendered = False
        self._exceeded = 0

    def render(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        """Return the text of a conversation, as transformers' `apply_chat_template(tokenize=False)` does.

        Raises:
            RowProblem: the template does not take it, or not within the limits.
            UserError: no renderer can be started.
        """
        asked = options.add_generation_prompt, options.continue_final_message, options.variables
        request = _encoded([messages, *asked])
        with self._lock:
            answer = self._ask(request)
            self._warn_skipped_queries(options.variables)
            if answer.kind != "text":
                raise RowProblem(self._refusal(answer))
            self._rendered = True
            return answer.value

    def _ask(self, request: bytes) -> Answer:
        """Return the renderer's answer; a renderer that something from outside has ended is replaced once."""
        answer = self._opened().ask(request)
        if answer.kind == "ended":
            self._renderer = None
            answer = self._opened().ask(request)
        if answer.kind in ("ended", "time", "memory"):
            self._renderer.close()
            self._renderer = None
        return answer

    def _opened(self) -> Confined:
        """Return the renderer, started if there is none."""
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

    def _give_up(self, answer: Answer) -> None:
        if answer.kind in ("unusable", "ended"):
            got = printable(answer.value)
            raise UserError(f"chat template: expected a process that renders it ({sys.executable}), got: {got}")
        got = answer.value if answer.kind in ("failed", "refused") else f"one that takes more than {_LIMITS}"
        self._problem = f"messages: expected a model whose chat template jinja2 can compile, got {got}; use prompt"
        raise RowProblem(self._problem)

    def _refusal(self, answer: Answer) -> str:
        """Return why there is no text."""
        if answer.kind == "refused":
            return f"messages: the model's chat template refused them: {answer.value}"
        if answer.kind == "failed":
            return f"messages: expected what the model's chat template can render, it failed with {answer.value}"
        got = "no answer in time" if answer.kind == "time" else "a need for more memory"
        problem = f"messages: expected the model's chat template to render them within {_LIMITS}"
        if answer.kind == "ended":
            return f"{problem}, its process ended: {answer.value}"
        self._exceeded += 1
        if self._exceeded == _HOPELESS and not self._rendered:
            self._problem = f"{problem}, as it did for none of {_HOPELESS} rows; this one was not tried"
        return f"{problem}, got {got}"

    def _warn_skipped_queries(self, variables: dict[str, Any]) -> None:
        for name in sorted(variables.keys() - self._variables - self._warned):
            self._warned.add(name)
            if len(self._warned) <= _MAX_WARNINGS:
                warn(f"chat_template_kwargs: the model's chat template reads no {name[:60]!r}; it is ignored")


def _encoded(request: list[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(request)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RowProblem(f"messages: expected text, numbers, lists and objects, got {error}") from error
