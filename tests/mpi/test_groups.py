"""Groups of S-ranks on the command line: what is chosen and printed, what is refused, and how their jobs end."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.support.commands import rank_of
from tests.support.long_jobs import end, finished, wait_for_rows
from tests.support.worlds import FLAGS, PROMPTS, WEIGHTS_MIB, contents

TP_HOME, PP_STAGE = (("--tp", 2), 0), (("--pp", 2), 1)


@pytest.mark.parametrize(
    ("ranks", "flags", "said"),
    [
        (2, ("--tp", 2), "layout: one model of 2 ranks, each rank with both roles"),
        (4, ("--tensor-parallel-size", 2), "layout: 2 replicas of 2 ranks, each rank with both roles"),
        (2, ("--pipeline-parallel-size", 2), "layout: one model of 2 stages, each rank with both roles"),
        (4, ("--tp", 2, "--s-ranks", 2, "--partition", "head"), "layout: 2 S (groups of 2 ranks) + 2 R"),
        (5, ("--s-ranks", 3, "--route", "rotational"), "layout: 3 S (groups of 3 copies in rotation) + 2 R"),
        (6, ("--s-ranks", 4, "--tp", 2, "--route", "rotational"), "(groups of 2 copies in rotation, of 2 ranks each)"),
    ],
)
def test_a_group_makes_the_rows_of_one_process(hpcdecode, tmp_path, alone, ranks, flags, said):
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, *flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert said in result.stderr
    rows, topology, _ = contents(tmp_path / "out.h5")
    assert rows == alone[0] and len(topology) == ranks


@pytest.mark.parametrize(
    ("ranks", "flags", "problem"),
    [
        (1, ("--tp", 2), "--tp 2: the world has 1 rank"),
        (1, ("--pp", 2), "--pp 2: the world has 1 rank"),
        (3, ("--tp", 2), "--tp 2: expected a number of ranks that is a multiple of 2"),
        (3, ("--tp", 2, "--layout", "split"), "expected multiples of 2 S-ranks and of 2 R-ranks"),
        (2, ("--route", "rotational"), "the world has 2 ranks, which leaves no R-rank"),
        (3, ("--route", "rotational", "--pp", 2), "whole copies of the model take turns; got --layout split, --pp 2"),
        (4, ("--route", "rotational", "--layout", "replicas"), "got --layout replicas"),
        (1, ("--route", "rotational"), "--route rotational: the world has 1 rank"),
        (3, ("--route", "rotational", "--exchange", "collective"), "expected --exchange messages or auto"),
        (2, ("--tp", 0), "--tp: expected an integer >= 1, got 0"),
        (6, ("--pp", 6), "--pp 6: expected 1 to 5, the layers of the model, got 6"),
    ],
)
def test_groups_that_cannot_be_are_refused(hpcdecode, ranks, flags, problem):
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS, *flags, ranks=ranks)
    assert result.returncode == 2 and problem in result.stderr, result.stderr


def test_members_send_rows_of_their_own_experts_alone(hpcdecode, checkpoint, tmp_path):
    flags = ("--model", checkpoint("qwen3_moe"), "--max-tokens", 8, "--dtype", "float32", "--ignore-eos")
    rows = ({"prompt_token_ids": [5 + (i * 7 + j) % 400 for j in range(4 + i)]} for i in range(12))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = {}
    for ranks, own in ((1, ()), (2, ("--tp", 2)), (2, ("--tp", 2, "--ep"))):
        result = hpcdecode("generate", "prompts.jsonl", "-o", "out.h5", "--overwrite", *flags, *own, ranks=ranks)
        assert result.returncode == 0, result.stderr
        found, _, summary = contents(tmp_path / "out.h5")
        tokens[own], whole = found["token_ids"], summary["whole_sum_bytes"]
        if "--ep" not in own:
            assert summary["sum_bytes"] == whole and (whole > 0) == (ranks > 1)
            assert not any(summary["expert_choices"]) and "experts:" not in result.stderr
    assert len(set(map(str, tokens.values()))) == 1
    assert "experts: each whole on one of 2 ranks; in 2 of 6 sums a step" in result.stderr
    assert "of the routers' choices on a rank" in result.stderr
    choices = summary["expert_choices"]
    computed, needed = sum(range(4, 16)) + 12 * 7, 12 * 8  # by layer 0, and by layer 2, of which logits are needed
    assert len(choices) == 2 and sum(choices) == 2 * (computed + needed) and min(choices) > 0  # 2 experts a token
    assert whole / 2 < summary["sum_bytes"] < whole


def test_weights_that_are_too_large_for_a_process_are_refused(hpcdecode, tmp_path):
    hpcdecode.environment["SLURM_MEM_PER_NODE"] = str(int(WEIGHTS_MIB * 0.8))
    result = hpcdecode("generate", PROMPTS, "-o", "out.h5", *FLAGS)
    assert result.returncode == 2 and "add --tp 2" in result.stderr and "--pp 2" in result.stderr, result.stderr
    assert not (tmp_path / "out.h5").exists()


@pytest.mark.parametrize("flags", [("--tp", 2), pytest.param(("--pp", 2), marks=pytest.mark.full)])
def test_a_signal_drains_a_group_and_another_layout_goes_on(hpcdecode, long_job, tmp_path, flags):
    process = hpcdecode.start(*long_job, *flags, ranks=2)
    wait_for_rows(tmp_path / "out.h5", process)
    rank_of(process, 0).send_signal(signal.SIGTERM)
    code, err = end(process, 60)
    assert code == 128 + signal.SIGTERM and "the same command goes on" in err, err
    before, complete = finished(tmp_path / "out.h5")
    assert before and not complete
    process = hpcdecode.start(*long_job, ranks=2)
    wait_for_rows(tmp_path / "out.h5", process, more_than=len(before))
    rank_of(process, 0).send_signal(signal.SIGTERM)
    end(process, 60)
    after, _ = finished(tmp_path / "out.h5")
    assert len(after) > len(before) and all(after[line] == tokens for line, tokens in before.items())


@pytest.mark.parametrize(("flags", "rank"), [(("--tp", 2), 1), (("--pp", 2), 0)])
def test_a_killed_member_ends_the_others(hpcdecode, long_job, tmp_path, flags, rank):
    process = hpcdecode.start(*long_job, *flags, ranks=2)
    wait_for_rows(tmp_path / "out.h5", process)
    rank_of(process, rank).kill()
    code, _ = end(process, 20)
    rows, complete = finished(tmp_path / "out.h5")
    assert code != 0 and rows and not complete


@pytest.mark.parametrize(
    ("flags", "rank"),
    [(("--tp", 2), 1), *(pytest.param(flags, rank, marks=pytest.mark.full) for flags, rank in (TP_HOME, PP_STAGE))],
)
def test_a_member_that_hangs_is_named(hpcdecode, long_job, tmp_path, flags, rank):
    process = hpcdecode.start(*long_job, *flags, "--stall-timeout", 5, ranks=2)
    wait_for_rows(tmp_path / "out.h5", process)
    rank_of(process, rank).send_signal(signal.SIGSTOP)
    code, err = end(process, 5 + 10)
    (said,) = [line for line in err.splitlines() if "stalled" in line]
    assert code != 0 and f"rank {rank} on {os.uname().nodename} stalled: no sign of life for " in said
