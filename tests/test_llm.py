"""The Python API: the tokens of the command line, in the order of the prompts, from a model that is loaded once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hpcdecode
from hpcdecode import LLM, PromptError, SamplingParams
from hpcdecode.config import Job
from hpcdecode.errors import UserError
from hpcdecode.generate import generate

KV_BYTES = 16 << 20
IDS = [[5 + i * 7 % 400] * (1 + i % 9) for i in range(20)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_and_texts_are_those_of_the_command_line(llm, checkpoint, tmp_path):
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, stop=("e",))
    rows = [{"prompt_token_ids": ids} for ids in IDS] + [{"prompt": f"if x == {i}:"} for i in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, out = str(checkpoint("llama3")), str(tmp_path / "out.h5")
    options = {"dtype": "float32", "batch": 8, "kv_memory": KV_BYTES}
    assert generate(Job(prompts=(str(tmp_path / "p.jsonl"),), model=model, output=out, params=params, **options)) == 0
    outputs = llm.generate(rows, params)
    with hpcdecode.read(out) as results:
        expected = [(r["text"], r["token_ids"].tolist(), r["finish_reason"]) for r in results]
    made = [o.outputs[0] for o in outputs]
    found = [(m.text.replace("\0", "\ufffd"), m.token_ids, m.finish_reason) for m in made]  # HDF5 has no NUL
    assert found == expected and {reason for *_, reason in found} == {"stop", "length"}
    assert [o.prompt_token_ids for o in outputs[:20]] == IDS and outputs[20].prompt == "if x == 0:"
    assert all(o.finished for o in outputs)


def test_a_second_call_uses_the_same_store_and_makes_the_same_tokens(llm):
    first = llm.generate([{"prompt_token_ids": ids} for ids in IDS], SamplingParams(max_tokens=9), use_tqdm=False)
    store = llm._engine._attention.kv_cache
    again = llm.generate([{"prompt_token_ids": ids} for ids in IDS], SamplingParams(max_tokens=9), use_tqdm=False)
    assert tokens(first) == tokens(again) and llm._engine._attention.kv_cache is store
    store.check()
    assert store.used_tokens == 0
    assert llm.generate([]) == []


def test_parameters_for_each_prompt_and_one_prompt_alone(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (7, 1, 4)]
    outputs = llm.generate(["a b", "c", "a b"], params, use_tqdm=False)
    assert [len(t) for t in tokens(outputs)] == [7, 1, 4]
    assert tokens(outputs)[2] == tokens(outputs)[0][:4]
    (alone,) = llm.generate("a b", SamplingParams(max_tokens=7, ignore_eos=True, stop=[], logit_bias={}))
    assert alone.outputs[0].token_ids == tokens(outputs)[0]
    (own,) = llm.generate({"prompt": "a b", "max_tokens": 2}, SamplingParams(max_tokens=7, ignore_eos=True))
    assert own.outputs[0].token_ids == tokens(outputs)[0][:2]


def test_chat_goes_through_the_template(llm):
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, SamplingParams(max_tokens=3), use_tqdm=False)
    assert one.prompt == "<s>user: hello\nassistant:"
    assert tokens(llm.chat([talk, talk], SamplingParams(max_tokens=3), use_tqdm=False)) == tokens([one, one])


@pytest.mark.parametrize(
    ("prompts", "params", "expected"),
    [
        (["a", ""], {}, "prompt 2: prompt: expected a string that is not empty"),
        (["a", 7, 8], {}, r"prompt 2: expected a string or a dict, got int \(and 1 more"),
        ([{"prompt_token_ids": [1 << 20]}], {}, r"prompt 1: expected token ids in \[0, 512\)"),
        ([{"text": "a"}], {}, "prompt 1: expected exactly one of prompt"),
        ("a", {"stop_token_ids": [1 << 20]}, "prompt 1: stop_token_ids"),
        ([{"prompt_token_ids": [5] * 5000}], {}, "prompt 1: prompt too long"),
    ],
)
def test_what_cannot_be_used_is_a_value_error_before_any_work(llm, prompts, params, expected):
    before = llm._engine._attention
    with pytest.raises(ValueError, match=expected) as raised:
        llm.generate(prompts, SamplingParams(**params))
    assert isinstance(raised.value, PromptError) and llm._engine._attention is before


def test_one_parameter_set_too_few(llm):
    with pytest.raises(PromptError, match="expected one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_a_prompt_that_the_kv_cache_cannot_hold(checkpoint):
    small = LLM(checkpoint("llama3"), dtype="float32", kv_memory=200_000, threads=1)
    with pytest.raises(PromptError, match="raise kv_memory, or lower max_tokens"):
        small.generate("a", SamplingParams(max_tokens=1000))


def test_an_interrupted_call_leaves_the_model_usable(llm, monkeypatch):
    expected = tokens(llm.generate("a b", SamplingParams(max_tokens=20), use_tqdm=False))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdecode.engine.calls.CollectedResults.add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a b", "c d"] * 20, SamplingParams(max_tokens=20), use_tqdm=False)
    assert tokens(llm.generate("a b", SamplingParams(max_tokens=20), use_tqdm=False)) == expected


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"batch": 0}, {"threads": 0}])
def test_options_out_of_range(checkpoint, options):
    with pytest.raises(UserError, match=next(iter(options))):
        LLM(checkpoint("llama3"), **options)


def test_the_package_is_imported_without_torch():
    code = "import sys, hpcdecode; from hpcdecode import SamplingParams; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_prompts_as_lists_of_token_ids(llm):
    params = SamplingParams(max_tokens=5)
    wanted = llm.generate([{"prompt_token_ids": ids} for ids in IDS[:3]], params, use_tqdm=False)
    assert tokens(llm.generate(IDS[:3], params, use_tqdm=False)) == tokens(wanted)
    (one,) = llm.generate(IDS[0], params, use_tqdm=False)
    assert one.outputs[0].token_ids == wanted[0].outputs[0].token_ids and one.prompt_token_ids == IDS[0]
    assert one.outputs[0].cumulative_logprob is None
    (known,) = llm.generate(IDS[0], SamplingParams(max_tokens=5, logprobs=0), use_tqdm=False)
    assert known.outputs[0].cumulative_logprob < 0


def test_what_a_notebook_shows(llm, checkpoint):
    assert repr(llm) == f"LLM({str(checkpoint('llama3'))!r}, dtype='float32', kv_dtype='float32')"
    encoded = llm.get_tokenizer()("if x == 1:")["input_ids"]
    assert llm.generate("if x == 1:", SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids == encoded
    assert dir(hpcdecode) == sorted(hpcdecode.__all__)


def test_tokens_that_other_prompts_had_are_counted(llm):
    """Who comes first computes them: of 150 tokens two blocks of 64."""
    prompts = [{"prompt_token_ids": [*range(20, 170), 200 + i]} for i in range(4)]
    found = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    assert [output.num_cached_tokens for output in found] == [0, 128, 128, 128]
