"""Rows of several samples through real slices and a real store: each sample is what it is when it runs alone."""

from __future__ import annotations

import pytest

from hpcdecode.model import load_split
from hpcdecode.schedule import admission
from tests.support.samples import rows, run


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


MIXED = [
    (70, {"n": 3, "temperature": 0.9, "max_tokens": 12}),
    (64, {"n": 2, "temperature": 1.2, "max_tokens": 9, "top_k": 50}),
    (5, {"n": 4, "temperature": 0.7, "max_tokens": 1}),
    (130, {"n": 1, "temperature": 0.8, "max_tokens": 14}),
    (20, {"n": 3, "temperature": 0.0, "max_tokens": 6}),
]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_sample_is_what_it_is_alone(model, monkeypatch, lanes):
    together, _ = run(model, rows(*MIXED), lanes=lanes)
    assert sorted(together) == [(i, s) for i, (_, p) in enumerate(MIXED, 1) for s in range(p["n"])]
    start_request = admission.start_request

    def alone(prompt, *arguments):
        request = start_request(prompt, *arguments)
        request.sequences = [s for s in request.sequences if s.sample == sample]
        return request

    monkeypatch.setattr(admission, "start_request", alone)
    for sample in range(4):
        prompts = [p for p in rows(*MIXED) if p.params.n > sample]
        single, _ = run(model, prompts)
        for key, sequence in single.items():
            assert sequence.generated == together[key].generated, key
    assert len({tuple(together[1, s].generated) for s in range(3)}) == 3
    assert len({tuple(together[5, s].generated) for s in range(3)}) == 1


@pytest.mark.parametrize("steps", [2, 6, 9, 13])
def test_an_interrupted_family_goes_on_and_keeps_what_is_finished(model, steps):
    whole, _ = run(model, rows(*MIXED))
    # A token that sample 1 of row 1 makes early ends it there, so that its family is finished in parts.
    end = whole[1, 1].generated[2]
    fields = [(length, {**params, "stop_token_ids": (end,)}) for length, params in MIXED]
    whole, _ = run(model, rows(*fields))
    done, worker = run(model, rows(*fields), steps=steps)
    prompts = rows(*fields)
    lines = {line for line, _ in done}
    assert all((line, s) in done for line in lines for s in range(prompts[line - 1].params.n))
    for entry in worker.unfinished():
        assert entry.token_ids == whole[entry.line, entry.sample].generated[: len(entry.token_ids)]
        prompts[entry.line - 1].unfinished.append(entry)
    rest, _ = run(model, [p for p in prompts if p.line not in lines])
    assert {key: s.generated for key, s in (done | rest).items()} == {key: s.generated for key, s in whole.items()}
    assert {key: s.finish_reason for key, s in (done | rest).items()} == {
        key: s.finish_reason for key, s in whole.items()
    }
