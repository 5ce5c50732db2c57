"""What a split model is: slices, cuts, groups, and their edge sizes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from hpcdecode.model import load_split, render
from tests.support.models import WINDOW
from tests.support.steps import Attention, step


@pytest.fixture(scope="module")
def llama(checkpoint):
    return load_split(checkpoint("llama3"), dtype="float32")


def prompt(n: int, row: int = 0) -> list[tuple[int, int, int]]:
    return [(row, p, (7 * p + row) % 500 + 2) for p in range(n)]


def test_slices_of_one_structure_share_a_graph(llama):
    assert [group.slices for group in llama.split.groups] == [[0], [1, 2], [3]]


def test_cut_carries_residual_and_position_tensors_but_no_ids_or_positions(llama):
    data = llama.describe()
    assert [sorted(t["from"] for t in part["context"]) for part in data["slices"]] == [
        ["kept tokens", "position", "position", "token"],
        ["kept tokens", "position", "position", "token"],
        ["kept tokens", "token"],  # cos and sin are dropped after their last use
        [],
    ]
    residual = [t for part in data["slices"] for t in part["context"] if t["from"] == "token"]
    assert all(t["shape"] == [1, "T", 64] and t["bytes_per_token"] == 256 for t in residual)
    cos = [t for t in data["slices"][0]["context"] if t["from"] == "position"]
    assert all(t["shape"] == [1, 1, "T", 16] for t in cos)


def test_wire_bytes_are_those_of_the_formula(llama):
    data, e, d, g = llama.describe(), 4, 64, 2
    assert data["wire_bytes_per_token"] == 3 * (2 + 2 / g) * e * d
    assert json.loads(json.dumps(data)) == data
    text = render(data)
    assert "4 slices, 3 graphs" in text and "q [T, 4, 16]" in text


def test_one_token_and_few_kept_tokens(llama):
    whole = step(llama, Attention(llama), prompt(9), list(range(9)))
    attention = Attention(llama)
    assert step(llama, attention, prompt(8), []).shape == (0, 512)
    last = step(llama, attention, prompt(9)[8:], [0])
    torch.testing.assert_close(last, whole[8:], rtol=0, atol=1e-5)
    picked = step(llama, Attention(llama), prompt(9), [6, 2])
    torch.testing.assert_close(picked, whole[[6, 2]], rtol=0, atol=1e-5)


def test_rows_of_a_batch_do_not_see_each_other(llama):
    alone = step(llama, Attention(llama), prompt(20, row=1), list(range(20)))
    mixed = [t for pair in zip(prompt(20, row=0), prompt(20, row=1), strict=True) for t in pair]
    together = step(llama, Attention(llama), mixed, list(range(1, 40, 2)))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_attention_output_may_be_a_strided_view(llama):
    ids = torch.arange(2, 7)
    ctx = llama.slice(0, None, (ids, torch.arange(5), torch.arange(5)))[1]
    o = torch.randn(5, 64)
    wide = torch.zeros(5, 100)
    wide[:, 10:74] = o
    for a, b in zip(llama.slice(1, o, ctx).rows, llama.slice(1, wide[:, 10:74], ctx).rows, strict=True):
        torch.testing.assert_close(a, b)


def test_context_of_a_slice_is_left_unchanged(llama):
    ctx = llama.slice(0, None, (torch.arange(2, 7), torch.arange(5), torch.arange(5)))[1]
    copies = [t.clone() for t in ctx]
    first = llama.slice(1, torch.ones(5, 64), ctx)
    again = llama.slice(1, torch.ones(5, 64), ctx)
    assert all(torch.equal(a, b) for a, b in zip(ctx, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))


@pytest.fixture(scope="module")
def oss(checkpoint):
    return load_split(checkpoint("gpt_oss"), dtype="bfloat16")


def test_sinks_are_float32(oss):
    assert oss.attends[1].sinks
    assert oss.sinks(1).dtype == torch.float32 and oss.sinks(1).shape == (4,)


def test_shapes_need_no_weights(oss, checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint("gpt_oss") / "config.json").read_text())
    shapes = load_split(tmp_path, dtype="bfloat16", weights=False).attends
    assert shapes == oss.attends
    assert [s.window for s in shapes] == [WINDOW, None, WINDOW]


def test_bfloat16_stays_close_to_float32(llama, checkpoint):
    rough = load_split(checkpoint("llama3"), dtype="bfloat16")
    exact, got = (step(m, Attention(m), prompt(30), list(range(30))) for m in (llama, rough))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0, atol=0.2)


def test_sizes_are_known(llama, oss):
    about = oss.describe()
    assert 3 * about["kv_bytes_beyond_windows"] == about["kv_bytes_per_token"] == 3 * 128
    assert "128 of these bytes once it has left all windows" in render(about)
    assert (llama.vocab_size, llama.max_positions, len(llama.attends)) == (512, 1024, 3)
    assert llama.describe()["kv_bytes_per_token"] == 3 * 2 * 32 * 4


def test_importing_the_package_imports_no_torch():
    code = "import sys, hpcdecode.model; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
