"""The shipped demo: model, tokenizer and prompts fit together, and greedy text reads like its source."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from hpcdecode.data.prompts.encoding import tokenized
from hpcdecode.data.prompts.rows import Row, read_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt

DEMO = Path(__file__).parents[1] / "jobs" / "demo"
MODEL = DEMO / "model"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two threads that wait for each other are many times slower where anything else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    positions = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    assert positions >= 1024
    return list(tokenized(read_rows([str(DEMO / "prompts.jsonl")], SamplingParams()), tokenizer, positions))


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    yield
    for name in ("corpus", "train", "make_prompts"):
        sys.modules.pop(name, None)


def greedy(prompt, count):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.tensor([prompt.token_ids])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


def test_the_model_is_small_and_complete():
    assert {p.name for p in MODEL.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors"}
    assert sum(p.stat().st_size for p in DEMO.rglob("*") if p.is_file()) < 8 << 20


def test_every_prompt_is_usable_and_some_bring_their_own_sampling(prompts):
    assert len(prompts) == 40 and all(isinstance(p, Prompt) for p in prompts)
    assert len({p.id for p in prompts}) == 40
    assert sum(p.params != SamplingParams() for p in prompts) >= 4
    lengths = [len(p.token_ids) for p in prompts]
    assert min(lengths) < 20 and 300 < max(lengths) <= 1000


def test_greedy_text_is_made_of_the_sources_words(prompts, tokenizer, scripts):
    from corpus import documents

    known = set(re.findall(r"\w+", " ".join(documents())))
    for prompt in [p for p in prompts if p.id.startswith("text")][:8]:
        words = re.findall(r"\w+", tokenizer.decode(greedy(prompt, 48)))[:-1]
        assert sum(word in known for word in words) >= 0.8 * len(words), words


def test_greedy_decoding_ends_where_a_text_ends(prompts, tokenizer):
    ends = [greedy(p, 80)[-1] in tokenizer.eos_token_ids for p in prompts if p.id.startswith("end")]
    assert sum(ends) >= len(ends) // 2


def test_the_corpus_holds_each_text_once(scripts):
    from corpus import documents

    texts = documents()
    assert len(texts) == len(set(texts)) > 100 and sum(map(len, texts)) > 400_000
    assert any("Beautiful is better than ugly." in text for text in texts)


def test_the_scripts_make_a_model_and_prompts(tmp_path, scripts):
    import train
    from corpus import documents
    from make_prompts import prompts as make_prompts

    texts = documents()
    tokenizer = train.build_tokenizer(texts[:20])
    found = train.examples(texts[:20], tokenizer)
    assert all(e[0] == tokenizer.bos_token_id for e in found)
    model = train.build_model(tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    train.train(model, found, steps=2, minutes=1, out=tmp_path)
    loaded = Tokenizer.load(tmp_path)
    row = Row(1, "1", "The", None, None, SamplingParams())
    assert loaded.encode(row)[0] == tokenizer.bos_token_id
    assert loaded.eos_token_ids == {tokenizer.eos_token_id}
    assert len(make_prompts(texts)) == 40
