"""GGUF files give the logits of the weights that they hold, in all architectures and block types that are read."""

from __future__ import annotations

import sys

import gguf
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig

from hpcdecode import LLM, SamplingParams
from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.gguf.tensors import block_sizes
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.gguf_files import GPT_OSS, GPT_OSS_VALUES, write
from tests.support.gguf_logits import close, logits, projections, theirs
from tests.support.models import BOS, COMMON, EOS, SHAPE, save

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
GPT2 = dict(vocab_size=512, n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=BOS, eos_token_id=EOS)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OSS_ROPE = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0)
OSS_ROPE |= dict(truncate=False, original_max_position_embeddings=4096)
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}
MODELS = {  # by the name in GGUF: the config, and metadata that the writer does not take from it
    "llama": (lambda t: t.LlamaConfig(**SHAPE, tie_word_embeddings=True), {}),
    "qwen2": (lambda t: t.Qwen2Config(**SHAPE, tie_word_embeddings=False), {}),
    "qwen2moe": (
        lambda t: t.Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=160),
        {**MOE, "expert_shared_feed_forward_length": 160},
    ),
    "qwen3": (lambda t: t.Qwen3Config(**SHAPE, head_dim=32), {}),
    "qwen3moe": (lambda t: t.Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True), MOE),
    "phi3": (lambda t: t.Phi3Config(**SHAPE, sliding_window=4), {"attention.sliding_window": 4}),
    "gemma2": (
        lambda t: t.Gemma2Config(**SHAPE, head_dim=32, query_pre_attn_scalar=32, sliding_window=4),
        {"attention.sliding_window": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        lambda t: t.Gemma3TextConfig(**SHAPE, head_dim=32, query_pre_attn_scalar=32, sliding_window=4),
        {"attention.sliding_window": 4},
    ),
    "starcoder2": (lambda t: t.Starcoder2Config(**SHAPE, sliding_window=None), {}),
    "stablelm": (
        lambda t: t.StableLmConfig(
            **SHAPE, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
        ),
        {},
    ),
    "gpt2": (lambda t: t.GPT2Config(**GPT2), {}),
    "gpt-oss": (lambda t: t.GptOssConfig(**GPT_OSS, rope_parameters=OSS_ROPE), {**GPT_OSS_VALUES, **YARN}),
    "minimax-m2": (
        lambda t: t.MiniMaxM2Config(
            **SHAPE, **LOCAL, head_dim=32, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": SHAPE["intermediate_size"]},
    ),
    "lfm2": (
        lambda t: t.Lfm2Config(
            **{**SHAPE, "num_hidden_layers": 3},
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
        ),
        {"attention.head_count_kv": [0, SHAPE["num_key_value_heads"], 0], "shortconv.l_cache": 3},
    ),
}

QUICK = ("llama", "qwen2moe", "phi3", "gemma3", "gpt2", "gpt-oss", "minimax-m2", "lfm2")  # each with what others lack


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in MODELS])
def test_an_architecture(name, tmp_path):
    config, values = MODELS[name]
    source = save(config(transformers), tmp_path / "source")
    made = write(source, tmp_path, name, lambda own: "F16" if "ffn_gate" in own else "Q8_0", **values)
    expected = theirs(AutoModelForCausalLM.from_pretrained(made.plain, dtype=torch.float32))
    close(logits(made.file), expected)
    close(logits(made.plain), expected)


def test_every_block_type_as_transformers_reads_it(tmp_path):
    kinds = [k.name for k in gguf.quants._type_traits if int(k) in block_sizes()]
    sizes = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    source = save(transformers.LlamaConfig(**sizes, tie_word_embeddings=False), tmp_path / "source")
    own, used = iter(kinds * 9), set()

    def kind(name):
        if not name.startswith("blk"):
            return "Q6_K"
        used.add(found := next(own))
        return found

    made = write(source, tmp_path, "llama", kind)
    assert used == set(kinds)
    options = {"gguf_file": made.file.name, "quantization_config": GgufConfig(dequantize=True)}
    close(logits(made.file), theirs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)))
    close(logits(made.file), logits(made.plain))


@pytest.fixture
def llama(tmp_path):
    source = save(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False), tmp_path / "source")
    return write(source, tmp_path, "llama", lambda name: "Q4_1", parts=3)


def test_parts_of_it_for_members_and_its_size(llama):
    whole = logits(llama.plain)
    close(logits(llama.file), whole)
    close(logits(llama.file.with_name("model-00003-of-00003.gguf")), whole)  # any part stands for all
    for member in range(2):
        models = [load_split(path, dtype="float32", part=ModelPart(2, member)) for path in (llama.file, llama.plain)]
        for own, plain in zip(*(projections(model) for model in models), strict=True):
            assert torch.equal(own, plain)
    assert weight_bytes(llama.file, torch.float32) == weight_bytes(llama.plain, torch.float32) > 0
    assert weight_facts(EngineOptions(model=str(llama.file), dtype="float32")).bytes > 0


def test_its_tokenizer_has_the_ids_the_end_and_the_chat_template(llama):
    own, plain = Tokenizer.load(llama.file), Tokenizer.load(llama.plain)
    texts = ["def wrap(self, text):", " Ünïcode 12345 and\n\nspaces"]
    assert own.encode_texts(texts) == plain.encode_texts(texts)
    assert own.eos_token_ids == {EOS} and own.vocab_size == COMMON["vocab_size"]


@pytest.mark.parametrize("factor", [8.0, pytest.param(32.0, marks=pytest.mark.full)])
def test_frequencies_of_llama3(factor, tmp_path):
    """The file has divisors of the frequencies as a tensor; the scaling that gives them is found again."""
    rope = dict(rope_type="llama3", rope_theta=500000.0, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    rope |= dict(original_max_position_embeddings=8192)
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=rope)
    source = save(config, tmp_path / "source")
    frequencies, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    made = write(source, tmp_path, "llama", lambda name: "F16", extra={"rope_freqs.weight": plain / frequencies})
    found = read_config(made.file).rope_parameters
    assert {key: found[key] for key in rope} == rope
    close(logits(made.file), logits(made.plain))
    other = write(source, tmp_path, "llama", lambda name: "F16", extra={"rope_freqs.weight": plain * 3 + 1})
    with pytest.raises(UserError, match=r"rope_freqs\.weight' as Llama 3 has them, got others"):
        load_split(other.file, dtype="float32")


def test_without_the_package_its_name_is_said(llama, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"pip install 'hpcdecode\[gguf\]'"):
        load_split(llama.file, dtype="float32")


@pytest.mark.full
@pytest.mark.parametrize("name", ["smol", "gemma"])
def test_greedy_tokens_of_a_real_model(name, real_model):
    """Against the directory that transformers converted the file to, which is rounded to bfloat16."""
    folder = real_model(name)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = ["The capital of France is", "def fibonacci(n):"]
    tokens = []
    for path in (folder.with_name(f"{name}-packages") / f"{name}-whole.gguf", folder):
        out = LLM(path, dtype="float32").generate(prompts, params, use_tqdm=False)
        tokens.append([list(each.outputs[0].token_ids) for each in out])
    assert tokens[0] == tokens[1]
