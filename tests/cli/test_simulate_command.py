"""`hpcdecode calibrate`, `hpcdecode simulate` and `hpcdecode plan`."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.planner import Choice, MeanRows, fastest
from hpcdecode.planning.profile import read
from hpcdecode.planning.servers import SERVING
from hpcdecode.schedule.limits import prefill_limit

BLOCK_TOKENS = 64  # of the demo model's KV cache
SIZES = ("--fixed", 20, 33, "--rows", 96, "--batch", 32, "--period", 8, "--lanes", 1, "--max-tokens", 33)


def test_a_profile_of_this_machine_drives_the_simulator(hpcdecode, tmp_path):
    result = hpcdecode("calibrate", "--model", "demo", "-o", "profile.json", "--passes", 1, "--dtype", "float32")
    assert result.returncode == 0, result.stderr
    profile = read(str(tmp_path / "profile.json"))
    cost = profile.cost
    prefill = cost.prefill_seconds_per_step + cost.prefill_seconds_per_pair
    attend = cost.attend_seconds_per_cached_token + cost.attend_seconds_per_sequence
    assert min(*cost.slice_seconds, *cost.logits_seconds_at, prefill, cost.append_seconds_per_prompt_token, attend) > 0
    assert (
        cost.layers == 5 and cost.shared_core_fraction == 1 and "1 x 32 at 64, 512 of prompts of 512" in profile.spread
    )
    one = ("--profile", "profile.json", "--r-ranks", 0, "--kv-memory", "64M")
    result = hpcdecode("simulate", "--model", "demo", *one, *SIZES, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["generated_tokens"] == 96 * 33 and found["peak_load_tokens"] == 32 * (20 + (32 + 8) // 2)
    assert found["seconds"] * 1.001 >= found["s_busy"] * found["seconds"] > 0
    assert found["s_busy"] + found["r_busy"] == pytest.approx(1, rel=1e-6)  # one process does one thing at a time
    result = hpcdecode("plan", "--model", "demo", "--profile", "profile.json", "--kv-memory", "64M", "--fixed", 20, 33)
    assert result.returncode == 0 and "bottleneck: " in result.stdout, result.stderr
    rows = [{"prompt_token_ids": [5] * 20, "max_tokens": 17}] * 300
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = ("generate", "rows.jsonl", "--model", "demo", "--profile", "profile.json", "--kv-memory", "64M")
    result = hpcdecode(*job, "--dtype", "float32")
    both_roles = Choice(capacity(result.stderr), 1, lanes=(1,), prefill_tokens=prefill_limit(False))
    plan = fastest(cost, MeanRows(20, 16), both_roles)
    assert result.returncode == 0, result.stderr
    batch = min(plan.batch, capacity(result.stderr) // BLOCK_TOKENS)  # the planner counts tokens, jobs whole blocks
    assert f"batch {batch}, period 1 of 16 steps, lanes 1," in result.stderr
    result = hpcdecode(*job, "--dtype", "bfloat16", "--overwrite")
    assert result.returncode == 2 and "5 layers float32 KV float32 1 ranks" in result.stderr


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "deepseek_v3"])
def test_a_profile_of_a_model_with_states_or_latents(hpcdecode, tmp_path, checkpoint, name):
    """It is measured, speaks of what a job holds, and chooses the sizes of one."""
    model = ("--model", checkpoint(name), "--dtype", "float32")
    result = hpcdecode("calibrate", *model, "-o", "profile.json", "--passes", 1)
    assert result.returncode == 0, result.stderr
    profile = read(str(tmp_path / "profile.json"))
    cost, unit = profile.cost, profile.unit(1)
    cached, sequence = cost.attend_seconds_per_cached_token, cost.attend_seconds_per_sequence
    assert cost.append_seconds_per_prompt_token > 0 and cached + sequence > 0
    assert unit.endless == (name == "mamba2") and not (unit.endless and cached)
    assert (unit.state_tokens > 0) == (name == "qwen3_next") and profile.tensor_parallel == [1]
    rows = [{"prompt_token_ids": [5] * 20, "max_tokens": 17}] * 300
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = hpcdecode("generate", "rows.jsonl", *model, "--profile", "profile.json", "--kv-memory", "64M")
    assert result.returncode == 0, result.stderr
    batch = int(re.search(r"batch (\d+), period 1 of 16 steps, lanes 1,", result.stderr)[1])
    assert batch * unit.held(20 + 17 / 2) <= capacity(result.stderr)


def test_a_profile_of_states_in_bfloat16_serves_no_job_with_others(hpcdecode, tmp_path, checkpoint):
    model = ("--model", checkpoint("mamba2"), "--dtype", "float32")
    states = ("--mamba-ssm-cache-dtype", "bfloat16")
    result = hpcdecode("calibrate", *model, *states, "-o", "profile.json", "--passes", 1)
    assert result.returncode == 0, result.stderr
    profile = read(str(tmp_path / "profile.json"))
    floats = [replace(shape, state_dtype="float32") for shape in profile.shapes]
    assert profile.state_dtype == "bfloat16" and profile.token_bytes < KvUnit.of(floats, "float32").token_bytes
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_token_ids": [5] * 20, "max_tokens": 3}))
    job = ("generate", "rows.jsonl", *model, "--profile", "profile.json", "--kv-memory", "64M")
    result = hpcdecode(*job, *states)
    assert result.returncode == 0, result.stderr
    result = hpcdecode(*job, "--overwrite")
    assert result.returncode == 2 and "KV float32 states float32 1 ranks: calibrate as it will run" in result.stderr
    simulated = ("simulate", *model[:2], "--profile", "profile.json", "--r-ranks", 0, *SIZES, "--kv-memory", "64M")
    result = hpcdecode(*simulated)
    assert result.returncode == 0, result.stderr
    result = hpcdecode(*simulated, "--mamba-ssm-cache-dtype", "float32")
    assert result.returncode == 2 and "float32: expected bfloat16, as profile.json was measured with" in result.stderr


def capacity(printed: str) -> int:
    """KV tokens of the topology's only rank."""
    return int(re.search(r"([\d,]+) tokens\n", printed)[1].replace(",", ""))


