"""Embeddings of several tokens together (PLE, of Qwen4) are those of transformers, whatever ends sequences in a row."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.config import reason_to_refuse
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.hybrids import NGRAMS
from tests.support.models import save
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, random_ids, read_whole, save_whole

EOS = 2
PLACES = {  # of EOS in rows of 130 and 37 tokens, the last one as -1
    "begin": (0,),
    "middle": (5, 40),
    "neighbours": (10, 11, 20, 21, 22, 30, 32, 50, 53),
    "end": (-2, -1),
    "none": (),
}


def config(model_type="qwen4_exp_text", **values):
    states = {"number_of_conv_states": 3}  # which its default config, without such layers, states as 1
    return tiny(model_type, **{"eos_token_id": EOS, "ple_layer_ids": [1], **NGRAMS, **states, **values})


def prompts(places=(), lengths=(130, 37)):
    rows = [[token if token != EOS else 3 for token in row] for row in random_ids(lengths)]
    for row in rows:
        for place in places:
            if place < len(row):
                row[place] = EOS
    return rows


def convolutions(model):
    return [s for s in model.attends if isinstance(s, RecurrentShape) and s.taps and not s.k_dim]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    """A model with two such layers, with EOS as the first of a list, as transformers and as slices."""
    folder = tmp_path_factory.mktemp("two_layers")
    whole = save_whole(config(ple_layer_ids=[1, 3], eos_token_id=[EOS, 9]), folder)
    assert all(layer.ple.conv1d.weight.all() for layer in whole.model.layers if layer.ple)  # not zero, as by default
    return folder, load_split(folder, dtype="float32"), whole


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_logits_are_those_of_transformers(places, two_layers):
    _, model, whole = two_layers
    assert logits_difference(model, whole, prompts=prompts(places)) < 1e-4


def test_rows_of_one_token_and_of_eos_alone(two_layers):
    _, model, whole = two_layers
    for rows in ([[17, EOS, 4], [EOS]], [[EOS] * 6, [40, EOS]], [[5, 6, 4], [7, 8]]):
        assert logits_difference(model, whole, prompts=rows) < 1e-4


def test_earlier_ids_are_one_state_of_the_model(two_layers):
    """And each layer has a convolution, whose taps lie ngram_size tokens apart."""
    own, *layers = convolutions(two_layers[1])
    assert (own.taps, own.heads, own.silu) == (3, 2 * 2, False)  # two bytes of two tokens
    assert [(s.taps, s.heads, s.silu) for s in layers] == [(10, 4 * 64, True)] * 2


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        pytest.param("qwen4_exp_text", {}, marks=pytest.mark.full),
        ("qwen4_exp", {"ple_layer_ids": [3]}),
        ("qwen4_exp_text", {"ngram_size": 2, "heads_per_ngram": 4, "ple_embed_dim": 32}),
        pytest.param("qwen4_exp_text", {"ngram_size": 5, "ple_conv_kernel_size": 2}, marks=pytest.mark.full),
        pytest.param("qwen4_exp_text", {"ple_conv_kernel_size": 1, "split_ngram_parts": 12}, marks=pytest.mark.full),
        pytest.param("qwen4_exp_text", {"vocab_size": 70000, "eos_token_id": 66000}, marks=pytest.mark.full),
    ],
)
def test_other_sizes(model_type, values, tmp_path):
    whole = save_whole(config(model_type, **values), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert logits_difference(model, whole, prompts=prompts(PLACES["neighbours"])) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_earlier_ids_are_exact_in_halves(dtype, tmp_path):
    """Codes of ids have up to 17 bits. Of a hash of other ids the logits would be those of other tokens.

    To hand the bytes of earlier ids on past the layers before would take less than hashes of two layers do. But they
    lie where the rows of later layers will.
    """
    layers = ["linear_attention", "indexed_attention"] * 2 + ["linear_attention"]
    sizes = {"num_hidden_layers": 5, "layer_types": layers, "ple_layer_ids": [3, 5]}
    whole = save_whole(config(vocab_size=70000, eos_token_id=66000, **sizes), tmp_path)
    rows = [[69999, 65536, 66000, 255, 256, 4464, 1, 69998, 66001, 65535], [66000, 131, 69999, 40000]]
    half, full = (load_split(tmp_path, dtype=d) for d in (dtype, "float32"))
    assert logits_difference(full, whole, prompts=rows) < 1e-4
    assert logits_difference(half, whole, prompts=rows) < 0.3


@pytest.mark.parametrize("options", [{}, {"mamba_ssm_cache_dtype": "bfloat16"}])
def test_decoding_goes_on_as_transformers_does(options, tmp_path):
    """With states of delta rules in bfloat16 the tokens are those of the same states: windows stay exact."""
    save(config(), tmp_path)
    whole = read_whole(transformers.Qwen4ExpForCausalLM, tmp_path)
    rows = [row[:n] for row, n in zip(prompts(PLACES["neighbours"]), (60, 11), strict=True)] + [[17], [EOS]]
    llm = LLM(tmp_path, dtype="float32", kv_memory="16M", **options)
    outputs = llm.generate(rows, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    for row, output in zip(rows, outputs, strict=True):
        ids = torch.tensor([row])
        made = whole.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == made[0, len(row) :].tolist()


def test_tables_count_as_they_are_held(two_layers):
    """Projections in eight bits; embeddings, vectors and tables, in as many shards as there are, in bfloat16."""
    folder, _, _ = two_layers
    shapes = {key: tensor.shape for key, tensor in open_checkpoint(folder).items()}
    assert sum(".ngram_embedding." in key for key in shapes) == 2 * NGRAMS["split_ngram_parts"]
    others = ("embed_tokens", "lm_head", ".ngram_embedding.shard_")
    wide = {key for key, shape in shapes.items() if len(shape) == 1 or any(name in key for name in others)}
    assert any("shard_" in key for key in wide) and len(wide) < len(shapes)
    expected = sum(math.prod(shape) * (2 if key in wide else 1) for key, shape in shapes.items())
    assert weight_bytes(folder, torch.bfloat16, "int8") == expected


def test_what_cannot_be_run_is_refused(tmp_path):
    assert reason_to_refuse(config()) is None
    assert "over 70 tokens (ple_conv_kernel_size 24, ngram_size 3)" in reason_to_refuse(config(ple_conv_kernel_size=24))
    assert "eos_token_id -1" in reason_to_refuse(config(eos_token_id=-1))
    folder = tmp_path / "unigrams"
    given = config()
    given.save_pretrained(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"ngram_size": 3', '"ngram_size": 1'))
    with pytest.raises(UserError, match=r"cannot be used: ValueError: ple_embed_dim and .* must be positive"):
        load_split(folder, dtype="float32", weights=False)
