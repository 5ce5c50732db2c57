"""Tracing one layer of each kind gives the graph of the model traced whole, or is not done."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hpcdecode.model.frontend import expand
from hpcdecode.model.frontend.clean import freeze
from hpcdecode.model.frontend.export import export_kinds
from hpcdecode.model.frontend.kinds import LayersDiffer
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.trace import Trace, read_program, trace
from hpcdecode.model.run.split_model import SplitModel
from tests.support.models import ARCHITECTURES, EXPERTS, LATENT, SHAPE, WINDOW
from tests.support.steps import Attention, step

QUICK = ("llama3", "gpt2")
S, F = "sliding_attention", "full_attention"
DEEP = {  # kinds that take turns, so that a layer that is traced follows on copies of others
    "gemma3": lambda: config("Gemma3Text", 6, head_dim=16, sliding_window=WINDOW, layer_types=[S, S, S, F, F, S]),
    "qwen2": lambda: config("Qwen2", 5, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    "qwen3_moe": lambda: config("Qwen3Moe", 6, **EXPERTS, head_dim=16, num_experts=8, mlp_only_layers=[0, 3]),
    "gpt_oss": lambda: config("GptOss", 5, head_dim=16, num_local_experts=4, sliding_window=WINDOW),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**LATENT, "num_hidden_layers": 4, "first_k_dense_replace": 2}, n_group=2, topk_group=1
    ),
}
REAL = {  # shapes of SmolLM2-135M and Gemma 3 270M
    "smollm2": lambda: transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "gemma3_270m": lambda: transformers.Gemma3TextConfig(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=262144, head_dim=256, sliding_window=512, layer_types=[S, S, S, S, S, F] * 3,
    ),
}  # fmt: skip
ALL = {
    **{name: (make, name not in QUICK) for name, make in ARCHITECTURES.items()},
    **{f"deep {name}": (make, name != "gemma3") for name, make in DEEP.items()},
    **{f"real {name}": (make, True) for name, make in REAL.items()},
}
TRACED = {"deep gemma3": 4, "deep qwen2": 4, "deep qwen3_moe": 4, "deep gpt_oss": 4, "deep deepseek_v3": 4}
TRACED |= {"real smollm2": 2, "real gemma3_270m": 4, "llama3": 2, "opt": 2, "gpt2": 2, "mixtral": 2, "phi3": 2}


def config(kind: str, layers: int, **values):
    return getattr(transformers, f"{kind}Config")(**{**SHAPE, "num_hidden_layers": layers, **values})


def traced_by_kind(model_config, dtype=torch.float32) -> Trace:
    with quiet():
        program, buffers = export_kinds(model_config, dtype)
    return read_program(program, buffers, model_config, dtype)


def structure(traced: Trace) -> list[tuple]:
    """All that a graph is but for the names of its nodes, in its order."""
    place: dict = {}
    for node in traced.graph.nodes:
        place[node] = traced.weights.get(node) or len(place)

    def form(node) -> tuple:
        target = node.op if node.op != "call_function" else str(node.target)
        args, kwargs = (freeze(value, place.__getitem__) for value in (node.args, node.kwargs))
        return place[node], target, args, kwargs, node.meta.get("about")

    return [form(node) for node in traced.graph.nodes]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if full else ()) for n, (_, full) in ALL.items()]
)
def test_graph_and_logits_are_those_of_the_model_traced_whole(name, monkeypatch):
    met, layer = [], expand.Layer
    monkeypatch.setattr(expand, "Layer", lambda *args: met.append(args) or layer(*args))
    by_kind, whole = traced_by_kind(ALL[name][0]()), trace(ALL[name][0](), torch.float32, whole=True)
    assert len(met) == TRACED.get(name, len(met)) <= len(whole.attends)
    assert structure(by_kind) == structure(whole)
    constants = zip(by_kind.constants.values(), whole.constants.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in constants)
    if name.startswith("real"):
        return  # the graphs are equal; two times 0.6 GB of weights would show no more
    logits = [random_logits(traced) for traced in (by_kind, whole)]
    assert logits[0].std() > 0 and torch.equal(*logits)


def random_logits(traced: Trace) -> torch.Tensor:
    """Return logits [3, vocabulary] of two prompts longer than the window, by random weights, the same each time."""
    generator, weights = torch.Generator().manual_seed(1), {}
    for node, name in sorted(traced.weights.items(), key=lambda item: item[1]):
        about = node.meta["about"]
        weights[name] = (torch.randn(about.shape, generator=generator) * about.shape[-1] ** -0.5).to(about.dtype)
    model = SplitModel(split(traced, torch.device("cpu")), torch.device("cpu"), weights)
    tokens = [(row, p, (7 * p + row) % 500 + 2) for row in range(2) for p in range(WINDOW + 9)]
    return step(model, Attention(model), tokens, [5, WINDOW + 8, 2 * WINDOW])


def looks_at_its_place(layer, run, hidden, *args, **kwargs):
    return run(hidden * (layer.self_attn.layer_idx + 1), *args, **kwargs)


def changes_its_input(layer, run, hidden, *args, **kwargs):
    hidden.mul_(2.0)
    return run(hidden, *args, **kwargs)


def keeps_something(layer, run, hidden, *args, **kwargs):
    layer.seen = getattr(layer, "seen", 0) + 1
    return run(hidden * layer.seen, *args, **kwargs)


def hands_something_on(layer, run, hidden, *args, **kwargs):
    out = run(hidden + HANDED[-1] if HANDED else hidden, *args, **kwargs)
    HANDED[:] = [out]
    return out


def returns_more(layer, run, hidden, *args, **kwargs):
    out = run(hidden, *args, **kwargs)
    layer.more = out.mean()
    return out


HANDED: list = []
ODD = [looks_at_its_place, changes_its_input, keeps_something, hands_something_on, returns_more]


@pytest.mark.parametrize("odd", ODD)
def test_layers_that_do_more_than_their_tensors_say_are_all_traced(odd, monkeypatch):
    run = LlamaDecoderLayer.forward
    monkeypatch.setattr(
        LlamaDecoderLayer, "forward", lambda layer, *a, **k: odd(layer, lambda *x, **y: run(layer, *x, **y), *a, **k)
    )
    HANDED.clear()
    with pytest.raises(Exception) as problem:
        traced_by_kind(config("Llama", 3))
    assert isinstance(problem.value, LayersDiffer) or "LayersDiffer" in repr(problem.value.__context__), problem.value


def test_they_are_traced_whole_in_the_end(monkeypatch):
    run = LlamaDecoderLayer.forward

    def forward(layer, *args, **kwargs):
        return looks_at_its_place(layer, lambda *a, **k: run(layer, *a, **k), *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    fallen_back, whole = (trace(config("Llama", 3), torch.float32, whole=each) for each in (False, True))
    assert structure(fallen_back) == structure(whole)
