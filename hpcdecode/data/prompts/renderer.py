"""The process that renders chat templates: `python -m hpcdecode.data.prompts.renderer`.

The first request has the template and its special tokens, every other one a conversation.
"""

from __future__ import annotations

from typing import Any

from hpcdecode.system.confined import Answer, confine, serve

SECONDS = 10  # of CPU time for one conversation
MEMORY_BYTES = 1 << 30


class _Session:
    """One template and its conversations.

    Kinds of answers: `variables` (names that a new template reads), `text` (of a conversation), `refused` (by the
    template's own words).
    """

    def __init__(self) -> None:
        self._template: Any = None

    def answer(self, request: list[Any]) -> Answer:
        if self._template is None:
            from hpcdecode.data.prompts.template import Template, warm_up

            warm_up()
            confine(MEMORY_BYTES)
            self._template = Template(*request)
            return Answer("variables", self._template.variables)
        try:
            return Answer("text", self._template.render(*request))
        except Exception as error:
            if type(error).__name__ not in ("TemplateError", "Unsuited"):
                raise
            return Answer("refused", " ".join(str(error).split()))


def main() -> None:
    """Answer requests until there are no more."""
    serve(_Session().answer, SECONDS)


if __name__ == "__main__":
    main()
