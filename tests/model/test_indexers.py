"""Models with indexers (sparse attention) attend as transformers does; some only while an indexer chooses all."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.errors import PromptError, UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.absorb import absorb
from hpcdecode.model.frontend.choose import join_indexers
from hpcdecode.model.frontend.config import longest, reason_to_refuse
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.trace import export_kinds, read_program
from hpcdecode.model.run.stages import stages_of
from tests.support.models import LATENT, POOLS, SHAPE, save
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, read_whole, save_whole

INDEX = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}
SHARED = ["full", "full", "shared", "shared", "full", "shared"]  # layers that take the choice of the one before
CONFIGS = {
    "DeepseekV32": {"n_group": 2, "topk_group": 1},
    "GlmMoeDsa": {"num_hidden_layers": 6, "n_group": 1, "topk_group": 1, "indexer_types": SHARED},
}


def config(kind, **values):
    return getattr(transformers, f"{kind}Config")(**{**LATENT, **INDEX, **CONFIGS[kind], **values})


@pytest.mark.parametrize(  # of sequences of 130 and 37 tokens
    ("kind", "topk"),
    [
        *(("DeepseekV32", topk) for topk in (8, 64, 256)),
        *(("GlmMoeDsa", topk) for topk in (64, 256)),
        pytest.param("GlmMoeDsa", 8, marks=pytest.mark.full),
    ],
)
def test_logits_are_those_of_transformers(kind, topk, tmp_path):
    whole = save_whole(config(kind, index_topk=topk), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert logits_difference(model, whole) < 1e-4
    assert model.max_positions == model.facts.own_positions == 1024
    heads = [16 if part == "full" else 0 for part in (SHARED if kind == "GlmMoeDsa" else ["full"] * 2)]
    assert [s.indexer for s in model.attends] == [IndexerShape(topk, n, 16 if n else 0) for n in heads]


@pytest.mark.parametrize("kind", ["DeepseekV32", pytest.param("GlmMoeDsa", marks=pytest.mark.full)])
def test_of_equal_scores_the_first_are_chosen(kind, tmp_path, monkeypatch):
    """Of two heads, a quarter of the scores are 0. transformers leaves open which of them topk takes."""

    def topk(self, k, dim=-1, **options):
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    whole = save_whole(config(kind, index_n_heads=2), tmp_path)
    monkeypatch.setattr(torch.Tensor, "topk", topk)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4


@pytest.mark.parametrize("options", [{"indexers": False}, {"latents": False}])
@pytest.mark.parametrize("kind", CONFIGS)
def test_where_indexers_are_left_out_sequences_end_with_what_they_choose(kind, options, tmp_path, caplog):
    """Attention of such sequences is over all tokens."""
    whole = save_whole(config(kind, index_topk=256), tmp_path)
    model = load_split(tmp_path, dtype="float32", announce=True, **options)
    assert model.max_positions == 256 < model.facts.own_positions
    assert not any(shape.indexer for shape in model.attends)
    assert "which is not supported with R-ranks on GPUs, --partition head" in caplog.text
    assert logits_difference(model, whole) < 1e-4


@pytest.fixture(scope="module")
def exported():
    """A model of which some layers share the choice of the one before, with a few layers of each kind traced."""
    with quiet():
        return export_kinds(config("GlmMoeDsa"), torch.float32)


def test_a_few_layers_of_a_kind_are_traced(exported):
    assert sum("attend" in str(node.target) for node in exported.program.graph.nodes) == 6


def test_stages_begin_with_an_indexer_of_their_own(exported):
    """Of full, full, shared, shared, full, shared."""
    found = read_program(copy.deepcopy(exported.program), exported.buffers, config("GlmMoeDsa"), torch.float32)
    absorb(found)
    parts = split(join_indexers(found), torch.device("cpu"))
    assert [stage.start for stage in stages_of(parts, 3)] == [0, 1, 4]
    assert stages_of(parts, 2)[1].start in (1, 4)
    with pytest.raises(UserError, match="--pp 4: expected 1 to 3, the layers with indexers of their own, got 4"):
        stages_of(parts, 4)


def test_blocks_of_tokens(tmp_path):
    """MiniMax-M3's indexers choose blocks; its first layers have none."""
    sizes = {**SHAPE, "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    blocks = {"index_block_size": 16, "index_topk_blocks": 12, "index_n_heads": 2, "index_head_dim": 16}
    kinds = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    whole = save_whole(transformers.MiniMaxM3VLTextConfig(**sizes, **blocks, layer_types=kinds), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert logits_difference(model, whole) < 1e-4 and model.max_positions == 192


def test_pools_whose_newest_tokens_are_left_out_are_refused():
    given = config("GlmMoeDsa")
    given.index_kpool = 4
    assert "index_kpool_always_select_tail" in reason_to_refuse(given)
    given.index_kpool_always_select_tail = True
    assert reason_to_refuse(given) is None and longest(given) == 24
    given.index_topk = 18
    assert longest(given) == 16


def test_sequences_end_with_the_blocks_that_are_chosen(tmp_path):
    """Of up to so many tokens logits are those of transformers, of the incomplete block at their end too."""
    whole = save_whole(tiny("qwen4_exp_text", indexer_budget=64), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert model.max_positions == 64
    assert logits_difference(model, whole, (64, 37)) < 1e-4


@pytest.mark.parametrize("pool", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("topk", [8, 64])
def test_pools_of_tokens_are_chosen_as_transformers_does(topk, pool, tmp_path):
    """GLM-5-Next: with parts of pools at the end, and layers that take the choice of the one before."""
    whole = save_whole(tiny("glm5_next", **POOLS | {"index_topk": topk, "index_kpool": pool}), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert model.max_positions == model.facts.own_positions
    for lengths in ((topk + pool - 1, topk + pool), (130, 37)):
        assert logits_difference(model, whole, lengths) < 1e-4
    shapes = [s for s in model.attends if isinstance(s, LayerShape)]
    assert [s.indexer for s in shapes] == [IndexerShape(topk, n, 16 if n else 0, pool) for n in (16, 0, 16)]
    assert all(s.latent for s in shapes)


def test_pools_are_left_out_with_their_compressors(tmp_path):
    whole = save_whole(tiny("glm5_next", **POOLS), tmp_path)
    model = load_split(tmp_path, dtype="float32", indexers=False)
    assert model.max_positions == 40
    assert not any(s.compress_rate for s in model.attends)
    assert logits_difference(model, whole, (40, 37)) < 1e-4


def test_embeddings_of_several_tokens_are_refused():
    given = tiny("qwen4_exp_text", ple_layer_ids=[1], eos_token_id=2)
    assert "ple_layer_ids" in reason_to_refuse(given)


def test_rows_end_where_indexers_begin_to_leave_out_tokens(tmp_path, caplog):
    """Of pools of tokens: a row of as many as an indexer chooses equals transformers; a longer prompt is refused."""
    pools = config("GlmMoeDsa", index_topk=24)
    pools.index_kpool, pools.index_kpool_always_select_tail = 4, True
    save(pools, tmp_path)
    llm = LLM(tmp_path, dtype="float32", kv_memory="16M")
    assert "at most 24 tokens, prompts included" in caplog.text and "glm_moe_dsa" in caplog.text
    prompt = [5 + i * 7 % 300 for i in range(12)]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    whole = read_whole(transformers.GlmMoeDsaForCausalLM, tmp_path)
    ids = torch.tensor([prompt])
    expected = whole.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output.outputs[0].token_ids == expected[0, 12:].tolist()
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(PromptError, match="context of 24"):
        llm.generate([prompt * 2], SamplingParams(max_tokens=4), use_tqdm=False)
