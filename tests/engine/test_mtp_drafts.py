"""Speculative decoding with the layer for multi-token prediction of a model's checkpoint."""

from __future__ import annotations

import shutil
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcdecode import LLM, SamplingParams
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.attention.torch_cache import TorchKvCache
from hpcdecode.engine import draft_model
from hpcdecode.engine.draft_model import DraftModel
from hpcdecode.engine.unread_states import UnreadStates
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.schedule.model_drafts import AskedDraft
from hpcdecode.system.timeline import Timeline
from tests.support.drafts import FEATURES, PARAMS, PROMPTS, emptied, generated, opened, sequence_of
from tests.support.mtp import add_mtp, predicted
from tests.support.recorders import EagerRecorder, as_on_a_device


@pytest.fixture(scope="module")
def with_mtp(checkpoint, tmp_path_factory):
    """Return the checkpoint of an architecture with such a layer, and that layer as transformers has it."""
    made = {}

    def get(name):
        if name not in made:
            path = shutil.copytree(checkpoint(name), tmp_path_factory.mktemp("mtp") / name)
            made[name] = path, add_mtp(path)
        return made[name]

    return get


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_drafts_are_those_of_transformers(with_mtp, name):
    """The layer reads the last tokens of prompts and what rows generate, with hidden states of the model.

    Behind guesses it reads them with its own.
    """
    path, layer = with_mtp(name)
    drafts, continued = [], DraftModel.continued

    def noted(self, asked):
        made = continued(self, asked)
        for one, draft in zip(asked, made, strict=True):
            drafts.append(([*one.sequence.given_ids], [*one.sequence.generated], draft))
        return made

    with patch.object(DraftModel, "continued", noted):
        generated(opened(path, "mtp"), params=[SamplingParams(max_tokens=16, ignore_eos=True)] * len(PROMPTS))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    compared = 0
    for given, generated_ids, draft in drafts[::7]:
        ids, begin = [*given, *generated_ids], max(len(given) - 65, 0) + 1
        with torch.no_grad():
            states = model.model(torch.tensor([ids])).last_hidden_state[0, begin - 1 : -1]
        read = ids[begin:]
        for token in draft:
            logits, own = predicted(layer, torch.tensor(read), states)
            assert token == logits[-1].argmax()
            read, states, compared = [*read, token], torch.cat([states, own[-1:]]), compared + 1
    assert compared > 40


OTHERS = (pytest.param(name, marks=pytest.mark.full) for name in ("glm4_moe_lite", "qwen3_next"))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5", *OTHERS])
def test_rows_are_the_same(with_mtp, name):
    path, _ = with_mtp(name)
    options = {"dtype": "bfloat16", "batch": 2} if name == "qwen3_5" else {}
    for params in (PARAMS, FEATURES):
        plain, _ = generated(opened(path, **options), params=params)
        llm = opened(path, "mtp", **options)
        for _ in range(2):
            made, worker = generated(llm, params=params)
            assert made == plain and worker.schedulers[0].speculation.drafted > 90
            assert not len(emptied(llm).states)


def test_recorded_slices_guess_the_same(with_mtp, monkeypatch):
    """As on a GPU, with a stand-in for CUDA graphs; what is left to read is read over several calls."""
    as_on_a_device(monkeypatch)
    monkeypatch.setattr(draft_model, "_READ_AT_ONCE", 16)
    path, _ = with_mtp("deepseek_v3")
    hidden, drafts = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), []
    for recorder in (None, EagerRecorder()):
        model = load_split(path, dtype="float32", indexers=False, mtp=True, hidden=True)
        model.recorder = recorder
        kv_cache = TorchKvCache(attention_shapes(model.attends), "float32", 1024, 4)
        guess = DraftModel(model, kv_cache, 4, model.vocab_size, Timeline(), 1024)
        sequences = [sequence_of([9 + i, 30], [*range(40, 52 + 8 * i)], line=i) for i in range(3)]
        for sequence in sequences:
            guess.take_hidden(sequence, hidden[: len(sequence.generated)], 2 + len(sequence.generated))
        asked = [AskedDraft(sequence, 8, []) for sequence in sequences]
        with torch.inference_mode():
            drafts.append([guess.continued(asked) for _ in range(5)])
        guess.forget_all()
        assert kv_cache.used_tokens == 0 == len(guess.followed) == len(guess.states)
    assert drafts[0] == drafts[1] and recorder.replayed > 10
    assert [len(draft) for draft in drafts[0][0]] == [8, 0, 0] and all(drafts[0][-1])


def test_states_with_gaps_are_of_no_use():
    states, sequence = UnreadStates(), sequence_of([7, 8, 9], [12])
    assert states.first(sequence) is None
    states.take(sequence, torch.full((1, 4), 3.0), 4)
    assert states.first(sequence) == 3
    sequence.generated += [13, 14]
    assert states.first(sequence) is None  # a step whose states are not known
    states.take(sequence, torch.tensor([[4.0], [5.0]]).expand(2, 4), 6)
    assert states.first(sequence) == 3 and states.since(sequence, 4)[:, 0].tolist() == [4, 5]
    sequence.generated += [15]
    sequence.generated += [16]
    states.take(sequence, torch.full((1, 4), 7.0), 8)
    assert states.first(sequence) == 7 and states.since(sequence, 7)[:, 0].tolist() == [7]
    for place in range(200):
        sequence.generated.append(20)
        states.take(sequence, torch.full((1, 4), 8.0 + place), 9 + place)
    assert len(states.since(sequence, states.first(sequence))) == 128
    states.forget(sequence)
    assert not len(states)


def test_what_cannot_be_used_is_refused(checkpoint, with_mtp):
    path, _ = with_mtp("deepseek_v3")
    with pytest.raises(UserError, match=r"--speculative-config: .*expected a model whose checkpoint has a layer for "):
        opened(checkpoint("llama3"), "mtp")
    with pytest.raises(UserError, match="expected draft_model with a model, and no other, got 'mtp'"):
        LLM(path, speculative_config={"method": "mtp", "model": path})
