"""Sizes that are given or follow from a job, against the model's context and what a host has."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest

from hpcdecode import LLM
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.config import EngineOptions
from hpcdecode.engine import room
from hpcdecode.engine.setup import check_kv_dtype, runs_indexers
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import choose
from hpcdecode.system import memory


def prompts(count, max_tokens, length=10):
    return [Prompt(i, str(i), [1] * length, SamplingParams(max_tokens=max_tokens)) for i in range(count)]


@pytest.mark.parametrize(
    ("context", "capacity", "longest"), [(8192, 1 << 20, 8192), (None, 5000, 5000), (8192, 500, 500)]
)
def test_steps_end_with_the_context_and_the_kv_cache(context, capacity, longest):
    batch, period, steps = choose(None, None, prompts(300, 1_000_000), False, 1, capacity, context)
    assert steps == longest - 10 - 1 and period == max(steps // 16, 1) and batch >= 1
    assert choose(None, None, prompts(300, 64), False, 1, capacity, context)[2] == 63


def team(r_ranks):
    rank = [Rank(rank=0, host="a", cpus=[0], role="S")]
    rank += [Rank(rank=i + 1, host="a", cpus=[0], role="R") for i in range(r_ranks)]
    return Team(None, [*rank, Rank(rank=9, host="b", cpus=[0], role="R")])


@pytest.mark.parametrize("r_ranks", [1, 2, 4])
def test_kv_memory_of_all_r_ranks_of_a_host_is_less_than_the_host_has(r_ranks):
    each, held = memory.total_bytes() // r_ranks, [0] * (r_ranks + 2)
    small, large = (EngineOptions(model="m", kv_memory=n) for n in (each - (1 << 20), each + (1 << 20)))
    room._require_host(small, team(r_ranks), held)
    with pytest.raises(UserError, match=rf"--kv-memory: .* each of {r_ranks} R-ranks on a"):
        room._require_host(large, team(r_ranks), held)
    with pytest.raises(UserError, match="--kv-memory: "):  # weights lie there, too
        room._require_host(small, team(r_ranks), [2 << 20 << r_ranks, *held[1:]])
    room._require_host(small, team(r_ranks), [*held[:-1], 1 << 50])  # those of another host do not


def test_a_limit_of_addresses_counts():
    assert memory.address_space_headroom() is None and memory.anonymous_bytes() > 1 << 20
    limit = 1 << 42
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        assert 0 < memory.address_space_headroom() < limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))


@pytest.mark.parametrize("flag", ["batch", "period", "lanes", "prefill_tokens", "overlap"])
def test_sizes_without_sense_are_refused_by_name(flag):
    with pytest.raises(
        UserError, match=rf"--{flag.replace('_', '-')}: expected an integer in \[1, \d+\], got 1000000000"
    ):
        EngineOptions(model="m", **{flag: 10**9}).check()


@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
def test_two_data_types_for_values_in_keys_are_refused(kv_dtype):
    own, latent = LayerShape(2, 8, 8, 4, 0.3), LayerShape(1, 40, 32, 4, 0.3, latent=True)
    check_kv_dtype(kv_dtype, [own])
    for narrow in (None, "int8", "bfloat16"):
        check_kv_dtype(narrow, [own, latent])
    with pytest.raises(UserError, match=f"--kv-dtype {kv_dtype}: expected one of float32, float16, bfloat16, int8"):
        check_kv_dtype(kv_dtype, [own, latent])


@pytest.mark.parametrize(
    ("options", "runs"),
    [({}, True), ({"prefill_ranks": 1}, True), ({"partition": "head"}, False), ({"route": "rotational"}, False)],
)
def test_indexers_choose_where_all_that_takes_the_choice_is_together(options, runs):
    assert runs_indexers(EngineOptions(model="m", **options), team(2)) is runs
    assert runs_indexers(EngineOptions(model="m", partition="head"), team(0))  # one R-rank has all heads


def test_a_model_with_latents_says_so_to_a_job(checkpoint):
    """int8 is taken, int4 is refused by name."""
    folder = str(checkpoint("deepseek_v3"))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with pytest.raises(UserError, match="whose attention runs over latents"):
        LLM(folder, kv_dtype="int4").generate(["a b c"], params, use_tqdm=False)
    (made,) = LLM(folder, kv_dtype="int8", dtype="bfloat16").generate(["a b c"], params, use_tqdm=False)
    assert len(made.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("kv_on_gpu", "s_ranks", "free", "expected"), [(0, 1, 40, 5), (0, 2, 40, 2.5), (0, 1, 4, 1), (1, 1, 40, 1)]
)
def test_prefixes_have_an_eighth_of_what_a_gpu_has_free(monkeypatch, kv_on_gpu, s_ranks, free, expected):
    """Shared with other S-ranks there; beside a KV cache, which took its share before, a GiB."""
    monkeypatch.setattr(room.torch.cuda, "mem_get_info", lambda _device: (free << 30, 80 << 30))
    on_gpu = {"host": "a", "cpus": [0], "device": "cuda:0", "gpus": ["a"]}
    ranks = [Rank(rank=i, role="S", **on_gpu) for i in range(s_ranks)]
    ranks += [Rank(rank=9, role="R", kv_device="cuda:0", **on_gpu)] * kv_on_gpu
    found = room.prefix_bytes(EngineOptions(model="m"), Team(SimpleNamespace(rank=0), ranks), None)
    assert found == expected * (1 << 30)
