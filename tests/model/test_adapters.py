"""Adapters that rows choose: each row is that of the model with its adapter merged, whatever the others choose."""

from __future__ import annotations

import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.engine.executors import FusedExecutor
from hpcdecode.errors import PromptError, UserError
from hpcdecode.model import load_split
from hpcdecode.model.lower import packed_weights, quantize
from tests.support.adapters import OTHERS, adapter, edit, four, of_first_tokens, theirs
from tests.support.isas import OWN_GEMMS, use_isa

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
IDS = [5, 77, 300, 12, 9, 450, 33, 2]


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """The directories of four adapters of a Llama, by name."""
    return four(checkpoint("llama2"), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(checkpoint, adapters):
    return LLM(checkpoint("llama2"), lora=adapters, dtype="float32", kv_memory="16M", threads=1)


def rows_of(names, *, count=3, length=9):
    """Rows of every adapter and of none, in turn."""
    return [
        {"prompt_token_ids": [(7 * i + 3 * j) % 500 + 2 for j in range(length + i)], **({"lora": name} if name else {})}
        for i in range(count)
        for name in (*names, None)
    ]


def tokens(outputs):
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def expected_of(model, rows, name, params=GREEDY):
    """The tokens of the merged model for the rows that choose an adapter, as transformers generates them."""
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"]])
        made = model.generate(ids, max_new_tokens=10, min_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        found.append([made.tolist()])
    return found


def test_greedy_tokens_are_those_of_the_merged_models(llm, checkpoint, adapters):
    rows = rows_of(adapters)
    found = tokens(llm.generate(rows, GREEDY, use_tqdm=False))
    assert len({str(each) for each in found}) > 12
    for number, (name, folder) in enumerate(adapters.items()):
        assert found[number :: len(adapters) + 1] == expected_of(
            theirs(checkpoint("llama2"), folder).eval(), rows[number :: len(adapters) + 1], name
        )
    plain = LLM(checkpoint("llama2"), dtype="float32", threads=1).generate(rows[4::5], GREEDY, use_tqdm=False)
    assert found[4::5] == tokens(plain)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name, checkpoint, tmp_path):
    """Fused projections, transposed weights, layers of experts, another gate."""
    model = checkpoint(name)
    made = {
        f"a{i}": str(adapter(model, tmp_path / f"a{i}", i, lora_alpha=8, **how)) for i, how in enumerate(OTHERS[name])
    }
    rows = rows_of(made, count=2)
    found = tokens(LLM(model, lora=made, dtype="float32", threads=1).generate(rows, GREEDY, use_tqdm=False))
    for i, folder in enumerate(made.values()):
        assert found[i::3] == expected_of(theirs(model, folder).eval(), rows[i::3], folder)
    assert found[2::3] == tokens(LLM(model, dtype="float32", threads=1).generate(rows[2::3], GREEDY, use_tqdm=False))


def test_samples_beams_prefixes_and_scores_are_those_of_the_merged_model(llm, checkpoint, adapters):
    """Rows with one long beginning share it with rows of their own adapter alone."""
    begin = [(5 * j) % 400 + 3 for j in range(160)]
    kinds = [{}, {"n": 3, "temperature": 0.9, "seed": 4}, {"beam_width": 3}, {"prompt_logprobs": 0, "logprobs": 1}]
    rows = [
        {"prompt_token_ids": [*begin, 7 + i], "max_tokens": 6, "ignore_eos": True, "lora": name, **kind}
        for i, kind in enumerate(kinds)
        for name in (*adapters, None)
    ]
    found = llm.generate(rows, use_tqdm=False)
    ends = {"continuation_token_ids": [[9, 33, 4], [70]]}
    asked = [{"prompt_token_ids": row["prompt_token_ids"], "lora": row["lora"], **ends} for row in rows[:5]]
    scored = llm.score(asked, use_tqdm=False)
    for number, folder in enumerate((*adapters.values(), None)):
        own = LLM(checkpoint("llama2"), lora=folder, dtype="float32", kv_memory="16M", threads=1)
        mine = [{name: value for name, value in row.items() if name != "lora"} for row in rows[number::5]]
        assert tokens(own.generate(mine[:1] + mine[2:], use_tqdm=False)) == tokens(
            [found[number], *found[number + 10 :: 5]]
        )
        (one,) = own.score([{"prompt_token_ids": mine[0]["prompt_token_ids"], **ends}], use_tqdm=False)
        for a, b in zip(one.outputs, scored[number].outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_is_the_same_alone_and_in_any_company(weights, checkpoint, adapters):
    """To the bit; rows without an adapter have the bits of a model without adapters."""
    offered = {"int8": quantize.exact(), "int4": packed_weights.packs(torch.bfloat16, "int4")}
    if not offered.get(weights, True):
        pytest.skip("this CPU has no such products")
    dtype = "float32" if weights == "float32" else "bfloat16"
    options = {"dtype": dtype, "kv_memory": "16M"} | ({"weights": weights} if weights != dtype else {})
    rows = rows_of(adapters, count=5)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)

    def bits(outputs):
        return [[(t, row[t]) for t, row in zip(o.token_ids, o.logprobs, strict=True)] for (o,) in outputs]

    together = LLM(checkpoint("llama2"), lora=adapters, threads=2, batch=32, **options)
    found = bits(each.outputs for each in together.generate(rows, params, use_tqdm=False))
    alone = [o.outputs for row in rows[3:8] for o in together.generate([row], params, use_tqdm=False)]
    assert bits(alone) == found[3:8]
    few = bits(each.outputs for each in together.generate(rows[::-3], params, use_tqdm=False))
    assert few == found[::-3]
    plain = LLM(checkpoint("llama2"), threads=1, batch=32, **options)
    assert bits(each.outputs for each in plain.generate(rows[4::5], params, use_tqdm=False)) == found[4::5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", [*OWN_GEMMS, "generic"])
def test_every_instruction_set_computes_what_the_plain_graph_does(isa, dtype, checkpoint, adapters, monkeypatch):
    use_isa(monkeypatch, isa)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = load_split(checkpoint("llama2"), dtype=dtype, adapters=adapters)
    plain = load_split(checkpoint("llama2"), dtype=dtype)
    ids = [(11 * i) % 500 + 2 for i in range(70)]
    of_tokens = torch.tensor([(i * i + i // 3) % 5 - 1 for i in range(70)])
    found = of_first_tokens(model, ids, of_tokens)
    none = of_tokens < 0
    assert none.any() and torch.equal(found[none], of_first_tokens(plain, ids)[none])
    assert torch.equal(of_first_tokens(model, ids), of_first_tokens(plain, ids))
    for number, folder in enumerate(adapters.values()):
        merged = load_split(checkpoint("llama2"), dtype="float32", lora=folder)
        own = of_tokens == number
        expected = of_first_tokens(merged, ids)[own]
        near = dict(rtol=1e-3, atol=1e-3) if dtype == "float32" else dict(rtol=0.1, atol=0.2)
        torch.testing.assert_close(found[own].float(), expected, **near)
        one = next(i for i, each in enumerate(own.tolist()) if each)
        assert torch.equal(of_first_tokens(model, ids[one : one + 1], of_tokens[one : one + 1])[0], found[one])


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
DAMAGED = {
    "shape": (
        lambda t: t.update({f"{Q}B.weight": torch.zeros(7, 4)}),
        r"q_proj' of shape \[64, 64\], got .* \[7, 64\]",
    ),
    "module": (
        lambda t: t.update(
            {(Q + own).replace(".0.", ".9.") + ".weight": t[f"{Q}{own}.weight"].clone() for own in "AB"}
        ),
        "got 'model.layers.9.self_attn.q_proj', which it does not have",
    ),
    "embedding": (
        lambda t: t.update(
            {
                "base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.embed_tokens.lora_B.weight": torch.zeros(512, 4),
            }
        ),
        "projections of tokens, got 'model.embed_tokens', which is none; mend it, or merge it",
    ),
    "head": (
        lambda t: t.update(
            {f"base_model.model.lm_head.lora_{own}.weight": t[f"{Q}{own}.weight"].clone() for own in "AB"}
        ),
        r"'lm_head' of shape \[512, 64\], got an update of \[64, 64\]",
    ),
    "whole": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(512, 64)}),
        "no tensors but the model's own, got another 'lm_head.weight'",
    ),
    "not finite": (lambda t: t[f"{Q}A.weight"].fill_(float("nan")), "lora_A of model.layers.0.self_attn.q_proj.weight"),
    "one not finite": (
        lambda t: t[f"{Q}B.weight"][-1, -1:].fill_(float("inf")),
        "mine=.*: expected finite numbers, got others in lora_B of model.layers.0.self_attn.q_proj.weight times 2",
    ),
    "too large": (
        lambda t: t[f"{Q}B.weight"][-1, -1:].fill_(3e38),
        "expected finite numbers, got others in lora_B of model.layers.0.self_attn.q_proj.weight times 2, its scale",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_adapter_that_does_not_fit_is_refused(name, checkpoint, tmp_path):
    change, expected = DAMAGED[name]
    folder = adapter(checkpoint("llama2"), tmp_path / "a", target_modules=["q_proj"], r=4, lora_alpha=8)
    edit(folder, change)
    with pytest.raises(UserError, match=expected):
        load_split(checkpoint("llama2"), dtype="float32", adapters={"mine": str(folder)})


def test_magnitudes_are_refused(checkpoint, tmp_path):
    folder = adapter(checkpoint("llama2"), tmp_path / "a", target_modules=["q_proj"], r=4, use_dora=True)
    with pytest.raises(UserError, match=r"no magnitudes \(use_dora\), which rows cannot choose"):
        load_split(checkpoint("llama2"), dtype="float32", adapters={"a": str(folder)})


def test_no_directory_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match="expected the directory of a PEFT adapter, found none"):
        load_split(checkpoint("llama2"), dtype="float32", adapters={"a": str(tmp_path / "none")})


def test_a_row_that_names_no_adapter_is_refused(llm, checkpoint):
    for value, expected in (("sql", 'one of all, attention, mlp, one-layer, got "sql"'), (3, "the name of an adapter")):
        with pytest.raises(PromptError, match=f"prompt 1: lora: expected {expected}"):
            llm.generate([{"prompt_token_ids": IDS, "lora": value}], GREEDY, use_tqdm=False)
    with pytest.raises(PromptError, match="lora: expected one of all"):
        llm.generate("a", GREEDY, use_tqdm=False, lora="sql")
    plain = LLM("demo", threads=1, kv_memory="1M")
    with pytest.raises(PromptError, match='lora: expected none, as the job has no --lora NAME=DIR, got "sql"'):
        plain.generate("a", GREEDY, use_tqdm=False, lora="sql")


def test_an_adapter_for_all_prompts_of_a_call(llm):
    row = {"prompt_token_ids": IDS}
    own = llm.generate([{**row, "lora": "mlp"}, row, {**row, "lora": "all"}], GREEDY, use_tqdm=False)
    found = llm.generate([row, {**row, "lora": "all"}], GREEDY, use_tqdm=False, lora="mlp")
    assert tokens(found) == [tokens(own)[0], tokens(own)[2]] and tokens(own)[0] != tokens(own)[1]
    assert tokens(llm.generate(iter([row]), GREEDY, use_tqdm=False, lora="mlp")) == tokens(own)[:1]


def test_steps_that_only_decode_are_one_native_call(llm, adapters, monkeypatch):
    """The first step prefills all prompts, and the others decode."""
    calls, run_fused = [], FusedExecutor.run

    def noted(self, lane, link, inputs):
        calls.append(inputs.tokens.adapters)
        return run_fused(self, lane, link, inputs)

    monkeypatch.setattr(FusedExecutor, "run", noted)
    llm.generate(rows_of(adapters), GREEDY, use_tqdm=False)
    assert len(calls) == GREEDY.max_tokens - 1
    assert calls[0].tolist() == [0, 1, 2, 3, -1] * 3
    llm.generate(rows_of([]), GREEDY, use_tqdm=False)
    assert calls[-1] is None