def test_rows_of_a_file_on_devices_by_their_data_sheets(hpcdecode, tmp_path):
    rows = [{"prompt": "The with statement", "max_tokens": 5 + i} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--prompts", "rows.jsonl", "--batch", 4, "--rate", 10, "--shards", 2, "--kv-memory", "1G")
    result = hpcdecode("simulate", "--model", "demo", *flags)
    assert result.returncode == 0, result.stderr
    shown = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert shown["generated tokens"].strip() == str(sum(row["max_tokens"] for row in rows))


@pytest.mark.parametrize("schedule", SERVING)
def test_rows_that_arrive_at_a_device_alone(capsys, schedule):
    from hpcdecode.cli import main

    rows = ("--rows", 200, "--mean", 40, 60, "--max-tokens", 128, "--rate", 500, "--seed", 3)
    device = ("--s-device", "2xa10", "--schedule", schedule, "--batch", 8, "--shards", 2, "--json")
    assert main(["simulate", "--model", "demo", *map(str, (*rows, *device))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 200 and found["generated_tokens"] > 200 and found["refused"] == 0
    assert found["latency_seconds"]["p99"] > found["latency_seconds"]["p50"] > 0
    assert found["s_busy"] + found["r_busy"] < 1.001


def test_a_picture(hpcdecode, tmp_path):
    pytest.importorskip("matplotlib")
    result = hpcdecode("simulate", "--model", "demo", *SIZES, "-o", "load.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--s-device", "a11"), "device: expected one of a10"),
        (("--batch", 1), "--batch: expected at least one sequence a lane (2), got 1"),
        (("--rate", -1), "--rate: expected a number > 0, got -1"),
        (("--s-ranks", 0, "--r-ranks", 0), "expected numbers of devices, one or more together, got 0 and 0"),
        (("--s-ranks", 0, "--r-ranks", 2, "--layout", "split"), "expected 1 or more S-ranks"),
        (("--s-ranks", 3, "--r-ranks", 2, "--pools", "own"), "expected 1 or more S-ranks, and as many R-ranks, got 3"),
        (("--schedule", "vllm", "--period", 4), "--period: expected none with --schedule vllm"),
        (("--profile", "absent.json"), "absent.json: expected a profile that hpcdecode calibrate wrote"),
    ],
)
def test_bad_input_is_said(capsys, flags, said):
    from hpcdecode.cli import main

    assert main(["simulate", "--model", "demo", *map(str, flags)]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_from_data_sheets(capsys):
    from hpcdecode.cli import main

    assert main(["plan", "--model", "demo", "--fixed", "128", "513", "--s-price", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("layout: ") and " --batch " in said and " --period 32 --lanes " in said
    assert "1 a10 replica" in said and "a million tokens: " in said and "int4: " in said
    assert main(["plan", "--model", "demo", "--r-ranks", "0"]) == 0
    assert capsys.readouterr().out.startswith("layout: 1 a10 replica: ")


def test_layouts_are_simulated(capsys):
    """Twice the replicas, twice the speed; S-ranks that share their R-ranks wait for these."""
    from hpcdecode.cli import main

    def speed(*flags):
        rows = ("--fixed", 20, 65, "--rows", 800, "--max-tokens", 65, "--batch", 16, "--json")
        assert main(["simulate", "--model", "demo", *map(str, (*rows, *flags))]) == 0
        return json.loads(capsys.readouterr().out)["tokens_per_second"]

    one, two = (speed("--layout", "replicas", "--s-ranks", n) for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.1)
    assert speed("--layout", "replicas", "--s-ranks", 1, "--r-ranks", 2) > 1.05 * one
    assert speed("--layout", "replicas", "--s-ranks", 0, "--r-ranks", 2) < two
    splits = ("--s-ranks", 2, "--r-ranks", 2, "--link", 10_000, "--latency", 0.01, "--layout", "split")
    shared, own = (speed(*splits, "--pools", pools) for pools in ("shared", "own"))
    assert shared == pytest.approx(own, rel=0.2)


ALONE = ("--model", "demo", "--s-ranks", "0", "--r-ranks", "1", "--kv-dtype", "float32", "--kv-memory", "3M")
TIER = ("--kv-swap", "host:9M@1G")


def test_tiers_are_simulated_and_planned(capsys):
    from hpcdecode.cli import main

    rows = ("--fixed", "40", "24", "--rows", "30")
    flags = ("--layout", "replicas", "--batch", "24", "--period", "1", "--schedule", "fluid", "--json")
    assert main(["simulate", *ALONE, *TIER, *rows, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generated_tokens"] == 30 * 24 and found["peak_load_tokens"] > 24 * 50
    assert found["swap_in_bytes"] > 9 << 20 and found["swap_out_bytes"] > 3 << 20
    assert main(["plan", *ALONE, *TIER, *rows]) == 0
    assert "schedule: --schedule " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (TIER, "--kv-swap: expected --admission optimistic or --schedule fluid"),
        ((*TIER, "--schedule", "fluid", "--kv-memory", "64K"), "expected --kv-memory of at least"),
        (("--kv-swap", "tape:1G", "--schedule", "fluid"), "expected host:SIZE or nvme:DIRECTORY:SIZE"),
    ],
)
def test_tiers_that_nothing_can_use_are_refused(capsys, flags, said):
    from hpcdecode.cli import main

    assert main(["simulate", *ALONE, "--layout", "replicas", *flags]) == 2
    assert said in capsys.readouterr().err
