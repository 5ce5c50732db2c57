"""A row alone is a row in company: random jobs over ranks, schedules and interruptions against each row by itself."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.differential.mixes import CONTEXT
from tests.differential.mutations import MUTATIONS
from tests.support.guessing import GUESSES
from tests.support.hybrids import HYBRIDS
from tests.support.models import build, save
from tests.support.mtp import add_mtp
from tests.support.tiny import tiny

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
RANKS = 4
SEEDS = (101, 102, 103, 104)  # of the 2,000 mixes


@pytest.fixture
def run_mixes(tmp_path: Path, mpiexec: Callable[..., subprocess.CompletedProcess]):
    """Run mixes in a world of so many ranks that share one core."""

    def launch(model: str, count: int, seed: int, *options: object, ranks: int = RANKS, seconds: int):
        core = str(min(os.sched_getaffinity(0)))  # threads that spin for each other would take most of the time
        script, before = "tests/differential/run_mixes.py", ("taskset", "-c", core)
        return mpiexec(ranks, script, tmp_path, model, count, seed, *options, timeout=seconds, before=before)

    return launch


def same(result: subprocess.CompletedProcess, mixes: int) -> None:
    assert result.returncode == 0, f"{result.stdout[:6000]}\n{result.stderr[-3000:]}"
    assert f"SAME {mixes} mixes" in result.stdout


def test_found_cases_and_3_mixes(run_mixes):
    same(run_mixes("demo=demo", 3, 100, "--corpus", *CORPUS, seconds=600), 3 + len(CORPUS))


def test_2_mixes_of_scores(run_mixes):
    same(run_mixes("demo=demo", 2, 200, "--score", "--rows", 8, seconds=300), 2)


def test_a_mix_of_adapters(run_mixes):
    """Rows without an adapter run alone without any; steps are fused, or are not."""
    mix = CORPUS[0].parent / "adapters/all_ways_on.json"
    result = run_mixes("demo=demo", 0, 0, "--adapters", "--corpus", mix, ranks=3, seconds=300)
    same(result, 1)
    assert int(re.search(r"(\d+) of them with adapters", result.stdout)[1]) > 0


ROUNDED = ("--weights", "int4", "--activations", "int8")


def test_2_mixes_of_rounded_activations(run_mixes):
    same(run_mixes("demo=demo", 2, 210, *ROUNDED, "--rows", 8, ranks=3, seconds=300), 2)


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--score",), ("--dtype", "bfloat16", "--weights", "int8"), ROUNDED])
def test_200_mixes_of_adapters(run_mixes, options):
    same(run_mixes("demo=demo", 200, 301, "--adapters", *options, seconds=7200), 200)


def chunked(folder: Path) -> Path:
    """Save a model some of whose layers attend in chunks, and have experts."""
    text = {"attention_chunk_size": 48, "floor_scale": 16, "attn_temperature_tuning": True, "moe_layers": [1]}
    text |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "layer_types": None, "no_rope_layers": None}
    text |= {"no_rope_layer_interval": 2, "vocab_size": 2048, "max_position_embeddings": CONTEXT}
    return save(tiny("llama4_text", **text), folder)


def test_a_mix_of_attention_in_chunks(run_mixes, tmp_path):
    model, mix = chunked(tmp_path / "model"), CORPUS[0].parent / "chunks/beyond_one.json"
    same(run_mixes(f"llama4={model}", 0, 0, "--corpus", mix, ranks=3, seconds=300), 1)


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--rotates", "host"), ("--kv-dtype", "int8"), ("--adapters",)])
def test_100_mixes_of_attention_in_chunks(run_mixes, tmp_path, options):
    model = chunked(tmp_path / "model")
    same(run_mixes(f"llama4={model}", 100, 401, *options, seconds=7200), 100)


@pytest.mark.parametrize(
    "how", [how if how in ("wild", "model") else pytest.param(how, marks=pytest.mark.full) for how in GUESSES]
)
def test_mixes_with_guesses(run_mixes, how):
    same(run_mixes("demo=demo", 2, 109, "--guesses", how, seconds=300), 2)


KEEPING = ("qwen3_next", "kimi_linear", "lfm2", "deepseek_v4", "minimax_m3")


@pytest.mark.parametrize("name", ["falcon_h1", *(pytest.param(name, marks=pytest.mark.full) for name in KEEPING)])
def test_mixes_with_guesses_of_models_with_states(run_mixes, tmp_path, name):
    model = build(name, tmp_path / "model")
    same(run_mixes(f"{name}={model}", 2, 111, "--guesses", "known", ranks=3, seconds=900), 2)


@pytest.mark.parametrize(
    "options", [(), *(pytest.param(o, marks=pytest.mark.full) for o in (("--tp", 2), ("--preempts", 0.3)))]
)
def test_mixes_with_guesses_of_a_layer_for_multi_token_prediction(run_mixes, tmp_path, options):
    model = build("deepseek_v3", tmp_path / "model")
    add_mtp(model)
    same(run_mixes(f"deepseek_v3={model}", 1, 112, "--guesses", "mtp", *options, seconds=900), 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [(), ("--preempts", 0.3, "--tiers", "host"), ("--kv-dtype", "int4"), ("--adapters",)]
)
def test_200_mixes_with_guesses(run_mixes, options):
    same(run_mixes("demo=demo", 200, 110, "--guesses", "known", *options, seconds=7200), 200)


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4"])
def test_mixes_of_kv_caches_in_few_bits_and_pages(run_mixes, kv_dtype):
    options = ("--kv-dtype", kv_dtype, "--rotates", "file")
    same(run_mixes("demo=demo", 100, 108, *options, seconds=7200), 100)


@pytest.mark.full
def test_200_mixes_of_scores(run_mixes):
    same(run_mixes("demo=demo", 200, 201, "--score", seconds=3600), 200)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_2000_mixes(run_mixes, seed):
    same(run_mixes("demo=demo", 500, seed, seconds=7200), 500)


@pytest.mark.full
def test_mixes_on_a_real_model(run_mixes, real_model):
    options = ("--chat", "--rows", 6)
    same(run_mixes(f"smol={real_model('smol')}", 100, 105, *options, seconds=10800), 100)


@pytest.mark.full
@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_5"])
def test_mixes_of_members_with_states(run_mixes, tmp_path, name):
    """Rows alone run on two members, too: bits of members depend on their number."""
    config = HYBRIDS[name]()
    config.vocab_size, config.max_position_embeddings = 2048, CONTEXT
    model = save(config, tmp_path / "model")
    same(run_mixes(f"{name}={model}", 40, 107, "--tp", 2, "--rows", 8, seconds=7200), 40)


@pytest.mark.full
@pytest.mark.parametrize("mutation", sorted(MUTATIONS))
def test_a_mutation_is_found(run_mixes, mutation):
    options = ["--adapters"] * (mutation == "adapters")
    result = run_mixes("demo=demo", 300, 106, "--mutation", mutation, *options, ranks=1, seconds=1800)
    assert result.returncode == 1, result.stdout[-2000:]
    print(f"{mutation}: found by mix", re.search(r"mix (\d+)", result.stdout)[1])
