"""Chat templates: rendered as transformers does, in the forms of the OpenAI API, within bounds of time and memory."""

from __future__ import annotations

import os
import random
import time

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hpcdecode.data.prompts import chat
from hpcdecode.data.prompts.chat import ChatTemplate
from hpcdecode.data.prompts.messages import ChatOptions, checked_messages
from hpcdecode.errors import RowProblem

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
TEMPLATES = {  # after those of families of models
    "plain": PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "stripping": (
        "{{ bos_token }}{%- for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start>' + role + '\n' + message['content'] | trim }}"
        "\n{% endfor %}{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
    ),
    "either": (
        "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for item in message['content'] %}{% if item.type == 'text' %}{{ item.text }}|{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tools": (
        "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% if message.tool_calls %}{% for call in message.tool_calls %}<call>{{ call.function | tojson(indent=2) }}"
        "{% for key, value in call.function.arguments.items() %}{{ key ~ '=' ~ value }}{% endfor %}{% endfor %}"
        "{% elif message.role == 'tool' %}<result of {{ message.tool_call_id }}>{{ message.content }}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "thinking": (
        "{%- for message in messages[::-1] %}{% if loop.index > 3 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content.split('</think>')[-1].lstrip('\n') }}{% endgeneration %}"
        "{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}"
        "{% endfor %}{%- if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}"
        "{{ dict(a=1).a }}{{ strftime_now('%Y') }}{{ level or 'low' }}"
    ),
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": ["é"]}'}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def render(source, messages, **options):
    template = ChatTemplate(source, SPECIAL)
    return template.render(checked_messages(messages), ChatOptions(**options))


def random_chat(draw):
    words = ["Hi ", "\n", "é", "😀", " x", "</think>", "{{ y }}", "<s>", "  "]
    roles = ["system", "user", "assistant", "user"]
    chat = [said(role, "".join(draw.choices(words, k=draw.randint(1, 6)))) for role in roles[draw.randint(0, 1) :]]
    if draw.random() < 0.5:
        chat.append(said("assistant", "yes "))
    return chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_that_of_transformers(name):
    draw, template = random.Random(4), ChatTemplate(TEMPLATES[name], SPECIAL)
    for _ in range(60):
        messages = random_chat(draw)
        if name == "thinking" and draw.random() < 0.3:
            messages[-1]["reasoning"] = "so"
        variables = draw.choice([{}, {"enable_thinking": False}, {"level": [1, {"a": None}], "bos_token": "<b>"}])
        for add, proceed in ((True, False), (False, False), (False, True)):
            options = ChatOptions(add, proceed, variables)
            try:
                ((expected,), _) = render_jinja_template(
                    [messages],
                    chat_template=TEMPLATES[name],
                    add_generation_prompt=add,
                    continue_final_message=proceed,
                    **{**SPECIAL, **variables},
                )
            except ValueError:  # the final message cannot be continued
                with pytest.raises(RowProblem, match="it does not keep the final message whole"):
                    template.render(messages, options)
            else:
                assert template.render(messages, options) == expected


def test_parts_are_joined_for_a_template_that_takes_text_and_passed_to_one_that_takes_parts():
    messages = [said("user", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"])]
    assert render(TEMPLATES["plain"], messages) == "<user>one\ntwo\nthree</s>\n<assistant>"
    assert render(TEMPLATES["either"], messages) == "<user>one|two|three|<assistant>"
    assert render(TEMPLATES["either"], [said("user", "one")]) == "<user>one<assistant>"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.content %}{{ p.text }}{% endfor %}",
        "{% set c = m['content'] %}{% for p in c | list %}{{ p['text'] }}{% endfor %}",
    ],
)
def test_text_reaches_a_template_that_takes_parts_alone(loop):
    """transformers loops over the characters here, and the text is lost."""
    assert render("{% for m in messages %}" + loop + "{% endfor %}", [said("user", "one")]) == "one"


def test_calls_and_results_of_tools():
    messages = [
        said("user", "1+2?"),
        said("assistant", None, tool_calls=[CALL], refusal=None),
        said("tool", [{"type": "text", "text": "3"}], tool_call_id="c1"),
    ]
    text = render(TEMPLATES["tools"], messages)
    assert text.startswith('11+2?2<call>{\n  "name": "add",\n  "arguments": {\n    "a": 1,')
    assert "a=1b=['é']" in text and text.endswith("3<result of c1>3")
    with pytest.raises(RowProblem, match="refused them: it reads no tool_calls, which would be lost"):
        render(TEMPLATES["plain"], messages)


def test_tools_are_given_to_templates_that_read_them():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    source = "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}{% endfor %}{% endif %}" + PLAIN
    text = render(source, [said("user", "1+2?")], tools=tools)
    assert text == render_jinja_template([[said("user", "1+2?")]], chat_template=source, tools=tools, **SPECIAL)[0][0]
    assert text.startswith('<tool>{"type": "function", "function": {"name": "add",')
    assert render(source, [said("user", "1+2?")]) == render(PLAIN, [said("user", "1+2?")])
    with pytest.raises(RowProblem, match="refused them: it reads no tools, which would be lost"):
        render(PLAIN, [said("user", "1+2?")], tools=tools)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ 'none' if m.content is none else m.content + '!' }}", "none"),  # DeepSeek's
        ("{{ m.content + '!' if m.content is defined else 'absent' }}", "absent"),
        ("{{ m.content + '!' if 'content' in m else 'absent' }}", "absent"),
        ("{{ m['content'] + '!' }}", "!"),
        ("{% for p in m.content %}{{ p }}{% endfor %}", ""),
    ],
)
def test_null_content_beside_tool_calls_is_what_the_template_looks_for(body, expected):
    source = "{% for m in messages %}{% if m.tool_calls %}" + body + "{% endif %}{% endfor %}"
    assert render(source, [said("assistant", None, tool_calls=[CALL])]) == expected


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (said("user", None), r"messages\[0\].content: expected a string or a list of parts, got null"),
        (
            said("user", [{"type": "image_url", "image_url": {"url": "x"}}]),
            r'content\[0\]: expected a part of type "text"',
        ),
        (said("user", [{"type": "input_audio"}]), 'the only one supported, got type "input_audio"'),
        (said("user", [{"text": "a"}]), "got no type"),
        (said("user", [{"type": "text", "text": 5}]), r"content\[0\].text: expected a string, got an integer 5"),
        (said("user", [5]), r"content\[0\]: expected an object with type and text, got an integer"),
        (said("assistant", "", tool_calls={}), "tool_calls: expected a list of calls, got an object"),
        (said("assistant", "", tool_calls=[{"id": "x"}]), r"tool_calls\[0\]: expected an object with function.name"),
        (
            said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            'arguments: expected an object, or one as JSON text, got a string "{"',
        ),
        (said("assistant", "", function_call={"name": "f"}), "function_call: not supported yet"),
        (said("assistant", None, refusal="no"), "refusal: not supported yet"),
    ],
)
def test_messages_that_cannot_be_used_are_named(message, reason):
    with pytest.raises(RowProblem, match=reason):
        checked_messages([message])


