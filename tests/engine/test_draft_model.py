"""Speculative decoding with a second model: the same results to the bit, whatever it guesses, and all of its own."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache, open_on_device
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.engine import draft_model, drafting, followed
from hpcdecode.engine.draft_model import DraftModel
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.requests.sequence import SequenceState
from hpcdecode.schedule.model_drafts import AskedDraft
from hpcdecode.system.timeline import Timeline
from tests.support.drafts import FEATURES, PARAMS, emptied, generated, opened, sequence_of
from tests.support.recorders import EagerRecorder, as_on_a_device


@pytest.mark.parametrize("name", ["llama3", "gemma3", "deepseek_v3", "bloom", "gpt_oss", "deepseek_v32"])
def test_a_model_is_right_about_itself(checkpoint, name):
    """Greedy and drawn: draws of both take the same random numbers."""
    plain, usual = generated(opened(checkpoint(name)))
    llm = opened(checkpoint(name), checkpoint(name))
    made, worker = generated(llm)
    speculation = worker.schedulers[0].speculation
    assert made == plain
    assert speculation.confirmed == speculation.drafted > 90 and worker.steps < usual.steps / 2
    emptied(llm)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"batch": 2, "dtype": "bfloat16"},
    ],
)
def test_rows_are_the_same_with_a_model_that_is_often_wrong(checkpoint, options):
    """One of fewer bits, over rows with penalties, grammars and ends of their own."""
    for params in (PARAMS, FEATURES):
        plain, _ = generated(opened(checkpoint("llama3"), **options), params=params)
        llm = LLM(
            checkpoint("llama3"),
            speculative_config={"model": checkpoint("llama3"), "quantization": "int4"},
            **{"dtype": "float32", "kv_memory": "32M", **options},
        )
        for _ in range(2):
            made, worker = generated(llm, params=params)
            speculation = worker.schedulers[0].speculation
            assert made == plain and 0 < speculation.confirmed < speculation.drafted
            emptied(llm)


def test_sequences_without_room_have_no_drafts(checkpoint):
    """Room for two of eight sequences at once, and prompts that are read over several steps."""
    path = checkpoint("llama3")
    plain, usual = generated(opened(path))
    tight = patch.object(drafting, "draft_bytes", lambda *_: 4 * 64 * 2048)
    with tight, patch.object(draft_model, "_READ_AT_ONCE", 16):
        llm = opened(path, path)
        made, worker = generated(llm)
    speculation = worker.schedulers[0].speculation
    assert made == plain
    assert speculation.confirmed == speculation.drafted > 10 and worker.steps <= usual.steps
    emptied(llm)


def test_what_rows_begin_with_is_read_once(checkpoint):
    """Rows about one document, and samples of a row; the tokens that are read are counted."""
    path, document = checkpoint("llama3"), [5 + i * 11 % 90 for i in range(200)]
    prompts = [[*document, *range(20 + 5 * row, 40 + 3 * row)] for row in range(4)]
    params = [SamplingParams(max_tokens=20, temperature=0.9, seed=row, n=2, ignore_eos=True) for row in range(4)]
    plain, _ = generated(opened(path), prompts, params)
    read, extend = [], CpuKvCache.extend

    def counted(self, slots, counts):
        read.append((self, int(np.sum(counts))))
        extend(self, slots, counts)

    llm = opened(path, path)
    with patch.object(CpuKvCache, "extend", counted):
        made, worker = generated(llm, prompts, params)
    speculation, own = worker.schedulers[0].speculation, emptied(llm)
    assert made == plain and speculation.confirmed == speculation.drafted > 100
    assert sum(tokens for kv_cache, tokens in read if kv_cache is own.kv_cache) < 4 * 20 + 2 * 200 + 8 * 25


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_recorded_slices_guess_the_same(checkpoint, monkeypatch, name):
    """As on a GPU, with a stand-in for CUDA graphs."""
    as_on_a_device(monkeypatch)
    drafts = []
    for recorder in (None, EagerRecorder()):
        model = load_split(checkpoint(name), dtype="float32")
        model.recorder = recorder
        kv_cache = TorchKvCache(attention_shapes(model.attends), "float32", 1024, 4)
        guess = DraftModel(model, kv_cache, 4, model.vocab_size, Timeline(), 1024)
        asked = [AskedDraft(sequence_of([9 + i, *range(20 + i)], [12], line=i), 8, []) for i in range(3)]
        with torch.inference_mode():
            drafts.append([guess.continued(asked) for _ in range(3)])
    assert drafts[0] == drafts[1] and recorder.replayed > 10


@pytest.fixture
def on_device(checkpoint):
    """A second model whose KV cache is that of a GPU, emulated."""
    model = load_split(checkpoint("llama3"), dtype="float32")
    shapes = attention_shapes(model.attends)
    sizes = {"capacity_tokens": 512, "max_sequences": 2, "block_tokens": 64, "state_tokens": 0}
    kv_cache = open_on_device(shapes, (), kv_dtype="float32", device="cpu", **sizes)
    return DraftModel(model, kv_cache, 2, model.vocab_size, Timeline(), 1024)


def test_it_goes_on_from_what_was_right(on_device):
    """Guesses that came stay in the KV cache, those that did not are dropped; the result is that of a new sequence."""
    ids = [7, 8, 9, 30, 31]
    with torch.inference_mode():
        (whole,) = on_device.continued([AskedDraft(sequence_of(ids, [12]), 8, [])])
        for right in range(5):
            sequence = sequence_of(ids, [12], line=2)
            (draft,) = on_device.continued([AskedDraft(sequence, 4, [])])
            assert draft == whole[:4]
            sequence.generated += [*draft[:right], 99]
            (after,) = on_device.continued([AskedDraft(sequence, 5, [])])
            again = sequence_of([*ids, 12, *draft[:right]], [99], line=3)
            on_device.forget(sequence)
            (fresh,) = on_device.continued([AskedDraft(again, 5, [])])
            on_device.forget(again)
            assert after == fresh, right


def test_tokens_that_are_forced_come_first(on_device):
    sequence = sequence_of([7, 8, 9, 30, 31], [12])
    with torch.inference_mode():
        (draft,) = on_device.continued([AskedDraft(sequence, 5, [40, 41])])
        assert draft[:2] == [40, 41] and len(draft) == 5
        assert on_device.continued([AskedDraft(sequence, 2, [40, 41])]) == [[40, 41]]
        sequence.generated += [40, 41]
        assert on_device.continued([AskedDraft(sequence, 3, [])]) == [draft[2:]]


def test_sequences_that_have_no_drafts_give_up_their_room(on_device):
    """Two slots, three sequences: the third has a draft once one of the others has had none for long."""
    one, two, three = (sequence_of([7 + i, 8, 9], [12], line=i + 1) for i in range(3))
    with torch.inference_mode():
        assert all(on_device.continued([AskedDraft(s, 2, []) for s in (one, two)]))
        counts = [len(on_device.continued([AskedDraft(s, 2, []) for s in (one, three)])[1]) for _ in range(10)]
        assert counts[0] == 0 and counts[-1] == 2
        assert on_device.continued([AskedDraft(two, 2, [])]) == [[]]
    on_device.kv_cache.check()


@pytest.mark.parametrize("most", [1024, 40])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_a_draft_is_that_of_a_sequence_alone(checkpoint, monkeypatch, seed, most):
    """Sequences that begin alike, come and go, are right and wrong, in little room: what has a draft has the same.

    Of those that are too long the model sees the last tokens.
    """
    monkeypatch.setattr(draft_model, "_READ_AT_ONCE", 48)
    monkeypatch.setattr(followed, "_IDLE", 2)
    model, draw = load_split(checkpoint("llama3"), dtype="float32"), np.random.default_rng(seed)
    tight, alone = (opened_on_cpu(model, *sizes) for sizes in ((12, 5, most), (30, 1, 1024)))
    documents = [draw.integers(5, 200, 40).tolist() for _ in range(3)]
    sequences: list[SequenceState] = []
    made, left_out = 0, False
    with torch.inference_mode():
        for line in range(60):
            if len(sequences) < 3 or draw.random() < 0.4:
                given = [*documents[draw.integers(3)][: draw.integers(1, 41)], *draw.integers(5, 200, draw.integers(9))]
                sequences.append(sequence_of([*map(int, given)], [int(draw.integers(5, 200))], line=line))
            asked = [AskedDraft(s, int(draw.integers(1, 6)), []) for s in sequences if draw.random() < 0.8]
            for one, draft in zip(asked, tight.continued(asked), strict=True):
                if draft:
                    tokens = [*one.sequence.given_ids, *one.sequence.generated]
                    skipped = tight.followed._held[one.sequence.seniority].skipped
                    assert len(tokens) + len(draft) - skipped <= most
                    seen = sequence_of(tokens[skipped:-1], tokens[-1:])
                    expected = [own for _ in range(4) for own in alone.continued([one._replace(sequence=seen)]) if own]
                    assert draft == expected[0]  # once it is read
                    alone.forget(seen)
                    left_out |= skipped > 0
                    made += 1
                right = draw.integers(len(draft) + 1)
                one.sequence.generated += [*draft[:right], int(draw.integers(5, 200))][draw.random() < 0.1 :]
            for gone in [s for s in sequences if draw.random() < 0.1]:
                sequences.remove(gone)
                if draw.random() < 0.7:
                    tight.forget(gone)
            tight.kv_cache.check()
    assert made > 40 and left_out == (most < 100)


def opened_on_cpu(model, blocks, slots, most):
    sizes = {"capacity_tokens": 16 * blocks, "max_sequences": slots, "block_tokens": 16}
    kv_cache = open_kv_cache(attention_shapes(model.attends), kv_dtype="float32", team=True, **sizes)
    return DraftModel(model, kv_cache, slots, model.vocab_size, Timeline(), most)


def test_models_that_cannot_guess_are_refused(checkpoint, tmp_path):
    path = checkpoint("llama3")
    for model, problem in (
        (checkpoint("qwen3_next"), "expected layers that all attend, got qwen3_next, some of which keep"),
        (str(tmp_path / "none"), f"model '{tmp_path / 'none'}': "),
        ("demo", "expected a model with the tokens of .* have other ids there, as "),
        (checkpoint("falcon_h1"), "expected layers that all attend, got falcon_h1"),
    ):
        with pytest.raises(UserError, match=f"--speculative-config: .*{problem}"):
            opened(path, model)
    for config, problem in (
        ({"method": "draft_model"}, "expected draft_model with a model, and no other"),
        ({"method": "ngram", "model": path}, "expected draft_model with a model, and no other, got 'ngram'"),
        ({"quantization": "int4"}, "quantization: expected it with a model or mtp, got 'int4' alone"),
    ):
        with pytest.raises(UserError, match=problem):
            LLM(path, speculative_config=config)
    with pytest.raises(UserError, match=r"quantization: expected one of .*, got 'int3'"):
        LLM(path, speculative_config={"model": path, "quantization": "int3"})
