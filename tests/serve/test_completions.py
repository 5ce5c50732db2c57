"""Texts over HTTP: those of `LLM.generate` for the same rows, at once and streamed, whatever else is in flight."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcdecode import SamplingParams
from tests.support.served import chunks, joined

HELLO = [{"role": "user", "content": "hello"}]
SAMPLED = {"temperature": 1.2, "seed": 7, "max_tokens": 40, "ignore_eos": True}
BODIES = [
    {"prompt": "def f(x):", "max_tokens": 30},
    {"prompt": "def f(x):", **SAMPLED, "n": 3},
    {"prompt": [5, 9, 400], **SAMPLED, "logprobs": 3},
    {"prompt": "a b", **SAMPLED, "stop": ["e", "ar"], "n": 4, "logprobs": 0},
    {"prompt": "a b", **SAMPLED, "stop": ["th", "o", "  "], "include_stop_str_in_output": True, "n": 4},
    {"prompt": "a b", **SAMPLED, "stop": ["e", " "], "min_tokens": 20, "n": 4},
    {"prompt": "a b", **SAMPLED, "stop_token_ids": list(range(200, 230)), "n": 4, "skip_special_tokens": False},
    {"prompt": "x", **SAMPLED, "presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.9, "top_k": 30},
    {"prompt": "x", "max_tokens": 8, "beam_width": 3},
    {"messages": HELLO, **SAMPLED, "logprobs": True, "top_logprobs": 2, "n": 2},
    {"messages": HELLO, "max_completion_tokens": 12, "temperature": 0},
    {"messages": HELLO, **SAMPLED, "response_format": {"type": "json_object"}},
]
IDS = [f"{'chat' if 'messages' in body else 'text'}-{i}" for i, body in enumerate(BODIES)]


def path(body):
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def expected(llm, body):
    """Return what `generate` makes of a file with the row of a body."""
    row = dict(body)
    if isinstance(row.get("prompt"), list):
        row["prompt_token_ids"] = row.pop("prompt")
    (output,) = llm.generate(row, SamplingParams(), use_tqdm=False)
    return output


@pytest.fixture(scope="module")
def outputs(llm):
    """What `generate` makes of the bodies, before the server has the model."""
    return [expected(llm, body) for body in BODIES]


@pytest.fixture(scope="module")
def server(outputs, server):
    return server


@pytest.mark.parametrize("number", range(len(BODIES)), ids=IDS)
def test_an_answer_is_what_generate_makes_of_the_row(server, outputs, number):
    body, output = BODIES[number], outputs[number]
    answer = server.post(path(body), **body).json()
    texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]
    assert texts == [sample.text for sample in output.outputs]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [o.finish_reason for o in output.outputs]
    made = sum(len(sample.token_ids) for sample in output.outputs)
    prompt = len(output.prompt_token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    found = answer["usage"]
    assert 0 <= found.pop("prompt_tokens_details")["cached_tokens"] < prompt
    assert found == usage and answer["model"] == "tiny"
    for choice, sample in zip(answer["choices"], output.outputs, strict=True):
        assert logprobs(choice) == (sample.logprobs and own(sample.logprobs, sample.token_ids))


def own(logprobs, token_ids):
    """Return the log-probabilities of the tokens themselves; None for the first of a prompt."""
    return [of and of[token] for of, token in zip(logprobs, token_ids, strict=True)]


def logprobs(choice):
    held = choice["logprobs"]
    return held and ([t["logprob"] for t in held["content"]] if "content" in held else held["token_logprobs"])


@pytest.mark.parametrize("number", range(len(BODIES)), ids=IDS)
def test_a_stream_adds_up_to_the_answer(server, number):
    body = BODIES[number]
    whole = server.post(path(body), **body).json()
    stream = server.post(path(body), **body, stream=True, stream_options={"include_usage": True})
    assert joined(stream) == whole["choices"]
    *parts, last = chunks(stream)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert all(part["usage"] is None and part["id"] == last["id"] for part in parts)


def test_tokens_do_not_depend_on_what_else_is_in_flight(server, outputs):
    numbers = list(range(len(BODIES))) * 3
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: server.post(path(BODIES[i]), **BODIES[i], stream=i % 2 == 0), numbers))
    for number, answer in zip(numbers, answers, strict=True):
        choices = joined(answer) if number % 2 == 0 else answer.json()["choices"]
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        assert texts == [sample.text for sample in outputs[number].outputs]
    assert server.idle()


def test_several_prompts_are_the_rows_of_a_file(server, llm):
    prompts = ["def f(x):", "import", "a b"]
    answer = server.post("/v1/completions", prompt=prompts, **SAMPLED, n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [server.post("/v1/completions", prompt=[each], **SAMPLED, n=2).json()["choices"] for each in prompts]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[:2] == [choice["text"] for choice in alone[0]]  # as a file of one row
    assert texts[2:4] != [choice["text"] for choice in alone[1]]  # the second row draws other random numbers
    ids = [llm.get_tokenizer()(each)["input_ids"] for each in prompts]
    assert server.post("/v1/completions", prompt=ids, **SAMPLED, n=2).json()["choices"] == answer["choices"]
    stream = server.post("/v1/completions", prompt=prompts, **SAMPLED, n=2, stream=True)
    assert joined(stream) == answer["choices"]


def test_without_a_seed_samples_differ_from_call_to_call(server):
    body = {"prompt": "a", "temperature": 1.5, "max_tokens": 20, "ignore_eos": True}
    texts = {server.post("/v1/completions", **body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4
    assert server.post("/v1/completions", prompt="a").json()["usage"]["completion_tokens"] <= 16


def test_a_chat_without_max_tokens_takes_what_there_is_room_for(server):
    answer = server.post("/v1/chat/completions", messages=HELLO, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == server.context.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_echo_has_the_prompt_before_the_text(server, llm):
    body = {"prompt": "def f(x):", **SAMPLED, "logprobs": 2, "n": 2}
    plain = server.post("/v1/completions", **body).json()["choices"]
    echoed = server.post("/v1/completions", **body, echo=True).json()["choices"]
    count = len(llm.get_tokenizer()("def f(x):")["input_ids"])
    for without, choice in zip(plain, echoed, strict=True):
        assert choice["text"] == "def f(x):" + without["text"]
        held = choice["logprobs"]
        assert held["token_logprobs"][count:] == without["logprobs"]["token_logprobs"]
        assert held["token_logprobs"][0] is None and held["top_logprobs"][0] is None
        assert "".join(held["tokens"][:count]) == "def f(x):" and held["text_offset"][count] == len("def f(x):")
    assert joined(server.post("/v1/completions", **body, echo=True, stream=True)) == echoed
    text = joined(server.post("/v1/completions", prompt=[5, 9], **SAMPLED, echo=True, stream=True))[0]["text"]
    assert text.startswith(llm.get_tokenizer().decode([5, 9]))


@pytest.fixture(scope="module")
def scores(llm):
    rows = [{"prompt_token_ids": [5, 9, 400, 17, 23]}, {"prompt": "def f(x):"}]
    return llm.score(rows, logprobs=2, use_tqdm=False)


@pytest.fixture(scope="module", autouse=True)
def scored_before_served(scores, outputs):
    """The model takes one call at a time."""


@pytest.mark.parametrize("most", [0, 1])
def test_a_prompt_is_scored_as_llm_score_does(server, scores, most):
    """What lm-eval's local-completions asks for; it sends max_tokens 1."""
    body = {"logprobs": 2, "echo": True, "max_tokens": most, "temperature": 0, "seed": 1234}
    answers = [server.post("/v1/completions", prompt=prompt, **body) for prompt in ([[5, 9, 400, 17, 23]], "def f(x):")]
    for answer, score in zip(answers, scores, strict=True):
        ((choice,), output) = answer.json()["choices"], score.outputs[0]
        held, count = choice["logprobs"], len(output.token_ids)
        chosen = own(output.logprobs, output.token_ids)
        assert held["token_logprobs"][:count] == chosen
        assert len(held["tokens"]) == count + most and answer.json()["usage"]["completion_tokens"] == most
        greedy = [max(held["top_logprobs"][i].values()) == chosen[i] for i in range(1, count)]
        assert all(greedy) == output.is_greedy


