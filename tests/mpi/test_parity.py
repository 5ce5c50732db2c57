"""Token parity with transformers' `generate`, for architectures of every kind, over worlds of 1 to 4 ranks."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.support.models import ARCHITECTURES, INDEXED
from tests.support.parity import make_case

# world : period F : lanes : partition, or replicas : overlap : schedule : exchange
SOME_RUNS = ("1:7:2", "2:1:1", "3:7:2:head:1", "4:7:2:request:3")
ALL_RUNS = (
    *(f"{world}:{period}:{lanes}" for world in (1, 2, 4) for period in (1, 7) for lanes in (1, 2)),
    *("3:7:3:head:2", "3:1:1:head:1", "4:7:2:request:4", *(f"{world}:7:2:replicas" for world in (2, 3, 4))),
)
CORNER_RUNS = (
    "2:7:2:pp2",
    "4:1:1:pp2-request",
    "1:1:1",
    "1:7:2",
    "2:7:1",
    "4:1:2",
    "3:7:3:head:2",
    "4:7:2:request:4",
    "3:7:1:replicas",
    "4:7:1:sharing",
    "3:7:3:rot2-request",
    "4:1:4:rot3-request:2",
    "4:7:2:rot2-head",
    "4:7:2:pre2-request:1:fifo",
)
WORLD_RUNS = SOME_RUNS[2:]  # by heads and by requests
# One of each kind of attention and of layers takes SOME_RUNS, the others WORLD_RUNS; a plain model and one of windows,
# sinks and experts, take every layout. In the whole matrix all take all. OTHERS are like those in what crosses ranks.
EVERY_KIND = ("llama3", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3")
OTHERS = ("gpt2", "llama2", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "minicpm3")
EVERY_LAYOUT = ("llama3", "gpt_oss")
SCHEDULE_RUNS = ("1:7:2:request:1:load-control", "4:7:2:request:1:fifo", "3:7:1:request:1:static")
COLLECTIVE_RUNS = ("4:7:2:request:1:fixed-f:collective", "3:1:1:head:2:fixed-f:collective")
GROUP_RUNS = ("2:7:1:tp2",)
PREFILL = ("3:7:2:pre1-request", "4:1:1:pre1-head")
ROTATIONS = ("3:7:3:rot2-request", "4:1:3:rot2-head:2")
ALL_GROUP_RUNS = (*GROUP_RUNS, "2:7:2:pp2", "4:1:2:tp2pp2", "4:7:2:tp2-request:2", "4:7:1:pp2-request", "4:7:1:tp4")
EXPERT_RUNS = ("2:7:2:ep2", "3:1:1:ep3")  # three members have unequally many experts
MOE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
LINE = re.compile(r"PARITY (\S+) (\S+) (\d+) rows differ")


def differing(mpiexec, cases, dtype, expect, runs, script=("run_parity.py",)):
    """Rows that differ from what is expected, by case and run."""
    file, *own = script
    result = mpiexec(4, f"tests/mpi/{file}", *own, dtype, expect, ",".join(runs), *cases, timeout=3000)
    found = defaultdict(dict)
    for name, run, rows in LINE.findall(result.stdout):
        found[name][run] = int(rows)
    assert len(found) == len(cases), (result.returncode, result.stdout[-2000:], result.stderr[-4000:])
    return found


@pytest.fixture(scope="module")
def float32(mpiexec, tmp_path_factory):
    directory = tmp_path_factory.mktemp("float32")
    names = [name for name in ARCHITECTURES if name not in OTHERS]
    cases = {name: make_case(name, directory, rows=8, new_tokens=10) for name in names}
    given = [f"{case}={','.join(runs_of(name))}" for name, case in cases.items()]
    return differing(mpiexec, given, "float32", "transformers", SOME_RUNS)


def runs_of(name):
    runs = SOME_RUNS if name in EVERY_KIND else WORLD_RUNS
    groups = ALL_GROUP_RUNS + ROTATIONS + PREFILL if name in EVERY_LAYOUT else GROUP_RUNS
    return runs + groups + EXPERT_RUNS * (name in MOE)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in OTHERS])
def test_tokens_equal_those_of_transformers(float32, name):
    assert float32[name] == dict.fromkeys(runs_of(name), 0)


CHOOSING = ("deepseek_v32", "deepseek_v4", "minimax_m3")  # tokens, entries and blocks


@pytest.mark.parametrize(
    "names", [CHOOSING, pytest.param([name for name in INDEXED if name not in CHOOSING], marks=pytest.mark.full)]
)
def test_tokens_that_indexers_choose_for_equal_those_of_transformers(mpiexec, tmp_path, names):
    """One R-rank or two, replicas, members, stages, and a rank that only prefills."""
    cases = {name: make_case(name, tmp_path, rows=4, new_tokens=10) for name in names}
    runs = ("2:7:2", "3:7:2:request:2", "2:7:1:tp2", "3:7:2:pre1-request")
    found = differing(mpiexec, cases.values(), "float32", "transformers", runs)
    assert found == {name: dict.fromkeys(runs, 0) for name in names}


def test_tokens_by_biased_scores_equal_those_of_transformers(mpiexec, tmp_path):
    """Biases by learned profiles and by slopes, and sinks of tokens; behind a prefix."""
    names = ("inkling2_loop", "bloom")
    cases = [make_case(name, tmp_path, rows=6, new_tokens=10, common=130) for name in names]
    runs = (
        "1:7:2",
        "4:7:2:request:3",
        "2:7:1:pp2",
        "2:7:1:tp2",
        "4:7:2:tp2-request:2",
        PREFILL[0],
    )
    found = differing(mpiexec, cases, "float32", "transformers", runs)
    assert found == {name: dict.fromkeys(runs, 0) for name in names}


def test_tokens_behind_a_shared_prefix_equal_those_of_transformers(mpiexec, tmp_path):
    case = make_case("llama3", tmp_path, rows=8, new_tokens=10, common=200)
    runs = (
        *SOME_RUNS,
        *SCHEDULE_RUNS,
        *COLLECTIVE_RUNS,
        "3:7:2",
        "3:7:2:replicas",
        *ALL_GROUP_RUNS,
        *ROTATIONS,
        *PREFILL,
    )
    assert differing(mpiexec, [case], "float32", "transformers", runs) == {"llama3": dict.fromkeys(runs, 0)}


@pytest.mark.parametrize(
    "names", [("qwen3_next", "falcon_h1", "qwen4_exp_text"), pytest.param(("mamba", "lfm2"), marks=pytest.mark.full)]
)
def test_tokens_of_hybrids_equal_those_of_transformers(mpiexec, tmp_path, names):
    """The delta rule, Mamba-2 beside attention, and embeddings of several tokens together; behind a prefix.

    And Mamba without attention, and short convolutions.
    """
    cases = [make_case(name, tmp_path, rows=6, new_tokens=10, common=130) for name in names]
    runs = (
        "1:7:2",
        "3:1:2",
        "4:7:2:request:3",
        "2:7:2:replicas",
        "2:7:1:pp2",
        "3:7:3:rot2-request",
        "2:7:1:tp2",
        PREFILL[0],
    )
    found = differing(mpiexec, cases, "float32", "transformers", runs)
    assert found == {name: dict.fromkeys(runs, 0) for name in names}


def test_tokens_of_members_with_states_equal_those_of_transformers(mpiexec, tmp_path):
    """The delta rule, and Mamba-2 with a norm over all heads: states with members' R-ranks, and with their heads.

    And those of embeddings of several tokens, which all members have.
    """
    names = ("qwen3_next", "granitemoehybrid", "qwen4_exp_text")
    cases = [make_case(name, tmp_path, rows=6, new_tokens=10, common=130) for name in names]
    runs = ("2:1:2:tp2", "4:7:2:tp2-request:2", "4:7:1:tp2-head", "4:7:2:tp2pp2")
    found = differing(mpiexec, cases, "float32", "transformers", runs)
    assert found == {name: dict.fromkeys(runs, 0) for name in names}


def test_tokens_of_members_with_states_depend_on_their_number_alone(mpiexec, tmp_path):
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    case = make_case("granitemoehybrid", tmp_path, rows=6, new_tokens=10, common=130, n=3, **sampling)
    runs = ("2:7:1:tp2", "4:1:2:tp2", "4:7:2:tp2-request:3", "4:7:1:tp2-head")
    assert differing(mpiexec, [case], "bfloat16", "first-run", runs) == {"granitemoehybrid": dict.fromkeys(runs, 0)}


def test_samples_of_hybrids_are_the_same_for_every_world(mpiexec, tmp_path):
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    case = make_case("granitemoehybrid", tmp_path, rows=6, new_tokens=10, common=130, n=3, **sampling)
    runs = ("1:1:1", "3:7:2:request:2", "3:7:1:head", "4:7:2:sharing")
    assert differing(mpiexec, [case], "float32", "first-run", runs) == {"granitemoehybrid": dict.fromkeys(runs, 0)}


def test_tokens_over_latents_behind_a_shared_prefix_equal_those_of_transformers(mpiexec, tmp_path):
    cases = [make_case(name, tmp_path, rows=8, new_tokens=10, common=200) for name in ("deepseek_v3", "minicpm3")]
    runs = (
        "1:7:2",
        "3:7:2",
        "3:7:3:head:2",
        "3:7:2:replicas",
        "4:7:2:tp2-request:2",
        "3:1:1:head:2:fixed-f:collective",
    )
    assert differing(mpiexec, cases, "float32", "transformers", runs) == {
        case.name: dict.fromkeys(runs, 0) for case in cases
    }


def test_bfloat16_tokens_over_latents_are_the_same_for_every_world(mpiexec, tmp_path):
    cases = [make_case(name, tmp_path, rows=8, new_tokens=10) for name in ("deepseek_v2", "minicpm3")]
    runs = ("1:7:2", "3:7:2", "3:7:2:head:2", "3:7:2:replicas", "2:7:2:request:4")
    found = differing(mpiexec, cases, "bfloat16", "same-schedule", runs)
    assert all(set(own.values()) == {0} for own in found.values()), found


@pytest.mark.parametrize("links", ["staged", "direct"])
def test_tokens_of_emulated_devices_equal_those_of_transformers(mpiexec, tmp_path, links):
    case = make_case("llama3", tmp_path, rows=4, new_tokens=8, common=100)
    runs = ("1:7:2", "4:7:2:request:3", "3:7:2:head:1", "4:7:3:rot2-request:2", "4:1:4:rot3-request", *PREFILL)
    runs += COLLECTIVE_RUNS
    assert differing(mpiexec, [case], "float32", "transformers", runs, ("run_devices.py", links)) == {
        "llama3": dict.fromkeys(runs, 0)
    }


def test_tokens_over_latents_and_states_of_emulated_devices_equal_those_of_transformers(mpiexec, tmp_path):
    """Beside an R-rank on its CPUs. A device has latents, by kernels, and states, by torch's operations, at once."""
    names = ("deepseek_v2", "deepseek_v3", "kimi_linear", "qwen3_next")
    cases = [make_case(name, tmp_path, rows=4, new_tokens=8, common=100) for name in names]
    runs = ("1:7:2", "4:7:2:request:3", "3:7:2:head:1")
    found = differing(mpiexec, cases, "float32", "transformers", runs, ("run_devices.py", "staged"))
    assert found == dict.fromkeys(names, dict.fromkeys(runs, 0))
    found = differing(mpiexec, cases[1:2], "float32", "transformers", runs[1:2], ("run_devices.py", "torch"))
    assert found == {names[1]: {runs[1]: 0}}


