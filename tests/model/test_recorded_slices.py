"""Slices that are recorded over memory of their lane give what plain ones give, whatever padding holds."""

from __future__ import annotations

import itertools

import pytest
import torch

from hpcdecode.model import load_split
from hpcdecode.model.lower import linears
from hpcdecode.model.run import recorded_slices
from hpcdecode.model.run.recorded_slices import SIZES, RecordedSlices
from tests.support.recorders import EagerRecorder, as_on_a_device


def loaded(checkpoint, name, monkeypatch, recorded_from=1, quantised=None, **options):
    as_on_a_device(monkeypatch, **options)
    monkeypatch.setattr(recorded_slices, "RECORDED_FROM", recorded_from)
    model = load_split(checkpoint(name), dtype="float32", quantised=quantised)
    model.recorder = EagerRecorder()
    return model


class Step:
    """A step of some tokens, slice by slice: recorded, and plain beside it."""

    def __init__(self, model, slices, lane, tokens, seed):
        self.model, self.own, self.tokens = model, slices.lane(lane), tokens
        self.random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.vocab_size, (tokens,), generator=self.random)
        self.plain = self.context = (ids, torch.arange(tokens) + seed, torch.arange(tokens))
        self.o, self.made = None, []

    def run(self):
        """Yield after every slice."""
        self.own.begin(self.context)
        for layer, shape in enumerate(self.model.attends):
            rows, self.context = self.own.slice(layer)
            expected, self.plain = self.model.slice(layer, self.o, self.plain)
            for a, b in zip((*rows, *self.context), (*expected, *self.plain), strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            self.made += [x.clone() for x in rows]
            yield
            self.o = torch.randn(self.tokens, shape.out_columns, generator=self.random)
            self.own.output(layer).copy_(self.o)
            yield
        logits = self.model.logits(self.own.output(len(self.model.attends) - 1), self.context)
        torch.testing.assert_close(logits, self.model.logits(self.o, self.plain), rtol=1e-4, atol=1e-5)
        self.made.append(logits)


def run(*steps):
    """Run steps side by side, a slice of each in turn."""
    under_way = [step.run() for step in steps]
    while under_way:
        under_way = [step for step in under_way if next(step, "end") != "end"]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2", "deepseek_v2", "mixtral", "qwen3_moe"])
def test_recorded_slices_equal_plain_ones(checkpoint, monkeypatch, name):
    model = loaded(checkpoint, name, monkeypatch)
    slices = RecordedSlices.of(model)
    for tokens in (5, 8, 1, 40, 5):
        run(Step(model, slices, 0, tokens, seed=tokens))
    layers, sizes = len(model.attends), 2  # 8 and 64 tokens
    assert model.recorder.recorded == sizes * layers
    assert model.recorder.replayed == 5 * layers
    assert RecordedSlices.of(model) is slices  # kept from run to run


def test_sizes_that_come_up_again_are_recorded(checkpoint, monkeypatch):
    """Recording takes long, so that prompts' steps, of many sizes, are not recorded each."""
    model = loaded(checkpoint, "llama3", monkeypatch, recorded_from=3)
    slices, recorded = RecordedSlices.of(model), []
    for tokens in (5, 40, 5, 8, 40, 40):  # 8, 64, 8, 8, 64, 64
        run(Step(model, slices, 0, tokens, seed=tokens))
        recorded.append(model.recorder.recorded // len(model.attends))
    assert recorded == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_weights_in_few_bits_are_expanded_in_recorded_slices(checkpoint, monkeypatch, name):
    model = loaded(checkpoint, name, monkeypatch, quantised="int4")
    for tokens in (5, 40, 5):
        run(Step(model, RecordedSlices.of(model), 0, tokens, seed=tokens))
    assert model.recorder.replayed == 3 * len(model.attends)


def test_two_lanes_in_flight_have_memory_of_their_own(checkpoint, monkeypatch):
    model = loaded(checkpoint, "llama3", monkeypatch)
    slices = RecordedSlices.of(model)
    for tokens in (7, 30, 3):
        run(Step(model, slices, 0, tokens, seed=1), Step(model, slices, 1, tokens + 2, seed=2))


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_results_do_not_depend_on_padding(checkpoint, monkeypatch, name):
    model, made = loaded(checkpoint, name, monkeypatch), []
    for poison in (0, float("nan"), 1e30):
        slices = RecordedSlices(model, EagerRecorder())
        for slot in slices.lane(0)._slots:
            if slot.memory.is_floating_point():
                slot.memory.fill_(poison)
        step = Step(model, slices, 0, 5, seed=3)
        run(step)
        made.append(step.made)
    for others in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))


def test_memory_is_shared_by_tensors_that_nothing_reads_any_more(checkpoint, monkeypatch):
    model = loaded(checkpoint, "llama3", monkeypatch)
    layout = RecordedSlices.of(model).layout
    made = sum(len(placed.buffers) for placed in layout.slices)
    assert len(layout.plan.slots) == 8  # ids, positions, o, cos, sin, rows, and twice hidden states
    assert made == 2 * len(layout.slices) + 2
    for placed in layout.slices[1:]:
        assert not {place.slot for place in placed.inputs} & set(placed.buffers)  # no graph writes what it reads


def test_slices_that_read_results_back_run_one_operator_at_a_time(checkpoint, monkeypatch):
    monkeypatch.setattr(linears, "group_experts", lambda *_: None)
    model = loaded(checkpoint, "mixtral", monkeypatch)
    slices = RecordedSlices.of(model)
    assert slices.suits(5)
    run(Step(model, slices, 0, 5, seed=1))
    assert not slices.suits(5)  # from now on without padding


def test_what_was_used_longest_ago_is_forgotten(checkpoint, monkeypatch):
    monkeypatch.setattr(recorded_slices, "MOST_STEPS", 2)
    model = loaded(checkpoint, "llama3", monkeypatch)
    slices = RecordedSlices.of(model)
    for tokens in (8, 16, 8, 32):
        run(Step(model, slices, 0, tokens, seed=1))
    assert list(slices._steps) == [(0, 8), (0, 32)]


def test_sizes_waste_little():
    assert list(SIZES) == sorted(set(SIZES))
    assert all(b - a <= max(b / 2, 8) for a, b in itertools.pairwise(SIZES))


@pytest.mark.full
def test_compiled_slices_are_recorded(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = loaded(checkpoint, "llama3", monkeypatch, inductor=True)
    model.recorder = EagerRecorder(watched=False)
    slices = RecordedSlices.of(model)
    for tokens in (5, 20):
        run(Step(model, slices, 0, tokens, seed=tokens))
    assert list(tmp_path.iterdir())  # what it compiled
