"""The process that renders chat templates: `python -m hpcdecode.data.prompts.renderer`.

The first request is a `TemplateSource`, every other one a `Conversation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.system.confined import Answer, confine, serve

if TYPE_CHECKING:
    from hpcdecode.data.prompts.template import Template

SECONDS = 10  # of CPU time for one conversation
MEMORY_BYTES = 1 << 30


class TemplateSource(msgspec.Struct, array_like=True):
    """The request that sets the template.

    Attributes:
        source: The template, in jinja2's language.
        special_tokens: Text of the tokenizer's special tokens by name, which are variables of the template.
    """

    source: str
    special_tokens: dict[str, Any]


class Conversation(msgspec.Struct, array_like=True):
    """The request to render a conversation; its attributes are the arguments of `Template.render`."""

    messages: list[dict[str, Any]]
    add_prompt: bool
    continue_final: bool
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None


class _Session:
    """Answers the requests for one template.

    The kinds of its answers are `variables` (names that a new template reads), `text` (of a conversation) and `refused`
    (the template's own message).
    """

    def __init__(self) -> None:
        self._template: Template | None = None

    def answer(self, request: list[Any]) -> Answer:
        if self._template is None:
            from hpcdecode.data.prompts.template import Template, warm_up

            warm_up()
            confine(MEMORY_BYTES)
            about = msgspec.convert(request, TemplateSource)
            self._template = Template(about.source, about.special_tokens)
            return Answer("variables", self._template.variables)
        asked = msgspec.convert(request, Conversation)
        try:
            return Answer(
                "text",
                self._template.render(
                    asked.messages, asked.add_prompt, asked.continue_final, asked.variables, asked.tools
                ),
            )
        except Exception as error:
            if type(error).__name__ not in ("TemplateError", "Unsuited"):
                raise
            return Answer("refused", " ".join(str(error).split()))


def main() -> None:
    """Answer requests until there are no more."""
    serve(_Session().answer, SECONDS)


if __name__ == "__main__":
    main()
