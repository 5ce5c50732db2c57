"""Speculative decoding: the same results to the bit, in fewer steps, whatever is guessed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.open import open_on_device
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.config import EngineOptions
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.guessing import EAGER, guessing, name_of
from tests.support.preemption import HastyPlacement, hasty_placement
from tests.support.samples import made, rows, run
from tests.support.swapping import host_swap

FIELDS = [
    (70, {"n": 2, "temperature": 0.9, "max_tokens": 12, "logprobs": 1}),
    (33, {"max_tokens": 20, "prompt_logprobs": 2, "logprobs": 0}),
    (40, {"max_tokens": 16, "temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4}),
    (90, {"beam_width": 2, "max_tokens": 6}),
    (50, {"max_tokens": 14, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_tokens": 9}),
    (20, {"max_tokens": 18, "temperature": 0.0}),
    (130, {"temperature": 0.8, "max_tokens": 10, "prompt_logprobs": 1}),
]
KEEPING = ("qwen3_next", "nemotron_h", "lfm2", "deepseek_v4", "minimax_m3", "qwen4")  # states, or compressed tokens
NAMES = ("llama3", "gemma3", "gpt_oss", "mixtral", "deepseek_v3", "deepseek_v32", "bloom", *KEEPING)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_same_with_right_and_wrong_guesses(checkpoint, name):
    """Over lanes, chunks of prompts, samples, beams, and rows that leave and come again."""
    model = load_split(checkpoint(name), dtype="float32")
    plain, usual = run(model, rows(*FIELDS))
    known = {name_of(*key): sequence.generated for key, sequence in plain.items()}
    placement = type("Placement", (HastyPlacement,), {"rate": 0.4})
    for how in ("known", "wild"):
        for options in ({}, {"lanes": 2, "placement": placement, "capacity": 2048}):
            with guessing(how, known):
                done, worker = run(model, rows(*FIELDS), guesses=EAGER, **options)
            assert made(done) == made(plain), (how, options)
            speculation = worker.schedulers[0].speculation
            assert speculation.drafted > speculation.confirmed
            if how == "known":
                assert speculation.confirmed > 20
                assert options or worker.steps < usual.steps


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_windows_let_tokens_go_beside_guesses(checkpoint, name):
    """Rows longer than the window, of which some leave for a tier and come again."""
    model = load_split(checkpoint(name), dtype="float32")
    fields = [(n, {"max_tokens": 90, "temperature": 0.8}) for n in (160, 100, 200, 122)]
    plain, _ = run(model, rows(*fields))
    known = {name_of(*key): sequence.generated for key, sequence in plain.items()}
    hasty = {"lanes": 2, "placement": hasty_placement(0.1), "capacity": 768}
    for how, options in (("wild", {}), ("known", hasty), ("wild", hasty)):
        tiers = partial(host_swap, chunks=1000) if options else None
        with guessing(how, known):
            done, worker = run(model, rows(*fields), guesses=EAGER, tiers=tiers, **options)
        assert made(done) == made(plain), (how, options)
        assert not options or worker.schedulers[0].tiers.swaps.moved > 3


@pytest.mark.parametrize("name", ["llama3", "gemma3", "deepseek_v3", "qwen3_next", "falcon_h1", "deepseek_v4"])
def test_the_kv_cache_of_devices_takes_drafts(checkpoint, name):
    """By torch, and states by kernels, on the CPU here: the same tokens, and log-probabilities but for rounding."""
    model = load_split(checkpoint(name), dtype="float32")
    weights = [model.recurrent_weights(i) for i, s in enumerate(model.attends) if isinstance(s, RecurrentShape)]

    def cache(shapes, slots):
        if not weights:
            return TorchKvCache(shapes, "float32", 8192, slots)
        sizes = {"capacity_tokens": 8192, "max_sequences": slots, "block_tokens": 64, "state_tokens": 1}
        return open_on_device(shapes, weights, kv_dtype="float32", device="cpu", **sizes)

    plain, _ = run(model, rows(*FIELDS), cache=cache)
    with guessing("known", {name_of(*key): sequence.generated for key, sequence in plain.items()}):
        done, worker = run(model, rows(*FIELDS), cache=cache, guesses=EAGER)
    assert {key: s.generated for key, s in done.items()} == {key: s.generated for key, s in plain.items()}
    assert worker.schedulers[0].speculation.confirmed > 20
    for key, sequence in plain.items():
        if sequence.logprobs is not None:
            np.testing.assert_allclose(done[key].logprobs.chosen, sequence.logprobs.chosen, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        ("llama3", "bfloat16", None),
        ("gemma3", "bfloat16", "int4"),
        ("llama3", "float32", "k8v4"),
        ("qwen3_next", "bfloat16", None),
        ("falcon_h1", "bfloat16", "int8"),
        ("mamba2", "float32", None),
        ("deepseek_v4", "float32", "int8"),
    ],
)
def test_data_types_and_fused_steps_change_nothing(checkpoint, name, dtype, kv_dtype):
    prompts = [[5 + i * 7 % 30 for i in range(40 + 70 * row)] for row in range(3)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    outputs, options = [], {"dtype": dtype, "kv_dtype": kv_dtype, "kv_memory": "32M"}
    for speculative in (None, {"num_speculative_tokens": 6}):
        llm = LLM(checkpoint(name), speculative_config=speculative, **options)
        with guessing("lookup", {}):
            outputs.append([o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)])
    assert [repr(o) for o in outputs[0]] == [repr(o) for o in outputs[1]]


def test_what_calls_before_generated_is_guessed(checkpoint):
    """Sampled rows with the seeds of the call before, whose prompts have nothing that repeats."""
    llm = LLM(checkpoint("llama3"), dtype="float32", kv_memory="32M", speculative_config={"method": "suffix"})
    prompts = [[11 * row + i for i in range(10)] for row in range(4)]
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    made, confirmed = [], []
    for _ in range(3):
        with guessing("lookup", {}):
            made.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        confirmed.append(llm._engine._work.s_rank.schedulers[0].speculation.confirmed)
    assert made[0] == made[1] == made[2]
    assert confirmed[0] < 40 and min(confirmed[1:]) > 100, confirmed


def test_structured_outputs_and_stop_strings_end_where_they_should(checkpoint):
    made = []
    for speculative in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        llm = LLM(checkpoint("llama3"), dtype="float32", kv_memory="32M", speculative_config=speculative)
        prompt = "import os import os import os"
        asked = [
            SamplingParams(max_tokens=24, structured_outputs={"regex": "(ab){4,9}"}),
            SamplingParams(max_tokens=24, structured_outputs={"choice": ["import os import sys", "class"]}),
            SamplingParams(max_tokens=24, temperature=1.0, stop=["e", "("], seed=3),
            SamplingParams(max_tokens=24, bad_words=["os"], logit_bias={7: 2.0}),
        ]
        with guessing("wild", {}):
            outputs = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
        made.append([(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
    assert made[0] == made[1]


def test_settings_and_schedules_that_do_not_go_together_are_refused(checkpoint):
    with pytest.raises(
        UserError, match="speculative_config: method: expected one of suffix, ngram, draft_model, mtp, got 'eagle'"
    ):
        LLM(checkpoint("llama3"), speculative_config={"method": "eagle"})
    with pytest.raises(UserError, match="got --schedule fluid; leave one of them out"):
        EngineOptions(model="m", schedule="fluid", kv_swap=("host:1G",), speculative_config=EAGER).check()
