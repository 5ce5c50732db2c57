"""Which schedule a profile chooses for a job with tiers."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import h5py
import msgspec
import pytest

from hpcdecode.config import Job
from hpcdecode.errors import UserError
from hpcdecode.generate import generate
from hpcdecode.model import load_split
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.job_schedule import _choice
from hpcdecode.planning.lengths import of_file
from hpcdecode.ranks.layout import assign_roles
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.requests.params import SamplingParams
from hpcdecode.system.model_path import find_model
from tests.support.profiles import profile, write

KV = 4 * 128 * 3840  # bytes: four rows of two blocks
WEIGHTS, TOKENS = [1e-1, 1.1e-1], [1e-4, 1.0]  # seconds of products: of weights that are read, of tokens


@pytest.fixture(scope="module")
def shapes():
    return list(load_split(find_model("demo", {}), dtype="float32").attends)


@pytest.fixture
def job(tmp_path, shapes):
    """Return a function: a job of rows for which memory is short, by a profile with such products."""
    rows = [{"prompt_token_ids": [5 + (3 * i + j) % 900 for j in range(60)]} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def made(slices, ranks=1, **options):
        cost = Cost(5, [1, 512], slices, [1, 512], [1e-3, 3e-3], 1e-8, 1e-7, 1e-9, 0.0, 0.0, shared_core_fraction=1.0)
        found = msgspec.structs.replace(profile(ranks), cost=cost, shapes=options.pop("shapes", shapes))
        path = write(tmp_path / "profile.json", found)
        same = {"prompts": (str(tmp_path / "rows.jsonl"),), "dtype": "float32", "kv_memory": KV, "overwrite": True}
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        given = {"kv_swap": (f"host:{5 * KV}",), "choose_schedule": True, "profile": path, "params": params}
        output = str(tmp_path / "out.h5")
        return Job(**{"model": find_model("demo", {}), "output": output, **same, **given, **options}).check()

    return made


def team_of(count=1, wishes=None):
    ranks = [Rank(rank=i, host="a", cpus=[i], memory=1 << 30, weights=1 << 20) for i in range(count)]
    return Team(SimpleNamespace(rank=0), ranks, assign_roles(ranks, wishes or Wishes()))


@pytest.mark.parametrize(
    ("slices", "admission", "schedule"),
    [(WEIGHTS, "reserve", "fluid"), (TOKENS, "reserve", "fixed-f"), (TOKENS, "optimistic", "fixed-f")],
)
def test_rotation_is_chosen_where_weights_dominate(job, slices, admission, schedule):
    chosen, said = _choice(job(slices, admission=admission), team_of())
    other = {"fluid": "fixed-f", "fixed-f": "fluid"}[schedule]
    assert chosen == schedule and said.startswith(f"schedule: --schedule {schedule} --admission {admission}: ")
    assert "tokens/s of a group simulated" in said and f"; --schedule {other} --admission {admission} 0." in said


def test_what_cannot_rotate_is_not_chosen(job):
    four, on_gpu = team_of(4, Wishes(s_ranks=2)), team_of()
    on_gpu.ranks[0].kv_device = "cuda:0"
    for options, team, why in (
        ({"shapes": []}, team_of(), "does not say the shapes of layers: calibrate again"),
        ({"prompts": ("-",)}, team_of(), "can be read only once"),
        ({"kv_swap": (f"host:{KV}",)}, team_of(), "expected --kv-swap of more than 1.25 times --kv-memory"),
        ({"ranks": 4}, four, "R-ranks serve several S-ranks"),
        ({}, on_gpu, "what pages cost on GPUs is not measured"),
    ):
        schedule, said = _choice(job(WEIGHTS, **options), team)
        assert schedule == "fixed-f" and said.startswith("schedule: fixed-f, as ") and why in said


@pytest.mark.parametrize("slices", [WEIGHTS, TOKENS])
def test_a_job_runs_as_it_was_chosen(job, slices, caplog, tmp_path):
    with caplog.at_level(logging.INFO, "hpcdecode"):
        assert generate(job(slices)) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        chosen = json.loads(file.attrs["job"])
        tokens, moved = file["rows/token_ids"][:].tolist(), json.loads(file.attrs["summary"])["swap_in_bytes"]
    rotates = slices is WEIGHTS
    assert chosen["schedule"] == ("fluid" if rotates else "fixed-f") and (moved > 0) == rotates
    assert ("--kv-swap is not used" in caplog.text) == (not rotates)
    assert generate(job(slices, choose_schedule=False, kv_swap=(), kv_memory=1 << 28)) == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["rows/token_ids"][:].tolist() == tokens


def test_rows_that_choose_adapters_count(job, tmp_path):
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**json.loads(row), "lora": "a"}) for row in rows))
    assert _choice(job(WEIGHTS, adapters={"a": "a"}), team_of())[0] == "fluid"
    assert _choice(job(WEIGHTS), team_of()) == (
        "fixed-f",
        "schedule: fixed-f, as there are no rows that can be used",
    )
    assert len(of_file(str(tmp_path / "rows.jsonl"), find_model("demo", {}), 24)) == len(rows)


def test_a_choice_needs_a_profile_and_tiers(job):
    for missing in ({"profile": None}, {"kv_swap": ()}):
        with pytest.raises(UserError, match="choose_schedule: expected a profile and kv_swap"):
            job(WEIGHTS, **missing)


def test_a_profile_of_another_model_is_refused(job, shapes):
    other = [msgspec.structs.replace(shape, k_dim=2 * shape.k_dim) for shape in shapes]
    with pytest.raises(UserError, match="was measured with another model, demo, whose layers have other shapes than"):
        generate(job(WEIGHTS, shapes=other))
