"""Models with indexers (sparse attention) attend as transformers does."""

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
from hpcdecode.model.frontend.export import export_kinds
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.trace import read_program
from hpcdecode.model.run.stages import stages_of
from tests.support.models import BLOCKS, LATENT, POOLS, save
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
        *(("DeepseekV32", topk) for topk in (8, 256)),
        ("GlmMoeDsa", 64),
        pytest.param("DeepseekV32", 64, marks=pytest.mark.full),
        *(pytest.param("GlmMoeDsa", topk, marks=pytest.mark.full) for topk in (8, 256)),
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


@pytest.mark.parametrize("kind", CONFIGS)
def test_where_indexers_are_left_out_sequences_end_with_what_they_choose(kind, tmp_path, caplog):
    """Attention of such sequences is over all tokens."""
    whole = save_whole(config(kind, index_topk=256), tmp_path)
    model = load_split(tmp_path, dtype="float32", announce=True, indexers=False)
    assert model.max_positions == 256 < model.facts.own_positions
    assert not any(shape.indexer for shape in model.attends)
    assert "which is not supported with --partition head" in caplog.text
    assert logits_difference(model, whole) < 1e-4


def test_heads_with_k_and_v_of_their_own_attend_to_what_one_indexer_chooses(tmp_path):
    whole = save_whole(config("GlmMoeDsa"), tmp_path)
    model = load_split(tmp_path, dtype="float32", latents=False)
    assert all(s.kv_heads == 4 and s.indexer for s in model.attends)
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


FEW = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}
OTHERS = {  # config, and what the indexers of its attentions choose
    "axk2": (tiny("axk2", **FEW), [(24, 16)] * 3),
    "dots3_note": (tiny("dots3_note_text", **FEW), [(24, 16), None, (24, 16)]),  # the second has a window
    "hy_v4": (tiny("hy_v4", **FEW, indexer_types=["full", "full", "shared"]), [(24, 16), (24, 16), (24, 0)]),
    "mistral_large4": (tiny("mistral_large4"), [(24, 16), (24, 0), (24, 16)]),  # the second has no rotation
}
for name, value in {**FEW, "indexer_types": ["full", "shared", "full"], "kv_source_layers": [0, 1, 0]}.items():
    setattr(OTHERS["mistral_large4"][0].text_config, name, value)


@pytest.mark.parametrize("name", OTHERS)
def test_indexers_of_other_models_choose_as_transformers_does(name, tmp_path):
    """With keys normalised in float32, queries scaled by position, no rotation, and K of an earlier layer."""
    given, chosen = OTHERS[name]
    whole = save_whole(given, tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert [s.indexer and (s.indexer.topk, s.indexer.heads) for s in model.attends] == chosen
    assert model.max_positions == model.facts.own_positions
    assert logits_difference(model, whole) < 1e-4


@pytest.mark.parametrize(
    ("blocks", "limit"),
    [
        ({}, 1024),
        ({"index_block_size": 24, "index_local_blocks": 2}, 1024),
        ({"index_topk_blocks": 12}, 1024),
        ({"index_local_blocks": 0}, 48),
    ],
)
def test_blocks_of_tokens(blocks, limit, tmp_path):
    """MiniMax-M3: every KV head chooses its own; without a block that all see, sequences end instead."""
    whole = save_whole(transformers.MiniMaxM3VLTextConfig(**BLOCKS | blocks), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert model.max_positions == limit and not model.attends[3].indexer
    for lengths in ((47, 48), (49, 65), (130, 37)):
        assert logits_difference(model, whole, tuple(min(n, limit) for n in lengths)) < 1e-4


def test_pools_whose_newest_tokens_are_left_out_are_refused():
    given = config("GlmMoeDsa")
    given.index_kpool = 4
    assert "index_kpool_always_select_tail" in reason_to_refuse(given)
    given.index_kpool_always_select_tail = True
    assert reason_to_refuse(given) is None and longest(given) == 24
    given.index_topk = 18
    assert longest(given) == 16


@pytest.mark.parametrize("pool", [*(pytest.param(pool, marks=pytest.mark.full) for pool in (1, 16)), 4])
def test_pools_of_equal_weights_are_chosen_as_transformers_does(pool, tmp_path):
    """Qwen4: keys are rotated as the first tokens of their pools, and all KV heads attend to the same."""
    budget = {"indexer_budget": 32, "indexer_compress_ratio": pool, "indexer_n_heads": 16}
    whole = save_whole(tiny("qwen4_exp_text", **budget), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    assert model.max_positions == model.facts.own_positions
    for lengths in ((31 + pool, 32 + pool), (130, 37)):
        assert logits_difference(model, whole, lengths) < 1e-4


@pytest.mark.parametrize("pool", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("topk", [8, pytest.param(64, marks=pytest.mark.full)])
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