def test_prompts_are_scored_up_to_the_whole_context(server):
    longest = server.context.max_model_len
    body = {"echo": True, "max_tokens": 0, "logprobs": 1}
    answer = server.post("/v1/completions", prompt=[[7] * longest, [7]], **body).json()
    (first, second) = (choice["logprobs"]["token_logprobs"] for choice in answer["choices"])
    assert len(first) == longest and first[0] is None and None not in first[1:]
    assert second == [None]
    assert server.post("/v1/completions", prompt=[7] * (longest + 1), **body).status_code == 400
    plain = server.post("/v1/completions", prompt="a b", echo=True, max_tokens=0).json()["choices"][0]
    assert plain == {"index": 0, "text": "a b", "logprobs": None, "finish_reason": "length"}
    streamed = joined(server.post("/v1/completions", prompt=["a b", [7]], **body, stream=True))
    assert streamed == server.post("/v1/completions", prompt=["a b", [7]], **body).json()["choices"]


def test_of_two_names_of_max_tokens_the_newer_one_says_whether_a_prompt_is_scored(server):
    body = {"prompt": "a b", "echo": True, "ignore_eos": True}
    for given, made in (({"max_tokens": 0, "max_completion_tokens": 3}, 3), ({"max_completion_tokens": 0}, 0)):
        answer = server.post("/v1/completions", **body, **given)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == made
