"""On a GPU: layers of experts in grouped GEMMs: right, without waits, in CUDA graphs, under torch's compiler."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.split import split
from hpcdecode.model.lower import grouped_products
from hpcdecode.model.lower.compile import compile_merged
from hpcdecode.model.lower.grouped_products import is_capable
from tests.support.expert_cases import NEAR, Case, inputs_of, numbers
from tests.support.graphs import example

LARGE = ((1024, 512), (512, 512))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def cases(dtype: torch.dtype) -> list[Case]:
    """All experts, transposed and biased as in GPT-OSS, many, and two members' own ones."""
    return [
        Case(dtype, 8, shapes=LARGE),
        Case(dtype, 32, transposed=True, biased=True, shapes=LARGE),
        Case(dtype, 128, shapes=LARGE),
        Case(dtype, 8, 0, 3, biased=True, shapes=LARGE),
        Case(dtype, 8, 3, 5, shapes=LARGE),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_results_are_those_of_float64(dtype):
    for case in cases(dtype):
        for tokens, choices, most in ((1, 2, None), (40, 4, 5), (700, 2, 3)):
            expert, x = case.chosen(tokens, choices, most), numbers(dtype, tokens, 1, 512, seed=3)
            found, wanted = case.to("cuda").grouped(x.cuda(), expert.cuda()).cpu(), case.plain(x.double(), expert)
            assert (found - wanted).abs().max() <= NEAR[dtype] * max(1, wanted.abs().max())
            assert not found[(expert < case.first) | (expert >= case.first + case.own)].any()


@torch.inference_mode()
def test_grouped_mm_is_taken_for_bfloat16(monkeypatch):
    if not is_capable(torch.device("cuda:0")):
        pytest.skip("grouped_mm reads back on this GPU")
    monkeypatch.setattr(grouped_products, "by_blocks", None)
    for case in cases(torch.bfloat16):
        case.to("cuda").grouped(numbers(torch.bfloat16, 40, 1, 512).cuda(), case.chosen(40, 2).cuda())


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_nothing_waits_for_the_device(dtype):
    given = [(case.to("cuda"), case.chosen(40, 2).cuda()) for case in cases(dtype)]
    x = numbers(dtype, 40, 1, 512).cuda()
    for case, expert in given:
        case.grouped(x, expert)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case, expert in given:
            case.grouped(x, expert)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_cuda_graph_takes_other_choices(dtype):
    for case in cases(dtype):
        device, x = case.to("cuda"), numbers(dtype, 40, 1, 512).cuda()
        expert = case.chosen(40, 2).cuda()
        device.grouped(x, expert)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = device.grouped(x, expert)
        for most in (2, 5, case.experts):
            expert.copy_(case.chosen(40, 2, most))
            x.copy_(numbers(dtype, 40, 1, 512, seed=most))
            graph.replay()
            assert torch.equal(made, device.grouped(x, expert))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [300, 2000])  # of 2 among 8: up to 128 rows an expert, and more
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_company(dtype, tokens):
    """If torch takes other tiles for many rows, they must add up a row's products in the same order."""
    case = Case(dtype, 8, biased=True, shapes=LARGE).to("cuda")
    x, expert = numbers(dtype, tokens, 1, 512, seed=3).cuda(), case.chosen(tokens, 2).cuda()
    together = case.grouped(x, expert)
    assert torch.equal(case.grouped(x.flip(0), expert.flip(0)).flip(0), together)
    for i in range(0, tokens, tokens // 7):
        assert torch.equal(case.grouped(x[i : i + 1], expert[i : i + 1])[0], together[i])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_torchs_compiler_takes_a_slice_whole(checkpoint, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    groups = split(cached_trace(checkpoint(name), torch.float32), torch.device("cuda")).groups
    graph = next(g.graph for g in groups if any(n.target is expert_linear for n in g.graph.nodes))
    generator = torch.Generator().manual_seed(2)
    values = [example(n, generator).cuda() for n in graph.nodes if n.op == "placeholder"]
    plain = compile_merged(graph)
    values = inputs_of(plain, graph, values)
    compiled = torch.compile(plain.run, fullgraph=True, dynamic=True)
    for found, wanted in zip(compiled(*values), plain.run(*values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
