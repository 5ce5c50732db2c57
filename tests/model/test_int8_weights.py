"""Quantised projections: their fused kernels against plain torch, their GEMMs against exact ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import fx

from hpcdecode import LLM, SamplingParams
from hpcdecode.config import EngineOptions
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.chain import chained
from hpcdecode.model.lower.compile import compile_graph, copied
from hpcdecode.model.lower.few_bits import Quantised
from hpcdecode.model.lower.fuse import fuse
from hpcdecode.model.lower.linears import merge_projections
from hpcdecode.model.lower.recipe import make_weight
from tests.support.graphs import example
from tests.support.isas import OWN_GEMMS, use_isa

pytestmark = pytest.mark.skipif(not quantize.exact(), reason="this CPU has no exact int8 products")
onednn = pytest.mark.skipif(not quantize.exact_onednn(), reason="oneDNN has no exact int8 products on this CPU")


@onednn
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_the_exact_one_of_rounded_numbers(transposed):
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 96, generator=generator) for n in (21, 160))
    weight = weight.t().contiguous().t() if transposed else weight
    scale, scales = quantize.token_scale(x), quantize.output_scales(weight)
    rounded = quantize.rounded(weight, scales).to(torch.int8).contiguous()
    packed = quantize.onednn_packed(rounded, 512)
    y = quantize.int8_linear(quantize.to_int8(x, scale), packed, scales, torch.float32)
    exact = (quantize.to_int8(x, scale).double() @ rounded.double().t()) * scales.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(quantize.scaled(y, scale), x @ weight.t(), rtol=0, atol=0.5)
    zeros = quantize.to_int8(x * 0, quantize.token_scale(x * 0))
    assert not zeros.any()


@pytest.mark.parametrize("inputs", [16, 64, 96, 576, 640, 4096, 8192, 11008])
def test_a_rotation_keeps_products_and_spreads_what_is_large(inputs):
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (3, 7))
    torch.testing.assert_close(quantize.rotated(x) @ quantize.rotated(weight).t(), x @ weight.t(), rtol=0, atol=2e-3)
    one = torch.zeros(1, inputs)
    one[0, inputs // 3] = 1
    rows, runs, _ = quantize.RotationShape.of(inputs)
    most = (2 * rows / inputs) ** 0.5 if runs > 2 else (rows / inputs) ** 0.5
    assert quantize.rotated(one).abs().max() < 1.001 * most


@pytest.mark.parametrize("inputs", [1, 24, 100])
def test_few_inputs_side_by_side_are_not_rotated(inputs):
    x = torch.randn(2, inputs)
    assert torch.equal(quantize.rotated(x), x)


@onednn
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2"])
def test_programs_quantise_as_torch_does(checkpoint, monkeypatch, name, dtype):
    """llama3 merges three projections; the others have biases, gpt2's weights are transposed. Products are oneDNN's."""
    monkeypatch.setenv("HPCDECODE_ISA", "generic")
    model = load_split(checkpoint(name), dtype=dtype, weights=False)
    generator = torch.Generator().manual_seed(4)
    quantised = 0
    for group in model.split.groups:
        graph = copied(group.graph)
        weights = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("w")]
        sources = [example(n, generator) for n in weights]
        given = [example(n, generator) for n in graph.nodes if n.op == "placeholder" and n.name.startswith("x")]
        recipes = merge_projections(graph, Quantised("int8"))
        quantised += sum(r.form == "onednn int8" for r in recipes)
        made = [make_weight(r, sources.__getitem__) for r in recipes]
        with torch.inference_mode():
            want = fx.GraphModule({}, graph)(*given, *made)
            got = fx.GraphModule({}, chained(fuse(graph)))(*given, *made)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.02 if dtype == "float32" else 0.2)
    assert quantised


@onednn
@pytest.mark.parametrize("isa", OWN_GEMMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3", "gpt2", "qwen2"])
def test_our_products_give_what_those_of_onednn_do(checkpoint, monkeypatch, isa, name, dtype):
    use_isa(monkeypatch, isa)
    model = load_split(checkpoint(name), dtype=dtype, weights=False)
    generator, packed = torch.Generator().manual_seed(4), 0
    for group in model.split.groups:
        inputs = [n for n in group.graph.nodes if n.op == "placeholder"]
        values = {n: example(n, generator) for n in inputs}
        results = []
        for way in ("generic", isa):
            monkeypatch.setenv("HPCDECODE_ISA", way)
            compiled = compile_graph(group.graph, model.device, Quantised("int8"))
            packed += sum(r.form == "packed int8" for r in compiled.recipes)
            given = [values[n] for n in inputs if n.name.startswith("x")]
            weights = compiled.weights([values[n] for n in inputs if n.name.startswith("w")].__getitem__)
            with torch.inference_mode():
                results.append(compiled.run(*given, *weights))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.02 if dtype == "float32" else 0.2)
    assert packed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_its_batch(checkpoint, dtype):
    """Sums of whole numbers are exact, in whatever order."""
    model = load_split(checkpoint("llama3"), dtype=dtype, quantised="int8")
    ids = torch.arange(5, 42)
    outputs = [
        torch.randn(37, s.out_columns, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(model.attends)
    ]

    def run(some: slice) -> list[torch.Tensor]:
        o, context, found = None, (ids[some], ids[some], torch.arange(len(ids[some]))), []
        for i, output in enumerate(outputs):
            qkv, context = model.slice(i, o, context)
            found += [x.clone() for x in qkv]
            o = output[some].to(model.dtype)
        return [*found, model.logits(o, context)]

    together = run(slice(None))
    for some in (slice(0, 1), slice(1, 19), slice(19, 37)):
        for a, b in zip(run(some), together, strict=True):
            assert torch.equal(a, b[some])


def test_the_demo_says_the_same_with_int8_weights():
    prompts, params = ["The with statement", "A class definition"], SamplingParams(max_tokens=40, ignore_eos=True)
    texts = [
        [o.outputs[0].text for o in LLM("demo", weights=weights).generate(prompts, params, use_tqdm=False)]
        for weights in (None, "int8")
    ]
    assert texts[0] == texts[1]  # the demo knows its text by heart


def test_a_cpu_whose_products_are_not_exact_is_refused():
    """oneDNN's products of AVX2 without VNNI, and none of our own."""
    line = "from hpcdecode import LLM; LLM('demo', weights='int8')"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "HPCDECODE_ISA": "generic"}
    done = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True, timeout=300)
    assert "--weights int8: expected a CPU with AVX2 or int8 products (VNNI)" in done.stderr


def test_other_weights_are_refused():
    with pytest.raises(UserError, match=r"--weights: expected one of auto, float32, bfloat16, int8, .*, got 'int2'"):
        EngineOptions(model="demo", weights="int2").check()
