"""Rows of four adapters and of none: every layout makes the rows of one process, and so does a job that goes on."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from tests.support.adapters import OTHERS, adapter, four

FLAGS = ("--max-tokens", 12, "--dtype", "float32", "--ignore-eos", "--logprobs", 0, "--kv-memory", "16M")
LAYOUTS = {
    "replicas": (3, ()),
    "split": (3, ("--layout", "split", "--s-ranks", 2)),
    "rotation": (3, ("--layout", "split", "--s-ranks", 2, "--route", "rotational", "--lanes", 2)),
    "prefill ranks": (3, ("--prefill-ranks", 1)),
    "stages": (2, ("--pp", 2)),
}
MEMBERS = {
    "members": (2, ("--tp", 2)),
    "members with R-ranks": (4, ("--tp", 2, "--layout", "split", "--s-ranks", 2)),
    "members of stages": (4, ("--tp", 2, "--pp", 2)),
}


@pytest.fixture(scope="module")
def job(checkpoint, tmp_path_factory):
    """The arguments of a job, and those of its adapters."""
    folder = tmp_path_factory.mktemp("job")
    adapters = four(checkpoint("llama2"), folder)
    rows = [
        {
            "prompt_token_ids": [7] * 140 * (i % 3 == 0) + [7 * i + j + 2 for j in range(5 + i % 7)],
            **({"lora": name} if name else {}),
        }
        for i, name in enumerate([*adapters, None] * 5)
    ]
    rows[3] = {
        "custom_id": "r",
        "url": "/v1/completions",
        "body": {"model": "one-layer", "prompt": rows[3]["prompt_token_ids"]},
    }
    rows.append({"prompt_token_ids": [5, 6], "lora": "sql"})
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lora = [text for name, path in adapters.items() for text in ("--lora", f"{name}={path}")]
    return ("generate", folder / "p.jsonl", "--model", checkpoint("llama2"), *FLAGS), lora


def rows_in(path):
    with h5py.File(path) as file:
        assert file.attrs["complete"]
        (reason,) = file["errors/reason"][:]
        assert reason == b'lora: expected one of all, attention, mlp, one-layer, got "sql"'
        return file["rows/token_ids"][:].tolist(), file["rows/logprobs"][:].tobytes()


@pytest.fixture(scope="module")
def one(job, forkserver, tmp_path_factory):
    from tests.support.commands import Command

    line, lora = job
    folder = tmp_path_factory.mktemp("one")
    result = Command(folder, forkserver)(*line, *lora, "-o", "one.h5")
    assert result.returncode == 3, result.stderr
    return rows_in(folder / "one.h5")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_makes_the_same_rows(name, hpcdecode, tmp_path, job, one):
    (line, lora), (ranks, flags) = job, LAYOUTS[name]
    result = hpcdecode(*line, *lora, *flags, "-o", "o.h5", ranks=ranks)
    assert result.returncode == 3, result.stderr
    assert rows_in(tmp_path / "o.h5") == one


@pytest.mark.parametrize("name", MEMBERS)
def test_members_make_the_same_tokens(name, hpcdecode, tmp_path, job, one):
    """Sums over members round in another way, so log probabilities differ a little."""
    (line, lora), (ranks, flags) = job, MEMBERS[name]
    result = hpcdecode(*line, *lora, *flags, "-o", "o.h5", ranks=ranks)
    assert result.returncode == 3, result.stderr
    (found, logprobs), (expected, of_one) = rows_in(tmp_path / "o.h5"), one
    assert found == expected
    np.testing.assert_allclose(*(np.frombuffer(x, np.float32) for x in (logprobs, of_one)), atol=1e-4)


def test_a_job_goes_on_with_its_adapters_alone(hpcdecode, tmp_path, job, one):
    line, lora = job
    assert hpcdecode(*line, *lora, "-o", "o.h5", "--limit", 9).returncode == 0
    for other in (lora[:-2], ["--lora", f"other={lora[1].partition('=')[2]}", *lora[2:]]):
        result = hpcdecode(*line, *other, "-o", "o.h5")
        assert result.returncode == 2 and "adapters" in result.stderr, result.stderr
    result = hpcdecode(*line, *lora, "-o", "o.h5")
    assert result.returncode == 3, result.stderr
    assert rows_in(tmp_path / "o.h5") == one


def test_adapters_that_no_row_chooses_are_warned_of(hpcdecode, job):
    line, lora = job
    result = hpcdecode("generate", "-p", "a", *line[2:], *lora[:4], "-o", "o.h5")
    assert result.returncode == 0, result.stderr
    assert "warning: no row that is left chooses an adapter, of all, attention: the model alone" in result.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--lora", "a="), "--lora/--lora-modules: expected the directory of an adapter, got 'a=' without one"),
        (("--lora", "a b=x"), "--lora NAME=DIR: expected a name of 1 to 200 letters, digits and signs"),
        (("--lora", "all=x"), "--lora/--lora-modules: expected names that differ, got 'all' twice"),
        (("--lora", "x", "--lora", "y"), "--lora/--lora-modules: expected one adapter without a name, got 'y' too"),
    ],
)
def test_refused(flags, expected, hpcdecode, job):
    line, lora = job
    result = hpcdecode(*line, *lora, *flags, "-o", "o.h5")
    assert result.returncode == 2 and expected in result.stderr, result.stderr


@pytest.mark.parametrize("name", OTHERS)
def test_members_of_other_models_have_their_parts_of_updates(name, hpcdecode, checkpoint, tmp_path):
    """Joined projections, weights that are stored turned with biases, and members that have all heads."""
    model = checkpoint(name)
    lora = [
        text
        for i, how in enumerate(OTHERS[name])
        for text in ("--lora", f"{i}={adapter(model, tmp_path / str(i), i, **how)}")
    ]
    rows = [{"prompt_token_ids": [9 * i + j + 2 for j in range(6 + i)], "lora": str(i % 2)} for i in range(6)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    experts = [(2, ("--tp", 2, "--ep"))] if "target_parameters" in OTHERS[name][0] else []
    for i, (ranks, more) in enumerate([(1, ()), (2, ("--tp", 2)), *experts]):
        result = hpcdecode("generate", "p.jsonl", "--model", model, *FLAGS, *lora, *more, "-o", f"{i}.h5", ranks=ranks)
        assert result.returncode == 0, result.stderr
        with h5py.File(tmp_path / f"{i}.h5") as file:
            found.append(file["rows/token_ids"][:].tolist())
    assert all(other == found[0] for other in found)
