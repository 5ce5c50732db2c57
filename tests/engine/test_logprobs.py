"""Log-probabilities: those of transformers' logits, whatever is batched together, and what results hold of them."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

import hpcdecode
from hpcdecode.data.results.export import export
from hpcdecode.data.results.join import join
from hpcdecode.data.results.writer import Result, ResultsWriter
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.sampling.logprobs import logprobs
from hpcdecode.system.model_path import demo_directory
from tests.support.samples import rows, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_come_first_and_equal_ones_by_id(dtype):
    logits = (torch.randn(400, 9000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    logits[0, [7, 70, 700]] = logits[0].max() + 1
    tokens, counts = torch.randint(9000, (400,)).tolist(), [i % 6 for i in range(400)]
    expected = logits.float().log_softmax(dim=-1)
    ordered = expected.sort(dim=-1, descending=True, stable=True)
    for row, (chosen, top_ids, top) in enumerate(logprobs(logits, tokens, counts)):
        assert chosen == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        torch.testing.assert_close(torch.tensor(top), ordered.values[row, : counts[row]], atol=1e-5, rtol=0)
        assert len(top_ids) == counts[row]
        if row == 0 or dtype is torch.float32:
            assert top_ids == ordered.indices[row, : counts[row]].tolist()


ASKED = [
    (90, {"max_tokens": 8, "logprobs": 5, "prompt_logprobs": 3}),
    (20, {"max_tokens": 12}),
    (33, {"max_tokens": 5, "logprobs": 0, "temperature": 0.9, "n": 2, "prompt_logprobs": 0}),
    (1, {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 2, "repetition_penalty": 1.5}),
]


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint("llama3"), dtype=torch.float32).eval()


def require_parity(model, sequences):
    for (line, sample), sequence in sequences.items():
        params, prompt = sequence.prompt.params, sequence.prompt.token_ids
        ids = torch.tensor(prompt + sequence.generated)
        with torch.inference_mode():
            expected = model(ids[None]).logits[0].log_softmax(dim=-1)
        first = len(prompt) - 1
        assert (sequence.logprobs is None) == (params.logprobs is None)
        if sequence.logprobs is not None:
            require_equal(sequence.logprobs, expected[first:-1], ids[first + 1 :], params.logprobs)
        assert (sequence.prompt_logprobs is None) == (params.prompt_logprobs is None or sample > 0), line
        if sequence.prompt_logprobs is not None:
            held = sequence.prompt_logprobs
            assert np.isnan(held.chosen[0]) and held.top_ids[0] == []
            rest = Logprobs(held.chosen[1:], held.top_ids[1:], held.top[1:])
            require_equal(rest, expected[:first], ids[1 : first + 1], params.prompt_logprobs)


def require_equal(held, expected, ids, count):
    assert len(held) == len(held.top_ids) == len(held.top) == len(ids)
    chosen = expected.gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(held.chosen), chosen, atol=2e-4, rtol=0)
    for at, (top_ids, top) in enumerate(zip(held.top_ids, held.top, strict=True)):
        assert len(top_ids) == len(top) == count
        torch.testing.assert_close(torch.tensor(top), expected[at].topk(count).values, atol=2e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(top), expected[at, top_ids], atol=2e-4, rtol=0)


def test_equal_tokens_are_chosen_as_if_the_row_were_alone():
    """Logits in few steps, as bfloat16 has them: many are equal to the least of those that are kept."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)).mul(2).round().div(2).bfloat16()
    counts = [row % 6 for row in range(40)]
    together = list(logprobs(logits, [7] * 40, counts))
    alone = [next(logprobs(logits[[row]], [7], [count])) for row, count in enumerate(counts)]
    assert [entry[1] for entry in together] == [entry[1] for entry in alone]
    assert together == alone


def test_parity_with_transformers(checkpoint, reference):
    made, _ = run(load_split(checkpoint("llama3"), dtype="float32"), rows(*ASKED))
    assert len(made) == 5
    require_parity(reference, made)


def test_an_interrupted_row_keeps_its_log_probabilities(checkpoint, reference):
    model = load_split(checkpoint("llama3"), dtype="float32")
    done, worker = run(model, rows(*ASKED), steps=8)
    prompts, left = rows(*ASKED), worker.unfinished()
    assert any(entry.logprobs for entry in left)
    for entry in left:
        prompts[entry.line - 1].unfinished.append(entry)
    rest, _ = run(model, [p for p in prompts if (p.line, 0) not in done])
    require_parity(reference, done | rest)


def result(line, sample=0, *, top=None, prompt_top=None, count=4):
    """A row whose numbers follow from its line; `top`, `prompt_top`: likely tokens kept, None for no logprobs."""
    ids, prompt = [line * 10 + i for i in range(count)], list(range(line % 3 + 1))

    def held(tokens, width):
        top_ids = [[t + j for j in range(width)] for t in tokens]
        return Logprobs([-t / 8 for t in tokens], top_ids, [[-j / 4 - t for j in range(width)] for t in tokens])

    made = Result(line, f"id-{line}", sample, "text", "stop", len(prompt), ids)
    made.logprobs = None if top is None else held(ids, top)
    made.cumulative_logprob = float("nan") if top is None else made.logprobs.total
    if prompt_top is not None:
        rest = held(prompt[1:], prompt_top)
        made.prompt_token_ids = prompt
        made.prompt_logprobs = Logprobs([float("nan"), *rest.chosen], [[], *rest.top_ids], [[], *rest.top])
    return made


