"""Plans for models that need several ranks, from their config.json alone: sizes, what fits where, what is chosen."""

from __future__ import annotations

import json
import re

import pytest

from hpcdecode.cli import main
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.group_shape import member_bytes, smallest, tried
from hpcdecode.planning.hardware import device
from hpcdecode.planning.layer_work import dealt_heads
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.ranks.wishes import GroupShape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CONFIGS = {  # as published
    "llama-3-70b": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.1-405b": {
        **LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "vocab_size": 129280,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory that has one for each model, with its config.json alone."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def plan(models, capsys):
    """Return a function: what `hpcdecode plan` prints of a model on a machine."""

    def printed(model, *flags, rc=0):
        rows = ("--fixed", 200, 101, "--rows", 50_000)
        assert main(["plan", "--model", str(models / model), *map(str, (*flags, *rows))]) == rc
        return capsys.readouterr()[bool(rc)]

    return printed


@pytest.mark.parametrize(
    ("model", "billions", "active", "token_bytes", "heads"),
    [
        pytest.param("llama-3-70b", 70.6, 70.6, 2 * 80 * 2 * 1024, 8, marks=pytest.mark.full),
        pytest.param("llama-3.1-405b", 405.9, 405.9, 2 * 126 * 2 * 1024, 8, marks=pytest.mark.full),
        ("gpt-oss-120b", 116.8, 5.1, 2 * 36 * 2 * 512, 8),
        ("deepseek-v3", 671.0, 37.0, 2 * 61 * (512 + 64), 128),
    ],
)
def test_sizes_are_those_that_are_published(models, model, billions, active, token_bytes, heads):
    """Embeddings are as large as the logits' weights, and read for no step. Members share KV heads, or a latent."""
    size = ModelSize.from_directory(str(models / model))
    assert (size.layer_weights + 2 * size.head_weights) / 1e9 == pytest.approx(billions, rel=0.001)
    assert (size.active_weights() + size.head_weights) / 1e9 == pytest.approx(active, rel=0.02)
    assert size.kv_bytes_per_token() == token_bytes and set(dealt_heads(size.shapes)) == {heads}
    assert size.read_bytes(1) == pytest.approx(2 * size.active_weights())
    assert size.read_bytes(10_000) == pytest.approx(2 * size.layer_weights) == pytest.approx(size.layer_bytes)


@pytest.mark.parametrize(
    ("model", "tp", "batch", "products", "sums", "wire"),
    [
        ("llama-3-70b", 2, 1024, 103, 9, 30),
        ("llama-3-70b", 4, 2048, 103, 21, 30),
        ("gpt-oss-120b", 4, 4096, 45, 7, 14),
        ("gpt-oss-120b", 4, 8192, 47, 13, 27),
        ("deepseek-v3", 32, 4096, 32, 280, 49),
    ],
)
def test_costs_are_those_by_hand(models, model, tp, batch, products, sums, wire):
    """Milliseconds of two lanes on H100, 450 GB/s and 5 us on a node, 50 GB/s between nodes."""
    size = ModelSize.from_directory(str(models / model))
    cost = of_devices(size, device("h100"), device("epyc-9004"), 50e9, 5e-6, "bfloat16", GroupShape(tp, 1))
    lane = batch / 2
    latency = 2 * cost.layers * cost.sum_latency_seconds
    found = (
        cost.body_seconds(lane) + cost.logits_seconds(lane),
        cost.sum_seconds_per_token * lane + latency,
        cost.wire_seconds_per_token * lane,
    )
    assert [2e3 * seconds for seconds in found] == pytest.approx([products, sums, wire], abs=0.5)


def test_the_smallest_group_that_fits_is_found(models):
    h100, node = 72e9, 0.9 * (768 << 30)
    least = {
        (name, room): smallest(ModelSize.from_directory(str(models / name)), room)[:3]
        for name in CONFIGS
        for room in (h100, node)
    }
    assert least["llama-3-70b", h100] == (2, 1, 1) and least["llama-3-70b", node] == (1, 1, 1)
    assert least["llama-3.1-405b", h100] == (8, 2, 1) and least["llama-3.1-405b", node] == (2, 1, 1)
    assert least["gpt-oss-120b", h100] == (4, 1, 1)
    assert least["deepseek-v3", h100] == (32, 1, 1) and least["deepseek-v3", node] == (2, 1, 1)


def test_the_shapes_that_are_tried_fit(models):
    """The smallest that fit, and those of up to four times as many members."""
    size = ModelSize.from_directory(str(models / "llama-3-70b"))
    found = tried(size, 73e9, 8)
    assert found[0] == GroupShape(2, 1) and {shape.size for shape in found} == {2, 4, 8}
    assert GroupShape(1, 2) in found and GroupShape(2, 2) in found and GroupShape(3, 1) not in found
    assert all(member_bytes(size, shape) <= 73e9 for shape in found)
    assert tried(size, 73e9, 1) == []


def test_405b_on_cpu_nodes(plan):
    """Of eight nodes of 768 GiB two share the model; without a limit each could hold it."""
    nodes = ("--s-ranks", 0, "--r-device", "epyc-9004", "--r-ranks", 8)
    lines = plan("llama-3.1-405b", *nodes, "--node-memory", "768G").splitlines()
    assert re.match(r"layout: 4 epyc-9004 replicas of 2 (ranks|stages): \d+ tokens/s predicted \(--lay", lines[0])
    assert "bottleneck: S" in lines[1]
    assert re.search(r"a rank: 40\d\.\d of 811.7 GB of weights, 33\d\.\d for KV;", lines[2])
    assert "2 epyc-9004 replicas of 4 stages" in lines[3] and "4 S + 4 R, pools own, groups of 2 " in lines[3]
    assert "811.7 GB of weights do not fit into 90% of the 825 GB of epyc-9004" in lines[4]
    assert "or 2 with --tp 2 (408.0 GB each)" in lines[4]
    assert plan("llama-3.1-405b", *nodes).startswith("layout: 8 epyc-9004 replicas: ")


def test_a_shape_that_is_asked_for_is_evaluated(plan):
    machine = ("--s-device", "h100", "--s-ranks", 16, "--r-device", "epyc-9004", "--r-ranks", 16)
    said = plan("gpt-oss-120b", *machine, "--tp", 4, "--pp", 2, "--layout", "split", "--pools", "own")
    assert re.match(r"layout: 16 S \+ \d+ R, pools own, groups of 2 stages of 4 ranks: ", said)
    assert "--tp 4 --pp 2)" in said and "each group of 2 stages of 4 ranks with " in said and "(sums " in said
    said = plan("gpt-oss-120b", *machine, "--tp", 2, "--layout", "split", rc=2)
    assert "117.4 GB of weights with --tp 2 do not fit into 90% of the 80 GB of h100" in said
    assert "or 4 with --tp 4 (59.3 GB each)" in said
    said = plan("gpt-oss-120b", *machine, "--tp", 3, rc=2)
    assert "--tp 3: expected a divisor of the 8 KV heads" in said
    assert "--pp 40: expected 1 to 36, the layers of the model" in plan("gpt-oss-120b", *machine, "--pp", 40, rc=2)


def test_deepseek_needs_many_gpus(plan):
    few = ("--s-device", "h100", "--s-ranks", 16, "--r-ranks", 0)
    assert "needs one with 1,491 GB, or 32 with --tp 32 (43.7 GB each)" in plan("deepseek-v3", *few, rc=2)
    many = ("--s-device", "h100", "--s-ranks", 32, "--r-device", "epyc-9004", "--r-ranks", 64, "--layout", "split")
    said = plan("deepseek-v3", *many)
    assert re.match(r"layout: 32 S \+ \d+ R, groups of ", said) and "stages of 8 ranks" in said


def test_larger_groups_must_be_much_faster(plan):
    """A model that fits stays on one rank, unless its weights take so much room that a batch is small."""
    nodes = ("--s-ranks", 0, "--r-device", "epyc-9004", "--r-ranks", 8)
    lines = plan("llama-3-70b", *nodes).splitlines()
    assert lines[0].startswith("layout: 8 epyc-9004 replicas: ") and "8 epyc-9004 replicas of 2" not in lines[3]
    assert "4 epyc-9004 replicas of 2 " in lines[3]
    two = ("--s-device", "h200", "--s-ranks", 2, "--r-ranks", 0, "--tp", 2)
    assert plan("llama-3-70b", *two).startswith("layout: 1 h200 replica of 2 ranks: ")


def test_groups_are_simulated(models, capsys):
    machine = ("--s-device", "h100", "--s-ranks", 4, "--r-device", "epyc-9004", "--r-ranks", 8, "--layout", "split")
    rows = ("--fixed", 100, 33, "--rows", 1024, "--max-tokens", 33, "--batch", 256, "--json")

    def run(*flags, rc=0):
        command = ["simulate", "--model", str(models / "llama-3-70b"), *map(str, (*machine, *rows, *flags))]
        assert main(command) == rc
        return capsys.readouterr()[bool(rc)]

    found = {flags: json.loads(run(*flags)) for flags in (("--tp", 2), ("--tp", 4), ("--tp", 2, "--pp", 2))}
    assert all(one["generated_tokens"] == 1024 * 33 and one["s_busy"] <= 1 for one in found.values())
    assert found["--tp", 2]["peak_load_tokens"] == 2 * found["--tp", 4]["peak_load_tokens"]  # two groups
    assert "141.1 GB of weights" in run(rc=2)
    assert "expected multiples of 2 S-ranks and of 2 R-ranks, got 4 and 7" in run("--tp", 2, "--r-ranks", 7, rc=2)
    assert "--tp: expected a number > 0, got 0" in run("--tp", 0, rc=2)
