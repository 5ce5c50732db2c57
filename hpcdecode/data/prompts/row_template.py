"""Makes prompts of a row's columns: templates and a system prompt that the user gives for all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.config import Job
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.requests.values import printable, shown, type_name

if TYPE_CHECKING:
    import jinja2

SOURCES = ("prompt", "prompt_token_ids", "messages")
ROW = "row"  # variable of a template that holds all columns, whatever their names are


class PromptOptions(msgspec.Struct, frozen=True):
    """How a row's columns become a prompt. None means as the row has it.

    Attributes:
        prompt_template: Template of the prompt's text, in jinja2's language; its variables are the row's columns.
        messages_template: Template of a JSON list of messages.
        system_prompt: Text of a message of the role system before all others. Implies `chat`.
        chat: A text becomes a message of the role user.
    """

    prompt_template: str | None = None
    messages_template: str | None = None
    system_prompt: str | None = None
    chat: bool = False

    @property
    def any(self) -> bool:
        """Whether rows are changed at all."""
        return self != PromptOptions()


def row_template(job: Job) -> RowTemplate | None:
    """Return what makes the prompts of a job, or None if rows have them. Raise UserError as `RowTemplate` does."""
    options = PromptOptions(job.prompt_template, job.messages_template, job.system_prompt, job.chat)
    return RowTemplate(options) if options.any else None


class RowTemplate:
    """Makes prompts of columns. Templates run in jinja2's sandbox.

    Args:
        options: What to make.

    Attributes:
        columns: Names of the columns that the templates read; None if they may read any.

    Raises:
        UserError: A template is not written in jinja2's language.
    """

    def __init__(self, options: PromptOptions):
        self._options = options
        self._chat = options.chat or options.system_prompt is not None
        self.columns: frozenset[str] | None = frozenset()
        self._prompt = self._compiled("--prompt-template", options.prompt_template)
        self._messages = self._compiled("--messages-template", options.messages_template)

    def fields(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a row with the prompt that is made of its columns.

        Raises:
            RowProblem: A column is missing, or what is made is no prompt.
        """
        made = given
        if self._prompt is not None:
            made = _replaced(given, "prompt", self._prompt(given))
        elif self._messages is not None:
            made = _replaced(given, "messages", _message_list(self._messages(given)))
        if self._chat and made.get("prompt") is not None:
            made = _replaced(made, "messages", [{"role": "user", "content": made["prompt"]}])
        return made if self._options.system_prompt is None else self._with_system(made, self._options.system_prompt)

    def _with_system(self, fields: dict[str, Any], text: str) -> dict[str, Any]:
        messages = fields.get("messages")
        if not isinstance(messages, list):
            if fields.get("prompt_token_ids") is not None:
                raise RowProblem("--system-prompt: expected a row with a prompt or messages, got prompt_token_ids")
            return fields
        roles = [message.get("role") for message in messages if isinstance(message, dict)]
        if "system" in roles:
            raise RowProblem("--system-prompt: expected messages without one of the role system, got one")
        return {**fields, "messages": [{"role": "system", "content": text}, *messages]}

    def _compiled(self, flag: str, source: str | None) -> Callable[[dict[str, Any]], str] | None:
        if source is None:
            return None
        import jinja2.meta
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            got = f"{first_line(error)} in line {error.lineno}"
            raise UserError(f"{flag}: expected a template in jinja2's language, got {got}", everywhere=True) from error
        self.columns = None if ROW in names else frozenset(names)
        return lambda given: _rendered(flag, template, given)


def _rendered(flag: str, template: jinja2.Template, given: dict[str, Any]) -> str:
    import jinja2

    try:
        text: str = template.render({ROW: given, **given})
    except jinja2.UndefinedError as error:
        columns = ", ".join(map(repr, list(given)[:20]))
        raise RowProblem(f"{flag}: {printable(error)}; the row has {columns or 'no columns'}") from error
    except Exception as error:
        raise RowProblem(f"{flag}: {printable(first_line(error))}") from error
    return text


def _replaced(fields: dict[str, Any], source: str, value: object) -> dict[str, Any]:
    """Return fields in which `source` alone is what the prompt is made of."""
    return {**{name: v for name, v in fields.items() if name not in SOURCES}, source: value}


def _message_list(text: str) -> list[Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowProblem(f"--messages-template: expected a JSON list of messages, got invalid JSON: {error}") from error
    if not isinstance(value, list):
        raise RowProblem(
            f"--messages-template: expected a JSON list of messages, got {type_name(value)} {shown(value)}"
        )
    return value
