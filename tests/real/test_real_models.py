"""Trained models: what random weights hide. Tokens against transformers, chats, schemas, and what few bits cost."""

from __future__ import annotations

import functools
import inspect
import json
import math
import statistics
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode import LLM, SamplingParams
from hpcdecode.bench import accuracy
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.model import load_split
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.few_bits import BY_INT8
from hpcdecode.schedule.draft_price import DraftPrice
from tests.support.guessing import guessing
from tests.support.parity import generated, greedy
from tests.support.real_models import folder
from tests.support.recorders import as_on_a_device
from tests.support.steps import Attention, step

MODELS = ("smol", "gemma")
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a", "1, 2, 3, 4,", "Water")
TEXT = Path("/usr/share/common-licenses/GPL-3")
# Perplexity over that of float32 at most, and the share of equal first choices at least.
BOUNDS = {"int8": (1.003, 0.97), "k8v4": (1.012, 0.90), "int4": (1.06, 0.86)}
NEW_TOKENS = 16
STRETCHES, TOKENS = {"smol": 4, "gemma": 1}, 512  # gemma has five times the vocabulary
FEW = 0.004  # bounds are those of 16 stretches: perplexity of so few differs by thousandths with the order of sums


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_tokens_equal_those_of_transformers(real_model, hpcdecode, tmp_path, name, ranks):
    model = real_model(name)
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    (tmp_path / "p.jsonl").write_text(lines)
    flags = ("--model", model, "--dtype", "float32", "--max-tokens", NEW_TOKENS, "--ignore-eos")
    result = hpcdecode("generate", "p.jsonl", "-o", "out.h5", *flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert generated(tmp_path / "out.h5") == expected(model)


@functools.cache
def expected(path):
    """What transformers makes of the prompts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), Tokenizer.load(str(path))
    return [greedy(model.eval(), ids, NEW_TOKENS)[0] for ids in tokenizer.encode_texts(list(PROMPTS))]


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_gguf_files_stay_in_their_blocks(real_model, name):
    """SmolLM2 in Q4_1, Gemma in Q5_0, Q4_K, Q6_K and Q8_0: logits are those of dequantised weights to the bit."""
    file = real_model(name).with_name(f"{name}-packages") / f"{name}-whole.gguf"
    models = [load_split(file, dtype="bfloat16", quantised=weights) for weights in (None, "auto")]
    tokens = [(0, i, 37 * i % 40000 + 5) for i in range(16)]
    one, other = (step(model, Attention(model), tokens, list(range(16))) for model in models)
    assert torch.equal(one, other)
    sizes = [
        sum(r.packed.bytes for s in m._slices.values() for t in s.stretches for r in t.compiled.recipes if r.packed)
        for m in models
    ]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_device_expands_the_blocks_of_gguf_files(real_model, monkeypatch):
    """With the kernels emulated: logits are those of dequantised weights to the bit, for half of their memory."""
    file = real_model("smol").with_name("smol-packages") / "smol-whole.gguf"
    as_on_a_device(monkeypatch)
    models = [load_split(file, dtype="bfloat16", quantised=weights) for weights in (None, "auto")]
    tokens = [(0, i, 37 * i % 40000 + 5) for i in range(6)]
    one, other = (step(model, Attention(model), tokens, list(range(6))) for model in models)
    assert torch.equal(one, other)
    held = [sum(w.nbytes for part in m._slices.values() for s in part.stretches for w in s.weights) for m in models]
    assert held[1] < 0.5 * held[0]


def test_scores_are_those_of_transformers(real_model):
    path = real_model("smol")
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ends = (" Paris", " a country in Europe", " 5, 6")
    rows = [{"prompt": prompt, "continuations": list(ends)} for prompt in PROMPTS] + [{"text": TEXT.read_text()[:2000]}]
    for found in LLM(str(path), dtype="float32").score(rows, use_tqdm=False):
        for output in found.outputs:
            ids, first = torch.tensor([*found.prompt_token_ids, *output.token_ids]), len(found.prompt_token_ids) or 1
            with torch.inference_mode():
                logits = reference(ids[None]).logits[0, first - 1 : -1].double()
            expected = logits.log_softmax(-1).gather(1, ids[first:, None]).sum()
            assert output.cumulative_logprob == pytest.approx(float(expected), abs=1e-3)
            assert output.is_greedy == bool((logits.argmax(-1) == ids[first:]).all())


def test_a_text_that_is_said_again_takes_fewer_steps(real_model, monkeypatch):
    monkeypatch.setattr(DraftPrice, "value", 0.3)  # whatever steps take here
    texts = [inspect.getsource(function) for function in (textwrap.indent, textwrap.dedent, textwrap.fill, json.dumps)]
    asked = [[{"role": "user", "content": f"Print this code again:\n\n{text}"}] for text in texts]
    params, made = SamplingParams(max_tokens=64, logprobs=0), []
    for speculative in (None, {"num_speculative_tokens": 8}):
        model = LLM(str(real_model("smol")), dtype="float32", speculative_config=speculative)
        made.append([repr(o.outputs[0]) for o in model.chat(asked, params, use_tqdm=False)])
    assert made[0] == made[1]
    counted = model._engine.metrics()
    assert counted.confirmed_tokens > counted.drafted_tokens / 2 > 50


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_in_fewer_bits_knows_what_it_will_say(real_model, temperature):
    """Draws of both take the same random numbers."""
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=2, ignore_eos=True)
    path, made = real_model("smol"), []
    for config in (None, {"model": path, "quantization": "int8", "num_speculative_tokens": 4}):
        llm = LLM(path, dtype="bfloat16", kv_memory="64M", speculative_config=config)
        with guessing("model", {}):
            made.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)])
    speculation = llm._engine._work.s_rank.schedulers[0].speculation
    assert made[0] == made[1]
    assert speculation.drafted > 150 and speculation.confirmed > (0.85 - temperature / 3) * speculation.drafted


def test_a_chat_and_a_schema(real_model):
    model = LLM(str(real_model("smol")), dtype="float32")
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (said,) = model.chat([question], SamplingParams(max_tokens=12), use_tqdm=False)
    assert "Paris" in said.outputs[0].text
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    params = SamplingParams(max_tokens=48, structured_outputs={"json": schema})
    (made,) = model.chat([question], params, use_tqdm=False)
    assert isinstance(json.loads(made.outputs[0].text)["city"], str)


@pytest.mark.skipif(not TEXT.exists(), reason=f"no {TEXT}, for which the bounds are")
@pytest.mark.parametrize("name", MODELS)
def test_what_few_bits_cost(real_model, name):
    path = str(real_model(name))
    text = accuracy.stretches(Tokenizer.load(path), TEXT.read_text(), STRETCHES[name], TOKENS)
    model = load_split(path, dtype="float32")
    caches = {kv_dtype: accuracy._kv_cache(model, kv_dtype, TOKENS) for kv_dtype in ("float32", *BOUNDS)}
    ways = {kv_dtype: accuracy.Way(model, cache) for kv_dtype, cache in caches.items()}
    bounds = dict(BOUNDS)
    if quantize.exact():
        ways["weights"] = accuracy.Way(load_split(path, dtype="float32", quantised="int8"), caches["float32"])
        bounds["weights"] = (1.010, 0.95)
    rounding = {"exact": False, "rounded": True} if packed_weights.packs(torch.float32, BY_INT8["int4"]) else {}
    for way, by_int8 in rounding.items():
        loaded = load_split(path, dtype="float32", quantised="int4", int8_activations=by_int8)
        ways[way] = accuracy.Way(loaded, caches["float32"])
    losses = accuracy.measure(ways, text)
    exact = losses.pop("float32")
    found = {
        way: (math.exp(statistics.fmean(loss.nats) - statistics.fmean(exact.nats)), statistics.fmean(loss.same_choice))
        for way, loss in losses.items()
    }
    assert all(found[way][0] <= most + FEW and found[way][1] >= least for way, (most, least) in bounds.items()), found
    if rounding:  # of activations, beside int4 weights
        assert found["rounded"][0] <= (1.01 + FEW) * found["exact"][0], found
        assert found["rounded"][1] >= found["exact"][1] - 0.05, found


def test_the_first_command_of_the_readme_answers(real_model, hpcdecode):
    real_model("smol")  # skips where no index has it
    hpcdecode.environment["HPCDECODE_CACHE"] = str(folder() / "cache")
    result = hpcdecode("generate", "-p", "What is the capital of France?", "--model", "smollm2")
    assert (result.returncode, result.stdout) == (0, "The capital of France is Paris.\n"), result.stderr
