"""Compiles chat templates in a sandbox and renders them as transformers' `apply_chat_template(tokenize=False)` does.

A template comes with the model and is untrusted, so `renderer` runs this module in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

if tuple(map(int, jinja2.__version__.split(".")[:3])) < (3, 1, 6):
    raise ImportError(f"expected jinja2 3.1.6 or newer, whose sandbox holds, found {jinja2.__version__}")

Message = dict[str, Any]
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the final message while the template is rendered
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # three names of one field; the first is standard


class Unsuited(Exception):
    """The template cannot render a conversation of this kind without losing a part of it."""


class Template:
    """A compiled chat template.

    Args:
        source: The template, in jinja2's language.
        special_tokens: Text by name (`bos_token`, ...), which are variables of the template.

    Attributes:
        variables: Names that the template reads and does not set.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any]):
        environment = _environment()
        tree = environment.parse(source)
        self.variables = sorted(jinja2.meta.find_undeclared_variables(tree))
        self._special_tokens = special_tokens
        self._compiled = environment.from_string(source)
        self._takes_parts = next(_content_loops(tree), None) is not None
        self._takes_text = not self._takes_parts or any(test.name == "string" for test in tree.find_all(nodes.Test))
        self._takes_calls = "tool_calls" in source
        self._no_content = _no_content(tree, self._takes_text)

    def render(
        self,
        messages: list[Message],
        add_prompt: bool,
        continue_final: bool,
        variables: Message,
        tools: list[Message] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Objects with `role`. Their `content` is text, a list of text parts
                (`{"type": "text", "text": ...}`), or absent.
            add_prompt: The text ends where the assistant's answer begins (`add_generation_prompt`).
            continue_final: The text ends where the final message ends (`continue_final_message`).
            variables: Further variables of the template (`chat_template_kwargs`).
            tools: Functions that the model may call; None for none.

        Raises:
            Unsuited: There are tools or tool calls, which the template does not read, or it changes the final message.
            TemplateError: The template calls `raise_exception`.
            Exception: The template fails in another way.
        """
        if not self._takes_calls and any("tool_calls" in message for message in messages):
            raise Unsuited("it reads no tool_calls, which would be lost")
        if tools and "tools" not in self.variables:
            raise Unsuited("it reads no tools, which would be lost")
        chat = [self._message(message) for message in messages]
        final = _tag_final(chat) if continue_final else ""
        own = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_prompt}
        text = self._compiled.render({**own, **self._special_tokens, **variables})
        return _until_tag(text, final) if continue_final else text

    def _message(self, message: Message) -> Message:
        """Return a message in the form that the template reads."""
        content = message.get("content")
        if content is None:
            message = {**message, **self._no_content}
        elif isinstance(content, list) and not self._takes_parts:
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        elif isinstance(content, str) and not self._takes_text:
            message = {**message, "content": [{"type": "text", "text": content}]}
        reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
        return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def warm_up() -> None:
    """Make jinja2 and Python load their lazy modules, since the process may not open files after this."""
    source = "{% for m in messages %}{{ m | tojson + '\\n' }}{% endfor %}{{ strftime_now('%d %B') }}{{ missing.x }}"
    with contextlib.suppress(jinja2.UndefinedError):
        Template(source, {}).render([{"role": "user", "content": "é"}], True, False, {})


def _tag_final(chat: list[Message]) -> str:
    """Append CONTINUE_TAG to the text of the final message of `chat`, and return the text without it."""
    final = chat[-1].get("content")
    if not final:
        raise Unsuited("continue_final_message: expected a final message with text, got none")
    if isinstance(final, str):
        chat[-1] = {**chat[-1], "content": final + CONTINUE_TAG}
        return final
    *others, last = final
    chat[-1] = {**chat[-1], "content": [*others, {**last, "text": last["text"] + CONTINUE_TAG}]}
    text: str = last["text"]
    return text


def _until_tag(text: str, final: str) -> str:
    """Return a rendered text up to CONTINUE_TAG; `final` is the text of the final message."""
    if final.strip() not in text or CONTINUE_TAG.strip() not in text:
        raise Unsuited("continue_final_message: it does not keep the final message whole")
    at = text.rindex(CONTINUE_TAG.strip())
    trimmed = not text.startswith(CONTINUE_TAG, at)  # the template strips messages, so trailing spaces are removed
    return text[:at].rstrip() if trimmed else text[:at]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace)
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag `generation` around the assistant's text. It marks tokens for training and changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The function `dict` without the attributes of a class, which lead out of the sandbox."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """The class `namespace` without attributes whose names begin with an underscore."""

    def __init__(*items: Any, **named: Any):  # without a name for the first, so that `namespace(self=...)` works
        self, *others = items
        for name in (attributes := dict(*others, **named)):
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespaces have no attribute {name!r}")


def _raise(message: Any) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    """Yield the loops over a message's content. A template with such a loop reads a list of parts, any other text."""
    lists = _aliases(tree, "messages")
    messages = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }
    messages |= {alias for name in lists for alias in _aliases_of_items(tree, name)}
    names = {alias for message in messages for alias in _aliases(tree, message)}
    contents = {alias for name in names for alias in _aliases_of_content(tree, name)}
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, n, "content") for n in names) or any(_reads(loop.iter, n) for n in contents):
            yield loop


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return `name` and the names of all variables that are set to it or to a slice of it."""
    found, queue = {name}, deque([name])
    while queue:
        source = queue.popleft()
        for target in _targets(tree, partial(_reads, name=source)):
            if target not in found:
                found.add(target)
                queue.append(target)
    return found


def _aliases_of_items(tree: nodes.Template, name: str) -> set[str]:
    return _targets(tree, lambda value: isinstance(value, nodes.Getitem) and _reads(value.node, name))


def _aliases_of_content(tree: nodes.Template, name: str) -> set[str]:
    direct = _targets(tree, lambda value: _reads(value, name, "content"))
    return {alias for target in direct for alias in _aliases(tree, target)}


def _targets(tree: nodes.Template, fits: Callable[[nodes.Node], bool]) -> set[str]:
    """Return the names of variables that are set to an expression for which `fits` is true."""
    return {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and fits(assign.node)
    }


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether `node` is the variable `name`, or its item `key`, possibly filtered, tested or sliced."""
    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if not isinstance(node, (nodes.Getattr, nodes.Getitem)) or _item(node) != key:
        return False
    return isinstance(node.node, nodes.Name) and node.node.name == name


def _item(node: nodes.Node) -> str | None:
    """Return the name of the item or attribute that `node` reads, or None if it is not constant text."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def _no_content(tree: nodes.Template, takes_text: bool) -> Message:
    """Return the content to give a message that has none, such as one with tool calls alone.

    It is None if the template tests for None, absent if it tests whether there is a content, else empty.
    """
    tests = {test.name for test in tree.find_all(nodes.Test) if _item(test.node) == "content"}
    if tests & {"none", "None"}:
        return {"content": None}
    keys = (compare.expr for compare in tree.find_all(nodes.Compare) if compare.ops[0].op in ("in", "notin"))
    if tests & {"defined", "undefined"} or any(isinstance(k, nodes.Const) and k.value == "content" for k in keys):
        return {}
    return {"content": "" if takes_text else []}
