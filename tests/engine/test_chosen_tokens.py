"""Rows longer than what indexers choose: transformers' tokens, and the same bits in any company.

The same bits of those whose scores have biases, too.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.open import open_on_device
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.engine.prefill import PromptKvCache, PromptsBeforeChoice
from hpcdecode.engine.resumed import ResumedAttention
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import load_split
from tests.support.models import INDEXED
from tests.support.parity import make_case
from tests.support.preemption import HastyPlacement
from tests.support.samples import made, rows, run

FIELDS = [
    (70, {"n": 2, "temperature": 0.9, "max_tokens": 8, "logprobs": 1}),
    (33, {"max_tokens": 12, "prompt_logprobs": 2, "logprobs": 0}),
    (90, {"beam_width": 2, "max_tokens": 6}),
    (130, {"temperature": 0.8, "max_tokens": 10, "prompt_logprobs": 1}),
]


NAMES = (*INDEXED, "inkling2", "bloom")
SOME = ("deepseek_v32", "deepseek_v4", "minimax_m3", "inkling2", "bloom")  # the others are like one of them
SMALL = {"batch": 3, "period": 2, "prefill_tokens": 48}


@pytest.mark.parametrize(
    ("name", "options"), [("deepseek_v32", {}), ("glm_moe_dsa", {}), ("glm_moe_dsa", SMALL), ("deepseek_v4", SMALL)]
)
def test_greedy_tokens_equal_those_of_transformers(name, options, tmp_path):
    case = make_case(name, tmp_path, rows=4, new_tokens=16)
    prompts = [json.loads(line)["prompt_token_ids"] for line in (case / "prompts.jsonl").read_text().splitlines()]
    assert max(map(len, prompts)) == 700
    llm = LLM(case / "model", dtype="float32", kv_memory="64M", **options)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == json.loads((case / "reference.json").read_text())


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in NAMES])
def test_a_row_alone_is_the_row_in_company(checkpoint, name):
    """Over lanes, chunks of prompts, samples, beams, and rows that leave and come again."""
    model = load_split(checkpoint(name), dtype="float32")
    alone = {}
    for row in rows(*FIELDS):
        alone |= run(model, [row], batch=4)[0]
    placement = type("Placement", (HastyPlacement,), {"rate": 0.6})
    for options in ({}, {"lanes": 2, "placement": placement, "capacity": 1024}):
        done, worker = run(model, rows(*FIELDS), **options)
        assert made(done) == made(alone), options
    assert sum(s.preemptions for s in worker.schedulers) > 1


@pytest.mark.parametrize("name", NAMES)
def test_prompts_attend_by_torch_as_on_a_gpu(checkpoint, name):
    """Beside R-ranks on CPUs: the same tokens, but where two have almost the same logits."""
    model = load_split(checkpoint(name), dtype="float32")
    fields = [(n, {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}) for n in (33, 130, 70, 300)]
    on_cpus, on_gpu = (run(model, rows(*fields), by_torch=by_torch)[0] for by_torch in (False, True))
    assert on_cpus.keys() == on_gpu.keys()
    for key, sequence in on_cpus.items():
        assert on_gpu[key].generated == sequence.generated
        np.testing.assert_allclose(on_gpu[key].logprobs.chosen, sequence.logprobs.chosen, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v32", "deepseek_v4", "glm5_next", "minimax_m3", "inkling2"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("glm_moe_dsa", "qwen4", "bloom")),
    ],
)
def test_r_ranks_attend_by_torch_as_on_a_gpu(checkpoint, name):
    """The same tokens, but where two have almost the same logits; the same bits alone and in company."""
    model = load_split(checkpoint(name), dtype="float32")
    weights = [model.recurrent_weights(i) for i, s in enumerate(model.attends) if isinstance(s, RecurrentShape)]

    def cache(shapes, slots):
        sizes = {"capacity_tokens": 1 << 14, "max_sequences": slots, "block_tokens": 64, "state_tokens": 64}
        return open_on_device(shapes, weights, kv_dtype="float32", device="cpu", **sizes)

    fields = [(n, {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}) for n in (33, 130, 70, 300)]
    on_cpus, on_gpu = (run(model, rows(*fields), cache=own)[0] for own in (None, cache))
    for key, sequence in on_cpus.items():
        assert on_gpu[key].generated == sequence.generated
        np.testing.assert_allclose(on_gpu[key].logprobs.chosen, sequence.logprobs.chosen, atol=1e-4)
    alone = {}
    for row in rows(*fields):
        alone |= run(model, [row], cache=cache)[0]
    assert made(run(model, rows(*fields), cache=cache, lanes=2)[0]) == made(alone)


def test_int8_and_bfloat16_run_beyond_what_is_chosen(checkpoint):
    prompt = [5 + i * 7 % 300 for i in range(120)]
    for dtype, kv_dtype in (("bfloat16", None), ("bfloat16", "int8"), ("float32", "float16")):
        llm = LLM(checkpoint("glm_moe_dsa"), dtype=dtype, kv_dtype=kv_dtype, kv_memory="16M")
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
        one, other = (llm.generate(p, params, use_tqdm=False) for p in ([prompt], [prompt[:50], prompt]))
        assert one[0].outputs[0].token_ids == other[1].outputs[0].token_ids
        assert one[0].outputs[0].cumulative_logprob == other[1].outputs[0].cumulative_logprob


@pytest.mark.parametrize("options", [{"indexers": False}, {"latents": False}])
def test_entries_that_nothing_would_attend_to_are_refused(checkpoint, options):
    with pytest.raises(UserError, match="attention over compressed entries needs --partition request"):
        load_split(checkpoint("deepseek_v4"), dtype="float32", **options)


def test_a_partition_by_head_of_a_model_that_was_loaded_is_refused(checkpoint):
    for name in INDEXED:
        with pytest.raises(UserError, match="--partition head: expected attention to all tokens"):
            Partition("head", 2).check(load_split(checkpoint(name), dtype="float32", weights=False).attends)


def test_entries_are_said_to_be_kept_once_for_their_tokens(checkpoint):
    """Of 5 layers: keys of all tokens, two times entries and index keys of 4 tokens, two times entries of 16."""
    found = load_split(checkpoint("deepseek_v4"), dtype="float32", weights=False).describe()
    assert found["kv_bytes_per_token"] == 4 * (5 * 32 + 2 * (32 + 16) // 4 + 2 * 32 // 16)
    assert [t["name"] for t in found["slices"][1]["wire"]] == ["values", "gates", "o"]
    assert {"entry", "index k"} < {t["name"] for t in found["slices"][2]["wire"]}


def test_blocks_have_no_weights_of_index_heads(checkpoint):
    found = load_split(checkpoint("minimax_m3"), dtype="float32", weights=False).describe()
    wire = {t["name"]: t["shape"][1:] for t in found["slices"][1]["wire"]}
    assert wire["index q"] == [2, 16] and wire["index k"] == [1, 16] and "index weights" not in wire
    row = sum(t["bytes_per_token"] for t in found["slices"][1]["wire"])
    assert row == 4 * (2 * 4 * 16 + 2 * 2 * 16 + 3 * 16)


def test_what_is_packed_of_a_prompt_ends_where_choosing_begins(checkpoint):
    shapes = load_split(checkpoint("deepseek_v32"), dtype="float32", weights=False).attends

    class Attention:
        device, tokens_in = torch.device("cpu"), None

        @staticmethod
        def packed_bytes(layer, tokens):
            return 10 * tokens

    before = PromptsBeforeChoice(Attention(), shapes)
    assert [before.packed_bytes(0, n) for n in (7, 40, 700)] == [70, 400, 400]
    assert not PromptKvCache(before, ResumedAttention(lambda _: None, shapes)).keys