def test_what_a_template_raises_is_told():
    with pytest.raises(RowProblem, match="the model's chat template refused them: no system role"):
        render("{{ raise_exception('no system role') }}", [said("system", "a")])
    with pytest.raises(RowProblem, match="can render, it failed with TypeError: can only concatenate str"):
        render("{{ 'a' + messages[0].n }}", [said("user", "a", n=5)])
    for source in ("{% for %}", "{{ 'a' | nothing }}"):
        template = ChatTemplate(source, {})
        for _ in range(2):
            with pytest.raises(
                RowProblem, match="expected a model whose chat template jinja2 can compile, got Template"
            ):
                template.render([said("user", "a")], ChatOptions())


def test_variables_that_the_template_does_not_read_are_told_once(caplog):
    template = ChatTemplate(TEMPLATES["thinking"], {})
    for _ in range(3):
        template.render([said("user", "a")], ChatOptions(variables={"enable_thinkin": False, "level": 1}))
    assert caplog.messages == [
        "hpcdecode: warning: chat_template_kwargs: the model's chat template reads no 'enable_thinkin'; it is ignored"
    ]


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "multiplies": "{{ 9 ** (9 ** (9 * messages | length)) }}",
}
GREEDY = {
    "repeats": "{{ messages[0].content * 10 ** 10 }}",
    "doubles": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "lists": "{{ ([0] * 10 ** 10) | length }}{{ messages }}",
    "formats": "{{ '%09999999999d' % 5 }}{{ messages }}",
}
FIRST = "{% if messages[0].role == 'bad' %}"


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_costs_its_row_alone(name, monkeypatch):
    quick = "from hpcdecode.data.prompts import renderer; renderer.SECONDS = 1; renderer.main()"
    monkeypatch.setattr(chat, "_COMMAND", ("-c", quick))
    template, begin = ChatTemplate(FIRST + ENDLESS[name] + "{% endif %}" + PLAIN, SPECIAL), time.monotonic()
    with pytest.raises(RowProblem, match="within 10 s of computing and 1 GiB, got no answer in time"):
        template.render([said("bad", "a")], ChatOptions())
    assert time.monotonic() - begin < 20
    assert template.render([said("user", "a")], ChatOptions()) == "<user>a</s>\n"


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_that_takes_too_much_memory_costs_its_row_alone(name):
    template = ChatTemplate(FIRST + GREEDY[name] + "{% endif %}" + PLAIN, SPECIAL)
    with pytest.raises(RowProblem, match="within 10 s of computing and 1 GiB, got a need for more memory"):
        template.render([said("bad", "ab")], ChatOptions())
    assert template.render([said("user", "a")], ChatOptions()) == "<user>a</s>\n"


