"""What sampling parameters do to logits: as transformers' processors and the published formulas, in vLLM's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpcdecode._attn_cpu import supported_isas
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.sequence import Request, SequenceState
from hpcdecode.sampling import draw as draw_module
from hpcdecode.sampling.adjust import adjust
from hpcdecode.sampling.draw import draw, draw_by_torch, largest
from hpcdecode.sampling.sampler import argmax, sample

VOCABULARY = 1000
PROMPT, GENERATED = [5, 7, 7, 900], [8, 7, 8, 8, 42]
EOS = frozenset({2, 3})


def sequence(line=1, generated=GENERATED, bad_word_ids=(), resumed=0, **params):
    bad = list(map(list, bad_word_ids))
    params.setdefault("bad_words", ("x",) * len(bad))
    prompt = Prompt(line, str(line), PROMPT, SamplingParams(**params), bad_word_ids=bad)
    made = SequenceState(Request(prompt, 10**6, lane=0), resumed=resumed)
    made.generated = list(generated)
    return made


def random_logits(rows=6, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def draw_all(logits, params, uniforms):
    return draw(logits, list(range(len(logits))), params, uniforms)


def adjusted(logits, *sequences):
    logits = logits.clone()
    adjust(logits, sequences, EOS)
    return logits


def by_transformers(processors, logits, ids=GENERATED):
    ids = torch.tensor([ids] * len(logits))
    return LogitsProcessorList(processors)(ids, logits.clone())


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = random_logits(1)
    expected = by_transformers([RepetitionPenaltyLogitsProcessor(penalty)], logits, PROMPT + GENERATED)
    assert torch.equal(adjusted(logits, sequence(repetition_penalty=penalty)), expected)


def test_logit_bias_is_that_of_transformers():
    logits = random_logits(1)
    expected = by_transformers([SequenceBiasLogitsProcessor([[[4], 2.5], [[999], -100.0]])], logits)
    assert torch.equal(adjusted(logits, sequence(logit_bias={4: 2.5, 999: -100.0})), expected)


@pytest.mark.parametrize("least", [5, 6])
def test_min_tokens_is_that_of_transformers(least):
    logits = random_logits(1)
    stop = MinNewTokensLengthLogitsProcessor(0, least, [2, 3, 77], device="cpu")
    made = adjusted(logits, sequence(min_tokens=least, stop_token_ids=(77,)))
    assert torch.equal(made, by_transformers([stop], logits))
    assert torch.equal(made, adjusted(logits, sequence(min_tokens=least, stop_token_ids=(77,), ignore_eos=True)))


def test_bad_words_are_those_of_transformers():
    logits, words = random_logits(1), [[11], [8, 42, 12], [8, 8, 13], [42, 14], [8, 7, 8, 8, 42, 15, 16]]
    expected = by_transformers([NoBadWordsLogitsProcessor(words, eos_token_id=[2])], logits)
    assert torch.isinf(expected).sum() == 3
    assert torch.equal(adjusted(logits, sequence(bad_word_ids=words)), expected)


def test_presence_and_frequency_count_the_output_alone():
    logits = random_logits(1)
    counts = torch.from_numpy(np.bincount(GENERATED, minlength=VOCABULARY)).float()
    expected = logits - 0.7 * counts - 1.5 * (counts > 0)
    torch.testing.assert_close(adjusted(logits, sequence(frequency_penalty=0.7, presence_penalty=1.5)), expected)


def test_all_of_them_apply_in_the_order_of_vllm_and_row_by_row():
    logits = random_logits(3)
    everything = {
        "bad_word_ids": [[42, 14]],
        "min_tokens": 9,
        "logit_bias": {8: 3.0, 2: 50.0},
        "repetition_penalty": 1.4,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.0,
    }
    expected = logits.clone()
    expected[1, [14, 2, 3]] = float("-inf")
    expected[1, 8] += 3.0
    expected[1:2] = by_transformers(
        [RepetitionPenaltyLogitsProcessor(1.4)], expected[1:2], ids=PROMPT + GENERATED
    ) - torch.from_numpy(np.bincount(GENERATED, minlength=VOCABULARY) * -0.5 + np.isin(np.arange(1000), GENERATED))
    made = adjusted(logits, sequence(), sequence(**everything), sequence())
    torch.testing.assert_close(made, expected)
    greedy = sample(logits, [sequence(), sequence(**everything), sequence()], EOS)
    assert greedy == expected.argmax(dim=1).tolist()


def test_a_resumed_sequence_counts_as_if_never_interrupted():
    logits = random_logits(1)
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2, "min_tokens": 6}
    whole = adjusted(logits, sequence(**params, bad_word_ids=[[8, 8, 42, 9]]))
    assert torch.equal(adjusted(logits, sequence(**params, bad_word_ids=[[8, 8, 42, 9]], resumed=3)), whole)


def test_counts_follow_a_sequence_that_grows():
    logits, grown = random_logits(1), sequence(frequency_penalty=0.5, repetition_penalty=1.1)
    for token in np.random.default_rng(0).integers(0, 30, 60).tolist():
        made = adjusted(logits, grown)
        anew = sequence(generated=grown.generated, frequency_penalty=0.5, repetition_penalty=1.1)
        assert torch.equal(made, adjusted(logits, anew))
        grown.generated.append(token)


FILTERS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    "top_k": ({"top_k": 20}, [TopKLogitsWarper(20)]),
    "top_k of one": ({"top_k": 1}, [TopKLogitsWarper(1)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "small top_p": ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
    "large top_p": ({"top_p": 0.9999}, [TopPLogitsWarper(0.9999)]),
    "all": (
        {"temperature": 2.0, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
        [TemperatureLogitsWarper(2.0), MinPLogitsWarper(0.01), TopKLogitsWarper(40), TopPLogitsWarper(0.9)],
    ),
}


BOUNDED = [((), name) for name in FILTERS] + [((4, 64), "all"), ((4, 64), "top_p"), ((128,), "large top_p")]


@pytest.mark.parametrize(("bounds", "name"), BOUNDED, ids=str)
def test_a_distribution_is_that_of_transformers(monkeypatch, name, bounds):
    """Evenly spaced numbers in place of random ones give every token its share of them, to within one."""
    params, warpers = FILTERS[name]
    monkeypatch.setattr(draw_module, "_BOUNDS", bounds)
    logits, count = random_logits(1, seed=3), 20_000
    expected = torch.softmax(by_transformers(warpers, logits), dim=-1)[0].double().numpy() * count
    params = SamplingParams(**{"temperature": 1.0, **params})
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for way in (draw_all, draw_by_torch):
        tokens = torch.cat([way(logits.expand(1000, -1), [params] * 1000, u) for u in uniforms.split(1000)])
        made = np.bincount(tokens.numpy(), minlength=VOCABULARY)
        assert np.abs(made - expected).max() < 1.05
        assert not made[expected == 0].any()


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_it(name):
    params, warpers = FILTERS[name]
    logits, draws = random_logits(1, seed=4)[:, :12], 6_000
    params = {"temperature": 1.0, **params, **({"top_k": 5} if params.get("top_k", 0) > 1 else {})}
    warpers = [TopKLogitsWarper(5) if isinstance(w, TopKLogitsWarper) and w.top_k > 1 else w for w in warpers]
    expected = torch.softmax(by_transformers(warpers, logits), dim=-1)[0].double().numpy() * draws
    rows = [sequence(line, seed=9, **params) for line in range(1, draws + 1)]
    made = np.bincount(sample(logits.expand(draws, -1), rows), minlength=12)
    seen = expected > 0
    assert not made[~seen].any()
    assert ((made - expected)[seen] ** 2 / expected[seen]).sum() < 31.3  # 0.999 quantile, 11 degrees of freedom


def test_top_k_keeps_what_equals_the_last():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    rows = [sequence(line, temperature=1.0, top_k=2) for line in range(1, 200)]
    assert set(sample(logits.expand(199, -1), rows)) == {0, 2, 3, 4}


@pytest.mark.parametrize("isa", [name for name in ("generic", "avx2", "avx512") if name in supported_isas()])
@pytest.mark.parametrize("bounds", [(), (2,), (8, 100), (128,)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "steep"])
def test_torch_draws_the_same_tokens(monkeypatch, isa, bounds, kind):
    """Ties: logits of few different values, where a bound that cuts through equal ones is not enough."""
    logits = random_logits(64, seed=5)
    logits = {"plain": logits, "ties": (logits * 2).round() / 2, "flat": logits / 100, "steep": logits * 30}[kind]
    choices = [f for f, _ in FILTERS.values()]
    params = [SamplingParams(**{"temperature": 1.0, **choices[line % len(choices)]}) for line in range(64)]
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    monkeypatch.setattr(draw_module, "_BOUNDS", bounds)
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    expected = draw_by_torch(logits, params, uniforms)
    assert torch.equal(draw_all(logits, params, uniforms), expected)
    backwards = list(range(63, -1, -1))
    assert torch.equal(draw(logits.flip(0), backwards, params, uniforms), expected)
    narrow = logits.bfloat16()
    assert torch.equal(draw_all(narrow, params, uniforms), draw_all(narrow.float(), params, uniforms))


def test_a_forbidden_token_is_never_drawn():
    logits = torch.full((200, 1001), float("-inf"))
    logits[:, [5, 7]] = 0.0
    for params in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        rows = [sequence(line, temperature=1.0, **params) for line in range(200)]
        assert set(sample(logits, rows)) == {5, 7}


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 1000, 4096, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logits_are_those_of_a_sort(vocabulary, dtype):
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    logits[0] = float("-inf")
    logits[0, 2] = 1.0
    assert torch.equal(argmax(logits.to(dtype)), logits.sort(dim=1, descending=True, stable=True).indices[:, 0])
    for count in (1, 2, 30, 128, vocabulary):
        values, ids = largest(logits, count)
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, ordered[:, :count])
        sure = values > values[:, -1:]
        assert torch.equal(ids[sure], order[:, : values.shape[1]][sure])


def test_mixed_rows_draw_as_if_alone():
    logits = random_logits(96, seed=6)
    choices = [f for f, _ in FILTERS.values()] + [{"temperature": 0.0}, {"repetition_penalty": 1.3, "temperature": 0.0}]
    rows = [sequence(line, **{"temperature": 1.0, **choices[line % len(choices)]}) for line in range(96)]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