def results():
    made = [result(line) for line in range(1, 21)]
    made += [result(line, top=line % 4) for line in range(21, 40)]
    made += [result(line, top=2, prompt_top=line % 3) for line in range(40, 60)]
    return made + [result(line, prompt_top=3) for line in range(60, 70)]


def write(path, made, *, complete, segment_rows=6):
    attributes = {"identity": {}, "model": {"path": str(demo_directory() / "model")}}
    out = ResultsWriter(path, attributes=attributes, segment_rows=segment_rows, checkpoint_seconds=1000)
    for row in made:
        out.add(row)
    out.close(complete=complete, summary={})


def require_same(path, made):
    with hpcdecode.read(path) as file:
        found = list(file)
        assert [row["line"] for row in found] == [row.line for row in made]
        for row, expected in zip(found, made, strict=True):
            assert row["token_ids"].tolist() == expected.token_ids
            require_held(row, "logprobs", "top_token_ids", "top_logprobs", expected.logprobs)
            names = ("prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs")
            held = expected.prompt_logprobs
            if held is not None and len(held) == 1:
                held = None  # nothing is known of a prompt's first token
            require_held(row, *names, held)
            total = row.get("cumulative_logprob")
            if expected.logprobs is not None:
                assert total == pytest.approx(sum(expected.logprobs.chosen), rel=1e-6)
            else:
                assert total is None or np.isnan(total)


def require_held(row, chosen, top_ids, top, expected):
    if expected is None:
        assert all(row.get(name) is None for name in (chosen, top_ids, top))
        return
    assert np.array_equal(row[chosen], np.array(expected.chosen, np.float32), equal_nan=True)
    width = expected.width
    if not width:
        assert row.get(top_ids) is None and row.get(top) is None
        return
    for at in range(len(expected)):
        count = len(expected.top_ids[at])
        assert row[top_ids][at].tolist() == expected.top_ids[at] + [-1] * (width - count)
        assert row[top][at].tolist()[:count] == expected.top[at]


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("segment_rows", [6, 50])
def test_a_file_gives_back_what_each_row_asked_for(tmp_path, complete, segment_rows):
    made = results()
    order = np.random.default_rng(0).permutation(len(made))
    write(tmp_path / "out.h5", [made[i] for i in order], complete=complete, segment_rows=segment_rows)
    require_same(tmp_path / "out.h5", made)
    with h5py.File(tmp_path / "out.h5") as file:
        group = file["rows"]
        assert group["top_logprobs"].shape == (len(group["token_ids"]), 3)
        assert group["prompt_top_logprobs"].shape == (len(group["prompt_token_ids"]), 3)
        assert group["prompt_offsets"][0] == 0 and group["prompt_offsets"][-1] == len(group["prompt_logprobs"])
        if complete:
            assert group["top_logprobs"].compression == "gzip" and group["top_logprobs"].chunks


def test_a_file_has_no_columns_that_no_row_asked_for(tmp_path):
    plain, scored = results()[:20], results()[20:40]
    write(tmp_path / "a.h5", plain, complete=True)
    write(tmp_path / "b.h5", scored, complete=False)
    with h5py.File(tmp_path / "a.h5") as file:
        assert not {"logprobs", "top_logprobs", "prompt_offsets", "cumulative_logprob"} & set(file["rows"])
    with h5py.File(tmp_path / "b.h5") as file:
        assert {"logprobs", "top_logprobs", "cumulative_logprob"} <= set(file["rows"])
    join(str(tmp_path / "both.h5"), [str(tmp_path / "a.h5"), str(tmp_path / "b.h5")])
    require_same(tmp_path / "both.h5", plain + scored)


def test_exports(tmp_path):
    path = str(tmp_path / "out.h5")
    made = [result(1), result(2, top=2), result(3, top=0)]
    write(path, made, complete=True)
    out = export(path, str(tmp_path / "o.jsonl"), "jsonl")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["logprobs"] for line in lines] == [None, *(r.logprobs.chosen for r in made[1:])]
    assert [line["top_token_ids"] for line in lines] == [None, made[1].logprobs.top_ids, None]
    out = export(path, str(tmp_path / "o.parquet"), "parquet")
    table = pyarrow.parquet.read_table(out).to_pylist()
    assert [row["top_logprobs"] for row in table] == [None, made[1].logprobs.top, None]
    out = export(path, str(tmp_path / "chat.jsonl"), "openai-batch")
    first, second, third = (json.loads(x)["response"]["body"]["choices"][0] for x in out.read_text().splitlines())
    assert first["logprobs"] is None
    content = second["logprobs"]["content"]
    assert [c["logprob"] for c in content] == made[1].logprobs.chosen
    assert all(bytes(t["bytes"]).decode() == t["token"] for c in content for t in [c, *c["top_logprobs"]] if t["bytes"])
    assert [len(c["top_logprobs"]) for c in content] == [2] * 4
    assert [c["top_logprobs"] for c in third["logprobs"]["content"]] == [[]] * 4
    out = export(path, str(tmp_path / "text.jsonl"), "openai-batch", endpoint="completions")
    held = json.loads(out.read_text().splitlines()[1])["response"]["body"]["choices"][0]["logprobs"]
    assert held["token_logprobs"] == made[1].logprobs.chosen and len(held["text_offset"]) == 4
    assert "".join(held["tokens"])[held["text_offset"][2] :].startswith(held["tokens"][2])
    with pytest.raises(UserError, match=r"expected some of the columns .* got prompt_logprobs"):
        export(path, str(tmp_path / "x.jsonl"), "jsonl", columns=["prompt_logprobs"])
