"""For every architecture: its trace is the same from the cache, and its slices give transformers' logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from msgspec import msgpack

from hpcdecode.model import load_split
from hpcdecode.model.frontend import cache, trace_file
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.trace import Trace, trace
from tests.support.models import ARCHITECTURES, BOS, EOS, POSITIONS, VOCAB, WINDOW, save
from tests.support.steps import Attention, step

SEQUENCES = (150, 37, 1)  # tokens; the first is longer than the windows


def schedule() -> list[list[tuple[int, int]]]:
    """(row, position) batches: chunked prefill, prefill that joins decoding, tokens of rows interleaved, T = 1."""
    a, b, _ = SEQUENCES
    first = [(0, p) for p in range(0, 90)]
    second = [(0, p) for p in range(90, a - 3)] + [(1, p) for p in range(b - 3)] + [(2, 0)]
    third = [(1, b - 3), (0, a - 3)]
    return [first, second, third, [(0, a - 2), (1, b - 2)], [(1, b - 1)], [(0, a - 1)]]


WINDOWS = {  # per layer
    "mistral": [WINDOW] * 3,
    "qwen2": [None, WINDOW, WINDOW],
    "gemma2": [WINDOW, None, WINDOW],
    "gemma3": [WINDOW, None, WINDOW],
    "phi3": [WINDOW] * 3,
    "gpt_oss": [WINDOW, None, WINDOW],
}
SCALES = {"opt": 1.0, "gemma2": 32**-0.5, "gemma3": 32**-0.5, "deepseek_v2": 24**-0.5}
LATENT_DIMS = (40, 32, 1)  # of k: the latent and what heads share; of v; heads


def check_shapes(name: str, shapes) -> None:
    """Attend carries what the configs of tests.support.models ask for."""
    assert [s.window for s in shapes] == WINDOWS.get(name, [None] * len(shapes))
    assert {s.softcap for s in shapes} == {5.0 if name == "gemma2" else None}
    assert all(s.sinks == (name == "gpt_oss") for s in shapes)
    assert shapes[0].scale == pytest.approx(SCALES.get(name, shapes[0].scale))
    assert not name.startswith("deepseek") or (shapes[0].k_dim, shapes[0].v_dim, shapes[0].kv_heads) == LATENT_DIMS


def reference_logits(path, ids: list[list[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([row]), use_cache=False).logits[0] for row in ids]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def traced(request, checkpoint) -> tuple[str, Trace]:
    """An architecture and its trace, which takes seconds, and is left where `load_split` finds it."""
    path = checkpoint(request.param)
    made = trace(read_config(path), torch.float32)
    cache.write(cache.directory() / f"{cache.key(path, torch.float32)}.trace", msgpack.encode(trace_file.stored(made)))
    return request.param, made


def test_a_restored_trace_is_the_trace(traced):
    check_restored(traced[1])


def test_logits_equal_transformers(traced, checkpoint, monkeypatch):
    monkeypatch.setattr(cache, "trace", None)  # not called: the trace is there
    check_logits(traced[0], checkpoint(traced[0]))


SOME = ("llama3", "gpt_oss", "deepseek_v2")


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in ARCHITECTURES])
def test_a_restored_trace_in_bfloat16_is_the_trace(name, checkpoint):
    check_restored(trace(read_config(checkpoint(name)), torch.bfloat16))


def check_restored(made: Trace) -> None:
    again = trace_file.restored(trace_file.stored(made))
    assert str(again.graph) == str(made.graph)
    assert trace_file.stored(again) == trace_file.stored(made)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="these bypass the attention interface before transformers 5.24, and are refused",
)
@pytest.mark.parametrize("kind", ["GPTJ", "CodeGen"])
def test_logits_equal_transformers_from_5_24_on(kind, tmp_path):
    sizes = dict(vocab_size=VOCAB, n_positions=POSITIONS, n_embd=64, n_layer=3, n_head=4, rotary_dim=8)
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=BOS, eos_token_id=EOS)
    check_logits(kind, save(config, tmp_path / kind))


def check_logits(name: str, path) -> None:
    """Compare the logits of `schedule` with transformers' own, for the checkpoint at `path`."""
    model, generator = load_split(path, dtype="float32"), torch.Generator().manual_seed(1)
    ids = [torch.randint(2, model.vocab_size, (n,), generator=generator).tolist() for n in SEQUENCES]
    expected, attention = reference_logits(path, ids), Attention(model)
    check_shapes(name, model.attends)
    worst, same = 0.0, []
    for batch in schedule():
        got = step(model, attention, [(r, p, ids[r][p]) for r, p in batch], list(range(len(batch))))
        want = torch.stack([expected[r][p] for r, p in batch])
        worst = max(worst, (got - want).abs().max().item())
        same.append(torch.equal(got.argmax(-1), want.argmax(-1)))
    print(f"{name}: max logit error {worst:.1e}, groups {[g.slices for g in model.split.groups]}")
    assert worst < 1e-4 and all(same)
    assert want.std() > 0.1
