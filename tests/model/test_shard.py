"""Members' own traces, side by side in one process: the whole model's logits, few sums, parts of weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.deal import Deal
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.shard import member_trace, trace_of
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.trace_file import Unstorable, stored
from tests.support.members import check_members
from tests.support.models import ARCHITECTURES, SHAPE, VOCAB

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
SHARES = {**dict.fromkeys(LATENT, (0.53, 0.30)), "minicpm3": (0.536, 0.31)}  # low-rank projections, routers are whole
WITH_FOUR = ("gpt2", "llama3", "gpt_oss", "deepseek_v3")  # llama3 and gpt_oss: two KV heads stay whole


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_members_have_the_models_logits(name, checkpoint):
    whole = cached_trace(checkpoint(name), torch.float32)
    for own in check_members(whole, 2):
        assert own.membership.sums == 2 * len(whole.attends)
        assert own.membership.share == pytest.approx(SHARES.get(name, (0.5,))[0], abs=0.004)
        for attend, part in zip(whole.attends, own.attends, strict=True):
            assert AttendArguments.of(part).kv_heads * 2 == AttendArguments.of(attend).kv_heads
            assert AttendArguments.of(part).q_heads * 2 == AttendArguments.of(attend).q_heads


@pytest.mark.parametrize("name", WITH_FOUR)
def test_four_members_have_the_models_logits(name, checkpoint):
    whole = cached_trace(checkpoint(name), torch.float32)
    dealt = AttendArguments.of(whole.attends[0]).kv_heads == 4
    for own in check_members(whole, 4):
        assert own.membership.sums == (2 if dealt else 1) * len(whole.attends)
        share = own.membership.share
        assert share == pytest.approx(SHARES.get(name, (0, 0.25))[1], abs=0.01) if dealt else 0.3 < share < 0.45
        assert all(len(heads) == (1 if dealt else 2) for heads in own.membership.heads)


def test_kv_heads_are_dealt_in_order(checkpoint):
    deal = Deal(cached_trace(checkpoint("gpt2"), torch.float32), 4)
    assert [trace_of(deal, m).membership.heads[0] for m in range(4)] == [range(m, m + 1) for m in range(4)]


def test_one_member_has_the_trace_itself(checkpoint):
    whole = cached_trace(checkpoint("llama2"), torch.float32)
    assert member_trace(whole, 1, 0) is whole and whole.membership is None
    with pytest.raises(ValueError, match="from 0 to 1"):
        member_trace(whole, 2, 2)


def test_the_whole_trace_stays_as_it_is(checkpoint):
    whole = cached_trace(checkpoint("qwen2"), torch.float32)
    before = stored(whole)
    own = member_trace(whole, 2, 1)
    assert stored(whole) == before
    own.graph.lint()
    with pytest.raises(Unstorable):
        stored(own)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_memory_that_is_filled_in_parts_is_a_concatenation(name, checkpoint):
    """Keys are written into new memory beside each other, which cannot be dealt out by heads; joined, they can."""
    targets = {str(node.target) for node in cached_trace(checkpoint(name), torch.float32).graph.nodes}
    assert "aten.cat.default" in targets
    assert not targets & {"aten.new_empty.default", "aten.slice_scatter.default", "aten.copy.default"}


def test_the_bias_of_a_sum_is_on_one_member(checkpoint):
    whole = cached_trace(checkpoint("opt"), torch.float32)
    for member in range(2):
        names = set(member_trace(whole, 2, member).weights.values())
        assert any(name.endswith("fc1.bias") for name in names)
        assert any(name.endswith("fc2.bias") for name in names) == (member == 0)


def traced(kind: str, sizes: dict, folder) -> Trace:
    """Trace of a model that has no weights, kept from run to run."""
    getattr(transformers, f"{kind}Config")(**sizes).save_pretrained(folder)
    return cached_trace(folder, torch.float32)


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "Mixtral"])
def test_uneven_sizes(kind, tmp_path):
    """Three members: six heads, 90 columns of the MLP and a vocabulary of 509."""
    sizes = {**SHAPE, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    traces = check_members(traced(kind, sizes | {"intermediate_size": 90, "vocab_size": 509}, tmp_path), 3)
    assert [len(own.membership.vocabulary) for own in traces] == [176, 176, 157]
    inner = [max(cut.kept for cut in own.cuts.values() if cut.size == 90) for own in traces if kind != "Phi3"]
    assert inner in ([32, 32, 26], [])


@pytest.mark.parametrize("kind", ["GPTNeoX", "Cohere", "Granite", "Phi", "StableLm", "Qwen2Moe"])
def test_other_kinds_of_layers(kind, tmp_path):
    """Attention and MLP beside each other share a sum; scaled, gated and shared experts too."""
    sizes = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {
        "GPTNeoX": {"use_parallel_residual": True},
        "Cohere": {"use_qk_norm": True, "logit_scale": 1.0},
        "Granite": {"residual_multiplier": 0.2},
        "Phi": {},
        "StableLm": {"use_qkv_bias": True},
        "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    }[kind]
    whole = traced(kind, {**sizes, **extra}, tmp_path)
    parallel = kind in ("GPTNeoX", "Cohere", "Phi")
    for own in check_members(whole, 2):
        assert own.membership.sums == (1 if parallel else 2) * 2
        assert own.membership.share < 0.51
    assert tensor_meta(whole.logits).one_token == (1, VOCAB)