@pytest.mark.parametrize("runs", [CORNER_RUNS, pytest.param(ALL_RUNS, marks=pytest.mark.full)], ids=["corners", "all"])
def test_sampled_tokens_are_the_same_for_every_world_period_and_lane_count(mpiexec, tmp_path, runs):
    sampling = {"temperature": 0.9, "top_k": 100, "top_p": 0.95, "seed": 5}
    case = make_case("llama3", tmp_path, rows=8, new_tokens=10, common=200, n=3, **sampling)
    assert differing(mpiexec, [case], "float32", "first-run", runs) == {"llama3": dict.fromkeys(runs, 0)}


def test_bfloat16_tokens_are_the_same_for_every_world(mpiexec, tmp_path):
    cases = [make_case(name, tmp_path, rows=8, new_tokens=10) for name in ("llama3", "gemma2")]
    runs = (
        *SOME_RUNS,
        "2:7:2",
        "1:1:1",
        "2:7:2:replicas",
        "4:7:2:sharing",
        "3:7:2:rot2-request",
        *COLLECTIVE_RUNS,
        PREFILL[0],
    )
    found = differing(mpiexec, cases, "bfloat16", "same-schedule", runs)
    assert all(set(own.values()) == {0} for own in found.values()), found


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "expect"), [("float32", "transformers"), ("bfloat16", "same-schedule")])
def test_the_whole_matrix(mpiexec, tmp_path, dtype, expect):
    cases = [make_case(name, tmp_path) for name in ARCHITECTURES]
    found = differing(mpiexec, cases, dtype, expect, ALL_RUNS)
    assert found == {name: dict.fromkeys(ALL_RUNS, 0) for name in ARCHITECTURES}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_members_depend_on_their_number_alone(mpiexec, tmp_path, dtype):
    sampling = {"temperature": 0.9, "top_k": 100, "top_p": 0.95, "seed": 5}
    case = make_case("llama3", tmp_path, rows=8, new_tokens=10, common=200, n=2, **sampling)
    runs = ("2:7:1:tp2", "2:1:2:tp2", "4:7:2:tp2", "4:7:2:tp2-request:3", "4:7:1:tp2-head", "4:7:2:tp2pp2")
    assert differing(mpiexec, [case], dtype, "first-run", runs) == {"llama3": dict.fromkeys(runs, 0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_members_with_whole_experts_depend_on_their_number_alone(mpiexec, tmp_path, dtype):
    case = make_case("qwen3_moe", tmp_path, rows=8, new_tokens=10, n=2, temperature=0.9, seed=5)
    runs = ("2:7:1:ep2", "2:1:2:ep2", "4:7:2:ep2-request:3", "4:7:2:ep2pp2")
    assert differing(mpiexec, [case], dtype, "first-run", runs) == {"qwen3_moe": dict.fromkeys(runs, 0)}