def test_a_template_that_never_keeps_its_bounds_is_given_up():
    template, begin = ChatTemplate("{{ messages[0].content * 10 ** 10 }}", {}), time.monotonic()
    for number in range(200):
        with pytest.raises(RowProblem, match="got a need" if number < 8 else "none of 8 rows; this one was not tried"):
            template.render([said("user", "ab")], ChatOptions())
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ dict.__call__.__func__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_no_template_reaches_python_or_files(source):
    with pytest.raises(RowProblem, match=r"it failed with (SecurityError|UndefinedError|TypeError)"):
        render(source + "{{ messages[0].content }}", [said("user", "a")])


def test_the_renderer_has_no_files_processes_or_secrets(monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "HF_TOKEN"):
        monkeypatch.setenv(name, "1")
    template = ChatTemplate(PLAIN, SPECIAL)
    template.render([said("user", "a")], ChatOptions())
    process = psutil.Process(template._renderer.pid)
    for kind in (psutil.RLIMIT_NOFILE, psutil.RLIMIT_NPROC, psutil.RLIMIT_FSIZE):
        assert process.rlimit(kind) == (0, 0)
    assert process.rlimit(psutil.RLIMIT_AS)[0] < (1 << 30) + process.memory_info().vms + (64 << 20)
    assert not {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "HF_TOKEN"} & process.environ().keys()


def test_a_renderer_ends_with_its_owner_and_one_that_was_ended_is_replaced():
    template = ChatTemplate(PLAIN, SPECIAL)
    for _ in range(3):
        assert template.render([said("user", "a")], ChatOptions()) == "<user>a</s>\n"
        first = psutil.Process(template._renderer.pid)
        first.kill()
    assert template.render([said("user", "b")], ChatOptions()) == "<user>b</s>\n"
    last = psutil.Process(template._renderer.pid)
    os.kill(last.pid, 15)  # what a batch system sends to every process of a job
    assert template.render([said("user", "c")], ChatOptions()) == "<user>c</s>\n"
    assert last.is_running() and psutil.Process(template._renderer.pid) == last
    del template
    assert not last.is_running()
