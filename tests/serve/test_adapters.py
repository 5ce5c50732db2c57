"""Adapters over HTTP: they are models beside the server's own."""

from __future__ import annotations

import pytest

from hpcdecode import LLM, SamplingParams
from hpcdecode.errors import UserError
from hpcdecode.serve.options import ServeOptions
from tests.support.adapters import adapter
from tests.support.batch_servers import BatchServer, lines_of, request
from tests.support.served import error_of, served

BODY = {"prompt": [5, 9, 400, 33, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    made = (
        adapter(checkpoint("llama3"), folder / name, i, target_modules=["q_proj", "up_proj"], r=8)
        for i, name in enumerate("ab")
    )
    return {path.name: str(path) for path in made}


@pytest.fixture(scope="module")
def llm(checkpoint, adapters):
    return LLM(checkpoint("llama3"), lora=adapters, dtype="float32", batch=8, kv_memory="16M", threads=1)


def test_requests_name_an_adapter_as_their_model(llm, adapters):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    rows = [{"prompt_token_ids": BODY["prompt"], "lora": name} for name in ("a", "b", None)]
    texts = [output.outputs[0].text for output in llm.generate(rows, params, use_tqdm=False)]
    assert len(set(texts)) == 3
    with served(llm, adapters=adapters) as server:
        models = server.client.get("/v1/models").json()["data"]
        assert [(model["id"], model.get("parent")) for model in models] == [
            ("tiny", None),
            ("a", "tiny"),
            ("b", "tiny"),
        ]
        for name, text in zip(("a", "b", "tiny"), texts, strict=True):
            answer = server.post("/v1/completions", model=name, **BODY).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        for chosen in ({"lora": "a"}, {"model": "tiny", "lora": "a"}, {"model": "a", "lora": None}):
            answer = server.post("/v1/completions", **chosen, **BODY).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("a", texts[0])
        error = error_of(server.post("/v1/completions", model="a", lora="b", **BODY), 400)
        assert error["message"] == 'lora: expected a, as model is, got "b"; remove one of them'
        scores = {
            name: server.post(
                "/v1/completions", **{**BODY, "model": name, "max_tokens": 0}, echo=True, logprobs=1
            ).json()
            for name in ("a", "tiny")
        }
        a, tiny = (made["choices"][0]["logprobs"]["token_logprobs"] for made in scores.values())
        assert a[1:] != tiny[1:] and len(a) == len(tiny) == 5
        error = error_of(server.post("/v1/completions", model="c", **BODY), 404)
        assert error["message"].startswith("model: expected tiny or a or b")
        error = error_of(server.post("/v1/completions", lora="c", **BODY), 400)
        assert error["message"].startswith("lora: expected one of a, b")


def test_answers_of_batches_have_the_names_of_adapters(llm, adapters, tmp_path):
    """As those of requests and of vLLM have; rows without one have the first name of the model."""
    asked = {"a": {"model": "a"}, "b": {"model": "b", "n": 2}, "tiny": {"model": "tiny"}, "other": {"lora": "a"}}
    rows = [request(i, **{**BODY, "n": 1, **body}) for i, body in enumerate((*asked.values(), {"model": "c"}))]
    with BatchServer(llm, tmp_path / "data", adapters=adapters) as server:
        *made, refused = server.answers(server.until(server.create(lines_of(rows))))
        texts = [server.post("/v1/completions", **BODY, model=name).json()["choices"][0]["text"] for name in "ab"]
    assert [answer["response"]["body"]["model"] for answer in made] == ["a", "b", "tiny", "a"]
    assert [made[i]["response"]["body"]["choices"][0]["text"] for i in (0, 1, 3)] == [*texts, texts[0]]
    assert "model: expected" in refused["error"]["message"]


def test_an_adapter_has_another_name_than_the_model(checkpoint, adapters):
    model = str(checkpoint("llama3"))
    with pytest.raises(UserError, match="got 'a', which --served-model-name has too; choose another one"):
        ServeOptions(model=model, adapters=adapters, served_model_name=("x", "a")).check()
    with pytest.raises(UserError, match=r"--lora LLAMA3=DIR: expected another name than the model's, .*got 'LLAMA3'"):
        LLM(model, lora={"LLAMA3": adapters["a"]}, threads=1)
